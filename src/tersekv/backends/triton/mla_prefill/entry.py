"""MLA prefill in stages: rotate, norm and store the new tokens; then for each chunk gather and quantize its latents,
up-project them, attend. All chunks use one workspace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ...host import launch
from ...host.bind import BoundLaunches, HostAction, KernelLaunch, LaunchSequence, Workspace
from . import attention, blockwise_gemm, gather_latents, rope_norm_store
from .config import MLAPrefillConfig, choose_mla_prefill_config

_MAX_HEAD_DIM, _MAX_ROPE, _MAX_RANK = 256, 128, 4096
MAX_CACHED_WORKSPACE = 8 << 20  # bytes of workspace kept for the next call: an allocation takes the host 2 µs


def why_not(f: SimpleNamespace) -> str | None:
    reason = launch.why_not_format_or_device(f)
    if reason is not None:
        return reason
    dim_v, rope, rank = f.out.shape[2], f.kpe.shape[-1], f.ckv.shape[-1]
    nope = f.q.shape[2] - rope
    if max(nope, dim_v) > _MAX_HEAD_DIM or min(nope, dim_v) < 1:
        return f"needs heads of 1 to {_MAX_HEAD_DIM} nope and value dims, got {nope} and {dim_v}"
    if rope > _MAX_ROPE:
        return f"needs at most {_MAX_ROPE} rotary dims, got {rope}"
    if rank > _MAX_RANK:
        return f"needs a latent rank of at most {_MAX_RANK}, got {rank}"
    if not f.softmax_scale > 0:
        return f"needs softmax_scale > 0, got {f.softmax_scale}"
    return None


class Config(NamedTuple):
    choice: MLAPrefillConfig
    launches: LaunchSequence | HostAction


def configure(f: SimpleNamespace) -> Config:
    choice = choose_mla_prefill_config(f)
    return Config(choice, make_append_and_chunk_launches(f, choice))


def has_keys_and_queries(f: SimpleNamespace) -> bool:
    """Whether there are both keys and queries; if not, a call rotates, norms and stores, and its outputs are empty."""
    return any(f.buffer_lengths) and f.max_q_len > 0 and f.cache_lens.shape[0] > 0


def make_append_and_chunk_launches(f: SimpleNamespace, choice: MLAPrefillConfig) -> LaunchSequence | HostAction:
    if f.q.shape[0] == 0:
        return HostAction(_copy_cache_lens_to_seq_lens_out)
    rope_norm_store_launch = rope_norm_store.make_rope_norm_store_launch(
        f, choice.native_casts, store_all_outputs_empty=not has_keys_and_queries(f)
    )
    if f.q.shape[1] == 0 or not has_keys_and_queries(f):
        return LaunchSequence(rope_norm_store_launch)
    chunks, max_rows = nonempty_chunk_indices_and_num_rows(f), max(f.buffer_lengths)
    kernel_launches: list[KernelLaunch] = []
    for i, (i_chunk, num_rows) in enumerate(chunks):
        kernel_launches += (
            gather_latents.make_gather_launch(f, i_chunk, num_rows, max_rows, choice.native_casts),
            blockwise_gemm.make_kv_up_projection_launch(f, num_rows, max_rows, choice.product, choice.native_fp8),
            attention.make_attention_launch(f, i_chunk, num_rows, i > 0, i + 1 < len(chunks), choice.attention),
        )
    return LaunchSequence(
        rope_norm_store_launch, *kernel_launches, workspace=Workspace(0, workspace_tensors(f), MAX_CACHED_WORKSPACE)
    )


def nonempty_chunk_indices_and_num_rows(f: SimpleNamespace) -> list[tuple[int, int]]:
    return [(i_chunk, num_rows) for i_chunk, num_rows in enumerate(f.buffer_lengths) if num_rows]


def workspace_tensors(f: SimpleNamespace) -> dict[str, tuple[tuple[int, ...], torch.dtype] | None]:
    """Returns the workspace tensors by name; all chunks use the same."""
    chunks, max_rows = nonempty_chunk_indices_and_num_rows(f), max(f.buffer_lengths)
    tensors = gather_latents.gathered_chunk_workspace(f, max_rows) | {
        "KV": ((max_rows, f.kv_b_proj.shape[0]), f.q.dtype)
    }
    return tensors | attention.residual_and_lse_workspace_tensors(f, len(chunks) > 1)


def _copy_cache_lens_to_seq_lens_out(call: Any) -> None:
    """There are no new tokens."""
    if call.seq_lens_out is not None:
        call.seq_lens_out.copy_(call.cache_lens)


def run(call: Any, config: Config) -> None:
    config.launches(call)


def bind(config: Config, at: dict[str, int]) -> BoundLaunches | None:
    return config.launches.bind(at)
