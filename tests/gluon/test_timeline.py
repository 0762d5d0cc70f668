"""benchmarks/timeline.py: its stamps come into all kernels of decode, and the kept picture is of the kept results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from script import script

ROOT = Path(__file__).parents[2]
KEPT, PICTURE = ROOT / "benchmarks/results/timelines/h100_decode.jsonl", ROOT / "notes/decode_timeline.svg"
# In a process of its own: the kernels' modules are changed. Prints a line for each kernel: its name, its stamps.
COMPILE = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
import timeline
timeline.insert_probes(Path({folder!r}), {{"split pass": 1 << 40, "combine": 1 << 41}})
from test_decode_compile import call_of, compiled
for call in (call_of("fp8_e4m3", max_pages=16), call_of("fp8_e4m3", max_pages=8, requests=8), call_of("nvfp4")):
    for kernel in compiled(call):
        events = [line.split("//")[0] for line in kernel["ptx"].splitlines() if "%globaltimer" in line]
        print(kernel["name"], len(events))
"""


def test_stamps_are_compiled_into_every_kernel(tmp_path):
    paths = [str(ROOT / x) for x in ("benchmarks", "tests/gluon", "tests/triton", "tests/support", "src")]
    code = COMPILE.format(paths=paths, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    least: dict[str, int] = {}
    for line in done.stdout.splitlines():
        name, n = line.split()
        least[name] = min(int(n), least.get(name, 99))
    assert least.keys() == {"decode_small_m_or_shared_tiles_kernel", "decode_producer_warp_kernel", "combine_kernel"}
    # launch, waited, scheduled, first copy, first bytes, first and last product, stored
    assert least["decode_small_m_or_shared_tiles_kernel"] >= 8
    assert least["decode_producer_warp_kernel"] >= 8
    assert least["combine_kernel"] == 4


def test_the_kept_picture_is_of_the_kept_results():
    records = [json.loads(line) for line in KEPT.read_text().splitlines()]
    assert script("benchmarks/timeline.py").picture(records).svg() == PICTURE.read_text()
