"""INT and TERM (Slurm's way to end a job) end a command in order; a second one ends it at once."""

from __future__ import annotations

import os
import signal

from pagedgen.errors import EXIT_STOPPED, Interrupted

_STOPPING = (signal.SIGINT, signal.SIGTERM)


def _at_once(number: int, frame: object) -> None:
    os._exit(EXIT_STOPPED)


def _stop(number: int, frame: object) -> None:
    for other in _STOPPING:
        signal.signal(other, _at_once)
    raise Interrupted(f"stopped by {signal.Signals(number).name}; no output was written, the same command starts over")


def install() -> None:
    """Turn the first signal into `Interrupted`."""
    for number in _STOPPING:
        signal.signal(number, _stop)


def ignore() -> None:
    """Let signals pass: once the output is being written, finishing is quicker than starting over."""
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)
