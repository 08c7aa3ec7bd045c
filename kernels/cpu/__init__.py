"""The CPU backend in numba. `load_kernels` compiles nothing by itself; each kernel compiles at its first call and is cached."""

from __future__ import annotations

import hashlib
import importlib
import os
import tempfile
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any


def _cache_dir() -> Path:
    """Where compiled kernels are kept: named by a hash of their sources, since numba looks at the calling file only.

    `$PAGEDGEN_CACHE`, else the XDG cache (as `model.demo.cache_root`, which kernels must not import), else a temporary
    directory where neither can be written.
    """
    digest = hashlib.sha256()
    for name in ("simd.py", "kernels.py"):
        digest.update((Path(__file__).parent / name).read_bytes())
    xdg = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(os.environ.get("PAGEDGEN_CACHE") or Path(xdg) / "pagedgen")
    path = root / "numba" / digest.hexdigest()[:16]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError:
        return Path(tempfile.mkdtemp(prefix="pagedgen-numba-"))


@lru_cache(maxsize=1)
def _import_kernels() -> ModuleType:
    import numba

    config: Any = numba.config
    previous = config.CACHE_DIR
    config.CACHE_DIR = str(_cache_dir())  # read when a kernel is declared, so set only around the import
    try:
        return importlib.import_module(".kernels", package=__package__)
    finally:
        config.CACHE_DIR = previous


def load_kernels() -> tuple[ModuleType, int]:
    """Return the module of compiled kernels and the number of threads numba is set to."""
    kernels = _import_kernels()
    import numba

    return kernels, numba.get_num_threads()
