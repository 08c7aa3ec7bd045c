"""What this machine is, and where pagedgen keeps what it learns of it."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

_MADV_HUGEPAGE = 14  # of Linux's madvise
_HUGE_PAGE_BYTES = 2 * 2**20


def cache_root() -> Path:
    """Return pagedgen's cache directory: `$PAGEDGEN_CACHE`, else `pagedgen` in the XDG cache."""
    explicit = os.environ.get("PAGEDGEN_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedgen"


def cpu_name() -> str:
    """Return the processor's name: other ones may add floats in another order."""
    return _first_of_cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Return the processor's instruction sets as Linux names them; none elsewhere."""
    return frozenset((_first_of_cpuinfo("flags") or _first_of_cpuinfo("features")).split())


@contextmanager
def without_collector() -> Iterator[None]:
    """Import and load without the garbage collector, which would look through a million new objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def prefer_huge_pages(address: int, num_bytes: int) -> None:
    """Ask Linux to back untouched memory by pages of 2 MiB, where they fit whole; elsewhere, or refused, nothing happens.

    Blocks are read in any order: with pages of 4 KiB almost each needs address translations that no cache holds.
    """
    start = -(-address // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    length = (address + num_bytes - start) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    libc = _libc()
    if libc is not None and length > 0:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)


@cache
def _libc() -> Any:
    return ctypes.CDLL(None) if platform.system() == "Linux" else None


def _first_of_cpuinfo(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found = [line.partition(":")[2].strip() for line in lines if line.lower().startswith(key)]
    return found[0] if found else ""
