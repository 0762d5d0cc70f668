"""Draws the pictures of docs/pictures that explain, and writes them.

    python scripts/drawings.py            check: exit code 1 if a picture is out of date
    python scripts/drawings.py --write    bring the pictures up to date

Sizes and offsets in bytes are asked of tersekv.formats.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tersekv import formats

sys.path.insert(0, str(Path(__file__).parent))
from pages import ROOT, main
from svg import Picture

FOLDER = ROOT / "docs" / "pictures"


def pages() -> Picture:
    """Page table → pages → slots."""
    p = Picture(860, 400, "Two requests, their page tables, and the pages of the cache that hold their tokens")
    p.text(24, 28, "requests", bold=True)
    p.text(270, 28, "page_table [B, max_pages]", bold=True)
    p.text(560, 28, "the cache: P pages of S = 4 slots", bold=True)
    rows = [("a", 10, [2, 0, 5], "blue", 78), ("b", 5, [3, 1], "orange", 198)]
    y_of = {page: 52 + 56 * page for page in range(6)}
    owner: dict[int, tuple[str, int, str]] = {}
    for name, length, table, fill, y in rows:
        p.text(24, y - 18, f'request "{name}": seq_lens = {length}', size=13)
        for t in range(length):
            p.cell(24 + 20 * t, y, 20, 26, str(t), fill, size=11)
        for j, page in enumerate([*table, *[-1] * (3 - len(table))]):
            p.cell(270 + 44 * j, y, 44, 26, str(page) if page >= 0 else "−1", fill if page >= 0 else "blank", mono=True)
            if page >= 0:
                owner[page] = (name, min(length - 4 * j, 4), fill)
                start = 270 + 44 * j + 22
                lane = 490 + 12 * ([2, 0, 5, 3, 1].index(page))
                drop = y + 40 + 9 * j
                p.arrow([(start, y + 26), (start, drop), (lane, drop), (lane, y_of[page] + 13), (556, y_of[page] + 13)],
                        f"{fill}-ink", 1.3)  # fmt: skip
    for page in range(6):
        name, used, fill = owner.get(page, ("", 0, "blank"))
        first = {2: 0, 0: 4, 5: 8, 3: 0, 1: 4}.get(page, 0)
        for slot in range(4):
            live = slot < used
            words = f"{name}{first + slot}" if live else ""
            p.cell(560 + 48 * slot, y_of[page], 48, 26, words, fill if live else "blank", size=12)
            if page == 5:
                p.text(
                    560 + 48 * slot + 24, y_of[page] + 40, str(4 * page + slot), size=11, fill="soft", anchor="middle"
                )
        p.text(764, y_of[page] + 13, f"page {page}" + ("" if name else ", free"), size=13, fill="soft")
    p.text(764, y_of[5] + 40, "← slots", size=12, fill="soft")
    p.text(24, 300, "Token 9 of a: page_table[a, 9 // 4] = 5, offset 9 % 4 = 1,", size=13)
    p.text(24, 320, "so its slot is 5 * 4 + 1 = 21: what slot_mapping holds.", size=13)
    p.text(24, 346, "Entries after a request's last page are never read,", size=13, fill="soft")
    p.text(24, 366, "nor are the slots after its last token.", size=13, fill="soft")
    return p


def layouts() -> Picture:
    """One page in memory, NHD and HND."""
    p = Picture(
        860, 256, "The rows of one page in memory: NHD keeps the heads of a token together, HND the tokens of a head"
    )
    fills = ("blue", "orange")
    for top, name, order, note in (
        (50, "NHD", [(s, h) for s in range(4) for h in range(2)], "[page, slot, head, dim]: a token's heads together"),
        (136, "HND", [(s, h) for h in range(2) for s in range(4)], "[page, head, slot, dim]: a head's tokens together"),
    ):  # fmt: skip
        p.text(24, top - 22, f'layout="{name}"', mono=True, bold=True, size=13)
        p.text(170, top - 22, note, size=13, fill="soft")
        for i, (slot, head) in enumerate(order):
            p.cell(24 + 101 * i, top, 101, 40, f"slot {slot}, head {head}", fills[head], size=12)
    p.arrow([(24, 190), (832, 190)], "line")
    p.text(24, 216, "addresses of one page (S = 4, H = 2). A layer is always seen as [page, slot, head, dim];", size=13)
    p.text(24, 236, "HND is the same view with other strides.", size=13)
    return p


def kv_rows() -> Picture:
    """Bytes of one K or V row of D = 128, to scale."""
    d, unit, left = 128, 2.2, 200
    shown = ("bf16", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head", "nvfp4", "int4_per_token_head")
    p = Picture(860, 56 + 52 * len(shown) + 26, "Bytes of one row of 128 values in each K/V format, to scale")
    p.text(24, 28, "one K or V row of a token and head, D = 128, to scale", bold=True)
    for i, name in enumerate(shown):
        f = formats.kv_format(name)
        y = 56 + 52 * i
        p.text(24, y + 14, name, mono=True, size=13)
        codes, scales = f.code_bytes(d) * unit, f.scale_bytes(d) * unit
        fill = {"bf16": "blank", "e2m1": "green", "int4": "green"}.get(f.code, "blue")
        nibbles = "128 nibbles: 64 bytes"
        what = {"bf16": "128 × 2 bytes", "e2m1": nibbles, "int4": nibbles}.get(f.code, "128 codes of 1 byte")
        p.cell(left, y, codes, 28, what, fill, size=12)
        if scales:
            p.rect(left + codes, y, scales, 28, "orange", "line")
        told = {"token_head": "1 fp32 scale", "block": "8 e4m3 scales, one per 16 values"}.get(f.scale, "")
        p.text(
            left + codes + scales + 10, y + 14, f"{f.row_bytes(d)} bytes" + (f", with {told}" if told else ""), size=13
        )
    words = "Scales lie in a tensor of their own, or with scales='inline' right after their row's codes, as drawn."
    p.text(24, p.height - 26, words, size=13, fill="soft")
    return p


def nvfp4() -> Picture:
    """Nibbles and block scales."""
    p = Picture(
        860, 300, "Sixteen values of nvfp4: eight bytes with two codes each, one e4m3 block scale, one global scale"
    )
    p.text(24, 28, "nvfp4: 16 neighbours of a row share a scale", bold=True)
    w = 50
    for i in range(16):
        p.cell(32 + w * i, 50, w, 28, f"x{i}", "blue" if i % 2 == 0 else "purple", size=12, mono=True)
    for b in range(8):
        x = 32 + 2 * w * b
        p.line([(x + w / 2, 78), (x + 1.5 * w, 112)], "blue-ink", 1.2)
        p.line([(x + 1.5 * w, 78), (x + w / 2, 112)], "purple-ink", 1.2)
        p.cell(x, 112, w, 28, f"c{2 * b + 1}", "purple", size=12, mono=True)
        p.cell(x + w, 112, w, 28, f"c{2 * b}", "blue", size=12, mono=True)
        p.rect(x, 112, 2 * w, 28, "none", "ink", width=1.4)
        p.text(x + w, 152, f"byte {b}", size=11, fill="soft", anchor="middle")
    p.text(32, 174, "each byte: high nibble = odd element, low nibble = even element", size=13)
    p.cell(32, 200, 100, 28, "s: 1 byte", "orange", size=12)
    p.text(144, 214, "e4m3 block scale, in [P, S, H, D/16]; s = e4m3(amax / 6 / g)", size=13)
    p.cell(32, 240, 100, 28, "g", "red", size=12)
    p.text(144, 254, "one scale of the layer: k_scale or v_scale", size=13)
    p.text(480, 254, "x ≈ c · s · g,   |c| in {0, .5, 1, 1.5, 2, 3, 4, 6}", size=13)
    return p


def latent_rows() -> Picture:
    """Bytes of a latent row, to scale."""
    rank, rope, unit, left = 512, 64, 0.52, 140
    shown = ("bf16", "fp8_e4m3", "fp8_ds_mla")
    p = Picture(860, 330, "Bytes of one latent row of 512 + 64 values, to scale")
    p.text(24, 28, "one latent row of a token: 512 latent and 64 rotary values, to scale", bold=True)
    for i, name in enumerate(shown):
        f = formats.latent_format(name)
        y = 58 + 74 * i
        parts = [(f.code_bytes(rank), "512 latent", "blue"), (f.scale_bytes(rank), "", "orange"),
                 (rope * formats.rope_dtype(f).itemsize, "", "green")]  # fmt: skip
        x, byte = float(left), 0
        p.text(24, y + 14, name, mono=True, size=13)
        for size, words, fill in parts:
            if size:
                what = f"{words}: {'bf16' if name == 'bf16' else 'e4m3'}" if words else ""
                p.cell(x, y, size * unit, 28, what, fill, size=12)
                near = "middle" if size > 64 and name != "fp8_ds_mla" else "end" if fill == "orange" else "start"
                p.text(x, y + 40, str(byte), size=11, fill="soft", anchor=near)
            x, byte = x + size * unit, byte + size
        p.text(x, y + 40, str(byte), size=11, fill="soft", anchor="middle")
        p.text(x + 12, y + 14, f"{byte} bytes", size=13)
    p.cell(24, 282, 16, 16, "", "green")
    p.text(48, 290, "rotary part: 64 values; fp8_ds_mla keeps them in bf16", size=13)
    p.cell(440, 282, 16, 16, "", "orange")
    p.text(464, 290, "4 fp32 scales, one per 128 latent values", size=13)
    p.text(24, 314, "numbers below the rows: offset in bytes", size=12, fill="soft")
    return p


def shards() -> Picture:
    """A request's tokens dealt to two ranks."""
    p = Picture(860, 330, "Sixteen tokens of a request dealt to two ranks, by whole pages and by single tokens")
    fills = ("blue", "orange")
    for top, interleave, words in (
        (52, 4, "interleave = page_size = 4: whole pages"),
        (182, 1, "interleave = 1: single tokens"),
    ):
        p.text(24, top - 24, words, bold=True)
        p.text(24, top + 14, "positions", size=13, fill="soft")
        for t in range(16):
            p.cell(150 + 42 * t, top, 42, 28, str(t), fills[t // interleave % 2], size=12)
        for rank in range(2):
            mine = [t for t in range(16) if t // interleave % 2 == rank]
            x = 150 + 360 * rank
            for j, t in enumerate(mine):
                gap = 8 * (j // 4)
                p.cell(x + 36 * j + gap, top + 52, 36, 28, str(t), fills[rank], size=12)
            p.text(x, top + 42, f"rank {rank}: 2 pages of 4 slots", size=12, fill="soft")
    p.text(
        24,
        290,
        "Position p lies on rank (p // interleave) % world. A rank keeps its tokens in order and without gaps,",
        size=13,
    )
    p.text(24, 310, "attends to them for all heads, and one exchange of outputs and LSE merges the parts.", size=13)
    return p


def tree() -> Picture:
    """A tree of drafts and its mask."""
    p = Picture(860, 260, "Four drafts that form a tree, and the bits of their mask")
    p.text(24, 28, "four drafts of one request, as a tree", bold=True)
    at = {"prefix": (24, 118, 110), 0: (180, 118, 48), 1: (276, 82, 48), 2: (276, 154, 48), 3: (372, 82, 48)}
    for a, b in (("prefix", 0), (0, 1), (0, 2), (1, 3)):
        (xa, ya, wa), (xb, yb, _) = at[a], at[b]
        mid = (xa + wa + xb) / 2
        p.arrow([(xa + wa, ya + 15), (mid, ya + 15), (mid, yb + 15), (xb, yb + 15)])
    for name, (x, y, w) in at.items():
        p.cell(x, y, w, 30, "the prefix" if name == "prefix" else f"d{name}", "blank" if name == "prefix" else "blue")
    p.text(470, 28, "mask: row i, bit j: draft i sees draft j", bold=True)
    sees = [(1, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 1, 0, 1)]
    for j in range(4):
        p.text(556 + 44 * j, 58, f"d{j}", size=13, fill="soft", anchor="middle")
    for i, row in enumerate(sees):
        y = 72 + 34 * i
        p.text(500, y + 16, f"d{i}", size=13, fill="soft")
        for j, bit in enumerate(row):
            p.cell(534 + 44 * j, y, 44, 32, str(bit), "green" if bit else "blank", mono=True)
        p.text(724, y + 16, f"0b{sum(b << j for j, b in enumerate(row)):04b}", mono=True, size=14)
    p.text(
        24,
        236,
        "Every draft sees the whole prefix. Bit 0 is the lowest; a row has 2 × ceil(drafts / 32) words of uint16.",
        size=13,
    )
    return p


def anatomy() -> Picture:
    """The steps of an attention kernel, with the warps and memory that they use."""
    p = Picture(860, 300, "The steps of an attention kernel: from the tile scheduler to the combine")
    p.text(24, 28, "one CTA, from left to right; the marked steps repeat for every n_block", bold=True)
    w, h, top = 112, 46, 70
    steps = [
        ("tile_scheduler", "which n_blocks", "blank"), ("producer", "TMA → stages", "orange"),
        ("dequant", "codes → fp16", "purple"), ("mainloop", "QK … PV", "blue"),
        ("epilogue", "acc_o / row_sum", "green"), ("combine", "of splits", "red"),
    ]  # fmt: skip
    p.rect(24 + 140 - 12, top - 14, 3 * 140 - 4, h + 44, "none", "soft", rx=6, dash="4 3")
    for i, (name, what, fill) in enumerate(steps):
        x = 24 + 140 * i
        p.cell(x, top, w, h, "", fill)
        p.text(x + w / 2, top + 15, name, size=13, anchor="middle", mono=True)
        p.text(x + w / 2, top + 33, what, size=12, anchor="middle")
        if i < len(steps) - 1:
            p.arrow([(x + w, top + h / 2), (x + 138, top + h / 2)])
    p.text(24 + 140 - 4, top + h + 18, "once per n_block of BLOCK_N keys", size=12, fill="soft")
    p.text(24, 176, "inside the main loop, for one n_block:", bold=True)
    inside = [
        ("S = QK", "× K scales", "blue"), ("mask", "only at the edges", "blank"), ("row_max", "lazy rescale", "purple"),
        ("P = exp2(S − max)", "V scale in the exponent", "purple"), ("acc_o += PV", "fp32", "blue"),
    ]  # fmt: skip
    for i, (name, what, fill) in enumerate(inside):
        x = 24 + 164 * i
        p.cell(x, 196, 142, h, "", fill)
        p.text(x + 71, 211, name, size=13, anchor="middle")
        p.text(x + 71, 229, what, size=12, anchor="middle")
        if i < len(inside) - 1:
            p.arrow([(x + 142, 219), (x + 162, 219)])
    words = "Warps of one CTA may share the steps (decode) or specialise in them (prefill, many query rows)."
    p.text(24, 272, words, size=13, fill="soft")
    return p


def cta_ranges() -> Picture:
    """Equal CTA ranges over the n_blocks of a batch, and the splits that they make."""
    p = Picture(860, 250, "The key blocks of three requests in a row, divided into four equal CTA ranges")
    p.text(24, 28, "three requests of 7, 2 and 7 n_blocks, four CTAs: ranges of 4 n_blocks", bold=True)
    unit, left, top = 46, 110, 66
    lengths = (("a", 7, "blue"), ("b", 2, "orange"), ("c", 7, "green"))
    p.text(24, top + 16, "work tiles", size=13, fill="soft")
    p.text(24, top + 74, "CTA ranges", size=13, fill="soft")
    x = float(left)
    for name, count, fill in lengths:
        for i in range(count):
            p.cell(x, top, unit, 32, f"{name}{i}", fill, size=12)
            x += unit
    parts = (
        ("a0 … a3", "a4 … a6, b0", "b1, c0 … c2", "c3 … c6"),
        ("split of a", "split of a and of b", "split of b and of c", "split of c"),
    )
    for i in range(4):
        at = left + 4 * unit * i
        p.line([(at, top - 10), (at, top + 116)], "soft", 1.2, "4 3")
        p.cell(at + 6, top + 58, 4 * unit - 12, 32, f"CTA {i}: {parts[0][i]}", "blank", size=12)
        p.text(at + 2 * unit, top + 104, parts[1][i], size=12, fill="soft", anchor="middle")
    p.line([(left + 16 * unit, top - 10), (left + 16 * unit, top + 116)], "soft", 1.2, "4 3")
    p.text(
        24,
        206,
        "A range splits at most two work tiles: the one it begins with and the one it ends with. The workspace has",
        size=13,
    )
    p.text(24, 226, "two slots a range for their partial results; a whole work tile goes straight to out.", size=13)
    return p


def stages() -> Picture:
    """A ring of stages in time, with the barriers and their phase."""
    p = Picture(860, 270, "A ring of three stages: when the producer fills them and the consumers read them")
    p.text(24, 28, "a ring of three stages over time: iteration i uses stage i % 3, in phase i // 3 & 1", bold=True)
    unit, left = 100, 120
    for i in range(7):
        p.text(left + unit * (i + 0.5), 58, str(i), size=12, fill="soft", anchor="middle")
    fills = ("blue", "orange", "green")
    p.text(24, 58, "time", size=13, fill="soft")
    p.text(24, 88, "producer", size=13, fill="soft")
    p.text(24, 132, "consumers", size=13, fill="soft")
    for i in range(6):
        at = left + unit * i
        p.cell(at + 4, 74, unit - 8, 28, f"fill {i % 3}", fills[i % 3], size=12)
        p.cell(at + unit + 4, 118, unit - 8, 28, f"read {i % 3}: i = {i}", fills[i % 3], size=12)
        p.arrow(
            [(at + unit - 30, 102), (at + unit - 30, 110), (at + unit + 30, 110), (at + unit + 30, 118)],
            "blue-ink",
            1.2,
        )
    for stage in range(3):
        p.cell(24 + 100 * stage, 180, 92, 26, f"stage {stage}", fills[stage], size=12)
    p.text(340, 193, "each has a full and an empty mbarrier", size=13)
    p.text(
        24,
        226,
        "full: the copies of the stage have arrived (consumer_wait). empty: all readers are done, the stage may be",
        size=13,
    )
    p.text(
        24,
        246,
        "refilled (consumer_release → producer_acquire). A barrier's phase flips each time the ring comes round.",
        size=13,
    )
    return p


def warp_roles() -> Picture:
    """Prefill's warp roles and the shared memory between them."""
    p = Picture(
        860,
        320,
        "Warp roles of prefill over a quantised cache: producer warp, converter warpgroup, two consumer warpgroups",
    )
    p.text(24, 28, "prefill, quantised cache: one CTA of 13 warps", bold=True)
    p.cell(24, 60, 150, 60, "", "orange")
    p.text(99, 80, "producer", anchor="middle", mono=True, size=13)
    p.text(99, 100, "1 warp: TMA", anchor="middle", size=12)
    p.cell(24, 190, 150, 60, "", "purple")
    p.text(99, 210, "converter", anchor="middle", mono=True, size=13)
    p.text(99, 230, "1 warpgroup: to fp16", anchor="middle", size=12)
    for i, y in enumerate((72, 168)):
        p.cell(660, y, 176, 60, "", "blue")
        p.text(748, y + 20, f"consumer {i}", anchor="middle", mono=True, size=13)
        p.text(748, y + 40, "1 warpgroup: 64 query rows", anchor="middle", size=12)
    p.cell(300, 56, 250, 28, "query rows (2 tiles of 64)", "blank", size=12)
    p.cell(300, 104, 250, 28, "code stages: K and V in the cache's bytes", "blank", size=12)
    p.cell(300, 200, 250, 28, "16-bit stages: K and V", "blank", size=12)
    p.text(550, 42, "shared memory", size=12, fill="soft", anchor="end")
    p.arrow([(174, 70), (298, 70)], "orange-ink", 1.5)
    p.arrow([(174, 110), (298, 110)], "orange-ink", 1.5)
    p.arrow([(298, 124), (200, 124), (200, 206), (176, 206)], "purple-ink", 1.5)
    p.arrow([(174, 222), (298, 222)], "purple-ink", 1.5)
    p.arrow([(550, 68), (600, 68), (600, 90), (658, 90)], "blue-ink", 1.5)
    p.arrow([(550, 76), (590, 76), (590, 182), (658, 182)], "blue-ink", 1.5)
    p.arrow([(550, 208), (620, 208), (620, 118), (658, 118)], "blue-ink", 1.5)
    p.arrow([(550, 218), (658, 218)], "blue-ink", 1.5)
    p.text(
        24,
        284,
        "Arrows are data; each ring also has full and empty barriers. Over a 16-bit cache there is no converter:",
        size=13,
    )
    p.text(
        24,
        304,
        "TMA writes the 16-bit stages. The consumers run QK of one n_block beside PV of the one before.",
        size=13,
    )
    return p


PICTURES: dict[str, Callable[[], Picture]] = {
    "pages": pages, "layouts": layouts, "kv_rows": kv_rows, "nvfp4": nvfp4, "latent_rows": latent_rows,
    "shards": shards, "tree": tree, "anatomy": anatomy, "cta_ranges": cta_ranges, "stages": stages,
    "warp_roles": warp_roles,
}  # fmt: skip


def drawn() -> dict[Path, str]:
    return {FOLDER / f"{name}.svg": draw().svg() for name, draw in PICTURES.items()}


if __name__ == "__main__":
    sys.exit(main("The pictures of docs/pictures that explain.", drawn))
