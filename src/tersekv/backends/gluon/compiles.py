"""Whether an operation's kernels compile with a Triton version that no test was run on.

Each is compiled once, in a subprocess: an abort there does no harm here. The result is kept beside Triton's cache, for
this version of Triton and of these sources. Versions that are `is_tested` are not checked.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
import triton

from ..host.compile_only import cache_dir, kernel_sources_hash
from ..host.versions import RANGE, is_tested

_LIMIT_S = 1800.0  # on a busy machine; one core of an EPYC takes half a minute
_log = logging.getLogger("tersekv")
_lock = threading.Lock()
_results: dict[tuple[str, str], str | None] = {}  # by Triton's version and operation


def why_not(op: str) -> str | None:
    """Returns why the operation's kernels do not compile here, and what to install; None: they do."""
    version = triton.__version__
    if is_tested(version):
        return None
    with _lock:
        if (version, op) not in _results:
            _results[version, op] = _why_not_compiles_disk_cached(version, op)
        reason = _results[version, op]
    return None if reason is None else f"does not compile with Triton {version}: {reason}. Install {RANGE}"


def _why_not_compiles_disk_cached(triton_version: str, op: str) -> str | None:
    path = _result_path(triton_version, op)
    try:
        kept = json.loads(path.read_text())
        return kept["reason"]
    except (OSError, ValueError, TypeError, KeyError):  # missing, or not valid
        pass
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{op}: whether its kernels compile with Triton {triton_version} is not known yet, and is not found out "
            "while a CUDA graph is captured: call it once before"
        )
    _log.info("compiling the kernels of %s, to see whether Triton %s can", op, triton_version)
    reason, lasting = _why_not_compiles_and_is_permanent(op)
    if lasting:
        _write_result_json(path, {"triton": triton_version, "op": op, "reason": reason})
    return reason


def _why_not_compiles_and_is_permanent(op: str) -> tuple[str | None, bool]:
    """Returns (why the kernels do not compile or None, whether the result is permanent)."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from tersekv.testing import compiles; compiles.main({op!r})"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"it could not be tried: {e}", False
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            return json.loads(line)["reason"], True
    said = (done.stderr.strip() or "nothing was said").splitlines()[-1]
    died = -done.returncode in (signal.SIGABRT, signal.SIGSEGV, signal.SIGILL)
    return f"the compiler ended with exit code {done.returncode}: {said}", died


def _write_result_json(path: Path, result: dict) -> None:
    """Stores the result atomically: several processes may write at once. Unwritable folders are skipped."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(json.dumps(result))
        os.replace(file.name, path)
    except OSError as e:
        _log.info("%s is not kept: %s", path, e)


def _result_path(triton_version: str, op: str) -> Path:
    key = hashlib.sha256(f"{triton_version} {kernel_sources_hash()}".encode()).hexdigest()[:16]
    return cache_dir() / "tersekv" / f"{op}-{key}.json"
