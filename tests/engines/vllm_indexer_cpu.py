"""vLLM's own indexer of DeepSeek V3.2 on a CPU: what it calls of DeepGEMM and of vLLM's operators is tersekv.compat.

The path is that of CUDA (`sparse_attn_indexer`): keys quantised into pages, gathered, scored, selected. vLLM's path for
CPUs (`SparseAttnIndexer.forward_cpu`) writes no keys: it raises NotImplementedError unless the model wrote them, which
no model but V4's does.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import vllm_cpu  # noqa: F401 (before anything of vLLM)
from vllm.model_executor.layers import sparse_attn_indexer as layer
from vllm.model_executor.models import deepseek_v2
from vllm.v1.attention.backends.mla import indexer

from tersekv.compat import deep_gemm, vllm


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer.SparseAttnIndexer, "forward_cpu", layer.SparseAttnIndexer.forward_cuda)
    monkeypatch.setattr(layer, "ops", vllm)
    monkeypatch.setattr(layer, "fp8_fp4_mqa_logits", _ragged)
    monkeypatch.setattr(layer, "fp8_fp4_paged_mqa_logits", _paged)
    monkeypatch.setattr(layer, "get_indexer_topk", lambda backend: _decode_topk)
    monkeypatch.setattr(layer, "current_workspace_manager", lambda: SimpleNamespace(get_simultaneous=_tensors))
    monkeypatch.setattr(deepseek_v2, "per_token_group_quant_fp8", _quantised)
    monkeypatch.setattr(indexer, "_BUILD_PREFILL_CHUNK_METADATA_KERNEL", _chunk_metadata)


def _ragged(q, kv, weights, starts, ends, max_seqlen_k):
    return deep_gemm.fp8_fp4_mqa_logits(q, kv, weights, starts, ends, False, max_seqlen_k)


def _paged(q, kv_cache, weights, lens, table, schedule, max_model_len, indices):
    return deep_gemm.fp8_fp4_paged_mqa_logits(
        q, kv_cache, weights, lens, table, schedule, max_model_len, indices=indices
    )


def _decode_topk(logits, seq_lens, next_n, out, k, max_seq_len):
    lens = seq_lens if seq_lens.shape[1] == next_n else seq_lens[:, 0]
    vllm.top_k_per_row_decode(logits, next_n, lens, out, len(logits), *logits.stride(), k)


def _tensors(*specs):
    return [torch.empty(shape, dtype=dtype) for shape, dtype in specs]


# The kernels below are Triton's, in the plainest words.


def _quantised(x, group_size, column_major_scales, use_ue8m0):
    assert use_ue8m0
    assert not column_major_scales
    groups = x.float().unflatten(-1, (-1, group_size))
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1).clamp(1e-10) / 448)))
    return (groups / scale[..., None]).to(torch.float8_e4m3fn).flatten(-2), scale


def _chunk_metadata(
    query_start_loc, seq_lens, cu_seq_lens, row_starts, token_to_seq, ks, ke, begin, end, rank, world, interleave, *,
    num_reqs, COMPRESS_RATIO,
):  # fmt: skip
    assert (rank, world, COMPRESS_RATIO) == (0, 1, 1)
    starts, first = query_start_loc.tolist(), cu_seq_lens.tolist()
    for r in range(num_reqs):
        token_to_seq[first[r] : first[r + 1]] = r
        context = int(seq_lens[r]) - (starts[r + 1] - starts[r])
        for row in range(max(starts[r], begin), min(starts[r + 1], end)):
            ks[row - begin] = row_starts[r]
            ke[row - begin] = row_starts[r] + context + row - starts[r] + 1
