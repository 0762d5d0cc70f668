"""Where the mbarriers of a compiled Gluon kernel lie in shared memory.

`faults(ttgir, arch)` lists the mbarriers whose memory another buffer shares, by the compiler's own allocation. The
allocator gives memory a second time that no later instruction names, as that of a barrier which is initialised and then
not used. The hardware still knows such a barrier: a GPU that is preempted in the middle of the kernel and comes back
writes it again, over what lies there by then (H100, driver 580: 16 bytes of a tile of keys, NaN in the output).
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
_SCRATCH = re.compile(r"= (?:ttg|tt)\.(?!local_alloc)(\w+).*?allocation\.offset = (\d+) : i32")


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
    return found + [(int(offset), int(offset) + 16, False, op) for op, offset in _SCRATCH.findall(text)]


def faults(ttgir: str, arch: int) -> list[str]:
    found = sorted(buffers(allocated(ttgir, arch)))
    return [
        f"mbarriers {what} at byte {begin} share memory with {other_what} at byte {other_begin}"
        for i, (begin, end, is_barrier, what) in enumerate(found)
        if is_barrier
        for j, (other_begin, other_end, _, other_what) in enumerate(found)
        if i != j and other_begin < end and begin < other_end
    ]
