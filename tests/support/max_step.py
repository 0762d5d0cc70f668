"""A step of latent attention in MAX's shape."""

import math

import torch
from mla_cases import DEAD, Case, codes_rms

from tersekv import mla_prefill_plan
from tersekv.compat import max as mx

LAYER, LAYERS = 1, 3
SIZES = {"heads": 2, "dn": 128, "dv": 128, "rope": 16, "rank": 256, "index": torch.uint32}


class Step:
    """A `Case` in MAX's shape: six-dimensional blocks of which one layer is alive, and weights of both branches."""

    scale = 0.11

    def __init__(self, requests=((0, 5), (9, 3), (4, 1)), fp8=True, dtype=torch.bfloat16, fmt="bf16", raw=True, seed=0):
        self.case = c = Case(
            requests=requests, dtype=dtype, gamma_dtype=dtype, fmt=fmt, fp8_weights=fp8, raw_in_cache=raw, seed=seed,
            **SIZES,
        )  # fmt: skip
        rows = c.raw.view(c.layer().ckv.dtype)
        shape = (rows.shape[0], 1, LAYERS, rows.shape[1], 1, rows.shape[2])
        self.blocks = torch.full((*shape[:-1], c.raw.shape[2]), 0xFF, dtype=torch.uint8).view(rows.dtype)
        self.blocks[:, 0, LAYER, :, 0] = rows
        news = [n for _, n in requests]
        self.kv = mx.PagedKVCacheCollection(
            self.blocks, c.t["cache_lens"], c.t["page_table"], max(news, default=0), max(n for n, _ in requests)
        )
        plan = mla_prefill_plan(c.lens, news)
        starts = torch.full((len(news) + 1,), DEAD, dtype=torch.int64)  # the last entry is never read
        starts[:-1] = 0
        self.buffer = (plan.buffer_row_offsets[0].to(torch.uint32), starts.to(torch.uint32), sum(c.lens))
        self.output = torch.full((sum(news), c.heads, c.dv), math.nan, dtype=dtype)
        weights = c.t["w"].view(c.heads, c.dn + c.dv, c.rank)
        g = torch.Generator().manual_seed(seed + 100)
        if fp8:
            codes = torch.randint(0, 256, (c.heads, c.rank, c.dn), dtype=torch.uint8, generator=g)
            codes[codes & 127 == 127] = 0
            self.w_uk = codes.view(torch.float8_e4m3fn)
            blocks = torch.rand(c.heads, c.rank // 128, c.dn // 128, generator=g) + 0.5
            self.w_uk_scale = blocks / (codes_rms() * c.dn**0.5)
            self.w_uv = weights[:, c.dn :].contiguous()
            self.w_uv_scale = c.t["w_scale"].view(c.heads, 2, -1)[:, 1:].contiguous()
        else:
            self.w_uk = (torch.randn(c.heads, c.rank, c.dn, generator=g) / c.dn**0.5).to(dtype)
            self.w_uv, self.w_uk_scale, self.w_uv_scale = weights[:, c.dn :].contiguous(), None, None

    @property
    def common(self):
        t = self.case.t
        return (self.output, t["q"], t["cu"], t["freqs"], t["gamma"], self.kv, LAYER, self.scale, 1e-6)

    def prefill(self, **options):
        t, fp8 = self.case.t, self.case.fp8_weights
        weights = (t["w"], t["w_scale"]) if fp8 else (t["w"],)
        branch = mx.mla_prefill_branch_fp8 if fp8 else mx.mla_prefill_branch_bf16
        assert branch(*self.common, *self.buffer, *weights, **options) is None

    def decode(self, **options):
        fp8 = self.case.fp8_weights
        weights = (self.w_uk, self.w_uk_scale, self.w_uv, self.w_uv_scale) if fp8 else (self.w_uk, self.w_uv)
        branch = mx.mla_decode_branch_fp8 if fp8 else mx.mla_decode_branch_bf16
        assert branch(*self.common, *weights, **options) is None

    def graph(self, max_seq_len, **options):
        t, fp8 = self.case.t, self.case.fp8_weights
        if fp8:
            weights = (t["w"], t["w_scale"], self.w_uk, self.w_uk_scale, self.w_uv, self.w_uv_scale)
            mx.mla_prefill_decode_graph_fp8(*self.common, *self.buffer, max_seq_len, *weights, **options)
        else:
            weights = (t["w"], self.w_uk, self.w_uv)
            mx.mla_prefill_decode_graph_bf16(*self.common, *self.buffer, max_seq_len, *weights, **options)

    def other_layers(self):
        return torch.cat([self.blocks[:, :, :LAYER], self.blocks[:, :, LAYER + 1 :]], 2).view(torch.uint8)
