"""benchmarks/tiered_pool.py: the simulated chats find more with a tier, and wait less."""

from __future__ import annotations

from script import script

LINE = {"fixed": 1e-4, "per_token": 1e-6}
TIMES = {
    "prefill": {"fixed": 1e-2, "per_token": 2e-5, "per_pair": 1e-9},
    "tiers": {"bf16": {"page_bytes": 1 << 23, "away": LINE, "back": LINE}},
}


def test_a_tier_finds_more(monkeypatch):
    bench = script("benchmarks/tiered_pool.py")
    monkeypatch.setattr(bench, "TURNS", 40)
    monkeypatch.setattr(bench, "HOT_BYTES", 6e9)
    none, some, all_ = (bench.simulate(TIMES, *tier) for tier in ((None, 0.0), ("bf16", 1e9), ("bf16", 16e9)))
    assert none["hit_rate_cold"] == none["host_tokens"] == 0
    assert none["turns"] == some["turns"] == all_["turns"] >= 40
    assert none["hit_rate"] < some["hit_rate"] < all_["hit_rate"]
    assert all_["ttft_mean"] < none["ttft_mean"]
    assert some["cold_pages_used"] <= 1e9 / (1 << 23)
