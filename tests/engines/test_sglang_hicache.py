"""SGLang's real engine with its hierarchical cache: pages of every format go out to the host and come back."""

from __future__ import annotations

import pytest
import sglang_hicache  # noqa: F401
import torch
from checkpoints import YARN, deepseek, llama, text
from reference import Reference, hold, score_latents
from sglang_cpu import engine, generate, runner_of

from tersekv.integrations.sglang_attention import TersekvBackend
from tersekv.integrations.sglang_host import host_pool_class
from tersekv.integrations.sglang_pool import TersekvPool

OPTIONS = {
    "enable_hierarchical_cache": True, "hicache_ratio": 4.0, "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first", "hicache_write_policy": "write_through", "max_total_tokens": 640,
    "max_running_requests": 2, "disable_overlap_schedule": True,
}  # fmt: skip
FORMATS = {
    "bf16": 1, "fp8_e4m3": 16, "fp8_per_token_head": 16, "int8_per_token_head": 8, "nvfp4": 16,
    "fp8_e4m3/int4_per_token_head": 16, "int4_per_token_head/nvfp4+rotated+ends=int8_per_token_head": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("llama"))


def layers_of(format: str) -> list[str]:
    inner, _, ends = format.partition("+ends=")
    return [ends + "+rotated" if ends else inner, inner, inner, ends + "+rotated" if ends else inner]


def rounds(made, prompts):
    """Prompts that do not all have room in the pool, one after the other, twice."""
    first = [generate(made, [p], 6)[0][0] for p in prompts]
    again = [generate(made, [p + text(40, 5)], 6) for p in prompts]
    return first, [results[0] for results, _ in again], [told[0] for _, told in again]


@pytest.mark.parametrize("format", FORMATS)
def test_pages_come_back_from_the_host(model, format):
    page = FORMATS[format]
    prompts = [text(2900 * i + 31, 200) for i in range(5)]
    with engine(model, format, page_size=page, **OPTIONS) as made:
        first, again, told = rounds(made, prompts)
    details = [x["cached_tokens_details"] for x in told]
    assert all(x["cached_tokens"] >= 200 // page * page for x in told), told
    assert sum(d["host"] for d in details) >= 2 * (200 // page * page), details
    longer = [p + text(40, 5) for p in prompts]
    with engine(model, format, page_size=page, disable_radix_cache=True) as made:
        without = [generate(made, [p], 6)[0][0] for p in longer]
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in without]
    hold(again, [rows for _, rows in without])
    reference = Reference(model, layers_of(format))
    hold(first, [reference.score(p, tokens) for p, (tokens, _) in zip(prompts, first, strict=True)])


@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3", "fp8_ds_mla"])
def test_latents_come_back_from_the_host(format, tmp_path):
    """Over SGLang's own host pool, for which a row is a row."""
    prompts = [text(2900 * i + 31, 200) for i in range(5)]
    folder = deepseek(tmp_path, rope_parameters=YARN)
    with engine(folder, format, **OPTIONS) as made:
        first, again, told = rounds(made, prompts)
    assert sum(x["cached_tokens_details"]["host"] for x in told) >= 2 * 192
    hold(first, [score_latents(p, tokens, format) for p, (tokens, _) in zip(prompts, first, strict=True)])
    longer = [p + text(40, 5) for p in prompts]
    hold(again, [score_latents(p, tokens, format) for p, (tokens, _) in zip(longer, again, strict=True)])


def test_what_is_refused(monkeypatch):
    monkeypatch.setenv("TERSEKV_SGLANG_FORMAT", "nvfp4")
    pool = TersekvPool(
        size=32, page_size=16, dtype=torch.bfloat16, device="cpu", enable_memory_saver=False, head_num=2, head_dim=64,
        layer_num=2,
    )  # fmt: skip
    for option, value in (("hicache_io_backend", "kernel"), ("hicache_storage_backend", "file")):
        given = {"enable_hierarchical_cache": True, "hicache_io_backend": "direct", option: value}
        with pytest.raises(NotImplementedError, match=f"{option}: want .* got '{value}'"):
            TersekvBackend(runner_of(pool, **given))
    info = pool.get_device_pool_infos()[0].buffer_info
    host = host_pool_class(lambda _: None, info)(
        info, 2.0, 0, 16, "layer_first", device_capacity_tokens=32, start_layer=0, end_layer=1, pin_memory=False
    )
    assert host.size_per_token == sum(pool.get_kv_size_bytes()) // 48
    with pytest.raises(NotImplementedError, match="hicache_io_backend: want 'direct' for tersekv's host pool, got 'k"):
        host.backup_from_device_all_layer(pool, torch.arange(16), torch.arange(16), "kernel")
    with pytest.raises(NotImplementedError, match="speculative_algorithm: want no drafts' layers"):
        type(host)(
            info, 2.0, 0, 16, "layer_first", device_capacity_tokens=32, start_layer=0, end_layer=1,
            draft_buffer_infos=(info,),
        )  # fmt: skip
