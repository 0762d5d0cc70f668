#!/usr/bin/env bash
# Packs one release of Triton for a machine without a network: what compiles for NVIDIA GPUs and runs there, nothing else.
#
#     scripts/pack_triton.sh 3.9.0 3.12 FOLDER      writes FOLDER/triton-3.9.0.tar.xz.00, .01 … of less than 60 MiB
#
# There, outside the working tree:
#
#     mkdir -p "$THERE" && cat FOLDER/triton-3.9.0.tar.xz.* | tar -xJ -C "$THERE"
#     PYTHONPATH="$THERE:src" python -m tersekv.cli.main doctor
set -euo pipefail
version=$1 python=$2 folder=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version "$python" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --dest "$work" "triton==$version"
python3 -m zipfile -e "$work"/triton-*.whl "$work/here"
cd "$work/here"
chmod +x triton/backends/nvidia/bin/* # not kept by the unpacking
strip --strip-unneeded triton/_C/libtriton.so
# Profiling, AMD's libraries, and tools that no launch asks for. Which ptxas a chip gets differs between releases: both
# stay. AMD's Python stays too, since Triton imports every backend that an installed distribution names.
rm -rf triton/profiler triton/_C/libproton.so triton/backends/amd/lib triton/backends/amd/include \
    triton/backends/nvidia/lib/cupti* triton/backends/nvidia/bin/nvdisasm triton/backends/nvidia/bin/cuobjdump
find . -name "*.pyi" -delete
tar -cf - . | xz -T0 -6 | split -b 59M -d - "$work/triton-$version.tar.xz."
cd - >/dev/null
mkdir -p "$folder"
rm -f "$folder/triton-$version.tar.xz."*
mv "$work/triton-$version.tar.xz."* "$folder/"
ls -l "$folder"
