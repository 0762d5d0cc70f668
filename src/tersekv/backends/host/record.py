"""What a kernel is compiled for, as one argument."""

from __future__ import annotations

from dataclasses import fields


class Record(dict):
    """Base of frozen dataclasses that kernels take as a constexpr argument: by name in the kernel, an object in JSON.

    Triton writes a kernel's constants as JSON for whoever hooks into its compiler, and takes nothing but a dict for an
    object; a NamedTuple would be a list there, and a bare tuple inside a `constexpr_function`. A field is a number, a
    string, a tuple of these, or a record.
    """

    def __post_init__(self) -> None:
        self.update({f.name: getattr(self, f.name) for f in fields(self)})  # type: ignore[arg-type]
