"""These tests run where the engine itself is installed, in an environment of its own: `make vllm`."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_vllm*.py"]
