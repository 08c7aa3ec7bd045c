"""The CPU backend in numba."""

from __future__ import annotations

from types import ModuleType

from ..compiled import import_compiled


def load_kernels() -> tuple[ModuleType, int]:
    """Return the module of compiled kernels and the number of threads numba is set to."""
    kernels = import_compiled(f"{__package__}.kernels", "simd.py", "tiles.py", "quantize.py", "kernels.py")
    import numba

    return kernels, numba.get_num_threads()
