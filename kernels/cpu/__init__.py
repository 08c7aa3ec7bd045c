"""The CPU backend in numba."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from ..compiled import import_compiled

_SOURCES = {
    "kernels": ("simd.py", "tiles.py", "quantize.py", "write.py", "kernels.py"),
    "write": ("simd.py", "quantize.py", "write.py"),
    "rows": ("simd.py", "quantize.py", "rows.py"),
    "gemm": ("simd.py", "tiles.py", "quantize.py", "gemm.py"),
    "layers": ("layers.py",),
    "greedy": ("simd.py", "tiles.py", "quantize.py", "gemm.py", "greedy.py"),
}


def load_kernels(name: str = "kernels") -> tuple[ModuleType, int]:
    """Return a module of compiled kernels, `_SOURCES` names them, and the number of threads.

    That is torch's, which numba has been given too (see `threads.set_threads`): asking numba takes 30 times as long, at every
    call of every layer.
    """
    return _module(name), torch.get_num_threads()


@cache
def _module(name: str) -> ModuleType:
    return import_compiled(f"{__package__}.{name}", *_SOURCES[name])
