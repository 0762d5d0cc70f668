"""vLLM's Triton kernels on the problems' tensors. The Python files of its wheel are enough: nothing compiled is called.

Its int4 kernel rotates queries and outputs itself, in launches that count: it is given queries rotated back, and what
it returns is rotated before it is judged. TurboQuant has a cache of its own, of the same rows as it rounds them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import compat
from .append import Append
from .data import Problem, Rival
from .decode import Decode
from .flashinfer import is_decode
from .shapes import ShapeDecode

_INT4 = "int4_per_token_head"
_FORMATS = ("fp8_per_token_head", "int8_per_token_head", _INT4)
_PRESETS = {"nvfp4": "turboquant_4bit_nc", _INT4: "turboquant_4bit_nc", f"fp8_e4m3/{_INT4}": "turboquant_k8v4"}
# Its backends' own: pieces of a request where fewer programs than these would run, and TurboQuant's.
_PIECES, _FEWEST_PROGRAMS, _TURBO_PIECES = 16, 128, 32
_OF_ROUNDING = 0.4  # TurboQuant stores other codes than those that are judged: of garbage the error is above 1
_OPS, _TURBO = "vllm.v1.attention.ops", "vllm.model_executor.layers.quantization.turboquant"


def peers(problem: Problem) -> Iterator[Rival]:
    """The functions that have the problem's case."""
    case = problem.case
    if isinstance(problem, Append):
        if case.op == "append" and case.format in _FORMATS and case.format != _INT4 and not case.rotated:
            name = "triton_reshape_and_cache_flash"
            function = partial(_theirs, f"{_OPS}.{name}", f"{name}_per_token_head_quant")
            yield Rival("vllm", lambda: compat.per_token_head(function(), problem))
    elif is_decode(problem) and case.scales == "apart":
        if case.format in _FORMATS:
            yield Rival("vllm triton", lambda: _unified(problem), _turned_back if case.format == _INT4 else None)
        dim = problem.q.shape[2]
        if case.format in _PRESETS and dim & (dim - 1) == 0:  # a matrix of Hadamard's by Sylvester
            preset = _PRESETS[case.format]
            yield Rival(f"vllm {preset}", lambda: _turboquant(problem, preset), None, _OF_ROUNDING)


def _theirs(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _turned(x: Tensor, back: bool) -> Tensor:
    return _theirs(f"{_OPS}.int4_per_token_head", "single_rht")(x.float(), inverse=back).to(x.dtype)


def _turned_back(out: Tensor) -> Tensor:
    """What its int4 kernel has summed, of what it returns."""
    return _turned(out, back=False)


def _unified(p: Decode | ShapeDecode) -> list:
    fn, layer = _theirs(f"{_OPS}.triton_unified_attention", "unified_attention"), p.layer
    (b, heads, dim), kv_heads, device = p.q.shape, layer.k.shape[2], p.q.device
    sums = partial(torch.empty, b, heads, _PIECES, device=device)
    columns = 1 << (dim - 1).bit_length()  # what its kernels write of a row
    q = _turned(p.q, back=True) if p.case.format == _INT4 else p.q
    rows = torch.arange(b + 1, dtype=torch.int32, device=device)
    given = {
        "q": q, "k": layer.k, "v": layer.v, "out": p.out, "cu_seqlens_q": rows, "max_seqlen_q": 1, "seqused_k": p.lens,
        "max_seqlen_k": int(p.host_lens.max()), "softmax_scale": p.scale, "causal": True, "window_size": (-1, -1),
        "softcap": 0.0, "q_descale": None, "k_descale": None, "v_descale": None,
        "kv_quant_mode": compat.quant_mode(p.case.format),
        "k_scale_cache": layer.k_scale_cache, "v_scale_cache": layer.v_scale_cache,
        "seq_threshold_3D": _FEWEST_PROGRAMS // kv_heads, "num_par_softmax_segments": _PIECES,
        "softmax_segm_output": torch.empty(b, heads, _PIECES, columns, device=device), "softmax_segm_max": sums(),
        "softmax_segm_expsum": sums(),
    }  # fmt: skip

    def call(table: Tensor) -> Callable:
        def run() -> Tensor:
            fn(**given, block_table=table)
            return p.out

        return run

    return [call(table) for table in p.tables]


def _turboquant(p: Decode | ShapeDecode, preset: str) -> list:
    """Over a cache of its own, which holds the rows of the problem's as it rounds them, in the same pages."""
    c = _theirs(f"{_TURBO}.config", "TurboQuantConfig").from_cache_dtype(preset, p.q.shape[2])
    store = _theirs(f"{_OPS}.triton_turboquant_store", "triton_turboquant_store")
    fn = _theirs(f"{_OPS}.triton_turboquant_decode", "triton_turboquant_decode_attention")
    (b, heads, dim), (pages, page, kv_heads), device = p.q.shape, p.layer.k.shape[:3], p.q.device
    turn = _hadamard(dim, device)
    centroids = _theirs(f"{_TURBO}.centroids", "get_centroids")(dim, c.centroid_bits).to(device, torch.float32)
    middles = centroids.sort()[0]
    middles = (middles[:-1] + middles[1:]) / 2
    cache = torch.zeros(pages, page, kv_heads, c.slot_size_aligned, dtype=torch.uint8, device=device)
    bits = {"mse_bits": c.key_mse_bits, "key_packed_size": c.key_packed_size}
    bits |= {"value_quant_bits": c.effective_value_quant_bits, "key_fp8": c.key_fp8}
    for i in range(b):
        k, v = (x.bfloat16() for x in p.kv(i))
        token = torch.arange(len(k), device=device)
        for table in p.tables:
            slots = (table[i].long()[token // page] * page + token % page).to(torch.int32)
            store(k, v, cache, slots, turn, middles, **bits)
    sums, q = torch.empty(b, heads, _TURBO_PIECES, dim + 1, device=device), p.q
    room = {"mid_o_buf": sums, "output_buf": p.out, "lse_buf": torch.empty(b, heads, device=device)}
    rest = {"scale": p.scale, "norm_correction": c.norm_correction, "PiT": turn, "max_num_kv_splits": _TURBO_PIECES}
    return [partial(fn, q, cache, table, p.lens, turn, centroids, **bits, **rest, **room) for table in p.tables]


def _hadamard(dim: int, device: torch.device) -> Tensor:
    """[dim, dim] orthonormal, by Sylvester's construction."""
    h = torch.ones(1, 1, device=device)
    while len(h) < dim:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h * dim**-0.5
