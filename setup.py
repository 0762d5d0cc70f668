"""Compiles the native kernels for CPUs where there is a C++ compiler; all else is said in pyproject.toml.

Without a compiler the installation goes on: everything then runs in eager PyTorch, and `tersekv doctor` says so.
TERSEKV_PURE=1 leaves the kernels out, for a wheel that fits every machine. CXX names the compiler.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = runpy.run_path("src/tersekv/backends/cpu/build.py")
PURE = os.environ.get("TERSEKV_PURE", "") not in ("", "0")


class BuildNative(build_ext):
    """One library, called through ctypes, which knows nothing of the Python that loads it."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1]) / NATIVE["LIBRARY"].name)

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            levels = NATIVE["build_library_and_return_levels"](target, os.environ.get("CXX"))
        except RuntimeError as e:
            self.warn(f"tersekv's native kernels are left out; decode on a CPU will be several times slower:\n{e}")
        else:
            self.announce(f"native kernels: {', '.join(levels)}", level=2)


class AnyPython(bdist_wheel):
    """The wheel fits every Python of this platform, or every platform where nothing was compiled."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        built = any(Path(self.get_finalized_command("build").build_lib).rglob(NATIVE["LIBRARY"].name))
        return "py3", "none", platform if built else "any"


# Beside the sources that a wheel brings along, so that it can be compiled where it is installed.
extension = Extension("tersekv.backends.cpu._native", sources=[], optional=True)
setup(
    ext_modules=[] if PURE else [extension],
    cmdclass={} if PURE else {"build_ext": BuildNative, "bdist_wheel": AnyPython},
)
