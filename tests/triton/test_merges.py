"""`merges.faults` on a few lines of machine code."""

from __future__ import annotations

from merges import faults
from test_descriptors import sass

MERGE = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"


def test_the_other_half_is_a_conversion_before():
    assert faults(sass(f"{MERGE} R4, R8, R9, RZ ;\n{MERGE} R4, R10, R11, R4 ;\nEXIT ;")) == []
    assert faults(sass(f"{MERGE} R5, R8, R9, RZ ;\nPRMT R6, R5, 0x7610, R6 ;\n{MERGE} R4, R10, R11, R5.reuse ;")) == []


def test_what_else_wrote_the_register_since_is_no_half():
    merge = "F2FP.SATFINITE.E4M3.F16.UNPACK_B_MERGE_C"
    for since in ("LDS.128 R4, [R9] ;", "F2FP.F16.F32.PACK_AB R5, R8, R9 ;"):
        lost = f"{merge} R5, R35, RZ ;\n{since}\n{merge} R12, R3, R5 ;"
        assert len(faults(sass(lost))) == 1


def test_of_conversions_from_fp16_too():
    merge = "F2FP.SATFINITE.E4M3.F16.UNPACK_B_MERGE_C"
    lost = f"{merge} R10, R35, RZ ;\n{merge} R4, R3, R10 ;\nIMAD R8, R1, R2, R3 ;\n{merge} R2, R44, R8 ;"
    assert faults(sass(lost)) == [f"{merge} at 0x30: R8, of IMAD"]


def test_a_half_that_no_conversion_wrote_is_reported():
    lost = f"FMUL R4, R3, UR4 ;\n{MERGE} R14, R14, R14, R5 ;\n{MERGE} R26, R26, R11, R4 ;"
    assert faults(sass(lost)) == [f"{MERGE} at 0x10: R5, of nothing", f"{MERGE} at 0x20: R4, of FMUL"]
