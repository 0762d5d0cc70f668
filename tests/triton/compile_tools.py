"""Compile Triton (and Gluon) kernels for chips that are not there, and read what came out.

Two ways in, one result:

    compile_kernel(fn, signature, constexprs, arch)    one kernel, its signature written out
    compile_launches(run, call, config, arch)          every kernel that a backend's `run(call, config)` launches,
                                                       specialised exactly as the real launch would be

Tensor copies of a Gluon kernel that a GPU would trap on raise (`copies.faults`), and so do mbarriers that share memory
(`barriers.faults`), Hopper's products of matrices whose place got lost (`descriptors.faults`), conversions to 8 bits of
which half got lost (`merges.faults`) and offsets that 32 bits do not hold (`strides.faults`). The result is a dict:
    n_regs, n_spills, shared    registers a thread, bytes of local memory a thread (0: no spills), shared bytes a block
    ttir, ttgir, llir, ptx      texts of the stages; on AMD `amdgcn` instead of `ptx`
    sass                        a function: the disassembly (NVIDIA; takes a moment)
    metadata, name              of Triton; the kernel's name

`arch` is 80, 89, 90, 100, 120 … or "gfx942". Nothing here works under TRITON_INTERPRET=1, which changes `triton.jit`
when a module is decorated; interpreter tests live in tests/interpreter and run in processes of their own.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any

import barriers
import descriptors
import merges
import strides
import triton
from copies import faults
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature, serialize_specialization_data

NVIDIA = (80, 89, 90, 100, 120)
ARCHS = (*NVIDIA, "gfx942")
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))


def since(limits: dict[tuple[int, int], Any]) -> Any:
    """A limit that was measured anew on some versions of Triton: that of the last one up to this."""
    return limits[max(v for v in limits if v <= VERSION)]


# Bytes of local memory a thread that a kernel without spills may have: none on the Triton that kernels are tuned with.
FEW_SPILLS = since({(3, 6): 0, (3, 7): 32})


def target(arch: int | str) -> GPUTarget:
    return GPUTarget("hip", arch, 64) if isinstance(arch, str) else GPUTarget("cuda", arch, 32)


def compile_kernel(
    fn: JITFunction,
    signature: dict[str, str],
    constexprs: dict[str, Any],
    arch: int | str,
    num_warps: int = 4,
    num_stages: int = 3,
    divisible_by_16: tuple[str, ...] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Compile `fn`.

    signature:        type of every argument that is not a constexpr: "*bf16", "*u8", "i32", "i64", "fp32" …
    constexprs:       value of every constexpr argument
    divisible_by_16:  arguments known to be multiples of 16; None: every pointer
    """
    names = fn.arg_names
    sig = {n: "constexpr" if n in constexprs else signature[n] for n in names}
    if divisible_by_16 is None:
        divisible_by_16 = tuple(n for n, kind in sig.items() if kind.startswith("*"))
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in divisible_by_16}
    values = {(names.index(n),): v for n, v in constexprs.items()}
    return _compile(fn, sig, values, attrs, arch, dict(options, num_warps=num_warps, num_stages=num_stages))


def compile_launches(run, call: Any, config: Any, arch: int | str) -> list[dict[str, Any]]:
    """Compile every kernel that `run(call, config)` launches; nothing is executed.

    call:    a call record over CPU tensors (their shapes, strides and 16-byte alignment count, their values do not)
    config:  what `configure(f)` of the backend file returned for facts with this arch

    Each result also has `grid`, the launch's grid.
    """
    return [
        dict(compile_launch(fn, args, kwargs, arch), grid=grid) for fn, grid, args, kwargs in record(run, call, config)
    ]


def record(run, call: Any, config: Any) -> list[tuple[JITFunction, Any, tuple, dict]]:
    """(kernel, grid, args, kwargs) of each launch of `run(call, config)`."""
    launches: list[tuple] = []

    def note(self, *args, grid, warmup, **kwargs):
        launches.append((self, grid, args, kwargs))

    original, JITFunction.run = JITFunction.run, note
    try:
        run(call, config)
    finally:
        JITFunction.run = original
    return launches


def compile_launch(fn: JITFunction, args: tuple, kwargs: dict[str, Any], arch: int | str) -> dict[str, Any]:
    """Compile `fn` as `fn[grid](*args, **kwargs)` would, and show it to a hook."""
    backend = make_backend(target(arch))
    bind = create_function_from_signature(fn.signature, fn.params, backend)
    bound, specialization, options = bind(*args, **kwargs)
    parsed, signature, constexprs, attrs = fn._pack_args(backend, dict(options), bound, specialization, options)
    # What Triton does where a hook is set, with the target since 3.7.
    more = () if triton.__version__.startswith("3.6.") else (target(arch),)
    serialize_specialization_data(fn.__name__, signature, constexprs, attrs, parsed, "key", *more)
    return _compile(fn, signature, constexprs, attrs, arch, parsed.__dict__)


def _compile(fn, signature, constexprs, attrs, arch, options) -> dict[str, Any]:
    source_type = ASTSource
    if fn.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_type = GluonASTSource
    source = source_type(fn=fn, signature=signature, constexprs=constexprs, attrs=attrs)
    compiled = triton.compile(source, target=target(arch), options=options)
    texts = {k: v for k, v in compiled.asm.items() if isinstance(v, str)}
    if fn.is_gluon():
        assert not faults(texts["ttgir"]), f"{compiled.metadata.name}: {faults(texts['ttgir'])}"
        shared = barriers.faults(texts["ttgir"], arch)
        assert not shared, f"{compiled.metadata.name}: {shared}"
    short = strides.faults(texts["ttgir" if fn.is_gluon() else "ttir"])
    assert not short, f"{compiled.metadata.name}: {short}"
    out: dict[str, Any] = {**texts, "metadata": compiled.metadata, "name": compiled.metadata.name}
    out["shared"] = compiled.metadata.shared
    if isinstance(arch, str):
        out["n_regs"], out["n_spills"] = _amd_usage(texts["amdgcn"])
    else:
        cubin = compiled.asm["cubin"]
        out["n_regs"], out["n_spills"] = _nvidia_usage(cubin)
        out["sass"] = lambda: _tool("cuobjdump", ["-sass"], cubin)
        if "wgmma.mma_async" in texts["ptx"] and not fn.is_gluon():
            lost = descriptors.faults(out["sass"]())
            assert not lost, f"{compiled.metadata.name}: {lost}"
        if arch in (89, 90) and re.search(r"cvt\S*\.e[45]m[23]x2\.", texts["ptx"]):
            half = merges.faults(out["sass"]())
            assert not half, f"{compiled.metadata.name}: {half}"
    return out


def _tool(name: str, flags: list[str], cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        path = getattr(triton.knobs.nvidia, name).path
        return subprocess.run([path, *flags, file.name], check=True, capture_output=True, text=True).stdout


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    report = _tool("cuobjdump", ["-res-usage"], cubin)
    usage = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", report)
    assert usage is not None, report
    return int(usage[1]), int(usage[2]) + int(usage[3])


def _amd_usage(text: str) -> tuple[int, int]:
    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        assert found is not None, key
        return int(found[1])

    return number("vgpr_count"), number("private_segment_fixed_size")
