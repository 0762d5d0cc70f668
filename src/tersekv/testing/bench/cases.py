"""What `tersekv bench` times: frozen cases, and the grid of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

HEAD_DIM, RANK, ROPE, NOPE = 128, 512, 64, 128  # of a K/V head; of MLA's latent, rotary and non-rotary parts
Q_HEADS, KV_HEADS = 32, 8
INDEX_HEADS, INDEX_DIM, TOP = 64, 128, 2048  # of an indexer; how many keys it takes
LISTED, BLOCK = 2048, 128  # keys that a sparse model lists, by tokens or by such blocks
ONE_LIST, PER_HEAD, ALIKE_LISTS = "one list", "a list per head", "a list per head, alike"  # of a row
ALIKE, NEIGHBOURS = 0.9, 64  # share of their entries that so many rows have in common, where lists are alike
APPEND_FORMATS = ("fp8_e4m3", "fp8_per_token_head", "int8_per_token_head", "nvfp4", "int4_per_token_head")
DECODE_FORMATS = ("bf16", *APPEND_FORMATS)
PAIRS = ("fp8_e4m3/int4_per_token_head", "int8_per_token_head/int4_per_token_head")  # K's and V's
LATENT_FORMATS = ("bf16", "fp8_e4m3", "fp8_ds_mla")
BLOCK_FORMATS = ("bf16", "fp8_e4m3", "int8_per_token_head")
OPS = (
    "append", "rope_append", "mla_append", "decode", "prefill", "merge_states", "mla_decode", "mla_decode_branch",
    "mla_prefill", "mla_project", "transcode", "index", "sparse", "block_sparse", "host",
)  # fmt: skip


_CELL = re.compile(r"(\d+)(?: *(x|of) *(\d+))?")


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to time. A case without `requests` writes or prefills `tokens` new ones, of one request."""

    op: str
    format: str  # of decode and prefill also a pair, K's and V's: "fp8_e4m3/int4_per_token_head"
    requests: int
    tokens: int  # cached tokens of a request; of appends and prefill: new tokens
    heads: int = Q_HEADS
    page: int = 64
    uneven: bool = False  # lengths uniform in [1, 2 × tokens]
    host: bool = False  # the host's time of an eager call
    precision: str = "exact"
    query: str = "bf16"  # type of the queries; of prefill and MLA decode also fp8_e4m3
    scales: str = "apart"  # where stored scales lie; of decode also "tail"
    batch_invariant: bool = False
    through: str = ""  # the function of `compat` that makes the call, and how: "flashinfer.xqa", "flashinfer.xqa: …"
    total: int = 0  # of prefill: tokens of the request, the new ones included; 0: all are new
    rotated: bool = False  # of append, rope_append and transcode: rows of K and V become rotated
    source: str = ""  # of transcode: the format that is read
    listed: int = 0  # of the sparse ones: keys of each list
    block: int = 1  # tokens that an entry of a list stands for
    lists: str = ""  # of blocks: ONE_LIST, PER_HEAD or ALIKE_LISTS

    @property
    def cell(self) -> str:
        new = f"{self.requests} x {self.tokens}" if self.requests else f"{self.tokens}"
        return f"{new} of {self.total}" if self.total else new

    @property
    def verb(self) -> str:
        """The operation as a reader knows it."""
        return self.op

    @property
    def sizes(self) -> tuple[str, ...]:
        """What the cell does not say of the shape, in words."""
        listed = [f"{self.listed} listed"] if self.listed else []
        if self.block > 1:
            listed = [f"{self.listed // self.block} blocks of {self.block}", self.lists]
        return f"H {self.heads}", f"page {self.page}", *listed

    @property
    def dense(self) -> Case | None:
        """Of a decode over lists of blocks: the decode over as many keys in order."""
        if self.op != "block_decode":
            return None
        return replace(self, op="decode", tokens=min(self.listed, self.tokens), listed=0, block=1, lists="")

    @property
    def id(self) -> str:
        parts = [self.verb, self.format, self.cell, *self.sizes]
        parts += ["uneven"] * self.uneven + ["host"] * self.host + ["fast"] * (self.precision == "fast")
        parts += [f"q {self.query}"] * (self.query != "bf16") + [self.scales] * (self.scales != "apart")
        parts += ["batch invariant"] * self.batch_invariant + ["rotated"] * self.rotated
        parts += [f"from {self.source}"] * bool(self.source)
        parts += [self.through] * bool(self.through)
        return " / ".join(parts)

    def as_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The cells of a grid: (requests, tokens) of the decodes, (new tokens, all or 0) of prefill, (tokens, heads) of MLA
    prefill, tokens of the others. `sparse` and `sparse_prefill` are of lists of tokens and of blocks."""

    decode: tuple[tuple[int, int], ...]
    extra: tuple[tuple[int, int], ...]  # decode cells that are also timed with pages of 16 and with unequal lengths
    mla: tuple[tuple[int, int], ...]
    mla_heads: tuple[int, ...]
    branch: tuple[tuple[int, int], ...]
    append: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]
    mla_prefill: tuple[tuple[int, int], ...]
    index: tuple[tuple[int, int], ...]
    host: tuple[int, int] | None  # (requests, tokens) of the eager calls; None: host and device are one
    sparse: tuple[tuple[int, int], ...] = ()
    sparse_prefill: tuple[tuple[int, int], ...] = ()
    sparse_heads: tuple[int, ...] = (16,)


_K = 1024
GPU = Sizes(
    decode=((1, 8 * _K), (1, 128 * _K), (16, 8 * _K), (16, 64 * _K), (64, _K), (64, 8 * _K), (256, _K), (256, 8 * _K)),
    extra=((16, 8 * _K), (64, 8 * _K)),
    mla=((1, 8 * _K), (16, 8 * _K), (64, 4 * _K), (128, 8 * _K)),
    mla_heads=(16, 128),
    branch=((1, 4 * _K), (8, 4 * _K), (64, 4 * _K)),
    append=(1, 32, 256, 2048, 16384),
    prefill=((_K, 0), (8 * _K, 0), (2 * _K, 32 * _K), (512, 128 * _K)),
    mla_prefill=((4096, 16), (4096, 128)),
    index=tuple((b, n * _K) for b in (1, 8, 32, 64) for n in (4, 16, 64)),
    host=(4, 256),
    sparse=tuple((b, 8 * _K) for b in (1, 8, 32, 128)),
    sparse_prefill=((_K, 32 * _K), (8 * _K, 32 * _K)),
    sparse_heads=(16, 64, 128),
)
GPU_QUICK = Sizes(
    decode=((1, 8 * _K), (64, 8 * _K)), extra=(), mla=((16, 8 * _K),), mla_heads=(16, 128),
    branch=((1, 4 * _K),), append=(32, 2048), prefill=((8 * _K, 0),), mla_prefill=((4096, 128),),
    index=((64, 64 * _K),),
    host=(4, 256), sparse=((32, 8 * _K),), sparse_prefill=((8 * _K, 32 * _K),), sparse_heads=(16, 128),
)  # fmt: skip
CPU = Sizes(
    decode=((1, 4 * _K), (4, _K)), extra=(), mla=((1, 2 * _K),), mla_heads=(16,), branch=((1, _K),),
    append=(32, 256), prefill=((512, 0), (64, 2 * _K)), mla_prefill=((128, 4),),
    index=((1, 4 * _K), (4, 16 * _K)),
    host=None, sparse=((1, 4 * _K),), sparse_prefill=((32, 4 * _K),),
)  # fmt: skip
CPU_QUICK = Sizes(
    decode=((1, 512),),
    extra=(),
    mla=((1, 256),),
    mla_heads=(16,),
    branch=((1, 256),),
    append=(32,),
    prefill=((128, 0),),
    mla_prefill=((64, 1),),
    index=((1, 4 * _K),),
    host=None,
    sparse=((1, 4 * _K),),
    sparse_prefill=((16, 4 * _K),),
)


def sizes(device: str, quick: bool) -> Sizes:
    """The default cells of a kind of device."""
    if device == "cpu":
        return CPU_QUICK if quick else CPU
    return GPU_QUICK if quick else GPU


def parsed(cell: str) -> tuple[str, int, int]:
    """What stands between the numbers of a cell ("x", "of" or ""), and these. Raises ValueError for no kind of cell."""
    found = _CELL.fullmatch(cell.strip().lower())
    numbers = [int(n) for n in found.group(1, 3) if n] if found else [0]
    new, total = numbers[0], numbers[-1]
    if not found or not all(numbers) or (found[2] == "of" and new > total):
        raise ValueError(
            "cells: want requests x tokens such as 64x8192, new tokens such as 2048, or new tokens of all such as "
            f"512of8192, got {cell!r}"
        )
    return found[2] or "", new, total


def with_cells(s: Sizes, cells: Sequence[str]) -> Sizes:
    """`s` with the cells named: "BxL" replaces those of the decodes, "NofL" those of prefill, and a plain number the
    tokens of all but the decodes. The sparse ones have both kinds of cells, and then none that are not named.

    Raises ValueError for no kind of cell.
    """
    found = [parsed(cell) for cell in cells]
    pairs, counts = tuple((b, n) for kind, b, n in found if kind == "x"), [n for kind, n, _ in found if not kind]
    prompts = tuple((new, 0 if kind == "" else total) for kind, new, total in found if kind != "x")
    if pairs:
        s = replace(
            s, decode=pairs, mla=pairs, branch=pairs, index=pairs, extra=tuple(p for p in s.extra if p in pairs)
        )
    if prompts:
        s = replace(s, prefill=prompts)
    if found:
        s = replace(s, sparse=pairs, sparse_prefill=prompts)
    if counts:
        heads = tuple(dict.fromkeys(h for _, h in s.mla_prefill))
        s = replace(s, append=tuple(counts), mla_prefill=tuple((n, h) for n in counts for h in heads))
    return s


def grid(
    s: Sizes,
    ops: Iterable[str] = OPS,
    formats: Iterable[str] | None = None,
    *,
    page: int | None = None,
    uneven: bool = False,
    precisions: Iterable[str] = ("exact",),
    batch_invariant: bool = False,
) -> Iterator[Case]:
    """The cases of the operations and formats named (None: all).

    page:    the only page size; None: 64, and 16 too in the `extra` cells
    uneven:  unequal lengths only, in every cell
    batch_invariant:  each case of `decode` and `mla_decode` once more, with that option
    """
    asked, precisions = set(ops), set(precisions)
    every = [case for op in OPS if op in asked for case in _GRIDS[op](s)]
    if page is not None:
        every = [replace(case, page=page) for case in every if case.page == 64]
    if uneven:
        every = [replace(case, uneven=True) for case in every if case.requests and not case.host]
    wanted = None if formats is None else set(formats)
    for case in dict.fromkeys(every):
        if wanted is None or case.format in wanted:
            yield case
            if "fast" in precisions and _may_be_fast(case):
                yield replace(case, precision="fast")
            if batch_invariant and case.op in ("decode", "mla_decode") and not case.host:
                yield replace(case, batch_invariant=True)


def _may_be_fast(case: Case) -> bool:
    """Whether precision="fast" permits more."""
    if case.op == "mla_decode":
        return case.format != "bf16" and not case.host
    return case.op == "prefill" and (case.query != "bf16" or case.format == "int8_per_token_head") and not case.host


def _append(s: Sizes) -> Iterator[Case]:
    for name in APPEND_FORMATS:
        yield from (Case("append", name, 0, n, heads=KV_HEADS) for n in s.append)
        yield Case("append", name, 0, max(s.append), heads=KV_HEADS, rotated=True)


def _rope_append(s: Sizes) -> Iterator[Case]:
    for name in ("fp8_e4m3", "fp8_per_token_head"):
        yield from (Case("rope_append", name, 0, n) for n in s.append)
        yield Case("rope_append", name, 0, max(s.append), rotated=True)


def _mla_append(s: Sizes) -> Iterator[Case]:
    for name in ("fp8_e4m3", "fp8_ds_mla"):
        yield from (Case("mla_append", name, 0, n, heads=max(s.mla_heads)) for n in s.append)


def _decode(s: Sizes) -> Iterator[Case]:
    for b, n in s.decode:
        yield from (Case("decode", name, b, n) for name in DECODE_FORMATS)
    for b, n in s.extra:
        yield from (Case("decode", name, b, n, page=16) for name in DECODE_FORMATS)
        yield from (Case("decode", name, b, n, uneven=True) for name in DECODE_FORMATS)
        yield from (Case("decode", name, b, n, scales="tail") for name in APPEND_FORMATS[1:])
        yield from (Case("decode", name, b, n) for name in PAIRS)


def _prefill(s: Sizes) -> Iterator[Case]:
    for n, total in s.prefill:
        yield from (Case("prefill", name, 0, n, total=total) for name in DECODE_FORMATS)
        yield Case("prefill", "fp8_e4m3", 0, n, total=total, query="fp8_e4m3")


def _merge_states(s: Sizes) -> Iterator[Case]:
    yield from (Case("merge_states", "bf16", 0, n) for n in s.append)


def _mla_project(s: Sizes) -> Iterator[Case]:
    for name in ("bf16", "fp8_e4m3"):
        yield from (Case("mla_project", name, 0, n, heads=max(s.mla_heads)) for n in s.append)


def _mla_decode(s: Sizes) -> Iterator[Case]:
    for heads in s.mla_heads:
        for b, n in s.mla:
            yield from (Case("mla_decode", name, b, n, heads=heads) for name in LATENT_FORMATS)
            yield Case("mla_decode", "fp8_e4m3", b, n, heads=heads, query="fp8_e4m3")


def _mla_decode_branch(s: Sizes) -> Iterator[Case]:
    for b, n in s.branch:
        yield from (Case("mla_decode_branch", name, b, n, heads=max(s.mla_heads)) for name in LATENT_FORMATS)


def _mla_prefill(s: Sizes) -> Iterator[Case]:
    yield from (Case("mla_prefill", "bf16", 0, n, heads=heads) for n, heads in s.mla_prefill)


def _transcode(s: Sizes) -> Iterator[Case]:
    """Prompts, to colder pages and back, and as they are."""
    for n in [n for n in s.append if n > 256] or [max(s.append)]:
        yield from (Case("transcode", dst, 0, n, heads=KV_HEADS, source=src) for src, dst in _TRANSCODES)
    for src, dst in (_TRANSCODES[0], _TRANSCODES[2]):
        yield Case("transcode", dst, 0, max(s.append), heads=KV_HEADS, source=src, rotated=True)


_TRANSCODES = (
    ("fp8_e4m3", "int4_per_token_head"), ("int4_per_token_head", "fp8_e4m3"), ("bf16", "int4_per_token_head"),
    ("int4_per_token_head", "bf16"), ("bf16", "fp8_e4m3"), ("fp8_e4m3", "nvfp4"), ("fp8_e4m3", "fp8_e4m3"),
)  # fmt: skip


def _index(s: Sizes) -> Iterator[Case]:
    for b, n in s.index:
        yield from (Case(op, "index_fp8", b, n, heads=INDEX_HEADS) for op in ("index_scores", "index_select"))
        yield Case("index_select", "bf16", b, n, heads=INDEX_HEADS)
        yield Case("index_topk", "fp32", b, n, heads=1)


def _sparse(s: Sizes) -> Iterator[Case]:
    for heads in s.sparse_heads:
        for b, n in s.sparse:
            yield from (Case("sparse", name, b, n, heads=heads, listed=LISTED) for name in LATENT_FORMATS)
        for n, total in s.sparse_prefill:
            row = Case("sparse_prefill", "", 0, n, heads=heads, total=total, listed=LISTED)
            yield from (replace(row, format=name) for name in LATENT_FORMATS)


def _block_sparse(s: Sizes) -> Iterator[Case]:
    """Decodes beside the dense one over as many keys, and prefills."""
    for name in BLOCK_FORMATS:
        for b, n in s.sparse:
            case = Case("block_decode", name, b, n, listed=LISTED, block=BLOCK, lists=PER_HEAD)
            yield from (case.dense or case, case, replace(case, lists=ONE_LIST))
        for n, total in s.sparse_prefill:
            case = Case("block_prefill", name, 0, n, total=total, listed=LISTED, block=BLOCK, lists=PER_HEAD)
            yield from (case, replace(case, lists=ALIKE_LISTS))


def _host(s: Sizes) -> Iterator[Case]:
    if s.host is None:
        return
    b, n = s.host
    yield Case("append", "fp8_per_token_head", 0, b, heads=KV_HEADS, host=True)
    yield Case("rope_append", "fp8_e4m3", 0, b, host=True)
    yield Case("mla_append", "fp8_e4m3", 0, b, heads=16, host=True)
    yield Case("decode", "fp8_e4m3", b, n, host=True)
    yield Case("prefill", "fp8_e4m3", 0, 64, host=True)
    yield Case("mla_decode", "fp8_e4m3", b, n, heads=16, host=True)
    yield Case("mla_decode_branch", "fp8_e4m3", b, n, heads=16, host=True)
    yield Case("mla_prefill", "bf16", 0, 64, heads=16, host=True)
    yield Case("mla_project", "bf16", 0, b, heads=16, host=True)
    yield Case("merge_states", "bf16", 0, b, host=True)
    yield Case("transcode", "int4_per_token_head", 0, 64, heads=KV_HEADS, host=True, source="fp8_e4m3")
    yield from (replace(case, host=True) for case in _index(replace(s, index=((b, n),))))
    for library, functions in _THROUGH.items():
        for function, op, format in functions:
            case = Case(op, format, 0, b, host=True, through=f"{library}.{function}")
            if "decode" in op:
                case = replace(case, requests=1 if "single" in function else b, tokens=n)
            if "single" in function:  # its keys lie in one page
                case = replace(case, page=n)
            heads = 16 if "mla" in op else KV_HEADS if op == "append" else Q_HEADS
            case = replace(case, heads=heads, tokens=64 if op == "mla_prefill" else case.tokens)
            yield case
            yield from (replace(case, through=f"{case.through}: {way}") for way in _WAYS.get((function, op), ()))


_ROPE = "rope_quantize_fp8_append_paged_kv_cache"
# Other ways of calling a function of `compat` in an operation, by their names in `compat.WAYS`.
_WAYS = {
    ("xqa_batch_decode_with_kv_cache", "decode"): ("no out", "tensor scales"),
    ("xqa", "decode"): ("tensor scales", "one scale twice"),
    ("BatchDecodeWithPagedKVCacheWrapper", "decode"): ("no out", "tensor scales"),
    ("trtllm_batch_decode_with_kv_cache", "decode"): ("no out", "tensor scales"),
    ("xqa_mla", "mla_decode"): ("tensor scales",),
    ("xqa_batch_decode_with_kv_cache_mla", "mla_decode"): ("no out", "tensor scales"),
    (_ROPE, "rope_append"): ("no outputs", "empty q_nope_out", "tensor scales", "one scale twice"),
    (_ROPE, "mla_append"): ("no outputs", "tensor scales", "one scale twice"),
}
# Functions of `compat`: library → (name, operation, format).
_THROUGH = {
    "flashinfer": (
        ("xqa_batch_decode_with_kv_cache", "decode", "fp8_e4m3"), ("xqa", "decode", "fp8_e4m3"),
        ("BatchDecodeWithPagedKVCacheWrapper", "decode", "fp8_e4m3"),
        ("BatchPrefillWithPagedKVCacheWrapper", "decode", "bf16"),
        ("single_prefill_with_kv_cache", "decode", "bf16"), ("single_decode_with_kv_cache", "decode", "bf16"),
        ("trtllm_batch_decode_with_kv_cache", "decode", "fp8_e4m3"), ("xqa_mla", "mla_decode", "fp8_e4m3"),
        ("xqa_batch_decode_with_kv_cache_mla", "mla_decode", "fp8_e4m3"), (_ROPE, "rope_append", "fp8_e4m3"),
        (_ROPE, "mla_append", "fp8_e4m3"), ("append_paged_kv_cache", "append", "bf16"),
        ("append_paged_mla_kv_cache", "mla_append", "bf16"), ("merge_state", "merge_states", "bf16"),
        ("merge_states", "merge_states", "bf16"), ("get_seq_lens", "places", "int32"),
        ("get_batch_indices_positions", "places", "int32"),
    ),
    "vllm": (
        ("triton_reshape_and_cache_flash_per_token_head_quant", "append", "fp8_per_token_head"),
        ("reshape_and_cache_flash", "append", "fp8_e4m3"), ("concat_and_cache_mla", "mla_append", "fp8_e4m3"),
    ),
    "max": (("mla_decode_branch_fp8", "mla_decode_branch", "bf16"), ("mla_prefill_branch_fp8", "mla_prefill", "bf16")),
}  # fmt: skip

_GRIDS = {
    "append": _append,
    "rope_append": _rope_append,
    "mla_append": _mla_append,
    "decode": _decode,
    "prefill": _prefill,
    "merge_states": _merge_states,
    "mla_decode": _mla_decode,
    "mla_decode_branch": _mla_decode_branch,
    "mla_prefill": _mla_prefill,
    "mla_project": _mla_project,
    "transcode": _transcode,
    "index": _index,
    "sparse": _sparse,
    "block_sparse": _block_sparse,
    "host": _host,
}
