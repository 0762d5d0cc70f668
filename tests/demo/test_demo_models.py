"""The demo models: shapes, what `attend` is given, the rotary tables, the shipped weights and their loss."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open

from tersekv.demo import models, parts, text

NAMES = sorted(models.MODELS)
# Measured on the first 8 KiB of heldout.txt, fp32, windows of 1024 bytes.
BITS_PER_BYTE = {"llama": 1.776, "deepseek": 1.966}
MARGIN = 0.02


@pytest.fixture(scope="module", params=NAMES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name):
    return models.load(name)


@pytest.fixture(scope="module")
def heldout() -> torch.Tensor:
    return text.encode(text.heldout_text())


def test_logits_have_the_shape_of_the_tokens(model):
    tokens = torch.arange(14) % 7
    assert model(tokens).shape == (14, 256)
    assert model(tokens.view(2, 7)).shape == (2, 7, 256)


def test_a_batch_row_is_a_sequence_of_its_own(model, heldout):
    tokens = heldout[:96].view(2, 48)
    torch.testing.assert_close(model(tokens)[1], model(tokens[1]), atol=1e-3, rtol=1e-4)


def test_no_token_sees_a_later_one(model, heldout):
    tokens = heldout[:64].clone()
    before = model(tokens)
    tokens[40:] = 0
    torch.testing.assert_close(model(tokens)[:40], before[:40], atol=1e-3, rtol=1e-4)


def test_attend_is_called_once_a_layer_with_the_documented_shapes(model, name):
    c, seen = model.config, []
    dense = model.dense_attention()

    def attend(layer_idx, *tensors):
        seen.append((layer_idx, [tuple(x.shape) for x in tensors]))
        return dense(layer_idx, *tensors)

    logits = model(torch.arange(5), attend)
    if name == "llama":
        shapes = [(5, 8, 64), (5, 2, 64), (5, 2, 64)]
    else:
        shapes = [(5, 4, 128), (5, 512), (5, 64)]
        assert model.layers[0].kv_norm_gamma.shape == (512,)
        assert model.layers[0].kv_b_proj.shape == (4 * (64 + 64), 512)
    assert seen == [(i, shapes) for i in range(c.num_layers)]
    assert torch.equal(logits, model(torch.arange(5)))


def test_the_position_enters_in_attend_alone(model):
    """A callback without a rotation and without a mixing of tokens sees no order."""

    def attend(layer_idx, q, *cached):
        return q[..., : model.layers[0].o_proj.in_features // q.shape[-2]]

    logits = model(torch.tensor([7, 9, 7]), attend)
    assert torch.equal(logits[0], logits[2])


def test_rotary_tables():
    llama = models.cos_sin_cache(models.LlamaConfig())
    deepseek = models.freqs_cis(models.DeepseekConfig())
    halves = (llama, llama[:, :32], llama[:, 32:])
    pairs = (deepseek, deepseek[:, 0::2], deepseek[:, 1::2])
    for table, cos, sin in (halves, pairs):
        assert table.shape == (4096, 64)
        assert table.dtype == torch.float32
        angle = 4095 * 10000 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
        torch.testing.assert_close(cos[4095], angle.cos().float())
        torch.testing.assert_close(sin[4095], angle.sin().float())


@pytest.mark.parametrize("rotate", ["half_split", "interleaved"])
def test_a_rotation_keeps_lengths_and_depends_on_distance_alone(rotate):
    table = getattr(parts, f"{rotate}_table")(200, 64, 10000.0)
    turn = getattr(parts, f"rotate_{rotate}")
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 64)
    near = (turn(q, table[13:14]) * turn(k, table[5:6])).sum()
    far = (turn(q, table[158:159]) * turn(k, table[150:151])).sum()
    torch.testing.assert_close(near, far, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(turn(q, table[199:]).norm(), q.norm())
    assert torch.equal(turn(q, table[:1]), q)


def test_the_two_rotations_are_one_up_to_the_order_of_the_columns():
    x = torch.randn(3, 2, 64)
    order = torch.arange(64).view(32, 2).T.flatten()  # interleaved columns, evens first
    half = parts.rotate_half_split(x[..., order], parts.half_split_table(3, 64, 10000.0))
    assert torch.equal(half, parts.rotate_interleaved(x, parts.interleaved_table(3, 64, 10000.0))[..., order])


def test_shipped_weights_are_bf16_and_small(name):
    with safe_open(models.weights_path(name), framework="pt") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16"}  # noqa: SIM118 (not a dict)
        assert file.metadata()["model"] == name
        assert json.loads(file.metadata()["config"])["vocab_size"] == 256
    assert sum(models.weights_path(n).stat().st_size for n in NAMES) < 6.2e6


def test_load_gives_the_dtype_and_leaves_the_random_state_alone(name):
    state = torch.get_rng_state()
    model = models.load(name, dtype=torch.bfloat16)
    assert torch.equal(state, torch.get_rng_state())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert model(torch.arange(9)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="want one of"):
        models.load("gpt")


def test_save_then_load_is_exact(model, name, tmp_path):
    again = models.load(name, path=models.save(name, model, tmp_path / "weights" / "x.safetensors"))
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_shipped_weights_reach_their_loss(model, name, heldout):
    assert text.bits_per_byte(model, heldout[: 8 * 1024 + 1]) < BITS_PER_BYTE[name] + MARGIN


def test_the_cached_context_matters(model, heldout):
    """Without a use for what lies far back, a demo of caches would show nothing."""
    tokens = heldout[: 8 * 1024 + 1]
    assert text.bits_per_byte(model, tokens, 1024) < text.bits_per_byte(model, tokens, 64) - 0.05


def test_equal_calls_give_equal_bytes(model, name, heldout):
    tokens = heldout[:300]
    assert torch.equal(model(tokens), models.load(name)(tokens))


def densely(model, asked=None):
    """A step that runs the model over all tokens each time; `asked` gets the numbers of new ones."""
    seen = []

    def step(new):
        if asked is not None:
            asked.append(len(new))
        seen.append(new)
        return model(torch.cat(seen))

    return step


def test_greedy_generation_is_decodable_text(model):
    prompt = text.encode("The method returns a new dictionary ")
    out = text.continued(prompt, 48, densely(model))
    assert out.shape == (48,)
    assert torch.equal(out, text.continued(prompt, 48, densely(model)))
    written = text.decode(out)
    assert "\ufffd" not in written
    assert len(set(written)) > 5
    assert written.count(" ") > 2


def test_generation_asks_for_new_tokens_alone(model):
    asked, prompt = [], text.encode("for key in ")
    out = text.continued(prompt, 6, densely(model, asked))
    assert asked == [len(prompt), 1, 1, 1, 1, 1]
    assert torch.equal(out[5:], model(torch.cat((prompt, out[:5])))[-1:].argmax(-1))
    assert text.continued(prompt, 0, densely(model)).shape == (0,)


def test_bits_per_byte_is_the_mean_over_every_scored_byte(model, heldout):
    tokens = heldout[: 2 * 50 + 1 + 13]  # two windows and a tail
    log_p = torch.cat([model(tokens[i : i + 50]).log_softmax(-1) for i in (0, 50)])
    want = -log_p[torch.arange(100), tokens[1:101]].mean() / torch.log(torch.tensor(2.0))
    assert text.bits_per_byte(model, tokens, 50, batch=1) == pytest.approx(want.item(), abs=1e-4)
