"""Operations as registered torch operators: schemas, opcheck, torch.compile and torch.export."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

import tersekv
from tersekv.calls import CALLS
from tersekv.ops import registry
from tersekv.testing.cases import OPS, cases
from tersekv.testing.make import make

# opcheck compares every tensor with arithmetic that 8-bit floats do not have, hence these formats and cases.
CHECKED = [
    ("append", "bf16", "plain"),
    ("append", "int8_per_token_head", "hnd packed inline strided"),
    ("rope_append", "fp16", "partial interleaved"),
    ("rope_append", "int8_per_token_head", "rotated"),
    ("mla_append", "bf16", "rows only"),
    ("decode", "bf16", "drafts tree mask"),
    ("decode", "int8_per_token_head", "plain"),
    ("prefill", "bf16", "plain"),
    ("prefill", "int8_per_token_head", "new rows"),
    ("decode", "bf16", "rotated sinks window"),
    ("mla_decode", "fp16", "ragged drafts"),
    ("mla_prefill", "bf16", "16-bit weight"),
    ("mla_project", "bf16", "plain"),
    ("mla_decode_branch", "bf16", "ragged drafts 16-bit weights"),
    ("merge_states", "bf16", "2 parts"),
    ("transcode", "int8_per_token_head", "third format hnd"),
    ("transcode", "bf16", "other signs and channels"),
    ("index_append", "bf16", "rotated fp16 round16"),
    ("index_query", "bf16", "plain"),
    ("index_scores", "bf16", "ragged strided"),
    ("index_topk", "fp32", "open groups of heads"),
    ("index_select", "bf16", "open groups kept"),
]


@pytest.mark.parametrize(("op", "format", "name"), CHECKED)
def test_opcheck(op, format, name):
    case = next(c for c in cases((op,), (format,)) if c.name == name)
    torch.library.opcheck(getattr(torch.ops.tersekv, op).default, (*make(case), None))


@pytest.mark.parametrize("op", OPS)
def test_the_schema_says_what_is_written(op):
    schema = getattr(torch.ops.tersekv, op).default._schema
    written = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    assert written == tuple(n for n in CALLS[op][0]._fields if n in CALLS[op][1])
    assert not schema.returns


def test_every_operation_is_registered_and_checked():
    assert set(OPS) == set(CALLS) == {op for op, _, _ in CHECKED}
    assert registry.schema("merge_states").startswith("merge_states(Tensor outs, Tensor lses, Tensor(a2!) out")


def step(q, k, v, cache, slots, table, lens):
    """One layer of a decode step: append the new token, attend, and something that a compiler can fuse."""
    tersekv.append(k * 2, v, cache, slots)
    out, lse = tersekv.decode(q, cache, table, lens, window=20, return_lse=True)
    return out * 2 + lse[..., None].to(out.dtype)


def tokens(format: str):
    torch.manual_seed(0)
    cache = tersekv.PagedKVCache.allocate(1, 4, 16, 2, 64, format=format)[0]
    k, v = torch.randn(40, 2, 64, dtype=torch.bfloat16), torch.randn(40, 2, 64, dtype=torch.bfloat16)
    tersekv.append(k, v, cache, torch.arange(40))
    new = torch.randn(1, 2, 64, dtype=torch.bfloat16)
    q = torch.randn(1, 8, 64, dtype=torch.bfloat16)
    index = [torch.tensor(x, dtype=torch.int32) for x in ([40], [[0, 1, 2, 3]], [41])]
    return q, new, new.clone(), cache, *index


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3", "int8_per_token_head", "nvfp4"])
def test_a_decode_step_compiles_whole(format, backend):
    torch._dynamo.reset()
    want_args, args = tokens(format), tokens(format)
    want = step(*want_args)
    got = torch.compile(step, fullgraph=True, backend=backend)(*args)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert torch.equal(args[3].k.view(torch.uint8), want_args[3].k.view(torch.uint8))


def test_a_compiled_step_is_not_compiled_anew_for_other_values():
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(step, fullgraph=True, backend=count)
    args = tokens("fp8_per_token_head")
    for n in (40, 41, 42):
        slots, lens = torch.tensor([n], dtype=torch.int32), torch.tensor([n + 1], dtype=torch.int32)
        compiled(*args[:4], slots, args[5], lens)
    assert count.frame_count == 1


def test_an_mla_step_over_byte_rows_compiles_whole():
    # The views with their several dtypes are made inside: aot_autograd takes no inputs that alias each other so.
    def mla_step(q, kv_c, k_pe, rows, slots, table, lens):
        cache = tersekv.PagedLatentLayer.of(rows, format="fp8_ds_mla")
        tersekv.mla_append(kv_c, k_pe, cache, slots)
        return tersekv.mla_decode(q, cache, table, lens, softmax_scale=0.1)

    torch._dynamo.reset()
    results = []
    for run in (mla_step, torch.compile(mla_step, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        rows = torch.zeros(2, 16, 656, dtype=torch.uint8)
        q, kv_c, k_pe = (torch.randn(*s, dtype=torch.bfloat16) for s in ((1, 4, 576), (5, 512), (5, 64)))
        slots, table, lens = torch.arange(5), torch.tensor([[0, 1]]), torch.tensor([5])
        results.append((run(q, kv_c, k_pe, rows, slots, table, lens), rows))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_export_keeps_the_operators():
    class Step(torch.nn.Module):
        def forward(self, q, k, v, k_cache, v_cache, slots, table, lens):
            tersekv.append(k, v, (k_cache, v_cache), slots)
            return tersekv.decode(q, (k_cache, v_cache), table, lens)

    q, k, v, cache, slots, table, lens = tokens("fp8_e4m3")
    program = torch.export.export(Step(), (q, k, v, cache.k, cache.v, slots, table, lens), strict=True)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"tersekv.append.default", "tersekv.decode.default"} <= targets


@pytest.mark.parametrize(("heads", "dtype", "device", "message"), [
    (3, torch.bfloat16, "cpu", "q: want num_q_heads a multiple of num_kv_heads=2, got 3"),
    (4, torch.float64, "cpu", r"q: want \[T, Hq, D\] bfloat16 .* got \[2, 4, 64\] float64"),
    (4, torch.bfloat16, "cuda", "q: want device cpu, got cuda:0"),
])  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_fake_tensors_are_checked(heads, dtype, device, message):
    with FakeTensorMode():
        cache = tersekv.PagedKVCache.allocate(1, 4, 16, 2, 64, format="fp8_e4m3")[0]
        table, lens = torch.zeros(2, 4, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
        assert tersekv.decode(torch.zeros(2, 4, 64), cache, table, lens).shape == (2, 4, 64)
        with pytest.raises(ValueError, match=f"^{message}$"):
            tersekv.decode(torch.zeros(2, heads, 64, dtype=dtype, device=device), cache, table, lens)


def test_a_wrong_call_is_told_while_it_compiles_and_sizes_stay_symbols():
    torch._dynamo.reset()
    _, _, _, cache, _, table, lens = tokens("fp8_e4m3")
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def attend(q, lens):
        return tersekv.decode(q, cache, table.expand(len(lens), -1), lens)

    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="q: want num_q_heads a multiple of num_kv_heads=2"):
        torch.compile(attend, fullgraph=True, backend="eager")(torch.zeros(1, 3, 64), lens)
    compiled = torch.compile(attend, fullgraph=True, backend=count, dynamic=True)
    counts = []
    for n in (2, 3, 5, 7):
        q, held = torch.randn(n, 8, 64), torch.full((n,), 9, dtype=torch.int32)
        assert torch.equal(compiled(q, held), attend(q, held))
        counts.append(count.frame_count)
    assert counts[1] == counts[-1]
