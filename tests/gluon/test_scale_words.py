"""What decode copies of padded heads by cp.async, scales by word and codes in chunks: its kernels' arithmetic, with
arrays for tensors."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_decode_compile import call_of

from tersekv.backends.gluon import decode
from tersekv.backends.gluon.sm90.decode import code_chunks, layouts, scale_words
from tersekv.backends.gluon.sm90.parts import dequant
from tersekv.dispatch.plan import facts

NAMES = (layouts.__name__, scale_words.__name__, code_chunks.__name__)


class Array(np.ndarray):
    """A tensor, or a part of shared memory: what the kernels do with either."""

    def to(self, dtype: Any, bitcast: bool = False) -> Array:
        return self.astype(dtype).view(Array)

    def load(self, layout: Any) -> Array:
        return self.copy().view(Array)

    def slice(self, start: int, length: int, dim: int) -> Array:
        assert start % length == 0, "Triton wants slices at multiples of their length"
        return self[(slice(None),) * dim + (slice(start, start + length),)]

    def __iadd__(self, other: Any) -> Array:
        return self + other

    def index(self, i: int) -> Array:
        return self[i]

    def permute(self, order: list[int]) -> Array:
        return self.transpose(order)


def array(x: Any) -> Array:
    return np.asarray(x).view(Array)


def permuted_bytes(a: Array, b: Array, selector: Array) -> list[Array]:
    """The four bytes of prmt.b32."""
    both = a.astype(np.uint32).astype(np.uint64) | b.astype(np.uint32).astype(np.uint64) << np.uint64(32)
    places = [(selector.astype(np.uint64) >> np.uint64(4 * i) & np.uint64(7)) * np.uint64(8) for i in range(4)]
    return [(both >> at & np.uint64(0xFF)).astype(np.uint32) for at in places]


def fp16(x: Array) -> Array:
    values = torch.from_numpy(np.ascontiguousarray(x).astype(np.uint8)).view(torch.float8_e4m3fn)
    return array(values.to(torch.float16).numpy())


def asm(ptx: Any, constraints: str, inputs: list[Array], *more: Any) -> Any:
    """The three pieces of PTX that scales go through."""
    if ptx is dequant.WORD_OF_TWO_PTX:
        x = permuted_bytes(*inputs)
        return array(x[0] | x[1] << 8 | x[2] << 16 | x[3] << 24).view(Array)
    if ptx is dequant.K_BLOCK_SCALES_OF_TWO_WORDS_PTX:
        low, high, *_ = permuted_bytes(*inputs[:3])
        return fp16(low & inputs[3].astype(np.uint32)), fp16(high & inputs[3].astype(np.uint32) >> 8)
    assert ptx is dequant.V_BLOCK_SCALES_PTX  # of two adjacent keys
    words, selector = inputs
    even, odd = words[..., 0::2], words[..., 1::2]
    x = [fp16(b) for b in permuted_bytes(even, odd, selector[..., 0::2])]
    return tuple(array(np.stack([x[i], x[i + 1]], -1).reshape(words.shape)) for i in (0, 2))


def as_numpy(found: Any, memory: np.ndarray, group: int) -> Any:
    """The function of a module of kernels, over arrays; memory: the cache's words, group: the CTA's group of heads."""

    def async_load(smem: Array, words: Array, mask: Array) -> None:
        assert smem.shape == words.shape == mask.shape
        assert not mask.any() or 0 <= words[mask].min() <= words[mask].max() < len(memory)
        smem[...] = np.where(mask, memory[np.where(mask, words, 0)], 0)

    def broadcast(a: Array, b: Array) -> tuple[Array, ...]:
        return tuple(array(x) for x in np.broadcast_arrays(a, b))

    gl = SimpleNamespace(
        int16=np.int16, int32=np.int32, int64=np.int64, float16=np.float16, constexpr=None, broadcast=broadcast,
        SliceLayout=as_layout, DotOperandLayout=as_layout, BlockedLayout=as_layout,
        SwizzledSharedLayout=as_layout, NVMMASharedLayout=as_layout, pointer_type=lambda x: np.int64,
        arange=lambda a, b, layout: array(np.arange(a, b)), where=lambda *x: array(np.where(*x)),
        full=lambda shape, x, dtype, layout: array(np.full(shape, x, dtype)), join=lambda *x: array(np.stack(x, -1)),
        convert_layout=lambda x, *more, **options: x, inline_asm_elementwise=asm, program_id=lambda axis: group,
    )  # fmt: skip
    module = vars(layouts) | vars(scale_words) | vars(code_chunks)
    globals_ = {n: as_layout if n.endswith("layout") else getattr(x, "fn", x) for n, x in module.items()}
    globals_ |= {"gl": gl, "async_load": async_load, "CHUNK_WORDS": code_chunks.CHUNK_WORDS.value}
    globals_["reinterpret"] = lambda smem, dtype, shape, layout: smem.reshape(shape)
    for name, x in list(globals_.items()):
        if isinstance(x, FunctionType) and x.__module__ in NAMES:
            globals_[name] = FunctionType(x.__code__, globals_, name, x.__defaults__)
    return globals_[found.fn.__name__]


def as_layout(*args: Any) -> None:
    """Arrays have none."""


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_e4m3/nvfp4"])
@pytest.mark.parametrize("options", [
    {}, {"layout": "HND"}, {"heads": 4}, {"heads": 2}, {"heads": 6, "layout": "HND"}, {"heads": 2, "scales": "tail"},
    {"page_size": 16, "scales": "tail", "layout": "HND"}, {"heads": 12, "page_size": 32}, {"heads": 4, "group": 16},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dim", [80, 96, 112, 144, 160, 176, 192, 208, 224, 240])
def test_scales_lie_beside_their_codes(dim, options, fmt):
    """In the columns of the copied row that are the head's own; keys' are 0 elsewhere, whatever lies there."""
    call = call_of(fmt, head_dim=dim, **options)
    f = facts("decode", call, arch=90)
    assert decode.why_not(f) is None
    config = decode.configure(f)
    cfg, tile_cfg, page_slot = config.constants, config.shape, call.k_cache.shape[1] - tile_keys(config)
    heads, tiles = tile_cfg.HEADS_PER_CTA, tile_cfg.KEYS_PER_BUFFER // 16
    for group in range(tile_cfg.HEAD_GROUPS):
        for is_v in (False, True):
            side, scales = (tile_cfg.V, call.v_scale_cache) if is_v else (tile_cfg.K, call.k_scale_cache)
            if scales is None:
                continue
            memory = words_around(scales)
            smem = array(np.full((tile_cfg.STAGES * tiles, *side.SCALE_SMEM_SHAPE[1:]), 0x7F7F7F7F, np.uint32))
            copy = as_numpy(scale_words.start_scale_word_copies, memory, group)
            pages, slots, first = array(3), array(page_slot), array(group * heads)
            copy(array(0), smem, 1, pages, first, slots, True, is_v, 1, tile_cfg)
            for j in range(tiles):
                tile = smem[tiles + j]
                if is_v:
                    expand = as_numpy(layouts.load_and_expand_v_block_scales_to_fp16, memory, group)
                    found = expand(tile.permute([0, 2, 1]), cfg, tile_cfg).transpose(0, 2, 1)
                else:
                    found = as_numpy(layouts.load_and_expand_k_block_scales_to_fp16, memory, group)(tile, cfg, tile_cfg)
                keys = slice(page_slot + 16 * j, page_slot + 16 * j + 16)
                own = scales[3, keys, group * heads : group * heads + heads].to(torch.float16).numpy()
                check(np.asarray(found)[..., ::4], own.transpose(1, 0, 2), side, is_v)


@pytest.mark.parametrize(("fmt", "options"), [
    ("nvfp4", {"layout": "HND"}), ("nvfp4", {"layout": "HND", "page_size": 16, "scales": "tail"}),
    ("int4_per_token_head", {"layout": "HND", "heads": 2}), ("int4_per_token_head", {"heads": 1, "group": 16}),
    ("nvfp4", {"heads": 3}), ("int4_per_token_head/nvfp4", {"heads": 1}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dim", [80, 112, 144, 176, 208, 240])
def test_codes_lie_at_the_begin_of_their_rows(dim, options, fmt):
    call = call_of(fmt, head_dim=dim, **options)
    f = facts("decode", call, arch=90)
    assert decode.why_not(f) is None
    config = decode.configure(f)
    tile_cfg, page_slot = config.shape, call.k_cache.shape[1] - tile_keys(config)
    heads, tiles = tile_cfg.HEADS_PER_CTA, tile_cfg.KEYS_PER_BUFFER // 16
    assert not {"K", "V"} & config.tensor_map_specs.keys()
    for group in range(tile_cfg.HEAD_GROUPS):
        for is_v, codes in enumerate((call.k_cache, call.v_cache)):
            side = tile_cfg.V if is_v else tile_cfg.K
            assert side.COPY_BYTES == 0
            memory = words_around(codes).view(np.int16)
            smem = array(np.full(side.SMEM_SHAPE, 0x7F7F, np.int16))
            copy = as_numpy(code_chunks.start_code_chunk_copies, memory, group)
            copy(array(0), smem, 2, array(3), array(group * heads), array(page_slot), True, is_v, 1, tile_cfg)
            own = codes[3, page_slot:, group * heads : group * heads + heads].contiguous().view(torch.int16).numpy()
            own = own.reshape(tiles, 16, heads, dim // 4).transpose(0, 2, 1, 3)
            found = np.asarray(smem).reshape(tile_cfg.STAGES, tiles, heads, 16, -1)
            np.testing.assert_array_equal(found[2, ..., : dim // 4], own)
            assert (found[2, ..., dim // 4 :] == 0).all()
            assert (found[:2] == 0x7F7F).all()


def tile_keys(config: decode.Config) -> int:
    return config.shape.KEYS_PER_BUFFER


def words_around(scales: torch.Tensor) -> np.ndarray:
    """The memory from the first scale on, random bytes of which none is NaN but some between the rows, as words."""
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 0x7F, scales.shape, generator=generator, dtype=torch.uint8)
    span = sum((n - 1) * s for n, s in zip(scales.shape, scales.stride(), strict=True)) + 1
    flat = torch.as_strided(scales.view(torch.uint8), (span,), (1,))
    flat.fill_(0x7F)
    scales.view(torch.uint8).copy_(raw)
    return np.pad(flat.numpy(), (0, -span % 4), constant_values=0x7F).view(np.uint32)


def check(found: np.ndarray, own: np.ndarray, side: Any, is_v: bool) -> None:
    """found: [heads, 16, blocks of a row in shared memory]"""
    for h in range(own.shape[0]):
        begin = h % side.PADDED_HEADS * side.HEAD_SHIFT // 4
        end = begin + own.shape[2]
        np.testing.assert_array_equal(found[h, :, begin:end], own[h])
        if not is_v:
            assert (found[h, :, :begin] == 0).all()
            assert (found[h, :, end:] == 0).all()
