"""The launches of one MLA prefill plan on Hopper, and its scratch."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.formats import LATENT_GROUP

from ....host import launch
from ....host.bind import PART, Bound, Fields, Step, bound
from ....triton.mla_prefill import prepare as rope
from ....triton.mla_prefill.gather import Latents
from . import attention, latents
from . import project as gemm_blockwise
from . import three_warpgroups as trio

_ALIGNED = 256
_MAX_PLACES = 1024  # encoded descriptors are kept for so many places of the tensors: a model has some hundred layers
_KEPT_BYTES = 8 << 20  # a scratch of up to so many is kept for the next call: an allocation takes the host 2 µs


# By the names of `Scratch`, in capitals, what lies there.
_PLACES = ("CODES", "SCALES", "K_PE", "KV", "COUNTER", "DIRTY", "LOW", "LSE")
_LATENTS = Fields(
    "q ckv kpe ckv_scale_cache freqs_cis page_table cache_lens cu_seqlens_q buffer_row_offsets cache_offsets "
    "kv_scale_t out lse CODES SCALES K_PE COUNTER DIRTY"
)
_PRODUCT = Fields("SCALES kv_b_proj_scale")
_ATTENTION = [  # without and with an LSE; of one chunk nothing goes to where rounding's rest would go
    Fields(f"out out {lse} COUNTER COUNTER DIRTY cu_seqlens_q cache_lens buffer_row_offsets cache_offsets")
    for lse in ("out", "lse")
]


class Chunk(NamedTuple):
    index: int
    rows: int
    latents: launch.Template
    product: launch.Template | None  # None: the Triton backend's
    attention: launch.Template
    of_three: launch.Template | None  # attention; `attention` then does it again where this one failed


class Place(NamedTuple):
    """Where a part of the scratch lies; enough of a tensor for a launch."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class Scratch(NamedTuple):
    """What lies in one allocation: tensors or places, None where not needed."""

    codes: Any  # [M, L] e4m3, or q's dtype beside a 16-bit weight
    scales: Any  # [L / 128, M] fp32
    k_pe: Any  # [M, R] in q's dtype
    kv: Any  # [M, N] in q's dtype
    counter: Any  # [4] int32: see `Stages.counters`; the last is idle
    dirty: Any  # [M] int8: values of the row may be NaN
    low: Any  # [T, H, Dv] in q's dtype, with several chunks
    lse: Any  # [T, H] fp32, where several chunks need it and the call has none


class Stages:
    def __init__(self, call: Any, config: Any) -> None:
        chunks = [(c, rows) for c, rows in enumerate(call.buffer_lengths) if rows]
        most, last = max(rows for _, rows in chunks), len(chunks) - 1
        self.parts, self.size = _parts(call, most, last > 0)
        native, own, overlaps = config.portable.native_casts, config.own_product, config.overlaps
        heads, rope_dims = call.q.shape[1], call.kpe.shape[-1]
        self.dims = attention.Dims(heads, call.q.shape[2] - rope_dims, rope_dims, call.out.shape[2])
        lse_strides = call.lse.stride() if call.lse is not None else (heads, 1) if last > 0 else None
        to = Latents(*self.tensors(torch.empty(self.size, dtype=torch.uint8, device="meta"))[:3])
        of_three = last == 0 and own and call.q.dtype == torch.bfloat16 and trio.fits(call, self.dims, config.sms)
        self.store = rope.prepared(call, native, queries=False)
        self.chunks = [
            Chunk(
                c, rows, latents.prepared(call, rows, to, native, i == 0, overlaps),
                gemm_blockwise.prepared(call, rows, most, config.sms, overlaps) if own else None,
                attention.prepared(call, rows, self.dims, lse_strides, i > 0, i < last, config.sms, overlaps, of_three),
                trio.prepared(call, rows, self.dims, lse_strides, config.sms, overlaps) if of_three else None,
            )
            for i, (c, rows) in enumerate(chunks)
        ]  # fmt: skip
        self.warm = False
        self.found: dict[tuple, tuple[Scratch, list[tuple]]] = {}
        # What the launches of the first chunk take of it, for `bind`.
        self.of_product: dict[tuple, tuple] = {}
        self.of_attention: dict[tuple, tuple] = {}

    def memory(self, call: Any) -> Tensor:
        if self.size <= _KEPT_BYTES:
            return launch.scratch(self.size // 4, call.q)
        return torch.empty(self.size, dtype=torch.uint8, device=call.q.device)

    def tensors(self, memory: Tensor) -> Scratch:
        memory = memory.view(torch.uint8)

        def view(at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return memory[at : at + prod(shape) * dtype.itemsize].view(dtype).view(shape)

        return Scratch(*(None if part is None else view(*part) for part in self.parts))

    def counters(self, s: Scratch) -> tuple[Any, ...]:
        """Of the scratch: items taken by the attention of two warpgroups, by that of three, and whether it failed."""
        if isinstance(s.counter, Tensor):
            return tuple(s.counter[i : i + 1] for i in range(3))
        return tuple(Place(s.counter.address + 4 * i, s.counter.dtype) for i in range(3))

    def places(self, base: int) -> Scratch:
        return Scratch(*(None if part is None else Place(base + part[0], part[2]) for part in self.parts))

    def at(self, call: Any, memory: Tensor) -> tuple[Scratch, list[tuple]]:
        """Places in a scratch, and the descriptors of product and attention for every chunk.

        Encoded, and kept for the next call, once all kernels are compiled; before that tensors and descriptors.
        """
        base = memory.data_ptr()
        key = (call.q.data_ptr(), call.kv_b_proj.data_ptr(), base)
        found = self.found.get(key)
        if found is None:
            s = self.places(base) if self.warm else self.tensors(memory)
            made = [self._descriptors(call, s, chunk) for chunk in self.chunks]
            if not self.warm:
                return s, made
            if len(self.found) >= _MAX_PLACES:
                for known in (self.found, self.of_product, self.of_attention):
                    known.clear()
            found = self.found[key] = (
                s,
                [
                    (_encoded(chunk.product, a), _encoded(chunk.attention, b), _encoded(chunk.of_three, c))
                    for chunk, (a, b, c) in zip(self.chunks, made, strict=True)
                ],
            )
            self.of_product[key], self.of_attention[key], _ = found[1][0]
        return found

    def bind(self, at: dict[str, int]) -> Bound | None:
        """For calls with one chunk in a scratch that is kept: where there is more to do, the host is not waited for."""
        (chunk, *more) = self.chunks
        if more or chunk.index or chunk.product is None or chunk.of_three is not None or self.size > _KEPT_BYTES:
            return None
        key = ("q", "kv_b_proj", PART)
        steps = (
            Step(self.store, rope.TENSORS),
            Step(chunk.latents, _LATENTS),
            Step(chunk.product, _PRODUCT, key, self.of_product),
            Step(chunk.attention, _ATTENTION["lse" in at], key, self.of_attention),
        )
        places = {name: part[0] for name, part in zip(_PLACES, self.parts, strict=True) if part is not None}
        return bound(steps, at, self.size // 4, {PART: 0, **places})

    def _descriptors(self, call: Any, s: Scratch, chunk: Chunk) -> tuple[tuple, tuple, tuple]:
        q, w = launch.Address(call.q), launch.Address(call.kv_b_proj)
        product: tuple = ()
        if chunk.product is not None:
            product = gemm_blockwise.descriptors(
                s.codes, w, s.kv, chunk.rows, tuple(call.kv_b_proj.shape), call.kv_b_proj.stride(0)
            )
        # Of a single token the stride may be anything, which facts do not tell and a tensor map does not take.
        strides = call.q.stride()[:2] if call.q.shape[0] > 1 else (call.q[0].numel(), call.q.stride(1))
        where = (q, s.kv, s.k_pe, chunk.rows, call.q.shape[0], strides, self.dims)
        return product, attention.descriptors(*where), () if chunk.of_three is None else trio.descriptors(*where)


def _encoded(template: launch.Template | None, descriptors: tuple) -> tuple:
    if template is None:
        return ()
    return tuple(argument for one in template.launch.encoded(*descriptors) for argument in one)


def _parts(call: Any, rows: int, several: bool) -> tuple[list, int]:
    """(offset, shape, dtype) of the fields of `Scratch`, and the bytes of all."""
    tokens, heads = call.q.shape[:2]
    dtype, quantise = call.q.dtype, call.kv_b_proj_scale is not None
    rank, rope_dims = call.ckv.shape[-1], call.kpe.shape[-1]
    shapes = (
        ((rows, rank), torch.float8_e4m3fn if quantise else dtype),
        ((rank // LATENT_GROUP, rows), torch.float32) if quantise else None,
        ((rows, rope_dims), dtype),
        ((rows, call.kv_b_proj.shape[0]), dtype),
        ((4,), torch.int32),
        ((rows,), torch.int8),
        (tuple(call.out.shape), dtype) if several else None,
        ((tokens, heads), torch.float32) if several and call.lse is None else None,
    )
    parts, at = [], 0
    for x in shapes:
        parts.append(None if x is None else (at, *x))
        if x is not None:
            at += -(-prod(x[0]) * x[1].itemsize // _ALIGNED) * _ALIGNED
    return parts, at
