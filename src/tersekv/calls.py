"""One record per operation: everything that a backend's `run` gets, flat, in the order of the registered operator.

The public functions in `ops/` fill these; `torch.library` schemas are derived from them; facts are taken from them.
A pair `x_scale: float, x_scale_t: Tensor | None` is one scale: the tensor wins where it is given, so that a scale
on the device never has to be read by the host.

Quantising scales of the appends multiply: code = cast(x * scale). The float is already the multiplier; a tensor is
one only if `scales_quantize`, else it dequantises and the kernel multiplies by its (correctly rounded) reciprocal.
nvfp4 needs both directions: m multiplies amax / 6, and its global scale g is the tensor where that dequantises, else
the correctly rounded 1 / m.

What is not finite: amax ignores NaN; a NaN (also inf × 0, in a row whose scale is inf) becomes 0x7F in fp8, code 0 in
int8 and e2m1, and the zero point in int4. The sign of an e2m1 code is the sign bit of x × (1 / scale), so −0 is code 8;
a block whose scale is 0 is all code 0.

K/V caches may have attributes (`attributes.py`). An append multiplies a row by the correctly rounded 1 / channel scale,
then by the signs, then takes butterflies (a + b, a - b) of elements h apart, h = 1, 2, 4 … b / 2, then multiplies by
fp32(1 / sqrt(b)): each step one fp32 operation. An attention multiplies q by K's channel scale and rotates it; its
output it rotates back and multiplies by V's.

Where a token goes is given either by `slot_mapping` [T] (page * S + offset; negative: skip), or, FlashInfer-style, by
`batch_indices` [T] (negative: skip), `kv_positions` [T], `kv_indptr` [B + 1] and `kv_indices`:
page = kv_indices[kv_indptr[b] + pos // S]. A place outside the cache is dropped, never written.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AppendCall(NamedTuple):
    k: Tensor  # [T, H, D] bf16 | fp16 | fp32, or an fp8 cache's own dtype: codes, stored as they are
    v: Tensor  # [T, H, Dv]
    k_cache: Tensor  # [P, S, H, D] written; any strides
    v_cache: Tensor  # [P, S, H, Dv] written
    k_scale_cache: Tensor | None  # written; per-token-head [P, S, H] fp32, nvfp4 [P, S, H, D/16] e4m3
    v_scale_cache: Tensor | None  # written
    slot_mapping: Tensor | None
    batch_indices: Tensor | None
    kv_positions: Tensor | None
    kv_indptr: Tensor | None
    kv_indices: Tensor | None
    format: str
    k_scale: float
    k_scale_t: Tensor | None  # [1] or [H] fp32
    v_scale: float
    v_scale_t: Tensor | None
    scales_quantize: bool
    v_format: str = ""  # where it is not K's
    k_signs: Tensor | None = None  # [b] fp32, ±1: rows lie rotated, in blocks of b columns
    v_signs: Tensor | None = None
    k_channel_scale: Tensor | None = None  # [H, D] fp32: rows lie divided by it, before they were rotated
    v_channel_scale: Tensor | None = None  # [H, Dv]
    widen: bool = True  # int4: the range of a row is widened to hold 0


class RopeAppendCall(NamedTuple):
    q_rope: Tensor | None  # [T, Hq, R]; None: no query to rotate
    q_nope: Tensor | None  # [T, Hq, N]
    k_rope: Tensor  # [T, H, R]
    k_nope: Tensor | None  # [T, H, N]; the cached K row is [rope | nope]
    v: Tensor  # [T, H, Dv]
    cos_sin_cache: Tensor  # [max_pos, R] fp32, [cos(R/2) | sin(R/2)]
    positions: Tensor  # [T] RoPE positions
    q_rope_out: Tensor | None  # [T, Hq, R] written; 16-bit, fp32, e4m3 or e5m2
    q_nope_out: Tensor | None  # [T, Hq, N] written
    k_cache: Tensor  # [P, S, H, R + N] written
    v_cache: Tensor  # written
    k_scale_cache: Tensor | None  # written
    v_scale_cache: Tensor | None  # written
    slot_mapping: Tensor | None
    batch_indices: Tensor | None
    kv_positions: Tensor | None
    kv_indptr: Tensor | None
    kv_indices: Tensor | None
    format: str
    interleaved: bool
    q_scale: float  # multiplies the query before the cast
    q_scale_t: Tensor | None
    k_scale: float
    k_scale_t: Tensor | None
    v_scale: float
    v_scale_t: Tensor | None
    scales_quantize: bool
    zero_padding: bool  # q_out rows of tokens that are skipped (negative index) are written as 0
    v_format: str = ""  # where it is not K's
    k_signs: Tensor | None = None  # [b] fp32, ±1: rows lie rotated, in blocks of b columns
    v_signs: Tensor | None = None
    k_channel_scale: Tensor | None = None  # [H, D] fp32: rows lie divided by it, before they were rotated
    v_channel_scale: Tensor | None = None  # [H, Dv]


class MLAAppendCall(NamedTuple):
    q_rope: Tensor | None  # [T, Hq, R]
    q_nope: Tensor | None  # [T, Hq, Nq]
    kv_c: Tensor  # [T, L]
    k_pe: Tensor | None  # [T, R]; None: rows have no rotary part
    cos_sin_cache: Tensor | None  # [max_pos, R] fp32; None: k_pe is stored as it is
    positions: Tensor | None  # [T]
    q_rope_out: Tensor | None  # written
    q_nope_out: Tensor | None  # written
    ckv: Tensor  # [P, S, L] written
    kpe: Tensor  # [P, S, R] written
    ckv_scale_cache: Tensor | None  # [P, S, L/128] fp32 written (fp8_ds_mla)
    slot_mapping: Tensor | None
    batch_indices: Tensor | None
    kv_positions: Tensor | None
    kv_indptr: Tensor | None
    kv_indices: Tensor | None
    format: str
    interleaved: bool
    q_scale: float
    q_scale_t: Tensor | None
    kv_scale: float
    kv_scale_t: Tensor | None
    scales_quantize: bool
    zero_padding: bool


class AttentionCall(NamedTuple):
    """Paged attention: `decode`, which has no k and v, and `prefill`, which has no mask. Always built by keyword."""

    q: Tensor  # [T, Hq, D] bf16 | fp16 | fp32 | e4m3 | e5m2
    k_cache: Tensor  # [P, S, H, D]
    v_cache: Tensor  # [P, S, H, Dv]
    page_table: Tensor  # [B, max_pages]
    seq_lens: Tensor  # [B] new tokens included
    out: Tensor  # [T, Hq, Dv] written; 16-bit, fp32, e4m3 or e5m2
    format: str
    max_q_len: int  # largest number of query rows of a request
    softmax_scale: float
    k: Tensor | None = None  # [T, H, D] bf16 | fp16: the new tokens' own rows, in place of their slots
    v: Tensor | None = None  # [T, H, Dv]
    k_scale_cache: Tensor | None = None
    v_scale_cache: Tensor | None = None
    cu_seqlens_q: Tensor | None = None  # [B + 1]; None: T / B query rows for every request
    mask: Tensor | None = None  # [T, W] uint16 words, bit j of row i: draft i sees draft j; None: causal
    sinks: Tensor | None = None  # [Hq] fp32
    lse: Tensor | None = None  # [T, Hq] fp32 written, natural log
    window: int = 0  # keys seen by a query, its own included; 0: all
    softcap: float = 0.0  # 0: none
    softmax_scale_t: Tensor | None = None
    k_scale: float = 1.0  # dequantises
    k_scale_t: Tensor | None = None  # [1] or [H]
    v_scale: float = 1.0
    v_scale_t: Tensor | None = None
    out_scale: float = 1.0  # multiplies the output
    out_scale_t: Tensor | None = None
    precision: str = "exact"  # or "fast"
    v_format: str = ""  # where it is not K's
    k_signs: Tensor | None = None  # [b] fp32, ±1: cached rows lie rotated, in blocks of b columns; k and v do not
    v_signs: Tensor | None = None
    k_channel_scale: Tensor | None = None  # [H, D] fp32: rows lie divided by it, before they were rotated
    v_channel_scale: Tensor | None = None  # [H, Dv]
    batch_invariant: bool = False  # what is beside a request must not change its bits
    prefill_invariant: bool = False  # nor must the rows before and behind a row, in its own call or in others
    indices: Tensor | None = None  # [T, H | 1, n] blocks of keys that each row attends to; negative: none
    index_lens: Tensor | None = None  # [T] or [T, H | 1] used entries of each list; None: n
    block_size: int = 1  # consecutive positions of an entry


def attention_inputs(
    *, q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, seq_lens: Tensor, out: Tensor | None = None,
    k: Tensor | None = None, v: Tensor | None = None, k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None, cu_seqlens_q: Tensor | None = None, mask: Tensor | None = None,
    sinks: Tensor | None = None, lse: Tensor | None = None, softmax_scale_t: Tensor | None = None,
    k_scale_t: Tensor | None = None, v_scale_t: Tensor | None = None, out_scale_t: Tensor | None = None,
    k_signs: Tensor | None = None, v_signs: Tensor | None = None, k_channel_scale: Tensor | None = None,
    v_channel_scale: Tensor | None = None, indices: Tensor | None = None, index_lens: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Returns the tensors of an `AttentionCall` in its order: `inputs` of the launch cache."""
    return (
        q, k_cache, v_cache, page_table, seq_lens, out, k, v, k_scale_cache, v_scale_cache, cu_seqlens_q, mask, sinks,
        lse, softmax_scale_t, k_scale_t, v_scale_t, out_scale_t, k_signs, v_signs, k_channel_scale, v_channel_scale,
        indices, index_lens,
    )  # fmt: skip


class MLADecodeCall(NamedTuple):
    q_nope: Tensor  # [T, H, L] absorbed query; bf16 | fp16 | fp32 | e4m3 | e5m2
    q_pe: Tensor | None  # [T, H, R]; None: rows have no rotary part, and kpe [P, S, 0]
    ckv: Tensor  # [P, S, L]
    kpe: Tensor  # [P, S, R]
    ckv_scale_cache: Tensor | None  # [P, S, L/128] fp32
    page_table: Tensor | None  # [B, max_pages]; None: `indices` are slots
    seq_lens: Tensor | None  # [B] query tokens included; not read where `indices` are slots
    cu_seqlens_q: Tensor | None  # [B + 1]
    out: Tensor  # [T, H, L] written
    lse: Tensor | None  # [T, H] fp32 written
    format: str
    max_q_len: int
    softmax_scale: float
    softmax_scale_t: Tensor | None
    kv_scale: float
    kv_scale_t: Tensor | None
    out_scale: float
    out_scale_t: Tensor | None
    precision: str
    batch_invariant: bool = False  # as in decode
    indices: Tensor | None = None  # [T, n] keys of each row: positions, or slots (page * S + offset); negative: none
    index_lens: Tensor | None = None  # [T] used entries of each list; None: n
    block_size: int = 1  # consecutive positions of an entry
    sinks: Tensor | None = None  # [H] fp32
    extra_ckv: Tensor | None = None  # [P', S', L] another cache, whose listed keys are in the same softmax
    extra_kpe: Tensor | None = None  # [P', S', R]
    extra_ckv_scale_cache: Tensor | None = None
    extra_page_table: Tensor | None = None  # [B, max_pages']; None: its lists hold slots
    extra_indices: Tensor | None = None  # [T, n'] all of them are seen, whatever the row's own position
    extra_index_lens: Tensor | None = None  # [T]
    extra_format: str = ""
    extra_kv_scale: float = 1.0
    extra_kv_scale_t: Tensor | None = None
    lse_of_keys: bool = False  # lse leaves the sinks out
    # [T, H] fp32 written, laid out as lse: the largest scaled score; with indices only
    max_logits: Tensor | None = None


class MLAPrefillCall(NamedTuple):
    q: Tensor  # [T, H, Dn + R]; the rotary part is rotated in place
    kv_c: Tensor | None  # [T, L] raw latents of the new tokens; None: they are in the cache already (16-bit caches)
    k_pe: Tensor | None  # [T, R]
    ckv: Tensor  # [P, S, L] the new tokens' rows are written
    kpe: Tensor  # [P, S, R] written
    ckv_scale_cache: Tensor | None  # written
    page_table: Tensor  # [B, max_pages]
    cache_lens: Tensor  # [B] tokens cached before this step
    cu_seqlens_q: Tensor  # [B + 1]
    freqs_cis: Tensor | None  # [max_pos, R] interleaved cos, sin; its dtype is the rotation's; None: R is 0
    kv_norm_gamma: Tensor  # [L]
    kv_b_proj: Tensor  # [H * (Dn + Dv), L] e4m3 | bf16 | fp16
    kv_b_proj_scale: Tensor | None  # [H * (Dn + Dv) / 128, L / 128] fp32, with e4m3
    buffer_row_offsets: Tensor  # [C, B + 1] row of each request in chunk c's buffer
    cache_offsets: Tensor  # [C, B] or [C, B + 1] first cached token of each request in chunk c
    out: Tensor  # [T, H, Dv] written
    lse: Tensor | None  # [T, H] fp32 written
    buffer_lengths: list[int]  # [C] rows of each chunk
    format: str
    max_q_len: int
    softmax_scale: float
    epsilon: float
    kv_scale: float  # dequantises
    kv_scale_t: Tensor | None
    precision: str
    q_pe_out: Tensor | None = None  # [T, H, R] written instead of q's rotary part; only if buffer_lengths are all 0
    seq_lens_out: Tensor | None = None  # [B] int32 written: cache_lens and the new tokens; only if they are all 0


class MLAProjectCall(NamedTuple):
    x: Tensor  # [T, H, K]
    weight: Tensor  # [H, N, K] e4m3 | bf16 | fp16
    weight_scale: Tensor | None  # [H, N/128, K/128] fp32, with e4m3
    out: Tensor  # [T, H, N] written


class MLADecodeBranchCall(NamedTuple):
    q: Tensor  # [T, H, Dn + R], unrotated; not written
    kv_c: Tensor | None  # [T, L] raw latents of the new tokens; None: they are in the cache already (16-bit caches)
    k_pe: Tensor | None  # [T, R]
    ckv: Tensor  # [P, S, L] the new tokens' rows are written
    kpe: Tensor  # [P, S, R] written
    ckv_scale_cache: Tensor | None  # written
    page_table: Tensor  # [B, max_pages]
    cache_lens: Tensor  # [B] tokens cached before this step
    cu_seqlens_q: Tensor | None  # [B + 1]
    freqs_cis: Tensor | None  # [max_pos, R] interleaved cos, sin; its dtype is the rotation's; None: R is 0
    kv_norm_gamma: Tensor  # [L]
    w_uk: Tensor  # [H, L, Dn] e4m3 | bf16 | fp16
    w_uk_scale: Tensor | None  # [H, L/128, Dn/128] fp32, with e4m3
    w_uv: Tensor  # [H, Dv, L] e4m3 | bf16 | fp16
    w_uv_scale: Tensor | None  # [H, Dv/128, L/128] fp32, with e4m3
    out: Tensor  # [T, H, Dv] written
    format: str
    max_q_len: int
    softmax_scale: float
    softmax_scale_t: Tensor | None
    epsilon: float
    kv_scale: float  # dequantises
    kv_scale_t: Tensor | None


class MergeCall(NamedTuple):
    outs: Tensor  # [n, T, H, D]
    lses: Tensor  # [n, T, H] fp32, natural log
    out: Tensor  # [T, H, D] written
    lse: Tensor | None  # [T, H] fp32 written


class TranscodeCall(NamedTuple):
    """Tokens of one layer's pages into pages of another; always built by keyword.

    Of latent caches k is the latent part, v the rotary one, H is 1, and the formats are those of the parts: `bf16` of
    fp8_ds_mla's rotary part. A row whose format, scale of the tensor and attributes are equal on both sides is copied.
    Any other is dequantised in fp32, code × stored scale × scale of the tensor, and quantised as an append does it.
    Between these, unless the signs are equal and the channel scales of its head (none: 1) too, it is rotated back
    (butterflies, 1 / sqrt(b), signs), multiplied by the old channel scales and by the rounded 1 / new ones where these
    differ, and rotated anew.
    """

    src_k: Tensor  # [P, S, H, D]
    src_v: Tensor  # [P, S, H, Dv]
    src_pages: Tensor  # [n] page of the tokens i * S … i * S + S - 1
    k_cache: Tensor  # [P', S', H, D] written
    v_cache: Tensor  # written
    dst_pages: Tensor  # [m] page of the tokens i * S' … i * S' + S' - 1
    src_format: str
    src_v_format: str
    format: str
    v_format: str
    num_tokens: int  # at most n * S and m * S'
    num_tokens_t: Tensor | None = None  # [1] integer: how many of these there are
    src_k_scale_cache: Tensor | None = None
    src_v_scale_cache: Tensor | None = None
    k_scale_cache: Tensor | None = None  # written
    v_scale_cache: Tensor | None = None  # written
    src_k_scale: float = 1.0  # all of these dequantise
    src_k_scale_t: Tensor | None = None  # [1] or [H]
    src_v_scale: float = 1.0
    src_v_scale_t: Tensor | None = None
    k_scale: float = 1.0
    k_scale_t: Tensor | None = None
    v_scale: float = 1.0
    v_scale_t: Tensor | None = None
    src_k_signs: Tensor | None = None  # [b] fp32, ±1
    src_v_signs: Tensor | None = None
    src_k_channel_scale: Tensor | None = None  # [H, D] fp32
    src_v_channel_scale: Tensor | None = None  # [H, Dv]
    k_signs: Tensor | None = None
    v_signs: Tensor | None = None
    k_channel_scale: Tensor | None = None
    v_channel_scale: Tensor | None = None
    layers: Tensor | None = None  # [n, 24] int64: this layer and others that are like it (LAYER_COLUMNS)


# What `TranscodeCall.layers` says of each layer: how many times 16 bytes a tensor lies behind that of the record; then
# the bits of the four fp32 scales.
LAYER_COLUMNS = (
    "src_k", "src_v", "src_k_scale_cache", "src_v_scale_cache", "k_cache", "v_cache", "k_scale_cache", "v_scale_cache",
    "src_k_scale_t", "src_v_scale_t", "k_scale_t", "v_scale_t", "src_k_signs", "src_v_signs", "k_signs", "v_signs",
    "src_k_channel_scale", "src_v_channel_scale", "k_channel_scale", "v_channel_scale",
    "src_k_scale", "src_v_scale", "k_scale", "v_scale",
)  # fmt: skip


class IndexAppendCall(NamedTuple):
    """New keys of an indexer: norm, then RoPE, then rotation, then the cast. The norm is computed in fp64, of an fp32
    epsilon, and rounded once to fp32; RoPE and rotation as everywhere; `round16` rounds to k's dtype after each."""

    k: Tensor  # [T, Di] bf16 | fp16 | fp32
    k_cache: Tensor  # [P, S, Di] written
    k_scale_cache: Tensor | None  # written; index_fp8: fp32 [P, S], of more than 128 columns [P, S, 2]
    slot_mapping: Tensor  # [T]
    norm_weight: Tensor | None  # [Di] of a LayerNorm
    norm_bias: Tensor | None  # [Di]
    cos_sin_cache: Tensor | None  # [max_pos, R] fp32
    positions: Tensor | None  # [T]
    format: str
    epsilon: float
    interleaved: bool
    rope_last: bool  # the last R columns are rotated; else the first
    hadamard: bool  # rows lie rotated in blocks of the largest power of two that divides Di, without signs
    round16: bool


class IndexQueryCall(NamedTuple):
    """Queries of an indexer, made as keys are, but for the norm. index_fp8: one scale a head, which goes to the
    weight."""

    q: Tensor  # [T, Hi, Di] bf16 | fp16 | fp32
    weights: Tensor | None  # [T, Hi]; None: ones
    cos_sin_cache: Tensor | None
    positions: Tensor | None
    q_out: Tensor  # [T, Hi, Di] written, in the dtype of the cache's codes
    weights_out: Tensor  # [T, Hi] fp32 written: (weights * weight_scale) * the query's scale
    format: str
    interleaved: bool
    rope_last: bool
    hadamard: bool
    round16: bool
    weight_scale: float


class IndexScoresCall(NamedTuple):
    """Scores of the keys that each row sees: scale · k_scale · Σ_h w_h · relu(q_h · k); −inf elsewhere.

    Of more than 128 columns each block's products are multiplied by their own scale, and summed before the ReLU.
    """

    q: Tensor  # [T, Hi, Di] bf16 | fp16 | e4m3
    weights: Tensor | None  # [T, Hi] fp32; None: ones
    k_cache: Tensor  # [P, S, Di]
    k_scale_cache: Tensor | None
    page_table: Tensor  # [B, max_pages]
    seq_lens: Tensor  # [B] tokens, new ones included
    cu_seqlens_q: Tensor | None  # [B + 1]
    out: Tensor  # [T, W] fp32 written; each: [T, Hi, W]
    format: str
    max_q_len: int
    ratio: int  # tokens of a cached key: row t sees (pos_t + 1) // ratio keys
    relu: bool
    scale: float
    each: bool  # a row of scores for each head, which are not summed
    block: int  # keys of a column: the largest of their scores; a NaN only if all are
    starts: Tensor | None = None  # [T] the first key that each row sees; with equal numbers of rows only, as are
    ends: Tensor | None = None  # [T] where its keys end, in place of its position


class IndexTopkCall(NamedTuple):
    """Columns of the largest scores, ascending, −1 behind them. NaN is less than every number; −inf is never taken."""

    scores: Tensor  # [T, W] or [T, Hi, W] fp32
    visible: Tensor  # [T] columns that each row sees, or with `starts` where they end
    open_group: Tensor | None  # [T] bool: column visible[t] is appended
    out: Tensor  # [T, k] or [T, Hi, k] int32 written; k + 1 columns with open_group
    out_lens: Tensor | None  # [T] or [T, Hi] int32 written
    k: int
    keep_first: int  # so many visible columns are taken before all others; of both together the last win
    keep_last: int
    starts: Tensor | None = None  # [T] the first column that each row sees, from which columns are counted in `out`


class IndexSelectCall(NamedTuple):
    """`IndexTopkCall` of the scores of an `IndexScoresCall`, which are never all in memory."""

    q: Tensor
    weights: Tensor | None
    k_cache: Tensor
    k_scale_cache: Tensor | None
    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    out: Tensor  # written
    out_lens: Tensor  # written
    format: str
    max_q_len: int
    ratio: int
    relu: bool
    scale: float
    each: bool
    block: int
    k: int
    keep_first: int
    keep_last: int
    open_group: bool  # of rows with (pos_t + 1) % ratio > 0
    width: int  # columns that are looked at


_CACHES = ("k_cache", "v_cache", "k_scale_cache", "v_scale_cache")
_LATENT = ("ckv", "kpe", "ckv_scale_cache")
_Q_OUT = ("q_rope_out", "q_nope_out")

# Operator name -> (record, the fields that are written in place).
CALLS: dict[str, tuple[type, tuple[str, ...]]] = {
    "append": (AppendCall, _CACHES),
    "rope_append": (RopeAppendCall, _Q_OUT + _CACHES),
    "mla_append": (MLAAppendCall, _Q_OUT + _LATENT),
    "decode": (AttentionCall, ("out", "lse")),
    "prefill": (AttentionCall, ("out", "lse")),
    "mla_decode": (MLADecodeCall, ("out", "lse", "max_logits")),
    "mla_prefill": (MLAPrefillCall, ("q", *_LATENT, "out", "lse", "q_pe_out", "seq_lens_out")),
    "mla_project": (MLAProjectCall, ("out",)),
    "mla_decode_branch": (MLADecodeBranchCall, (*_LATENT, "out")),
    "merge_states": (MergeCall, ("out", "lse")),
    "transcode": (TranscodeCall, _CACHES),
    "index_append": (IndexAppendCall, ("k_cache", "k_scale_cache")),
    "index_query": (IndexQueryCall, ("q_out", "weights_out")),
    "index_scores": (IndexScoresCall, ("out",)),
    "index_topk": (IndexTopkCall, ("out", "out_lens")),
    "index_select": (IndexSelectCall, ("out", "out_lens")),
}
