"""index_scores, natively; and the record of a selection from them."""

from __future__ import annotations

from ctypes import c_int64
from functools import partial
from types import SimpleNamespace
from typing import Any

from tersekv.formats import INDEX_BLOCK, index_format

from . import library, records
from .library import BoundLaunch, NativeLaunch
from .records import CODES, CallFacts, IndexScores, StridedTensor, paged_matrix

_TENSORS = ("q", "weights", "k_cache", "k_scale_cache", "page_table", "seq_lens", "cu_seqlens_q", "out")


def why_not(f: SimpleNamespace) -> str | None:
    return library.why_not(f)


def configure(f: SimpleNamespace) -> NativeLaunch:
    return index_scores_or_select_launch(f, f.out.shape[-1], None)


def index_scores_or_select_launch(
    f: SimpleNamespace, num_score_columns: int, topk_selection: tuple[int, int, int, int] | None
) -> NativeLaunch:
    """topk_selection: k, keep_first, keep_last and open_group; None: scores."""
    names = (*_TENSORS, *(("out_lens",) if topk_selection else ("starts", "ends")))
    facts, fmt, num_strides = CallFacts(f, names), index_format(f.format), 2 if f.each else 1
    tensor = partial(address_index_and_first_strides, facts)
    keys = paged_matrix(tensor("k_cache"), CODES[fmt.code], f.k_cache.shape[-1], tensor("q"))
    keys.scales, keys.width = tensor("k_scale_cache"), INDEX_BLOCK
    keys.scale_dtype = records.DTYPES[f.k_scale_cache.dtype] if f.k_scale_cache else 0
    record = IndexScores(
        keys, facts.index_tensor("page_table"), facts.index_tensor("seq_lens"), facts.index_tensor("cu_seqlens_q"),
        f.seq_lens.shape[0], f.q.shape[0], f.q.shape[1], f.max_q_len, f.page_table.shape[1], *f.k_cache.shape[:2],
        facts.dtype("q"), tensor("weights"), f.ratio, f.relu, f.each, f.block, num_score_columns, f.scale,
        tensor("out", num_strides), tensor("out_lens", num_strides), facts.index_tensor("starts"),
        facts.index_tensor("ends"), topk_selection is not None, *(topk_selection or (0, 0, 0, 0)),
    )  # fmt: skip
    return NativeLaunch("index_scores", record, names)


def address_index_and_first_strides(facts: CallFacts, name: str, num_strides: int = 2) -> StridedTensor:
    """Returns a tensor and the strides of its first dimensions, of any meaning."""
    if facts.at(name) == records.NONE:
        return StridedTensor(records.NONE)
    return StridedTensor(facts.at(name), (c_int64 * 3)(*facts.strides(name)[:num_strides]))


def run(call: Any, config: NativeLaunch) -> None:
    config.run(call)


def bind(config: NativeLaunch, at: dict[str, int]) -> BoundLaunch:
    return config.bind(at)
