"""Every environment variable that tersekv reads (at most 4). `tersekv doctor` lists them."""

from __future__ import annotations

import os

VARIABLES = {
    "TERSEKV_BACKEND": "backend for calls that name none: torch, triton; unset: the best that can run",
    "TERSEKV_CHECKED": "1: also check tensor values (page ids, slots, positions); synchronises with the device",
}


def backend() -> str | None:
    return os.environ.get("TERSEKV_BACKEND") or None


def checked() -> bool:
    return os.environ.get("TERSEKV_CHECKED", "0") not in ("", "0")


def values() -> dict[str, str | None]:
    """Every variable and its value, None where it is unset."""
    return {name: os.environ.get(name) for name in VARIABLES}
