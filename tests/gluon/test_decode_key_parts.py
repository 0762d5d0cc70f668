"""Gluon's decode of short requests, compiled for a GPU that is not there: warps divide the keys of one head."""

from __future__ import annotations

import pytest
import torch
from test_decode_compile import FORMATS, call_of, compiled, of_sizes, turned

from tersekv.backends.gluon import decode
from tersekv.backends.gluon.sm90.decode import config as decode_tune
from tersekv.calls import AttentionCall
from tersekv.dispatch.plan import facts

SHORT = {"requests": 40, "max_pages": 4}
PAIRS = ("fp8_e4m3/int4_per_token_head", "int8_per_token_head/nvfp4")


def config_of(call: AttentionCall):
    return decode.configure(facts("decode", call, arch=90))


def compiled_with_parts(call: AttentionCall) -> dict:
    """The split pass, alone if requests are short; what is common to all is asserted."""
    config = config_of(call)
    shape = config.shape
    assert (shape.KEY_PARTS, shape.HEADS_PER_CTA, shape.KV_HEADS_PER_CTA) == (4, 4, 1)
    split, *combine = compiled(call)
    assert split["name"] == "decode_small_m_or_shared_tiles_kernel"
    assert all(x["n_spills"] == 0 for x in (split, *combine))
    tuned = decode_tune.key_parts_config_with_max_stages(facts_with_parts(call), config.constants.BLOCK_M)
    assert tuned.ctas_per_sm * (split["shared"] + 1024) <= 233472
    if shape.UNSPLIT:
        assert combine == []
        assert split["grid"][0] == call.seq_lens.shape[0] * call.k_cache.shape[2]
    sass = split["sass"]()
    assert "LDS.128" in sass, "keys come by whole stretches of their rows"
    assert "LDSM.16.MT88.4" in sass, "values are transposed on their way"
    assert "STG.E.128" in sass or call.out.element_size() == 1, "outputs leave by whole stretches of their rows"
    return split


def facts_with_parts(call: AttentionCall):
    return decode_tune.facts_with_head_dim_parts_as_heads(facts("decode", call, arch=90))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("fmt", [*FORMATS, *PAIRS])
def test_short_requests_compile(monkeypatch, fmt, head_dim):
    monkeypatch.setattr(decode_tune, "uses_key_parts", lambda f: True)
    compiled_with_parts(call_of(fmt, head_dim=head_dim, **SHORT))


def options_as_id(x):
    """Without what tensors hold, which differs between the processes that collect tests."""
    return str({k: "tensor" if isinstance(v, torch.Tensor) else v for k, v in x.items()} if isinstance(x, dict) else x)


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        ("fp8_e4m3", {"group": 16}),
        ("nvfp4", {"group": 16}),
        ("int4_per_token_head", {"group": 16, "head_dim": 64}),
        ("int8_per_token_head", {"group": 16, "head_dim": 256}),
        ("bf16", {"group": 16, "head_dim": 256}),
        ("bf16", {"page_size": 16, "layout": "HND"}),
        ("int4_per_token_head", {"page_size": 16, "scales": "tail", "max_pages": 16}),
        ("int8_per_token_head", {"page_size": 16, "heads": 4, "layout": "HND", "scales": "tail"}),
        ("fp8_per_token_head", {"page_size": 32, "head_dim": 256}),
        ("fp8_per_token_head", {"page_size": 128, "heads": 2, "requests": 90}),
        ("nvfp4", {"page_size": 48, "layout": "HND", "head_dim": 256}),
        ("nvfp4", {"page_size": 16, "heads": 1, "requests": 150, "head_dim": 64}),
        ("int4_per_token_head", {"window": 40, "softcap": 20.0, "sinks": torch.empty(32)}),
        ("int8_per_token_head", {"drafts": 4, "mask": torch.empty(160, 2, dtype=torch.uint16)}),
        ("fp8_e4m3", {"cu_seqlens_q": torch.zeros(41, dtype=torch.int32), "max_q_len": 4, "window": 33}),
        ("fp8_e4m3", {"lse": torch.empty(40, 32), "out_scale": 0.5,
                      "out": torch.empty(40, 32, 128, dtype=torch.float8_e4m3fn)}),
        ("nvfp4", {"q": torch.empty(40, 32, 128, dtype=torch.float8_e4m3fn)}),
    ],
    ids=options_as_id,
)  # fmt: skip
def test_compiles_with(monkeypatch, fmt, options):
    monkeypatch.setattr(decode_tune, "uses_key_parts", lambda f: True)
    compiled_with_parts(call_of(fmt, **SHORT | options))


@pytest.mark.parametrize(("fmt", "dims"), [("fp8_e4m3", (128, 64)), ("int4_per_token_head", (256, 128)),
                                           ("bf16", (64, 128))])  # fmt: skip
def test_values_of_another_size_than_keys(fmt, dims):
    compiled_with_parts(of_sizes(fmt, *dims, **SHORT))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"requests": 40, "max_pages": 4}, 4),
        ({"requests": 40, "max_pages": 16}, 4),
        ({"requests": 40, "max_pages": 17}, 1),  # longer
        ({"requests": 49, "max_pages": 8}, 4),
        ({"requests": 50, "max_pages": 8}, 1),  # more CTAs than run at once
        ({"requests": 53, "max_pages": 4}, 4),  # which counts less with very short requests
        ({"requests": 54, "max_pages": 4}, 1),
        ({"requests": 13, "max_pages": 8}, 4),
        ({"requests": 12, "max_pages": 8}, 1),  # fewer than SMs
        ({"requests": 4, "max_pages": 4}, 4),
        ({"requests": 3, "max_pages": 4}, 1),
        ({"requests": 40, "max_pages": 4, "group": 16}, 4),
        ({"requests": 40, "max_pages": 4, "group": 8, "drafts": 4}, 1),  # 32 rows
        ({"requests": 40, "max_pages": 4, "head_dim": 512, "heads": 4}, 1),
        ({"requests": 40, "max_pages": 4, "page_size": 24}, 1),
    ],
    ids=str,
)
def test_requests_that_are_short_and_fill_the_gpu_once(options, parts):
    assert parts == config_of(call_of("fp8_e4m3", **options)).shape.KEY_PARTS


@pytest.mark.parametrize(
    ("fmt", "page_size", "parts"),
    [("fp8_e4m3", 32, 4), ("fp8_e4m3", 16, 1), ("int8_per_token_head", 32, 1), ("int4_per_token_head", 16, 1),
     ("nvfp4", 128, 4), ("bf16", 16, 4)],
)  # fmt: skip
def test_pages_that_are_few_copies(fmt, page_size, parts):
    call = call_of(fmt, requests=40, max_pages=512 // page_size, page_size=page_size)
    assert parts == config_of(call).shape.KEY_PARTS


@pytest.mark.parametrize(("fmt", "group", "parts"), [("int4_per_token_head", 8, 4), ("bf16", 16, 1)])
def test_heads_of_256_of_which_two_ctas_run_at_once(fmt, group, parts):
    call = call_of(fmt, head_dim=256, group=group, requests=24, max_pages=8)
    assert parts == config_of(call).shape.KEY_PARTS


def test_rows_as_they_are():
    assert config_of(turned(call_of("fp8_e4m3", **SHORT), "v", "")).shape.KEY_PARTS == 1
    assert config_of(of_sizes("fp8_e4m3", 96, 96, **SHORT)).shape.KEY_PARTS == 1


def test_a_copy_of_one_head_is_a_tile_of_four_parts(monkeypatch):
    """64 keys, or as many as lie in one page; stored scales of as few heads as make 16 bytes."""
    monkeypatch.setattr(decode_tune, "uses_key_parts", lambda f: True)

    def specs(fmt, **options):
        config = config_of(call_of(fmt, **SHORT | options))
        box_dims = {name: spec.box for name, spec in config.tensor_map_specs.items()}
        return (
            box_dims["K"],
            box_dims.get("K_SCALES"),
            config.shape.K.SMEM_SHAPE[1:],
            config.shape.K.SCALE_SMEM_SHAPE[1:],
        )

    assert specs("fp8_e4m3") == ([4, 1, 16, 64], None, (4, 16, 64), ())
    assert specs("fp8_e4m3", page_size=16, max_pages=16) == ([1, 1, 16, 64], None, (4, 16, 64), ())
    assert specs("bf16", page_size=32) == ([2, 1, 16, 128], None, (2, 2, 2, 16, 64), ())
    assert specs("int8_per_token_head")[1::2] == ([4, 16, 4], (4, 16, 4))
    assert specs("int8_per_token_head", layout="HND", page_size=16, max_pages=16)[1::2] == ([1, 1, 16], (4, 32, 1))
    assert specs("nvfp4")[1::2] == ([4, 16, 4], (4, 16, 4))
    assert specs("nvfp4", head_dim=256)[1::2] == ([4, 16, 4], (4, 16, 4))
