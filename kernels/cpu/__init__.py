"""The CPU backend in numba."""

from __future__ import annotations

from types import ModuleType

from ..compiled import import_compiled

_SOURCES = {"kernels": ("simd.py", "tiles.py", "quantize.py", "kernels.py"), "rows": ("simd.py", "rows.py")}


def load_kernels(name: str = "kernels") -> tuple[ModuleType, int]:
    """Return a module of compiled kernels, `kernels` or `rows`, and the number of threads numba is set to."""
    kernels = import_compiled(f"{__package__}.{name}", *_SOURCES[name])
    import numba

    return kernels, numba.get_num_threads()
