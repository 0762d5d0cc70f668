"""Small cases of the decode branch."""

from dataclasses import replace

from tersekv.testing.cases import Case

BASE = Case(
    "mla_decode_branch", "bf16", "small", lens=(13, 1, 9, 2), heads=1, group=2, page=3, rank=128, rope=16, nope=128,
    dim_v=128,
)  # fmt: skip
RAGGED = replace(BASE, name="ragged", q_lens=(6, 1, 0, 2), ragged=True)
