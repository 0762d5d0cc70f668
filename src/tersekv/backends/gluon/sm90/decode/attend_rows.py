"""The inner step of decode with 17 to 32 query rows of a KV head, 16 or 32 of them a warp: as `attend`.

A row's reference follows its highest score only where powers would pass fp16's range, which is rare: else nothing is
multiplied again. References and sums are kept once for each lane that holds keys of a row, [HB, 8, ROWS], so that no
lane asks another. Where codes cost most to unpack, those of 4 bits, a warp has all 32 rows (`four_bits`): then the
accumulator takes half of its registers, the query waits in shared memory, and tiles are of 16 keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .attend import add_values, scores, value_logs
from .tiles import mma_layout


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


@gluon.jit
def by_lane(x):
    """[HB, N, ROWS] → [HB, N / 8, 8, ROWS]: the numbers of a row in each of its lanes apart."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 8, x.shape[2]])


@gluon.jit
def spread(x, like):
    """A number for each row and lane, for `by_lane` of it."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)[:, None, :, :]


@gluon.jit
def scaled(acc, factor, flag, g: gl.constexpr):
    """An accumulator [HB, 16 or 32, ROWS] times a factor of each row, where one is not 1."""
    x = by_lane(acc)
    f, x = gl.broadcast(spread(factor, x), x)
    b, x = gl.broadcast(spread(flag, x), x)
    N: gl.constexpr = acc.shape[1] * acc.shape[2] // (32 * g.RB)
    PTX: gl.constexpr = MULTIPLY_16 if N == 16 else MULTIPLY_32 if N == 32 else MULTIPLY_64
    TIES: gl.constexpr = TIES_16 if N == 16 else TIES_32 if N == 32 else TIES_64
    x = gl.inline_asm_elementwise(PTX, TIES, [x, f, b], gl.float32, is_pure=True, pack=N)
    return gl.convert_layout(gl.reshape(x, acc.shape), acc.type.layout, assert_trivial=True)


@gluon.jit
def empty_rows(c: gl.constexpr, g: gl.constexpr):
    zero = gl.max(by_lane(gl.full([g.HB, g.BOX, c.ROWS], 0.0, gl.float32, mma_layout(g.HB, g.RB))), 1)
    acc = ()
    for _ in gl.static_range(gl.constexpr(c.PARTS)):
        acc = acc + (gl.full([g.HB, c.WORDS_V, c.ROWS], 0, gl.float32, mma_layout(g.HB, g.RB)),)
    return zero + float("-inf"), zero, acc


@gluon.jit
def attend_rows(state, kbuf, vbuf, ksbuf, vsbuf, stage, q, scale, softcap, t, n, rows, r0, q0, MASK, sm_t,
                MASKED: gl.constexpr, c: gl.constexpr, g: gl.constexpr):  # fmt: skip
    """As `attend_tile`; state is (references, sums, both by lane, PARTS accumulators)."""
    PER_COPY: gl.constexpr = g.COPY // g.BOX
    m, l, acc = state
    s, inverse = (), ()
    for j in gl.static_range(gl.constexpr(g.BOXES)):
        key, i_box = t * c.TILE + g.BOX * j, stage * PER_COPY + j % PER_COPY
        x = scores(
            kbuf[j // PER_COPY], ksbuf[j // PER_COPY], i_box, q, scale, softcap, key, n, rows, r0, q0, MASK, sm_t,
            MASKED, c, g,
        )  # fmt: skip
        if c.TOKEN_SCALES:
            log, over = value_logs(vsbuf[j // PER_COPY], i_box, key, n, rows, MASKED, c, g)
            x = x + log[:, :, None]
            inverse = inverse + (over,)
        s = s + (x,)
        if j == 0:
            top = x
        else:
            top = gl.maximum(top, x)
    FOUR: gl.constexpr = c.ROWS // g.RB == 16
    m, old, flag = gl.inline_asm_elementwise(
        RAISE_4 if FOUR else RAISE_8, RAISE_4_TIES if FOUR else RAISE_8_TIES, [gl.max(by_lane(top), 1), m],
        (gl.float32, gl.float32, gl.int32), False, 4 if FOUR else 8,
    )  # fmt: skip
    base, l = gl.where(m == float("-inf"), 0.0, m), l * old
    out = ()
    for i in gl.static_range(gl.constexpr(c.PARTS)):
        out = out + (scaled(acc[i], old, flag, g),)
    for j in gl.static_range(gl.constexpr(g.BOXES)):
        x = by_lane(s[j])
        x = gl.exp2(x - spread(base, x))
        p = gl.convert_layout(gl.reshape(x, s[j].shape), s[j].type.layout, assert_trivial=True)
        if c.TOKEN_SCALES:
            l = l + gl.sum(by_lane(p * inverse[j][:, :, None]), 1)
        else:
            l = l + gl.sum(x, 1)
        key, i_box = t * c.TILE + g.BOX * j, stage * PER_COPY + j % PER_COPY
        out = add_values(out, vbuf[j // PER_COPY], vsbuf[j // PER_COPY], i_box, p, key, n, rows, MASKED, c, g)
    return m, l, out


@gluon.jit
def ended(state, c: gl.constexpr, g: gl.constexpr):
    """(maxima, sums, accumulators) of what `attend_tile` or `attend_rows` left."""
    m, l, acc = state
    if c.ROWS > 16:
        L: gl.constexpr = gl.SliceLayout(1, mma_layout(g.HB, g.RB))
        return gl.convert_layout(gl.max(m, 1), L), gl.convert_layout(gl.sum(l, 1), L), acc
    else:
        return m, gl.sum(l, 1), acc
