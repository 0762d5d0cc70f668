"""Caches by one word, and the search of `tersekv eval` among them."""

from __future__ import annotations

import json
import re

import pytest
import torch

from tersekv import PagedKVCache
from tersekv.cli.main import main
from tersekv.demo import text
from tersekv.demo.calibrate import Calibration
from tersekv.demo.measure import Measured, ModelResult, Settings, measure
from tersekv.demo.outliers import make_outliers
from tersekv.demo.report import _named, frontier
from tersekv.demo.search import searched
from tersekv.demo.subject import BuiltIn
from tersekv.formats import KV_FORMATS, LATENT_FORMATS
from tersekv.recipe import Recipe, recipe


@pytest.mark.parametrize(("word", "want"), [
    ("nvfp4", Recipe(("nvfp4", "nvfp4"))),
    ("bf16/nvfp4", Recipe(("bf16", "nvfp4"))),
    ("nvfp4+rotated+channels", Recipe(("nvfp4", "nvfp4"), True, True)),
    ("nvfp4+fitted", Recipe(("nvfp4", "nvfp4"), fitted=True)),
    ("fp8_e4m3/nvfp4+ends=bf16/fp16+rotated", Recipe(("fp8_e4m3", "nvfp4"), True, False, ("bf16", "fp16"))),
])  # fmt: skip
def test_a_word_is_a_recipe(word, want):
    assert recipe(word) == want
    assert recipe(word).plain == (word in ("nvfp4", "nvfp4+fitted"))
    assert recipe(word).calibrated == ("channels" in word or "fitted" in word)


@pytest.mark.parametrize(("word", "message"), [
    ("int3", "want one of bf16, .*, or K/V of two, got 'int3'"),
    ("bf16/fp16/bf16", "or K/V of two, got 'bf16/fp16/bf16'"),
    ("bf16+turned", r"want \+rotated, \+channels, \+fitted or \+ends=FORMAT once each, got \+turned"),
    ("bf16+rotated+rotated", r"once each, got \+rotated"),
    ("bf16+ends=", r"once each, got \+ends="),
    ("int8_per_token_head/bf16+fitted", r"want a format that takes a scale for \+fitted, got"),
    ("fp8_ds_mla+rotated", r"want formats of K/V caches \(bf16, .*\) for 'fp8_ds_mla\+rotated'"),
])  # fmt: skip
def test_a_word_that_is_none_is_refused(word, message):
    with pytest.raises(ValueError, match=message):
        recipe(word)


def allocate(format, layers=3, **options):
    return PagedKVCache.allocate(layers, 2, 4, 2, 64, format=format, **options)


def test_a_word_allocates_what_keywords_do():
    cache = allocate("int4_per_token_head/nvfp4+rotated+ends=int8_per_token_head")
    assert cache.layer_formats == ("int8_per_token_head", ("int4_per_token_head", "nvfp4"), "int8_per_token_head")
    assert {layer.rotation for layer in cache.layers} == {"hadamard"}
    plain = allocate("int4_per_token_head/nvfp4", rotation=(None, "hadamard"), v_channel_scale=torch.ones(2, 64))
    assert plain.format == ("int4_per_token_head", "nvfp4")
    assert plain[0].rotation == (None, "hadamard")
    # All that a search tries, but for what wants numbers.
    for word in searched(list(KV_FORMATS)):
        if not recipe(word).calibrated:
            assert allocate(word).layer_formats == allocate(None, layer_formats=recipe(word).layers(3)).layer_formats


@pytest.mark.parametrize(("options", "message"), [
    ({"format": "nvfp4+rotated", "rotation": "hadamard"}, "rotation: want it or +rotated of format='nvfp4+rotated', "),
    ({"format": "nvfp4+ends=bf16", "layer_formats": ["bf16"] * 3}, "layer_formats: want it or format='nvfp4+ends="),
    ({"format": "nvfp4+channels", "k_channel_scale": torch.ones(2, 64)}, "k_channel_scale: want it or +channels of "),
    ({"format": "nvfp4+fitted", "k_scale": 2.0}, "k_scale: want it or +fitted of format='nvfp4+fitted', got both"),
    ({"format": "nvfp4+fitted", "k_scale": torch.ones(1)}, "k_scale: want it or +fitted of format='nvfp4+fitted', got"),
    ({"format": "nvfp4+fitted"}, "format: want the numbers of +fitted by allocate_saved(FILE, ...), a file that "
     "`tersekv eval --save FILE` wrote, or by k_scale and v_scale without +fitted; got 'nvfp4+fitted' alone"),
    ({"format": "nvfp4+channels"}, "or by k_channel_scale and v_channel_scale without +channels; got 'nvfp4+chan"),
    ({"format": "nvfp4+turned"}, "format: want +rotated, +channels, +fitted or +ends=FORMAT once each, got +turned"),
    ({"format": "nvfp4/int3"}, "format: want one of bf16, "),
    ({"format": "nvfp4+ends=bf16", "layers": 1}, "format: want at least 2 layers for +ends, got 1 for "),
])  # fmt: skip
def test_a_word_that_says_half_or_what_keywords_say_is_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        allocate(**options)


def test_a_search_tries_mixes_of_few_bits_and_leaves_latents_alone():
    words = searched(list(KV_FORMATS))
    assert set(KV_FORMATS) < set(words)
    assert {"int8_per_token_head/nvfp4", "nvfp4+rotated", "nvfp4+ends=int8_per_token_head", "nvfp4+fitted"} < set(words)
    assert {"int8_per_token_head/int4_per_token_head", "int4_per_token_head+channels"} < set(words)
    assert all(recipe(w) for w in words)
    assert searched(list(LATENT_FORMATS)) == [*LATENT_FORMATS, "fp8_e4m3+fitted", "fp8_e5m2+fitted"]
    assert searched(["bf16", "nvfp4"]) == ["bf16", "nvfp4", "nvfp4+fitted"]  # nothing to mix with


def test_the_frontier_is_what_nothing_else_beats():
    found = [Measured(name, nbytes, kl=kl) for name, nbytes, kl in (
        ("a", 100, 0.0), ("b", 50, 0.2), ("c", 50, 0.1), ("d", 60, 0.1), ("e", 70, 0.05), ("f", 110, 0.0)
    )]  # fmt: skip
    result = ModelResult("m", 1, 1, "", [*found, Measured("g", unsupported="no")])
    assert [m.format for m in frontier(result)] == ["c", "e", "a"]


def test_the_picture_of_a_search_names_what_nothing_beats():
    rows = [Measured(word, 100 - i, kl=1 / (1 + i % 3)) for i, word in enumerate(searched(list(KV_FORMATS)))]
    many, few = ModelResult("m", 1, 1, "", rows), ModelResult("m", 1, 1, "", rows[: len(KV_FORMATS)])
    shown = _named(many)
    assert list(shown) == [m.format for m in rows]
    assert {name for name, named in shown.items() if named} == {m.format for m in frontier(many)}
    assert all(_named(few).values())


def test_eval_searches_and_names_the_smallest_within_a_distance(tmp_path, capsys):
    (tmp_path / "x.txt").write_text(text.heldout_text()[:600])
    options = ["--model", "llama", "--tokens", "300", "--search", "--formats", "int8_per_token_head,nvfp4"]
    files = ["--text", str(tmp_path / "x.txt"), "--json", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png")]
    assert main(["eval", *files, *options, "--within", "0.005"]) == 0
    out = capsys.readouterr().out
    assert "nothing else is as small and as near" in out
    assert "the smallest within 0.005 nats per byte: int8_per_token_head/nvfp4" in out
    (model,) = json.loads((tmp_path / "x.json").read_text())["models"]
    assert {m["format"] for m in model["formats"]} >= {"bf16", "int8_per_token_head+rotated", "nvfp4+channels"}
    assert (tmp_path / "x.png").stat().st_size > 10_000
    assert main(["eval", *files, "--model", "llama", "--tokens", "50", "--formats", "fp8_e4m3", "--within", "0"]) == 0
    assert "the smallest within 0 nats per byte: bf16" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["eval", *files, "--within", "-1"])
    assert "want a number of nats, 0 or more, got '-1'" in capsys.readouterr().err


@torch.inference_mode()
def test_outlier_channels_are_what_rotation_and_channel_scales_are_for():
    """Outliers of K cost tens of times; a rotation takes most of it back in integer formats, and channel scales all."""
    formats, heldout, kl = ("int8_per_token_head", "nvfp4", "int4_per_token_head"), text.encode(text.heldout_text()), []
    for change, more in ((lambda model: None, ("",)), (make_outliers, ("", "+rotated", "+channels"))):
        subject = BuiltIn("llama")
        change(subject.model)
        words = [f"{f}/bf16{m}" for f in formats for m in more]
        # Fewer bytes would do for int8 and int4; a few places weigh much in what nvfp4 costs.
        found = measure(subject, heldout[:2049], Settings(generate=2), words, other=heldout[-4097:]).formats
        kl.append({m.format.replace("/bf16", ""): m.kl for m in found})
    plain, hurt = kl
    for format in formats:
        assert hurt[format] > 8 * plain[format]
        assert hurt[f"{format}+channels"] < 1.3 * plain[format]
    assert hurt["int8_per_token_head+rotated"] < 0.3 * hurt["int8_per_token_head"]
    assert hurt["int4_per_token_head+rotated"] < 0.12 < 0.2 * hurt["int4_per_token_head"]


@torch.inference_mode()
def test_outliers_leave_the_model_what_it_is():
    tokens = text.encode(text.heldout_text())[:200]
    subject = BuiltIn("llama")
    before = subject.model(tokens)
    make_outliers(subject.model)
    assert (subject.model(tokens) - before).norm() < 1e-4 * before.norm()


@torch.inference_mode()
def test_needles_are_found_in_16_bits_and_lost_where_outliers_leave_four_bits_no_steps():
    heldout, subject = text.encode(text.heldout_text()), BuiltIn("llama")
    make_outliers(subject.model)
    words = ["fp16", "int8_per_token_head", "int4_per_token_head", "int4_per_token_head+channels"]
    result = measure(subject, heldout[:65], Settings(generate=2, needles=16), words, other=heldout[-1025:])
    found = {m.format: m.needles for m in result.formats}
    assert 64 < result.needles <= 16 * 2 * 4  # of 16 places, 2 heads, 4 layers
    assert found["bf16"] == found["fp16"] == result.needles
    assert found["int8_per_token_head"] > 0.8 * result.needles
    assert found["int4_per_token_head"] < 0.4 * result.needles
    assert found["int4_per_token_head+channels"] > 0.8 * result.needles


def test_scales_are_fitted_to_rows_as_they_are_laid_down():
    """A rotation and channel scales move the largest value: what is fitted is what the cache will hold."""
    heldout = text.encode(text.heldout_text())
    calibration = Calibration(BuiltIn("llama"), heldout[:129], 1, 64, lambda what, work: None)
    for word in ("fp8_e4m3+fitted", "fp8_e4m3+rotated+fitted", "fp8_e4m3+rotated+channels+fitted"):
        layer = calibration.filled(1, recipe(word))
        assert 440 < layer.k.float().abs().max() <= 448
        assert 440 < layer.v.float().abs().max() <= 448


def test_signs_that_inference_mode_made_are_no_inference_tensors():
    """Caches outside of it share them."""
    with torch.inference_mode():
        made = PagedKVCache.allocate(1, 1, 1, 1, 32, format="bf16", rotation="hadamard")[0]
    assert made.k_signs is not None
    assert not made.k_signs.is_inference()
