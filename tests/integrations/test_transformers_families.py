"""What comes of families of causal language models: a sample of what `benchmarks/transformers_families.py` tries."""

from __future__ import annotations

import json

import pytest
import torch
from script import ROOT, script

from tersekv.integrations import transformers as integration
from tersekv.integrations.transformers_static import StaticBook
from tersekv.integrations.transformers_store import KVStore

families = script("benchmarks/transformers_families.py")
STORED = json.loads((ROOT / "benchmarks" / "results" / "transformers_families.json").read_text())
KEPT = {row["family"]: row for row in STORED["rows"]}
WORK = (
    "bamba", "bart", "bert", "cohere2", "ctrl", "dbrx", "deepseek_v3", "gemma3_text", "gemma4_text", "glm4_moe", "gpt2",
    "gpt_bigcode", "gpt_oss", "hrm_text", "jamba", "lfm2_moe", "longcat_flash", "mimo_v2_flash", "minicpm3", "minimax",
    "modernbert-decoder", "nemotron_h", "opt", "phi3", "qwen3_next", "stablelm", "whisper", "zamba2", "zaya",
)  # fmt: skip
REFUSED = (
    "bigbird_pegasus", "bloom", "blt", "diffllama", "doge", "falcon", "git", "inkling_text", "jetmoe", "mamba", "moshi",
    "mpt", "phimoe", "rwkv", "xglm", "xlstm",
)  # fmt: skip

# Rewritten for the interface in transformers 5.24, or new there.
CHANGED = tuple(name for name in ("codegen", "deepseek_v32", "dory", "gptj", "hy_v4") if name in families.families())


@pytest.mark.parametrize("name", WORK)
def test_a_family_generates_what_eager_attention_generates(name):
    told = families.judge(name)
    assert told["found"] == families.WORKS, told
    assert all(told[format]["off"] < families.CLOSE for format in families.FORMATS)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_run_is_refused_by_name(name):
    told = families.judge(name)
    assert told["found"] == families.REFUSED, told
    assert script("scripts/families_table.py").reason(told["why"])


@pytest.mark.parametrize("name", CHANGED)
def test_a_family_of_the_newest_transformers_works_or_is_refused(name):
    told = families.judge(name)
    assert told["found"] in (families.WORKS, families.REFUSED), told


def test_what_is_kept_has_no_failure_and_the_page_shows_it():
    assert {row["found"] for row in KEPT.values()} == {families.WORKS, families.REFUSED, families.NOT_BUILT}
    assert all(KEPT[name]["found"] == families.REFUSED for name in (*REFUSED, "dory"))
    for path, text in script("scripts/families_table.py").wanted().items():
        assert path.read_text() == text, f"{path.name}: run `make table`"


def test_another_result_in_silence_is_a_failure(monkeypatch):
    right = KVStore.attend
    monkeypatch.setattr(KVStore, "attend", lambda self, *args: 1.05 * right(self, *args))
    told = families.judge("llama")
    assert told["found"] == families.FAILS
    assert "bf16: logits are off by" in told["why"]


def test_other_tokens_of_a_graph_are_a_failure(monkeypatch):
    right = StaticBook._slots
    monkeypatch.setattr(StaticBook, "_slots", lambda self, table, places: right(self, table, places) ^ 1)
    told = families.judge("llama", graphs=True)
    assert told["found"] == families.FAILS
    assert "compiled: logits are off by" in told["why"]


def test_a_cache_that_a_model_ignores_is_a_failure(monkeypatch):
    monkeypatch.setattr(families.TersekvCache, "get_seq_length", lambda self, layer_idx=0: 0)
    assert "the cache holds 0 tokens of 51" in families.judge("llama")["why"]


@pytest.mark.parametrize("error", [KeyError("tersekv"), families.UnsupportedError("not this model")])
def test_an_error_that_names_no_family_is_a_failure(monkeypatch, error):
    def attention(*args, **kwargs):
        raise error

    monkeypatch.setitem(integration.AttentionInterface._global_mapping, integration.ATTENTION, attention)
    assert families.judge("llama")["found"] == families.FAILS


def test_a_model_that_feels_no_format_judges_nothing(monkeypatch):
    def deaf(model, cache, attention):
        return torch.zeros(2, 12, dtype=torch.int64), torch.ones(2, 12, 97)

    monkeypatch.setattr(families, "generated", deaf)
    assert "its logits do not tell bf16 from fp8_e4m3" in families.judge("llama")["why"]
