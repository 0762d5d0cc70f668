"""Packages of kernels that SGLang imports and, where it runs, does not call."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """Every name of it can be imported; calling one is an error of its own."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {}) if name[0].isupper() else type(self)(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _Decorators(_Package):
    """Its functions decorate, with or without arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else lambda function: function


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str, kind: type[_Package]) -> None:
        self.package, self.kind = package, kind

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        found = name.split(".")[0] == self.package
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: Any) -> ModuleType:
        return self.kind(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in(package: str, decorators: bool = False) -> None:
    """Where the package is not installed, imports of it succeed; decorators: it is used as one while imported."""
    sys.meta_path.append(_Finder(package, _Decorators if decorators else _Package))
