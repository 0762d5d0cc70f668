"""FlashInfer on the problems' tensors, from its public functions. One wrapper is planned per rotating page table."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .append import Q_DTYPE, Append
from .cases import RANK, ROPE, Case
from .data import Problem, Rival
from .decode import Decode, MLADecode
from .prefill import Prefill
from .shapes import ShapeDecode

_WORKSPACE = 512 << 20
# Its sizes of heads. With 80, 96, 112 and 192 it ends in an illegal address or instruction, and the device is lost.
_FA2_DIMS = (64, 128, 256)


def peers(problem: Problem) -> Iterator[Rival]:
    """The functions that have the problem's case."""
    case = problem.case
    if is_decode(problem) and case.format in ("bf16", "fp8_e4m3"):
        yield Rival("flashinfer xqa", lambda: xqa_batch(theirs("decode", "xqa_batch_decode_with_kv_cache"), problem))
        if problem.q.shape[2] in _FA2_DIMS:
            yield Rival("flashinfer fa2", lambda: fa2(theirs("decode", "BatchDecodeWithPagedKVCacheWrapper"), problem))
    elif isinstance(problem, Prefill) and case.format in ("bf16", "fp8_e4m3") and problem.k is None:
        yield Rival("flashinfer fa2", lambda: _paged_prefill(problem, "fa2"))
        yield Rival("flashinfer fa3", lambda: _paged_prefill(problem, "fa3"))
        if problem.layer.k.dtype == problem.q.dtype:
            yield Rival("flashinfer fmha_v2", lambda: _fmha_v2(problem))
    elif isinstance(problem, MLADecode) and case.format in ("bf16", "fp8_e4m3") and _plain(case):
        yield Rival("flashinfer fa3", lambda: _mla(problem))
    elif isinstance(problem, Append) and case.op != "append" and case.format == "fp8_e4m3" and not case.rotated:
        name = "rope_quantize_fp8_append_paged_kv_cache"
        yield Rival("flashinfer", lambda: rope_append(theirs("rope", name), problem))


def is_decode(problem: Problem) -> TypeGuard[Decode | ShapeDecode]:
    """Whether it is a decode of one causal row a request, in any sizes."""
    return isinstance(problem, Decode) or (isinstance(problem, ShapeDecode) and problem.case.is_causal)


def _plain(case: Case) -> bool:
    return case.precision == "exact" and case.query == "bf16"


def theirs(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"flashinfer.{module}"), name)


def xqa_batch(fn: Callable, p: Decode | ShapeDecode) -> list:
    room = workspace(p.q)
    lens, longest, kv = p.lens.view(torch.uint32), int(p.host_lens.max()), (p.layer.k, p.layer.v)

    def call(table: Tensor) -> Callable:
        return lambda: fn(p.q, kv, room, table, lens, longest, bmm1_scale=p.scale, out=p.out)

    return [call(table) for table in p.tables]


def fa2(wrapper: Callable, p: Decode | ShapeDecode) -> list:
    room, kv = workspace(p.q), (p.layer.k, p.layer.v)
    last, (kv_heads, head_dim) = (p.host_lens - 1) % p.case.page + 1, p.layer.k.shape[2:]

    def call(table: Tensor) -> Callable:
        w = wrapper(room, "NHD", use_tensor_cores=True, backend="fa2")
        indptr, indices = csr(p, table)
        w.plan(
            indptr, indices, last.to(p.q.device), p.case.heads, kv_heads, head_dim, p.case.page,
            q_data_type=p.q.dtype, kv_data_type=p.layer.k.dtype, sm_scale=p.scale,
        )  # fmt: skip
        return lambda: w.run(p.q, kv, out=p.out)

    return [call(table) for table in p.tables]


def _check_head_dim(p: Prefill) -> None:
    if p.shape.head_dim not in _FA2_DIMS:
        raise UnsupportedError(f"not tried: it has heads of {_FA2_DIMS}, and others lose the device")


def _paged_prefill(p: Prefill, backend: str) -> list:
    _check_head_dim(p)
    wrapper = theirs("prefill", "BatchPrefillWithPagedKVCacheWrapper")
    room, c, window = workspace(p.q), p.shape, p.prompts.window
    kv = tuple(x.transpose(1, 2) if c.layout == "HND" else x for x in (p.layer.k, p.layer.v))
    last = ((p.host_lens - 1) % c.page + 1).to(p.q.device)

    def call(table: Tensor) -> Callable:
        w = wrapper(room, c.layout, backend=backend)
        w.plan(
            p.cu, *csr(p, table), last, c.heads, c.kv_heads, c.head_dim, c.page, causal=True,
            window_left=window - 1 if window else -1, sm_scale=p.scale, q_data_type=p.q.dtype,
            kv_data_type=p.layer.k.dtype, o_data_type=p.out.dtype,
        )  # fmt: skip
        return lambda: w.run(p.q, kv, out=p.out)

    return [call(table) for table in p.tables]


def _fmha_v2(p: Prefill) -> list:
    """TensorRT-LLM's kernels: K and V of a page side by side; in 8 bits the probabilities are e4m3 too."""
    _check_head_dim(p)
    fn, room, window = theirs("prefill", "trtllm_fmha_v2_prefill"), workspace(p.q), p.prompts.window
    pages = torch.stack((p.layer.k, p.layer.v), 1)
    cu_kv = torch.nn.functional.pad(p.lens.cumsum(0, dtype=torch.int32), (1, 0))
    mask = {"mask_mode": "sliding_window", "window_left": window - 1} if window else {"mask_mode": "causal"}

    def call(table: Tensor) -> Callable:
        return lambda: fn(
            (p.q, pages), "Q_PAGED_KV_NHD", room, p.lens, max(p.prompts.new), max(p.prompts.total), p.scale, 1.0,
            len(p.prompts.new), p.cu, cu_kv, block_tables=table, out=p.out, **mask,
        )  # fmt: skip

    return [call(table) for table in p.tables]


def _mla(p: MLADecode) -> list:
    wrapper = theirs("mla", "BatchMLAPagedAttentionWrapper")
    room, device = workspace(p.q), p.q.device
    q_nope, q_pe = p.q[..., :RANK].contiguous(), p.q[..., RANK:].contiguous()
    rows = torch.arange(p.case.requests + 1, dtype=torch.int32, device=device)
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if p.case.format == "fp8_e4m3" else {}

    def call(table: Tensor) -> Callable:
        w = wrapper(room, backend="fa3")
        indptr, indices = csr(p, table)
        w.plan(
            rows, indptr, indices, p.lens, p.case.heads, RANK, ROPE, p.case.page, False, p.scale,
            p.q.dtype, p.layer.ckv.dtype,
        )  # fmt: skip
        return lambda: w.run(q_nope, q_pe, p.layer.ckv, p.layer.kpe, out=p.out, **scales)

    return [call(table) for table in p.tables]


def rope_append(fn: Callable, p: Append) -> list:
    """One request owns all new tokens; the problem's tables hold its pages."""
    latent, a = p.latent, p.layer
    cache: Any = (a.ckv, a.kpe) if latent else (a.k, a.v)  # type: ignore[union-attr]
    indptr = torch.tensor([0, p.pages], dtype=torch.int32, device=p.device)
    batch = torch.zeros_like(p.positions)

    def call(x: dict, out: dict, table: Tensor) -> Callable:
        if latent:
            rows = (x["q_pe"], x["k_pe"], x["q_nope"], x["kv_c"], None)
            outs = {"q_rope_out": out["q_pe"], "q_nope_out": out["q_nope"]}
        else:
            rows = (x["q"], x["k"], None, None, x["v"])
            outs = {"q_rope_out": out["q"]}
        return lambda: fn(
            *rows, p.cos_sin, p.positions, cache, table, indptr, batch, p.positions,
            is_neox=not latent, quantize_dtype=Q_DTYPE, page_size=p.case.page, **outs,
        )  # fmt: skip

    return [call(x, out, table) for x, out, table in zip(p.inputs, p.outs, p.tables, strict=True)]


def workspace(like: Tensor) -> Tensor:
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=like.device)


def csr(p: Decode | ShapeDecode | MLADecode | Prefill, table: Tensor) -> tuple[Tensor, Tensor]:
    """(indptr [B + 1], indices) of a page table."""
    used = -(-p.host_lens // p.case.page)
    indptr = torch.nn.functional.pad(used.cumsum(0), (1, 0)).to(torch.int32)
    live = torch.arange(table.shape[1]) < used[:, None]
    return indptr.to(table.device), table[live.to(table.device)]
