"""Compiled kernels on disk, shared by processes: one at a time reads or writes them.

numba numbers the files of a function's compiled forms by an index that it reads, extends and writes back. Two processes that
first run with different dtypes at one time can take the same number, and later ones then load the code of another dtype.
"""

from __future__ import annotations

import fcntl
import os
from typing import Any


def locked(dispatcher: Any) -> Any:
    """Return a `numba.njit(cache=True)` function whose cache is read and written under a file lock."""
    cache = dispatcher._cache
    for name in ("load_overload", "save_overload"):
        setattr(cache, name, _under_lock(cache, getattr(cache, name)))
    return dispatcher


def _under_lock(cache: Any, method: Any) -> Any:
    def call(*args: Any) -> Any:
        try:
            os.makedirs(cache.cache_path, exist_ok=True)
            fd = os.open(os.path.join(cache.cache_path, "kernels.lock"), os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:  # a cache that can't be written isn't
            return method(*args)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            return method(*args)
        finally:
            os.close(fd)

    return call
