"""The CPU backend in numba."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from ..compiled import import_compiled

_SOURCES = {
    "attend": ("jit.py", "simd.py", "vmath.py", "tiles.py", "quantize.py", "write.py", "items.py", "softmax.py", "attend.py"),
    "write": ("jit.py", "simd.py", "quantize.py", "write.py"),
    "rows": ("jit.py", "simd.py", "vmath.py", "quantize.py", "rows.py"),
    "gemm": ("jit.py", "simd.py", "vmath.py", "tiles.py", "quantize.py", "gemm.py"),
    "layers": ("jit.py", "layers.py"),
    "greedy": ("jit.py", "simd.py", "vmath.py", "tiles.py", "quantize.py", "gemm.py", "greedy.py"),
}


def load_kernels(name: str) -> tuple[ModuleType, int]:
    """Return a module of compiled kernels, `_SOURCES` names them, and the number of threads.

    That is torch's, which numba has been given too (see `threads.set_threads`): asking numba takes 30 times as long, at every
    call of every layer.
    """
    return _module(name), torch.get_num_threads()


@cache
def _module(name: str) -> ModuleType:
    for source in _SOURCES[name]:  # a module's functions lie beside its own sources' hash, whoever imports it
        if (other := source.removesuffix(".py")) in _SOURCES and other != name:
            _module(other)
    return import_compiled(f"{__package__}.{name}", *_SOURCES[name])
