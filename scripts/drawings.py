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


PICTURES: dict[str, Callable[[], Picture]] = {
    "pages": pages, "layouts": layouts, "kv_rows": kv_rows, "nvfp4": nvfp4, "latent_rows": latent_rows,
    "shards": shards, "tree": tree,
}  # fmt: skip


def drawn() -> dict[Path, str]:
    return {FOLDER / f"{name}.svg": draw().svg() for name, draw in PICTURES.items()}


if __name__ == "__main__":
    sys.exit(main("The pictures of docs/pictures that explain.", drawn))
