"""One number of threads for torch and numba, and two thread pools that don't fight over the cores."""

from __future__ import annotations

import os
from typing import Any


def prepare() -> None:
    """Make OpenMP workers spin only shortly between parallel regions. Has an effect only before torch is first imported.

    torch and numba each bring their own OpenMP pool, and every layer switches between them. A worker that spins for long holds
    the core that the other pool's next region needs; one that sleeps at once is woken late. Measured on two cores, four
    576 x 576 GEMMs of 64 rows beside one attention call (microseconds, on an idle machine / beside a busy process):

        sleep at once   591 + 266 / 287 + 255        5,000 spins   183 + 164 / 670 + 430
        default         180 + 150 / 946 + 484 (5579 + 1565 beside another OpenMP program)
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def set_threads(threads: int, backend: str) -> None:
    """Give torch and, where its kernels run, numba the same number of threads."""
    import torch

    torch.set_num_threads(threads)
    if backend == "cpu":
        import numba

        config: Any = numba.config
        numba.set_num_threads(min(threads, config.NUMBA_NUM_THREADS))
