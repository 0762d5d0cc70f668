"""Bad calls of every operation: the error's type, and its exact words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tersekv import (
    MLAPrefillPlan,
    PagedKVCache,
    PagedKVLayer,
    PagedLatentCache,
    PagedLatentLayer,
    UnsupportedError,
    append,
    decode,
    merge_states,
    mla_append,
    mla_decode,
    mla_decode_branch,
    mla_prefill,
    mla_prefill_plan,
    mla_project,
    prefill,
    rope_append,
)
from tersekv.calls import CALLS, AppendCall
from tersekv.dispatch import checks, launch_cache, plan, type_checks
from tersekv.ops import registry
from tersekv.testing.cases import cases
from tersekv.testing.make import make

BF, F32, I32 = torch.bfloat16, torch.float32, torch.int32
E4M3 = torch.float8_e4m3fn
I8 = "int8_per_token_head"


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=I32)


def bf(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=BF)


def kv(format: str = "fp8_e4m3", d: int = 32, dv: int = 16, **scales) -> PagedKVLayer:
    """A layer with scales that `allocate` may refuse."""
    return replace(PagedKVCache.allocate(1, 4, 8, 2, d, format=format, head_dim_v=dv)[0], **scales)


def latent(format: str = "bf16", **scales):
    rows = PagedLatentCache.allocate(1, 4, 8, format=format, kv_lora_rank=128, qk_rope_head_dim=16)[0]
    return replace(rows, **scales)


def good(op: str) -> dict:
    """A call of each operation that passes every check, with every tensor given."""
    rope = {"cos_sin_cache": torch.zeros(9, 16), "positions": i32(0, 1, 2), "q_scale": torch.ones(1)}
    attend = {
        "page_table": torch.zeros(2, 3, dtype=I32), "seq_lens": i32(3, 4), "softmax_scale": torch.ones(1),
        "cu_seqlens_q": i32(0, 1, 2), "max_q_len": 1, "out_scale": torch.ones(1), "lse": torch.zeros(2, 4),
    }  # fmt: skip
    return {
        "append": lambda: {"k": bf(3, 2, 32), "v": bf(3, 2, 16), "cache": kv(), "slot_mapping": i32(0, 1, 2)},
        "rope_append": lambda: {
            "q": bf(3, 4, 32), "k": bf(3, 2, 32), "v": bf(3, 2, 16), "cache": kv(), "slot_mapping": i32(0, 1, 2),
            "q_out": bf(3, 4, 32), **rope,
        },
        "mla_append": lambda: {
            "kv_c": bf(3, 128), "k_pe": bf(3, 16), "cache": latent(), "slot_mapping": i32(0, 1, 2),
            "q_nope": bf(3, 4, 128), "q_pe": bf(3, 4, 16), "q_nope_out": bf(3, 4, 128), "q_pe_out": bf(3, 4, 16),
            **rope,
        },
        "decode": lambda: {
            "q": bf(2, 4, 32), "cache": kv(), "sinks": torch.zeros(4), "mask": torch.zeros(2, 2, dtype=torch.uint16),
            "out": bf(2, 4, 16), **attend,
        },
        "prefill": lambda: {
            "q": bf(2, 4, 32), "cache": kv(), "k": bf(2, 2, 32), "v": bf(2, 2, 16), "sinks": torch.zeros(4),
            "out": bf(2, 4, 16), **attend,
        },
        "mla_decode": lambda: {"q": bf(2, 4, 144), "cache": latent(), "out": bf(2, 4, 128), **attend},
        "mla_prefill": lambda: {
            "q": bf(3, 2, 48), "cache": latent(), "page_table": torch.zeros(2, 3, dtype=I32), "cache_lens": i32(3, 6),
            "cu_seqlens_q": i32(0, 2, 3), "freqs_cis": torch.zeros(9, 16), "kv_norm_gamma": bf(128),
            "kv_b_proj": torch.zeros(128, 128).to(E4M3), "kv_b_proj_scale": torch.ones(1, 1),
            "plan": mla_prefill_plan([5, 7], [2, 1]), "softmax_scale": 0.1, "kv_c": bf(3, 128), "k_pe": bf(3, 16),
            "out": bf(3, 2, 32), "lse": torch.zeros(3, 2),
        },
        "mla_project": lambda: {
            "x": bf(3, 2, 128), "weight": torch.zeros(2, 128, 128).to(E4M3), "weight_scale": torch.ones(2, 1, 1),
            "out": bf(3, 2, 128),
        },
        "mla_decode_branch": lambda: {
            "q": bf(3, 2, 144), "cache": latent(), "page_table": torch.zeros(2, 3, dtype=I32),
            "cache_lens": i32(3, 6), "cu_seqlens_q": i32(0, 2, 3), "max_q_len": 2, "freqs_cis": torch.zeros(9, 16),
            "kv_norm_gamma": bf(128), "w_uk": torch.zeros(2, 128, 128).to(E4M3), "w_uk_scale": torch.ones(2, 1, 1),
            "w_uv": torch.zeros(2, 128, 128).to(E4M3), "w_uv_scale": torch.ones(2, 1, 1), "kv_c": bf(3, 128),
            "k_pe": bf(3, 16), "softmax_scale": torch.ones(1), "out": bf(3, 2, 128),
        },
        "merge_states": lambda: {
            "outs": bf(2, 3, 2, 8), "lses": torch.zeros(2, 3, 2), "out": bf(3, 2, 8), "lse": torch.zeros(3, 2),
        },
    }[op]()  # fmt: skip


# All but transcode (its lists may be longer than they have to be: tests/transfer/test_transcode.py), and but an
# indexer's (tests/index).
VERBS = {
    "append": append, "rope_append": rope_append, "mla_append": mla_append, "decode": decode, "prefill": prefill,
    "mla_decode": mla_decode, "mla_prefill": mla_prefill, "mla_project": mla_project,
    "mla_decode_branch": mla_decode_branch, "merge_states": merge_states,
}  # fmt: skip

INDEX = "int32 | int64 | uint32"
FLOAT = "bfloat16 | float16 | float32"
BAD_VALUES = [
    # operation, what is changed, the whole message
    ("append", {"k": bf(3, 2)}, f"k: want [T, H, D] {FLOAT} | float8_e4m3fn, got [3, 2] bfloat16"),
    ("append", {"k": bf(3, 2, 32).double()}, f"k: want [T, H, D] {FLOAT} | float8_e4m3fn, got [3, 2, 32] float64"),
    ("append", {"v": bf(4, 2, 16)}, "v: want [T=3, H=2, Dv] bfloat16, got [4, 2, 16] bfloat16 (T as in k)"),
    ("append", {"v": bf(3, 2, 16).half()}, "v: want [T=3, H=2, Dv] bfloat16, got [3, 2, 16] float16"),
    ("append", {"k": bf(3, 32, 2).mT}, "k: want stride 1 in the last dimension, got strides [64, 1, 2]"),
    ("append", {"k": bf(3, 2, 24)},
     "k: want head_dim 32 as in k_cache [4, 8, 2, 32], got 24"),
    ("append", {"v": bf(3, 2, 32)},
     "v: want head_dim_v 16 as in v_cache [4, 8, 2, 16], got 32"),
    ("append", {"k": bf(3, 4, 32), "v": bf(3, 4, 16)},
     "k: want num_kv_heads 2 as in k_cache [4, 8, 2, 32], got 4"),
    ("append", {"cache": PagedKVLayer(kv().k.float(), kv().v, "fp8_e4m3")},
     "k_cache: want [P, S, H=2, D=32] float8_e4m3fn, got [4, 8, 2, 32] float32"),
    ("append", {"v": bf(3, 2, 16).to("meta")}, "v: want device cpu, got meta"),
    ("decode", {"q": bf(2, 4, 32).to("meta")}, "q: want device cpu, got meta"),
    ("rope_append", {"q": bf(3, 4, 32).to("meta")}, "q: want device cpu, got meta"),
    ("mla_append", {"q_pe": bf(3, 4, 16).to("meta")}, "q_pe: want device cpu, got meta"),
    ("append", {"slot_mapping": i32(0, 1)}, f"slot_mapping: want [T=3] {INDEX}, got [2] int32 (T as in k)"),
    ("append", {"slot_mapping": i32(0, 1, 2).to(torch.int16)}, f"slot_mapping: want [T=3] {INDEX}, got [3] int16"),
    ("append", {"slot_mapping": i32(0, 1, 2).float()}, f"slot_mapping: want [T=3] {INDEX}, got [3] float32"),
    ("append", {"cache": kv("bf16", k_scale=0.5)},
     "k_scale: want 1.0 for bf16, which has no scale of the tensor, got 0.5"),
    ("decode", {"cache": kv("bf16", k_scale=0.3)},
     "k_scale: want 1.0 for bf16, which has no scale of the tensor, got 0.3"),
    ("append", {"cache": kv("int8_per_token_head", v_scale=torch.ones(1))},
     "v_scale: want 1.0 for int8_per_token_head, which has no scale of the tensor, got a tensor"),
    ("append", {"cache": kv(k_scale=torch.ones(3))},
     "k_scale: want float32 with 1 or 2 elements on cpu, got [3] float32 on cpu"),
    ("append", {"cache": kv(k_scale=torch.ones(1).double())},
     "k_scale: want float32 with 1 or 2 elements on cpu, got [1] float64 on cpu"),
    ("append", {"cache": kv("nvfp4", v_scale=torch.ones(2))},
     "v_scale: want float32 with 1 elements on cpu, got [2] float32 on cpu"),
    ("append", {"cache": kv(k_scale=0.0)}, "k_scale: want a positive number, got 0.0"),
    ("append", {"cache": kv(k_scale=float("nan"))}, "k_scale: want a positive number, got nan"),
    ("append", {"cache": kv(k_scale=float("inf"))},
     "k_scale: want a positive number that fp32 holds, and its reciprocal too, got inf"),
    ("append", {"cache": kv(k_scale=1e-50)},
     "k_scale: want a positive number that fp32 holds, and its reciprocal too, got 1e-50"),
    ("append", {"cache": PagedKVLayer(kv(I8).k, kv(I8).v, I8)},
     "k_scale_cache: want the stored float32 scales of int8_per_token_head, got None"),
    ("append", {"cache": PagedKVLayer(kv("nvfp4").k, kv("nvfp4").v, "nvfp4")},
     "k_scale_cache: want the stored float8_e4m3fn scales of nvfp4, got None"),
    ("append", {"cache": PagedKVLayer(kv().k, kv().v, "fp8_e4m3", k_scale_cache=torch.zeros(4, 8, 2))},
     "k_scale_cache: want None for fp8_e4m3, got a tensor"),
    ("append", {"cache": PagedKVLayer(kv().k, kv().v, "fp4")},
     "format: want one of bf16, fp16, fp8_e4m3, fp8_e5m2, fp8_per_token_head, int8_per_token_head, nvfp4, "
     "int4_per_token_head for K/V caches, got 'fp4'; did you mean 'nvfp4'?"),
    ("append", {"backend": "cuda"}, f"backend: want one of {', '.join(plan.BACKENDS)}, got 'cuda'"),
    ("append", {"backend": ""}, f"backend: want one of {', '.join(plan.BACKENDS)}, got ''"),
    ("decode", {"backend": 0}, f"backend: want one of {', '.join(plan.BACKENDS)}, got 0"),
    ("rope_append", {"q": bf(3, 32)}, "q: want [T, H, D], got [3, 32]"),
    ("rope_append", {"cos_sin_cache": torch.zeros(9, 34)},
     "cos_sin_cache: want [max_pos, R] with R <= head_dim=32, got [9, 34]"),
    ("rope_append", {"cos_sin_cache": torch.zeros(16)}, "cos_sin_cache: want [max_pos, R], got [16]"),
    ("rope_append", {"cos_sin_cache": torch.zeros(9, 15)},
     "cos_sin_cache: want [max_pos, R] with R positive and even, got 15"),
    ("rope_append", {"cos_sin_cache": bf(9, 16)}, "cos_sin_cache: want [max_pos, R=16] float32, got [9, 16] bfloat16"),
    ("rope_append", {"positions": i32(0, 1)}, f"positions: want [T=3] {INDEX}, got [2] int32 (T as in k)"),
    ("rope_append", {"q": bf(3, 4, 32).half()}, "q: want [T=3, Hq, Dq] bfloat16, got [3, 4, 32] float16"),
    ("rope_append", {"q_out": bf(3, 4, 32).double()},
     f"q_out: want [T=3, Hq=4, Dq=32] {FLOAT} | float8_e4m3fn | float8_e5m2, got [3, 4, 32] float64"),
    ("rope_append", {"q_out": None, "q_dtype": torch.int8},
     f"q_dtype: want {FLOAT} | float8_e4m3fn | float8_e5m2, got int8"),
    ("rope_append", {"q_dtype": E4M3}, "q_dtype: want q_out's own bfloat16 or None, got float8_e4m3fn"),
    ("rope_append", {"k": bf(3, 2, 48)}, "k: want head_dim 32 as in k_cache [4, 8, 2, 32], got 48"),
    ("rope_append", {"q": None}, "q_out: want None without q, got a tensor"),
    ("rope_append", {"k": bf(3, 2, 32).double()}, f"k: want [T, H, D] {FLOAT}, got [3, 2, 32] float64"),
    ("rope_append", {"q": bf(3, 4, 8), "q_out": None}, "q: want rows of at least R=16 as in cos_sin_cache, got 8"),
    ("rope_append", {"q_scale": torch.ones(2)}, "q_scale: want [1] float32, got [2] float32"),
    ("mla_append", {"kv_c": bf(3, 130)}, "kv_c: want a latent rank of 128 as in ckv [4, 8, 128], got 130"),
    ("mla_append", {"k_pe": bf(3, 16).half()}, "k_pe: want [T=3, R] bfloat16, got [3, 16] float16"),
    ("mla_append", {"positions": None}, "positions: want a tensor [T] beside cos_sin_cache, got None"),
    ("mla_append", {"cos_sin_cache": None}, "cos_sin_cache: want a tensor when a query is given, got None"),
    ("mla_append", {"q_pe": bf(3, 4, 8)},
     "q_pe: want [T=3, Hq, R=16] bfloat16, got [3, 4, 8] bfloat16 (R as in k_pe)"),
    ("mla_append", {"q_pe": bf(3, 4, 16).half()}, "q_pe: want [T=3, Hq, R=16] bfloat16, got [3, 4, 16] float16"),
    ("mla_append", {"q_pe": None}, "q_pe_out: want None without q_pe, got a tensor"),
    ("mla_append", {"q_nope_out": bf(3, 4, 128).to(E4M3)},
     "q_nope_out: want [T=3, Hq=4, Nq=128] bfloat16, got [3, 4, 128] float8_e4m3fn"),
    ("mla_append", {"cache": latent(kv_scale=0.5)},
     "kv_scale: want 1.0 for bf16, which has no scale of the tensor, got 0.5"),
    ("mla_append", {"cache": latent("fp8_e4m3", kv_scale=torch.ones(2))},
     "kv_scale: want [1] float32, got [2] float32"),
    ("mla_append", {"slot_mapping": i32(1)}, f"slot_mapping: want [T=3] {INDEX}, got [1] int32 (T as in kv_c)"),
    ("decode", {"q": bf(2, 32)}, "q: want [T, Hq, D], got [2, 32]"),
    ("decode", {"q": bf(2, 3, 32), "sinks": None, "out": None, "lse": None},
     "q: want num_q_heads a multiple of num_kv_heads=2, got 3"),
    ("decode", {"q": bf(2, 4, 24)}, "q: want head_dim 32 as in k_cache [4, 8, 2, 32], got 24"),
    ("decode", {"max_q_len": 0}, "max_q_len: want a positive bound on the rows of a request, got 0"),
    ("decode", {"max_q_len": 0, "cu_seqlens_q": None},
     "max_q_len: want at least T / B = 1, or None without cu_seqlens_q, got 0"),
    ("mla_decode", {"max_q_len": 0, "cu_seqlens_q": None},
     "max_q_len: want at least T / B = 1, or None without cu_seqlens_q, got 0"),
    ("decode", {"softmax_scale": -0.1}, "softmax_scale: want a finite number, not negative, got -0.1"),
    ("decode", {"softmax_scale": float("nan")}, "softmax_scale: want a finite number, not negative, got nan"),
    ("decode", {"softmax_scale": torch.ones(1).double()}, "softmax_scale: want [1] float32, got [1] float64"),
    ("decode", {"cache": kv(k_scale=-1.0)}, "k_scale: want a positive, finite number, got -1"),
    ("decode", {"cache": kv(v_scale=float("nan"))}, "v_scale: want a positive, finite number, got nan"),
    ("mla_decode", {"cache": latent("fp8_e4m3", kv_scale=float("inf"))},
     "kv_scale: want a positive, finite number, got inf"),
    ("decode", {"q": bf(2, 0, 32), "out": None, "lse": None}, "q: want at least one head, got 0"),
    ("decode", {"window": -3}, "window: want a positive number of keys (own included) or None, got -3"),
    ("decode", {"softcap": float("nan")}, "softcap: want 0 (none) or a positive, finite number, got nan"),
    ("decode", {"softcap": float("inf")}, "softcap: want 0 (none) or a positive, finite number, got inf"),
    ("decode", {"out_scale": float("nan")}, "out_scale: want a finite number, got nan"),
    ("mla_decode", {"out_scale": float("-inf")}, "out_scale: want a finite number, got -inf"),
    ("decode", {"out": None, "out_dtype": torch.int8},
     f"out_dtype: want {FLOAT} | float8_e4m3fn | float8_e5m2, got int8"),
    ("decode", {"page_table": i32(0, 1)}, f"page_table: want [B=2, max_pages] {INDEX}, got [2] int32"),
    ("decode", {"seq_lens": i32(1, 2, 3)},
     f"page_table: want [B=3, max_pages] {INDEX}, got [2, 3] int32 (B as in seq_lens)"),
    ("decode", {"cu_seqlens_q": i32(0, 2)}, f"cu_seqlens_q: want [B+1=3] {INDEX}, got [2] int32"),
    ("decode", {"cu_seqlens_q": None, "q": bf(3, 4, 32), "out": None, "mask": None, "lse": None},
     "q: want T a multiple of B=2 (or cu_seqlens_q for ragged drafts), got T=3"),
    ("decode", {"mask": torch.zeros(2, 1, dtype=torch.uint16)},
     "mask: want at least 2 uint16 words a row for 1 drafts, got 1"),
    ("decode", {"sinks": torch.zeros(2)}, "sinks: want [Hq=4] float32, got [2] float32 (Hq as in q)"),
    ("decode", {"out": bf(2, 4, 32)},
     f"out: want [T=2, Hq=4, Dv=16] {FLOAT} | float8_e4m3fn | float8_e5m2, got [2, 4, 32] bfloat16 (Dv as in v_cache)"),
    ("decode", {"out_dtype": F32}, "out_dtype: want out's own bfloat16 or None, got float32"),
    ("decode", {"out": bf(1, 4, 16).expand(2, 4, 16)}, "out: want memory for each element, got strides [0, 16, 1]"),
    ("append", {"cache": PagedKVLayer(kv().k[:1].expand(4, 8, 2, 32), kv().v, "fp8_e4m3")},
     "k_cache: want memory for each element, got strides [0, 64, 32, 1]"),
    ("mla_append", {"q_pe_out": bf(3, 1, 16).expand(3, 4, 16)},
     "q_pe_out: want memory for each element, got strides [16, 0, 1]"),
    ("mla_prefill", {"plan": MLAPrefillPlan(torch.zeros(1, 2, dtype=I32), torch.zeros(1, 2, dtype=I32), [0], 2)},
     f"plan.buffer_row_offsets: want [C, B+1=3] {INDEX}, got [1, 2] int32"),
    ("decode", {"lse": bf(2, 4)}, "lse: want [T=2, Hq=4] float32, got [2, 4] bfloat16"),
    ("decode", {"window": 0}, "window: want a positive number of keys (own included) or None, got 0"),
    ("decode", {"softcap": -1.0}, "softcap: want 0 (none) or a positive, finite number, got -1.0"),
    ("decode", {"precision": "best"}, "precision: want 'exact' or 'fast', got 'best'"),
    ("decode", {"softmax_scale": torch.ones(1).half()}, "softmax_scale: want [1] float32, got [1] float16"),
    ("decode", {"window": 10**30}, f"window: want an int that 64 bits hold, got {10**30}"),
    ("decode", {"q": bf(2, 4, 0), "softmax_scale": None}, "q: want head_dim a multiple of 8 up to 576, got 0"),
    ("rope_append", {"q_out": bf(3, 1, 32).expand(3, 4, 32)},
     "q_out: want memory for each element, got strides [32, 0, 1]"),
    ("mla_append", {"cache": PagedLatentLayer(bf(4, 0, 128), bf(4, 0, 16), "bf16")},
     "ckv: want at least one slot a page, got 0"),
    ("mla_decode", {"q": bf(2, 4, 128)}, "q: want [T, H, 128 + 16], got [2, 4, 128]"),
    ("mla_decode", {"q": (bf(2, 4, 128), bf(2, 3, 16))},
     "q_pe: want [T=2, H=4, R] bfloat16, got [2, 3, 16] bfloat16 (H as in q_nope)"),
    ("mla_decode", {"q": (bf(2, 4, 130), bf(2, 4, 16)), "out": None},
     "q_nope: want a latent rank of 128 as in ckv [4, 8, 128], got 130"),
    ("mla_decode", {"q": (bf(2, 4, 128), bf(2, 4, 8))}, "q_pe: want a rotary size of 16 as in kpe [4, 8, 16], got 8"),
    ("mla_decode", {"softmax_scale": -1.0}, "softmax_scale: want a finite number, not negative, got -1.0"),
    ("mla_decode", {"out": bf(2, 4, 144)},
     f"out: want [T=2, H=4, L=128] {FLOAT} | float8_e4m3fn | float8_e5m2, got [2, 4, 144] bfloat16 (L as in q_nope)"),
    ("mla_decode", {"lse": torch.zeros(4, 2)}, "lse: want [T=2, H=4] float32, got [4, 2] float32 (T, H as in q_nope)"),
    ("mla_prefill", {"q": bf(3, 96)}, "q: want [T, H, Dq], got [3, 96]"),
    ("mla_decode_branch", {"q": bf(3, 96)}, "q: want [T, H, Dq], got [3, 96]"),
    ("mla_decode_branch", {"w_uv": bf(2, 128)}, "w_uv: want [H, Dv, L], got [2, 128]"),
    ("mla_decode_branch", {"w_uk": torch.zeros(2, 128, 64).to(E4M3)},
     "w_uk: want [H=2, L=128, Dn=128] float8_e4m3fn, got [2, 128, 64] float8_e4m3fn (Dn as in q)"),
    ("mla_decode_branch", {"softmax_scale": -1.0}, "softmax_scale: want a finite number, not negative, got -1.0"),
    ("mla_prefill", {"q": torch.zeros(3, 2, 48)},
     "q: want [T, H, Dq] bfloat16 | float16, got [3, 2, 48] float32"),
    ("mla_prefill", {"softmax_scale": float("inf")}, "softmax_scale: want a finite number, not negative, got inf"),
    ("mla_prefill", {"epsilon": -1e-6}, "epsilon: want a finite number, not negative, got -1e-06"),
    ("mla_prefill", {"k_pe": None}, "k_pe: want a tensor beside kv_c, got None"),
    ("mla_prefill", {"kv_b_proj_scale": None}, "kv_b_proj_scale: want a tensor beside an e4m3 kv_b_proj, got None"),
    ("mla_prefill", {"kv_b_proj": bf(128, 128)}, "kv_b_proj_scale: want None beside a 16-bit kv_b_proj, got a tensor"),
    ("mla_prefill", {"kv_b_proj_scale": torch.ones(2, 1)},
     "kv_b_proj_scale: want [N/128=1, L/128=1] float32, got [2, 1] float32"),
    ("mla_prefill", {"freqs_cis": torch.zeros(9, 8)},
     f"freqs_cis: want [max_pos, R=16] {FLOAT}, got [9, 8] float32 (R as in k_pe)"),
    ("mla_prefill", {"cache_lens": i32(3)}, f"cache_lens: want [B=2] {INDEX}, got [1] int32 (B as in page_table)"),
    ("mla_prefill", {"cu_seqlens_q": i32(0, 3)}, f"cu_seqlens_q: want [B+1=3] {INDEX}, got [2] int32"),
    ("mla_prefill", {"plan": MLAPrefillPlan(*mla_prefill_plan([5, 7], [2, 1])[:2], [12, 0], 2)},
     "plan.buffer_lengths: want C=1 numbers, got 2"),
    ("mla_prefill", {"plan": MLAPrefillPlan(*mla_prefill_plan([5, 7], [2, 1])[:2], [-1], 2)},
     "plan.buffer_lengths: want no negative number, got [-1]"),
    ("append", {"cache": kv(k_scale=torch.ones(4)[::2])}, "k_scale: want stride 1, got [2]"),
    ("mla_append", {"cache": replace(latent(), ckv_scale_cache=torch.zeros(4, 8, 1))},
     "ckv_scale_cache: want None for bf16, got a tensor"),
    ("mla_append", {"cache": replace(latent("fp8_ds_mla"), ckv_scale_cache=None)},
     "ckv_scale_cache: want the stored scales of fp8_ds_mla, got None"),
    ("decode", {"q": bf(2, 4, 12)}, "q: want head_dim a multiple of 8 up to 576, got 12"),
    ("decode", {"q": bf(2, 4, 584)}, "q: want head_dim a multiple of 8 up to 576, got 584"),
    ("decode", {"cache": PagedKVLayer(kv().k, kv().v[..., :12], "fp8_e4m3")},
     "v_cache: want head_dim_v a multiple of 8 up to 512, got 12"),
    ("append", {"cache": PagedKVLayer(kv().k[:, :0], kv().v[:, :0], "fp8_e4m3")},
     "k_cache: want at least one slot a page, got 0"),
    ("append", {"k": bf(3, 2, 24), "cache": replace(kv("nvfp4"), k=kv("nvfp4").k[..., :12])},
     "head_dim: want a positive multiple of 16 for nvfp4, got 24"),
    ("mla_append", {"q_pe": None, "q_pe_out": None, "q_nope": None, "q_nope_out": None, "cos_sin_cache": None},
     "positions: want None without cos_sin_cache, got a tensor"),
    ("mla_append", {"kv_c": bf(3, 96), "cache": replace(latent("fp8_ds_mla"), ckv=latent("fp8_ds_mla").ckv[..., :96])},
     "ckv: want a latent rank that is a multiple of 128 for fp8_ds_mla, got 96"),
    ("mla_prefill", {"head_dim_v": 0}, "head_dim_v: want a positive number, got 0"),
    ("mla_prefill", {"out": bf(3, 2, 64)},
     "kv_b_proj: want [N=192, L=128] float8_e4m3fn, got [128, 128] float8_e4m3fn (N as in out)"),
    ("mla_prefill", {"q": bf(3, 2, 16)}, "q: want rows longer than the rotary part R=16, got 16"),
    ("mla_prefill", {"cache": PagedLatentLayer(bf(4, 8, 128), bf(4, 8, 15), "bf16"), "k_pe": bf(3, 15)},
     "kpe: want an even rotary part, got 15"),
    ("mla_prefill", {"q": bf(3, 2, 40), "kv_b_proj": torch.zeros(112, 128).to(E4M3)},
     "kv_b_proj: want both sizes multiples of 128, got [112, 128]"),
    ("mla_project", {"weight_scale": None}, "weight_scale: want a tensor beside an e4m3 weight, got None"),
    ("mla_project", {"weight": bf(2, 128, 128)}, "weight_scale: want None beside a 16-bit weight, got a tensor"),
    ("mla_project", {"x": bf(3, 2, 64), "weight": torch.zeros(2, 128, 64).to(E4M3)},
     "weight: want N and K multiples of 128, got [128, 64]"),
    ("merge_states", {"outs": bf(3, 2, 8)}, "outs: want [n, T, H, D], got [3, 2, 8]"),
    ("merge_states", {"outs": bf(0, 3, 2, 8), "lses": torch.zeros(0, 3, 2)},
     "outs: want at least one part, got none"),
    ("merge_states", {"outs": []}, "outs: want at least one part, got none"),
    ("merge_states", {"outs": [bf(3, 2, 8), bf(3, 2, 4)]},
     "outs: want parts alike, got [3, 2, 8] torch.bfloat16 on cpu and [3, 2, 4] torch.bfloat16 on cpu"),
    ("merge_states", {"lses": torch.zeros(3, 3, 2)},
     "lses: want [n=2, T=3, H=2] float32, got [3, 3, 2] float32 (n as in outs)"),
    ("merge_states", {"lses": bf(2, 3, 2)}, "lses: want [n=2, T=3, H=2] float32, got [2, 3, 2] bfloat16"),
    ("merge_states", {"out": bf(3, 2, 4)}, f"out: want [T=3, H=2, D=8] {FLOAT}, got [3, 2, 4] bfloat16 (D as in outs)"),
]  # fmt: skip
SPARSE = PagedKVLayer(kv("bf16").k.to_sparse(), kv("bf16").v, "bf16")
BAD_TYPES = [
    ("append", {"k": 1.5}, "k: want Tensor, got float"),
    ("append", {"slot_mapping": [0, 1, 2]}, "slot_mapping: want Tensor, got list"),
    ("append", {"v": bf(3, 2, 16).to_sparse()}, "v: want a dense Tensor, got one of torch.sparse_coo"),
    ("append", {"backend": ["torch"]}, "backend: want str or None, got list"),
    ("append", {"cache": None}, "cache: want (k, v) or one 5-D tensor, got NoneType"),
    ("append", {"cache": latent()}, "cache: want (k, v) or one 5-D tensor, got PagedLatentLayer"),
    ("append", {"cache": kv(k_scale="1")}, "k_scale: want a number or a Tensor, got str"),
    ("rope_append", {"cos_sin_cache": None}, "cos_sin_cache: want Tensor, got NoneType"),
    ("rope_append", {"interleaved": 1}, "interleaved: want bool, got int"),
    ("rope_append", {"q": [1]}, "q: want Tensor, got list"),
    ("rope_append", {"q_out": [1]}, "q_out: want Tensor, got list"),
    ("mla_append", {"cache": kv()}, "cache: want Tensor or (ckv, kpe), got PagedKVLayer"),
    ("mla_append", {"q_pe": 3, "q_pe_out": None}, "q_pe: want Tensor or None, got int"),
    ("decode", {"q": None}, "q: want Tensor, got NoneType"),
    ("decode", {"mask": "causal"}, "mask: want Tensor or None, got str"),
    ("decode", {"seq_lens": [3, 4], "cu_seqlens_q": None}, "seq_lens: want Tensor, got list"),
    ("decode", {"out": None, "out_dtype": "bf16"}, "out_dtype: want a torch.dtype or None, got 'bf16'"),
    ("decode", {"max_q_len": 1.0}, "max_q_len: want int, got float 1.0"),
    ("decode", {"window": "4"}, "window: want int, got str '4'"),
    ("decode", {"softcap": "30"}, "softcap: want a number or None, got str"),
    ("mla_prefill", {"plan": None}, "plan: want an MLAPrefillPlan, as mla_prefill_plan makes it, got NoneType"),
    ("decode", {"cache": PagedKVLayer(kv().k, None, "fp8_e4m3")}, "v_cache: want Tensor, got NoneType"),
    ("decode", {"return_lse": "no"}, "return_lse: want bool, got str"),
    ("decode", {"cache": SPARSE}, "k_cache: want a dense Tensor, got one of torch.sparse_coo"),
    ("decode", {"out": bf(2, 4, 16).to_sparse()}, "out: want a dense Tensor, got one of torch.sparse_coo"),
    ("append", {"cache": SPARSE}, "k_cache: want a dense Tensor, got one of torch.sparse_coo"),
    ("mla_decode", {"q": bf(2, 4, 144).to_sparse()}, "q: want a dense Tensor, got one of torch.sparse_coo"),
    ("mla_decode", {"cache": PagedLatentLayer(None, None, "bf16")}, "ckv: want Tensor, got NoneType"),
    ("mla_decode", {"return_lse": 1.5}, "return_lse: want bool, got float"),
    ("mla_prefill", {"cache": PagedLatentLayer(bf(4, 8, 128), [], "bf16")}, "kpe: want Tensor, got list"),
    ("mla_decode", {"q": None}, "q: want Tensor or (q_nope, q_pe), got NoneType"),
    ("mla_prefill", {"kv_b_proj": None}, "kv_b_proj: want Tensor, got NoneType"),
    ("mla_decode_branch", {"w_uk": None}, "w_uk: want Tensor, got NoneType"),
    ("mla_decode_branch", {"cache_lens": [3, 6]}, "cache_lens: want Tensor, got list"),
    ("merge_states", {"lses": 0.0}, "lses: want Tensor, got float"),
]


def names(rows):
    return [f"{op}-{'-'.join(changed)}-{i}" for i, (op, changed, _) in enumerate(rows)]


@pytest.fixture(params=["first", "after a good call"])
def known(request, monkeypatch):
    """A function that makes a good call before the bad one, as its short way: nothing is less checked behind it."""
    if request.param == "first":
        return lambda op: None
    launched = []
    monkeypatch.setenv("TERSEKV_BACKEND", "torch")
    for op in VERBS:
        module = plan._module("torch", op)
        monkeypatch.setattr(module, "bind", lambda config, at: lambda a: launched.append(a) or True, raising=False)
        monkeypatch.setattr(module, "run", lambda call, config: None)
    for home, memory in ((plan, "_plans"), (plan, "_recent"), (launch_cache, "_recent"), (launch_cache, "_launches")):
        monkeypatch.setattr(home, memory, {})

    def make(op: str) -> None:
        for _ in range(2):
            VERBS[op](**good(op))
        assert launched

    return make


@pytest.mark.parametrize(("op", "changed", "message"), BAD_VALUES, ids=names(BAD_VALUES))
def test_a_bad_value_is_named_with_what_was_wanted_and_what_came(op, changed, message, known):
    known(op)
    with pytest.raises(ValueError, match="want") as error:
        VERBS[op](**{**good(op), **changed})
    assert str(error.value) == message


@pytest.mark.parametrize(("op", "changed", "message"), BAD_TYPES, ids=names(BAD_TYPES))
def test_a_bad_type_is_named_with_what_was_wanted_and_what_came(op, changed, message, known):
    known(op)
    with pytest.raises(TypeError, match="want") as error:
        VERBS[op](**{**good(op), **changed})
    assert str(error.value) == message


@pytest.fixture
def only_checks(monkeypatch):
    """Calls end after their checks: no backend runs."""

    def check(op, call, backend):
        type_checks.types(CALLS[op][0], call)
        checks.facts(plan.facts(op, call))
        return plan.Plan("none", lambda call, config: None, None, None)

    monkeypatch.setattr(registry, "dispatch", check)


@pytest.mark.usefixtures("only_checks")
@pytest.mark.parametrize("op", VERBS)
def test_the_good_calls_pass_every_check(op):
    VERBS[op](**good(op))


def disfigured(x: torch.Tensor):
    """Things that no operation takes in place of x."""
    yield from ("x", [1, 2], x.to(torch.float64), x.to(torch.bool), x.to(torch.complex64), x[None, None], x.to("meta"))
    if x.numel() > 1:
        yield from (torch.zeros((), dtype=x.dtype), torch.zeros([n + 1 for n in x.shape]).to(x.dtype))


@pytest.mark.usefixtures("only_checks")
@pytest.mark.parametrize("op", VERBS)
def test_no_disfigured_tensor_passes_or_raises_anything_else(op):
    for name, x in good(op).items():
        for bad in disfigured(x) if isinstance(x, torch.Tensor) else ():
            with pytest.raises((ValueError, TypeError), match=r"^[a-z_ ]+: want .*, got "):
                VERBS[op](**{**good(op), name: bad})


def test_no_softcap_is_none_or_zero():
    call = good("decode")
    wanted = decode(**call, softcap=0.0)[0].clone()
    assert torch.equal(decode(**call, softcap=None)[0], wanted)
    assert torch.equal(decode(**call, softcap=0)[0], wanted)


@pytest.mark.parametrize(("option", "number"), [
    ("window", 3), ("max_q_len", 1), ("softmax_scale", 0.5), ("softcap", 2.0), ("out_scale", 0.25),
])  # fmt: skip
def test_numbers_may_be_numpys(option, number):
    call = {**good("decode"), "lse": None, "out": None}
    theirs = (np.int64 if isinstance(number, int) else np.float32)(number)
    assert torch.equal(decode(**{**call, option: theirs}), decode(**{**call, option: number}))


def test_records_that_no_verb_would_fill_are_refused_too():
    call = make(next(c for c in cases(("decode",), ("bf16",)) if c.ragged))
    with pytest.raises(ValueError, match=r"^window: want a positive number of keys \(own included\), or None, got -1$"):
        plan.plan("decode", call._replace(window=-1))
    with pytest.raises(ValueError, match=r"^max_q_len: want the largest number of query rows of a request, got -1$"):
        plan.plan("decode", call._replace(max_q_len=-1))


def test_places_are_given_in_one_way_only():
    layer = kv()
    place = dict.fromkeys(("batch_indices", "kv_positions", "kv_indptr", "kv_indices"), i32(0, 1, 2))
    call = AppendCall(
        bf(3, 2, 32), bf(3, 2, 16), layer.k, layer.v, None, None, i32(0, 1, 2), None, None, None, None,
        "fp8_e4m3", 1.0, None, 1.0, None, False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^slot_mapping: want either slot_mapping or kv_indices, not both, got both$"):
        plan.dispatch("append", call._replace(**place))
    with pytest.raises(ValueError, match=r"^slot_mapping: want a tensor \[T\] of page \* S \+ offset, got None$"):
        plan.dispatch("append", call._replace(slot_mapping=None, kv_indptr=i32(0, 1)))
    with pytest.raises(
        ValueError, match=r"^batch_indices: want \[T=3\] int32 \| int64 \| uint32, got \[2\] int32 \(T as in k\)$"
    ):
        plan.dispatch("append", call._replace(slot_mapping=None, **{**place, "batch_indices": i32(0, 1)}))


def test_a_refusal_lists_every_door_that_was_tried():
    call = AppendCall(
        bf(3, 2, 32), bf(3, 2, 16), kv().k, kv().v, None, None, i32(0, 1, 2), None, None, None, None,
        "fp8_e4m3", 1.0, None, 1.0, None, False,
    )  # fmt: skip
    with pytest.raises(UnsupportedError) as error:
        plan.plan("append", call, arch=75)
    first, door, hint = str(error.value).splitlines()
    assert first == "append has no backend for k=[3, 2, 32] fp8_e4m3 on sm_75"
    assert door == "  triton: needs sm_80 or newer, got sm_75"
    assert hint.startswith("  torch: can be asked for by name")
