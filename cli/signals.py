"""Signals end a command in order: INT, TERM and HUP, and USR1 and USR2, which Slurm is often told to send before its end.

While rows are generated the running ones may finish (`--grace`); at any other time the command ends at once. Either way what is
finished is kept and the same command goes on from there. A second INT ends it on the spot.
"""

from __future__ import annotations

import os
import signal

from pagedgen.errors import EXIT_STOPPED, Interrupted
from pagedgen.stopping import Stopper

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_stopper: Stopper | None = None
_num_received = 0


def _stop(number: int, frame: object) -> None:
    global _num_received
    _num_received += 1
    name = signal.Signals(number).name
    if number == signal.SIGINT and _num_received > 1:
        os._exit(EXIT_STOPPED)
    if _stopper is not None and _stopper.is_watched:
        _stopper.stop(name)
        return
    if _num_received == 1:
        raise Interrupted(f"stopped by {name}; finished rows are kept, the same command goes on")


def install() -> None:
    """Take the stopping signals, except those that whoever started the command has turned off (nohup does with HUP)."""
    global _num_received, _stopper
    _num_received, _stopper = 0, None
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def tell(stopper: Stopper) -> None:
    """Let signals stop a run in order."""
    global _stopper
    _stopper = stopper
