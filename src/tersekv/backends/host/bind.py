"""Launches of a plan: kernel arguments by name, prepared once and bound to the addresses of each call's tensors.

`run` and `bind` of every GPU backend use this file. The first call launches through Triton, which compiles; later calls
write addresses into prepared argument lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd, prod
from operator import attrgetter, itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .launch import (
    CompiledKernel,
    attach_kernel_name,
    cached_workspace,
    enter_hooks,
    exit_hooks,
    hooks_replaced,
    knob_overrides,
)

BoundLaunches = Callable[[list[int]], bool]  # launches for a list of addresses; returns whether it launched
WORKSPACE = "part"  # name of the workspace among a launch's tensors
BYTES, WORDS = "bytes", "words"  # how a kernel reads an 8-bit tensor: fp8 as uint8; or as packed 16-bit words
_MAX_TENSOR_MAPS = 1024  # sets of tensor maps that a launch keeps: a model has about a hundred layers
_SLICE_ALIGNMENT = 256  # bytes: alignment of every slice of the workspace
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class TensorArg(NamedTuple):
    """Placeholder for a tensor of the call or of its workspace.

    name:    the call's field, or the workspace slice
    view_as: BYTES, WORDS, or "" for its own dtype
    row:     first row passed, of the first dimension
    """

    name: str
    view_as: str = ""
    row: int = 0

    def resolve(self, call: Any) -> Any:
        x = getattr(call, self.name)
        if x is None:
            return None
        x = x[self.row] if self.row else x
        if self.view_as == BYTES and x.dtype in _FP8:
            return triton.reinterpret(x, tl.uint8)
        return x.view(torch.int16) if self.view_as == WORDS and x.element_size() == 1 else x


class TensorMapArg(NamedTuple):
    """Placeholder for the tensor map of such a tensor; `make_map` builds it from the tensor."""

    name: str
    make_map: Callable[[Tensor], Any]

    def resolve(self, call: Any) -> Any:
        return self.make_map(getattr(call, self.name))


def tensor_args(view_as: str = "", /, **names: str) -> dict[str, TensorArg]:
    """Returns kernel arguments that are tensors of the call: kernel name → TensorArg of the call's field."""
    return {argument: TensorArg(name, view_as) for argument, name in names.items()}


def stride_args(x: Any, **dim_letters_by_prefix: str) -> dict[str, int]:
    """Returns the strides of a tensor fact by kernel name, in the order of its dimensions; 0 where x is None.

    The one keyword is the prefix of the names, its value their last letters: stride_out_="th".
    """
    ((prefix, letters),) = dim_letters_by_prefix.items()
    steps = (0,) * len(letters) if x is None else x.stride
    return {prefix + letter: step for letter, step in zip(letters, steps, strict=False)}


def stride_unit_to_prove_alignment(x: Any, strides: tuple[int, ...], max_unit: int) -> int:
    """Returns the largest unit, at most `max_unit` (16 bytes of elements), that divides all strides. 1 where all are
    multiples of 16, which Triton specialises on by itself, or where x is not aligned.

    Strides passed in this unit prove alignment to the compiler, which then vectorises the loads.
    """
    return gcd(max_unit, *strides) if x.aligned and any(n % 16 for n in strides) else 1


class KernelLaunch:
    """A launch of a kernel for one set of facts.

    arguments: all of the kernel's parameters by name, constants included; TensorArg or TensorMapArg for tensors
    """

    __slots__ = ("_arguments", "address_slots", "grid", "launch", "mapped_tensors", "prepared")

    def __init__(self, fn: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], **options: Any) -> None:
        if arguments.keys() != set(fn.arg_names):
            odd = sorted(arguments.keys() ^ set(fn.arg_names))
            raise TypeError(f"{fn.__name__}: want every argument by its name, and no other; it is not so of {odd}")
        self.launch, self.grid = CompiledKernel(fn, **options), (*grid, 1, 1)[:3]
        self._arguments = tuple(arguments[n] for n in fn.arg_names)
        self.mapped_tensors = tuple(x.name for x in self._arguments if isinstance(x, TensorMapArg))
        # The launcher's arguments with encoded tensor maps, by the addresses of the mapped tensors.
        self.prepared: dict[tuple[int, ...], list] = {}
        # (index in the arguments, tensor name, byte offset) of each address. None: not compiled yet.
        self.address_slots: list[tuple[int, str, int]] | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(zip(self.launch.fn.arg_names, self._arguments, strict=True))

    def with_renamed_tensors(self, tensor_names: Mapping[str, str | None]) -> KernelLaunch:
        """Returns a launch of the same kernel with renamed tensors; a name of None passes None."""

        def other(x: Any) -> Any:
            name = tensor_names.get(x.name, x.name) if isinstance(x, (TensorArg, TensorMapArg)) else ""
            return x._replace(name=name) if name else None if name is None else x

        arguments = {n: other(x) for n, x in self.arguments.items()}
        return KernelLaunch(self.launch.fn, self.grid, arguments, **self.launch.options)

    def with_args(self, **arguments: Any) -> KernelLaunch:
        """Returns the same launch with these arguments replaced."""
        return KernelLaunch(self.launch.fn, self.grid, self.arguments | arguments, **self.launch.options)

    def with_grid(self, *grid: int) -> KernelLaunch:
        """Returns the same launch with another grid."""
        return KernelLaunch(self.launch.fn, grid, self.arguments, **self.launch.options)

    def tensor_names(self) -> set[str]:
        """Returns the names of all tensor arguments, present or None."""
        return {x.name for x in self._arguments if isinstance(x, (TensorArg, TensorMapArg))}

    def __call__(self, call: Any) -> None:
        """Launch with the tensors of a call and of its workspace."""
        if not self.launch.compiled:
            values = (x.resolve(call) if isinstance(x, (TensorArg, TensorMapArg)) else x for x in self._arguments)
            self.launch.compile_launch_and_keep_launcher(self.grid, tuple(values))
            return
        args = self.cached_launcher_args_without_addresses(call).copy()
        assert self.address_slots is not None
        for slot, name, offset in self.address_slots:
            args[slot] = getattr(call, name).data_ptr() + offset
        self.launch.relaunch(args)

    def cached_launcher_args_without_addresses(self, call: Any) -> list:
        """Returns the cached argument list of a compiled launch, to be copied. Tensor maps are encoded once."""
        key = tuple(getattr(call, name).data_ptr() for name in self.mapped_tensors)
        found = self.prepared.get(key)
        if found is None:
            if len(self.prepared) >= _MAX_TENSOR_MAPS:
                self.prepared.clear()
            found = self.prepared[key] = self._make_launcher_args_and_set_address_slots(call)
        return found

    def _make_launcher_args_and_set_address_slots(self, call: Any) -> list:
        mapped_tensors = tuple(x.resolve(call) for x in self._arguments if isinstance(x, TensorMapArg))
        encoded = iter(self.launch.launcher_args_of_tensor_maps(mapped_tensors) if mapped_tensors else ())
        args, address_slots = self.launch.leading_args(self.grid), []
        for x in self._arguments:
            if isinstance(x, TensorMapArg):
                args += next(encoded)
                continue
            tensor = x.resolve(call) if isinstance(x, TensorArg) else None
            if tensor is not None:
                address_slots.append((len(args), x.name, tensor.data_ptr() - getattr(call, x.name).data_ptr()))
            args.append(None if isinstance(x, TensorArg) else x)
        self.address_slots = address_slots  # equal facts: the same arguments are None
        return args


class WorkspaceSlice(NamedTuple):
    """A slice of the workspace."""

    offset: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype


class Workspace:
    """Memory through which the launches of a call pass data: one allocation, WORKSPACE, and named slices of it.

    num_floats:       fp32 numbers at its beginning
    slices:           shape and dtype by name, placed behind them; None: no such tensor
    max_cached_bytes: largest allocation that is kept for the next call; None: any
    """

    def __init__(
        self, num_floats: int, slices: Mapping[str, tuple[Sequence[int], torch.dtype] | None] | None = None,
        max_cached_bytes: int | None = None,
    ) -> None:  # fmt: skip
        end = 4 * num_floats
        self.slices: dict[str, WorkspaceSlice | None] = {}
        for name, wanted in (slices or {}).items():
            self.slices[name] = None
            if wanted is not None:
                slice_ = WorkspaceSlice(-(-end // _SLICE_ALIGNMENT) * _SLICE_ALIGNMENT, tuple(wanted[0]), wanted[1])
                self.slices[name], end = slice_, slice_.offset + prod(slice_.shape) * slice_.dtype.itemsize
        self.num_floats = -(-end // 4)
        self.cached = max_cached_bytes is None or end <= max_cached_bytes

    def offsets(self) -> dict[str, int]:
        """Returns the byte offset of each slice by name."""
        return {WORKSPACE: 0} | {name: slice_.offset for name, slice_ in self.slices.items() if slice_ is not None}

    def tensors_with_workspace(self, call: Any) -> SimpleNamespace:
        """Returns the tensors of the call together with those of its workspace."""
        like = next(x for x in call if isinstance(x, Tensor))
        memory = launch.workspace(self.num_floats, like) if self.cached else _allocate(self.num_floats, like.device, 0)
        return SimpleNamespace(**call._asdict() | {WORKSPACE: memory} | self.slice_views(memory))

    def slice_views(self, workspace: Tensor) -> dict[str, Tensor | None]:
        as_bytes = workspace.view(torch.uint8)
        return {
            name: None if p is None
            else as_bytes[p.offset : p.offset + prod(p.shape) * p.dtype.itemsize].view(p.dtype).view(p.shape)
            for name, p in self.slices.items()
        }  # fmt: skip


class LaunchSequence:
    """The launches of a plan, in order; may be empty."""

    def __init__(self, *kernel_launches: KernelLaunch, workspace: Workspace | None = None) -> None:
        self.kernel_launches, self.workspace = kernel_launches, workspace
        self._bound: BoundLaunches | None = None
        self._tensors_of: Any = None

    def __call__(self, call: Any) -> None:
        bound = self._bound
        if bound is None or not bound([x.data_ptr() for x in self._tensors_of(call)]):
            self._launch_and_try_to_bind(call)

    def bind(self, index_by_name: Mapping[str, int]) -> BoundLaunches | None:
        """Returns the launches bound to a list of addresses. None: there are no launches, they are not compiled, or
        the workspace is not cached.

        index_by_name: index of each tensor's address in the list
        """
        if not self.kernel_launches or (self.workspace is not None and not self.workspace.cached):
            return None
        return bind_to_address_list_if_compiled(self.kernel_launches, index_by_name, self.workspace)

    def _launch_and_try_to_bind(self, call: Any) -> None:
        """Compile and encode whatever is missing, and launch."""
        tensors = call if self.workspace is None else self.workspace.tensors_with_workspace(call)
        for template in self.kernel_launches:
            template(tensors)
        if self._bound is None and self.kernel_launches and all(t.launch.compiled for t in self.kernel_launches):
            for template in self.kernel_launches:
                template.cached_launcher_args_without_addresses(tensors)
            names = sorted(
                {n for t in self.kernel_launches for n in t.tensor_names() if getattr(call, n, None) is not None}
            )
            self._tensors_of = attrgetter(*names) if len(names) > 1 else lambda call: [getattr(call, n) for n in names]
            self._bound = bind_to_address_list_if_compiled(
                self.kernel_launches, {n: i for i, n in enumerate(names)}, self.workspace
            )


class HostAction:
    """A host function in place of launches, for calls without work."""

    kernel_launches: tuple[KernelLaunch, ...] = ()

    def __init__(self, do: Callable[[Any], None]) -> None:
        self._do = do

    def __call__(self, call: Any) -> None:
        self._do(call)

    def bind(self, at: Mapping[str, int]) -> None:
        return None


def bind_to_address_list_if_compiled(
    kernel_launches: Sequence[KernelLaunch], index_by_name: Mapping[str, int], workspace: Workspace | None = None
) -> BoundLaunches | None:
    """Returns a function that launches all kernels for a list of addresses. None: not compiled yet.

    index_by_name: index of each tensor's address in the list
    """
    if any(t.address_slots is None for t in kernel_launches):
        return None
    offsets_by_name = {} if workspace is None else workspace.offsets()
    index_by_name = dict(index_by_name) | {name: len(index_by_name) + i for i, name in enumerate(offsets_by_name)}
    launches, mapped = [], []
    for t in kernel_launches:
        address_slots = [(slot, index_by_name[name]) for slot, name, offset in t.address_slots or () if not offset]
        offset_slots = [(slot, index_by_name[name], offset) for slot, name, offset in t.address_slots or () if offset]
        launches.append(
            (t.launch, t.launch.run, None if t.mapped_tensors else t.prepared[()], address_slots, offset_slots)
        )
        if t.mapped_tensors:
            mapped.append((t.prepared, _address_getter([index_by_name[name] for name in t.mapped_tensors])))
    index, offsets = kernel_launches[0].launch.device, tuple(offsets_by_name.values())
    device = torch.device("cuda", index)
    num_floats = 0 if workspace is None else workspace.num_floats
    allocate = cached_workspace if workspace is None or workspace.cached else _allocate

    def launch_all_if_tensor_maps_are_cached(addresses: list[int]) -> bool:
        stream = torch._C._cuda_getCurrentRawStream(index)
        if num_floats:
            memory = allocate(num_floats, device, stream)
            begin = memory.data_ptr()
            for offset in offsets:
                addresses.append(begin + offset)
        prefixes = []
        for prepared, pick in mapped:
            found = prepared.get(pick(addresses))
            if found is None:
                return False
            prefixes.append(found)
        i, has_hooks = 0, enter_hooks.calls or exit_hooks.calls or (knob_overrides and hooks_replaced())
        for kernel, run, prefix, address_slots, offset_slots in launches:
            if prefix is None:
                prefix, i = prefixes[i], i + 1
            args = prefix.copy()
            for slot, i_address in address_slots:
                args[slot] = addresses[i_address]
            for slot, i_address, offset in offset_slots:
                args[slot] = addresses[i_address] + offset
            args[3] = stream
            if has_hooks:
                kernel.set_hook_args(args)
            try:
                run(*args)
            except Exception as e:
                attach_kernel_name(kernel.fn, e)
                raise
        return True

    return launch_all_if_tensor_maps_are_cached


def _address_getter(places: list[int]) -> Callable[[list[int]], tuple[int, ...]]:
    """Returns a getter of the list entries at `places`, as a tuple."""
    return itemgetter(*places) if len(places) > 1 else lambda a: (a[places[0]],)


def _allocate(n: int, device: torch.device, stream: int) -> Tensor:
    return torch.empty(n, dtype=torch.float32, device=device)
