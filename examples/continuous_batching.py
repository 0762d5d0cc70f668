"""Continuous batching over a quantised, paged cache: a small engine, whole.

    python examples/continuous_batching.py
    python examples/continuous_batching.py --device cuda --format bf16 fp8_e4m3 --layers 32 --heads 32 --kv-heads 8 \
        --head-dim 128 --dim 4096 --mlp 14336 --batch 64 --requests 64 --context 4096:16384 --page-size 64

Requests of unequal length arrive over time. They share the pages of a common prefix by `PagePool.fork`, run together in
a batch of fixed size whose free rows write nothing (slot −1) and read nothing (length 0), so that one captured CUDA
graph serves every step, and give their pages back when they finish. The same requests run with every format that is
asked for; then each runs alone, without a shared prefix, fed the same tokens, and its logits are compared.

On a CPU the model is the trained byte-level one of `tersekv demo`. Sizes given by options make one with random weights.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import tersekv
from tersekv.demo.llama import LlamaConfig, LlamaLM, cos_sin_cache
from tersekv.demo.models import load
from tersekv.demo.text import decode as text_of
from tersekv.demo.text import encode, heldout_text

PREFIX = "shared prefix"  # its name in the pool
TOKEN, POSITION, SLOT, LENGTH = range(4)  # rows of the table that goes to the device at every step
_PROMPT = (8, 64)  # tokens of a prompt after the prefix, from and to
OWN = -1  # in place of a token: the one that the row has just made, which the host need not know


@dataclass
class Request:
    name: str
    prompt: list[int]
    max_new: int
    arrives: int  # the step before which nobody knows of it
    computed: int = 0  # tokens that are taken for cached already (--context), instead of a prompt
    forced: list[int] | None = None  # tokens to feed in place of its own, to compare logits
    made: int = 0  # tokens made, of which the last may still be on the device
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


@dataclass
class Step:
    """Where new tokens go and what they see, on the device."""

    slots: Tensor  # [T]
    positions: Tensor  # [T]
    page_table: Tensor  # [B, max_pages]
    seq_lens: Tensor  # [B]
    ragged: dict = field(default_factory=dict)  # how decode tells the requests' rows apart; one row each: nothing


class Engine:
    """Steps are prepared while the device still works on the one before; its tokens are read one step late."""

    def __init__(
        self, model: LlamaLM, cache: tersekv.PagedKVCache, batch: int, context: int, keep_logits: bool
    ) -> None:
        self.model, self.cache, self.keep_logits = model, cache, keep_logits
        self.device = model.embed.weight.device
        self.pool = tersekv.PagePool(cache.num_pages, cache.page_size)
        self.rope = cos_sin_cache(model.config, self.device)
        self.rows: list[Request | None] = [None] * batch
        self.free_row = [0, 0, -1, 0]  # no slot to write, no length to read
        self.inputs = torch.tensor([self.free_row] * batch, device=self.device).T.contiguous()
        self.next = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.tables = torch.full((batch, self._pages(context)), -1, dtype=torch.int32, device=self.device)
        self.shared = 0  # tokens of the common prefix
        self.seconds, self.steps, self.decoded, self.made = 0.0, 0, 0, 0
        self.unread: list[tuple[Tensor, list[Request | None], torch.cuda.Event | None]] = []
        self.graph = None
        if self.device.type == "cuda":
            self._capture()

    # ---- the model's attention: write the new rows, attend to all of them

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s, cache = self.step, self.cache[layer]
        q = tersekv.rope_append(q, k, v, cache, s.slots, self.rope, s.positions)
        return tersekv.decode(
            q, cache, s.page_table, s.seq_lens, softmax_scale=self.model.config.softmax_scale, **s.ragged
        )

    def _forward(self) -> None:
        """One token of every row: the same tensors every time, whatever runs."""
        self.step = Step(self.inputs[SLOT], self.inputs[POSITION], self.tables, self.inputs[LENGTH])
        tokens = torch.where(self.inputs[TOKEN] == OWN, self.next, self.inputs[TOKEN])
        self.logits = self.model(tokens, self.attend)
        self.next.copy_(self.logits.argmax(-1))

    def _capture(self) -> None:
        for _ in range(3):  # all rows are free: compiles everything, writes nothing
            self._forward()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._forward()

    # ---- requests come

    def share(self, prefix: list[int]) -> None:
        """Compute a prefix once; requests admitted from now on continue it."""
        self.pool.add(PREFIX)
        self._prefill({PREFIX: prefix})
        self.shared = len(prefix)

    def admit(self, waiting: list[Request], now: int) -> None:
        """Take requests, in order, while there are rows and pages for all that they may still write."""
        prompts = {}
        while waiting and waiting[0].arrives <= now and None in self.rows and self._fits(waiting[0]):
            request = waiting.pop(0)
            if request.computed:
                self.pool.add(request.name, request.computed)
                request.tokens, request.made = [request.prompt[-1]], 1  # as if a prompt had made it
            elif self.shared:
                self.pool.fork(PREFIX, request.name)
            else:
                self.pool.add(request.name)
            row = self.rows.index(None)
            self.rows[row] = request
            if request.computed:
                self._write_table(row)
            else:
                prompts[request.name] = row
        if prompts:
            made = self._prefill({name: self.rows[row].prompt for name, row in prompts.items()})
            for (_name, row), logits, token in zip(prompts.items(), made, made.argmax(-1).tolist(), strict=True):
                self._made(self.rows[row], logits)
                self.rows[row].tokens.append(token)
                self._write_table(row)

    def _prefill(self, prompts: dict[str, list[int]]) -> Tensor:
        """New tokens of some requests at once, ragged. Returns the logits behind the last one of each."""
        pool, names, counts = self.pool, list(prompts), [len(p) for p in prompts.values()]
        for name, n in zip(names, counts, strict=True):
            tersekv.copy_pages(self.cache, pool.extend(name, n))
        ends = torch.tensor([0, *counts], device=self.device).cumsum(0, dtype=torch.int32)
        self.step = Step(
            pool.slot_mapping(names, counts, device=self.device),
            pool.positions(names, counts, device=self.device),
            pool.page_table(names, device=self.device),
            pool.seq_lens(names, device=self.device),
            {"cu_seqlens_q": ends, "max_q_len": max(counts)},
        )
        tokens = torch.tensor([t for p in prompts.values() for t in p], device=self.device)
        return self.model(tokens, self.attend)[ends[1:].long() - 1]

    # ---- all running requests move one token on

    def decode(self) -> None:
        columns = [self._place(row, request) if request else self.free_row for row, request in enumerate(self.rows)]
        self._send(torch.tensor(columns).T.contiguous(), self.inputs)
        if self.graph:
            self.graph.replay()
        else:
            self._forward()
        for row, request in enumerate(self.rows):
            if request:
                self._made(request, self.logits[row])
        self.unread.append((self.next.to("cpu", copy=True, non_blocking=True), self.rows.copy(), self._event()))
        self.decoded += sum(r is not None for r in self.rows)
        self.steps += 1
        self.read(keep=1)

    def _place(self, row: int, request: Request) -> list[int]:
        """The row's column of `inputs` for one more token."""
        size, position = self.cache.page_size, self.pool.num_tokens(request.name)
        copies = self.pool.extend(request.name)
        tersekv.copy_pages(self.cache, copies)  # the last page was shared with the prefix
        if copies or position % size == 0:
            self._write_table(row)
        slot = self.pool.pages(request.name)[-1] * size + position % size
        if request.forced:
            token = request.forced[request.made - 1]
        else:  # the host knows the first one only, which a prompt made
            token = request.tokens[0] if request.made == 1 else OWN
        return [token, position, slot, position + 1]

    def read(self, keep: int) -> None:
        """Take the tokens of all steps but the last `keep`."""
        while len(self.unread) > keep:
            tokens, rows, ready = self.unread.pop(0)
            if ready:
                ready.synchronize()
            for token, request in zip(tokens.tolist(), rows, strict=True):
                if request:
                    request.tokens.append(token)

    def _made(self, request: Request, logits: Tensor) -> None:
        request.made += 1
        self.made += 1
        if self.keep_logits:
            request.logits.append(logits.to(torch.float32, copy=True))

    def _event(self) -> torch.cuda.Event | None:
        if self.graph is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def retire(self) -> None:
        """Requests that are done leave; their pages are free at once, since later writes wait for earlier reads."""
        for row, request in enumerate(self.rows):
            if request and request.made >= request.max_new:
                self.pool.free(request.name)
                self.rows[row] = None

    def run(self, requests: list[Request]) -> None:
        """Serve all of them."""
        waiting, now, start = sorted(requests, key=lambda r: r.arrives), 0, time.perf_counter()
        while waiting or any(self.rows):
            self.admit(waiting, now)
            self.retire()
            if any(self.rows):
                self.decode()
            elif waiting and waiting[0].arrives <= now:
                raise tersekv.OutOfPagesError(f"{waiting[0].name} needs more pages than the whole cache has")
            self.retire()
            now += 1
        self.read(keep=0)
        self.seconds += time.perf_counter() - start

    # ---- pages

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.cache.page_size)

    def _fits(self, request: Request) -> bool:
        """All running requests can finish, and this one too: nobody has to be stopped for want of pages."""
        promised = sum(self._pages(self._final(r)) - len(self.pool.pages(r.name)) for r in self.rows if r)
        held = self.shared // self.cache.page_size if not request.computed else 0
        return self.pool.num_free_pages - promised >= self._pages(self._final(request)) - held

    def _final(self, request: Request) -> int:
        return (request.computed or self.shared + len(request.prompt)) + request.max_new

    def _write_table(self, row: int) -> None:
        """The pages of the row's request; what stands behind them is never read."""
        pages = self.pool.pages(self.rows[row].name)
        self._send(torch.tensor(pages, dtype=torch.int32), self.tables[row, : len(pages)])

    def _send(self, x: Tensor, to: Tensor) -> None:
        """To the device, without waiting for it."""
        to.copy_(x.pin_memory() if to.is_cuda else x, non_blocking=True)


def random_model(config: LlamaConfig, device: str, dtype: torch.dtype) -> LlamaLM:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaLM(config)
    finally:
        torch.set_default_dtype(before)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):  # zero before training
            torch.nn.init.normal_(weight, std=0.5 * weight.shape[-1] ** -0.5)
    return model.eval().requires_grad_(False)


def fill(cache: tersekv.PagedKVCache, dtype: torch.dtype) -> None:
    """Rows as if prompts had been computed."""
    k = cache[0].k
    slots = torch.arange(cache.num_pages * cache.page_size, device=k.device)
    chunk = min(16384, len(slots))
    x = torch.randn(chunk, k.shape[2], cache.head_dim, device=k.device, dtype=dtype)
    for layer in cache.layers:
        for part in slots.split(chunk):
            tersekv.append(x[: len(part)], x[: len(part)], layer, part)


def make_requests(args: argparse.Namespace) -> tuple[list[int], list[Request]]:
    """The shared prefix, and requests that continue it."""
    rng = random.Random(0)
    text = encode(heldout_text()).tolist()
    prefix = [] if args.context else text[: args.prefix]
    requests = []
    for i in range(args.requests):
        start, length = rng.randrange(len(text) - 200), rng.randint(*_PROMPT)
        new = rng.randint(max(args.new_tokens // 2, 1), args.new_tokens)
        computed = rng.randint(*args.context) if args.context else 0
        arrives = 0 if computed else i * args.gap
        requests.append(Request(f"request {i}", text[start : start + length], new, arrives, computed))
    return prefix, requests


def serve(args: argparse.Namespace, model: LlamaLM, format: str, alone: bool = False) -> tuple[dict, list[Request]]:
    """Run all requests in one format. alone: one by one, without sharing, fed what the batch made."""
    prefix, requests = make_requests(args)
    lengths = sorted((r.computed or len(prefix) + len(r.prompt)) + r.max_new for r in requests)
    together = 1 if alone else args.batch
    num_pages = sum(-(-n // args.page_size) for n in [len(prefix), *lengths[-together:]]) + 1
    longest = lengths[-1]
    c = model.config
    cache = tersekv.PagedKVCache.allocate(
        c.num_layers, num_pages, args.page_size, c.num_kv_heads, c.head_dim, format=format, device=args.device
    )
    if args.context:
        fill(cache, model.embed.weight.dtype)
    if alone:
        engine = Engine(model, cache, 1, longest, keep_logits=True)
        for request, fed in zip(requests, args.made, strict=True):
            request.prompt, request.arrives, request.forced = prefix + request.prompt, 0, fed
            engine.run([request])
        return {}, requests
    engine = Engine(model, cache, args.batch, longest, keep_logits=args.check)
    if prefix:
        engine.share(prefix)
    engine.run(requests)
    return {
        "format": format,
        "tokens_per_s": round(engine.made / engine.seconds, 1),
        "ms_per_step": round(engine.seconds / engine.steps * 1e3, 3),
        "requests_per_step": round(engine.decoded / engine.steps, 1),
        "cache_bytes_per_token": cache.bytes_per_token,
        "pages_left": engine.pool.num_free_pages + (len(engine.pool.pages(PREFIX)) if prefix else 0) - num_pages,
    }, requests


def difference(a: list[Request], b: list[Request]) -> float:
    """The largest relative difference of two runs' logits, over all requests and tokens."""
    pairs = [(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p.logits, q.logits, strict=True)]
    return max(float((x - y).norm() / y.norm()) for x, y in pairs)


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"want at least {least}, got {text}")
        return int(text)

    return number


def lengths(text: str) -> tuple[int, int]:
    """A:B, the shortest and the longest."""
    parts = text.split(":")
    if len(parts) != 2 or not all(p.isdecimal() for p in parts) or not 1 <= int(parts[0]) <= int(parts[1]):
        raise argparse.ArgumentTypeError(f"want A:B with 1 <= A <= B, got {text!r}")
    return int(parts[0]), int(parts[1])


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--device", default="cpu")
    p.add_argument("--format", nargs="+", default=["bf16", "int8_per_token_head"], choices=list(tersekv.KV_FORMATS))
    one = at_least(1)
    p.add_argument("--requests", type=one, default=8)
    p.add_argument("--batch", type=one, default=4, help="rows of the fixed batch")
    # A request that makes one token has made it with its prompt, and decodes nothing.
    p.add_argument("--new-tokens", type=at_least(4), default=24, help="each request makes half to all of so many")
    p.add_argument("--prefix", type=at_least(0), default=100, help="tokens that all requests share")
    p.add_argument("--gap", type=at_least(0), default=3, help="steps between two arrivals")
    p.add_argument("--page-size", type=one, default=16)
    p.add_argument("--context", type=lengths, help="A:B: no prompts, random cached rows")
    for name in ("layers", "heads", "kv-heads", "head-dim", "dim", "mlp"):
        p.add_argument(f"--{name}", type=one, help="with random weights" if name == "layers" else None)
    p.add_argument("--no-check", dest="check", action="store_false", help="do not run each request alone")
    p.add_argument("--threads", type=one, default=1, help="on a CPU; a small model gains nothing from more")
    p.add_argument("--json", type=Path)
    return p.parse_args(argv)


def model_for(args: argparse.Namespace) -> LlamaLM:
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    fields = {"num_layers": args.layers, "num_q_heads": args.heads, "num_kv_heads": args.kv_heads}
    fields |= {"head_dim": args.head_dim, "dim": args.dim, "mlp_dim": args.mlp}
    given = {k: v for k, v in fields.items() if v is not None}
    if not given and not args.context:
        model = load("llama", args.device, dtype)
        most = model.config.max_pos - _PROMPT[1]
        if args.prefix + args.new_tokens > most:
            got = args.prefix + args.new_tokens
            raise SystemExit(f"--prefix and --new-tokens: want at most {most} together in the trained model, got {got}")
        return model
    longest = max(args.context or (0, args.prefix + _PROMPT[1])) + args.new_tokens
    return random_model(LlamaConfig(**given, max_pos=2 ** math.ceil(math.log2(longest + 1))), args.device, dtype)


@torch.inference_mode()
def main(argv: list[str] | None = None) -> list[dict]:
    args = parse(argv)
    args.check = args.check and not args.context
    torch.set_num_threads(args.threads)
    model, results = model_for(args), []
    for format in args.format:
        if args.device != "cpu" and not args.context:
            serve(args, model, format)  # compiles what prompts of these lengths need
        result, requests = serve(args, model, format)
        assert result["pages_left"] == 0, "every page came back"
        if args.check:
            args.made = [r.tokens for r in requests]
            _, alone = serve(args, model, format, alone=True)
            result["difference_to_alone"] = difference(requests, alone)
            # Sums in another order: in bf16 they can move an activation's last bit, and that a code.
            limit = 5e-2 if model.embed.weight.dtype == torch.bfloat16 else 2e-3
            assert result["difference_to_alone"] < limit, result
        results.append(result)
        rate = result["tokens_per_s"] / results[0]["tokens_per_s"]
        print(
            f"{format:20s} {result['tokens_per_s']:8.1f} tokens/s ({rate:.2f} x {results[0]['format']}), "
            f"{result['ms_per_step']:.2f} ms a step of {result['requests_per_step']} requests, "
            f"{result['cache_bytes_per_token']} bytes a token"
            + (f", alone: {result['difference_to_alone']:.1e}" if args.check else ""),
            flush=True,
        )
    if args.check:
        print(
            f"{requests[0].name}: …{text_of(torch.tensor(requests[0].prompt))!r} → "
            f"{text_of(torch.tensor(requests[0].tokens))!r}"
        )
    if args.json:
        config = {k: v for k, v in vars(args).items() if k not in ("json", "made")}
        device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
        args.json.write_text(json.dumps({"device": device, "config": config, "results": results}, indent=1) + "\n")
    return results


if __name__ == "__main__":
    main()
