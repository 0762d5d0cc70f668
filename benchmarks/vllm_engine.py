"""What the measurements in vLLM's engine share: an engine, weights, log-probabilities, what was compiled."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENGINES = Path(__file__).parent.parent / "tests" / "engines"  # trained checkpoints, and vLLM's engine on a CPU
REFERENCE = ("FLASH_ATTN", "auto")
REFERENCE_MLA = ("FLASH_ATTN_MLA", "auto")
OURS = "tersekv"
PHASE = "PHASE "
BEGAN = time.perf_counter()
# How far log-probabilities may lie from the reference's: relative norm of the centred ones, worst of some prompts,
# by bits of the cache. A model of such weights with 8 layers of 1024 columns and prompts of up to 2049 tokens, in the
# engine on a CPU: 0.015 in bf16, 0.053 in fp8, 0.17 in nvfp4 and int4; 0.96 without attention.
LIMITS = {16: 0.05, 8: 0.15, 4: 0.4}


def phase(what: str) -> None:
    """Tell what begins now, and when."""
    print(f"{PHASE}{time.perf_counter() - BEGAN:.1f} s: {what}", flush=True)


@dataclass(frozen=True)
class Case:
    """kind: "speed", or a name in `vllm_accept.KINDS`; backend: vLLM's name, or tersekv; dtype: --kv-cache-dtype."""

    kind: str
    backend: str
    dtype: str
    tiny: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind} {self.backend} {self.dtype}"

    @property
    def bits(self) -> int:
        """Of the side with fewer."""
        return min({"auto": 16, "nvfp4": 4, "int4": 4}.get(part.split("_")[0], 8) for part in self.dtype.split("/"))

    @property
    def is_reference(self) -> bool:
        return (self.backend, self.dtype) == ((OURS, "auto") if self.tiny else reference_of(self.kind))


def reference_of(kind: str) -> tuple[str, str]:
    """vLLM's own backend over 16 bits, and its dtype."""
    return REFERENCE_MLA if kind == "mla" else REFERENCE


class Compiled:
    """Names of the kernels that Triton compiled, or loaded from its cache, since `clear`."""

    def __init__(self) -> None:
        from triton import knobs

        self.names: list[str] = []
        self._before = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = self

    def __call__(self, **told: Any) -> Any:
        self.names.append(f"{told['fn'].module}.{told['fn'].name}")
        if of_ours(self.names[-1:]):
            phase(f"kernel {len(of_ours(self.names))}, {self.names[-1]}, is compiled")
        return self._before(**told) if self._before is not None else None

    def clear(self) -> list[str]:
        names, self.names = self.names, []
        return names


def of_ours(names: list[str]) -> list[str]:
    """Those of tersekv: vLLM compiles some of its own with its first requests."""
    return [name for name in names if name.startswith("tersekv.")]


def prepare(case: Case) -> None:
    """The process's environment, before anything of vLLM is imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_NO_USAGE_STATS="1",
        TOKENIZERS_PARALLELISM="false",
    )  # fmt: skip
    for folder in (ENGINES, ENGINES.parent):
        sys.path.insert(0, str(folder))
    if case.tiny:
        import vllm_cpu  # noqa: F401


@contextlib.contextmanager
def engine(folder: Path, case: Case, **options: Any) -> Iterator[Any]:
    """An engine over a checkpoint, or with load_format=drawn_weights() over random weights."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    given = {
        "skip_tokenizer_init": True, "dtype": "bfloat16", "kv_cache_dtype": case.dtype, "seed": 0,
        "attention_backend": tersekv_backend_name(case.kind == "mla") if case.backend == OURS else case.backend,
        "disable_log_stats": True, **options,
    }  # fmt: skip
    if case.tiny:
        given |= {"enforce_eager": True, "compilation_config": {"mode": 0, "custom_ops": ["none"]}}
    phase("the engine starts")
    llm = LLM(str(folder), **given)
    phase("the engine is ready")
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def tersekv_backend_name(is_mla: bool) -> str:
    """What this vLLM calls tersekv's backend; one that knows no names of plugins has CUSTOM alone, made MLA's here."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from tersekv.integrations.vllm import MLA_BACKEND, MLA_NAME, name

    if is_mla and MLA_NAME in AttentionBackendEnum.__members__:
        return MLA_NAME
    if is_mla:
        register_backend(AttentionBackendEnum.CUSTOM, MLA_BACKEND)
    return name()


def config(folder: Path, **sizes: Any) -> Path:
    """The config.json of a Llama."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, **sizes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(entries))
    return folder


def drawn_weights() -> str:
    """The load_format of `draw_weights`: layers then make what they derive from weights, and graphs are captured."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class Drawn(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            draw_weights(model)

    register_model_loader("drawn")(Drawn)
    return "drawn"


def draw_weights(model: Any) -> None:
    """Weights by their names, the same in every process, of a size at which attention counts.

    vLLM's own random weights are so small that no attention is seen in the logits. Queries are twice as large as usual:
    softmax then picks keys, and the values of a few do not average out.
    """
    import torch

    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.data.fill_(1.0)
            continue
        g = torch.Generator(device=weight.device).manual_seed(zlib.crc32(name.encode()))
        weight.data.normal_(0, weight.shape[-1] ** -0.5, generator=g)
        if "qkv_proj" in name:
            weight.data[: weight.shape[1]] *= 2
        elif "q_b_proj" in name:  # latent attention's queries
            weight.data *= 2
        if "embed" in name:
            weight.data *= weight.shape[-1] ** 0.5


def generate(llm: Any, prompts: list[list[int]], tokens: int, **options: Any) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True, **options)
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def log_probabilities(found: dict[int, Any], vocabulary: int) -> Any:
    """[vocabulary] fp64 of vLLM's dictionary, in which every token stands."""
    import torch

    return torch.tensor([found[t].logprob for t in range(vocabulary)], dtype=torch.float64)


def apart(got: Any, want: Any) -> float:
    """The relative norm of the difference, at the worst row; constants, which softmax does not see, taken off."""
    got, want = (x - x.mean(-1, keepdim=True) for x in (got, want))
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


def divergence(got: Any, want: Any) -> float:
    """The mean of KL(want, got), nats."""
    return float((want.exp() * (want - got)).sum(-1).mean())
