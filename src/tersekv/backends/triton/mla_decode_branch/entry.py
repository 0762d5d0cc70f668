"""The decode branch of MLA: one launch that rotates, norms, stores and projects queries, then decode's, then the output
projection. Tensors between launches lie in a cached workspace: the call is bound, checked and planned as one."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from ...host.attention_launches import write_empty_outputs
from ...host.bind import BoundLaunches, HostAction, KernelLaunch, LaunchSequence, Workspace
from .. import mla_project
from ..mla_decode import entry as mla_decode
from . import rope_store_project

_MAX_CACHED_WORKSPACE = 64 << 20  # bytes of workspace kept for the next call; more, from about 256 tokens, is freed
# The branch's tensors that decode's launches read and write.
_DECODE_TENSOR_NAMES = {
    "q_nope": "Q_NOPE", "q_pe": "Q_PE", "seq_lens": "SEQ_LENS", "out": "LATENTS", "lse": None, "out_scale_t": None,
    "sinks": None, "max_logits": None,
}  # fmt: skip


class SubOpFacts(NamedTuple):
    """Facts of the branch's operations."""

    query_projection: SimpleNamespace  # mla_project
    decode: SimpleNamespace
    output_projection: SimpleNamespace  # mla_project


class Config(NamedTuple):
    query_projection: mla_project.ProjectionConfig
    decode: Any  # of a backend's mla_decode
    launches: LaunchSequence | HostAction


def facts_of_projections_and_decode(f: SimpleNamespace) -> SubOpFacts:
    tokens, heads, dq = f.q.shape
    rank, rope = f.ckv.shape[2], f.kpe.shape[2]

    def dense_rows(columns: int) -> Any:
        return f.q._replace(shape=(tokens, heads, columns), stride=(heads * columns, columns, 1), aligned=True)

    q_nope, latents, device_facts = dense_rows(rank), dense_rows(rank), {"device": f.device, "arch": f.arch}
    seq_lens_fact = f.cache_lens._replace(dtype=torch.int32, stride=(1,), aligned=True)
    x = f.q._replace(shape=(tokens, heads, dq - rope))
    decode_facts = {n: x for n, x in vars(f).items() if n not in ("q", "op")}
    decode_facts |= {
        "q_nope": q_nope,
        "q_pe": dense_rows(rope),
        "seq_lens": seq_lens_fact,
        "out": latents,
        "lse": None,
        "out_scale": 1.0,
    }
    return SubOpFacts(
        SimpleNamespace(x=x, weight=f.w_uk, weight_scale=f.w_uk_scale, out=q_nope, **device_facts),
        SimpleNamespace(
            **decode_facts,
            out_scale_t=None,
            precision="exact",
            batch_invariant=False,
            indices=None,
            extra_indices=None,
            sinks=None,
            max_logits=None,
        ),
        SimpleNamespace(x=latents, weight=f.w_uv, weight_scale=f.w_uv_scale, out=f.out, **device_facts),
    )


def why_not(f: SimpleNamespace) -> str | None:
    return mla_decode.why_not(facts_of_projections_and_decode(f).decode)


def configure(
    f: SimpleNamespace,
    decode_module: ModuleType = mla_decode,
    make_output_launches: Callable[..., list[KernelLaunch]] | None = None,
) -> Config:
    """decode_module, make_output_launches: another backend's `mla_decode`, and its launches after the first two"""
    sub_facts = facts_of_projections_and_decode(f)
    query_projection, config = (
        mla_project.choose_projection_config(sub_facts.query_projection),
        decode_module.configure(sub_facts.decode),
    )
    if f.q.shape[0] == 0 or f.cache_lens.shape[0] == 0:
        return Config(query_projection, config, HostAction(write_empty_outputs) if f.q.shape[0] else LaunchSequence())
    split_launch, *combine_launches = (
        t.with_renamed_tensors(_DECODE_TENSOR_NAMES) for t in config.launches.kernel_launches
    )
    templates = [
        rope_store_project.make_rope_store_project_launch(f, query_projection),
        split_launch,
        *((make_output_launches or combine_then_project_launches)(f, sub_facts, config, combine_launches)),
    ]
    workspace_tensors = {
        name: (fact.shape, fact.dtype)
        for name, fact in (
            ("Q_NOPE", sub_facts.decode.q_nope), ("Q_PE", sub_facts.decode.q_pe),
            ("SEQ_LENS", sub_facts.decode.seq_lens),
            ("LATENTS", sub_facts.decode.out),
        )
    }  # fmt: skip
    workspace = Workspace(config.launches.workspace.num_floats, workspace_tensors, _MAX_CACHED_WORKSPACE)
    return Config(query_projection, config, LaunchSequence(*templates, workspace=workspace))


def combine_then_project_launches(
    f: SimpleNamespace, sub_facts: SubOpFacts, decode_config: Any, combine_launches: list[KernelLaunch]
) -> list[KernelLaunch]:
    choice = mla_project.choose_projection_config(sub_facts.output_projection)
    return [
        *combine_launches,
        mla_project.make_projection_launch(sub_facts.output_projection, choice, "LATENTS", "w_uv", "w_uv_scale"),
    ]


def run(call: Any, config: Config) -> None:
    config.launches(call)


def bind(config: Config, at: dict[str, int]) -> BoundLaunches | None:
    return config.launches.bind(at)
