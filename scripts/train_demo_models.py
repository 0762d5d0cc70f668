#!/usr/bin/env python
"""Train the demo models from scratch on Python's own documentation and report held-out bits per byte.

Without arguments it trains both, some minutes each on two idle cores, and replaces the package's weights.
A short trial: `--models llama --steps 200 --out trial`.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import corpus

from tersekv.demo import models, text

TOKENS_PER_STEP = 2048
SHORT_CONTEXT = 256
# Short windows teach spelling and grammar cheaply; the rest of the run learns to use the whole context.
SHORT_SHARE = 0.6
# The held-out text is documentation prose, so a batch holds more of it than the corpus does.
TOPIC_SHARE = 0.4
WARMUP_STEPS = 40
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
ADAM_PROJECTIONS = ("q_proj.weight", "k_proj.weight")
STEPS = {"llama": 1500, "deepseek": 1800}


class Batches:
    """Random windows of two texts, each window from the topics or from the docstrings."""

    def __init__(self, topics: Tensor, docstrings: Tensor, seed: int):
        self.sources = (docstrings, topics)
        self.random = torch.Generator().manual_seed(seed)

    def draw(self, batch: int, context: int) -> Tensor:
        """[batch, context + 1]"""
        from_topics = torch.rand(batch, generator=self.random) < TOPIC_SHARE
        return torch.stack([self._window(self.sources[int(i)], context + 1) for i in from_topics])

    def _window(self, source: Tensor, length: int) -> Tensor:
        start = int(torch.randint(len(source) - length, (1,), generator=self.random))
        return source[start : start + length]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then a cosine down to a hundredth of the peak."""
    if step < WARMUP_STEPS:
        return peak * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for the rest and for the query and key projections.

    Muon buys the minutes: after 400 steps of 1024 bytes llama stands at 2.2 bits/byte, with AdamW at 3.0.
    But Muon moves all directions of a matrix alike. The few large key channels of common models, which a
    cache format has to survive, come with AdamW: |k| up to 22 after 300 steps, with Muon everywhere up to 10.
    """
    muon, adam = [], []
    for name, weight in model.named_parameters():
        in_block = weight.dim() == 2 and name.startswith("layers.")
        (muon if in_block and not name.endswith(ADAM_PROJECTIONS) else adam).append(weight)
    return [
        torch.optim.Muon(muon, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(adam, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def train(model: nn.Module, batches: Batches, heldout: Tensor, steps: int, peak: float) -> None:
    optimizers, attend, start = make_optimizers(model), model.dense_attention(), time.perf_counter()
    mean_nats = None
    for step in range(steps):
        context = SHORT_CONTEXT if step < SHORT_SHARE * steps else model.config.train_context
        window = batches.draw(TOKENS_PER_STEP // context, context)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(window[:, :-1], attend)
        loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, peak)
            optimizer.step()
            optimizer.zero_grad()
        mean_nats = loss.item() if mean_nats is None else 0.95 * mean_nats + 0.05 * loss.item()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            print(
                f"step {step + 1:5d}/{steps}  context {context:4d}  train {mean_nats / math.log(2):.3f}"
                f"  held-out {text.bits_per_byte(model, heldout[:8193], context):.3f} bits/byte"
                f"  {time.perf_counter() - start:5.0f} s",
                flush=True,
            )


@torch.inference_mode()
def cache_ranges(model: nn.Module, tokens: Tensor) -> list[str]:
    """One line a layer: the magnitudes of what a cache is given, before rotation and latent norm."""
    dense, lines = model.dense_attention(), []
    names = ("k", "v") if isinstance(model, models.LlamaLM) else ("kv_c", "k_pe")

    def attend(layer_idx: int, q: Tensor, *cached: Tensor) -> Tensor:
        parts = []
        for name, x in zip(names, cached, strict=True):
            x = x.float()
            channel = x.abs().flatten(0, -2).amax(0) if x.dim() == 2 else x.abs().amax(0)
            median = channel.median().item()
            parts.append(
                f"{name} absmax {x.abs().max().item():7.2f} rms {x.square().mean().sqrt().item():6.3f}"
                f" (channel absmax: median {median:.2f})"
            )
        lines.append(f"layer {layer_idx}: " + "   ".join(parts))
        return dense(layer_idx, q, *cached)

    model(tokens, attend)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=sorted(models.MODELS), default=sorted(models.MODELS))
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}")
    parser.add_argument("--lr", type=float, default=5e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=models.WEIGHTS_DIR, help="default: the package's weights")
    parser.add_argument("--rebuild-heldout", action="store_true", help="write heldout.txt from this Python")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    if args.rebuild_heldout:
        text.HELDOUT_PATH.write_text(corpus.heldout_topics(), "utf-8")
    heldout = text.heldout_text()
    topics, docstrings = corpus.training_topics(heldout), corpus.training_docstrings(heldout)
    digest = hashlib.sha256((topics + docstrings).encode()).hexdigest()[:16]
    print(f"training text: {len(topics)} + {len(docstrings)} characters, sha256 {digest}")

    for name in args.models:
        torch.manual_seed(args.seed)
        _, model_class = models.MODELS[name]
        model = model_class()
        steps = args.steps or STEPS[name]
        print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters, {steps} steps")
        batches = Batches(text.encode(topics), text.encode(docstrings), args.seed)
        start = time.perf_counter()
        train(model, batches, text.encode(heldout), steps, args.lr)
        minutes = (time.perf_counter() - start) / 60
        path = models.save(name, model, args.out / f"{name}.safetensors")
        stored = models.load(name, path=path)
        bits = text.bits_per_byte(stored, text.encode(heldout))
        print(f"{path}: {path.stat().st_size} bytes, held-out {bits:.3f} bits/byte, {minutes:.1f} min")
        print("\n".join(cache_ranges(stored, text.encode(heldout)[: model.config.train_context])))


if __name__ == "__main__":
    main()
