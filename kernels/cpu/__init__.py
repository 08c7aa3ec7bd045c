"""The CPU backend in numba."""

from __future__ import annotations

from types import ModuleType

import torch

from ..compiled import import_compiled

_SOURCES = {
    "kernels": ("simd.py", "tiles.py", "quantize.py", "kernels.py"),
    "rows": ("simd.py", "rows.py"),
    "gemm": ("simd.py", "tiles.py", "gemm.py"),
}

_loaded: dict[str, ModuleType] = {}


def load_kernels(name: str = "kernels") -> tuple[ModuleType, int]:
    """Return a module of compiled kernels, `kernels`, `rows` or `gemm`, and the number of threads to cut work for: torch's."""
    kernels = _loaded.get(name)
    if kernels is None:
        kernels = _loaded[name] = import_compiled(f"{__package__}.{name}", *_SOURCES[name])
    return kernels, torch.get_num_threads()
