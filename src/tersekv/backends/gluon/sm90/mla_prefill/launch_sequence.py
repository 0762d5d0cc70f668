"""The launches of one MLA prefill call on Hopper, and its workspace."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from ....host.bind import KernelLaunch, LaunchSequence, Workspace
from ....triton.mla_prefill import blockwise_gemm as portable_gemm
from ....triton.mla_prefill import entry as portable
from ....triton.mla_prefill import rope_norm_store
from ....triton.mla_prefill.config import MLAPrefillConfig
from . import attention, blockwise_gemm, gather_latents, three_warpgroups


def make_launches(
    f: SimpleNamespace, choice: MLAPrefillConfig, num_sms: int, own_gemm: bool, use_pdl: bool
) -> LaunchSequence:
    """Returns the launches: new rows are stored; then for each chunk: gather, GEMM, attention. A single chunk may use
    three warpgroups, followed by the usual attention in case of overflow."""
    chunks, max_rows = portable.nonempty_chunks(f)
    is_only_chunk, last_chunk = len(chunks) == 1, len(chunks) - 1
    use_three_warpgroups = (
        is_only_chunk
        and own_gemm
        and f.q.dtype == torch.bfloat16
        and three_warpgroups.is_faster_than_two_warpgroups(f, num_sms)
    )
    kernel_launches: list[KernelLaunch] = [
        rope_norm_store.make_rope_norm_store_launch(f, choice.native_casts, rope_queries=False)
    ]
    for i, (i_chunk, num_rows) in enumerate(chunks):
        kernel_launches += (
            gather_latents.make_gather_launch(f, i_chunk, num_rows, max_rows, choice.native_casts, i == 0, use_pdl),
            blockwise_gemm.make_gemm_launch(f, num_rows, max_rows, num_sms, use_pdl) if own_gemm
            else portable_gemm.make_gemm_launch(f, num_rows, max_rows, choice.product, choice.native_fp8),
            *([three_warpgroups.make_attention_launch(f, i_chunk, num_rows, num_sms,
                                                      use_pdl)] if use_three_warpgroups else []),
            attention.make_attention_launch(f, i_chunk, num_rows, i > 0, i < last_chunk, num_sms, use_pdl,
                                            use_three_warpgroups),
        )  # fmt: skip
    # WORK_COUNTER: see `attention.make_attention_launch`; the last is unused. MAY_HAVE_NAN: the row's V may be NaN.
    workspace_tensors = portable.workspace_tensors(f) | {
        "WORK_COUNTER": ((4,), torch.int32),
        "MAY_HAVE_NAN": ((max_rows,), torch.int8),
    }
    return LaunchSequence(*kernel_launches, workspace=Workspace(0, workspace_tensors, portable.MAX_CACHED_WORKSPACE))
