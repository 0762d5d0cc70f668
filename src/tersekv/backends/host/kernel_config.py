"""A kernel's compile-time configuration as one constexpr argument."""

from __future__ import annotations

from dataclasses import fields


class KernelConfig(dict):
    """Base of frozen dataclasses that kernels take as one constexpr argument.

    A dict, because Triton writes constants as JSON for compiler hooks, where a NamedTuple would become a list, and
    passes a NamedTuple to a `constexpr_function` as a bare tuple. A field is a number, a string, a tuple of these, or
    another config.
    """

    def __post_init__(self) -> None:
        self.update({f.name: getattr(self, f.name) for f in fields(self)})  # type: ignore[arg-type]
