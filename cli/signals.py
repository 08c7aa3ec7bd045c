"""Signals end a command in order: INT, TERM and HUP, and USR1 and USR2, which Slurm is often told to send before its end.

While rows are generated the running ones may finish (`--grace`). At any other time, and at a second INT, the command ends on
the spot: files are written whole or not at all, so nothing that is finished is lost and the same command goes on. The handler
raises nothing: an exception that comes up within a destructor is swallowed, and the signal with it.
"""

from __future__ import annotations

import os
import signal

from pagedgen.errors import EXIT_STOPPED
from pagedgen.stopping import Stopper

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def install(stopper: Stopper) -> None:
    """Let signals stop a command, except those that whoever started it has turned off (nohup does with HUP)."""
    num_interrupts = 0

    def stop(number: int, frame: object) -> None:
        nonlocal num_interrupts
        num_interrupts += number == signal.SIGINT
        name = signal.Signals(number).name
        if stopper.is_watched and num_interrupts < 2:
            stopper.stop(name)
            return
        stopper.clean_up()
        _say(f"pagedgen: stopped by {name}" + "; what is finished is kept, the same command goes on" * stopper.keeps_results)
        os._exit(EXIT_STOPPED)

    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def _say(text: str) -> None:
    show_cursor = "\x1b[?25h" if os.isatty(2) else ""  # a progress bar may have hidden it
    try:
        os.write(2, f"{show_cursor}{text}\n".encode())
    except OSError:
        pass
