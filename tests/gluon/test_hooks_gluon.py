"""Hooks of Triton's compiler see Hopper's kernels: as the Triton backend's."""

from __future__ import annotations

from test_hooks import OF_HOPPER, assert_hooks_get_json, assert_hooks_see_a_compilation, kernels, knobs

__all__ = ["knobs"]  # the fixture
# They want more work than any case has. Whatever a test compiles, `compile_tools` shows to a hook.
OF_MUCH_WORK = {"attention_three_warpgroups_kernel", "mla_decode_two_warpgroups_kernel", "decode_producer_warp_kernel"}


def test_a_hook_gets_the_constants_as_json(knobs):
    seen = assert_hooks_get_json("gluon", knobs)
    assert seen >= OF_HOPPER
    assert {name.rpartition(".")[2] for name in kernels("gluon") - seen} <= OF_MUCH_WORK


def test_hooks_see_a_compilation(knobs):
    assert_hooks_see_a_compilation("gluon", "decode", knobs)
