"""The appends in Triton write the oracle's bytes, and no others, for every case: in the interpreter."""

from __future__ import annotations

import pytest
from against_oracle import check, one_program_a_tensor, write_cases

from tersekv.backends.host import launch

OPS = ("append", "rope_append", "mla_append")
CASES = [case for op in OPS for case in write_cases(op)]
QUICK = [case for op in OPS for case in write_cases(op, quick=True)]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_bytes_are_the_oracles(case, monkeypatch):
    one_program_a_tensor(monkeypatch)
    check(case)


@pytest.mark.parametrize("case", QUICK, ids=lambda c: c.id)
def test_many_programs_write_what_one_writes(case):
    check(case)


@pytest.mark.parametrize("case", QUICK, ids=lambda c: c.id)
def test_bit_arithmetic_gives_the_bytes_of_the_instruction(case, monkeypatch):
    one_program_a_tensor(monkeypatch)
    monkeypatch.setattr(launch, "has_exact_fp8_cast", lambda f: False)
    check(case)
