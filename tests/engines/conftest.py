"""These tests run where the engine itself is installed, in an environment of its own: `make vllm`, `make sglang`,
`make lmcache`."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [f"test_{engine}*.py" for engine in ("vllm", "sglang", "lmcache") if not find_spec(engine)]
if find_spec("sglang"):
    # Before transformers, which imports torchvision too.
    import sglang_cpu  # noqa: F401
