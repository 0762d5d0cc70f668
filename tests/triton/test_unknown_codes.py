"""A code that a kernel does not know cannot become wrong numbers: backends refuse it, and kernels do not compile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from compile_tools import compile_launch, record
from triton.compiler.errors import CompilationError

from tersekv import formats
from tersekv.backends.host.row_programs import StoredFormat
from tersekv.dispatch import plan
from tersekv.dispatch.signature import FIELD_GETTERS
from tersekv.testing.cases import cases
from tersekv.testing.make import make

TOY = "toy"  # a code


def launches_of(op: str, backend: str, format: str, arch: int) -> list[tuple]:
    call = make(next(c for c in cases((op,), (format,)) if c.op != "decode" or c.page == 64))
    module = plan._module(backend, op)
    return record(module.run, call, module.configure(plan.facts(op, call, arch)))


def with_another_code(x: Any) -> Any:
    if hasattr(x, "K") and hasattr(x.K, "CODE"):  # of keys; the record's own is of values
        x = replace(x, K=replace(x.K, CODE=TOY))
    return replace(x, CODE=TOY) if isinstance(x, StoredFormat) or hasattr(x, "CODE") else x


def causes(e: BaseException | None) -> Iterator[str]:
    while e is not None:
        yield str(e)
        e = e.__cause__ or e.__context__


@pytest.mark.parametrize(
    ("op", "backend", "format", "arch"),
    [
        *[("decode", "triton", f, a) for f in ("bf16", "int8_per_token_head", "nvfp4") for a in (80, "gfx942")],
        *[("append", "triton", f, 90) for f in ("bf16", "fp8_e5m2", "int8_per_token_head", "nvfp4")],
        ("mla_append", "triton", "fp8_ds_mla", 90), ("mla_decode", "triton", "fp8_e4m3", 90),
        *[("decode", "gluon", f, 90) for f in ("fp16", "int8_per_token_head", "nvfp4")],
        *[("mla_decode", "gluon", f, 90) for f in ("bf16", "fp8_e4m3")],
    ],
)  # fmt: skip
def test_a_kernel_does_not_compile_for_a_code_that_it_does_not_know(op, backend, format, arch):
    fn, _, args, options = launches_of(op, backend, format, arch if isinstance(arch, int) else None)[0]
    with pytest.raises(CompilationError) as raised:
        compile_launch(fn, tuple(map(with_another_code, args)), options, arch)
    assert any("a code that" in text or "a kind that" in text for text in causes(raised.value))


@pytest.mark.parametrize("scale", [formats.NONE, formats.TENSOR, formats.TOKEN_HEAD, formats.BLOCK, formats.GROUP])
def test_backends_refuse_a_format_of_another_code_whatever_its_storage_and_scale(scale, monkeypatch):
    toy = formats.KVFormat(TOY, TOY, torch.uint8, 7.0, scale, values_per_element=2)
    for table in (formats.KV_FORMATS, formats.LATENT_FORMATS, formats.ALL_FORMATS, formats.STORED_FORMATS):
        monkeypatch.setitem(table, TOY, toy)
    for op in ("append", "decode", "mla_append", "mla_decode", "mla_prefill", "mla_decode_branch"):
        call = make(next(cases((op,), ("bf16",))))._replace(format=TOY)
        assert FIELD_GETTERS[op][0](call)
        for backend in ("triton", "gluon"):
            assert "has no " in plan.why_not(plan.facts(op, call, 90), backend)
