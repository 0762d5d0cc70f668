"""Hopper's launches that are bound to a list of addresses: as the Triton backend's."""

from __future__ import annotations

import pytest
from test_bind import assert_bound_as_run, assert_unknown_caches_are_refused, launched

__all__ = ["launched"]  # the fixture


@pytest.mark.parametrize("op", ["decode", "mla_decode", "mla_decode_branch", "mla_prefill"])
def test_bound_launches_get_what_the_long_way_gives(op, launched):
    assert_bound_as_run(op, "gluon", launched)


def test_caches_that_are_not_described_yet_are_not_launched_for(launched):
    assert_unknown_caches_are_refused("gluon", launched)
