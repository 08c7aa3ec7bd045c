"""One number of threads for torch and numba, and two thread pools that don't fight over the cores."""

from __future__ import annotations

import os


def prepare() -> None:
    """Make OpenMP workers sleep, not spin, between parallel regions. Has an effect only before torch is first imported.

    torch and numba each bring their own OpenMP pool. A worker of one that spins after its region holds the core that the
    other's next region needs, and every layer switches between them: measured on two cores, GEMMs beside attention took
    5-10 times as long with spinning workers.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def set_threads(threads: int, backend: str) -> None:
    """Give torch and, where its kernels run, numba the same number of threads."""
    import torch

    torch.set_num_threads(threads)
    if backend == "cpu":
        import numba

        most = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        numba.set_num_threads(min(threads, most))
