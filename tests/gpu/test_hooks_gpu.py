"""Triton's hooks and a profiler see every launch; what the driver refuses is told with the call that met it."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import tersekv
from tersekv.backends.host import bind, launch
from tersekv.backends.triton import append
from tersekv.dispatch import launch_cache, plan

CUDA, BF = "cuda", torch.bfloat16
B, PAGES, S, CALLS = 4, 24, 64, 5
FORMATS = ("bf16", "fp8_e4m3", "int8_per_token_head", "nvfp4")


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA, dtype=BF)


def pages() -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.randperm(PAGES, device=CUDA)[: B * 6].view(B, 6).int()
    return table, torch.tensor([1, 64, 130, 384], device=CUDA, dtype=torch.int32)


def decode(format: str, backend: str | None = None, heads: int = 2, group: int = 4) -> Callable[[], torch.Tensor]:
    layer = tersekv.PagedKVCache.allocate(1, PAGES, S, heads, 128, format=format, device=CUDA)[0]
    k, v = rows(PAGES * S, heads, 128), rows(PAGES * S, heads, 128)
    tersekv.append(k, v, layer, torch.arange(PAGES * S, device=CUDA))
    q, (table, lens) = rows(B, group * heads, 128), pages()
    return lambda: tersekv.decode(q, layer, table, lens, backend=backend)


def append_rows(format: str) -> Callable[[], torch.Tensor]:
    layer = tersekv.PagedKVCache.allocate(1, PAGES, S, 2, 128, format=format, device=CUDA)[0]
    layer.k.view(torch.uint8).zero_()
    k, v, slots = rows(B, 2, 128), rows(B, 2, 128), torch.arange(B, device=CUDA)

    def call():
        tersekv.append(k, v, layer, slots)
        return layer.k.view(torch.uint8).clone()

    return call


def mla_decode(backend: str | None = None) -> Callable[[], torch.Tensor]:
    layer = tersekv.PagedLatentCache.allocate(1, PAGES, S, format="fp8_e4m3", device=CUDA)[0]
    tersekv.mla_append(rows(PAGES * S, 512), rows(PAGES * S, 64), layer, torch.arange(PAGES * S, device=CUDA))
    q, (table, lens) = rows(B, 16, 576), pages()
    return lambda: tersekv.mla_decode(q, layer, table, lens, softmax_scale=0.07, backend=backend)


CASES = {
    **{f"decode {f}": (decode, f) for f in FORMATS},
    "decode triton": (decode, "fp8_e4m3", "triton"),
    **{f"append {f}": (append_rows, f) for f in FORMATS},
    "mla_decode": (mla_decode,),
    "mla_decode triton": (mla_decode, "triton"),
}


class Watch:
    """Hooks around launches."""

    def __init__(self) -> None:
        self.entered: list[dict] = []
        self.left: list[dict] = []

    def enter(self, told: Any) -> None:
        self.entered.append(told.get())

    def leave(self, told: Any) -> None:
        self.left.append(told.get())

    def __enter__(self) -> Watch:
        triton.knobs.runtime.launch_enter_hook.add(self.enter)
        triton.knobs.runtime.launch_exit_hook.add(self.leave)
        return self

    def __exit__(self, *error: object) -> None:
        triton.knobs.runtime.launch_enter_hook.remove(self.enter)
        triton.knobs.runtime.launch_exit_hook.remove(self.leave)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("warm", [False, True], ids=["from the first launch", "from a later one"])
def test_hooks_are_called_at_every_launch(case, warm):
    make, *options = CASES[case]
    call = make(*options)
    want = call()
    for memory in (plan._plans, plan._recent, launch_cache._launches, launch_cache._recent):
        memory.clear()
    for _ in range(3 * warm):
        call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    seen = []
    for _ in range(CALLS):
        with Watch() as watch, torch.cuda.stream(stream):
            got = call()
        stream.synchronize()
        assert torch.equal(got, want)
        assert watch.entered == watch.left
        assert watch.entered
        assert all(x.keys() == {"name", "function", "stream"} for x in watch.entered)
        assert {x["stream"] for x in watch.entered} == {stream.cuda_stream}
        seen.append([(x["name"], x["function"]) for x in watch.entered])
    assert seen == [seen[0]] * CALLS
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    launched = Counter(e.name for e in profile.events() if e.name.endswith("_kernel"))
    assert Counter(name for name, _ in seen[0]) == launched


def test_hooks_of_the_compiler_get_json():
    data: list[dict] = []
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_post_compile_hook = lambda *, compile, **more: data.append(
            json.loads(compile["specialization_data"])
        )
        for backend in (None, "triton"):
            decode("fp8_e4m3", backend, heads=7, group=3)()  # of no other test
    names = [x["name"].rpartition(".")[2] for x in data]
    assert {"decode_small_m_or_shared_tiles_kernel", "stream_k_decode_kernel"} <= set(names)
    records = [v for x in data for v in x["constant_vals"] if isinstance(v, dict)]
    assert {7} <= {r.get("HEADS") for r in records}


def test_a_captured_graph_has_called_them_once():
    call = decode("fp8_e4m3")
    want = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with Watch() as watch:
        with torch.cuda.graph(graph):
            got = call()
        captured = len(watch.entered)
        graph.replay()
        torch.cuda.synchronize()
    assert captured == len(watch.entered) == len(watch.left) > 0
    assert torch.equal(got, want)


def counts(node: dict) -> Counter:
    found = Counter({node["frame"]["name"]: node["metrics"].get("count", 0)})
    for child in node["children"]:
        found += counts(child)
    return found


def apart(target: Callable[..., None], *args: Any) -> None:
    """Run in a process of its own: CUPTI has one subscriber, and PyTorch's generator stays in a capture that fails."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0


def count_by_proton(profile: str) -> None:
    import triton.profiler as proton

    call = decode("fp8_e4m3", "triton")
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with Watch() as watch:  # beside Proton's own
        proton.start(profile, hook="triton")
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
        proton.finalize()
    with open(f"{profile}.hatchet") as f:
        (root, *_) = json.load(f)
    found, wanted = counts(root), Counter(x["name"] for x in watch.entered)
    assert set(wanted.values()) == {CALLS}
    assert {name: found[name] for name in wanted} == wanted


def test_proton_counts_every_launch(tmp_path):
    apart(count_by_proton, str(tmp_path / "profile"))


@triton.jit
def store_kernel(X):
    tl.store(X, 0.0)


def refused_append() -> Callable[[], torch.Tensor]:
    """An append whose grid has more rows than the driver takes."""
    for memory in (plan._plans, plan._recent):
        memory.clear()
    append.configure = lambda f: bind.LaunchSequence(
        bind.KernelLaunch(store_kernel, (1, 70000), bind.tensor_args(X="k"))
    )
    return append_rows("fp8_e5m2")


@pytest.fixture
def refused(monkeypatch):
    monkeypatch.setattr(append, "configure", append.configure)
    yield refused_append()
    plan._plans.clear()
    plan._recent.clear()


def assert_told(e: BaseException) -> None:
    head, call, versions, why, _ = str(e).splitlines()
    chip = "sm_{}{}".format(*torch.cuda.get_device_capability())
    assert head == f"append on {chip} by backend triton: kernel store_kernel cannot be compiled or launched"
    assert call.startswith("  call: k [4, 2, 128] bfloat16, ")
    assert call.endswith("; fp8_e5m2")
    assert f"Triton {triton.__version__}" in versions
    assert why.startswith("  why: RuntimeError: Triton Error [CUDA]: invalid")


@pytest.mark.parametrize("compiled", [False, True])
def test_what_the_driver_refuses_is_told(refused, compiled):
    call = torch.compile(refused, backend="eager") if compiled else refused
    with pytest.raises(tersekv.KernelError) as raised:
        call()
    assert_told(raised.value)


def test_a_later_launch_that_the_driver_refuses():
    one, x = launch.CompiledKernel(store_kernel), rows(1)
    one.compile_launch_and_keep_launcher((1, 1, 1), (x,))
    with pytest.raises(RuntimeError, match="Triton Error") as raised:
        one.relaunch([*one.leading_args((1, 70000, 1)), x.data_ptr()])
    assert raised.value.kernel == "store_kernel"
    one.relaunch([*one.leading_args((1, 1, 1)), x.data_ptr()])
    torch.cuda.synchronize()


def refuse_in_a_capture() -> None:
    refused = refused_append()
    with pytest.raises(tersekv.KernelError):
        refused()  # what is compiled and loaded in a capture is another matter
    with pytest.raises(RuntimeError) as raised, torch.cuda.graph(torch.cuda.CUDAGraph()):
        refused()
    told = [e for e in (raised.value, raised.value.__context__) if isinstance(e, tersekv.KernelError)]
    assert_told(told[0])


def test_what_the_driver_refuses_in_a_capture_is_told():
    apart(refuse_in_a_capture)
