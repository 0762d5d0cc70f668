"""Caches by one word, and the search of `tersekv eval` among them."""

from __future__ import annotations

import json

import pytest
import torch

from tersekv.cli.main import main
from tersekv.demo import text
from tersekv.demo.measure import Measured, ModelResult, Settings, measure
from tersekv.demo.recipe import Recipe, recipe, searched
from tersekv.demo.report import frontier
from tersekv.demo.subject import BuiltIn
from tersekv.formats import KV_FORMATS, LATENT_FORMATS


@pytest.mark.parametrize(("word", "want"), [
    ("nvfp4", Recipe(("nvfp4", "nvfp4"))),
    ("bf16/nvfp4", Recipe(("bf16", "nvfp4"))),
    ("nvfp4+rotated+channels", Recipe(("nvfp4", "nvfp4"), True, True)),
    ("fp8_e4m3/nvfp4+ends=bf16/fp16+rotated", Recipe(("fp8_e4m3", "nvfp4"), True, False, ("bf16", "fp16"))),
])  # fmt: skip
def test_a_word_is_a_recipe(word, want):
    assert recipe(word) == want
    assert recipe(word).plain == (word == "nvfp4")


@pytest.mark.parametrize(("word", "message"), [
    ("int3", "want one of bf16, .*, or K/V of two, got 'int3'"),
    ("bf16/fp16/bf16", "or K/V of two, got 'bf16/fp16/bf16'"),
    ("bf16+turned", r"want \+rotated, \+channels or \+ends=FORMAT once each, got \+turned"),
    ("bf16+rotated+rotated", r"once each, got \+rotated"),
    ("bf16+ends=", r"once each, got \+ends="),
    ("fp8_ds_mla+rotated", r"want formats of K/V caches \(bf16, .*\) for 'fp8_ds_mla\+rotated'"),
])  # fmt: skip
def test_a_word_that_is_none_is_refused(word, message):
    with pytest.raises(ValueError, match=message):
        recipe(word)


def test_a_search_tries_mixes_of_few_bits_and_leaves_latents_alone():
    words = searched(list(KV_FORMATS))
    assert set(KV_FORMATS) < set(words)
    assert {"int8_per_token_head/nvfp4", "nvfp4+rotated", "nvfp4+ends=int8_per_token_head"} < set(words)
    assert all(recipe(w) for w in words)
    assert searched(list(LATENT_FORMATS)) == list(LATENT_FORMATS)
    assert searched(["bf16", "nvfp4"]) == ["bf16", "nvfp4"]  # nothing to mix with


def test_the_frontier_is_what_nothing_else_beats():
    found = [Measured(name, nbytes, kl=kl) for name, nbytes, kl in (
        ("a", 100, 0.0), ("b", 50, 0.2), ("c", 50, 0.1), ("d", 60, 0.1), ("e", 70, 0.05), ("f", 110, 0.0)
    )]  # fmt: skip
    result = ModelResult("m", 1, 1, "", [*found, Measured("g", unsupported="no")])
    assert [m.format for m in frontier(result)] == ["c", "e", "a"]


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


def outliers(model) -> None:
    """Two rotary pairs of each head's keys 20 times larger, and of its queries smaller: the model stays what it is."""
    c = model.config
    for layer in model.layers:
        for projection, heads, by in ((layer.k_proj, c.num_kv_heads, 20.0), (layer.q_proj, c.num_q_heads, 1 / 20)):
            rows = projection.weight.view(heads, c.head_dim, -1)
            for channel in (3, 11):
                rows[:, [channel, channel + c.head_dim // 2]] *= by


@torch.inference_mode()
def test_outlier_channels_are_what_rotation_and_channel_scales_are_for():
    """K-side outliers cost int8 tens of times; a rotation takes most of it back, and calibrated channel scales all."""
    words = [f"{f}{more}" for f in ("int8_per_token_head", "nvfp4") for more in ("", "+rotated", "+channels")]
    tokens, kl = text.encode(text.heldout_text())[:513], []
    for change in (lambda model: None, outliers):
        subject = BuiltIn("llama")
        change(subject.model)
        found = measure(subject, tokens, Settings(generate=2), words).formats
        kl.append({m.format: m.kl for m in found})
    plain, hurt = kl
    assert hurt["int8_per_token_head"] > 20 * plain["int8_per_token_head"]
    assert hurt["int8_per_token_head+rotated"] < 0.4 * hurt["int8_per_token_head"]
    for format in ("int8_per_token_head", "nvfp4"):
        assert hurt[f"{format}+channels"] < 1.3 * plain[f"{format}+channels"]
        assert hurt[f"{format}+channels"] < 0.2 * hurt[format]
