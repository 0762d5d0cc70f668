"""References of an indexer's operations, from the layout of its pages and the formulas alone: bytes → fp64, lists.

Appends and queries are fp32, one rounding an operation, as in `reference_append`; a norm is fp64, rounded once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..calls import IndexAppendCall, IndexQueryCall, IndexScoresCall, IndexSelectCall, IndexTopkCall
from ..formats import E4M3_MAX, INDEX, INDEX_BLOCK, MIN_INDEX_AMAX, KVFormat, index_format
from . import reference_rotation
from .codes import decode, encode
from .memory import as_bytes, put, storage_bytes, take
from .reference_append import _angles, places, rotate

# How far a key's score may be off, of the sum of the magnitudes of its products: tensor cores sum up products of 8-bit
# codes with some 14 bits.
PRODUCT = 4e-3


class Scores(NamedTuple):
    """values [T, (Hi,) W] fp64, −inf where nothing is seen; bounds: how far each may be off; columns [T], keys [T]."""

    values: Tensor
    bounds: Tensor
    columns: list[int]
    keys: list[int]
    positions: list[int]


def encode_rows(
    x: Tensor, f: KVFormat, columns: int = INDEX_BLOCK, whole: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Codes [..., D] and scales [..., blocks] of fp32 rows. whole: the numbers themselves are the codes."""
    if f.scale != INDEX:
        return encode(x, f.storage), None
    codes, scales = [], []
    for block in x.split(columns, -1):
        amax = torch.where(block.isnan(), 0.0, block.abs()).amax(-1)
        ratio = torch.maximum(amax, torch.tensor(MIN_INDEX_AMAX)) / torch.tensor(E4M3_MAX)
        exponent = torch.frexp(ratio.double())
        power = torch.where(exponent.mantissa == 0.5, exponent.exponent - 1, exponent.exponent)
        scale = torch.where(ratio.isinf(), ratio, (2.0 ** power.double()).float())
        scale = torch.ones_like(scale) if whole else scale
        codes.append(as_bytes(encode(block * (1.0 / scale)[..., None], f.storage))[..., 0])
        scales.append(scale)
    return torch.cat(codes, -1).view(f.storage), torch.stack(scales, -1)


def index_append(call: IndexAppendCall) -> None:
    pages, slots, live, _ = places(call, call.k_cache)  # type: ignore[arg-type]
    x, dtype = call.k.float(), call.k.dtype
    if call.norm_weight is not None and call.norm_bias is not None:
        wide = call.k.double()
        mean = wide.sum(-1, keepdim=True) / wide.shape[-1]
        variance = (wide - mean).pow(2).sum(-1, keepdim=True) / wide.shape[-1]
        wide = (wide - mean) / torch.sqrt(variance + torch.tensor(call.epsilon, dtype=torch.float32).double())
        x = _rounded(call, (wide * call.norm_weight.double() + call.norm_bias.double()).float(), dtype)
    x, known = _turned(call, x[:, None], dtype)
    live = live & known
    codes, scales = encode_rows(x[live, 0], index_format(call.format))
    put(call.k_cache, pages[live], slots[live], codes)
    if scales is not None and call.k_scale_cache is not None:
        put(call.k_scale_cache, pages[live], slots[live], scales[:, 0] if call.k_scale_cache.dim() == 2 else scales)


def index_query(call: IndexQueryCall) -> None:
    x, known = _turned(call, call.q.float(), call.q.dtype)
    x = torch.where(known[:, None, None], x, 0.0)
    codes, scales = encode_rows(x, index_format(call.format), columns=x.shape[-1])
    as_bytes(call.q_out).copy_(as_bytes(codes))
    weights = torch.ones(x.shape[:2]) if call.weights is None else call.weights.float()
    weights = weights * torch.tensor(call.weight_scale, dtype=torch.float32)
    call.weights_out.copy_(weights if scales is None else weights * scales[..., 0])


def _turned(call: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [T, H, D] with RoPE and rotation, and which tokens have a position."""
    known = torch.ones(x.shape[0], dtype=torch.bool)
    if call.cos_sin_cache is not None:
        cos, sin, known = _angles(call.cos_sin_cache, call.positions)
        first = x.shape[-1] - call.cos_sin_cache.shape[1] if call.rope_last else 0
        at = slice(first, first + call.cos_sin_cache.shape[1])
        x = x.clone()
        x[..., at] = rotate(x[..., at].clone(), cos, sin, call.interleaved)
        x = _rounded(call, x, dtype)
    if call.hadamard:
        ones = torch.ones(x.shape[-1] & -x.shape[-1])
        x = _rounded(call, reference_rotation.row(x, ones, None), dtype)
    return x, known


def _rounded(call: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    return encode(x, dtype).float() if call.round16 else x


def index_scores(call: IndexScoresCall) -> Scores:
    return _scores(call, call.out.shape[-1])


def index_topk(call: IndexTopkCall) -> None:
    is_open = None if call.open_group is None else call.open_group.tolist()
    starts = [0] * len(call.visible) if call.starts is None else call.starts.to(torch.int64).tolist()
    for t, n in enumerate(call.visible.to(torch.int64).tolist()):
        seen = max(min(n, call.scores.shape[-1]), 0)
        row = call.scores[t].reshape(-1, call.scores.shape[-1])
        for h, scores in enumerate(row.tolist()):
            taken = best(scores[max(starts[t], 0) : seen], call)
            _write(call, t, h, taken + ([n] if is_open is not None and is_open[t] and n >= 0 else []))


def best(scores: list[float], call: Any) -> list[int]:
    """The columns taken of those that are seen."""
    last = min(call.keep_last, call.k)
    first = min(call.keep_first, call.k - last)

    def order(j: int) -> tuple:
        kept = j < first or j >= len(scores) - last
        return not kept, scores[j] != scores[j], -scores[j] if scores[j] == scores[j] else 0.0, j

    return sorted(sorted((j for j, x in enumerate(scores) if x != -torch.inf), key=order)[: call.k])


def index_select(call: IndexSelectCall, done: IndexSelectCall) -> None:
    """Where scores lie so near to the border that their bounds meet, what the operation took stands."""
    s = _scores(call, call.width)
    lines = s.values.shape[1] if call.each else 1
    for t in range(s.values.shape[0]):
        n = s.columns[t]
        for h in range(lines):
            values, bounds = ((x[t, h] if call.each else x[t])[:n] for x in (s.values, s.bounds))
            got = (done.out[t, h] if call.each else done.out[t]).tolist()
            taken = _nearly(values, bounds, got, call)
            is_open = call.open_group and (s.positions[t] + 1) % call.ratio > 0
            _write(call, t, h, taken + ([s.keys[t]] if is_open else []))


def _nearly(values: Tensor, bounds: Tensor, got: list[int], call: Any) -> list[int]:
    """The columns taken, where scores may be off by bounds."""
    wanted = best(values.tolist(), call)
    last = min(call.keep_last, call.k)
    first = min(call.keep_first, call.k - last)
    free = list(range(first, max(len(values) - last, first)))
    room = len(wanted) - (len(values) - len(free))
    if not 0 < room < len(free) or not bool(bounds.max() > 0):
        return wanted
    low, high = (values - bounds)[free], (values + bounds)[free]
    least, most = (float(x.sort(descending=True).values[room - 1]) for x in (low, high))
    sure = {j for j, x in zip(free, low.tolist(), strict=True) if x > most}
    near = {j for j, x in zip(free, high.tolist(), strict=True) if x >= least}
    kept = {*range(len(values))} - {*free}
    taken = [j for j in got if j in near or j in kept]
    return sorted(taken) if len({*taken}) == len(taken) == len(wanted) and (sure | kept) <= {*taken} else wanted


def _write(call: Any, t: int, h: int, taken: list[int]) -> None:
    out = call.out[t] if call.out.dim() == 2 else call.out[t, h]
    out.copy_(torch.tensor(taken + [-1] * (out.shape[0] - len(taken))))
    if call.out_lens is not None:
        (call.out_lens[t : t + 1] if call.out_lens.dim() == 1 else call.out_lens[t, h : h + 1]).fill_(len(taken))


def _scores(call: Any, width: int) -> Scores:
    """Row by row, key by key block: dense fp64."""
    t, heads, _ = call.q.shape
    shape = (t, heads, width) if call.each else (t, width)
    found = Scores(torch.full(shape, -torch.inf, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64), [0] * t,
                   [0] * t, [-1] * t)  # fmt: skip
    product = 0.0 if _is_whole(call) else PRODUCT
    starts = [call.max_q_len * b for b in range(len(call.seq_lens) + 1)]
    if call.cu_seqlens_q is not None:
        starts = call.cu_seqlens_q.tolist()
    for b, n in enumerate(call.seq_lens.tolist()):
        rows = range(starts[b], starts[b + 1])
        keys = min(n // call.ratio, width * call.block)
        if keys <= 0 or not rows:
            _place_rows(found, rows, n, call.ratio)
            continue
        k, scales = raw_keys(call, b, keys)
        for i, row in enumerate(rows):
            position = n - len(rows) + i
            found.positions[row] = max(position, -1)
            found.keys[row] = max(position + 1, 0) // call.ratio
            if getattr(call, "ends", None) is not None:
                found.keys[row] = int(call.ends[row])
            found.columns[row] = min(-(-found.keys[row] // call.block), width)
            seen = min(found.keys[row], keys)
            if seen:
                _row(call, found, row, k[:seen], None if scales is None else scales[:seen], product)
            if getattr(call, "starts", None) is not None:
                found.values[row][..., : int(call.starts[row])] = -torch.inf
    return found


def _place_rows(found: Scores, rows: range, n: int, ratio: int) -> None:
    """Rows that see no key of the cache."""
    for i, row in enumerate(rows):
        found.positions[row] = max(n - len(rows) + i, -1)
        found.keys[row] = max(n - len(rows) + i + 1, 0) // ratio


def _row(call: Any, found: Scores, row: int, k: Tensor, scales: Tensor | None, product: float) -> None:
    q = decode(call.q[row])  # [Hi, D]
    products, sizes = torch.zeros(2, len(q), len(k), dtype=torch.float64)
    after = scales is not None and scales.shape[1] == 1
    for i, (a, b) in enumerate(zip(q.split(INDEX_BLOCK, -1), k.split(INDEX_BLOCK, -1), strict=True)):
        each = torch.ones(len(k), dtype=torch.float64) if scales is None or after else scales[:, i]
        products += (a @ b.T) * each
        sizes += (a.abs() @ b.abs().T) * each.abs()
    weights = torch.ones(len(q), 1, dtype=torch.float64)
    if call.weights is not None:
        weights = call.weights[row].double()[:, None]
    s = (torch.where(products < 0, 0.0, products) if call.relu else products) * weights
    sizes = sizes * weights.abs()
    s, sizes = (s, sizes) if call.each else (s.sum(0), sizes.sum(0))
    by = (scales[:, 0] if after and scales is not None else torch.ones(1)) * float(
        torch.tensor(call.scale, dtype=torch.float32)
    )
    s, sizes = s * by, sizes * by.abs()
    more = -s.shape[-1] % call.block
    columns = [torch.nn.functional.pad(x, (0, more), value=v).unflatten(-1, (-1, call.block))
               for x, v in ((s, -torch.inf), (sizes, 0.0))]  # fmt: skip
    n = columns[0].shape[-2]
    found.values[row][..., :n] = columns[0].amax(-1)
    found.bounds[row][..., :n] = product * columns[1].amax(-1)


def _is_whole(call: Any) -> bool:
    """Whether all sums are exact in any order: small whole queries and quarters as weights."""
    q, w = decode(call.q), call.weights
    return bool((q == q.round()).all()) and (w is None or bool((4 * w == (4 * w).round()).all()))


def raw_keys(call: Any, b: int, n: int) -> tuple[Tensor, Tensor | None]:
    """fp64 codes [n, D] and scales [n, blocks] of the first n keys of request b.

    index_fp8: from the bytes of its pages, S rows of codes and then S times the scales of a row; from their own tensor
    where scales lie elsewhere.
    """
    k, f = call.k_cache, index_format(call.format)
    _, size, d = k.shape
    ids = call.page_table[b].to(torch.int64)
    pages = torch.stack([ids[j // size] for j in range(n)])
    slots = torch.arange(n) % size
    if f.scale != INDEX:
        return decode(take(k, pages, slots)), None
    scales, blocks = call.k_scale_cache, -(-d // INDEX_BLOCK)
    behind = scales.data_ptr() - k.data_ptr()
    if behind != size * d:  # no whole page of the format
        found = take(scales, pages, slots).double()
        return decode(take(k, pages, slots)), found[:, None] if found.dim() == 1 else found
    memory, step = storage_bytes(k), k.stride(0)
    codes, stored = [], []
    for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
        at = k.storage_offset() + page * step
        codes.append(memory[at + slot * d : at + slot * d + d])
        begin = at + size * d + slot * 4 * blocks
        stored.append(memory[begin : begin + 4 * blocks].clone().view(torch.float32))
    return decode(torch.stack(codes), torch.float8_e4m3fn), torch.stack(stored).double()
