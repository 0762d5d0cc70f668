"""Lazy rescaling: a row_max of the online softmax that is raised only where P would overflow 16 bits, by warp.

In PTX, so that a warp branches around what it does not need, and threads of other warps wait for nothing. If rows are
on M of an MMA, a thread has two of them and four lanes share one; if on N, eight lanes share one.
"""

from triton.experimental.gluon import language as gl

# Of two rows: (maximum of a thread's scores, row_max) → (row_max, whether any row_max of the warp is new). row_max is
# raised to the row's maximum only where P would exceed 2^8, well within fp16: rarely.
LAZY_ROW_MAX_PTX = gl.constexpr(
    """{
    .reg .pred p, q;
    .reg .f32 a, b, x, y, z;
    add.f32 a, $6, 0f41000000;
    add.f32 b, $7, 0f41000000;
    setp.gt.f32 p, $4, a;
    setp.gt.or.f32 p, $5, b, p;
    vote.sync.any.pred q, p, 0xffffffff;
    mov.f32 $0, $6;
    mov.f32 $1, $7;
    selp.b32 $2, 1, 0, q;
    mov.b32 $3, $2;
    @!q bra DONE;
    shfl.sync.bfly.b32 x, $4, 1, 0x1f, 0xffffffff;
    shfl.sync.bfly.b32 y, $5, 1, 0x1f, 0xffffffff;
    max.f32 x, x, $4;
    max.f32 y, y, $5;
    shfl.sync.bfly.b32 z, x, 2, 0x1f, 0xffffffff;
    max.f32 x, x, z;
    shfl.sync.bfly.b32 z, y, 2, 0x1f, 0xffffffff;
    max.f32 y, y, z;
    setp.gt.f32 p, x, a;
    selp.f32 $0, x, $6, p;
    setp.gt.f32 p, y, b;
    selp.f32 $1, y, $7, p;
    DONE:
    }"""
)


def rescale_ptx(count: int) -> tuple[str, str]:
    """Returns PTX and its constraints: `count` numbers of a thread times scales, skipped where all scales of a warp are
    1.

    Elements 0 and 2 of a thread are in its two rows; all others are in one of them.
    """
    lines = [f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    test = [f"setp.neu.f32 {p}, ${2 * count + i}, 0f3F800000;" for p, i in (("p", 0), ("q", 2))]
    text = ["{ .reg .pred p, q;", *test, "or.pred p, p, q;", "@!p bra NONE;", *lines, "NONE: }"]
    return "\n".join(text), ",".join([*["=f"] * count, *map(str, range(count)), *["f"] * count])


def _lazy_row_max_ptx(count: int) -> tuple[str, str]:
    """Returns PTX and its constraints, of `count` rows: lane_max, row_max → row_max, rescale, flags.

    A flag says whether any row_max of the warp is new. Lanes 4, 8 and 16 apart hold other keys of the same rows.
    """
    new_max, rescale, flag, lane_max, row_max = (range(n * count, (n + 1) * count) for n in range(5))
    text = ["{ .reg .pred p, q;", f".reg .f32 x, y, {', '.join(f'a{i}' for i in range(count))};"]
    for i in range(count):
        text.append(f"add.f32 a{i}, ${row_max[i]}, 0f41000000;")
        text.append(f"setp.gt{'.or' if i else ''}.f32 p, ${lane_max[i]}, a{i}{', p' if i else ''};")
    text.append("vote.sync.any.pred q, p, 0xffffffff;")
    for i in range(count):
        text += [
            f"mov.f32 ${new_max[i]}, ${row_max[i]};",
            f"mov.f32 ${rescale[i]}, 0f3F800000;",
            f"selp.b32 ${flag[i]}, 1, 0, q;",
        ]
    text.append("@!q bra DONE;")
    for i in range(count):
        text.append(f"mov.f32 x, ${lane_max[i]};")
        for lanes in (4, 8, 16):
            text += [f"shfl.sync.bfly.b32 y, x, {lanes}, 0x1f, 0xffffffff;", "max.f32 x, x, y;"]
        text += [f"setp.gt.f32 p, x, a{i};", f"@p mov.f32 ${new_max[i]}, x;"]
        text += [f"sub.f32 y, ${row_max[i]}, x;", "ex2.approx.ftz.f32 y, y;", f"@p mov.f32 ${rescale[i]}, y;"]
    text.append("DONE: }")
    return "\n".join(text), ",".join(["=&f"] * (2 * count) + ["=&r"] * count + ["f"] * (2 * count))


def _rescale_if_flagged_ptx(count: int) -> tuple[str, str]:
    """Returns PTX and its constraints: numbers of a thread times scales, skipped where the first flag is 0."""
    lines = [f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    text = ["{ .reg .pred p;", f"setp.eq.b32 p, ${3 * count}, 0;", "@p bra NONE;", *lines, "NONE: }"]
    constraints = [*["=f"] * count, *map(str, range(count)), *["f"] * count, *["r"] * count]
    return "\n".join(text), ",".join(constraints)


LAZY_ROW_MAX_4, LAZY_ROW_MAX_4_CONSTRAINTS = map(gl.constexpr, _lazy_row_max_ptx(4))
LAZY_ROW_MAX_8, LAZY_ROW_MAX_8_CONSTRAINTS = map(gl.constexpr, _lazy_row_max_ptx(8))
RESCALE_16, RESCALE_16_CONSTRAINTS = map(gl.constexpr, _rescale_if_flagged_ptx(16))
RESCALE_32, RESCALE_32_CONSTRAINTS = map(gl.constexpr, _rescale_if_flagged_ptx(32))
RESCALE_64, RESCALE_64_CONSTRAINTS = map(gl.constexpr, _rescale_if_flagged_ptx(64))
