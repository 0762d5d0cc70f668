"""Native CPU kernels in C++ behind a plain C interface: `build` compiles `native/`, `library` loads it."""
