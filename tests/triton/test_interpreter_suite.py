"""Runs each file of tests/interpreter in a process with TRITON_INTERPRET=1, as part of any plain pytest run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parent.parent / "interpreter").glob("test_*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_interpreted(path):
    env = dict(os.environ, TRITON_INTERPRET="1")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, env=env, cwd=path.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
