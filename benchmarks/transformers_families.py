"""Every family of causal language models in the installed transformers, small and random, over a `TersekvCache`.

    python benchmarks/transformers_families.py [--only llama,mpt] [--json PATH]

A family works if `generate` writes the tokens, and the logits, of eager attention over transformers' own cache whose
rows went through the same codec: greedily, for a batch with padding on the left, in bf16 and in an 8-bit format. Or it
is refused, by an UnsupportedError that names the family or its class; or it cannot be built small, with the reason.
All else is a failure: another result in silence, another error. Of a family that works it is told whether its decode
step is one graph over a `TersekvStaticCache`, with the same tokens. Prints a line for each; exit code 1 for a failure.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, CompileConfig, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from tersekv import UnsupportedError
from tersekv.formats import KVFormat, kv_format
from tersekv.integrations.transformers import ATTENTION, TersekvCache, TersekvStaticCache
from tersekv.integrations.transformers_layers import CACHE_ARGUMENT
from tersekv.testing.codes import column, decode_row, encode_row

WORKS, REFUSED, NOT_BUILT, FAILS = "works", "refused", "not built", "fails"
COMPILES = "one graph"
FORMATS = ("bf16", "fp8_e4m3")
BATCH, PROMPT, NEW, PADDED = 2, 40, 12, 11
VOCABULARY, WINDOW, PAGE = 97, 24, 8
LARGEST = 20_000_000  # weights of a model that counts as small
# fp32 models: what is left is the order of sums, and a rounding here and there that falls on the other side.
CLOSE = 2e-3
# What 8 bits change in the logits at least: a model that feels less would not tell another attention either.
FELT = 1e-4

# Sizes by the names that configs have for them; what has none of these names stays as it is.
_NAMES: dict[Any, str] = {
    VOCABULARY: "vocab_size n_vocab",
    64: "hidden_size n_embd d_model emb_dim embedding_size word_embed_proj_dim",
    96: "intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size d_inner",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_key_value_heads num_kv_heads "
    "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts",
    16: "head_dim dim_head kv_channels d_kv qk_rope_head_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank v_head_dim",
    512: "max_position_embeddings n_positions max_seq_len n_ctx",
    WINDOW: "sliding_window window_size qk_nope_head_dim",
    128: "kv_lora_rank",
    8: "rotary_dim",
    1: "n_group topk_group bos_token_id",
    0: "pad_token_id",
    None: "eos_token_id",
}
_SIZES: dict[str, Any] = {name: size for size, names in _NAMES.items() for name in names.split()} | {"is_decoder": True}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
# What the defaults of a family need beside: they do not fit each other, or hide a kind of layer that the family is for.
_SHARED = {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
}  # fmt: skip
_MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": None, "sliding_attention": _DEFAULT_ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, **_SHARED},
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, **_SHARED},
    "git": {"vision_config": _TOWER},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "inkling2_text": {"unpadded_vocab_size": VOCABULARY},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCABULARY},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "llama4_text": {"attention_chunk_size": 3 * PAGE},
    "longcat_flash": {"num_layers": 1, "expert_ffn_hidden_size": 32, "zero_expert_num": 2},
    "minimax": {"sliding_window": None},
    "phi4_multimodal": {
        "audio_config": {
            "num_blocks": 1, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32,
            **_TOWER,
        },
        "vision_config": _TOWER,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def families() -> list[str]:
    """As transformers names them."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def said(e: Exception) -> str:
    """An error in one line, without the folders of this machine."""
    return re.sub(r"/\S*/(?=transformers/)", "", f"{type(e).__name__}: {' '.join(str(e).split())}")[:300]


class NotBuiltError(Exception):
    """A family has no small model here, and why."""


def small(name: str) -> tuple[Any, type]:
    """A config of a few thousand weights a layer, and the class of its model."""
    whole = CONFIG_MAPPING[name]
    default = built(whole)
    text = default.get_text_config(decoder=True)
    if type(text) is not whole:
        if text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise NotBuiltError(f"its language model is {text.model_type}")
        default = text
    known = default.to_dict()
    sizes = {key: value for key, value in _SIZES.items() if key in known and known[key] != value}
    if known.get("kv_lora_rank") is not None and "num_key_value_heads" in known:
        sizes["num_key_value_heads"] = _SIZES["num_attention_heads"]
    kinds = list(dict.fromkeys(known.get("layer_types") or ()))
    if len(kinds) > 1:
        sizes.update(layer_types=kinds, num_hidden_layers=len(kinds))
    found = MODEL_FOR_CAUSAL_LM_MAPPING[whole]
    kind = found[0] if isinstance(found, tuple) else found
    try:
        return built(type(default), **{**sizes, **_MORE.get(name, {})}), kind
    except NotBuiltError:
        TersekvCache(default)  # may refuse it, whatever its size
        raise


def built(make: Any, *args: Any, **options: Any) -> Any:
    """What `make` returns. Raises NotBuiltError, with what it raises: sizes that do not fit each other."""
    try:
        return make(*args, **options)
    except Exception as e:
        raise NotBuiltError(said(e)) from e


class Rounded(DynamicCache):
    """transformers' own cache of rows that went through a format's codec."""

    def __init__(self, config: Any, format: str) -> None:
        super().__init__(config=config)
        self._format = kv_format(format)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        k, v = (through(x, self._format) for x in (key_states, value_states))
        return super().update(k, v, layer_idx, *args, **kwargs)


class RoundedMiniMax(MiniMaxCache):
    """The same, for the model that takes caches of its own class alone."""

    def __init__(self, format: str) -> None:
        super().__init__()
        self._format = kv_format(format)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        k, v = (through(x, self._format) for x in (key_states, value_states))
        return super().update(k, v, layer_idx, *args, **kwargs)


def through(x: Tensor, format: KVFormat) -> Tensor:
    return decode_row(*encode_row(x.float(), format, column(1.0)), format, column(1.0)).to(x.dtype)


def rounded(config: Any, format: str) -> Any:
    """transformers' own cache for a model, of rows that went through a format's codec."""
    return RoundedMiniMax(format) if config.model_type == "minimax" else Rounded(config, format)


def model_of(config: Any, kind: Any) -> Any:
    """A model whose attention matters to its logits, as that of a trained one does."""
    with torch.device("meta"):
        weights = sum(p.numel() for p in built(kind, config).parameters())
    if weights > LARGEST:
        raise NotBuiltError(f"{weights:,} weights")
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=ATTENTION).eval()
    for _, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[-1] ** -0.5)
    return model.float().requires_grad_(False)


def generated(model: Any, cache: Any, attention: str, **options: Any) -> tuple[Tensor, Tensor]:
    """New tokens [B, NEW] and their logits [B, NEW, vocabulary]."""
    model.set_attn_implementation(attention)
    ids = torch.randint(2, VOCABULARY, (BATCH, PROMPT), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :PADDED] = 0
    out = model.generate(
        ids.where(mask.bool(), 0), attention_mask=mask, **{CACHE_ARGUMENT: cache}, max_new_tokens=NEW, do_sample=False,
        output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    if cache.get_seq_length() != PROMPT + NEW - 1:
        raise SilentError(f"the cache holds {cache.get_seq_length()} tokens of {PROMPT + NEW - 1}")
    return out.sequences[:, PROMPT:], torch.stack(out.logits, 1).float()


class SilentError(Exception):
    """A model ran, and did something else than it was asked for."""


def apart(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> tuple[float, int]:
    """Relative distance of the logits, of each row up to its first other token, and how many tokens are the same."""
    same = (got[0] == want[0]).long().cumprod(1)
    seen = torch.cat((torch.ones_like(same[:, :1]), same[:, :-1]), 1).bool()
    return float((got[1] - want[1])[seen].norm() / want[1][seen].norm()), int(same.sum())


def measured(model: Any, graphs: bool) -> dict[str, Any]:
    """Distances by format; graphs: and whether it compiles. Raises SilentError for one that is too large, and for a
    model that feels no format.
    """
    told, wants = {}, {}
    for format in FORMATS:
        try:
            wants[format] = generated(model, rounded(model.config, format), "eager")
        except Exception as e:
            raise NotBuiltError(f"with eager attention: {said(e)}") from e
        got = generated(model, TersekvCache(model.config, format, page_size=PAGE), ATTENTION)
        off, same = apart(got, wants[format])
        if not off < CLOSE:
            raise SilentError(f"{format}: logits are off by {off:.1e}, {same} of {BATCH * NEW} tokens are the same")
        told[format] = {"off": float(f"{off:.1e}"), "same": same}
    if graphs:
        told["compiled"] = compiled(model, got)
    felt, _ = apart(wants[FORMATS[1]], wants[FORMATS[0]])
    if not felt > max(FELT, 4 * max(told[format]["off"] for format in FORMATS)):
        raise SilentError(f"its logits do not tell {' from '.join(FORMATS)}: {felt:.1e}")
    return told


def compiled(model: Any, want: tuple[Tensor, Tensor]) -> str:
    """Whether the decode step becomes one graph, and one alone: COMPILES, or why not. Raises SilentError for other
    tokens than those of a `TersekvCache`.
    """
    torch._dynamo.reset()
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True  # without it, generate compiles on GPUs alone
    try:
        cache = TersekvStaticCache(model.config, FORMATS[-1], page_size=PAGE, max_tokens=PROMPT + NEW)
        with torch._dynamo.config.patch(error_on_recompile=True):
            got = generated(model, cache, ATTENTION, compile_config=config)
    except SilentError:
        raise
    # Whatever the compiler or the model raises: it is what is looked for.
    except Exception as e:
        return said(e)
    finally:
        vars(model).pop("_compiled_call", None)
    off, same = apart(got, want)
    if not off < CLOSE:
        raise SilentError(f"compiled: logits are off by {off:.1e}, {same} of {BATCH * NEW} tokens are the same")
    return COMPILES


def judge(name: str, graphs: bool = False) -> dict[str, Any]:
    """What comes of a family. graphs: compile it, too, which takes some seconds."""
    told: dict[str, Any] = {"family": name}
    words = {name}
    try:
        config, kind = small(name)
        told["class"] = kind.__name__
        words |= {config.model_type, kind.__name__}
        TersekvCache(config, page_size=PAGE)  # a family that is refused by its config need not be built
        model = model_of(config, kind)
        words |= {type(module).__name__ for module in model.modules()}
        return {**told, "found": WORKS, **measured(model, graphs)}
    except NotBuiltError as e:
        return {**told, "found": NOT_BUILT, "why": str(e)}
    except UnsupportedError as e:
        named = any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", str(e)) for word in words)
        return {**told, "found": REFUSED if named else FAILS, "why": str(e)}
    # Whatever a model raises: it is what is looked for.
    except Exception as e:
        return {**told, "found": FAILS, "why": said(e)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="comma-separated families; default: all")
    parser.add_argument("--json", metavar="PATH", help="where to keep what was found")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows = []
    for name in args.only.split(",") if args.only else families():
        rows.append(judge(name, graphs=True))
        print(*(f"{value}" for value in rows[-1].values()), flush=True)
    counts = {found: sum(row["found"] == found for row in rows) for found in (WORKS, REFUSED, NOT_BUILT, FAILS)}
    print(", ".join(f"{n} {found}" for found, n in counts.items()))
    if args.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        told = {"date": time.strftime("%Y-%m-%d"), "versions": versions, "formats": FORMATS, "rows": rows}
        Path(args.json).write_text(json.dumps(told, indent=1) + "\n")
    return 1 if counts[FAILS] else 0


if __name__ == "__main__":
    sys.exit(main())
