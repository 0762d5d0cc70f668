"""An indexer's operations called again and again, and compiled."""

from __future__ import annotations

import torch

import tersekv
from tersekv.dispatch import launch_cache
from tersekv.testing import verify
from tersekv.testing.cases import cases


def step(q, w, k, layer, slots, table, lens, backend=None):
    tersekv.index_append(k * 2, layer, slots, backend=backend)
    q8, w32 = tersekv.index_query(q, w, cache=layer, backend=backend)
    return tersekv.index_select(q8, w32, layer, table, lens, 5, keep_last=1, backend=backend)


def inputs(seed):
    torch.manual_seed(seed)
    layer = tersekv.PagedIndexCache.allocate(1, 4, 16)[0]
    tersekv.index_append(torch.randn(64, 128), layer, torch.arange(64))
    table = torch.randperm(4).view(2, 2)
    lens = torch.randint(5, 32, (2,))
    slots = table[torch.arange(2), (lens - 1) // 16] * 16 + (lens - 1) % 16
    return torch.randn(2, 8, 128), torch.randn(2, 8), torch.randn(2, 128), layer, slots, table, lens


def test_repeated_calls_read_new_tensors():
    for seed in range(4):
        got = step(*inputs(seed))
        want = step(*inputs(seed), backend="torch")
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


def test_a_native_call_is_cached_and_gives_new_outputs():
    launch_cache._launches.clear()
    launch_cache._recent.clear()
    scores, visible = torch.randn(2, 3, 40), torch.tensor([40, 7, 3])
    first = tersekv.index_topk(scores[0], visible, 5)
    second = tersekv.index_topk(scores[1], visible, 5)
    if first.data_ptr() == second.data_ptr():
        raise AssertionError("outputs share memory")
    assert torch.equal(second, tersekv.index_topk(scores[1], visible, 5, backend="torch"))
    assert torch.equal(first, tersekv.index_topk(scores[0], visible, 5, backend="torch"))


def test_a_step_compiles_whole():
    torch._dynamo.reset()

    def pages_step(q, w, k, pages, slots, table, lens):
        return step(q, w, k, tersekv.PagedIndexLayer.from_buffer(pages), slots, table, lens)

    found = []
    for run in (pages_step, torch.compile(pages_step, fullgraph=True, backend="aot_eager")):
        q, w, k, _, slots, table, lens = inputs(1)
        pages = torch.zeros(4, 16, 132, dtype=torch.uint8)
        found.append((*run(q, w, k, pages, slots, table, lens), pages))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_every_instruction_set_scores_alike(request):
    from tersekv.backends.cpu import library

    native = library.load_compiled_library_or_reason()
    if isinstance(native, str):
        return
    level = native.level()
    request.addfinalizer(lambda: native.use_level(level))
    names = ("whole numbers", "D 256 H 8", "blocks of 3", "fp16 query", "open groups kept", "starts and ends")
    for case in cases(("index_scores", "index_select"), ("index_fp8", "fp16")):
        for other in native.levels() if case.name in names else ():
            native.use_level(other)
            result = verify.run(case, "cpu", "cpu")
            assert result.status == verify.PASSED, f"{other}: {result.message}"
