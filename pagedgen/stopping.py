"""When a run stops before its end: a signal, a deadline, Slurm's end of the job, an error that shall stop it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping

from .engine.feed import Control

FLUSH_MARGIN_S = 5.0  # beyond the grace, for writing what is finished


def slurm_seconds_left(environment: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds until Slurm ends this job (`SLURM_JOB_END_TIME`); None outside of one."""
    end = environment.get("SLURM_JOB_END_TIME", "")
    return float(end) - time.time() if end.isdigit() else None


class Stopper:
    """Decides before each step whether to go on. Once stopping, running rows have `grace_s` seconds to finish."""

    def __init__(self, *, grace_s: float, deadline_s: float | None = None, started: float | None = None):
        """`deadline_s`: seconds from `started` (`time.monotonic()`, default now) by which the process has to be gone."""
        self._grace_s = grace_s
        started = time.monotonic() if started is None else started
        self._stop_at = None if deadline_s is None else started + deadline_s - grace_s - FLUSH_MARGIN_S
        self._drop_at = float("inf")
        self.reason: str | None = None
        self.is_watched = False  # somebody asks `control` and will act on it

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Say that `control` is asked until the block ends."""
        self.is_watched = True
        try:
            yield
        finally:
            self.is_watched = False

    def stop(self, reason: str) -> None:
        """Begin to stop; the first reason is kept. May be called by a signal handler."""
        if self.reason is None:
            self.reason = reason
            self._drop_at = time.monotonic() + self._grace_s

    def control(self) -> Control:
        """Return how to go on."""
        if self.reason is None:
            if self._stop_at is None or time.monotonic() < self._stop_at:
                return Control.GO_ON
            self.stop("the deadline")
        return Control.DRAIN if time.monotonic() < self._drop_at else Control.DROP
