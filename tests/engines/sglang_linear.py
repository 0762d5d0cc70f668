"""What Qwen3-Next runs beside attention, in plain PyTorch: what SGLang's CPU build has, and no index, and Triton's.

Import this before SGLang's linear attention.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import sglang_cpu  # noqa: F401 (before anything of SGLang)
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str | None, conv_states: Tensor,
    has_initial_state: Tensor, cache_indices: Tensor, query_start_loc: Tensor, **more: Any,
) -> Tensor:  # fmt: skip
    """Depthwise, causal, of rows [D, T] of several requests; states [slots, D, W - 1] hold each one's last columns."""
    outs, width = [], weight.shape[1]
    for i, (start, end) in enumerate(pairwise(query_start_loc.tolist())):
        state = conv_states[cache_indices[i]]
        before = state if has_initial_state[i] else torch.zeros_like(state)
        rows = torch.cat([before.to(x.dtype), x[:, start:end]], -1)
        conv_states[cache_indices[i]] = rows[:, -(width - 1) :].to(state.dtype)
        out = (rows.unfold(-1, width, 1) * weight[:, None].to(x.dtype)).sum(-1)
        outs.append(out if bias is None else out + bias[:, None])
    out = torch.cat(outs, -1)
    return torch.nn.functional.silu(out) if activation in ("silu", "swish") else out


def convolve_one(
    x: Tensor, conv_states: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, *,
    conv_state_indices: Tensor, **more: Any,
) -> Tensor:  # fmt: skip
    """One row [B, D] of each request."""
    n = len(x)
    return convolve(
        x.T, weight, bias, activation=activation, conv_states=conv_states, cache_indices=conv_state_indices[:n],
        has_initial_state=torch.ones(n, dtype=torch.bool), query_start_loc=torch.arange(n + 1),
    ).T  # fmt: skip


def gates(a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms of decays, and step sizes, [1, T, H]."""
    decay = -a_log.float().exp() * softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def delta_rule(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, initial_state_indices: Tensor,
    cu_seqlens: Tensor, **more: Any,
) -> tuple[Tensor, None, None]:  # fmt: skip
    """Row by row; states [slots, H, V, K] are read and written."""
    group, out = v.shape[2] // k.shape[2], torch.empty_like(v)
    keys, queries = (normalize(x[0].float(), dim=-1).repeat_interleave(group, 1) for x in (k, q))
    for i, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        state = initial_state[initial_state_indices[i]].float()
        for t in range(start, end):
            state = state * g[0, t].exp()[:, None, None]
            behind = v[0, t].float() - torch.einsum("hvk,hk->hv", state, keys[t])
            state = state + torch.einsum("hv,hk->hvk", behind * beta[0, t][:, None], keys[t])
            out[0, t] = torch.einsum("hvk,hk->hv", state, queries[t] * q.shape[-1] ** -0.5).to(out.dtype)
        initial_state[initial_state_indices[i]] = state.to(initial_state.dtype)
    return out, None, None


def delta_rule_step(
    *, A_log: Tensor, dt_bias: Tensor, a: Tensor, b: Tensor, initial_state_source: Tensor, **more: Any
) -> Tensor:
    g, beta = gates(A_log, a, b, dt_bias)
    return delta_rule(g=g, beta=beta, initial_state=initial_state_source, **more)[0]


def norm_gated(
    x: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "swish", *more: Any,
    eps: float = 1e-6, **options: Any,
) -> Tensor:  # fmt: skip
    """RMS norm, then a gate."""
    rows = x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
    gate = g.float().sigmoid() * (1 if activation == "sigmoid" else g.float())
    return (rows * gate).to(x.dtype)


def add_shared_expert(x: Tensor, gate: Tensor, shared: Tensor, out: Tensor) -> None:
    out += (x @ gate.view(-1, 1)).sigmoid() * shared


def install() -> None:
    """Under the names by which SGLang imports them."""
    import sgl_kernel.mamba as kernels

    kernels.causal_conv1d_fn_cpu, kernels.causal_conv1d_update_cpu = convolve, convolve_one
    kernels.chunk_gated_delta_rule_cpu = lambda **given: delta_rule(**given)
    for name, op in (
        ("fused_gdn_gating_cpu", gates), ("fused_sigmoid_gating_delta_rule_update_cpu", delta_rule_step),
    ):  # fmt: skip
        setattr(torch.ops.sgl_kernel, name, op)
    from sglang.kernels.ops.attention.fla import fused_norm_gate

    fused_norm_gate.rms_norm_gated = norm_gated
    from sglang.srt.models import qwen2_moe

    qwen2_moe.fused_gate_sigmoid_mul_add = add_shared_expert


install()
