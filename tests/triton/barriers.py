"""Where the mbarriers of a compiled Gluon kernel lie in shared memory.

`faults(ttgir, arch)` lists the mbarriers whose memory another buffer shares, by the compiler's own allocation. The
allocator reuses the memory of an mbarrier after its last use, which of an unused one is its initialisation, and
invalidates nothing. When another process preempts the GPU in the middle of such a kernel, 16 bytes of the other buffer
change: see `notes/prefill.md`.
"""

from __future__ import annotations

import math
import re
import tempfile

from triton._C.libtriton import ir, nvidia, passes

_ALLOC = re.compile(
    r"ttg\.local_alloc.*?allocation\.offset = (\d+) : i32.*?: \(.*?\) -> "
    r"!ttg\.memdesc<((?:\d+x)+)(\w+?)(\d+)\w*, (#\w+)"
)
_OFFSET = re.compile(r"\ballocation\.offset = (\d+) : i32")


def allocated(ttgir: str, arch: int) -> str:
    """The kernel with the offset of every buffer."""
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, arch, 87)
    manager.run(module, "allocate")
    return str(module)


def buffers(text: str) -> list[tuple[int, int, bool, str]]:
    """(begin, end, whether they are mbarriers, what they are) of each buffer; of scratch memory, the first 16 bytes."""
    barrier_layouts = set(re.findall(r"ttng\.init_barrier.*?memdesc<(?:\d+x)+i64, (#\w+)", text))
    found = []
    for offset, dims, kind, bits, layout in _ALLOC.findall(text):
        num_bytes = math.prod(int(n) for n in dims.rstrip("x").split("x")) * int(bits) // 8
        is_barrier = kind + bits == "i64" and layout in barrier_layouts
        found.append((int(offset), int(offset) + num_bytes, is_barrier, dims + kind + bits))
    others = [line for line in text.splitlines() if "ttg.local_alloc" not in line]
    scratch = [int(offset) for line in others for offset in _OFFSET.findall(line)]
    return found + [(offset, offset + 16, False, "scratch") for offset in scratch]


def faults(ttgir: str, arch: int) -> list[str]:
    found = sorted(buffers(allocated(ttgir, arch)))
    return [
        f"mbarriers {what} at byte {begin} share memory with {other_what} at byte {other_begin}"
        for i, (begin, end, is_barrier, what) in enumerate(found)
        if is_barrier
        for j, (other_begin, other_end, _, other_what) in enumerate(found)
        if i != j and other_begin < end and begin < other_end
    ]
