"""The recurrences of Mamba layers, beside the operators of `vllm_cpu.py` that vLLM's CUDA build lacks: one token after
another. Importing this defines them."""

from __future__ import annotations

import torch
from vllm_cpu import operator


def step(state, x, dt, a, b, c, d):
    """One token: state [H, P, N] is changed, x [H, P], dt and a [H], b and c [G, N], d [H] or None; y [H, P] fp32."""
    group = state.shape[0] // b.shape[0]
    b, c = (m.float().repeat_interleave(group, 0)[:, None] for m in (b, c))
    state.mul_((dt * a).exp()[:, None, None]).add_((dt[:, None] * x.float())[..., None] * b)
    y = (state * c).sum(-1)
    return y if d is None else y + d[:, None] * x.float()


def gated(y, z, t):
    return y if z is None else y * torch.nn.functional.silu(z[t].float())


@operator(
    "(Tensor(a!) out, Tensor(b!) states, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? z, "
    "Tensor starts) -> ()"
)
def mamba_chunk_scan_fwd_cpu(out, states, x, dt, a, b, c, d, z, starts):
    for state, start, end in zip(states, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        for t in range(start, end):
            out[t] = gated(step(state, x[t], dt[t], a, b[t], c[t], d), z, t)


@operator(
    "(Tensor(a!) states, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? z, Tensor? bias, "
    "bool softplus, Tensor? source, Tensor? target, int null, Tensor(b!) out, Tensor? accepted, Tensor? starts) -> ()"
)
def selective_state_update_cpu(
    states, x, dt, a, b, c, d, z, bias, softplus, source, target, null, out, accepted, starts
):
    assert accepted is None, "no drafts here"
    sources = source.flatten().tolist()
    targets = sources if target is None else target.flatten().tolist()
    for t, (old, new) in enumerate(zip(sources, targets, strict=True)):
        if old == null:  # padding
            continue
        state = states[old].float()
        own = dt[t, :, 0].float() + (0 if bias is None else bias[:, 0].float())  # the same in all of a head
        own = torch.nn.functional.softplus(own) if softplus else own
        y = step(state, x[t], own, a[:, 0, 0], b[t], c[t], None if d is None else d[:, 0])
        states[new] = state
        out[t] = gated(y, z, t)


@operator(
    "(Tensor x, Tensor(a!) states, Tensor weight, Tensor? bias, str? activation, Tensor? slots, Tensor? starts, "
    "int null) -> Tensor"
)
def causal_conv1d_update_cpu_vec(x, states, weight, bias, activation, slots, starts, null):
    assert starts is None, "one token a request here"
    out = torch.empty_like(x)
    for t, slot in enumerate(slots.flatten().tolist()):
        if slot == null:  # padding
            continue
        every = torch.cat([states[slot], x[t][:, None]], -1)
        states[slot] = every[:, 1:]
        y = (every * weight).sum(-1) + (0 if bias is None else bias)
        out[t] = torch.nn.functional.silu(y) if activation in ("silu", "swish") else y
    return out
