"""Modules of numba functions, whose machine code is kept on disk between processes."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import tempfile
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ..machine import cache_root


def _cache_dir(sources: Iterable[Path]) -> Path:
    """Where compiled functions are kept: named by a hash of their sources, since numba looks at the calling file only.

    In pagedgen's cache, or a temporary directory where that can't be written.
    """
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    path = cache_root() / "numba" / digest.hexdigest()[:16]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError:
        return Path(tempfile.mkdtemp(prefix="pagedgen-numba-"))


class Compiling:
    """A context in which this process's compiling is timed; what it finds on disk doesn't count."""

    seconds = 0.0

    def __enter__(self) -> Compiling:
        from numba.core import event

        self._listener = event.TimingListener()
        event.register("numba:compile", self._listener)
        return self

    def __exit__(self, *error: object) -> None:
        from numba.core import event

        event.unregister("numba:compile", self._listener)
        if self._listener.done:
            self.seconds += self._listener.duration


@lru_cache(maxsize=8)
def import_compiled(name: str, *sources: str) -> ModuleType:
    """Import a module of numba functions by its full name. It compiles nothing by itself; each function does when first called.

    `sources`: the files its code comes from, beside one another; a change in any of them makes a new cache.
    """
    import numba

    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    config: Any = numba.config
    previous = config.CACHE_DIR
    config.CACHE_DIR = str(_cache_dir(folder / source for source in sources))  # read when a function is declared
    try:
        return importlib.import_module(name)
    finally:
        config.CACHE_DIR = previous
