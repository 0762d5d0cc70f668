"""Native kernels for CPUs, in C++ behind a plain C interface: `native/` is compiled by `build`, loaded by `library`."""
