"""Every call is taken or refused alike on every device, save what the Limits of docs/support.md name."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import test_bad_calls as bad
import torch
from max_step import Step

from tersekv import UnsupportedError
from tersekv.calls import AttentionCall, MLADecodeCall, MLAPrefillCall
from tersekv.dispatch import plan
from tersekv.testing.cases import Case
from tersekv.testing.make import make

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tersekv"
SUPPORT = (ROOT / "docs" / "support.md").read_text()
LIMITS = " ".join(re.search(r"\n## Limits\n(.*?)(?:\n\n[^-]|\Z)", SUPPORT, re.DOTALL)[1].split())


def valueless(x):
    """x with tensors of the same shapes and strides that hold no values, so that no check can have looked at one."""
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    if dataclasses.is_dataclass(x):
        return dataclasses.replace(x, **{f.name: valueless(getattr(x, f.name)) for f in dataclasses.fields(x)})
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(valueless, x))
    return type(x)(map(valueless, x)) if isinstance(x, (list, tuple)) else x


def told(op, call):
    try:
        bad.VERBS[op](**call)
    except (ValueError, TypeError) as e:
        return f"{type(e).__name__}: {e}".replace("meta", "cpu")
    return "taken"


@pytest.mark.parametrize("op", bad.VERBS)
def test_a_good_call_is_taken_without_looking_at_values(op):
    assert told(op, valueless_call(bad.good(op))) == "taken"


def valueless_call(call):
    return {name: valueless(x) for name, x in call.items()}


WRONG = [
    (op, changed, message)
    for op, changed, message in (*bad.BAD_VALUES, *bad.BAD_TYPES)
    if "got meta" not in message and "want a dense Tensor" not in message  # these are about where and what tensors are
]


@pytest.mark.parametrize(("op", "changed", "message"), WRONG, ids=bad.names(WRONG))
def test_a_wrong_call_is_refused_in_the_same_words_without_looking_at_values(op, changed, message):
    assert told(op, valueless_call({**bad.good(op), **changed})).partition(": ")[2] == message


@pytest.mark.parametrize("rows", [0, 1, 15, 22, 40])
def test_the_prefill_of_max_takes_a_buffer_of_any_size(rows):
    for change in (lambda x: x, valueless):
        step = Step()
        step.case.t.update({name: change(x) for name, x in step.case.t.items() if isinstance(x, torch.Tensor)})
        kv, (offsets, starts, _) = step.kv, step.buffer
        kv.blocks, kv.cache_lengths, kv.lookup_table = map(change, (kv.blocks, kv.cache_lengths, kv.lookup_table))
        step.output, step.buffer = change(step.output), (change(offsets), change(starts), rows)
        step.prefill()


# Rooms that decide whether a call is right, and where they ask for the device all the same: file, function, why.
ASKS = {
    ("attributes.py", "all_positive"): "its values are not looked at while a stream is captured",
    ("attributes.py", "channel_scales"): "a scale lies on the kind of device that the cache lies on",
    ("attributes.py", "fitting_scale"): "likewise",
    ("compat/_flashinfer_single.py", "_pages_of"): "a constant is kept for each stream",
    ("compat/_flashinfer_views.py", "_one"): "a constant is kept for each stream",
    ("compat/_max_branches.py", "check_variant"): "`target` names the device",
    ("dispatch/kernel_errors.py", "_describe_chip"): "the words of an error",
    ("integrations/transformers_cache_layers.py", "_one_dtype"): "autocast has a dtype for each device",
    ("integrations/transformers_eval.py", "_dtype"): "the dtype that an evaluation runs in",
    ("integrations/transformers_store.py", "absorbed_weights"): "autocast has a dtype for each device",
    (
        "integrations/vllm_attention.py",
        "supports_dtype",
    ): "float32 queries are taken on CPUs alone (docs/support.md, Limits)",
    ("integrations/sglang_attention.py", "_first_look"): "a graph's capture, and a CPU compiles nothing",
    ("integrations/sglang_batch.py", "support_triton"): "SGLang asks whether a kernel of its own fits the device",
    ("integrations/sglang_batch.py", "__init__"): "SGLang's masks have a layout for each device",
    ("integrations/sglang_host.py", "init_kv_buffer"): "SGLang's way to memory that is pinned",
    ("integrations/vllm_warm_up.py", "first_jobs"): "a CPU compiles nothing",
    ("integrations/vllm_mla.py", "forward_mha"): "prompts that vLLM's own kernels for GPUs attend to",
    ("integrations/vllm_mla.py", "supports_dtype"): "as above",
    (
        "dispatch/value_checks.py",
        "check_host_values",
    ): "pages are looked at where that is free; elsewhere in checked mode",
    ("ops/attention.py", "output_tensor"): "torch.empty_like imports much for a meta tensor",
    ("ops/transcode.py", "_groups"): "a graph's capture",
    ("record_file.py", "_pipelined"): "streams",
    ("record_file.py", "bytes_of"): "memory on the host",
    ("record_file.py", "read"): "memory that is pinned",
    ("record_file.py", "write"): "memory that is pinned",
    ("ops/exchange.py", "_sum_and_scatter"): "the process group's backend for the device",
    ("ops/compile_workers.py", "chip_of"): "the chip",
    ("integrations/transformers_offload.py", "_pinned"): "memory that is pinned",
    ("integrations/transformers_offload.py", "_reset"): "streams",
    ("page_mover.py", "__init__"): "streams",
    ("page_mover.py", "away"): "streams",
    ("page_mover.py", "back"): "streams",
    ("compat/_indexer.py", "where_inside"): "pages are looked at where that is free; elsewhere in checked mode",
    ("compat/flash_mla.py", "flash_mla_sparse_fwd"): "FlashMLA's entries past the cache are padding; a CPU would raise",
    ("dispatch/plan.py", "facts"): "the chip",
    ("dispatch/plan.py", "_arch"): "the chip",
    ("dispatch/plan.py", "_make_plan"): "which backends there are",
    ("dispatch/plan.py", "_where"): "the words of a refusal",
    ("dispatch/launch_cache.py", "_is_captured"): "a graph's capture",
}
_ASKING = {"is_cuda", "is_cpu", "is_meta"}


def asking(path):
    """Functions of a file that ask what kind of device a tensor is on."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and (
                    node.attr in _ASKING or (node.attr == "type" and "device" in ast.unparse(node.value))
                ):
                    yield str(path.relative_to(PACKAGE)), function.name


def test_whether_a_call_is_right_depends_on_no_device():
    """A check behind `device.type == "cpu"` passes here and lets the same call through on a GPU, or the reverse."""
    rooms = [
        p
        for p in PACKAGE.rglob("*.py")
        if p.relative_to(PACKAGE).parts[0] not in ("backends", "testing", "demo", "cli")
    ]
    assert {found for path in rooms for found in asking(path)} == set(ASKS)


def decode_call(**changes):
    return make(Case("decode", "fp8_e4m3", "plain", lens=(9,), dim=64))._replace(**changes)


def odd_strides(format, rank=0, more=1, start=0):
    """A cache of 8-bit codes whose pages lie an odd number of bytes apart."""
    op, name = ("mla_decode", "ckv") if rank else ("decode", "k_cache")
    call = make(Case(op, format, "plain", lens=(9,), heads=1))
    cache = getattr(call, name)
    step = cache.stride(0) + more
    apart = torch.zeros(cache.shape[0] * step + start, dtype=torch.uint8).view(cache.dtype)
    return call._replace(**{name: apart.as_strided(cache.shape, (step, *cache.stride()[1:]), start)})


def odd_address(format, rank=0):
    """A cache of 8-bit codes that begins at an odd address."""
    return odd_strides(format, rank, more=0, start=1)


def latents(op, **sizes):
    return make(Case(op, "bf16", "plain", lens=(9,), heads=1, **sizes))


def max_logits_call():
    call = make(Case("mla_decode", "fp8_ds_mla", "plain", lens=(9,), heads=1, listed=5, lse=True))
    return call._replace(max_logits=torch.empty_like(call.lse))


# What a GPU's kernels refuse and a CPU takes: a call, the words of the refusal, and those of Limits in docs/support.md.
REFUSED = [
    (decode_call(q=torch.zeros(1, 8, 64)), "wants a 16-bit or 8-bit q", "an fp32 query"),
    (latents("mla_decode", dtype="float32"), "wants a 16-bit or 8-bit q", "an fp32 query"),
    (odd_strides("fp8_e4m3"), "with strides of whole 16-bit words", "with odd strides"),
    (odd_strides("fp8_e4m3", 512), "with strides of whole 16-bit words", "with odd strides"),
    (odd_address("fp8_e4m3"), "to begin with a whole 16-bit word", "at odd addresses"),
    (odd_address("fp8_e4m3", 512), "to begin with a whole 16-bit word", "at odd addresses"),
    (latents("mla_decode", rank=520), "wants a latent rank that is a multiple of 16 up to 512",
     "no multiple of 16 or above 512"),
    (latents("mla_decode", rope=132), "wants a rotary part that is a multiple of 8 up to 128",
     "no multiple of 8 or above 128"),
    (max_logits_call(), "takes no max_logits of", "FlashMLA's max_logits"),
    (latents("mla_prefill", nope=264, weight=""), "needs heads of 1 to 256 nope and value dims",
     "256 nope or value dims"),
    (latents("mla_prefill", rope=144, weight=""), "needs at most 128 rotary dims", "128 rotary dims"),
    (latents("mla_prefill", rank=4224, weight=""), "needs a latent rank of at most 4096", "4096 latent dims"),
    (latents("mla_prefill")._replace(softmax_scale=0.0), "needs softmax_scale > 0", "a softmax_scale of 0"),
]  # fmt: skip
OPS = {AttentionCall: "decode", MLADecodeCall: "mla_decode", MLAPrefillCall: "mla_prefill"}


@pytest.mark.parametrize(("call", "words", "limit"), REFUSED, ids=[words for _, words, _ in REFUSED])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_what_gpus_refuse_and_a_cpu_takes_is_among_the_limits(call, words, limit, arch):
    op = OPS[type(call)]
    assert plan.plan(op, call).backend in ("cpu", "torch")
    with pytest.raises(UnsupportedError, match=f"triton: .*{re.escape(words)}"):
        plan.plan(op, call, arch=arch)
    assert limit in LIMITS


def test_the_portable_kernels_refuse_nothing_else():
    """Each reason that a `why_not` of the Triton backend gives is tried above, or is about the machine."""
    said = set()
    for path in [*(PACKAGE / "backends" / "triton").rglob("*.py"), *(PACKAGE / "backends" / "host").glob("*.py")]:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name in (
                "why_not",
                "why_not_format_or_device",
                "_why_not_one_key_set",
            ):
                said |= {ast.unparse(r.value) for r in ast.walk(function) if isinstance(r, ast.Return) and r.value}
    texts = {re.sub(r"^f?'(.*)'$", r"\1", s) for s in said if re.match("f?'", s)}
    # More rows than 32 bits count are not made in a test.
    machine = {t for t in texts if re.match(r"needs (a CUDA|sm_80)|has no |counts rows in 32 bits", t)}
    first = {re.split(r"\{|, got", t)[0].strip() for t in texts - machine}
    assert len(texts - machine) >= 7
    for words in first:
        assert any(words in tried or tried in words or tried.startswith(words) for _, tried, _ in REFUSED), words
