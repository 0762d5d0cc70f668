"""vLLM's functions of an indexer: its cache written and gathered, and its selections. Imported through
`tersekv.compat.vllm`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..calls import IndexAppendCall
from ..dispatch.checks import INDEX, joined
from ..errors import UnsupportedError
from ..formats import INDEX_BLOCK
from ..index_layers import PagedIndexLayer
from ._adapt import as_host_int, dtype_name, first_rows, tensor, with_caller_names
from ._indexer import launched, take_largest, where_inside

_CACHE_NAMES = dict.fromkeys(("k_cache", "k_scale_cache", "pages"), "kv_cache")
_TOPK_NAMES = {"scores": "logits", "out": "raw_topk_indices", "k": "topk_tokens"}
_DECODE_NAMES = _TOPK_NAMES | {"visible": "seq_lens"}
_PREFILL_NAMES = _TOPK_NAMES | {"starts": "cu_seqlen_ks", "visible": "cu_seqlen_ke"}


def indexer_k_quant_and_cache(
    k: Tensor, kv_cache: Tensor, slot_mapping: Tensor, quant_block_size: int, kv_cache_dtype: str
) -> None:
    """`vllm._custom_ops.indexer_k_quant_and_cache`: quantise an indexer's keys and write them into its pages.

        >>> k, kv_cache = torch.randn(100, 128).bfloat16(), torch.zeros(16, 64, 132, dtype=torch.uint8)
        >>> indexer_k_quant_and_cache(k, kv_cache, torch.arange(100), 128, "ue8m0")

        k:                 [T, Di] bf16 | fp16 | fp32, normed and rotated; longer than slot_mapping is padding
        kv_cache:          [P, S, Di + 4] uint8, written: a page is S rows of codes, then S fp32 scales
        slot_mapping:      [T]  page * S + offset; negative: skipped
        quant_block_size:  128, the columns of a scale
        kv_cache_dtype:    "ue8m0": scales are powers of two

    Raises UnsupportedError for another kv_cache_dtype, and ValueError or TypeError for a bad argument.
    """

    def make() -> tuple[IndexAppendCall, dict[str, Tensor]]:
        return _append_call(k, kv_cache, slot_mapping, quant_block_size, kv_cache_dtype), {}

    launched(
        _CACHE_NAMES, "index_append", ("indexer_k_quant", quant_block_size, kv_cache_dtype),
        (k, kv_cache, None, slot_mapping, None, None, None, None), make, {"k_scale_cache": "k_cache"},
    )  # fmt: skip


def _append_call(
    k: Tensor, kv_cache: Tensor, slot_mapping: Tensor, quant_block_size: int, kv_cache_dtype: str
) -> IndexAppendCall:
    if as_host_int("quant_block_size", quant_block_size) != INDEX_BLOCK:
        raise ValueError(f"quant_block_size: want {INDEX_BLOCK}, got {quant_block_size}")
    if kv_cache_dtype != "ue8m0":
        raise UnsupportedError(f"kv_cache_dtype: want 'ue8m0', scales of powers of two, got {kv_cache_dtype!r}")
    tensor("k", k, "T, Di")
    rows = first_rows("k", k, tensor("slot_mapping", slot_mapping, "T").shape[0], "slot_mapping")
    layer = with_caller_names(_CACHE_NAMES, PagedIndexLayer.from_buffer, kv_cache)
    return IndexAppendCall(
        rows, layer.k, layer.scale, slot_mapping, None, None, None, None, layer.format, 0.0, False, False, False, False
    )


def cp_gather_indexer_k_quant_cache(
    kv_cache: Tensor, dst_k: Tensor, dst_scale: Tensor, block_table: Tensor, cu_seq_lens: Tensor
) -> None:
    """`vllm._custom_ops.cp_gather_indexer_k_quant_cache`: copy requests' keys out of the pages, one behind the other.

        >>> kv_cache = torch.zeros(16, 64, 132, dtype=torch.uint8)
        >>> dst_k, dst_scale = torch.empty(100, 128, dtype=torch.uint8), torch.empty(100, 4, dtype=torch.uint8)
        >>> block_table, cu_seq_lens = torch.tensor([[3], [5]]), torch.tensor([0, 60, 100])
        >>> cp_gather_indexer_k_quant_cache(kv_cache, dst_k, dst_scale, block_table, cu_seq_lens)

        kv_cache:     [P, S, Di + 4] uint8
        dst_k:        [N, Di] of one byte each, written: codes
        dst_scale:    [N, 4] of one byte each or [N, 1] fp32, written: scales
        block_table:  [B, max_pages]; cu_seq_lens [B + 1]: where each request's keys begin in dst_k

    Rows of dst_k from cu_seq_lens[B] on stay as they are, on a GPU also those of keys outside table and cache. Here
    PyTorch's own operations copy. Raises ValueError or TypeError for a bad argument; on a CPU and in checked mode also
    for keys outside. What `fp8_mqa_logits` needs: tersekv.index_select reads pages as they are.
    """
    layer = with_caller_names(_CACHE_NAMES, PagedIndexLayer.from_buffer, kv_cache)
    if layer.scale is None or layer.scale.dim() != 2:
        raise ValueError(f"kv_cache: want one scale a token, Di at most {INDEX_BLOCK}, got {list(kv_cache.shape)}")
    n = tensor("dst_k", dst_k, "N, Di").shape[0]
    for name, x, columns in (("dst_k", dst_k, layer.head_dim), ("dst_scale", tensor("dst_scale", dst_scale), 4)):
        if x.dim() != 2 or (x.shape[0], x.shape[1] * x.element_size()) != (n, columns):
            raise ValueError(f"{name}: want {n} rows of {columns} bytes, got {list(x.shape)} of {x.element_size()}")
        if x.element_size() > 1 and x.stride(1) != 1:
            raise ValueError(f"{name}: want dense rows, got strides {list(x.stride())}")
    for name, x, shape in (("block_table", block_table, "B, max_pages"), ("cu_seq_lens", cu_seq_lens, "B + 1")):
        if tensor(name, x, shape).dtype not in INDEX:
            raise ValueError(f"{name}: want int32 | int64 | uint32, got {dtype_name(x.dtype)}")
    count, width = block_table.shape
    if cu_seq_lens.shape[0] != count + 1:
        raise ValueError(f"cu_seq_lens: want [{count + 1}], one more than block_table, got {list(cu_seq_lens.shape)}")
    if n == 0 or count == 0:
        return
    token, begins = torch.arange(n, device=dst_k.device), cu_seq_lens.to(torch.int64)
    request = torch.searchsorted(begins[1:].contiguous(), token, right=True)
    known = request < count
    request = request.clamp(max=count - 1)
    position = torch.where(known, token - begins[request], 0)
    room = width * layer.page_size
    want = f"cu_seq_lens: want at most {room} keys a request, as in block_table"
    known = where_inside(known, position, room, want, "dst_k")
    if width == 0:
        return
    page = block_table[request, torch.where(known, position, 0) // layer.page_size].to(torch.int64)
    known = where_inside(known, page, layer.num_pages, f"block_table: want pages in [0, {layer.num_pages})", "dst_k")
    page, position = (torch.where(known, x, 0) for x in (page, position))
    for x, stored in ((dst_k, layer.k.view(torch.uint8)), (dst_scale, layer.scale[..., None].view(torch.uint8))):
        rows = x.view(torch.uint8)
        rows.copy_(torch.where(known[:, None], stored[page, position % layer.page_size], rows))


def top_k_per_row_decode(
    logits: Tensor,
    next_n: int,
    seq_lens: Tensor,
    raw_topk_indices: Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """`vllm._custom_ops.top_k_per_row_decode`: the columns of each row's largest logits.

        >>> logits, topk = torch.randn(2, 64), torch.empty(2, 8, dtype=torch.int32)
        >>> top_k_per_row_decode(logits, 1, torch.tensor([60, 40]), topk, 2, 64, 1, 8)

        logits:            [num_rows, W] fp32
        next_n:            rows of a request, of which row i sees all keys but the last next_n - i - 1
        seq_lens:          [B]; or [B, next_n], the keys that each row sees
        raw_topk_indices:  [num_rows, topk_tokens] int32, written: ascending, −1 behind them; equal logits: the smaller
        stride0, stride1:  accepted, without effect: the tensor's own count

    Raises ValueError or TypeError for a bad argument.
    """
    next_n = as_host_int("next_n", next_n, 1)
    visible = tensor("seq_lens", seq_lens)
    if visible.dim() == 2:
        visible = joined("seq_lens", visible)
    elif visible.dim() != 1:
        raise ValueError(f"seq_lens: want [B] or [B, next_n], got {list(visible.shape)}")
    elif next_n > 1 and visible.dtype in INDEX:
        back = torch.arange(1 - next_n, 1, device=visible.device)
        visible = (visible.to(torch.int64)[:, None] + back).flatten()
    _topk(_DECODE_NAMES, logits, raw_topk_indices, visible, None, num_rows, topk_tokens)


def top_k_per_row_prefill(
    logits: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    raw_topk_indices: Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """`vllm._custom_ops.top_k_per_row_prefill`: `top_k_per_row_decode` of rows that see columns [start, end).

        >>> logits, topk = torch.randn(2, 64), torch.empty(2, 8, dtype=torch.int32)
        >>> top_k_per_row_prefill(logits, torch.tensor([0, 40]), torch.tensor([40, 64]), topk, 2, 64, 1, 8)

        cu_seqlen_ks, cu_seqlen_ke:  [num_rows]; what is written counts from cu_seqlen_ks

    Raises ValueError or TypeError for a bad argument.
    """
    _topk(_PREFILL_NAMES, logits, raw_topk_indices, cu_seqlen_ke, cu_seqlen_ks, num_rows, topk_tokens)


def _topk(
    names: dict[str, str], logits: Tensor, out: Tensor, visible: Tensor, starts: Tensor | None, num_rows: int, k: int
) -> None:
    n = as_host_int("num_rows", num_rows, 0)
    logits, visible, out = (
        first_rows(name, tensor(name, x), n, "num_rows")
        for name, x in (("logits", logits), (names["visible"], visible), (names["out"], out))
    )
    if starts is not None:
        starts = first_rows(names["starts"], tensor(names["starts"], starts), n, "num_rows")
    take_largest(names, ("top_k_per_row",), logits, visible, starts, out, as_host_int("topk_tokens", k, 1))
