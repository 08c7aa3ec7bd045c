"""When a run stops before its end: a signal, a deadline, Slurm's end of the job, an error that shall stop it."""

from __future__ import annotations

import contextlib
import datetime
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping

from .engine.feed import Control

FLUSH_MARGIN_S = 5.0  # beyond the grace, for writing what is finished


def slurm_seconds_left(environment: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds until Slurm ends this job; None outside of one.

    New versions say it in `SLURM_JOB_END_TIME`; `squeue` is asked where it isn't there.
    """
    end, job_id = environment.get("SLURM_JOB_END_TIME", ""), environment.get("SLURM_JOB_ID", "")
    if end.isdecimal():
        return max(0.0, float(end) - time.time())
    if not job_id:
        return None
    command = ["squeue", "--noheader", "--jobs", job_id, "--format", "%e"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
        return max(0.0, datetime.datetime.fromisoformat(said).timestamp() - time.time())
    except (OSError, ValueError, subprocess.SubprocessError):  # no such command, or a job without an end
        return None


class Stopper:
    """Decides before each step whether to go on. Once stopping, running rows have some seconds to finish."""

    def __init__(self, *, grace_s: float = 0.0, deadline_s: float | None = None):
        self.reason: str | None = None
        self.is_watched = False  # somebody asks `control` and will act on it
        self.on_abort: Callable[[], None] | None = None  # what to do when the process is about to end on the spot
        self.keeps_results = False  # what is finished stays and can be gone on with
        self._drop_at = float("inf")
        self.limit(grace_s=grace_s, deadline_s=deadline_s)

    def limit(self, *, grace_s: float, deadline_s: float | None) -> None:
        """Set how long running rows may go on, and in how many seconds from now the process has to be gone.

        Near a deadline the grace is a quarter of the time at most, and writing has an eighth: some of it shall be for work.
        """
        self._grace_s = grace_s
        self._stop_at = None
        if deadline_s is not None:
            self._grace_s = min(grace_s, deadline_s / 4)
            self._stop_at = time.monotonic() + deadline_s - self._grace_s - min(FLUSH_MARGIN_S, deadline_s / 8)

    def clean_up(self) -> None:
        """Do what must be done before the process ends on the spot."""
        if self.on_abort is not None:
            self.on_abort()

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
