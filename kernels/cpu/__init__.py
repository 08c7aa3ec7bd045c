"""The CPU backend in numba."""

from __future__ import annotations

from types import ModuleType

from ..compiled import import_compiled


def load_kernels(name: str = "kernels") -> tuple[ModuleType, int]:
    """Return a module of compiled kernels, `kernels` or `rows`, and the number of threads numba is set to."""
    kernels = import_compiled(f"{__package__}.{name}", "simd.py", f"{name}.py")
    import numba

    return kernels, numba.get_num_threads()
