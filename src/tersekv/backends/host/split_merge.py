"""Attention in two launches: a split pass over equal shares of all tiles, and the merge of what that cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ...formats import E4M3_MAX, E5M2_MAX
from . import launch
from .bind import BYTES, PART, Instead, Launches, Scratch, Template, given, strides

# Where a request is cut by its own length (docs/serving.md).
PIECE_KEYS = 512  # of a piece at least
MOST_PIECES = 128  # of a segment, as `triton/parts/shares` has it
MANY_PAGES = 1 << 24  # of a request, where kernels are chosen for any length
_OUT_MAX = {torch.float8_e4m3fn: E4M3_MAX, torch.float8_e5m2: E5M2_MAX}
_OUT_KIND = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def is_empty(f: SimpleNamespace) -> bool:
    """Whether there is no query or no request."""
    return 0 in f.out.shape or f.seq_lens.shape[0] == 0


def reads(f: SimpleNamespace) -> dict[str, Any]:
    """Arguments of a split pass, beside queries and caches."""
    tensors = given(TABLE="page_table", LENS="seq_lens", CU="cu_seqlens_q", SOFTMAX_T="softmax_scale_t")
    sizes = {"B": f.seq_lens.shape[0], "T": f.out.shape[0], "softmax_scale": f.softmax_scale}
    return tensors | sizes | {"st_b": f.page_table.stride[0]}


def rows_of(f: SimpleNamespace) -> dict[str, Any]:
    """Of a kernel of many rows, the argument that says where requests begin, or how many rows every one has."""
    return {"CU": f.max_q_len} if f.cu_seqlens_q is None else given(CU="cu_seqlens_q")


def writes(f: SimpleNamespace, as_bytes: bool = False) -> dict[str, Any]:
    """Arguments of either launch: the outputs, and the scratch. as_bytes: kernels write fp8 by bit arithmetic."""
    tensors = given(LSE="lse", PART=PART, OUT_T="out_scale_t") | given(BYTES if as_bytes else "", OUT="out")
    return tensors | {"out_scale": f.out_scale} | strides(f.out, so_="th") | strides(f.lse, sl_="th")


def features(f: SimpleNamespace) -> dict[str, Any]:
    """Constants that any such attention is compiled for."""
    return written(f) | {
        # Ragged rows are read from cu_seqlens_q; a bound that changes with the batch must not compile anew.
        "MAX_Q": 0 if f.cu_seqlens_q is not None else f.max_q_len,
        "RAGGED": f.cu_seqlens_q is not None,
    }


def written(f: SimpleNamespace) -> dict[str, Any]:
    """Constants of what an attention writes, and of its scale of scores."""
    return {
        "HAS_LSE": f.lse is not None,
        "SOFTMAX_T": f.softmax_scale_t is not None,
        "OUT_T": f.out_scale_t is not None,
        "OUT_MAX": _OUT_MAX.get(f.out.dtype, 0.0),
        "OUT_KIND": "float" if launch.rounds_to_fp8(f) else _OUT_KIND.get(f.out.dtype, "float"),
    }


def alone(f: SimpleNamespace, rows: int = 1) -> SimpleNamespace:
    """The facts by which kernels are chosen: where no other request may count, none of a batch's bounds does.

    rows: query rows of a request, for which a kernel is then chosen
    """
    if not f.batch_invariant:
        return f
    table = f.page_table._replace(shape=(1, MANY_PAGES))
    return SimpleNamespace(**vars(f) | {"max_q_len": rows, "page_table": table})


def piece_tiles(f: SimpleNamespace, tile: int) -> int:
    """PIECE of `triton/parts/shares`: least tiles of a piece, where requests are cut by their own lengths; else 0."""
    return max(1, PIECE_KEYS // tile) if f.batch_invariant else 0


def merged_pieces(
    f: SimpleNamespace, split: Template, kernel: Any, arguments: dict[str, Any], page: int
) -> Launches | Instead:
    """The split pass, with room for every piece that there can be, and the merge of all pieces.

    arguments: of the merge; page: slots of a page
    """
    c = arguments["c"]
    tiles = -(-f.page_table.shape[1] * page // c.TILE)
    slots = max(1, min(MOST_PIECES, -(-tiles // c.PIECE)))
    segments = f.out.shape[0] * c.GROUP // c.ROWS + f.seq_lens.shape[0]
    arguments = arguments | given(LENS="seq_lens", CU="cu_seqlens_q") | {"B": f.seq_lens.shape[0], "slots": slots}
    split = split.also(slots=slots)
    merge = Template(kernel, (segments * c.HEADS, c.PART_ROWS), arguments, num_warps=4) if slots > 1 else None
    return launches(f, split, merge, segments * slots * c.HEADS * c.PART_ROWS * c.PART_COLUMNS)


def see_nothing(call: Any) -> None:
    """Outputs are 0, and LSEs −inf."""
    call.out.zero_()
    if getattr(call, "lse", None) is not None:
        call.lse.fill_(float("-inf"))


def launches(f: SimpleNamespace, split: Template, merge: Template | None, scratch: int) -> Launches | Instead:
    """merge: None where nothing is left to it; scratch: fp32 numbers, for states of what is cut and notes about them"""
    if is_empty(f):
        return Instead(see_nothing)
    return Launches(split, *([] if merge is None else [merge]), scratch=Scratch(scratch))
