"""What peers' suites need beside the functions under test, where it is missing or slow: written here, plain."""

from __future__ import annotations

import ast
import enum
import importlib.util
import random
import re
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import tersekv
from tersekv.formats import kv_format
from tersekv.testing.codes import decode_row, encode_row


def versions(peer: str) -> dict[str, str]:
    names = {"flashinfer": "flashinfer-python", "vllm": "vllm"}
    out = {"python": sys.version.split()[0], "device": "cpu"}
    if torch.cuda.is_available():
        out["device"] = torch.cuda.get_device_name()
    out["tersekv"] = tersekv.__version__
    for name in ("torch", "triton", names[peer]):
        with suppress(PackageNotFoundError):  # vLLM need not be installed
            out[name] = version(name)
    return out


class _OnCPU(TorchFunctionMode):
    """Calls that name a CUDA device get the CPU instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(_moved, args), **{k: _moved(x) for k, x in (kwargs or {}).items()})


def _moved(x: Any) -> Any:
    if isinstance(x, str) and re.fullmatch(r"cuda(:\d+)?", x):
        return "cpu"
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == "cuda" else x


class _Generator:
    """torch.Generator, a class whose calls no mode sees."""

    _made = torch.Generator

    def __new__(cls, device: Any = "cpu") -> Any:
        return cls._made(device=_moved(device))


def cuda_is_the_cpu() -> None:
    torch.Generator = _Generator  # type: ignore[assignment,misc]
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)  # type: ignore
    _OnCPU().__enter__()


def every_chip() -> None:
    """Tests ask which chip this is, to skip what FlashInfer's own kernels have not: to them it is the newest."""
    import flashinfer.utils

    asked = flashinfer.utils.get_compute_capability

    def capability(device: torch.device) -> tuple[int, int]:
        asker = sys._getframe(1).f_globals["__name__"].rpartition(".")[2]
        return (12, 0) if asker.startswith("test_") else asked(device)

    flashinfer.utils.get_compute_capability = capability


def dense_references() -> None:
    """Plain fp32 attention in place of the kernels of FlashInfer's that its tests compare with."""
    import flashinfer.decode
    import flashinfer.fp4_quantization
    import flashinfer.mla
    import flashinfer.prefill

    flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper = _PagedAttention
    flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper = _PagedAttention
    flashinfer.mla.BatchMLAPagedAttentionWrapper = _MLAAttention
    flashinfer.fp4_quantization.nvfp4_quantize = _nvfp4_quantize
    flashinfer.fp4_quantization.e2m1_and_ufp8sf_scale_to_float = _nvfp4_values


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window_left: int) -> Tensor:
    """q [n, Hq, D], k [m, H, D], v [m, H, Dv], the queries being the last n of m positions: [n, Hq, Dv]."""
    n, m, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k) * scale
    own = torch.arange(n, device=q.device)[:, None] + m - n
    key = torch.arange(m, device=q.device)
    if causal:
        scores = scores.masked_fill(key > own, -torch.inf)
    if window_left >= 0:
        scores = scores.masked_fill(key < own - window_left, -torch.inf)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v).to(q.dtype)


class _PagedAttention:
    """FlashInfer's wrappers of paged decode and prefill, as far as its tests use them."""

    def __init__(self, workspace: Tensor, layout: str = "NHD", use_tensor_cores: bool = False) -> None:
        self.layout = layout

    def plan(
        self, *, page_size: int, window_left: int, num_qo_heads: int, num_kv_heads: int, pos_encoding_mode: str,
        q_data_type: torch.dtype, kv_data_type: torch.dtype, qo_indptr: Tensor | None = None, causal: bool = True,
        logits_soft_cap: float = 0.0, **pages: Any,
    ) -> None:  # fmt: skip
        if pos_encoding_mode != "NONE" or logits_soft_cap:
            raise NotImplementedError("peer_stand_ins: want no position encoding and no soft cap")
        self.causal, self.window_left = causal, window_left
        given = {k.removeprefix("paged_kv_"): x for k, x in pages.items() if not k.startswith("head_dim")}
        starts, last = given["indptr"].tolist(), given["last_page_len"].tolist()
        self.pages = [given["indices"][a:b] for a, b in pairwise(starts)]
        self.lens = [(len(p) - 1) * page_size + n for p, n in zip(self.pages, last, strict=True)]
        self.rows = list(range(len(last) + 1)) if qo_indptr is None else qo_indptr.tolist()

    def run(self, q: Tensor, kv: Tensor) -> Tensor:
        k, v = (x if self.layout == "NHD" else x.transpose(1, 2) for x in (kv[:, 0], kv[:, 1]))
        out = torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=q.device)
        for b, (pages, n) in enumerate(zip(self.pages, self.lens, strict=True)):
            rows = slice(self.rows[b], self.rows[b + 1])
            keys, values = (x[pages.long()].flatten(0, 1)[:n] for x in (k, v))
            out[rows] = _attend(q[rows], keys, values, q.shape[-1] ** -0.5, self.causal, self.window_left)
        return out


class _MLAAttention:
    """FlashInfer's wrapper of paged MLA, as far as its tests use it."""

    def __init__(self, workspace: Tensor, backend: str = "auto") -> None:
        pass

    def plan(
        self, q_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_lens: Tensor, heads: int, rank: int,
        rope: int, page_size: int, causal: bool, sm_scale: float, q_dtype: torch.dtype, kv_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        starts = kv_indptr.tolist()
        self.pages = [kv_indices[a:b].long() for a, b in pairwise(starts)]
        self.rows, self.lens, self.scale, self.causal = q_indptr.tolist(), kv_lens.tolist(), sm_scale, causal

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, return_lse: bool = False) -> Tensor:
        out, q = torch.empty_like(q_nope), torch.cat([q_nope, q_pe], -1)
        for b, (pages, n) in enumerate(zip(self.pages, self.lens, strict=True)):
            rows = slice(self.rows[b], self.rows[b + 1])
            latents, ropes = (x[pages].flatten(0, 1)[:n] for x in (ckv, kpe))
            keys = torch.cat([latents, ropes], -1)[:, None]
            out[rows] = _attend(q[rows], keys, latents[:, None], self.scale, self.causal, -1)
        return out


def _nvfp4_quantize(x: Tensor, inverse: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """e2m1 codes [..., D/2] and linear e4m3 scales as bytes [rows, D/16], of x times the inverse of a global scale."""
    codes, scales = encode_row(x.float().cpu(), kv_format("nvfp4"), 1.0 / inverse.cpu(), inverse.cpu())
    assert scales is not None
    return codes.to(x.device), scales.view(torch.uint8).flatten(0, -2).to(x.device)


def _nvfp4_values(codes: Tensor, scales: Tensor, global_scale: Tensor, **options: Any) -> Tensor:
    stored = scales.cpu().view(torch.float8_e4m3fn)
    return decode_row(codes.cpu(), stored, kv_format("nvfp4"), global_scale.cpu()).float()


def vllm(checkout: Path) -> None:
    """vLLM's names that its test imports, where vLLM is not installed. None of them is under test."""
    if importlib.util.find_spec("vllm") is not None:
        return
    interface = (checkout / "vllm/v1/kv_cache_interface.py").read_text()
    modes = next(n for n in ast.parse(interface).body if isinstance(n, ast.ClassDef) and n.name == "KVQuantMode")
    known: dict[str, Any] = {"IntEnum": enum.IntEnum}
    exec(compile(ast.Module([modes], []), "KVQuantMode", "exec"), known)
    platform = SimpleNamespace(
        device_type="cuda" if torch.cuda.is_available() else "cpu", is_cpu=lambda: False,
        fp8_dtype=lambda: torch.float8_e4m3fn, is_device_capability_family=lambda family: False,
    )  # fmt: skip
    quantised = lambda name: name.startswith("fp8") or name.endswith("_per_token_head")  # noqa: E731
    for name, members in {
        "vllm.model_executor.layers.quantization.utils.quant_utils": {"get_fp8_min_max": lambda: (-448.0, 448.0)},
        "vllm.platforms": {"current_platform": platform},
        "vllm.utils.torch_utils": {"set_random_seed": _seed},
        "vllm.v1.attention.ops.int4_per_token_head": {"single_rht": _single_rht},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": known["KVQuantMode"], "is_quantized_kv_cache": quantised},
        "vllm.v1.attention.ops.triton_reshape_and_cache_flash": {
            "triton_reshape_and_cache_flash_per_token_head_quant": _missing
        },
    }.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            module = sys.modules.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
            module.__path__ = []
        vars(sys.modules[name]).update(members)


def _single_rht(x: Tensor, inverse: bool = False) -> Tensor:
    """x · diag(signs) · H of vLLM's int4, or H before the signs, by a product in fp64."""
    d = x.shape[-1]
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < d:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    drawn = torch.bernoulli(
        torch.full((d,), 0.5, device="cpu"), generator=torch.Generator("cpu").manual_seed(0x9E3779B9)
    )
    matrix = matrix.to("cpu") * (2 * drawn.double() - 1)  # scales columns; H is its own transpose
    y = x.double() @ (matrix if inverse else matrix.T).to(x.device)
    return y.to(x.dtype)


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


def _missing(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("peer_stand_ins: vLLM is not installed")
