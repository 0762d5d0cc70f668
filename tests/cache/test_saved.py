"""Files of attributes: whatever of one is changed is an error that names the file and the entry, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tersekv import PagedKVCache, append
from tersekv.layers import PagedKVLayer

H, D, DV = 3, 48, 32
Entries = dict[str, Any]  # metadata as it is in JSON, by "sizes.head_dim", "layers.0.format" …; tensors by name


def saved(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    cache = PagedKVCache.allocate(
        3, 2, 4, H, D, head_dim_v=DV, layer_formats=["fp8_e4m3", ("nvfp4", "int8_per_token_head"), "bf16"],
        rotation=("hadamard", None), k_channel_scale=torch.rand(H, D) + 0.5, v_channel_scale=torch.rand(3, H, DV) + 0.5,
    )  # fmt: skip
    layers = [
        PagedKVLayer(x.k, x.v, x.format, *scales, x.k_scale_cache, x.v_scale_cache, x.k_signs, x.v_signs,
                     x.k_channel_scale, x.v_channel_scale)
        for x, scales in zip(cache.layers, ((0.5, torch.rand(H) + 0.5), (torch.rand(1) + 0.5, 1.0), (1.0, 1.0)),
                             strict=True)
    ]  # fmt: skip
    PagedKVCache(layers, D, DV).save_attributes(path)
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def refused(path: Path, *named: str) -> None:
    """Loading raises a ValueError that names the file, the entry, what was wanted and what came."""
    with pytest.raises(ValueError, match=r"want .+, got .+") as e:
        PagedKVCache.allocate_saved(path, 2, 4)
    assert str(e.value).startswith(f"{path}: ")
    assert any(name in str(e.value) for name in named), (named, str(e.value))


# What no entry of the file may be.
NUMBERS = (float("nan"), 0, -1.0, float("inf"), 1e-46, 1e39, "1.0", True, None, [1.0], {}, "tensor", 10**400)
SIZES = (0, -8, 7, 1 << 40, 1 << 70, 8.0, "8", True, None, [8])
FORMATS = ("fp8", "", 3, None, [], ["bf16"], ["bf16", 3], ["bf16", "bf16", "bf16"], {"k": "bf16"}, [["bf16"], "bf16"])


def of_metadata() -> Iterator[tuple[tuple[str, ...], Callable[[dict], None]]]:
    """(names that the error may have, change) for each entry of the metadata and each change of it."""

    def put(place: tuple, value: Any) -> Callable[[dict], None]:
        def change(told: dict) -> None:
            for step in place[:-1]:
                told = told[step]
            told[place[-1]] = value

        return change

    def drop(place: tuple, to: str | None = None) -> Callable[[dict], None]:
        def change(told: dict) -> None:
            for step in place[:-1]:
                told = told[step]
            value = told.pop(place[-1])
            if to is not None:
                told[to] = value

        return change

    for size in ("num_kv_heads", "head_dim", "head_dim_v"):
        place = "sizes", size
        yield from (((f"sizes.{size}", "sizes", "0.v_scale"), put(place, x)) for x in SIZES)
        yield ("sizes",), drop(place)
        yield ("sizes",), drop(place, "dim")
    yield ("0.v_scale",), put(("sizes", "num_kv_heads"), H + 1)
    yield ("k_signs", "k_channel_scale"), put(("sizes", "head_dim"), D * 2)
    yield ("sizes",), put(("sizes", "more"), 1)
    for entry in ("sizes", "layers"):
        yield (entry,), drop((entry,))
        yield (entry,), drop((entry,), "other")
        for x in (None, 3, "x", [], {}, [3], [None], [[]]):
            yield (entry, "layers.0"), put((entry,), x)
    yield ("layers.3", "3."), lambda told: told["layers"].append(told["layers"][0])
    yield ("2.",), lambda told: told["layers"].pop()
    for i in range(3):
        of_layer = f"layers.{i}"
        yield from (((f"{of_layer}.format",), put(("layers", i, "format"), x)) for x in FORMATS)
        for name in ("format", "k_scale", "v_scale"):
            yield (of_layer,), drop(("layers", i, name))
            yield (of_layer,), drop(("layers", i, name), "k")
        for name in ("k_scale", "v_scale"):
            its_own = "tensor" if (i, name) in ((0, "v_scale"), (1, "k_scale")) else None
            named = f"{of_layer}.{name}", f"{i}.{name}"
            yield from ((named, put(("layers", i, name), x)) for x in NUMBERS if x is None or x != its_own)
        for name in ("k_signs", "k_channel_scale", "v_channel_scale"):
            yield (f"{i}.{name}",), drop(("layers", i, name))
            yield (f"{i}.", of_layer), drop(("layers", i, name), "v_signs")
            yield from (((f"{of_layer}.{name}",), put(("layers", i, name), x)) for x in (1.0, None, "x", []))
        yield (of_layer,), put(("layers", i, "v"), "tensor")
        yield (f"{i}.v_signs",), put(("layers", i, "v_signs"), "tensor")
    yield ("layers.1.v_scale",), put(("layers", 1, "v_scale"), 3.0)  # int8 has no scale of the tensor
    yield ("layers.2.k_scale",), put(("layers", 2, "k_scale"), 0.5)


METADATA = [*of_metadata()]


def parsed(told: dict[str, str]) -> dict:
    return {name: text if name == "tersekv" else json.loads(text) for name, text in told.items()}


def text(told: dict) -> dict[str, str]:
    return {name: x if name == "tersekv" else json.dumps(x) for name, x in told.items()}


@pytest.mark.parametrize("part", range(4))
def test_metadata_that_was_changed_is_refused(part, tmp_path):
    told, tensors = saved(tmp_path / "x")
    for named, change in METADATA[part::4]:
        changed = parsed(told)
        change(changed)
        save_file(tensors, tmp_path / "y", text(changed))
        refused(tmp_path / "y", *named)


@pytest.mark.parametrize("words", ["", "{", "[" * 10**5, "NaN", "9" * 5000, '{"num_kv_heads": 1}', "\x00"])
@pytest.mark.parametrize("entry", ["sizes", "layers"])
def test_metadata_that_is_no_json_is_refused(entry, words, tmp_path):
    told, tensors = saved(tmp_path / "x")
    save_file(tensors, tmp_path / "x", {**told, entry: words})
    refused(tmp_path / "x", entry)


@pytest.mark.parametrize("kind", [None, "", "attributes of a PagedKVCache, 1", "attributes of a PagedKVCache, 20"])
def test_a_file_that_says_it_is_another_is_refused(kind, tmp_path):
    told, tensors = saved(tmp_path / "x")
    del told["tersekv"]
    save_file(tensors, tmp_path / "x", told if kind is None else {**told, "tersekv": kind})
    refused(tmp_path / "x", "save_attributes")


def spoilt(x: Tensor, value: float) -> Tensor:
    out = x.clone()
    out.view(-1)[-1] = value
    return out


TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "NaN": lambda x: spoilt(x, torch.nan),
    "inf": lambda x: spoilt(x, torch.inf),
    "zero": lambda x: spoilt(x, 0.0),
    "longer": lambda x: torch.cat([x, x], -1),
    "shorter": lambda x: x[..., :-1].clone(),
    "a dimension more": lambda x: x[None].clone(),
    "two dimensions more": lambda x: x[None, None].clone(),
    "flat": lambda x: x.flatten()[: x.numel() - 3].clone(),
    "float64": lambda x: x.double(),
    "bfloat16": lambda x: x.bfloat16(),
    "int32": lambda x: x.to(torch.int32),
    "bool": lambda x: x.bool(),
    "complex": lambda x: x.to(torch.complex64),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "none of it": lambda x: x[..., :0].clone(),
}
KEYS = [f"{i}.{name}" for i in range(3) for name in ("k_signs", "k_channel_scale", "v_channel_scale")]
KEYS += ["0.v_scale", "1.k_scale"]


@pytest.mark.parametrize("key", KEYS)
def test_tensors_that_were_changed_are_refused(key, tmp_path):
    told, tensors = saved(tmp_path / "x")
    assert set(tensors) == set(KEYS)
    path = tmp_path / "y"
    for change in TENSORS.values():
        save_file({**tensors, key: change(tensors[key])}, path, told)
        refused(path, key)
    rescaled = (2.0,) if key.endswith("signs") else (-1.0, 1e-46, 1e39)
    for factor in rescaled:
        save_file({**tensors, key: tensors[key] * factor}, path, told)
        refused(path, key)
    others = {name: x for name, x in tensors.items() if name != key}
    save_file(others, path, told)
    refused(path, key)
    for name in ("0.k", "0.v", "0.format", "3.k_signs", "00.k_signs", "-1.k_signs", "x.k_signs", "0", "", ".", "0.k.s",
                 "0.k_scale_cache", "9" * 5000, "0.v_signs"):  # fmt: skip
        for kept in (others, tensors):
            save_file({**kept, name: tensors[key].clone()}, path, told)
            refused(path, key, name)


def test_a_file_that_was_cut_or_has_other_bytes_is_refused_or_as_good_as_new(tmp_path):
    saved(tmp_path / "x")
    whole, path = (tmp_path / "x").read_bytes(), tmp_path / "y"
    for n in (*range(0, len(whole), 97), len(whole) - 1):
        path.write_bytes(whole[:n])
        refused(path, "want a safetensors file")
    path.write_bytes(whole + b"\0")
    refused(path, "want a safetensors file")

    @settings(max_examples=300, deadline=None, database=None)
    @given(st.integers(0, len(whole) - 1), st.binary(min_size=1, max_size=4))
    def spoil(at: int, put: bytes) -> None:
        path.write_bytes(whole[:at] + put + whole[at + len(put) :])
        told = ""
        try:
            PagedKVCache.allocate_saved(path, 2, 4)
        except ValueError as e:
            told = str(e)
        assert not told or told.startswith(f"{path}: ")

    spoil()


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
NAMES = st.text() | st.sampled_from(["format", "k_scale", "head_dim"])
JSON = st.recursive(LEAVES, lambda x: st.lists(x) | st.dictionaries(NAMES, x))
PLACES = ("sizes", "layers", "sizes.head_dim", "layers.0", "layers.1.format", "layers.2.k_scale")


@settings(max_examples=60, deadline=None, database=None)
@given(JSON, st.sampled_from(PLACES))
def test_any_json_in_place_of_an_entry_is_refused_by_name(tmp_path_factory, value, place):
    folder = tmp_path_factory.mktemp("saved")
    told, tensors = saved(folder / "x")
    changed: Any = parsed(told)
    before, (*steps, last) = json.dumps(changed), place.split(".")
    holder = changed
    for step in steps:
        holder = holder[int(step) if step.isdigit() else step]
    holder[int(last) if last.isdigit() else last] = value
    save_file(tensors, folder / "y", text(changed))
    if json.dumps(changed) == before or (place.endswith("k_scale") and value == 1 and not isinstance(value, bool)):
        PagedKVCache.allocate_saved(folder / "y", 2, 4)
    else:
        refused(folder / "y", place, *steps[:1])


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, np.int64, int])
def test_a_scale_that_an_append_takes_is_saved(kind, tmp_path):
    k, v = torch.zeros(2, 4, 1, 16).to(torch.float8_e4m3fn), torch.zeros(2, 4, 1, 16).to(torch.float8_e4m3fn)
    layer = PagedKVLayer.of((k, v), k_scale=kind(2), v_scale=torch.tensor(3.0))
    append(torch.ones(1, 1, 16), torch.ones(1, 1, 16), layer, torch.tensor([0]))
    PagedKVCache([layer], 16, 16).save_attributes(tmp_path / "x")
    back = PagedKVCache.allocate_saved(tmp_path / "x", 2, 4)[0]
    assert (type(back.k_scale), back.k_scale, back.v_scale.item()) == (float, 2.0, 3.0)


def test_options_that_do_not_fit_are_the_callers_and_not_the_files(tmp_path):
    saved(tmp_path / "x")
    for options, told in (({"layout": "X"}, "layout"), ({"scales": "X"}, "scales"), ({"packed": True}, "packed")):
        with pytest.raises(ValueError, match=f"^{told}: want"):
            PagedKVCache.allocate_saved(tmp_path / "x", 2, 4, **options)
    with pytest.raises(ValueError, match=r"^num_pages: want"):
        PagedKVCache.allocate_saved(tmp_path / "x", 0, 4)
    for own in ({"rotation": "hadamard"}, {"k_scale": 2.0}, {"k_channel_scale": None}):  # the file's
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(own))}'"):
            PagedKVCache.allocate_saved(tmp_path / "x", 2, 4, **own)


def test_a_file_is_there_whole_or_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "file"
    saved(path)
    before = path.read_bytes()

    def refuse(self, target):
        assert path.read_bytes() == before  # nothing is written in place
        raise OSError("no place")

    with monkeypatch.context() as m:
        m.setattr(Path, "replace", refuse)
        with pytest.raises(OSError, match="no place"):
            saved(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    saved(path)
    assert path.read_bytes() != before  # channel scales are drawn anew
