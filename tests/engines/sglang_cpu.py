"""SGLang's real engine on a machine without a GPU. Import this before anything of SGLang.

The package index has no build of SGLang for CPUs. Its own code runs on one as it is: scheduler, prefix tree, pool,
models, sampler. Its kernels for GPUs are stood in for, since no CPU calls them.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

os.environ.update(SGLANG_USE_CPU_ENGINE="1", TOKENIZERS_PARALLELISM="false", TORCHDYNAMO_DISABLE="1")

import torch
from stand_in import stand_in

# A forked process makes PyTorch's thread pool anew, which fails where the threads that load weights do it at once.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))

stand_in("sgl_kernel")
# torchvision's own operators are made for CUDA; it names two of them when it is imported.
_library = torch.library.Library("torchvision", "FRAGMENT")
_library.define("nms(Tensor a, Tensor b, float c) -> Tensor")
_library.define("qnms(Tensor a, Tensor b, float c) -> Tensor")
# SGLang spawns processes, each of which would import all of it again; forked ones have it.
_start = multiprocessing.set_start_method
multiprocessing.set_start_method = lambda method, force=False: _start("fork", force=True)

import sglang  # noqa: E402
import sglang.srt.managers.scheduler  # noqa: E402 (what forked processes need, imported once)
import sglang.srt.models.registry  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

from tersekv.integrations.sglang import NAME  # noqa: E402


def _failed(*signal: Any) -> None:
    """Else SGLang kills the process that started the engine."""
    raise RuntimeError("a process of the engine failed: its error is in what pytest captured")


@contextmanager
def engine(folder: os.PathLike | str, format: str | None = None, **options: Any) -> Iterator[sglang.Engine]:
    """An engine over a checkpoint, with tersekv's attention and its pool in a format."""
    given = {
        "device": "cpu",
        "attention_backend": NAME,
        "skip_tokenizer_init": True,
        "disable_cuda_graph": True,
        "sampling_backend": "pytorch",
        "dtype": "float32",
        "page_size": 16,
        "max_total_tokens": 3200,
        "max_running_requests": 8,
        "context_length": 512,
        "log_level": "warning",
        "custom_sigquit_handler": _failed,
        **options,
    }
    os.environ.pop("TERSEKV_SGLANG_FORMAT", None)
    if format is not None:
        os.environ["TERSEKV_SGLANG_FORMAT"] = format
    made = sglang.Engine(model_path=str(folder), **given)
    try:
        yield made
    finally:
        made.shutdown()
        os.environ.pop("TERSEKV_SGLANG_FORMAT", None)


def generate(
    made: sglang.Engine, prompts: list[list[int]], tokens: int
) -> tuple[list[tuple[list[int], torch.Tensor]], list[dict[str, Any]]]:
    """Greedy tokens of every prompt and the log-probabilities of the whole vocabulary at each of them; and what SGLang
    tells of each request."""
    params = {"max_new_tokens": tokens, "temperature": 0}
    outs = made.generate(input_ids=prompts, sampling_params=params, return_logprob=True, top_logprobs_num=256)
    results = []
    for out in outs:
        rows = torch.empty(tokens, 256, dtype=torch.float64)
        for row, entries in zip(rows, out["meta_info"]["output_top_logprobs"], strict=True):
            for logprob, token, _ in entries:
                row[token] = logprob
        results.append((list(out["output_ids"]), rows))
    return results, [out["meta_info"] for out in outs]


def runner_of(pool: Any, requests: int = 4, tokens: int = 160, **given: Any) -> SimpleNamespace:
    """A model runner as the backend knows it. Requests have pages of their own, in no order."""
    args = {
        "kv_cache_dtype": "auto", "cuda_graph_config": None, "chunked_prefill_size": 256, "enable_mixed_chunk": True,
        **given,
    }  # fmt: skip
    page = getattr(pool, "page_size", 16)
    pages = torch.randperm(requests * tokens // page, generator=torch.Generator().manual_seed(3)) + 1
    slots = pages[:, None] * page + torch.arange(page)
    return SimpleNamespace(
        use_mla_backend=False, is_draft_worker=False, server_args=SimpleNamespace(**args), token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=slots.view(requests, tokens).to(torch.int32)),
        model_config=SimpleNamespace(attention_chunk_size=None),
    )  # fmt: skip


def batch_of(runner: Any, mode: ForwardMode, lens: list[int], new: list[int]) -> SimpleNamespace:
    slots = runner.req_to_token_pool.req_to_token
    where = [slots[i, n - m : n] for i, (n, m) in enumerate(zip(lens, new, strict=True))]
    return SimpleNamespace(
        forward_mode=mode, seq_lens=torch.tensor(lens),
        extend_seq_lens=torch.tensor(new), extend_seq_lens_cpu=new, req_pool_indices=torch.arange(len(lens)),
        out_cache_loc=torch.cat(where).long(), out_cache_loc_is_physical=True, encoder_lens=None, mha_return_lse=False,
    )  # fmt: skip
