"""The functions of `compat` on the problems' tensors, each beside the one that it stands in for.

What makes the calls here takes the function of either side, and a problem.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...compat.max import PagedKVCacheCollection
from ...ops.mla import mla_append
from . import data
from .append import Q_DTYPE, Append
from .cases import NOPE, RANK, ROPE, Case
from .decode import Branch, Decode, MLADecode
from .flashinfer import csr, fa2, rope_append, workspace, xqa_batch
from .mla_prefill import EPSILON, MLAPrefill
from .shapes import Shape, ShapeDecode


class Rows(Append):
    """Latent rows alone, as they are: no query, no rotation."""

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {"kv_c": (RANK,), "k_pe": (ROPE,)}

    def _call(self, layer: Any, slots: Tensor, x: dict, out: dict, positions: Tensor, backend: str | None) -> Any:
        return lambda: mla_append(x["kv_c"], x["k_pe"], layer, slots, backend=backend)


class RopeAppend(Append):
    """Appends whose call returns the query's parts, and may have made them."""

    def error(self, result: Any) -> float:
        for out, part in zip(self.outs[0].values(), result or (), strict=False):
            if part is not out:
                out.copy_(part)
        return super().error(result)


class Merge:
    """Partial results of the same rows, whose LSE is base 2."""

    limit = peer_limit = 5e-3
    flops = 0

    def __init__(self, case: Case, device: torch.device, backend: str | None = None) -> None:
        self.case, t, h = case, case.tokens, case.heads
        self.outs = torch.randn(t, 2, h, NOPE, device=device).bfloat16()
        self.lses = torch.randn(t, 2, h, device=device)
        self.nbytes = self.outs.nbytes * 3 // 2
        self.calls: list = []

    def poison(self) -> None:
        """Nothing: results are returned."""

    def error(self, result: Any) -> float:
        weights = (self.lses.double() * torch.log(torch.tensor(2.0, dtype=torch.float64))).softmax(1)
        return data.relative(result[0], (self.outs.double() * weights[..., None]).sum(1))


class Places:
    """Where the new rows of requests go."""

    limit = peer_limit = 0.0
    flops = nbytes = 0

    def __init__(self, case: Case, device: torch.device, backend: str | None = None) -> None:
        self.case, b = case, case.tokens
        self.starts = torch.arange(b + 1, dtype=torch.int32, device=device) * 2
        self.lens = torch.arange(b, dtype=torch.int32, device=device) + 20
        self.pages = torch.nn.functional.pad((-(-self.lens // case.page)).cumsum(0), (1, 0)).to(torch.int32)
        self.last = (self.lens - 1) % case.page + 1
        self.calls: list = []

    def poison(self) -> None:
        """Nothing: results are returned."""

    def error(self, result: Any) -> float:
        """Share of wrong numbers."""
        token = torch.arange(2 * self.case.tokens, device=self.lens.device)
        request = token // 2
        places = request, self.lens[request] - 2 + token % 2
        wants = (self.lens,) if isinstance(result, Tensor) else places
        results = (result,) if isinstance(result, Tensor) else result
        return max(float((got != want).double().mean()) for got, want in zip(results, wants, strict=True))


def _xqa(fn: Callable, p: Decode) -> list:
    k, v, flags = p.layer.k, p.layer.v, torch.zeros(1 << 20, dtype=torch.uint8, device=p.q.device)
    lens, q, out, room = p.lens.view(torch.uint32)[:, None], p.q[:, None], p.out[:, None], workspace(p.q)
    sizes = k.shape[2], k.shape[1]
    return [partial(fn, q, k, v, table, lens, out, room, flags, *sizes) for table in p.tables]


def _rows(p: MLADecode) -> Tensor:
    """Latent and rotary parts as the one tensor that they lie in."""
    ckv = p.layer.ckv
    return ckv.as_strided((*ckv.shape[:2], ckv.stride(1)), ckv.stride())


def _xqa_mla(fn: Callable, p: MLADecode) -> list:
    rows, flags = _rows(p)[:, :, None], torch.zeros(1 << 20, dtype=torch.uint8, device=p.q.device)
    lens, q, out, room = p.lens.view(torch.uint32)[:, None], p.q[:, None], p.out[:, None], workspace(p.q)
    more = {"q_scale": p.scale}
    return [partial(fn, q, rows, rows, table, lens, out, room, flags, p.case.page, **more) for table in p.tables]


def _xqa_batch_mla(fn: Callable, p: MLADecode) -> list:
    rows, lens, longest, room = _rows(p)[:, None], p.lens.view(torch.uint32), int(p.host_lens.max()), workspace(p.q)
    sizes, q, out = (NOPE, RANK, ROPE), p.q[:, None], p.out[:, None]
    more = {"out": out, "bmm1_scale": p.scale}
    return [partial(fn, q, rows, room, *sizes, table, lens, longest, **more) for table in p.tables]


def _trtllm(fn: Callable, p: Decode) -> list:
    return xqa_batch(partial(fn, kv_layout="NHD"), p)


def _prefill_wrapper(fn: Callable, p: ShapeDecode) -> list:
    room, kv, c = workspace(p.q), (p.layer.k, p.layer.v), p.case
    rows = torch.arange(c.requests + 1, dtype=torch.int32, device=p.q.device) * c.drafts
    last = ((p.host_lens - 1) % c.page + 1).to(p.q.device)

    def call(table: Tensor) -> Callable:
        w = fn(room, "NHD")
        w.plan(
            rows, *csr(p, table), last, c.heads, c.kv_heads, c.head_dim, c.page, causal=True, q_data_type=p.q.dtype,
            kv_data_type=p.layer.k.dtype, sm_scale=p.scale,
        )  # fmt: skip
        return lambda: w.run(p.q, kv, out=p.out)

    return [call(table) for table in p.tables]


def _single_prefill(fn: Callable, p: ShapeDecode) -> list:
    """Of one request, whose keys are one page."""
    pages = [(p.layer.k[int(table[0, 0])], p.layer.v[int(table[0, 0])]) for table in p.tables]
    return [partial(fn, p.q, k, v, causal=True, sm_scale=p.scale) for k, v in pages]


def _single_decode(fn: Callable, p: ShapeDecode) -> list:
    """Of one request, whose keys are one page."""
    pages = [(p.layer.k[int(table[0, 0])], p.layer.v[int(table[0, 0])]) for table in p.tables]
    return [partial(fn, p.q[0], k, v, sm_scale=p.scale) for k, v in pages]


def _place(p: Append, table: Tensor) -> tuple:
    """All tokens are one request's."""
    numbers = [0, p.pages], [(p.case.tokens - 1) % p.case.page + 1]
    ends, last = (torch.tensor(x, dtype=torch.int32, device=p.device) for x in numbers)
    return torch.zeros_like(p.positions), p.positions, table, ends, last


def _append(fn: Callable, p: Append) -> list:
    kv = p.layer.k, p.layer.v  # type: ignore[union-attr]
    placed = [_place(p, table) for table in p.tables]
    return [partial(fn, x["k"], x["v"], *at[:2], kv, *at[2:]) for x, at in zip(p.inputs, placed, strict=True)]


def _append_mla(fn: Callable, p: Append) -> list:
    kv = p.layer.ckv, p.layer.kpe  # type: ignore[union-attr]
    placed = [_place(p, table) for table in p.tables]
    return [partial(fn, x["kv_c"], x["k_pe"], *at[:2], *kv, *at[2:]) for x, at in zip(p.inputs, placed, strict=True)]


def per_token_head(fn: Callable, p: Append) -> list:
    caches = [getattr(p.layer, n) for n in ("k", "v", "k_scale_cache", "v_scale_cache")]
    # Newer vLLM's wants its own mode, which ours need not be told.
    told = fn.__module__.startswith("vllm") and "kv_quant_mode" in signature(fn).parameters
    mode = {"kv_quant_mode": quant_mode(p.case.format)} if told else {}
    return [partial(fn, x["k"], x["v"], *caches, s.long(), **mode) for x, s in zip(p.inputs, p.slots, strict=True)]


def quant_mode(format: str) -> Any:
    """vLLM's name of a format whose scales are stored per token and head."""
    return importlib.import_module("vllm.v1.kv_cache_interface").KVQuantMode[format.upper()]


def _reshape(fn: Callable, p: Append) -> list:
    one = torch.ones(2, device=p.device)
    kv, more = [x.view(torch.uint8) for x in (p.layer.k, p.layer.v)], ("fp8", one[0], one[1])  # type: ignore[union-attr]
    return [partial(fn, x["k"], x["v"], *kv, s.long(), *more) for x, s in zip(p.inputs, p.slots, strict=True)]


def _concat(fn: Callable, p: Append) -> list:
    rows, one = _rows(p), torch.ones((), device=p.device)  # type: ignore[arg-type]
    more = rows.view(torch.uint8), "fp8", one
    latents = [(x["kv_c"], x["k_pe"], more[0], s.long(), *more[1:]) for x, s in zip(p.inputs, p.slots, strict=True)]
    return [partial(fn, *x) for x in latents]


def _merge_state(fn: Callable, p: Merge) -> list:
    a, b = ((p.outs[:, i].contiguous(), p.lses[:, i].contiguous()) for i in range(2))
    return [partial(fn, *a, *b)]


def _merge_states(fn: Callable, p: Merge) -> list:
    return [partial(fn, p.outs, p.lses)]


def _seq_lens(fn: Callable, p: Places) -> list:
    return [partial(fn, p.pages, p.last, p.case.page)]


def _positions(fn: Callable, p: Places) -> list:
    return [partial(fn, p.starts, p.lens, 2 * p.case.tokens)]


def _collection(p: Branch | MLAPrefill, lens: Tensor, table: Tensor, most: int) -> PagedKVCacheCollection:
    """A layer's rows as MAX has them."""
    return PagedKVCacheCollection(_rows(p)[:, None, None, :, None], lens, table, most, int(lens.max()))  # type: ignore[arg-type]


def _max_decode(fn: Callable, p: Branch) -> list:
    b = p.case.requests
    cached, starts = p.lens - 1, torch.arange(b + 1, dtype=torch.int32, device=p.lens.device)
    raw, ((w_uk, uk), (w_uv, uv)) = torch.cat([p.kv_c, p.k_pe], -1), p.weights[0]
    return [
        partial(
            fn, p.out, p.q, starts, p.freqs, p.gamma, _collection(p, cached, table, 1), 0, p.scale, EPSILON,
            w_uk, uk, w_uv, uv, kv_input=raw,
        )
        for table in p.tables
    ]  # fmt: skip


def _max_prefill(fn: Callable, p: MLAPrefill) -> list:
    s = p.case.tokens
    lens, starts = torch.zeros_like(p.plan.cache_offsets[0]), p.plan.buffer_row_offsets[0]
    raw = torch.cat([p.kv_c, p.k_pe], -1)
    return [
        partial(
            fn, p.out, q, starts, p.freqs, p.gamma, _collection(p, lens, table, s), 0, p.scale, EPSILON, starts,
            torch.zeros_like(starts), s, p.weight, p.weight_scale, kv_input=raw,
        )
        for q, table in zip(p.qs, p.tables, strict=True)
    ]  # fmt: skip


class Function(NamedTuple):
    """theirs: where they keep theirs, if it can be imported; problem: where the operation's own does not fit."""

    calls: Callable[[Callable, Any], list]
    theirs: str | None
    problem: Callable[[Case, torch.device, str | None], Any] | None = None


def _with(**values: Callable[[Any], Any]) -> Callable[[Callable, Any], Callable]:
    """A way: with these arguments, of the problem."""

    def way(fn: Callable, p: Any) -> Callable:
        more = {name: value(p) for name, value in values.items()}
        return lambda *args, **options: fn(*args, **options | more)

    return way


def _without(*names: str) -> Callable[[Callable, Any], Callable]:
    """A way: without these arguments."""

    def way(fn: Callable, p: Any) -> Callable:
        return lambda *args, **options: fn(*args, **{name: x for name, x in options.items() if name not in names})

    return way


def _of_run(way: Callable[[Callable, Any], Callable]) -> Callable[[Callable, Any], Callable]:
    """The same of a wrapper's `run`."""

    def of_wrapper(fn: Callable, p: Any) -> Callable:
        def make(*args: Any, **options: Any) -> Any:
            wrapper = fn(*args, **options)
            wrapper.run = way(wrapper.run, p)
            return wrapper

        return make

    return of_wrapper


def _one(p: Any) -> Tensor:
    return torch.ones(1, device=p.tables.device)


def _scale(p: Any) -> Tensor:
    return torch.full((1,), p.scale, device=p.tables.device)


def _twice(*names: str) -> Callable[[Callable, Any], Callable]:
    """A way: one tensor of 1 as every one of these scales."""

    def way(fn: Callable, p: Any) -> Callable:
        one = _one(p)
        return _with(**dict.fromkeys(names, lambda _: one))(fn, p)

    return way


def _no_columns(p: Append) -> Tensor:
    return torch.empty(p.case.tokens, p.case.heads, 0, dtype=Q_DTYPE, device=p.device)


_BMM = _with(bmm1_scale=_scale, bmm2_scale=_one)
_QUANT = ("quant_scale_q", "quant_scale_kv")
# Other documented ways of calling a function, by its name and theirs: both sides are called so.
WAYS = {
    "xqa_batch_decode_with_kv_cache": {"no out": _without("out"), "tensor scales": _BMM},
    "trtllm_batch_decode_with_kv_cache": {"no out": _without("out"), "tensor scales": _BMM},
    "xqa": {"tensor scales": _with(q_scale=_one, kv_scale=_one), "one scale twice": _twice("q_scale", "kv_scale")},
    "xqa_mla": {"tensor scales": _with(q_scale=_scale, kv_scale=_one)},
    "xqa_batch_decode_with_kv_cache_mla": {"no out": _without("out"), "tensor scales": _BMM},
    "BatchDecodeWithPagedKVCacheWrapper": {
        "no out": _of_run(_without("out")), "tensor scales": _of_run(_with(k_scale=_one, v_scale=_one)),
    },
    "rope_quantize_fp8_append_paged_kv_cache": {
        "no outputs": _without("q_rope_out", "q_nope_out"), "empty q_nope_out": _with(q_nope_out=_no_columns),
        "tensor scales": _with(**dict.fromkeys(_QUANT, _one)), "one scale twice": _twice(*_QUANT),
    },
}  # fmt: skip


def _rows_of(drafts: int) -> Callable[[Case, torch.device, str | None], ShapeDecode]:
    """The problem of a decode with so many causal rows a request."""

    def problem(case: Case, device: torch.device, backend: str | None) -> ShapeDecode:
        shape = Shape(**(case.as_dict() | {"op": "shape", "name": "rows", "drafts": drafts}))
        return ShapeDecode(shape, device, backend)

    return problem


_TRITON = "triton_reshape_and_cache_flash"
FUNCTIONS = {
    "flashinfer.xqa_batch_decode_with_kv_cache": Function(xqa_batch, "flashinfer.decode"),
    "flashinfer.xqa": Function(_xqa, "flashinfer.xqa"),
    "flashinfer.BatchDecodeWithPagedKVCacheWrapper": Function(fa2, "flashinfer.decode"),
    "flashinfer.BatchPrefillWithPagedKVCacheWrapper": Function(_prefill_wrapper, "flashinfer.prefill", _rows_of(8)),
    "flashinfer.single_prefill_with_kv_cache": Function(_single_prefill, "flashinfer.prefill", _rows_of(8)),
    "flashinfer.single_decode_with_kv_cache": Function(_single_decode, "flashinfer.decode", _rows_of(1)),
    "flashinfer.trtllm_batch_decode_with_kv_cache": Function(_trtllm, "flashinfer.decode"),
    "flashinfer.xqa_mla": Function(_xqa_mla, "flashinfer.xqa"),
    "flashinfer.xqa_batch_decode_with_kv_cache_mla": Function(_xqa_batch_mla, "flashinfer.mla"),
    "flashinfer.rope_quantize_fp8_append_paged_kv_cache": Function(rope_append, "flashinfer.rope", RopeAppend),
    "flashinfer.append_paged_kv_cache": Function(_append, "flashinfer.page"),
    "flashinfer.append_paged_mla_kv_cache": Function(_append_mla, "flashinfer.page", Rows),
    "flashinfer.get_seq_lens": Function(_seq_lens, "flashinfer.page", Places),
    "flashinfer.get_batch_indices_positions": Function(_positions, "flashinfer.page", Places),
    "flashinfer.merge_state": Function(_merge_state, "flashinfer.cascade", Merge),
    "flashinfer.merge_states": Function(_merge_states, "flashinfer.cascade", Merge),
    f"vllm.{_TRITON}_per_token_head_quant": Function(per_token_head, f"vllm.v1.attention.ops.{_TRITON}"),
    "vllm.reshape_and_cache_flash": Function(_reshape, "vllm._custom_ops"),
    "vllm.concat_and_cache_mla": Function(_concat, "vllm._custom_ops", Rows),
    "max.mla_decode_branch_fp8": Function(_max_decode, None),
    "max.mla_prefill_branch_fp8": Function(_max_prefill, None),
}


def through(case: Case, own: Callable[..., Any] | None, device: torch.device, backend: str | None) -> Any:
    """The problem of a case whose calls are made by a function of `compat`; own: the operation's problem."""
    library, name, function = _function(case)
    make = function.problem or own
    assert make is not None, case.op
    problem = make(case, device, backend)
    problem.calls = _calls(importlib.import_module(f"tersekv.compat.{library}"), name, function, problem)
    return problem


def peers(library: str, problem: Any) -> Iterator[data.Rival]:
    """The function that the case's stands in for, if it is of this library."""
    owner, name, function = _function(problem.case)
    if owner == library and function.theirs is not None:
        home = function.theirs
        yield data.Rival(library, lambda: _calls(importlib.import_module(home), name, function, problem))


def _function(case: Case) -> tuple[str, str, Function]:
    """(library, name, function) of a case."""
    named = case.through.partition(": ")[0]
    library, _, name = named.partition(".")
    return library, name, FUNCTIONS[named]


def _calls(home: Any, name: str, function: Function, problem: Any) -> list:
    """The problem's calls by a function of `home`, in the case's way."""
    fn, way = getattr(home, name), problem.case.through.partition(": ")[2]
    return function.calls(WAYS[name][way](fn, problem) if way else fn, problem)
