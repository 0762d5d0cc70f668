"""transcode in Triton writes the oracle's bytes, and no others, for every case: in the interpreter."""

from __future__ import annotations

import pytest
import torch
from against_oracle import assert_bytes_equal, check, one_program_a_tensor, write_cases

import tersekv
from tersekv.backends.host import launch
from tersekv.cache import PagedKVCache
from tersekv.testing.make import make

OP = "transcode"


@pytest.mark.parametrize("case", write_cases(OP), ids=lambda c: c.id)
def test_bytes_are_the_oracles(case, monkeypatch):
    one_program_a_tensor(monkeypatch)
    check(case)


@pytest.mark.parametrize("case", write_cases(OP, quick=True), ids=lambda c: c.id)
def test_many_programs_write_what_one_writes(case):
    check(case)


@pytest.mark.parametrize("case", write_cases(OP, quick=True), ids=lambda c: c.id)
def test_bit_arithmetic_gives_the_bytes_of_the_instruction(case, monkeypatch):
    one_program_a_tensor(monkeypatch)
    monkeypatch.setattr(launch, "has_exact_fp8_cast", lambda f: False)
    monkeypatch.setattr(launch, "emulates_e4m3", lambda f: True)
    check(case)
