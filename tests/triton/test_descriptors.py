"""`descriptors.faults` on a few lines of machine code."""

from __future__ import annotations

from descriptors import faults

SWAPPED = """
R2UR UR53, R38 ;
MOV R39, 0x40000040 ;
R2UR UR52, R39 ;
ULOP3.LUT UR53, UR53, UR52, URZ, 0x3c, !UPT ;
UMOV UR8, UR9 ;
ULOP3.LUT UR52, UR53, UR52, URZ, 0x3c, !UPT ;
ULOP3.LUT UR53, UR53, UR52, URZ, 0x3c, !UPT ;
"""
PRODUCT = "HGMMA.64x64x16.F32.BF16 R88, R24, gdesc[UR50].tnspB, R88 ;\nEXIT ;"


def sass(text: str) -> str:
    return "".join(f"        /*{16 * n:04x}*/    {line}\n" for n, line in enumerate(text.strip().splitlines()))


def test_an_upper_word_may_come_by_a_swap():
    assert faults(sass(SWAPPED + PRODUCT)) == []


def test_a_swap_is_three_of_the_same_two():
    lines = SWAPPED.strip().splitlines()
    for n in (3, 5, 6):
        assert len(faults(sass("\n".join(lines[:n] + lines[n + 1 :] + [PRODUCT])))) == 1
    between = [*lines[:4], "UMOV UR52, UR9 ;", *lines[4:]]
    assert len(faults(sass("\n".join([*between, PRODUCT])))) == 1


def test_the_second_of_a_swap_may_be_read_before_it_is_written():
    lines = SWAPPED.strip().splitlines()
    for read, lost in (("UR52", 0), ("UR53", 1)):
        between = [*lines[:4], f"UIADD3.X UR37, {read}, URZ, URZ, UP3, !UPT ;", *lines[4:]]
        assert len(faults(sass("\n".join([*between, PRODUCT])))) == lost


def test_a_base_that_was_not_moved_is_told():
    lost = "R2UR UR52, R38 ;\nUIADD3 UR52, UP0, UR52, 0x40, URZ ;\nUIADD3.X UR53, UR53, 0x40000040, URZ, UP0 ;\n"
    assert faults(sass(lost + PRODUCT)) == ["HGMMA.64x64x16.F32.BF16 at 0x30: UR53"]


def test_a_shift_of_64_bits_writes_one_register():
    upper = "IMAD.MOV.U32 R39, RZ, RZ, 0x40000040 ;\n{} R38, R38, 0x6, RZ ;\nR2UR UR53, R39 ;\n"
    assert faults(sass(upper.format("SHF.R.U64") + PRODUCT)) == []
    assert len(faults(sass(upper.format("IMAD.WIDE.U32") + PRODUCT))) == 1
