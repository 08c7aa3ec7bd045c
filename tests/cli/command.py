"""Running `pagedgen` in a test: in this process, which saves the seconds of imports, or in one of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import traceback
import warnings
from unittest import mock

from pagedgen.cli.signals import STOPPING

ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
COMMAND = [sys.executable, "-c", "from pagedgen.cli.main import command; command()"]


def pagedgen(*args, cwd="."):
    """Run the command in this process; return what a process of its own would: exit code and both streams."""
    from pagedgen.cli.main import main

    arguments = [str(a) for a in args]
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    code = 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.chdir(cwd),
        mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}),
        mock.patch.object(sys, "argv", ["pagedgen", *arguments]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # as they are in a process of its own, mostly
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return subprocess.CompletedProcess(["pagedgen", *arguments], code, *texts)


def read_jsonl(path):
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
