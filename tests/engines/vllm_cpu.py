"""vLLM's real engine on a machine without a GPU. Import this before anything of vLLM.

The package index has no build of vLLM for CPUs, and the CUDA build lacks the CPU's operators: the few that these
engines call are defined here, plainly. All else is vLLM's own: scheduler, block tables, pages, models, sampler.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

os.environ.update(
    VLLM_TARGET_DEVICE="cpu",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    TOKENIZERS_PARALLELISM="false",
    TORCHDYNAMO_DISABLE="1",
)

import pytest
import torch

# Where these are, vLLM calls kernels that the CUDA build lacks, and keeps states in fp32 for them.
torch.cpu._is_amx_tile_supported = torch.cpu._is_avx512_bf16_supported = lambda: False
_library = torch.library.Library("_C", "FRAGMENT")


def operator(schema: str):
    def define(function):
        name = function.__name__
        _library.define(name + schema)
        _library.impl(name, function, "CompositeExplicitAutograd")
        return function

    return define


@operator("(int[] nodes) -> ()")
def init_cpu_memory_env(nodes):
    pass


@operator("(str cores) -> str")
def init_cpu_threads_env(cores):
    return ""


@operator("(Tensor starts, Tensor positions, Tensor table, Tensor(a!) slots, int block_size) -> ()")
def compute_slot_mapping_kernel_impl(starts, positions, table, slots, block_size):
    slots.fill_(-1)
    n = int(starts[-1])
    request = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff().long())
    p = positions[:n]
    slots[:n] = table[request, p // block_size].long() * block_size + p % block_size


@operator("(Tensor x) -> Tensor")
def greedy_argmax(x):
    return x.argmax(-1)


@operator("(Tensor(a!) out, Tensor ends, Tensor draft, Tensor target, Tensor bonus, Tensor? is_greedy, int most) -> ()")
def rejection_greedy_sample_kernel_impl(out, ends, draft, target, bonus, is_greedy, most):
    start = 0
    for i, end in enumerate(ends.tolist()):
        taken, agreed = 0, True
        while agreed and start + taken < end:
            out[i, taken] = target[start + taken]
            agreed = bool(draft[start + taken] == target[start + taken])
            taken += 1
        if agreed:
            out[i, taken] = bonus.flatten()[i]
        start = end


@operator("(Tensor(a!) out, Tensor values, Tensor ends, int replaced, int by) -> ()")
def expand_kernel_impl(out, values, ends, replaced, by):
    start = 0
    for value, end in zip(values.tolist(), ends.tolist(), strict=True):
        out[start:end] = by if value == replaced else value
        start = end


def _without_numba() -> None:
    """vLLM's n-gram drafts are plain Python that Numba compiles: here they stay plain."""
    numba: Any = ModuleType("numba")
    numba.jit = numba.njit = lambda *f, **options: f[0] if f and callable(f[0]) else lambda function: function
    numba.prange, numba.get_num_threads, numba.set_num_threads = range, lambda: 1, lambda n: None
    sys.modules.setdefault("numba", numba)


def _let_backends_through() -> None:
    """vLLM's CPU platform takes no attention backend but its own: let those through that plugins registered."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    own = CpuPlatform.get_attn_backend_cls.__func__

    def choose(cls, selected, config, num_heads=None):
        if selected in (None, AttentionBackendEnum.CPU_ATTN):
            return own(cls, selected, attn_selector_config=config, num_heads=num_heads)
        reasons = selected.get_class().validate_configuration(device_capability=None, **config._asdict())
        if reasons:
            raise ValueError(f"{selected.name}: {reasons}")
        return selected.get_path()

    # Without AMX, the platform takes latent attention for its own kernel's, which knows no chunks and no prefixes.
    configure = CpuPlatform.check_and_update_config.__func__

    def check(cls, config):
        has_amx = torch.cpu._is_amx_tile_supported
        torch.cpu._is_amx_tile_supported = lambda: True
        try:
            configure(cls, config)
        finally:
            torch.cpu._is_amx_tile_supported = has_amx

    # What it replaces stays replaced: it need not search all modules again for each engine.
    replace = functools.cache(CpuPlatform.register_triton_kernel_overrides.__func__)
    CpuPlatform.register_triton_kernel_overrides = classmethod(replace)
    CpuPlatform.check_and_update_config = classmethod(check)
    CpuPlatform.get_attn_backend_cls = classmethod(
        lambda cls, selected, attn_selector_config, num_heads=None: choose(
            cls, selected, attn_selector_config, num_heads
        )
    )


_without_numba()
_let_backends_through()
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.model_executor.models import ModelRegistry, deepseek_v2, gemma2, granite  # noqa: E402
from vllm.model_executor.models import llama as llama_model  # noqa: E402
from vllm.plugins import load_general_plugins  # noqa: E402

from tersekv.integrations.vllm import name  # noqa: E402

load_general_plugins()
# Classes by name are looked at in a process of their own, which imports all of vLLM again.
for _model in (
    llama_model.LlamaForCausalLM, granite.GraniteForCausalLM, gemma2.Gemma2ForCausalLM,
    deepseek_v2.DeepseekV2ForCausalLM,
):  # fmt: skip
    ModelRegistry.register_model(_model.__name__, _model)


@contextmanager
def engine(folder: os.PathLike | str, **options: Any) -> Iterator[LLM]:
    """An engine over a checkpoint, with tersekv's attention."""
    given = {
        "skip_tokenizer_init": True,
        "attention_backend": name(),
        "enforce_eager": True,
        "compilation_config": {"mode": 0, "custom_ops": ["none"]},
        "max_model_len": 512,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 200,
        "block_size": 16,
        "max_logprobs": 256,
        "disable_log_stats": False,
        **options,
    }
    # What is here by now stays: the collector need not look at it, as often as an engine calls it and undoes this.
    gc.unfreeze = lambda: None
    gc.freeze()
    llm = LLM(str(folder), **given)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def share_cache_of_layer_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llamas that are built from here on have a layer 3 that reads the cache of layer 2."""
    attention = llama_model.Attention

    def sharing(*args, prefix="", **options):
        if prefix == "model.layers.3.self_attn.attn":
            options["kv_sharing_target_layer_name"] = "model.layers.2.self_attn.attn"
        return attention(*args, prefix=prefix, **options)

    monkeypatch.setattr(llama_model, "Attention", sharing)


def generate(llm: LLM, prompts: list[list[int]], tokens: int, **options: Any) -> list[tuple[list[int], torch.Tensor]]:
    """Greedy tokens of every prompt, and the log-probabilities of the whole vocabulary at each of them."""
    params = SamplingParams(
        max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True, logprobs=256, **options
    )
    outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    results = []
    for out in outs:
        (one,) = out.outputs
        rows = [[row[t].logprob for t in range(256)] for row in one.logprobs]
        results.append((list(one.token_ids), torch.tensor(rows, dtype=torch.float64)))
    return results


def count(llm: LLM, name: str) -> float:
    """One of the engine's own counters."""
    return sum(m.value for m in llm.get_metrics() if m.name == f"vllm:{name}")
