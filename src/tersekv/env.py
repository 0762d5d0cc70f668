"""Every environment variable that tersekv reads (at most 4). `tersekv doctor` lists them."""

from __future__ import annotations

import os

VARIABLES = {
    "TERSEKV_BACKEND": "backend for calls that name none: torch, cpu, triton, gluon; unset: the best that can run; "
    "read when a call is first planned",
    "TERSEKV_CHECKED": "1: also check tensor values (page ids, slots, positions); synchronises. 0, false, off, no: off",
    "TERSEKV_STRICT": "1: where kernels made for the device do not compile, raise instead of a warning and slower ones",
    "TERSEKV_SGLANG_FORMAT": "format of SGLang's K/V pool with --attention-backend tersekv, a recipe, or a file of "
    "`tersekv eval --save`; unset: --kv-cache-dtype's; read when the engine starts",
}
# Every call asks for this one, and os.environ itself takes a microsecond to answer: it looks a name up as bytes, and
# raises where there is none.
_raw: dict = os.environ._data  # type: ignore[attr-defined]
_CHECKED = os.environ.encodekey("TERSEKV_CHECKED")  # type: ignore[attr-defined]
# "0" first: where the variable is unset the answer is that very object, which is found at once.
_OFF = tuple(
    os.environ.encodekey(spelt)  # type: ignore[attr-defined]
    for word in ("0", "", "false", "off", "no")
    for spelt in dict.fromkeys((word, word.title(), word.upper()))
)
_UNSET = _OFF[0]


def backend() -> str | None:
    return os.environ.get("TERSEKV_BACKEND") or None


def checked() -> bool:
    return _raw.get(_CHECKED, _UNSET) not in _OFF


def strict() -> bool:
    return os.environ.get("TERSEKV_STRICT", "0").lower() not in ("0", "", "false", "off", "no")


def sglang_format() -> str | None:
    return os.environ.get("TERSEKV_SGLANG_FORMAT") or None


def of_worker(**more: str) -> dict[str, str]:
    """The environment of a process that plans and compiles, and has no device."""
    own = {"CUDA_VISIBLE_DEVICES": "", "TERSEKV_CHECKED": "0", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **more}


def values() -> dict[str, str | None]:
    """Every variable and its value, None where it is unset."""
    return {name: os.environ.get(name) for name in VARIABLES}
