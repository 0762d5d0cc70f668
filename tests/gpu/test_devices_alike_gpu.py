"""A GPU takes and refuses what a CPU does, in the same words, and MAX's short buffer gives the same result."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from max_step import Step
from mla_cases import relative

sys.path.insert(0, str(Path(__file__).parents[1] / "dispatch"))

import test_bad_calls as bad
from test_devices_alike import WRONG


def moved(x):
    """x with tensors of the same shapes and strides on the GPU."""
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    if dataclasses.is_dataclass(x):
        return dataclasses.replace(x, **{f.name: moved(getattr(x, f.name)) for f in dataclasses.fields(x)})
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(moved, x))
    return type(x)(map(moved, x)) if isinstance(x, (list, tuple)) else x


@pytest.mark.parametrize(("op", "changed", "message"), WRONG, ids=bad.names(WRONG))
def test_a_wrong_call_is_refused_in_the_words_of_a_cpu(op, changed, message):
    call = {name: moved(x) for name, x in {**bad.good(op), **changed}.items()}
    with pytest.raises((ValueError, TypeError)) as error:
        bad.VERBS[op](**call)
    assert str(error.value).replace("cuda:0", "cpu") == message


@pytest.mark.parametrize("rows", [15, 22])
def test_a_buffer_of_any_size_gives_what_it_gives_on_a_cpu(rows):
    cpu, gpu = Step(), Step()
    gpu.case.t.update({name: x.cuda() for name, x in gpu.case.t.items() if isinstance(x, torch.Tensor)})
    kv, (offsets, starts, _) = gpu.kv, gpu.buffer
    kv.blocks, kv.cache_lengths, kv.lookup_table = kv.blocks.cuda(), kv.cache_lengths.cuda(), kv.lookup_table.cuda()
    gpu.output, gpu.buffer = gpu.output.cuda(), (offsets.cuda(), starts.cuda(), rows)
    cpu.buffer = (offsets, starts, rows)
    cpu.prefill()
    gpu.prefill()
    assert relative(gpu.output.cpu(), cpu.output.double()) < 6e-3  # each is within 3e-3 of fp64
