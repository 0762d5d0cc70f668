"""Cases of MLA prefill and a dense fp64 reference that follows the operation token by token.

The reference shares no code with the package: it has its own tables of fp8 values, rotation, norm and softmax. Caches
start as 0xFF bytes (NaN in every format), dead page-table entries as 2**31 - 1, outputs as NaN.
"""

import math
from dataclasses import dataclass, field

import torch

from tersekv import PagedLatentLayer, mla_prefill, mla_prefill_plan
from tersekv.formats import LATENT_FORMATS

DEAD = 2**31 - 1


def positive_values(exponent_bits, mantissa_bits, count):
    """Values of the first `count` codes of an 8-bit float; the index is the code."""
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    codes = [divmod(code, steps) for code in range(count)]
    values = [m / steps * 2.0 ** (1 - bias) if e == 0 else (1 + m / steps) * 2.0 ** (e - bias) for e, m in codes]
    return torch.tensor(values, dtype=torch.float64)


E4M3, E5M2 = positive_values(4, 3, 127), positive_values(5, 2, 124)


def fp8(x, table=E4M3):
    """Code bytes of fp32 values: nearest, ties to the even code, saturating; NaN is 0x7F."""
    a, last = x.double().abs(), len(table) - 1
    right = torch.searchsorted(table, a).clamp(1, last)
    low, high = table[right - 1], table[right]
    up = (a - low > high - a) | ((a - low == high - a) & (right % 2 == 0))
    code = torch.where(a >= table[last], last, torch.where(up, right, right - 1))
    return torch.where(x.isnan(), 127, code + 128 * torch.signbit(x).long()).to(torch.uint8)


def value(code, table=E4M3):
    """Values of finite code bytes."""
    c = code.long()
    return table[c & 127] * torch.where(c >= 128, -1.0, 1.0).double()


def codes_rms():
    """Root mean square of all codes, taken as often as each other."""
    return float(E4M3.square().mean().sqrt())


def quantised(x):
    """(bytes [..., L], scales [..., L/128]) as section 5 of the arithmetic says, in fp32 steps."""
    g = x.float().unflatten(-1, (-1, 128))
    amax = g.abs().amax(-1)
    scale = (amax.clamp(max=1200).double() / 448).float()  # fp64 then fp32 is the correctly rounded quotient
    inverse = (1 / scale.double()).float()
    code = torch.where(scale[..., None] == 0, torch.zeros((), dtype=torch.uint8), fp8(g * inverse[..., None]))
    return code.flatten(-2), scale


def encode(latent, rope, fmt, kv_scale):
    """Bytes of cache rows, the latent part then the rotary part, and what they stand for in fp64."""
    if fmt in ("bf16", "fp16"):
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[fmt]
        parts = [latent.to(dtype), rope.to(dtype)]
        raw = torch.cat([p.contiguous().view(torch.uint8) for p in parts], -1)
        return raw, *(p.double() for p in parts)
    if fmt in ("fp8_e4m3", "fp8_e5m2"):
        table = E4M3 if fmt == "fp8_e4m3" else E5M2
        inverse = torch.tensor(1 / float(torch.tensor(kv_scale).float()), dtype=torch.float64).float()
        codes = [fp8(p.float() * inverse, table) for p in (latent, rope)]
        scale = torch.tensor(kv_scale).float()
        return torch.cat(codes, -1), *((value(c, table).float() * scale).double() for c in codes)
    g = latent.float().unflatten(-1, (-1, 128))
    quotient = (g.abs().amax(-1).double() / 448).float().clamp(min=1e-4)
    scale = torch.tensor(
        [2.0 ** math.ceil(math.log2(s)) for s in quotient.double().flatten().tolist()], dtype=torch.float32
    ).view(quotient.shape)
    codes = fp8(g / scale[..., None])
    r16 = rope.to(torch.bfloat16)
    raw = torch.cat([codes.flatten(-2), scale.view(torch.uint8), r16.contiguous().view(torch.uint8)], -1)
    return raw, (value(codes) * scale.double()[..., None]).flatten(-2), r16.double()


@dataclass
class Case:
    requests: tuple = ((0, 5), (9, 3), (4, 1))  # (cached, new) of each request
    heads: int = 2
    dn: int = 32
    dv: int = 32
    rope: int = 16
    rank: int = 128
    page_size: int = 4
    fmt: str = "bf16"
    dtype: torch.dtype = torch.bfloat16
    fp8_weights: bool = True
    raw_in_cache: bool = False
    freqs_dtype: torch.dtype = torch.float32
    gamma_dtype: torch.dtype = torch.bfloat16
    index: torch.dtype = torch.int32
    kv_scale: float = 1.0
    extra_rows: int = 0  # rows of q that belong to no request
    seed: int = 0
    t: dict = field(default_factory=dict)

    def __post_init__(self):
        g = torch.Generator().manual_seed(self.seed)

        def randn(*shape):
            return torch.randn(*shape, generator=g)

        news = [n for _, n in self.requests]
        lens = [c + n for c, n in self.requests]
        tokens, size = sum(news), self.page_size
        rows = self.heads * (self.dn + self.dv)
        t = self.t
        t["q"] = randn(tokens + self.extra_rows, self.heads, self.dn + self.rope).to(self.dtype)
        t["kv_c"] = (randn(tokens + self.extra_rows, self.rank) * 3).to(self.dtype)
        t["k_pe"] = randn(tokens + self.extra_rows, self.rope).to(self.dtype)
        angle = torch.arange(max(lens, default=0) + 1)[:, None] / 10 ** (torch.arange(self.rope // 2) / 4)
        t["freqs"] = torch.stack([angle.cos(), angle.sin()], -1).flatten(-2).to(self.freqs_dtype)
        t["gamma"] = (1 + 0.3 * randn(self.rank)).to(self.gamma_dtype)
        if self.fp8_weights:
            codes = torch.randint(0, 256, (rows, self.rank), dtype=torch.uint8, generator=g)
            codes[codes & 127 == 127] = 0  # no NaN
            t["w"] = codes.view(torch.float8_e4m3fn)
            blocks = torch.rand(rows // 128, self.rank // 128, generator=g) + 0.5
            t["w_scale"] = blocks / (codes_rms() * self.rank**0.5)
        else:
            t["w"], t["w_scale"] = (randn(rows, self.rank) / self.rank**0.5).to(self.dtype), None
        # pages: shuffled, one page more than needed
        used = [-(-n // size) for n in lens]
        ids = torch.randperm(sum(used) + 1, generator=g).tolist()
        table = torch.full((len(lens), max(used, default=0) + 2), DEAD, dtype=torch.int64)
        for b, n in enumerate(used):
            table[b, :n] = torch.tensor([ids.pop() for _ in range(n)], dtype=torch.int64)
        self.table64 = table
        t["page_table"] = table.to(self.index)
        t["cache_lens"] = torch.tensor([c for c, _ in self.requests], dtype=torch.int64).to(self.index)
        t["cu"] = torch.tensor([sum(news[:i]) for i in range(len(news) + 1)]).to(self.index)
        _, l0, r0 = encode(torch.zeros(1, self.rank), torch.zeros(1, self.rope), self.fmt, 1.0)
        width = encode(l0, r0, self.fmt, 1.0)[0].shape[-1]
        self.raw = torch.full((sum(used) + 1, size, width), 0xFF, dtype=torch.uint8)
        self.old = []
        for b, (cached, new) in enumerate(self.requests):
            raw, latent, rope = encode(randn(cached, self.rank), randn(cached, self.rope), self.fmt, self.kv_scale)
            self.old.append((latent, rope))
            for p in range(cached):
                self.raw[table[b, p // size], p % size] = raw[p]
            if self.raw_in_cache:
                cu = int(t["cu"][b])
                raw = encode(t["kv_c"][cu : cu + new], t["k_pe"][cu : cu + new], self.fmt, 1.0)[0]
                for i in range(new):
                    p = cached + i
                    self.raw[table[b, p // size], p % size] = raw[i]

    @property
    def lens(self):
        return [c + n for c, n in self.requests]

    def layer(self, kv_scale=None):
        f = LATENT_FORMATS[self.fmt]
        rows = self.raw if f.scale_dtype is not None else self.raw.view(f.storage)
        scale = self.kv_scale if kv_scale is None else kv_scale
        return PagedLatentLayer.of(rows, format=self.fmt, kv_lora_rank=self.rank, kv_scale=scale)

    def run(self, buffer=None, plan=None, **options):
        """Call mla_prefill on NaN outputs; `options` replace arguments."""
        t = self.t
        plan = plan or mla_prefill_plan(self.lens, [n for _, n in self.requests], buffer)
        shape = (*t["q"].shape[:2], self.dv)
        out = torch.full(shape, math.nan, dtype=self.dtype)
        lse = torch.full(shape[:2], math.nan)
        given = {} if self.raw_in_cache else {"kv_c": t["kv_c"], "k_pe": t["k_pe"]}
        got = mla_prefill(
            t["q"], options.pop("layer", None) or self.layer(), t["page_table"], t["cache_lens"], t["cu"], t["freqs"],
            t["gamma"], t["w"], plan, softmax_scale=0.11, return_lse=True,
            **{"kv_b_proj_scale": t["w_scale"], "out": out, "lse": lse, **given, **options},
        )  # fmt: skip
        assert got[0] is out
        assert got[1] is lse
        return got


def rope_row(x, freqs):
    """One row, pair by pair, every operation rounded to freqs' dtype."""
    x = x.to(freqs.dtype)
    out = torch.empty_like(x)
    for i in range(0, x.shape[-1], 2):
        c, s = freqs[i], freqs[i + 1]
        out[..., i] = x[..., i] * c - x[..., i + 1] * s
        out[..., i + 1] = x[..., i] * s + x[..., i + 1] * c
    return out


def reference(case):
    """(out fp64, lse fp64, rotated q, expected cache rows {(b, p): bytes}) of the whole operation, before it runs."""
    t, q = case.t, case.t["q"].clone()
    total, heads = q.shape[:2]
    out = torch.zeros(total, heads, case.dv, dtype=torch.float64)
    lse = torch.full((total, heads), -math.inf, dtype=torch.float64)
    written = {}
    w = value(t["w"].view(torch.uint8)) if case.fp8_weights else t["w"].double()
    if case.fp8_weights:
        w = w * t["w_scale"].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    for b, (cached, new) in enumerate(case.requests):
        start = int(t["cu"][b])
        latents, ropes = [case.old[b][0]], [case.old[b][1]]
        for i in range(new):
            f = t["freqs"][cached + i]
            q[start + i, :, case.dn :] = rope_row(q[start + i, :, case.dn :], f).to(q.dtype)
            x = t["kv_c"][start + i].float()
            normed = (x / torch.sqrt((x * x).mean() + 1e-6)).to(t["gamma"].dtype) * t["gamma"]
            raw, latent, rope = encode(normed[None], rope_row(t["k_pe"][start + i], f)[None], case.fmt, case.kv_scale)
            written[b, cached + i] = raw[0]
            latents.append(latent)
            ropes.append(rope)
        latent, rope = torch.cat(latents), torch.cat(ropes)
        if case.fp8_weights:
            codes, scales = quantised(latent)
            latent = value(codes) * scales.double().repeat_interleave(128, 1)
        else:
            latent = latent.to(case.dtype).double()
        kv = (latent @ w.T).to(case.dtype).double().view(-1, heads, case.dn + case.dv)
        for i in range(new):
            n = cached + i + 1
            for h in range(heads):
                query = q[start + i, h].double()
                keys = torch.cat([kv[:n, h, : case.dn], rope[:n].to(case.dtype).double()], 1)
                scores = 0.11 * keys @ query
                lse[start + i, h] = torch.logsumexp(scores, 0)
                out[start + i, h] = torch.softmax(scores, 0) @ kv[:n, h, case.dn :]
    return out, lse, q, written


def relative(got, want):
    return float((got.double() - want).norm() / want.norm())
