"""`tersekv verify --random`: what is drawn, how it is judged, and what happens to a case that crashes."""

from __future__ import annotations

import functools
import inspect
import json
import os
import signal
import time
from dataclasses import fields, replace

import pytest

import tersekv
from tersekv.cli.main import main
from tersekv.formats import KV_FORMATS
from tersekv.testing import random_cases, verify
from tersekv.testing.case_text import case_of, text_of
from tersekv.testing.cases import OPS, Case, cases, formats_of
from tersekv.testing.draw import draw
from tersekv.testing.shrink import shrunk
from tersekv.testing.workers import Workers

SEED = 20
MANY = [draw(SEED, i) for i in range(9000)]


@pytest.mark.parametrize("part", range(10))
def test_random_cases_are_right(part):
    for i in range(25 * part, 25 * (part + 1)):
        result = verify.run(draw(SEED, i))
        assert result.status == verify.PASSED, f"{result.message}\ntersekv verify --case '{text_of(result.case)}'"


def test_a_seed_draws_the_same_cases_again_and_another_seed_others():
    assert [draw(SEED, i) for i in range(50)] == MANY[:50]
    assert [draw(SEED + 1, i) for i in range(50)] != [replace(c, name=c.name.replace("20.", "21.")) for c in MANY[:50]]


def test_every_operation_and_format_is_drawn():
    assert {(c.op, c.format) for c in MANY} == {(op, name) for op in OPS for name in formats_of(op)}
    assert {c.op for c in (draw(1, i, ("decode",)) for i in range(20))} == {"decode"}
    assert {c.format for c in (draw(1, i, None, ("nvfp4",)) for i in range(20))} == {"nvfp4"}


def test_every_parameter_is_drawn_with_all_its_values():
    seen = {f.name: {getattr(c, f.name) for c in MANY} for f in fields(Case)}
    assert seen["index"] == {"int32", "int64", "uint32", "mixed"}
    assert seen["gaps"] == {"", "slots", "heads", "columns", "pages"}
    assert seen["scales"] == {"apart", "inline", "tail"}
    assert seen["rotation"] == seen["channels"] == {"", "k", "v", "kv"}
    assert seen["v_format"] == {"", *KV_FORMATS}
    assert seen["layout"] == {"NHD", "HND"}
    assert seen["scale"] == {"one", "float", "tensor", "head"}
    assert seen["place"] == {"slots", "pages"}
    assert {"bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"} <= seen["dtype"] & seen["out_dtype"]
    assert {1, 3, 16, 100, 256} <= seen["page"]
    assert {1, 2, 3, 16} <= seen["heads"]
    assert len(set(range(1, 73)) & seen["group"]) > 60
    listed = {f.name for f in fields(Case) if f.type == "bool"} - {"quick", "sharp"}  # by the list, these two
    assert all(seen[name] == {True, False} for name in listed), [n for n in listed if len(seen[n]) < 2]
    fixed = {n for n, values in seen.items() if len(values) == 1}
    assert fixed == {"quick", "sharp"}, "what is drawn in one way only"


# How the random cases draw each parameter of each verb: fields of a case, or, as a sentence, why they do not.
CACHE = "format page gaps scale"
KV, LATENT = f"{CACHE} v_format layout packed scales rotation channels heads dim dim_v", f"{CACHE} rank rope split"
QUERIES, PLACES, BACKEND = (
    "lens q_lens dtype strided head_major group",
    "skip index place",
    "Not drawn: verify --backend.",
)
OUT = {"out": "strided head_major", "out_dtype": "out_dtype", "out_scale": "scale", "lse": "lse head_major"}
OUT |= {"return_lse": "lse", "precision": "precision", "batch_invariant": "batch_invariant"}
REQUESTS = {"page_table": "index lens page", "seq_lens": "index lens", "cu_seqlens_q": "ragged", "max_q_len": "slack"}
ATTENTION = {"q": QUERIES, "cache": KV, **REQUESTS, "window": "window", "sinks": "sinks", "softcap": "softcap", **OUT}
ATTENTION |= {"softmax_scale": "scale dim", "backend": BACKEND}
NEW_LATENTS = {
    "cache": LATENT, "page_table": "index lens page", "cache_lens": "index lens q_lens", "cu_seqlens_q": "ragged",
    "freqs_cis": "rope weight", "kv_norm_gamma": "rank dtype", "kv_c": "raw_in_cache", "k_pe": "raw_in_cache",
    "epsilon": "epsilon", "out": "strided head_major", "backend": BACKEND,
}  # fmt: skip
ROTATED = {"slot_mapping": PLACES, "cache": KV, "interleaved": "interleaved", "q_dtype": "out_dtype"}
ROTATED |= {"q_scale": "scale", "positions": "index lens skip", "backend": BACKEND}
EMPTY_PLAN = "Not drawn: with plans that hold no rows alone, as tests/mla/test_mla_prefill.py has them."
INDEX_CACHE = "format dim page gaps rotation"
INDEX_ROPE = {
    "cos_sin_cache": "rotate rotary", "positions": "index lens skip", "interleaved": "interleaved",
    "rope": "rope_last", "round16": "round16", "backend": BACKEND,
}  # fmt: skip
SCORED = {
    "q": "lens q_lens heads dtype strided", "weights": "weighted", "cache": "format dim page gaps spread whole",
    **REQUESTS, "ratio": "ratio", "relu": "relu", "scale": "scale", "heads": "each", "reduce_blocks": "block",
    "width": "width", "backend": BACKEND,
}  # fmt: skip
BLOCKS = "listed each_head lists index"
LISTS = {"index_lens": "list_lens", "block_size": "block_size"}
TAKEN = {"k": "top", "keep_first": "keep_first", "keep_last": "keep_last", "out": "strided"}
DRAWN = {
    "append": {
        "k": "lens q_lens dtype strided head_major special widen", "v": "dim_v", "cache": KV, "slot_mapping": PLACES,
        "backend": BACKEND,
    },
    "rope_append": {
        "q": "query group", "k": QUERIES, "v": "dim_v", "cos_sin_cache": "rotary", "q_out": "strided head_major",
        **ROTATED,
    },
    "mla_append": {
        "kv_c": "dtype strided special", "k_pe": "rope dtype", "cos_sin_cache": "rotate", **ROTATED, "cache": LATENT,
        "q_nope": "query q_nope", "q_pe": "query", "q_nope_out": "strided head_major", "q_pe_out": "head_major",
    },
    "decode": {**ATTENTION, **LISTS, "mask": "mask", "indices": BLOCKS},
    "prefill": {
        **ATTENTION, **LISTS, "indices": BLOCKS, "cu_seqlens_q": "q_lens index", "k": "new_rows", "v": "new_rows",
    },
    "mla_decode": {
        **REQUESTS, **OUT, **LISTS, "indices": "listed by_slot lists index", "q": QUERIES, "cache": LATENT,
        "softmax_scale": "scale", "sinks": "sinks sink", "backend": BACKEND,
        "extra": "extra_listed",
    },
    "mla_prefill": {
        "q": QUERIES, **NEW_LATENTS, "cu_seqlens_q": "q_lens index", "kv_b_proj": "weight nope dim_v",
        "kv_b_proj_scale": "weight", "plan": "chunk slack", "softmax_scale": "nope rope", "head_dim_v": "dim_v",
        "lse": "lse head_major", "return_lse": "lse", "q_pe_out": EMPTY_PLAN, "seq_lens_out": EMPTY_PLAN,
        "precision": "Not drawn: every backend is exact, whatever it says.",
    },
    "mla_project": {
        "x": "lens group dim strided head_major spread", "weight": "format dim_v", "weight_scale": "format",
        "out": "strided head_major", "backend": BACKEND,
    },
    "mla_decode_branch": {
        "q": QUERIES, **NEW_LATENTS, "w_uk": "weight nope", "w_uv": "weight dim_v", "w_uk_scale": "weight",
        "w_uv_scale": "weight", "softmax_scale": "scale nope", "max_q_len": "slack",
    },
    "merge_states": {
        "outs": "format parts lens heads dim strided", "lses": "parts", "out": "out_dtype strided head_major",
        "lse": "lse head_major", "backend": BACKEND,
    },
    "transcode": {
        "src": "src_format src_v_format src_layout src_scales src_rotation src_channels src_scale alike latents spread",
        "src_pages": "src_page index slack", "dst": KV, "dst_pages": "page index slack", "num_tokens": "lens ragged",
        "backend": BACKEND,
    },
    "index_append": {
        "k": "lens q_lens dtype strided special", "cache": INDEX_CACHE, "slot_mapping": "skip index",
        "norm": "norm epsilon", **INDEX_ROPE,
    },
    "index_query": {
        "q": "lens q_lens heads dtype strided head_major", "weights": "weighted", "cache": "format dim rotation",
        **INDEX_ROPE, "weight_scale": "heads dim",
    },
    "index_scores": {**SCORED, "out": "strided"},
    "index_topk": {
        "starts": "Not drawn: tests/index has it, as FlashInfer and vLLM ask for it.",
        "scores": "lens width whole special strided each", "visible": "lens index", **TAKEN, "open_group": "open_group",
        "out_lens": "lse", "backend": BACKEND,
    },
    "index_select": {**SCORED, **TAKEN, "open_group": "open_group", "out_lens": "each"},
}  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_every_parameter_of_every_verb_is_drawn_or_says_why_not(op):
    assert DRAWN[op].keys() == inspect.signature(getattr(tersekv, op)).parameters.keys()
    mine = [c for c in MANY if c.op == op]
    for name, how in DRAWN[op].items():
        if how.startswith("Not drawn: "):
            continue
        for field in how.split():
            values = {getattr(c, field) for c in mine}
            assert len(values) > 1, f"{op}, {name}: {field} is always {values}"


def test_no_transcode_of_rows_without_a_rotary_part_is_drawn():
    """It is refused."""
    of_latents = [c for c in MANY if c.op == "transcode" and c.latents]
    assert len(of_latents) > 50
    assert all(c.rope for c in of_latents)


def test_numbers_are_drawn_over_all_that_they_may_be():
    caps = [c.softcap for c in MANY if c.softcap]
    for decade in range(-3, 7):
        assert any(10.0**decade <= x < 10.0 ** (decade + 1) for x in caps), decade
    windows = {c.window for c in MANY}
    for end in (2**31, 2**32, 2**63):
        assert windows & {*range(end - 2, min(end + 3, 2**63))}, end
    epsilons = [c.epsilon for c in MANY]
    assert min(epsilons) < 1e-9 < 1e-1 < max(epsilons)


def test_sizes_reach_from_nothing_to_hundreds_of_requests_and_tens_of_thousands_of_tokens():
    assert max(len(c.lens) for c in MANY) == 256
    assert max(max(c.lens, default=0) for c in MANY) > 30_000
    assert max(sum(c.lens) for c in MANY) > 50_000
    assert any(0 in c.lens for c in MANY)
    assert max(sum(c.q_lens or ()) for c in MANY) > 5000
    kv = ("decode", "prefill")
    one_head = [c for c in MANY if c.op in kv and c.heads == 1 and c.page == 16 and sum(c.lens) > 10_000]
    assert {"fp8_per_token_head", "int8_per_token_head"} & {c.format for c in one_head}


@pytest.mark.parametrize("case", [*MANY[:100], *cases()], ids=lambda c: c.id)
def test_a_case_is_a_line_and_back(case):
    assert case_of(text_of(case)) == case


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("decode/bf16", "want operation/format/name"),
        ("encode/bf16/x", "the operation one of append, "),
        ("decode/bf16/plian", "want a name of decode/bf16, one of plain, "),
        ("decode/fp8_ds_mla/plain", "want a format of decode, one of bf16, "),
        ("decode/bf16/x lens", "want field=value"),
        ("decode/bf16/x length=3", "want field=value with a field of lens"),
        ("decode/bf16/x lens=3x,1", "lens: want lengths such as 24x6000,1"),
        ("decode/bf16/x heads=two", "heads: want int"),
        ("decode/bf16/x packed=yes", "packed: want bool"),
    ],
)
def test_a_line_that_is_none_is_refused(line, message, capsys):
    with pytest.raises(ValueError, match=message):
        case_of(line)
    with pytest.raises(SystemExit, match="2"):
        main(["verify", "--case", line])
    assert message in capsys.readouterr().err.replace("\n", " ")


def faulty(case: Case, device: str, backend: str | None) -> verify.Result:
    """What a backend with faults would do: crash, hang, raise, or be wrong for one head and pages of 16."""
    if case.name == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if case.name == "exit":
        os._exit(3)
    if case.name == "hang":
        time.sleep(60)
    wrong = case.heads == 1 and case.page == 16 and len(case.lens) > 2
    return verify.Result(case, "faulty", verify.FAILED if wrong else verify.PASSED, 0.0, "wrong" if wrong else "")


def test_a_case_that_crashes_or_hangs_costs_itself_only():
    names = ("a", "crash", "b", "exit", "c", "hang", "d", "e")
    with Workers(2, seconds=3, runner=faulty) as pool:
        found = {r.case.name: r for r in pool.results(Case("decode", "bf16", n) for n in names)}
        assert pool.one(Case("decode", "bf16", "after")).status == verify.PASSED
    assert {n for n, r in found.items() if r.status == verify.PASSED} == {"a", "b", "c", "d", "e"}
    assert found["crash"].message == "the process ended by SIGSEGV"
    assert found["exit"].message == "the process ended with exit code 3"
    assert found["hang"].message == "no result after 3 s"


def test_a_failure_is_made_as_small_as_it_can_be():
    case = replace(MANY[0], op="decode", format="bf16", heads=1, page=16, lens=(500, 70, 3, 9, 800), q_lens=(2,) * 5,
                   window=7, sinks=True, group=8, dim=256)  # fmt: skip
    small = shrunk(case, lambda c: faulty(c, "cpu", None).status == verify.FAILED)
    assert small == Case("decode", "bf16", case.name, lens=(1, 1, 1), q_lens=(1, 1, 1), heads=1, group=1)
    assert shrunk(case, lambda c: False) == case


def test_what_fails_is_printed_as_a_command_that_runs_it_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(random_cases, "results", functools.partial(random_cases.results, runner=faulty))
    file = tmp_path / "found.json"
    assert (
        main(["verify", "--random", "40", "--seed", "2", "--workers", "1", "--ops", "decode", "--json", str(file)]) == 1
    )
    printed = capsys.readouterr().out
    kept = json.loads(file.read_text())
    assert kept["seed"] == 2
    assert kept["total"]["passed"] + kept["total"]["failed"] == 40
    assert "random cases, seed 2" in printed
    for failure in kept["failures"]:
        line = f"again: tersekv verify --case '{failure['case']}'"
        assert line in printed
        again = faulty(case_of(failure["case"]), "cpu", None)
        assert again.status == verify.FAILED


def test_listed_cases_run_in_processes_too(capsys):
    assert main(["verify", "--quick", "--workers", "2", "--ops", "merge_states"]) == 0
    assert "3 passed, 0 failed" in capsys.readouterr().out


def test_a_line_runs_its_case(capsys):
    assert main(["verify", "--case", text_of(MANY[3])]) == 0
    assert "1 passed, 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seed", "3"), "--seed: want it beside --random"),
        (("--case", "decode/bf16/plain", "--workers", "3"), "--case: want it without --workers"),
        (("--random", "3", "--quick"), "--random: want it without --quick"),
        (("--case", "decode/bf16/plain", "--random", "3"), "--case: want it without --random"),
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments, message, capsys):
    assert main(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err
