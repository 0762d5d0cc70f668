#!/usr/bin/env bash
# Packs vLLM or SGLang for a machine without a network that has PyTorch and the usual packages: what an engine imports on
# one Hopper GPU or several. Left out of vLLM: FlashAttention 2, the server in Rust, kernels for Blackwell and for sparse
# attention; of SGLang: its FlashAttention 3 (340 MB), kernels for Blackwell, image and video generation.
#
#     scripts/pack_engine.sh vllm 0.26.0 3.12 FOLDER [MORE]      writes FOLDER/vllm-0.26.0.tar.xz.00 to .02, 40 MB each
#     scripts/pack_engine.sh sglang 0.5.23 3.12 FOLDER
#
# MORE: further requirements, such as flashinfer-python==0.6.14, which then compiles its kernels there.
#
# There, outside the working tree, all parts at once or one after the other:
#
#     mkdir -p "$THERE" && cat FOLDER/vllm-0.26.0.tar.xz.* | tar -xJ -C "$THERE"
#     PYTHONPATH="$THERE:src" python benchmarks/vllm_serving.py …         of SGLang benchmarks/sglang_speed.py
#
# An engine finds a plugin by the entry points of an installed distribution: the archive brings tersekv's, without its code.
set -euo pipefail
engine=$1 version=$2 python=$3 folder=$4
shift 4
tree=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
platforms=$(printf -- '--platform manylinux_2_%s_x86_64 ' 5 12 17 24 27 28 31 34 35)
# shellcheck disable=SC2086
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version "$python" --implementation cp $platforms \
    --platform manylinux2014_x86_64 --dest "$work" -r "$tree/scripts/pack_$engine.txt" "$engine==$version" "$@"
python3 - "$work" "$tree" <<'PYTHON'
import re
import sys
import zipfile
from pathlib import Path
import tomllib
work, tree = map(Path, sys.argv[1:])
here = work / "here"
left_out = re.compile(
    r"vllm/(vllm-rs|_flashmla|_qutlass|_rust_|third_party/(deep_gemm|fmha_sm100)/|vllm_flash_attn/_vllm_fa2)"
    r"|vllm/entrypoints/serve/instrumentator/static/|vllm/.*\.(h|hpp|cuh|inl)$|mistral_common/data/|pycountry/locales/|.*\.pyi$"
    r"|sgl_kernel/(flash_ops|infllm_ops|flashmla_ops|sm100/)|sglang/multimodal_gen/"
)
for wheel in sorted(work.glob("*.whl")):
    with zipfile.ZipFile(wheel) as z:
        z.extractall(here, [n for n in z.namelist() if not left_out.match(n)])
project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
info = here / "tersekv-0.dist-info"
info.mkdir()
(info / "METADATA").write_text("Metadata-Version: 2.1\nName: tersekv\nVersion: 0\n")
lines = [f"[{group}]\n{name} = {what}\n" for group, of in project["entry-points"].items() for name, what in of.items()]
(info / "entry_points.txt").write_text("\n".join(lines))
PYTHON
mkdir -p "$folder"
rm -f "$folder/$engine-$version.tar.xz."*
(cd "$work/here" && tar -cf - --sort=name --exclude=__pycache__ .) | xz -T0 -6 >"$work/all.xz"
split -n "$(($(stat -c %s "$work/all.xz") / 42000000 + 1))" -d "$work/all.xz" "$folder/$engine-$version.tar.xz."
ls -l "$folder"
