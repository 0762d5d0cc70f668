"""The native library, as every file here wants it."""

from __future__ import annotations

import shutil

import pytest
import torch

from tersekv.backends.cpu import build, library


@pytest.fixture
def native():
    """The library; where there is a compiler it must have been compiled, from these sources."""
    if not any(map(shutil.which, build._COMPILERS)):
        pytest.skip("no C++ compiler is here: the backend refuses every call")
    found = library.load_compiled_library_or_reason()
    assert isinstance(found, library.Library), found
    level, threads = found.level(), torch.get_num_threads()
    yield found
    found.use_level(level)
    torch.set_num_threads(threads)
