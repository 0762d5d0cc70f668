"""Triton's own launcher and ours give its function in C the same, on whichever version this is."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.nvidia import driver as nvidia
from triton.tools.tensor_descriptor import TensorDescriptor

from tersekv.backends.host import versions
from tersekv.backends.host.launch import CompiledKernel

FUNCTION, METADATA, STREAM = 1234, (4, 1, 0), 77


class Calls(list):
    """Stands for the function in C: what it is called with."""

    def __call__(self, *args) -> None:
        self.append(args)


@pytest.fixture
def calls():
    return Calls()


@pytest.fixture(autouse=True)
def _no_device(monkeypatch):
    """A driver without a device, whose tensor maps are what they are made of."""
    encode = lambda *args: ("map", *(tuple(x) if isinstance(x, list) else x for x in args))  # noqa: E731
    utils = SimpleNamespace(fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))


def compiled(calls: Calls, signature: dict, metas: list, **changes):
    """A compiled kernel as Triton has it, but for its function in C, which notes what it is given."""
    run = object.__new__(nvidia.CudaLauncher)
    given = {
        "launch": nvidia.wrap_handle_tensordesc(calls, signature, metas),
        "num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": True, "gsan_enabled": False,
        "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0, "profile_scratch_align": 1,
        "arg_annotations": ["annotations"], "kernel_signature": b"signature",
    }  # fmt: skip
    for name, value in (given | changes).items():
        setattr(run, name, value)
    meta = SimpleNamespace(tensordesc_meta=metas)
    return SimpleNamespace(run=run, function=FUNCTION, packed_metadata=METADATA, metadata=meta)


def by_triton(k, *args, told=(None, None, None)) -> None:
    k.run(5, 6, 7, STREAM, FUNCTION, METADATA, *told, *args)


def by_us(k, *args) -> versions.Launcher:
    found = versions.make_launcher_record(k)
    found.run(5, 6, 7, STREAM, *found.fixed_args, *args)
    return found


def plain(call: tuple) -> tuple:
    """The kernel's arguments come as a list or a tuple."""
    return tuple(tuple(x) if isinstance(x, list) else x for x in call)


def test_a_kernel_of_addresses_and_numbers(calls):
    k = compiled(calls, {0: "*fp32", 1: "i32", 2: "constexpr", 3: ("i32", "i32")}, [])
    args = (4096, 3, "constant", (1, 2))
    by_triton(k, *args)
    found = by_us(k, *args)
    assert len(calls) == 2
    assert plain(calls[0]) == plain(calls[1])
    assert found.encode is not None, "the function in C itself"
    assert found.run != k.run


def descriptors() -> list[TensorDescriptor]:
    x, y = torch.zeros(64, 32, dtype=torch.float16), torch.zeros(8, 16, 32, dtype=torch.uint8)
    return [TensorDescriptor.from_tensor(x, [16, 32]), TensorDescriptor.from_tensor(y, [1, 16, 32])]


METAS = [
    {"swizzle": 2, "elem_size": 2, "elem_type": 6, "block_size": [16, 32], "fp4_padded": False},
    {"swizzle": 1, "elem_size": 1, "elem_type": 0, "block_size": [1, 16, 32], "fp4_padded": False},
]
DESCRIBED = {0: "*fp32", 1: "tensordesc<fp16[16, 32]>", 2: "tensordesc<u8[1, 16, 32]>", 3: "i32"}


def test_a_kernel_of_descriptors(calls):
    """They are encoded once, and then take as many places as Triton's launcher would give them."""
    k, (x, y) = compiled(calls, DESCRIBED, METAS), descriptors()
    by_triton(k, 4096, x, y, 3)
    first, second = versions.make_launcher_record(k).encode([x, y], METAS)
    assert first[0][:2] == ("map", x.base.data_ptr())
    assert (len(first), len(second)) == (5, 7)
    by_us(k, 4096, *first, *second, 3)
    assert plain(calls[0]) == plain(calls[1])


def test_hooks_and_what_they_are_told_go_where_triton_puts_them(calls):
    k = compiled(calls, {0: "i32"}, [])
    by_triton(k, 3, told=("told", "enter", "leave"))
    found = versions.make_launcher_record(k)
    args = [5, 6, 7, STREAM, *found.fixed_args, 3]
    args[found.hooks_index : found.hooks_index + 3] = "told", "enter", "leave"
    found.run(*args)
    assert plain(calls[0]) == plain(calls[1])


class Other(nvidia.CudaLauncher):
    """A launcher that takes its arguments in another order, as one of a coming version may."""

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        self.launch(stream, gridX, gridY, gridZ, function, *args)


class Late(nvidia.CudaLauncher):
    """One that gives more behind the kernel's arguments."""

    def __call__(self, gridX, gridY, gridZ, stream, function, metadata, told, enter, leave, *args):
        self.launch(gridX, gridY, gridZ, stream, function, metadata, told, enter, leave, *args, "and more")


@pytest.mark.parametrize("kind", [Other, Late])
def test_an_order_that_is_not_understood_is_left_to_tritons_launcher(calls, kind):
    k = compiled(calls, {0: "*fp32", 1: "tensordesc<fp16[16, 32]>"}, METAS[:1])
    k.run.__class__ = kind
    found = versions.make_launcher_record(k)
    assert found == (k.run, (FUNCTION, METADATA, None, None, None), 6, None)


def test_scratch_that_triton_allocates_is_left_to_tritons_launcher(calls):
    for name in ("global_scratch_size", "profile_scratch_size"):
        k = compiled(calls, {0: "i32"}, [], **{name: 64})
        assert versions.make_launcher_record(k).run is k.run


def test_a_launcher_that_looks_different_is_told_to_the_log(calls, caplog):
    k = compiled(calls, {0: "i32"}, [])
    del k.run.global_scratch_size
    with caplog.at_level(logging.DEBUG, logger="tersekv"):
        assert versions.make_launcher_record(k).run is k.run
    assert "global_scratch_size" in caplog.text


def test_a_launch_uses_it_from_the_second_time_on(calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    k, (x, y) = compiled(calls, DESCRIBED, METAS), descriptors()
    launch = CompiledKernel({(5, 6, 7): lambda *args, **options: k})
    t = torch.zeros(4)
    launch.compile_launch_and_keep_launcher((5, 6, 7), (t, x, y, 3))
    assert not calls, "by Triton"
    first, second = launch.launcher_args_of_tensor_maps([x, y])
    launch.relaunch([*launch.leading_args((5, 6, 7)), t.data_ptr(), *first, *second, 3])
    by_triton(k, t.data_ptr(), x, y, 3)
    assert plain(calls[0]) == plain(calls[1])


@pytest.mark.parametrize(("version", "wanted"), [
    ("3.6.0", True), ("3.7.1", True), ("3.9.0", True), ("3.9.12", True), ("3.8.0.post1", True),
    ("3.5.1", False), ("3.10.0", False), ("4.0.0", False), ("3.9.0+git1234", False), ("3.7.0a1", False), ("", False),
])  # fmt: skip
def test_what_counts_as_tested(version, wanted):
    assert versions.is_tested(version) is wanted


def test_every_version_is_asked_for_the_same():
    """Whatever its default is: products and sums join, and ptxas allocates Gluon's registers at its own level."""
    triton_kernel, gluon_kernel = SimpleNamespace(is_gluon=lambda: False), SimpleNamespace(is_gluon=lambda: True)
    assert CompiledKernel(triton_kernel, num_warps=2).options == {"enable_fp_fusion": True, "num_warps": 2}
    assert CompiledKernel(gluon_kernel).options == {"enable_fp_fusion": True, "ptx_options": "--regAllocOptLevel=4"}
