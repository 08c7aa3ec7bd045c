"""Attention compiled by a process of its own: it takes as long as all other kernels, which are compiled meanwhile.

    python -m pagedgen.kernels.cpu.precompile float32 int8 32 64

Once a machine and combination of dtypes: what is compiled lies in numba's cache on disk, and a file beside it says so.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import torch

from ...machine import cache_root
from . import load_kernels
from .attention import paged_decode, write_kv

_LONGEST_S = 300.0
_started: list[subprocess.Popen[bytes]] = []  # Python warns of a forgotten process that runs, but one needn't be waited for


def _marker(*combination: object) -> Path | None:
    """Return the file that says that a combination is compiled; None where no later process would find what is."""
    import numba
    from numba.core.registry import cpu_target

    kernels = load_kernels("attend")[0]
    folder = Path(kernels.attend.stats.cache_path)
    if cache_root() not in folder.parents or kernels.__file__ is None:
        return None
    # What numba looks at as well: a source's time, its own version, the processor.
    known_by = (Path(kernels.__file__).stat().st_mtime_ns, numba.__version__, cpu_target.target_context.codegen().magic_tuple())
    return folder / f"{hashlib.sha256(repr((known_by, combination)).encode()).hexdigest()[:16]}.compiled"


class Precompilation:
    """A process that compiles attention and the K/V write for one combination."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self._process = process

    def wait(self) -> None:
        """Return when it has ended. Where it failed, kernels are compiled when they are first called, as ever."""
        try:
            self._process.wait(_LONGEST_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_precompilation(dtype: str, cache_dtype: str, block_size: int, head_dim: int) -> Precompilation | None:
    """Start it; `dtype` is the queries'. None where the combination is compiled, or can't be for others to find."""
    marker = _marker(dtype, cache_dtype, min(block_size, head_dim) < 16)
    if marker is None or marker.exists():
        return None
    command = [sys.executable, "-m", __name__, dtype, cache_dtype, str(block_size), str(head_dim)]
    nowhere = subprocess.DEVNULL
    try:
        _started.append(subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere))
    except OSError:
        return None
    return Precompilation(_started[-1])


def main(dtype: str, cache_dtype: str, block_size: int, head_dim: int) -> None:
    """Run both kernels on one token, which compiles them, and leave the marker."""
    query = torch.zeros(1, 1, head_dim, dtype=getattr(torch, dtype))
    cache = torch.zeros(1, 1, block_size, head_dim, dtype=getattr(torch, cache_dtype))
    transposed = cache.transpose(2, 3).contiguous().transpose(2, 3)
    scales = torch.zeros(1, 1, block_size) if cache_dtype == "int8" else None
    slot, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    write_kv(query, query, transposed, cache, slot, key_scales=scales, value_scales=scales)
    table, out = torch.zeros(1, 1, dtype=torch.int32), torch.empty_like(query)
    paged_decode(query, transposed, cache, table, one, out, scale=1.0, key_scales=scales, value_scales=scales)
    marker = _marker(dtype, cache_dtype, min(block_size, head_dim) < 16)
    if marker is not None:
        marker.touch()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
