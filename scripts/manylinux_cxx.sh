#!/bin/sh
# The C++ compiler, for a library that glibc 2.28 and newer can load, though it is compiled beside a newer one.
exec "${TERSEKV_CXX:-c++}" -include "$(dirname "$0")/manylinux.h" "$@"
