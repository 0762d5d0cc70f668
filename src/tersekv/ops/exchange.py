"""The exchange of a context-parallel decode: gather queries, attend, merge; each rank ends with its own heads.

Buffers have heads first, so that the heads of a rank are contiguous: the attention stores its outputs directly in the
send buffer, without packing. Padding heads of the last rank are sent and never read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..dispatch.checks import FLOAT, dtype_name, overlaps, require, tensor
from ..errors import UnsupportedError
from ..scalars import as_bool
from .attention import output_tensor
from .merge import merge_states
from .shards import ALIGNMENT, EXCHANGES, head_pitch

# Waits for and returns the query parts of all heads, [T, Hq, D_i]; work that does not need them comes before.
Parts = Callable[[], Sequence[Tensor]]
# Stores an attention: (parts, out [T, Hq, Dv], lse [T, Hq])
Attend = Callable[[Parts, Tensor, Tensor], Any]
# Fills (out [T, padded heads, Dv], lse [T, padded heads])
Fill = Callable[[Tensor, Tensor], None]


class Exchange:
    """Merges the partial results of a group's ranks. See `ContextParallel` for the arguments."""

    def __init__(
        self, group: dist.ProcessGroup | None, rank: int, world: int, how: str, sharded_q: bool,
        wire_dtype: torch.dtype, workspace: Tensor | None,
    ) -> None:  # fmt: skip
        require(how in EXCHANGES, "exchange", " or ".join(map(repr, EXCHANGES)), repr(how))
        require(wire_dtype in FLOAT, "wire_dtype", "bf16, fp16 or fp32", wire_dtype)
        if how == "reduce_scatter":
            require(wire_dtype == torch.float32, "wire_dtype", "fp32 for a reduce_scatter, which adds", wire_dtype)
        self.group, self.rank, self.world, self.how = group, rank, world, how
        self.sharded_q, self.wire_dtype, self.workspace = as_bool("sharded_q", sharded_q), wire_dtype, workspace
        self.silent = False  # nothing is sent or waited for

    def workspace_bytes(self, rows: int, num_heads: int, head_dim: int, head_dim_v: int, q_dtype: torch.dtype) -> int:
        if self.world == 1:
            return 0
        buffers = self._buffers(rows, num_heads, head_dim, head_dim_v, q_dtype)
        return sum(_bytes(shape, dtype) for shape, dtype in buffers.values())

    def run(
        self, parts: Sequence[Tensor], dv: int, attend: Attend, sinks: Tensor | None, out: Tensor | None,
        out_dtype: torch.dtype | None, lse: Tensor | None, return_lse: bool, backend: str | None, overlap: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Returns the attention of this rank's heads; query parts [T, heads, D_i] as passed to `ContextParallel`.

        overlap: `attend` has work to do before it waits for the parts
        """
        t, given = parts[0].shape[:2]
        heads, share = self._heads(given)
        mine = min(share, max(heads - self.rank * share, 0))
        shape = (t, mine, dv)
        out = output_tensor(parts[0], shape, out, out_dtype)
        require(tuple(out.shape) == shape, "out", f"[T, share, Dv] = {list(shape)}", list(out.shape))
        if out.dtype not in FLOAT:
            raise UnsupportedError(f"out: want bf16, fp16 or fp32 over several ranks, got {out.dtype}")
        as_bool("return_lse", return_lse)
        if lse is None:
            lse = torch.empty(shape[:2], dtype=torch.float32, device=out.device)
        tensor("lse", lse, "T share")
        fits = tuple(lse.shape) == shape[:2] and lse.dtype == torch.float32
        got = f"{list(lse.shape)} {dtype_name(lse.dtype)}"
        require(fits, "lse", f"[T, share] = {list(shape[:2])} float32", got)
        for name, written in (("out", out), ("lse", lse)):
            alone = not overlaps(written.shape, written.stride())
            require(alone, name, "memory for each element", f"strides {list(written.stride())}")
        if sinks is not None:
            tensor("sinks", sinks, "H")
            fits = tuple(sinks.shape) == (given,) and sinks.dtype == torch.float32
            require(fits, "sinks", f"[{given}] float32, one a head of q", f"{list(sinks.shape)} {sinks.dtype}")
            first = 0 if self.sharded_q else self.rank * share
            sinks = sinks[first : first + mine]
        if t > 0 and heads > 0:
            x = self._take(self._buffers(t, given, sum(p.shape[2] for p in parts), dv, parts[0].dtype), out.device)
            all_parts = self._gather_queries(x, parts, overlap) if self.sharded_q else lambda: parts
            # `backend` is the attention's; not all backends have a merge, but the oracle must run everywhere.
            backend = "torch" if backend == "torch" else None
            merge = self._all_to_all if self.how == "all_to_all" else self._reduce_scatter
            merge(x, lambda o, s: attend(all_parts, o[:, :heads], s[:, :heads]), sinks, out, lse, backend)
        return (out, lse) if return_lse else out

    def collectives(
        self, rows: int, num_heads: int, head_dim: int, head_dim_v: int, device: torch.device,
        q_dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        """Run the collectives of one `run` only, to connect the ranks before a capture, or to time them."""
        if self.world == 1:
            return
        x = self._take(self._buffers(rows, num_heads, head_dim, head_dim_v, q_dtype), device)
        if self.sharded_q:
            self._all_gather(x.all_q, x.q)
        if self.how == "all_to_all":
            self._swap(x)
        else:
            self._all_gather(x.all_lse, x.lse)
            self._sum_and_scatter(x)

    def _heads(self, given: int) -> tuple[int, int]:
        """Returns the heads of all ranks, and the padded heads of one rank."""
        heads = given * self.world if self.sharded_q else given
        return heads, -(-heads // self.world)

    def _buffers(
        self, t: int, given: int, d: int, dv: int, q_dtype: torch.dtype
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns shape and dtype of every buffer."""
        heads, share = self._heads(given)
        padded, f32 = share * self.world, torch.float32
        buffers: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.sharded_q:
            buffers |= {"q": ((given, t, d), q_dtype), "all_q": ((heads, t, d), q_dtype)}
        if self.how == "all_to_all":
            pitch = head_pitch(t, dv, self.wire_dtype.itemsize)
            buffers |= {"send": ((padded, pitch), torch.uint8), "received": ((padded, pitch), torch.uint8)}
            return buffers | {"merged": ((t, share, dv), f32)}
        buffers |= {"partial": ((padded, t, dv), f32), "lse": ((padded, t), f32)}
        return buffers | {"all_lse": ((self.world * padded, t), f32), "summed": ((share, t, dv), f32)}

    def _take(self, buffers: dict[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> SimpleNamespace:
        """Returns the buffers: views of the workspace, or new tensors."""
        if self.workspace is None:
            return SimpleNamespace(**{n: torch.empty(s, dtype=d, device=device) for n, (s, d) in buffers.items()})
        need, raw = sum(_bytes(*b) for b in buffers.values()), self.workspace
        fits = raw.dtype == torch.uint8 and raw.dim() == 1 and raw.is_contiguous() and len(raw) >= need
        fits = fits and raw.device == device and raw.data_ptr() % ALIGNMENT == 0
        got = f"{list(raw.shape)} {raw.dtype} on {raw.device}"
        require(fits, "workspace", f"contiguous uint8 [{need}] on {device}, {ALIGNMENT}-byte aligned", got)
        taken, start = SimpleNamespace(), 0
        for name, (shape, dtype) in buffers.items():
            stop = start + math.prod(shape) * dtype.itemsize
            setattr(taken, name, raw[start:stop].view(dtype).view(shape))
            start += _bytes(shape, dtype)
        return taken

    def _gather_queries(self, x: SimpleNamespace, parts: Sequence[Tensor], overlap: bool) -> Parts:
        """Start the all-gather of query heads; returns its wait. Async only to overlap: a stream switch costs µs."""
        dims, ours = [p.shape[2] for p in parts], parts[0].transpose(0, 1)
        if len(parts) > 1 or not ours.is_contiguous():
            ours = x.q
            for target, part in zip(ours.split(dims, -1), parts, strict=True):
                target.copy_(part.transpose(0, 1))
        work = self._all_gather(x.all_q, ours, async_op=overlap)

        def wait() -> Sequence[Tensor]:
            if work is not None:
                work.wait()
            return x.all_q.transpose(0, 1).split(dims, -1)

        return wait

    def _all_to_all(
        self, x: SimpleNamespace, fill: Fill, sinks: Tensor | None, out: Tensor, lse: Tensor, backend: str | None
    ) -> None:
        """Each rank sends every other its partial results of that rank's heads; the receiver merges."""
        t, mine, dv = out.shape
        fill(*_pack_partials(x.send, t, dv, self.wire_dtype))
        self._swap(x)
        if mine == 0:
            return
        outs, lses = _pack_partials(x.received.unflatten(0, (self.world, -1)), t, dv, self.wire_dtype)
        merged = out if sinks is None else x.merged[:, :mine]
        merge_states(outs[:, :, :mine], lses[:, :, :mine], out=merged, lse=lse, backend=backend)
        if sinks is not None:
            _merge_sinks(merged, lse, sinks)
            out.copy_(merged)

    def _reduce_scatter(
        self, x: SimpleNamespace, fill: Fill, sinks: Tensor | None, out: Tensor, lse: Tensor, backend: str | None
    ) -> None:
        """Each rank gathers all LSEs and rescales its partial outputs, which a reduce-scatter then sums."""
        mine = out.shape[1]
        fill(x.partial.transpose(0, 1), x.lse.T)
        self._all_gather(x.all_lse, x.lse)
        total = torch.logsumexp(x.all_lse.unflatten(0, (self.world, -1)), 0)
        # A rank without keys: −inf − −inf would be NaN where no rank has any.
        x.partial.mul_(torch.where(x.lse == -torch.inf, 0.0, torch.exp(x.lse - total))[..., None])
        summed, first = self._sum_and_scatter(x), self.rank * len(x.summed)
        merged = summed[:mine].transpose(0, 1)
        lse.copy_(total[first : first + mine].T)
        if sinks is not None:
            _merge_sinks(merged, lse, sinks)
        out.copy_(merged)

    def _swap(self, x: SimpleNamespace) -> None:
        if not self.silent:
            dist.all_to_all_single(x.received, x.send, group=self.group)

    def _sum_and_scatter(self, x: SimpleNamespace) -> Tensor:
        """Returns the sum over ranks of x.partial for this rank's heads."""
        if self.silent:
            return x.summed
        if f"{x.partial.device.type}:gloo" in dist.get_backend_config(self.group).split(","):
            # Some versions of gloo have no reduce_scatter. Only there: an all_reduce sends twice as much.
            dist.all_reduce(x.partial, group=self.group)
            return x.partial.unflatten(0, (self.world, -1))[self.rank]
        _collective("reduce_scatter_single", "reduce_scatter_tensor")(x.summed, x.partial, group=self.group)
        return x.summed

    def _all_gather(self, everything: Tensor, ours: Tensor, async_op: bool = False) -> Any:
        if self.silent:
            return None
        # As bytes: not every transport supports every dtype.
        gather = _collective("all_gather_single", "all_gather_into_tensor")
        return gather(everything.view(torch.uint8), ours.view(torch.uint8), group=self.group, async_op=async_op)


def _collective(name: str, older: str) -> Callable[..., Any]:
    """Returns a collective by its name in this torch: 2.13 renamed two of them."""
    return getattr(dist, name, None) or getattr(dist, older)


def _pack_partials(buffer: Tensor, t: int, dv: int, wire: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns views of bytes [..., heads, pitch], rows then LSE: outputs [..., T, heads, Dv], LSE [..., T, heads]."""
    values = buffer.view(wire)[..., : t * dv].unflatten(-1, (t, dv))
    first = t * dv * wire.itemsize // torch.float32.itemsize
    lses = buffer.view(torch.float32)[..., first : first + t]
    return values.transpose(-3, -2), lses.transpose(-2, -1)


def _merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Add one more score a head, with a zero value, to rows with a visible key, in place."""
    total = torch.where(lse == -torch.inf, -torch.inf, torch.logaddexp(lse, sinks))
    out.mul_(torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total))[..., None])
    lse.copy_(total)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
