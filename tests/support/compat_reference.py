"""What the tests of tersekv.compat compare with: loops written from the specification, sharing no code with tersekv."""

import math

import torch

E4M3, E5M2, BF16, FP16, F32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32
HUGE_PAGE = 2**30  # in table entries that must not be followed


def cast(x, dtype):
    """Saturating, to nearest even."""
    if dtype in (E4M3, E5M2):
        limit = torch.finfo(dtype).max
        return x.clamp(-limit, limit).to(dtype)
    return x.to(dtype)


def poisoned(*shape, dtype):
    """0xFF in every byte: NaN in fp8, fp16 and bf16."""
    return torch.full((math.prod(shape) * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype).view(shape)


def same_bytes(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw(a), raw(b))


def raw(x):
    return x.contiguous().view(torch.uint8)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def values(codes, sf=None):
    """What stored codes stand for, as FlashInfer's formulas see them (raw), fp64."""
    if codes.dtype != torch.uint8:
        return codes.double()
    table = torch.tensor(E2M1 + [-x for x in E2M1], dtype=torch.float64)
    pairs = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1).flatten(-2)
    return pairs * sf.double().repeat_interleave(16, -1)


def attention(q, k, v, table, lens, rows, *, logits, out=1.0, window=0, sinks=None, sees=None):
    """q [T, Hq, D] with `rows[b]` rows a request; k, v [P, S, H, dim] fp64; window counts the own key, 0: all."""
    group, page_size, got = q.shape[1] // k.shape[2], k.shape[1], []
    t = 0
    for b, n in enumerate(lens):
        at = [(int(table[b][j // page_size]), j % page_size) for j in range(n)]
        prefix = n - rows[b]
        for i in range(rows[b]):
            own = prefix + i
            seen = [j for j in range(n) if (j < prefix or (sees(b, i, j - prefix) if sees else j <= own))]
            seen = [j for j in seen if not window or j > own - window]
            for h in range(q.shape[1]):
                if not seen:
                    got.append(torch.zeros(v.shape[-1], dtype=torch.float64))
                    continue
                keys = torch.stack([k[at[j]][h // group] for j in seen])
                vals = torch.stack([v[at[j]][h // group] for j in seen])
                scores = keys @ q[t, h].double() * logits
                top = scores.max() if sinks is None else max(scores.max(), sinks[h].double())
                p = (scores - top).exp()
                total = p.sum() + (0 if sinks is None else (sinks[h].double() - top).exp())
                got.append(p @ vals / total * out)
            t += 1
    return torch.stack(got).view(q.shape[0], q.shape[1], -1) if got else q.new_zeros(*q.shape[:2], v.shape[-1]).double()


def close(got, want, bound=3e-3):
    assert not got.float().isnan().any()
    error = (got.double() - want).norm() / want.norm().clamp(min=1e-30)
    assert error < bound, f"relative norm of the error: {error:.2e}"


LENS = [9, 1, 14]
TABLE = [[5, 2, 7, HUGE_PAGE], [0, HUGE_PAGE, HUGE_PAGE, HUGE_PAGE], [1, 6, 3, 4]]
S, P = 4, 9


def kv_codes(stored, h, d, lens=LENS):
    """Codes [P, S, h, d] in which all that no request owns is poison, and NVFP4's block scales or None."""
    if stored == torch.int8:
        live, dead = torch.randint(-127, 128, (P, S, h, d), dtype=torch.int8), torch.tensor(127, dtype=torch.int8)
    elif stored == torch.uint8:
        live, dead = torch.randint(0, 256, (P, S, h, d // 2), dtype=torch.uint8), torch.tensor(0xFF, dtype=torch.uint8)
    else:
        live, dead = torch.randn(P, S, h, d).to(stored), None
    sf = None
    if stored == torch.uint8:
        sf = (torch.rand(P, S, h, d // 16) + 0.25).to(E4M3)
    owned = torch.zeros(P, S, dtype=torch.bool)
    for b, n in enumerate(lens):
        for j in range(n):
            owned[TABLE[b][j // S], j % S] = True
    if dead is None:
        raw_live = live.view(torch.uint8)
        live = torch.where(owned[..., None, None], raw_live, torch.tensor(0xFF, dtype=torch.uint8)).view(stored)
    else:
        live = torch.where(owned[..., None, None], live, dead)
    if sf is not None:
        sf = torch.where(owned[..., None, None], sf.view(torch.uint8), 0x7F).to(torch.uint8).view(E4M3)
    return live, sf


def index(x, dtype=torch.int32):
    return torch.tensor(x, dtype=dtype)


def pack(bits, words):
    """[rows][drafts] of 0/1 as uint16 words, LSB first."""
    out = torch.zeros(len(bits), words, dtype=torch.int32)
    for i, row in enumerate(bits):
        for j, bit in enumerate(row):
            out[i, j // 16] |= bit << (j % 16)
    return out.to(torch.uint16)
