"""MAX's signatures: views without copies, the branches against dense references, the planner's known answer."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from max_step import LAYER, LAYERS, Step
from mla_cases import Case, quantised, reference, relative, value

from tersekv import PagedLatentLayer, mla_prefill, mla_prefill_plan
from tersekv.compat import _max_branches
from tersekv.compat import max as mx


def decode_reference(step):
    """What the decode branch returns, in fp64 with the roundings that its stages make."""
    c, t = step.case, step.case.t
    _, _, rotated, written = reference(c)
    out = torch.zeros(len(rotated), c.heads, c.dv, dtype=torch.float64)

    def dense(weight, scale):
        if scale is None:
            return weight.double()
        return value(weight.view(torch.uint8)) * scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)

    def stage(x, weight):  # [K] of one head and token
        if c.fp8_weights:
            codes, scale = quantised(x[None])
            x = (value(codes) * scale.double().repeat_interleave(128, 1))[0]
        return (weight @ x.double()).to(c.dtype)

    w_uk, w_uv = dense(step.w_uk, step.w_uk_scale), dense(step.w_uv, step.w_uv_scale)
    dtype = step.blocks.dtype
    for b, (cached, new) in enumerate(c.requests):
        rows = [torch.cat(pair) for pair in zip(*c.old[b], strict=True)]
        rows += [row.view(dtype).double() for (request, _), row in sorted(written.items()) if request == b]
        keys = torch.stack(rows)
        for i in range(new):
            token = int(t["cu"][b]) + i
            for h in range(c.heads):
                q = torch.cat([stage(t["q"][token, h, : c.dn], w_uk[h]), rotated[token, h, c.dn :]]).double()
                seen = keys[: cached + i + 1]
                latent = torch.softmax(0.11 * seen @ q, 0) @ seen[:, : c.rank]
                out[token, h] = stage(latent.to(c.dtype), w_uv[h]).double()
    return out


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "16-bit"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_prefill_branch_is_mla_prefill_on_raw_rows_in_the_cache(fp8, dtype):
    step = Step(fp8=fp8, dtype=dtype, fmt="bf16" if dtype == torch.bfloat16 else "fp16")
    want, _, q, _ = reference(step.case)
    native = Case(**vars_of(step.case))
    expected, _ = native.run()
    others = step.other_layers()
    step.prefill()
    assert relative(step.output, want) < 3e-3
    assert torch.equal(step.output, expected)
    torch.testing.assert_close(step.case.t["q"], q, atol=0, rtol=2**-7)
    layer = step.blocks[:, 0, LAYER, :, 0].contiguous().view(torch.uint8)
    assert torch.equal(layer, native.raw), "the rows were not written in place"
    assert torch.equal(step.other_layers(), others), "another layer was written"


def vars_of(case):
    return {name: getattr(case, name) for name in Case.__dataclass_fields__ if name != "t"}


def test_the_prefill_branch_is_not_idempotent():
    step = Step()
    step.prefill()
    first = step.blocks.clone()
    step.prefill()
    assert not torch.equal(step.blocks.view(torch.uint8), first.view(torch.uint8))


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3", "fp8_ds_mla"])
def test_raw_rows_may_be_handed_over_instead_of_lying_in_the_cache(fmt):
    step = Step(raw=False, fmt=fmt)
    t = step.case.t
    want = reference(step.case)[0]
    if fmt == "fp8_ds_mla":
        step.kv = collection(step, step.blocks.view(torch.uint8))
    step.prefill(kv_input=torch.cat([t["kv_c"], t["k_pe"]], -1))
    assert relative(step.output, want) < 3e-3


def collection(step, blocks=None, scales=None):
    kv = step.kv
    return mx.PagedKVCacheCollection(
        kv.blocks if blocks is None else blocks, kv.cache_lengths, kv.lookup_table, kv.max_seq_length,
        kv.max_cache_length, scales,
    )  # fmt: skip


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "16-bit"])
@pytest.mark.parametrize(
    "requests", [((7, 1), (0, 1), (12, 1)), ((3, 2), (5, 0), (0, 3))], ids=["one token each", "drafts"]
)
def test_the_decode_branch_agrees_with_a_dense_reference(requests, fp8):
    step = Step(requests, fp8=fp8, seed=1)
    want = decode_reference(step)
    q, others = step.case.t["q"].clone(), step.other_layers()
    step.decode()
    # Three roundings to q's dtype lie between the reference and the branch.
    assert relative(step.output, want) < 1e-2
    assert torch.equal(step.case.t["q"], q), "the decode branch does not write q"
    assert torch.equal(step.other_layers(), others), "another layer was written"
    prefilled = Step(requests, fp8=fp8, seed=1)
    prefilled.prefill()
    assert torch.equal(step.blocks.view(torch.uint8), prefilled.blocks.view(torch.uint8)), "both branches store alike"


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "16-bit"])
def test_the_graph_decodes_where_every_request_has_one_token_and_prefills_otherwise(fp8):
    requests = ((7, 1), (0, 1))
    for max_seq_len, name in ((1, "decode"), (2, "prefill")):
        want, got = Step(requests, fp8=fp8, seed=2), Step(requests, fp8=fp8, seed=2)
        getattr(want, name)()
        got.graph(max_seq_len)
        assert torch.equal(got.output, want.output), name
        assert torch.equal(got.case.t["q"], want.case.t["q"]), name


def test_the_bound_on_the_new_tokens_of_a_request_is_handed_on(monkeypatch):
    bounds = []
    monkeypatch.setattr(_max_branches, "dispatch_call", lambda op, call, *rest: bounds.append(call.max_q_len))
    step = Step()
    step.prefill()
    step.kv.max_seq_length = 1000  # more than there are tokens
    step.prefill()
    assert bounds == [5, 9]


def test_an_empty_buffer_returns_before_anything_is_touched():
    step = Step()
    q, blocks = step.case.t["q"].clone(), step.blocks.clone()
    step.buffer = (*step.buffer[:2], 0)
    step.prefill()
    assert step.output.isnan().all()
    assert torch.equal(step.case.t["q"], q)
    assert torch.equal(step.blocks.view(torch.uint8), blocks.view(torch.uint8))


def test_no_token_is_a_no_op():
    step = Step(((5, 0),))
    blocks = step.blocks.clone()
    step.decode()
    step.graph(1)
    step.graph(0)
    step.prefill()
    assert torch.equal(step.blocks.view(torch.uint8), blocks.view(torch.uint8))


def test_a_short_buffer_is_a_chunk_whose_tokens_alone_are_seen():
    """As on a GPU, where the lengths are not known on the host."""
    step, native, whole = Step(), Step(), Step()
    lens, news = step.case.lens, [n for _, n in step.case.requests]
    chunks = mla_prefill_plan(lens, news, buffer_tokens=15)
    t = native.case.t
    first = chunks._replace(
        buffer_row_offsets=chunks.buffer_row_offsets[:1], cache_offsets=chunks.cache_offsets[:1], buffer_lengths=[15]
    )
    want = mla_prefill(
        t["q"], PagedLatentLayer.of(native.blocks[:, 0, LAYER], kv_lora_rank=256), t["page_table"], t["cache_lens"],
        t["cu"], t["freqs"], t["gamma"], t["w"], first, softmax_scale=0.11, kv_b_proj_scale=t["w_scale"],
    )  # fmt: skip
    step.buffer = (chunks.buffer_row_offsets[0], step.buffer[1], 15)
    step.prefill()
    assert torch.equal(step.output, want)
    whole.prefill()
    assert torch.equal(step.output[:5], whole.output[:5]), "the first request lies in the buffer"
    assert not torch.equal(step.output, whole.output)


def test_more_tokens_than_the_buffer_raise_in_checked_mode_before_anything_is_touched(monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    step = Step()
    q, blocks = step.case.t["q"].clone(), step.blocks.clone()
    step.buffer = (*step.buffer[:2], 21)
    with pytest.raises(ValueError, match="buffer_length: want room for the 22 tokens that the requests hold, got 21"):
        step.prefill()
    assert step.output.isnan().all()
    assert torch.equal(step.case.t["q"], q)
    assert torch.equal(step.blocks.view(torch.uint8), blocks.view(torch.uint8))


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        ("m_scale_granularity", 128),
        ("n_scale_granularity", 64),
        ("k_scale_granularity", 1),
        ("mask_str", "null"),
        ("score_mod_str", "alibi"),
        ("target", "gpu"),
        ("target", "tpu"),
        ("target", 0),
    ],
)
def test_other_type_parameters_raise(option, bad):
    step = Step()
    for call in (step.prefill, step.decode, lambda **o: step.graph(1, **o)):
        with pytest.raises(ValueError, match=f"^{option}: want .*got {bad!r}$"):
            call(**{option: bad})


def test_every_type_parameter_of_max_is_a_keyword():
    plain, told = Step(), Step()
    plain.prefill()
    told.prefill(
        m_scale_granularity=1, n_scale_granularity=128, k_scale_granularity=128, mask_str="causal",
        score_mod_str="no_pos", target="cpu",
    )  # fmt: skip
    assert torch.equal(told.output, plain.output)
    for name in mx.__all__:
        if "branch" in name or "graph" in name:
            wanted = {"mask_str", "score_mod_str", "target"}
            wanted |= {f"{x}_scale_granularity" for x in "mnk"} if name.endswith("fp8") else set()
            assert wanted <= set(inspect.signature(getattr(mx, name)).parameters), name


def test_arguments_come_in_the_order_of_the_reference_page():
    step, t = Step(), None
    t = step.case.t
    mx.mla_prefill_branch_fp8(
        output=step.output, q=t["q"], input_row_offsets=t["cu"], freqs_cis=t["freqs"], kv_norm_gamma=t["gamma"],
        kv_collection=step.kv, layer_idx=LAYER, scale=0.11, epsilon=1e-6, buffer_row_offsets=step.buffer[0],
        cache_offsets=step.buffer[1], buffer_length=step.buffer[2], kv_b_proj=t["w"], kv_b_proj_scale=t["w_scale"],
        ctx=object(), m_scale_granularity=1, n_scale_granularity=128, k_scale_granularity=128, mask_str="causal",
        score_mod_str="no_pos",
    )  # fmt: skip
    positional = Step()
    positional.prefill()
    assert torch.equal(step.output, positional.output)


def test_errors_name_the_arguments_of_max():
    step = Step()
    step.kv = collection(step, scales=torch.ones(8, 1, LAYERS, 4, 1, 2))
    with pytest.raises(ValueError, match=r"kv_collection.scales: want None"):
        step.prefill()
    step = Step(fmt="fp8_e4m3")
    with pytest.raises(ValueError, match="kv_input: want the raw latents for a fp8_e4m3 cache"):
        step.prefill()
    step = Step()
    step.kv.lookup_table = step.kv.lookup_table[:2]
    with pytest.raises(ValueError, match=r"kv_collection\.\w+: want"):
        step.prefill()
    step = Step()
    step.scale = -1.0
    for branch in (step.prefill, step.decode):
        with pytest.raises(ValueError, match=r"^scale: want a finite number, not negative, got -1\.0$"):
            branch()
    for wrong in ("0.07", True, torch.tensor(0.07), None):
        step.scale = wrong
        for branch in (step.prefill, step.decode):
            with pytest.raises(TypeError, match=r"^scale: want a number, got"):
                branch()
    step = Step()
    step.kv.max_seq_length = 0
    for branch in (step.prefill, step.decode):
        with pytest.raises(ValueError, match=r"^kv_collection\.max_seq_length: want a positive bound .* got 0$"):
            branch()
    step = Step()
    for branch in (step.prefill, step.decode):
        with pytest.raises(TypeError, match=r"^kv_input: want Tensor, got list"):
            branch(kv_input=[1, 2])
    step.case.t["gamma"] = step.case.t["gamma"][:0]
    with pytest.raises(ValueError, match=r"^length of kv_norm_gamma: want a positive number, got 0$"):
        step.decode()
    step.kv = None
    with pytest.raises(TypeError, match="kv_collection: want PagedKVCacheCollection, got NoneType"):
        step.prefill()
    step = Step()
    step.buffer = (step.buffer[0][None], *step.buffer[1:])
    with pytest.raises(ValueError, match=r"buffer_row_offsets: want \[B \+ 1\], one chunk, got \[1, 4\]"):
        step.prefill()
    step = Step()
    step.buffer = (*step.buffer[:2], torch.tensor(22))
    with pytest.raises(TypeError, match="buffer_length: want int, got Tensor"):
        step.prefill()


def test_a_bad_decode_weight_raises_before_anything_is_written():
    for name, bad, message in (
        ("w_uv", torch.zeros(2, 128, 128).to(torch.float8_e4m3fn), r"w_uv: want \[H=2, Dv, L=256\]"),
        ("w_uk", torch.zeros(2, 256, 128, dtype=torch.bfloat16), "w_uk_scale: want None beside a 16-bit w_uk"),
        ("w_uv_scale", torch.ones(2, 2, 1), r"w_uv_scale: want \[H=2, Dv/128=1, L/128=2\]"),
        ("w_uk_scale", None, "w_uk_scale: want Tensor, got NoneType"),
    ):
        step = Step()
        setattr(step, name, bad)
        blocks = step.blocks.clone()
        with pytest.raises((ValueError, TypeError), match=message):
            step.decode()
        assert torch.equal(step.blocks.view(torch.uint8), blocks.view(torch.uint8))
        assert step.output.isnan().all()


def test_the_collection_hands_out_views():
    step = Step()
    keys = step.kv.get_key_cache(LAYER)
    assert keys.blocks.shape == (step.blocks.shape[0], 4, 1, 272)
    assert keys.blocks.data_ptr() == step.blocks[0, 0, LAYER].data_ptr()
    assert keys.latent(256).ckv.data_ptr() == keys.blocks.data_ptr()
    assert keys.cache_length(1) == step.kv.cache_length(1) == 9
    assert keys.max_seq_length == 5
    with pytest.raises(ValueError, match=r"layer_idx: want a number in \[0, 3\), got 3"):
        step.kv.get_key_cache(3)
    with pytest.raises(ValueError, match=r"layer_idx: want a number in \[0, 3\), got -1"):
        step.kv.get_key_cache(-1)
    with pytest.raises(ValueError, match="an MLA cache"):
        step.kv.get_value_cache(0)


def test_the_collection_of_a_model_with_values_has_both_sides():
    blocks, scales = torch.arange(2 * 2 * 3 * 4 * 5 * 8.0).view(2, 2, 3, 4, 5, 8), torch.rand(2, 2, 3, 4, 5, 1)
    kv = mx.PagedKVCacheCollection(blocks, torch.zeros(1), torch.zeros(1, 1), 1, 1, scales)
    assert torch.equal(kv.get_key_cache(2).blocks, blocks[:, 0, 2])
    assert torch.equal(kv.get_value_cache(2).blocks, blocks[:, 1, 2])
    assert torch.equal(kv.get_value_cache(2).scales, scales[:, 1, 2])
    with pytest.raises(ValueError, match="want one head for MLA, got 5"):
        kv.get_key_cache(0).latent(4)
    with pytest.raises(ValueError, match="blocks: want"):
        mx.PagedKVCacheCollection(blocks[0], torch.zeros(1), torch.zeros(1, 1), 1, 1)


class Lengths:
    """What the planner reads of a cache."""

    def __init__(self, lengths):
        self.cache_lengths = torch.tensor(lengths, dtype=torch.int64).to(torch.uint32)


def plan(requests, buffer, chunks, dtype=torch.uint32):
    news = torch.tensor([n for _, n in requests], dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), news.cumsum(0)]).to(torch.uint32)
    rows, starts = (torch.full((chunks, len(news) + 1), 77, dtype=torch.int64).to(dtype) for _ in range(2))
    lengths = torch.full((chunks,), 77, dtype=torch.int32)
    got = mx.mla_prefill_plan(rows, starts, lengths, offsets, Lengths([c for c, _ in requests]), buffer)
    assert got[0] is rows
    assert got[1] is starts
    assert got[2] is lengths
    return [x.tolist() for x in got]


@pytest.mark.parametrize("dtype", [torch.uint32, torch.int32, torch.int64])
def test_the_planner_gives_the_known_answer(dtype):
    rows, starts, lengths = plan(((0, 10), (5, 25)), 32, 4, dtype)
    assert rows[:2] == [[0, 10, 32], [0, 0, 8]]
    assert [s[:2] for s in starts[:2]] == [[0, 0], [10, 22]]
    assert lengths == [32, 8, -1, -1]
    assert [s[2] for s in starts] == [77] * 4, "only B of the B + 1 columns are written"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=5), st.integers(1, 30))
def test_the_planner_agrees_with_the_one_on_the_host(requests, buffer):
    want = mla_prefill_plan([c + n for c, n in requests], [n for _, n in requests], buffer)
    used = len(want.buffer_lengths)
    rows, starts, lengths = plan(requests, buffer, used + 2)
    assert rows[:used] == want.buffer_row_offsets.tolist()
    assert [s[:-1] for s in starts[:used]] == want.cache_offsets.tolist()
    assert lengths[:used] == want.buffer_lengths
    assert all(n in (0, -1) for n in lengths[used:])


def test_the_planner_refuses_what_does_not_fit(monkeypatch):
    rows, _, lengths = plan(((0, 10), (5, 25)), 8, 4)
    assert lengths == [8] * 4, "8 tokens are in no chunk"
    assert [r[-1] for r in rows] == [8] * 4
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    with pytest.raises(ValueError, match="buffer_lengths: want at least 5 chunks of 8 tokens, got 4"):
        plan(((0, 10), (5, 25)), 8, 4)
    with pytest.raises(TypeError, match="k_cache: want a cache with cache_lengths, got NoneType"):
        mx.mla_prefill_plan(torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2), torch.tensor([0, 1]), None, 8)
    with pytest.raises(ValueError, match="buffer_token_size: want a positive number, got 0"):
        plan(((0, 10),), 0, 4)
    i32 = {"dtype": torch.int32}
    for i, wrong, message in (
        (1, torch.zeros(2, 3, **i32), r"cache_offsets: want \[max_chunks=2, B\+1=2\], got \[2, 3\]"),
        (0, torch.zeros(2, 2), "buffer_row_offsets: want int32, int64 or uint32, got float32"),
        (1, torch.zeros(2, 2, dtype=torch.int8), "cache_offsets: want int32, int64 or uint32, got int8"),
        (2, torch.zeros(2), "buffer_lengths: want int32, int64 or uint32, got float32"),
        (2, torch.zeros(2, 1, **i32), r"buffer_lengths: want \[max_chunks\], got \[2, 1\]"),
        (2, torch.zeros(2, **i32).to(torch.uint32), "buffer_lengths: want int32 or int64, which hold -1, got uint32"),
        (3, torch.tensor([0, 1.5]), "input_row_offsets: want int32, int64 or uint32, got float32"),
        (3, torch.zeros(1, 2, **i32), r"input_row_offsets: want \[B \+ 1\], got \[1, 2\]"),
    ):
        given = [torch.full((2, 2), 7, **i32), torch.full((2, 2), 7, **i32), torch.full((2,), 7, **i32)]
        given.append(torch.tensor([0, 1]))
        given[i] = wrong
        with pytest.raises(ValueError, match=message):
            mx.mla_prefill_plan(*given, Lengths([0]), 8)
        assert i == 0 or given[0].unique().tolist() == [7], "nothing is written"
