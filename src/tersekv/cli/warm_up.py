"""`tersekv warm-up`: fill a folder with the kernels that a model will need in vLLM, on a machine without a GPU."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..integrations.vllm_latents import FORMATS as LATENT_FORMATS
from ..integrations.vllm_latents import latents_of
from ..integrations.vllm_pages import FORMATS, known, pages_of
from ..integrations.vllm_warm_up import ANY_SCALE, JOBS, Limits, latent_calls, sorted_windows
from ..ops.compile_workers import Chip, compile_ahead, on_meta
from .arguments import between, complain, positive, words

_LATENTS = ("auto", *LATENT_FORMATS)
_MOST = (1 << 31) - 1  # tokens
_SIZES = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "max_position_embeddings", "kv_lora_rank",
    "qk_rope_head_dim", "qk_nope_head_dim",
)  # fmt: skip
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="CONFIG.json", required=True, type=Path, help="as Hugging Face has it")
    parser.add_argument(
        "--formats", metavar="DTYPES", type=_dtypes, default=("auto",),
        help="comma-separated values of vLLM's --kv-cache-dtype; default: auto",
    )  # fmt: skip
    parser.add_argument("--out", metavar="DIR", required=True, type=Path, help="the folder, for TRITON_CACHE_DIR")
    parser.add_argument("--arch", metavar="SM", type=between(80, 999), default=90, help="default: %(default)s, Hopper")
    parser.add_argument(
        "--num-sms", metavar="N", type=between(1, 1024), default=132, help="of the GPU; default: %(default)s"
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of the model; default: %(default)s")
    parser.add_argument("--processes", metavar="N", type=positive, help="default: one for each core, at most 16")
    for option, default, most in (
        ("block-size", 16, 1 << 16), ("max-num-seqs", 256, 1 << 16), ("max-num-batched-tokens", 8192, 1 << 20),
        ("tensor-parallel-size", 1, 1 << 10),
    ):  # fmt: skip
        what = f"vLLM's --{option}; default: %(default)s"
        parser.add_argument(f"--{option}", metavar="N", type=between(1, most), default=default, help=what)
    parser.add_argument("--max-model-len", metavar="N", type=between(1, _MOST), help="vLLM's; default: the model's")
    parser.add_argument(
        "--drafts", metavar="N", type=between(0, 1 << 10), default=0, help="of speculative decoding; default: none"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code 0: all is compiled; 1: not all; 2: what was asked for is wrong."""
    path = args.model / "config.json" if args.model.is_dir() else args.model
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        return complain(args, f"--out {args.out}: {e}")
    try:
        config = json.loads(path.read_text())
        wanted = [made for name in args.formats for made in calls_of(config, name, args)]
    except (OSError, ValueError) as e:
        return complain(args, f"--model {args.model}: {e}")
    except KeyError as e:
        return complain(args, f"--model {args.model}: want the config.json of a language model, which has {e}")
    options = {"processes": args.processes, "cache_dir": args.out, "say": partial(print, flush=True)}
    results = [compile_ahead(made, Chip(args.arch, args.num_sms), **options) for made in wanted]
    if not any(results):
        print(f"{args.out} has all of it")
    print(f"TRITON_CACHE_DIR={args.out.absolute()}")
    failed = dict.fromkeys(reason for found in results if found is not None for reason in found.failed)
    return max((complain(args, reason, 1) for reason in failed), default=0)


def calls_of(config: Any, cache_dtype: str, args: argparse.Namespace) -> list[list[partial]]:
    """Returns jobs: the calls of vLLM's batches in the layers of a model, on meta tensors."""
    model = config.get("text_config", config) if isinstance(config, dict) else config
    if not isinstance(model, dict):
        raise ValueError(f"want the config.json of a language model, got {type(model).__name__} in JSON")
    model = {name: x for name, x in model.items() if x is not None}
    for name in (n for n in _SIZES if n in model):
        least = 0 if name == "qk_rope_head_dim" else 1
        if type(model[name]) is not int or model[name] < least:
            raise ValueError(f"want at least {least} for {name}, got {model[name]!r}")
    q_heads, ranks = model["num_attention_heads"], args.tensor_parallel_size
    if q_heads % ranks:
        raise ValueError(f"want num_attention_heads divisible by --tensor-parallel-size, got {q_heads} and {ranks}")
    new = partial(torch.empty, device="meta")
    columns = -(-(args.max_model_len or model["max_position_embeddings"]) // args.block_size)
    like = SimpleNamespace(
        limits=Limits(args.max_num_seqs, args.max_num_batched_tokens, 1 + args.drafts),
        block_table=new(1, columns, dtype=torch.int32), seq_lens=new(1, dtype=torch.int32),
        slot_mapping=new(1, dtype=torch.int64),
    )  # fmt: skip
    if model.get("kv_lora_rank") is not None:
        return [_calls_of_latents(model, cache_dtype, q_heads // ranks, like, args)]
    known(cache_dtype)
    kv_heads = model.get("num_key_value_heads") or q_heads
    if kv_heads % ranks and ranks % kv_heads:
        want = "num_key_value_heads and --tensor-parallel-size, one divisible by the other"
        raise ValueError(f"want {want}, got {kv_heads} and {ranks}")
    dim = model.get("head_dim") or model["hidden_size"] // q_heads
    dtype, size = _DTYPES[args.dtype], args.block_size
    kind = FORMATS.get(cache_dtype)
    storage, row = (dtype, 2 * dim) if kind is None else (kind.dtype, kind.row_bytes(dim, dim) // kind.dtype.itemsize)
    cache = new(64, max(kv_heads // ranks, 1), size, row, dtype=storage)
    pages = pages_of(cache, cache_dtype, dim, new((), dtype=torch.float32), new((), dtype=torch.float32))
    q = new(1, q_heads // ranks, dim, dtype=dtype)
    sinks = new(q_heads // ranks, dtype=torch.float32) if model.get("model_type") == "gpt_oss" else None
    softcap = float(model.get("attn_logit_softcapping") or 0.0)
    # In the order of `TersekvImpl.forward`: an engine with equal calls then finds that they are done.
    options = {
        "softmax_scale": ANY_SCALE, "window": None, "sinks": sinks, "softcap": softcap, "batch_invariant": False
    }  # fmt: skip
    all_options = [options | {"window": w} for w in sorted_windows(windows(model))]
    return [[call for some in all_options for call in job(True, q, on_meta(pages), like, some)] for job in JOBS]


def _calls_of_latents(
    model: dict[str, Any], cache_dtype: str, heads: int, like: Any, args: argparse.Namespace
) -> list[partial]:
    """What TERSEKV_MLA writes and decodes; prompts are vLLM's own there."""
    if cache_dtype not in _LATENTS:
        raise ValueError(f"want --formats of {', '.join(_LATENTS)} for latent attention, got {cache_dtype}")
    rank, rotary, nope = model["kv_lora_rank"], model["qk_rope_head_dim"], model["qk_nope_head_dim"]
    new, dtype = partial(torch.empty, device="meta"), _DTYPES[args.dtype]
    # Bytes of a latent of 512, its scales, and a rotary part of 16 bits.
    row, storage = (656, torch.uint8) if cache_dtype == "fp8_ds_mla" else (rank + rotary, dtype)
    if cache_dtype in ("fp8", "fp8_e4m3"):
        storage = torch.float8_e4m3fn
    elif cache_dtype in ("bfloat16", "float16"):
        storage = _DTYPES[cache_dtype]
    cache = new(64, args.block_size, row, dtype=storage)
    pages = latents_of(cache, cache_dtype, rank, new((), dtype=torch.float32), rotary)
    q = new(1, heads, rank, dtype=dtype), new(1, heads, nope + rotary, dtype=dtype)[..., nope:]
    options = {"softmax_scale": ANY_SCALE, "return_lse": False}
    return [*latent_calls(q, on_meta(pages), like, options)]


def windows(model: dict[str, Any]) -> list[int | None]:
    """What the layers of a model see: all keys, or a window of them, or some this and some that."""
    window, kinds = model.get("sliding_window"), model.get("layer_types")
    if window is None or model.get("use_sliding_window") is False:
        return [None]
    if kinds is None:
        return [window]
    known = (None, "full_attention"), (window, "sliding_attention")
    found = [w for w, kind in known if kind in kinds] if isinstance(kinds, list) else []
    if not found:
        raise ValueError(f"want full_attention or sliding_attention in layer_types, got {kinds!r}")
    return found


def _dtypes(text: str) -> tuple[str, ...]:
    """A comma-separated list of vLLM's cache dtypes and tersekv's."""
    try:
        return tuple(word if word in _LATENTS else known(word) for word in words(text)) or ("auto",)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
