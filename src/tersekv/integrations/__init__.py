"""tersekv inside other frameworks. Each module needs its framework installed and is imported by its own name."""
