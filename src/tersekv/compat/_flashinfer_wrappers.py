"""FlashInfer's wrappers for attention over pages: `plan` on the host, `run` for each layer."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..calls import AttentionCall, attention_inputs
from ..errors import UnsupportedError
from ..layers import PagedKVLayer
from ..ops.attention import allocate_outputs, attention_outputs
from ..ops.registry import dispatch_call
from ..ops.scales import float_and_tensor
from ._adapt import (
    as_float,
    as_host_int,
    dtype_name,
    index_tensor,
    lookup_cached,
    number_or_tensor,
    tensor,
    with_caller_names,
)
from ._flashinfer_decode import LOG2E
from ._flashinfer_views import halves, layer

Scale = float | Tensor
_NAMES = {
    "cache": "paged_kv_cache",
    "kv_cache": "paged_kv_cache",
    "k_cache": "paged_kv_cache[0]",
    "v_cache": "paged_kv_cache[1]",
    "scale_cache": "kv_cache_sf",
    "k_scale_cache": "kv_cache_sf[0]",
    "v_scale_cache": "kv_cache_sf[1]",
    "layout": "kv_layout",
    "softmax_scale": "sm_scale",
    "softcap": "logits_soft_cap",
    "window": "window_left",
    "out_scale": "v_scale",
    "cu_seqlens_q": "qo_indptr",
    "page_table": "indices",
    "seq_lens": "last_page_len",
}


class _Plan(NamedTuple):
    """What the layers of a step share.

    rows_alone: every query row is a request of its own here, since it sees all keys: rows are not causal
    """

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    rows: int
    max_q_len: int
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    page_size: int
    sm_scale: float | None
    window_left: int
    softcap: float
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    rows_alone: bool

    @property
    def one_row_each(self) -> bool:
        """Whether this is decode of one row a request."""
        return self.max_q_len == 1 and self.rows == len(self.seq_lens)


class _Wrapper:
    """What both wrappers share. Workspaces and buffers are accepted and not used: see the module."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, use_cuda_graph: bool) -> None:
        if kv_layout not in ("NHD", "HND"):
            raise ValueError(f"kv_layout: want 'NHD' or 'HND', got {kv_layout!r}")
        self.device = tensor("float_workspace_buffer", float_workspace_buffer).device
        self._kv_layout, self._use_cuda_graph = kv_layout, use_cuda_graph
        self._plan: _Plan | None = None
        self._options: tuple = ()  # of the plan, all that is no tensor

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Nothing: no workspace is used."""

    def end_forward(self) -> None:
        """Nothing, as in FlashInfer."""

    def _keep(self, plan: _Plan) -> None:
        """A plan for the next runs. Under CUDA graphs into the tensors that were captured."""
        old = self._plan
        if not self._use_cuda_graph or old is None:
            self._take(plan)
            return
        kept = {}
        for name in ("page_table", "seq_lens", "cu_seqlens_q"):
            mine, new = getattr(old, name), getattr(plan, name)
            fits = new.dim() == mine.dim() and all(n <= m for n, m in zip(new.shape, mine.shape, strict=True))
            if not fits or new.shape[0] != mine.shape[0]:
                raise ValueError(
                    f"{_NAMES[name]}: want what fits the first plan of a wrapper with use_cuda_graph=True, "
                    f"{list(mine.shape)}, got {list(new.shape)}"
                )
            mine[tuple(slice(n) for n in new.shape)].copy_(new)
            kept[name] = mine
        self._take(plan._replace(**kept))

    def _take(self, plan: _Plan) -> None:
        self._plan, self._options = plan, ("wrapper", self._kv_layout, plan.one_row_each, plan[3:])

    def _replan(self, window_left: int, logits_soft_cap: float | None, sm_scale: float | None) -> None:
        """The same plan, but for what `forward` is told."""
        left, cap = as_host_int("window_left", window_left, -1), _softcap(logits_soft_cap)
        self._take(self._planned()._replace(window_left=left, softcap=cap, sm_scale=sm_scale))

    def _planned(self) -> _Plan:
        if self._plan is None:
            raise RuntimeError("plan: want a call of plan() before run(), got none")
        return self._plan

    def _run(
        self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor], scales: dict[str, Scale | None],
        out: Tensor | None, lse: Tensor | None, return_lse: bool, window_left: int | None, sinks: Tensor | None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None,
    ) -> Any:  # fmt: skip
        p = self._planned()
        scale: Scale = tensor("q", q, "T, Hq, D").shape[-1] ** -0.5 if p.sm_scale is None else p.sm_scale
        for name in ("q_scale", "k_scale"):
            scale = multiplied(scale, scales[name], name)
        out_scale = multiplied(1.0, scales["v_scale"], "v_scale")
        one_row, ((k, v, k_scales, v_scales), parts) = self._options[2], halves(paged_kv_cache, kv_cache_sf)
        (scale_number, scale_t), (out_number, out_t) = number_or_tensor(scale), number_or_tensor(out_scale)
        inputs = attention_inputs(
            q=q, k_cache=k, v_cache=v, k_scale_cache=k_scales, v_scale_cache=v_scales, page_table=p.page_table,
            seq_lens=p.seq_lens, cu_seqlens_q=None if one_row else p.cu_seqlens_q, sinks=sinks, out=out,
            lse=lse, softmax_scale_t=scale_t, out_scale_t=out_t,
        )  # fmt: skip
        op, options = "decode" if one_row else "prefill", (window_left, scale_number, out_number, return_lse)
        signature, cached = lookup_cached(_NAMES, op, (*self._options, *options), inputs, parts)
        if cached is None:
            cached = []
            kv: PagedKVLayer = with_caller_names(_NAMES, layer, paged_kv_cache, self._kv_layout, kv_cache_sf)
            _as_planned(p, q, kv)
            shape, dtype = (*q.shape[:2], kv.head_dim_v), p.dtypes[2] if out is None else None
            out, lse, made = with_caller_names(_NAMES, allocate_outputs, q, shape, out, dtype, lse, return_lse)
            window = _window(p, window_left)
            call = _call(p, q, kv, sinks, out, lse, window, scale, out_scale)
            with_caller_names(_NAMES, dispatch_call, op, call, None, signature._replace(outputs=made))
        found = attention_outputs(cached, out, lse, return_lse)
        lse = found[1] if return_lse else lse
        if lse is not None:  # NOTE: FlashInfer's LSE is base 2, tersekv's natural.
            lse.mul_(LOG2E)
        return found


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`: ragged new rows over pages, in every format that `layer` sees.

        >>> wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace_buffer)
        >>> pages = kv_indptr, kv_indices, kv_last_page_len
        >>> wrapper.plan(qo_indptr, *pages, 8, 2, 64, page_size=16, causal=True, q_data_type="bfloat16")
        >>> wrapper.run(q, (k_cache, v_cache)).shape
        torch.Size([100, 8, 64])

    `plan` takes the lengths to the host, as FlashInfer's does; `run` does not synchronise. Workspaces, `backend` and
    what only tunes FlashInfer's kernels are accepted, without effect. With use_cuda_graph=True the first plan allocates
    what later ones overwrite: plan the largest batch first.
    """

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None, paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None, paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None, mask_indptr_buf: Tensor | None = None, backend: str = "auto",
        jit_args: list | None = None, jit_kwargs: dict | None = None,
    ) -> None:  # fmt: skip
        refuse(jit_args=jit_args, jit_kwargs=jit_kwargs)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None, packed_custom_mask: Tensor | None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None, o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True, prefix_len_ptr: Tensor | None = None, token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0, max_item_len_ptr: Tensor | None = None, seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None, block_tables: Tensor | None = None, max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None, fixed_split_size: int | None = None, disable_split_kv: bool = False,
    ) -> None:  # fmt: skip
        """`plan` of FlashInfer.

            causal:       NOTE: False by default, as there: every row of a request sees all its keys
            sm_scale:     default 1 / sqrt(head_dim_qk)
            window_left:  keys seen before the query's own; -1: all
            o_data_type:  default q_data_type

        Raises UnsupportedError for custom masks, positions encoded in the kernel and scores of several items, and for a
        window where rows are not causal.
        """
        refuse(
            custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr, max_item_len_ptr=max_item_len_ptr,
        )  # fmt: skip
        refuse_positions(pos_encoding_mode)
        rows = index_tensor("qo_indptr", qo_indptr, "B + 1").to("cpu", torch.int64)
        pages = _pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, seq_lens, "paged_kv_")
        counts = _counts("qo_indptr", rows)
        if len(counts) != len(pages[1]):
            raise ValueError(f"qo_indptr: want B + 1 = {len(pages[1]) + 1} entries, got {len(rows)}")
        dtypes = _dtypes(q_data_type, kv_data_type, o_data_type)

        def planned(causal: bool) -> _Plan:
            (table, lens), begin, most = pages, rows, int(counts.max()) if len(counts) else 0
            alone = not causal and most > 1
            if alone:
                table, lens = (x.repeat_interleave(counts, 0) for x in (table, lens))
                begin, most = torch.arange(int(rows[-1]) + 1), 1
            return _Plan(
                table.to(self.device, torch.int32), lens.to(self.device, torch.int32),
                begin.to(self.device, torch.int32), int(rows[-1]), most, (num_qo_heads, num_kv_heads),
                (head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo), page_size, sm_scale,
                as_host_int("window_left", window_left, -1), _softcap(logits_soft_cap), dtypes, alone,
            )  # fmt: skip

        self._keep(planned(causal))
        self._plan_for, self._causal = planned, causal

    begin_forward = plan

    def run(
        self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor], *args: Any, q_scale: Scale | None = None,
        k_scale: Scale | None = None, v_scale: Scale | None = None, out: Tensor | None = None,
        lse: Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None,
        window_left: int | None = None, sinks: Tensor | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """`run` of FlashInfer: out [T, Hq, Dv], with return_lse also lse [T, Hq] in base 2.

        q_scale, k_scale:  multiply sm_scale; v_scale multiplies the output, for every cache dtype
        lse:               [T, Hq] fp32 to write into, base 2, with and without return_lse
        sinks:             [Hq] fp32, natural log
        kv_cache_sf:       e4m3 block scales of an NVFP4 cache, linear, in the layout of the cache
        *args:             scales of q, K and V of an fp8 query, as its third kernel takes them
        """
        refuse(skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        if len(args) not in (0, 3):
            raise ValueError(f"args: want no scales, or those of q, K and V, got {len(args)}")
        for name, scale in zip(scales, args, strict=False):
            named = scales[name]
            scales[name] = scale if named is None else multiplied(named, scale, name)
        return self._run(q, paged_kv_cache, scales, out, lse, return_lse, window_left, sinks, kv_cache_sf)

    def run_return_lse(self, *args: Any, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        return self.run(*args, **options, return_lse=True)

    def _forward(
        self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor], causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, k_scale: Scale | None = None,
        v_scale: Scale | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
        *, return_lse: bool,
    ) -> Any:  # fmt: skip
        """FlashInfer's older `run`: its options replace the plan's, `causal` too."""
        self._planned()
        refuse_positions(pos_encoding_mode)
        if causal != self._causal:
            self._keep(self._plan_for(causal))
            self._causal = causal
        self._replan(window_left, logits_soft_cap, sm_scale)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward = functools.partialmethod(_forward, return_lse=False)
    forward_return_lse = functools.partialmethod(_forward, return_lse=True)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """`flashinfer.BatchDecodeWithPagedKVCacheWrapper`: one new row a request, or q_len_per_req causal ones.

    >>> wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace_buffer)
    >>> wrapper.plan(kv_indptr, kv_indices, kv_last_page_len, 8, 2, 64, page_size=16, q_data_type="bfloat16")
    >>> q = torch.randn(2, 8, 64, dtype=torch.bfloat16)
    >>> wrapper.run(q, (k_cache, v_cache)).shape
    torch.Size([2, 8, 64])
    """

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None, paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto", jit_args: list | None = None,
    ) -> None:  # fmt: skip
        refuse(jit_args=jit_args)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, pos_encoding_mode: str = "NONE", window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None, o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None, sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, non_blocking: bool = True, block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None, fixed_split_size: int | None = None, disable_split_kv: bool = False,
        q_len_per_req: int = 1, *, window_right: int = 0,
    ) -> None:  # fmt: skip
        """`plan` of FlashInfer; see `BatchPrefillWithPagedKVCacheWrapper.plan`.

        data_type:     q_data_type and kv_data_type where they are None; as in FlashInfer, q_data_type left out is fp16
        window_right:  0
        """
        refuse_positions(pos_encoding_mode)
        if window_right != 0:
            raise UnsupportedError(f"window_right: want 0: no key after a row's own is seen, got {window_right!r}")
        table, lens = _pages(indptr, indices, last_page_len, page_size, seq_lens)
        n = as_host_int("q_len_per_req", q_len_per_req, 1)
        rows = torch.arange(len(lens) + 1) * n
        if data_type is not None:
            q_data_type = data_type if q_data_type is None else q_data_type
            kv_data_type = data_type if kv_data_type is None else kv_data_type
        dtypes = _dtypes("float16" if q_data_type is None else q_data_type, kv_data_type, o_data_type)
        self._keep(_Plan(
            table.to(self.device, torch.int32), lens.to(self.device, torch.int32),
            rows.to(self.device, torch.int32), int(rows[-1]), n, (num_qo_heads, num_kv_heads), (head_dim, head_dim),
            page_size, sm_scale,
            as_host_int("window_left", window_left, -1), _softcap(logits_soft_cap), dtypes, False,
        ))  # fmt: skip

    begin_forward = plan

    def run(
        self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor], *args: Any, q_scale: Scale | None = None,
        k_scale: Scale | None = None, v_scale: Scale | None = None, out: Tensor | None = None,
        lse: Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None,
        window_left: int | None = None, sinks: Tensor | None = None, q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """`run` of FlashInfer: out [B × q_len_per_req, Hq, D]; see `BatchPrefillWithPagedKVCacheWrapper.run`."""
        refuse(skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        if args:
            raise UnsupportedError("args: want none, which are for kernels of the caller's own, got some")
        planned = self._planned().max_q_len
        if q_len_per_req is not None and q_len_per_req != planned:
            raise ValueError(f"q_len_per_req: want {planned} as planned, got {q_len_per_req}")
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return self._run(q, paged_kv_cache, scales, out, lse, return_lse, window_left, sinks, kv_cache_sf)

    def run_return_lse(self, *args: Any, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        return self.run(*args, **options, return_lse=True)

    def _forward(
        self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor], pos_encoding_mode: str = "NONE",
        q_scale: Scale | None = None, k_scale: Scale | None = None, v_scale: Scale | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None, *, return_lse: bool,
    ) -> Any:  # fmt: skip
        """FlashInfer's older `run`: its options replace the plan's."""
        refuse_positions(pos_encoding_mode)
        self._replan(window_left, logits_soft_cap, sm_scale)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward = functools.partialmethod(_forward, return_lse=False)
    forward_return_lse = functools.partialmethod(_forward, return_lse=True)


def _pages(
    indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int, seq_lens: Tensor | None, prefix: str = ""
) -> tuple[Tensor, Tensor]:
    """(page table [B, max_pages], lengths [B]) of FlashInfer's ragged pages, on the host; what they say is checked.

    prefix: of the caller's names
    """
    starts = index_tensor(f"{prefix}indptr", indptr, "B + 1").to("cpu", torch.int64)
    counts, page_size = _counts(f"{prefix}indptr", starts), as_host_int("page_size", page_size, 1)
    last = index_tensor(f"{prefix}last_page_len", last_page_len, "B").to("cpu", torch.int64)
    if len(last) != len(counts):
        want = f"B = {len(counts)} entries as in {prefix}indptr"
        raise ValueError(f"{prefix}last_page_len: want {want}, got {len(last)}")
    ids, width = (
        index_tensor(f"{prefix}indices", indices, "pages").to("cpu", torch.int64).clamp(-1, 2**31 - 1),  # as int32
        int(counts.max()) if len(counts) else 0,
    )
    if len(counts) and int(starts[-1]) > len(ids):
        raise ValueError(f"{prefix}indptr: want at most {len(ids)}, the {prefix}indices, got {int(starts[-1])}")
    if seq_lens is None:
        wrong = (counts > 0) & ((last < 1) | (last > page_size))
        if wrong.any():
            raise ValueError(f"{prefix}last_page_len: want 1 to page_size {page_size}, got {int(last[wrong][0])}")
        lens = torch.where(counts > 0, (counts - 1) * page_size + last, 0)
    else:
        lens = index_tensor("seq_lens", seq_lens).to("cpu", torch.int64).flatten()
        if len(lens) != len(counts):
            raise ValueError(f"seq_lens: want B = {len(counts)} entries as in {prefix}indptr, got {len(lens)}")
        wrong = (lens < 0) | (lens > counts * page_size)
        if wrong.any():
            most, got = int((counts * page_size)[wrong][0]), int(lens[wrong][0])
            raise ValueError(f"seq_lens: want 0 to {most}, the room of the request's pages, got {got}")
    place = (starts[:-1, None] + torch.arange(max(width, 1))).clamp(max=max(len(ids) - 1, 0))
    return ids[place] if len(ids) else ids.new_zeros(place.shape), lens


def _counts(name: str, starts: Tensor) -> Tensor:
    """Of each request, of where they start: from 0 on, never falling."""
    counts = starts.diff()
    if not len(starts) or int(starts[0]) != 0 or bool((counts < 0).any()):
        raise ValueError(f"{name}: want numbers that begin with 0 and never fall, got {starts.tolist()[:8]}")
    return counts


def _dtypes(q: Any, kv: Any, o: Any) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    kinds = q, q if kv is None else kv, q if o is None else o
    found = []
    for name, x in zip(("q_data_type", "kv_data_type", "o_data_type"), kinds, strict=True):
        kind = getattr(torch, x, None) if isinstance(x, str) else x
        if not isinstance(kind, torch.dtype):
            raise TypeError(f"{name}: want a torch.dtype or its name, such as float16, got {x!r}")
        found.append(kind)
    return found[0], found[1], found[2]


def _as_planned(p: _Plan, q: Tensor, kv: PagedKVLayer) -> None:
    """Raises ValueError for a run that is not what was planned."""
    for name, got, want in (("q", q.dtype, p.dtypes[0]), ("paged_kv_cache", kv.k.dtype, p.dtypes[1])):
        if got != want:
            raise ValueError(f"{name}: want {dtype_name(want)} as planned, got {dtype_name(got)}")
    if q.shape[0] != p.rows:
        raise ValueError(f"q: want {p.rows} rows as planned, got {q.shape[0]}")
    if (q.shape[1], kv.num_kv_heads) != p.heads:
        raise ValueError(f"q, paged_kv_cache: want {p.heads} heads as planned, got {(q.shape[1], kv.num_kv_heads)}")
    dims = q.shape[2], kv.head_dim_v
    if dims != p.head_dims:
        raise ValueError(f"q, paged_kv_cache: want head_dim_qk and head_dim_vo {p.head_dims} as planned, got {dims}")
    if kv.page_size != p.page_size:
        raise ValueError(f"paged_kv_cache: want page_size {p.page_size} as planned, got {kv.page_size}")


def _window(p: _Plan, left: int | None) -> int:
    """`window_left` of a run, or of its plan, as a record has it: tersekv's window counts the query's own key too."""
    window = as_host_int("window_left", p.window_left if left is None else left, -1) + 1
    if window > 0 and p.rows_alone:
        raise UnsupportedError("window_left: want -1 with causal=False and several rows a request, got a window")
    return window


def _call(
    p: _Plan, q: Tensor, kv: PagedKVLayer, sinks: Tensor | None, out: Tensor, lse: Tensor | None, window: int,
    scale: Scale, out_scale: Scale,
) -> AttentionCall:  # fmt: skip
    softmax_number, softmax_t = with_caller_names(_NAMES, float_and_tensor, scale, "softmax_scale")
    out_number, out_t = with_caller_names(_NAMES, float_and_tensor, out_scale, "out_scale")
    return AttentionCall(
        q=q, k_cache=kv.k, v_cache=kv.v, k_scale_cache=kv.k_scale_cache, v_scale_cache=kv.v_scale_cache,
        page_table=p.page_table, seq_lens=p.seq_lens, cu_seqlens_q=None if p.one_row_each else p.cu_seqlens_q,
        sinks=sinks, out=out, lse=lse, format=kv.formats[0], max_q_len=p.max_q_len, window=window, softcap=p.softcap,
        softmax_scale=softmax_number, softmax_scale_t=softmax_t, out_scale=out_number, out_scale_t=out_t,
    )  # fmt: skip


def multiplied(a: Scale, b: Scale | None, name: str) -> Scale:
    """A product, of fp32 tensors [1] on the device too; name: of b, which is no scale of each head."""
    if b is None:
        return a
    if not isinstance(b, Tensor):
        b = as_float(name, b, "a number or a Tensor")
    elif b.numel() != 1 or b.dtype != torch.float32:
        raise ValueError(f"{name}: want a number or float32 with 1 element, got {list(b.shape)} {dtype_name(b.dtype)}")
    if type(a) is float and a == 1.0:
        return b
    product = a * b
    return product.reshape(1) if isinstance(product, Tensor) and product.numel() == 1 else product


def _softcap(cap: float | None) -> float:
    return 0.0 if cap is None else as_float("logits_soft_cap", cap, "a number or None")


def refuse(**given: Any) -> None:
    for name, x in given.items():
        if x is not None:
            raise UnsupportedError(f"{name}: want None, which tersekv's kernels need, got a value")


def refuse_positions(mode: str) -> None:
    if mode != "NONE":
        raise UnsupportedError(f"pos_encoding_mode: want 'NONE' (rotate before appending), got {mode!r}")
