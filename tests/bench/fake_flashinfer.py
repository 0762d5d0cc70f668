"""FlashInfer's public signatures over tersekv."""

from __future__ import annotations

import types
from itertools import pairwise

import torch


def flashinfer_modules():
    """FlashInfer's public signatures over tersekv, to see that layouts and arguments are right."""
    from tersekv.compat.flashinfer import BatchPrefillWithPagedKVCacheWrapper
    from tersekv.compat.flashinfer import rope_quantize_fp8_append_paged_kv_cache as rope
    from tersekv.compat.flashinfer import xqa_batch_decode_with_kv_cache as xqa
    from tersekv.ops.decode import decode as native
    from tersekv.ops.mla import mla_decode
    from tersekv.ops.prefill import prefill as paged_prefill

    def table(indptr, indices):
        width = int(indptr.diff().max())
        rows = [indices[a:b] for a, b in pairwise(indptr.tolist())]
        return torch.stack([torch.nn.functional.pad(r, (0, width - len(r))) for r in rows])

    class Decode:
        def __init__(self, workspace, layout, *, use_tensor_cores, backend):
            assert (layout, backend, use_tensor_cores) == ("NHD", "fa2", True)

        def plan(self, indptr, indices, last, hq, hkv, d, page, *, q_data_type, kv_data_type, sm_scale):
            assert (hq, hkv, d) in ((32, 8, 128), (6, 2, 64))
            self.table, self.lens, self.scale = table(indptr, indices), (indptr.diff() - 1) * page + last, sm_scale

        def run(self, q, kv, *, out):
            return native(q, kv, self.table, self.lens.int(), softmax_scale=self.scale, out=out)

    class MLA:
        def __init__(self, workspace, *, backend):
            assert backend == "fa3"

        def plan(self, rows, indptr, indices, lens, heads, ckv, kpe, page, causal, scale, q_dtype, kv_dtype):
            assert (rows.diff() == 1).all()
            self.table, self.lens, self.scale = table(indptr, indices), lens, scale

        def run(self, q_nope, q_pe, ckv, kpe, *, out, ckv_scale=None, kpe_scale=None):
            assert (ckv_scale is None) == (ckv.dtype == torch.bfloat16)
            return mla_decode((q_nope, q_pe), (ckv, kpe), self.table, self.lens, softmax_scale=self.scale, out=out)

    class Prefill:
        def __init__(self, workspace, layout, *, backend):
            self.wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, layout, backend=backend)
            self.run = self.wrapper.run

        def plan(self, *places, causal, **options):
            assert causal
            self.wrapper.plan(*places, causal=causal, **options)

    def fmha_v2(qkv, layout, room, lens, longest_q, longest, scale, v_scale, b, cu_q, cu_kv, *, out, **options):
        q, pages = qkv
        assert (layout, v_scale, longest, b) == ("Q_PAGED_KV_NHD", 1.0, int(lens.max()), len(lens))
        assert (cu_kv.diff().tolist(), options.pop("mask_mode")) == (lens.tolist(), "causal")
        pages, table = pages.unbind(1), options.pop("block_tables")
        return paged_prefill(q, pages, table, lens, cu_q, max_q_len=longest_q, softmax_scale=scale, out=out, **options)

    parts = {
        "flashinfer.prefill": {"BatchPrefillWithPagedKVCacheWrapper": Prefill, "trtllm_fmha_v2_prefill": fmha_v2},
        "flashinfer.decode": {"xqa_batch_decode_with_kv_cache": xqa, "BatchDecodeWithPagedKVCacheWrapper": Decode},
        "flashinfer.mla": {"BatchMLAPagedAttentionWrapper": MLA},
        "flashinfer.rope": {"rope_quantize_fp8_append_paged_kv_cache": rope},
    }
    return {"flashinfer": types.ModuleType("flashinfer")} | {
        name: types.SimpleNamespace(**functions) for name, functions in parts.items()
    }
