"""References of a running softmax that are raised only where powers would pass what 16 bits hold: by each warp alone.

As instructions of PTX, so that a warp goes around what it does not need, and threads of others wait for nothing.
Rows of a product lie on its M, then a thread holds two of them, four lanes one; or on N, then eight lanes have one.
"""

from triton.experimental.gluon import language as gl

# Of two rows: highest scores among the keys that a thread holds, references → references, and whether any of the warp's
# are new. A reference is raised to the row's highest score only where powers would pass 2^8, which fp16 holds: rarely.
RAISE_PTX = gl.constexpr(
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


def multiply_where_needed(count: int) -> tuple[str, str]:
    """PTX and its constraints: `count` numbers of a thread times factors, left out where the factors of a warp are 1.

    Elements 0 and 2 of a thread lie in its two rows; all others lie in one of them.
    """
    lines = [f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    test = [f"setp.neu.f32 {p}, ${2 * count + i}, 0f3F800000;" for p, i in (("p", 0), ("q", 2))]
    text = ["{ .reg .pred p, q;", *test, "or.pred p, p, q;", "@!p bra NONE;", *lines, "NONE: }"]
    return "\n".join(text), ",".join([*["=f"] * count, *map(str, range(count)), *["f"] * count])


def _raise_where_needed(count: int) -> tuple[str, str]:
    """PTX and its constraints, of `count` rows: highest scores of a lane, references → references, factors, flags.

    A flag says whether any reference of the warp is new. Lanes 4, 8 and 16 apart hold other keys of the same rows.
    """
    new, old, flag, top, ref = (range(n * count, (n + 1) * count) for n in range(5))
    text = ["{ .reg .pred p, q;", f".reg .f32 x, y, {', '.join(f'a{i}' for i in range(count))};"]
    for i in range(count):
        text.append(f"add.f32 a{i}, ${ref[i]}, 0f41000000;")
        text.append(f"setp.gt{'.or' if i else ''}.f32 p, ${top[i]}, a{i}{', p' if i else ''};")
    text.append("vote.sync.any.pred q, p, 0xffffffff;")
    for i in range(count):
        text += [f"mov.f32 ${new[i]}, ${ref[i]};", f"mov.f32 ${old[i]}, 0f3F800000;", f"selp.b32 ${flag[i]}, 1, 0, q;"]
    text.append("@!q bra DONE;")
    for i in range(count):
        text.append(f"mov.f32 x, ${top[i]};")
        for lanes in (4, 8, 16):
            text += [f"shfl.sync.bfly.b32 y, x, {lanes}, 0x1f, 0xffffffff;", "max.f32 x, x, y;"]
        text += [f"setp.gt.f32 p, x, a{i};", f"@p mov.f32 ${new[i]}, x;"]
        text += [f"sub.f32 y, ${ref[i]}, x;", "ex2.approx.ftz.f32 y, y;", f"@p mov.f32 ${old[i]}, y;"]
    text.append("DONE: }")
    return "\n".join(text), ",".join(["=&f"] * (2 * count) + ["=&r"] * count + ["f"] * (2 * count))


def _multiply_where_flagged(count: int) -> tuple[str, str]:
    """PTX and its constraints: numbers of a thread times factors, left out where the first flag is 0."""
    lines = [f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    text = ["{ .reg .pred p;", f"setp.eq.b32 p, ${3 * count}, 0;", "@p bra NONE;", *lines, "NONE: }"]
    ties = [*["=f"] * count, *map(str, range(count)), *["f"] * count, *["r"] * count]
    return "\n".join(text), ",".join(ties)


RAISE_4, RAISE_4_TIES = map(gl.constexpr, _raise_where_needed(4))
RAISE_8, RAISE_8_TIES = map(gl.constexpr, _raise_where_needed(8))
MULTIPLY_16, TIES_16 = map(gl.constexpr, _multiply_where_flagged(16))
MULTIPLY_32, TIES_32 = map(gl.constexpr, _multiply_where_flagged(32))
MULTIPLY_64, TIES_64 = map(gl.constexpr, _multiply_where_flagged(64))
