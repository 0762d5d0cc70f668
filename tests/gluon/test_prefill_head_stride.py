"""Gluon's prefill over 4-bit rows at odd multiples of 8 bytes, which TMA does not copy alone: heads of 80, 112, 240."""

from __future__ import annotations

import pytest
from compile_tools import compile_launches, since
from test_mla_prefill_compile import SHARED
from test_prefill_compile import assert_products_stay_in_flight, call_of, facts_of

from tersekv.backends.gluon import attention
from tersekv.backends.gluon.sm90.prefill.config import make_prefill_config, tensor_map_of_argument
from tersekv.dispatch.plan import plan


@pytest.mark.parametrize(
    ("head_dim", "stride", "padded"), [(80, 20, 128), (112, 28, 128), (240, 60, 256), (96, 0, 128)]
)
@pytest.mark.parametrize("fmt", ["int4_per_token_head", "nvfp4"])
def test_rows_at_odd_multiples_of_8_bytes_are_copied_with_the_8_before(fmt, head_dim, stride, padded):
    """TMA copies from multiples of 16 bytes: such heads have one row in the tensor map, and every other one begins in
    column 16 of a tile."""
    call = call_of(fmt, head_dim=head_dim)
    cfg = make_prefill_config(facts_of(call))
    assert (stride, stride, padded, padded) == (cfg.K.PACKED_HEAD_STRIDE, cfg.V.PACKED_HEAD_STRIDE, cfg.D, cfg.DV)
    shape = list(tensor_map_of_argument(call.k_cache, "k_cache", cfg).shape)
    assert shape == ([8, 1, 64, 8 * stride] if stride else [8, 8, 64, head_dim // 4])
    if stride:
        (k,) = compile_launches(attention.run, call, attention.configure(facts_of(call)), 90)
        assert k["shared"] <= SHARED
        assert_products_stay_in_flight(k, spills=since({(3, 6): 20, (3, 7): 32}))
        assert k["sass"]().count("STG.E.128") == 2 * -(-(head_dim + 16) // 32), "of 32 columns, 16 bytes a lane"


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(240, 512), (144, 512), (512, 240), (512, 112), (80, 512)])
@pytest.mark.parametrize("fmt", ["int4_per_token_head", "nvfp4"])
def test_beside_heads_above_256_such_rows_are_left_to_triton(fmt, head_dim, head_dim_v):
    """Their tiles are copied in parts, which begin in columns of their own."""
    k, v = call_of(fmt, head_dim=head_dim), call_of(fmt, head_dim=head_dim_v)
    call = k._replace(v_cache=v.v_cache, v_scale_cache=v.v_scale_cache, out=v.out)
    cfg = make_prefill_config(facts_of(call))
    assert (cfg.COLUMN_SPLIT, cfg.K.PACKED_HEAD_STRIDE, cfg.V.PACKED_HEAD_STRIDE) == (True, 0, 0)
    assert "as the copy engine takes it, got strides" in attention.why_not(facts_of(call))


@pytest.mark.parametrize("changes", [{"layout": "HND"}, {"heads": 1}, {"heads": 3}])
def test_such_rows_with_other_strides_are_left_to_triton(changes):
    f = facts_of(call_of("nvfp4", head_dim=112, **changes))
    assert "wants k_cache as the copy engine takes it, got strides" in attention.why_not(f)
    assert plan("prefill", call_of("nvfp4", head_dim=112, **changes), arch=90).backend == "triton"
