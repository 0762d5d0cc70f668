"""A case: a small frozen description of one call, which `make.py` turns into tensors."""

from __future__ import annotations

from dataclasses import dataclass

from ..formats import KV_FORMATS, kv_format

Lens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One call. Requests hold `lens` tokens, the last `q_lens` of them new (queries, or rows to append)."""

    op: str
    format: str
    name: str
    quick: bool = False
    lens: Lens = (37, 1, 0, 130)
    q_lens: Lens | None = None  # None: one each
    page: int = 16
    dtype: str = "bfloat16"  # of queries and new rows
    index: str = "int32"  # of every index tensor; "mixed": each has its own
    strided: bool = False  # rows are slices of wider buffers, outputs have gaps
    head_major: bool = False  # queries and outputs [T, H, D] lie head by head, LSEs too
    gaps: str = ""  # caches are parts of wider ones: of more "slots" or "heads" a page, or of longer rows ("columns")

    # K/V caches
    heads: int = 2
    group: int = 4
    dim: int = 64
    dim_v: int = 0  # 0: dim
    layout: str = "NHD"
    packed: bool = False
    scales: str = "apart"  # where stored ones lie; "inline", "tail"
    v_format: str = ""  # of V, where it is another
    rotation: str = ""  # of "k", "v" or "kv"
    channels: str = ""  # scales of channels, of "k", "v" or "kv"
    spread: bool = False  # rows of very different size, so that stored scales differ widely

    # latent caches
    rank: int = 512
    rope: int = 64
    split: bool = False

    # scales: "one"; "float"; "tensor" [1]; "head" [H]
    scale: str = "one"

    # appends
    place: str = "slots"  # or "pages": batch_indices, positions, kv_indptr, kv_indices
    skip: bool = False  # some rows are skipped, some point outside the cache
    rotary: int = 0  # rotary dimensions; 0: the whole row
    rotate: bool = True  # mla_append
    interleaved: bool = False
    query: bool = True
    q_nope: int = 0  # mla_append
    out_dtype: str = ""  # of queries and attention outputs; "": dtype
    reciprocal: bool = False  # scale tensors quantise
    zero_padding: bool = False
    special: bool = False  # a row with NaN, −0 and inf
    widen: bool = True  # int4: rows of one sign are widened to hold 0

    # attention
    ragged: bool = False  # cu_seqlens_q
    slack: int = 0  # ragged: max_q_len is so much more than it has to be
    mask: bool = False
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    lse: bool = True
    precision: str = "exact"
    batch_invariant: bool = False
    new_rows: bool = False  # prefill: the new tokens' k and v are given, their slots hold nothing

    # lists of keys
    listed: int = -1  # entries of a row's list; -1: there are none
    block_size: int = 1  # positions of an entry
    by_slot: bool = False
    each_head: bool = False  # K/V caches: a list for each KV head
    list_lens: bool = False  # lists have lengths of their own
    lists: str = ""  # "shared": one for all rows; "again": entries may repeat
    sink: str = ""  # sinks of another size: "inf", "-inf", "far"
    extra_listed: int = -1  # a second set of keys (`extra`): entries of its lists; -1: there is none
    extra_by_slot: bool = False
    extra_format: str = ""  # "": format
    extra_page: int = 16
    lse_of_keys: bool = False  # latents: without the sinks
    max_logits: bool = False  # latents of 16 bits: the largest scores too

    # mla_prefill, mla_decode_branch
    nope: int = 128
    chunk: int = 0  # rows of the buffer; 0: all
    epsilon: float = 1e-6
    weight: str = "float8_e4m3fn"
    raw_in_cache: bool = False
    sharp: bool = False  # scores differ by tens: many keys in vain before the one that counts

    # merge_states
    parts: int = 2

    # transcode, of the pages that are read; what stands above is of those that are written
    latents: bool = False
    src_format: str = ""  # "": format
    src_v_format: str = ""  # "": src_format
    src_page: int = 16
    src_layout: str = "NHD"
    src_scales: str = "apart"
    src_rotation: str = ""
    src_channels: str = ""
    src_scale: str = "one"
    alike: bool = False  # both have the same scale of the tensor, signs and channel scales, where both have some

    # an indexer: `heads` queries of `dim` columns, `rotary`, `rotation` and `interleaved` as above
    norm: bool = False
    rope_last: bool = False
    round16: bool = False
    weighted: bool = True
    ratio: int = 1
    relu: bool = True
    each: bool = False
    block: int = 1
    width: int = 0  # columns of the scores; 0: those of the page table
    top: int = 8
    keep_first: int = 0
    keep_last: int = 0
    open_group: bool = False
    starts: bool = False  # index_topk, index_scores: rows begin at columns of their own, and the latter end there
    whole: bool = False  # small whole numbers: every sum is exact, and many are equal

    @property
    def id(self) -> str:
        return f"{self.op}/{self.format}/{self.name}"


def up_to_step(name: str, dim: int) -> int:
    """`dim`, rounded up to what the format's rows can hold."""
    step = kv_format(name).scale_block or 8
    return -(-dim // step) * step


def next_format(name: str) -> str:
    """The format after this one in the list."""
    names = [*KV_FORMATS]
    return names[(names.index(name) + 1) % len(names)]
