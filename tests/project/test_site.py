"""The site: it builds without a warning, asks nobody else for anything, and its pictures are those of the scripts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from script import script

import tersekv

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    scripts = {name: (folder / name).read_text() for name in ("search/search_index.js", "search_worker.js")}
    return {path.stem: path.read_text() for path in folder.glob("*.html")} | scripts


def test_every_page_is_built(site):
    assert {p.stem for p in (ROOT / "docs").glob("*.md")} <= set(site)


def test_pages_load_nothing_from_elsewhere(site):
    for name, html in site.items():
        loads = re.findall(r"<(?:script|img|iframe)[^>]*\bsrc=\"(\w+:)?//", html)
        loads += re.findall(r"<link[^>]*\bhref=\"(?:\w+:)?//[^\"]*\"[^>]*>", html)
        assert not loads, name


def test_search_needs_no_server(site):
    """A browser lets a page of a folder neither fetch the index nor start a worker: both come as scripts."""
    assert site["search/search_index.js"].startswith("var __index =")
    assert "window.Worker =" in site["search_worker.js"]
    for name in (p.stem for p in (ROOT / "docs").glob("*.md")):
        before, _, after = site[name].partition('<script src="search_worker.js">')
        assert "assets/javascripts/bundle" in after, name  # which starts the search
        assert "<script src" not in before, name


def test_drawings_lie_in_their_pages_with_the_page_s_colours(site):
    drawn = {page: len(re.findall(r'<figure class="drawing"', html)) for page, html in site.items()}
    pages = {p.stem: len(re.findall(r"^!\[.*\]\(pictures/", p.read_text(), re.M)) for p in (ROOT / "docs").glob("*.md")}
    assert {page: n for page, n in drawn.items() if page in pages} == pages
    assert "var(--d-ink, " in site["concepts"]


def test_the_api_page_has_every_public_name_and_argument(site):
    text = site["api"]
    for name in (*tersekv.__all__, "TersekvCache"):
        assert f'id="{name.lower()}"' in text, name
    for words in ("<code>slot_mapping</code>", "<code>softmax_scale</code>", "<code>buffer_tokens</code>"):
        assert words in text
    for argument, meaning in (("softcap", "c &gt; 0: scores become"), ("out_scale", "multiplies the output")):
        assert re.search(rf"<td><code>{argument}</code></td>\s*<td>[^<]*{meaning}", text), argument


def test_no_page_shows_the_backslashes_of_its_markdown(site):
    for name, html in site.items():
        text = re.sub(r"<(script|style|svg)\b.*?</\1>", "", html, flags=re.S)
        assert not re.findall(r".{30}\\[*_<>\[\]|&].{30}", text), name
    code = re.findall(r"<(?:code|pre)\b.*?</(?:code|pre)>", site["api"], re.S)
    assert len(code) > 200
    assert not [c for c in code if "\\" in c]
    assert "language-text" not in site["api"], "code of a language that nobody named"


def test_code_in_a_docstring_is_code_on_the_page():
    hooks = script("scripts/site_hooks.py")
    doc = "One `a_b` and a_b *c.\n\n    x_y = f(*z)\n\n    with a:\n        x[_] = 1\n\nThe_end."
    want = "One `a_b` and a\\_b \\*c.\n\n```python\nx_y = f(*z)\n\nwith a:\n    x[_] = 1\n```\n\n\nThe\\_end."
    assert re.sub(r"\n+", "\n", hooks._text(doc)) == re.sub(r"\n+", "\n", want)


def test_an_example_of_a_docstring_is_code_on_the_page():
    def f(x_y):
        """Return it, a *b.

        >>> f(
        ...     2**0.5
        ... )
        [1]

        x_y:  a number
        """

    text = "".join(script("scripts/site_hooks.py")._prose(f))
    assert "a \\*b.\n```pycon\n>>> f(\n...     2**0.5\n... )\n[1]\n```\n| argument" in text
    assert "| `x_y` | a number |" in text


def test_drawings_are_up_to_date_and_hold_what_they_draw():
    drawings = script("scripts/drawings.py")
    for name, draw in drawings.PICTURES.items():
        picture = draw()
        assert (PICTURES / f"{name}.svg").read_text() == picture.svg(), "run `make table`"
        inside(picture)


def test_charts_are_up_to_date():
    page = script("scripts/performance_page.py")
    for path, svg in page.pictures().items():
        assert path.exists(), "run `make table`"
        assert path.read_text() == svg, "run `make table`"


def test_no_picture_is_left_over():
    names = "performance_page", "drawings", "vllm_page", "tiers_page", "sparse_page"
    page, drawings, vllm, tiers, sparse = (script(f"scripts/{name}.py") for name in names)
    known = {path.name for path in page.pictures()} | {f"{name}.svg" for name in drawings.PICTURES}
    known |= {vllm.PICTURE.name, tiers.PICTURE.name} | {path.name for path in sparse.pictures()}
    assert {path.name for path in PICTURES.iterdir()} == known


def test_pictures_of_sparse_attention_hold_what_they_draw():
    for picture in script("scripts/sparse_page.py").pictures().values():
        inside(picture)


def test_a_token_s_times_stand_beside_its_bytes_once_they_are_measured():
    page = script("scripts/sparse_page.py")
    kept = {
        ("mla_decode", "bf16", 8192): 30.0,
        ("index_select", "index_fp8", 8192): 40.4,
        ("sparse", "fp8_ds_mla", 8192): 5,
    }
    assert page.micros("dense, 16 bits", 8192, kept) == 30
    assert page.micros("sparse, 8 bits", 8192, kept) == 45.4
    assert page.micros("sparse, 16 bits", 8192, kept) is None
    assert "| 8K | 9.4 (30 µs) | 5.4 | 4.5 | 2.4 (45 µs) |" in page.cost(kept)


def inside(picture):
    """Nothing is drawn outside of the picture; letters are counted as 0.56 of their size, monospaced ones as 0.62."""
    for node in ET.fromstring(picture.svg()).iter("{http://www.w3.org/2000/svg}text"):
        style = node.get("style")
        size = float(re.search(r"font-size:([\d.]+)px", style)[1])
        width = len(node.text) * size * (0.62 if "monospace" in style else 0.56)
        x = float(node.get("x")) - {"start": 0, "middle": width / 2, "end": width}[node.get("text-anchor")]
        assert x >= -1, node.text
        assert x + width <= picture.width + 1, node.text


def test_a_ratio_that_reads_1_00_is_no_loss():
    page = script("scripts/performance_page.py")
    case = {"op": "decode", "format": "bf16", "requests": 1, "tokens": 8192, "heads": 32, "page": 64}
    records = [
        {
            **case,
            "uneven": False,
            "host": False,
            "precision": "exact",
            "us": us,
            "peers": {"a": {"us": 100.0}},
            "peers_format": None,
        }
        for us in (100.4, 100.6, 200.0)
    ]
    lost = [line for line in page.losses(records) if line.startswith("- ")]
    assert len(lost) == 2
    assert lost[0].endswith("(0.50)")
    assert lost[1].endswith("(0.99)")
