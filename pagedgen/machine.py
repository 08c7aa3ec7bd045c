"""What this machine is, and where pagedgen keeps what it learns of it."""

from __future__ import annotations

import os
import platform
from pathlib import Path


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


def _first_of_cpuinfo(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found = [line.partition(":")[2].strip() for line in lines if line.lower().startswith(key)]
    return found[0] if found else ""
