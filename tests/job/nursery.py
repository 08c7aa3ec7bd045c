"""A process that has imported everything and forks a `pagedgen` command on request: hundreds of runs, one time of imports.

One JSON object a line on stdin, {"args", "cwd", "stderr"}; answers are {"pid"} at once and {"code"} when the command has ended
(minus the signal's number when one killed it). Nothing is computed before a fork, so no thread pool is lost in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path


class Nursery:
    """The other side: starts commands, kills them, waits for them."""

    def __init__(self, env):
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
        )
        self._answer()  # ready

    def _answer(self):
        return json.loads(self._process.stdout.readline())

    def run(self, args, cwd, kill=None, after_s=0.0, env=None, until=None):
        """Run a command; return exit code and stderr.

        `kill`: a signal, or several, to send after a while; with `until`, a text on stderr, the while begins when it is there.
        """
        stderr = Path(cwd) / "stderr.txt"
        stderr.touch()
        request = {"args": [str(a) for a in args], "cwd": str(cwd), "stderr": str(stderr), "env": env or {}}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        pid = self._answer()["pid"]
        if kill is not None:
            deadline = time.monotonic() + 60
            while until is not None and until not in stderr.read_text() and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(after_s)
            for number in kill if isinstance(kill, tuple) else (kill,):
                try:
                    os.kill(pid, number)  # at worst it has ended and waits to be collected
                except ProcessLookupError:
                    pass
                time.sleep(0.01)
        code = self._answer()["code"]
        said = stderr.read_text()
        stderr.unlink()
        return code, said

    def close(self):
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


def _say(answer):
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _serve():
    import pyarrow.parquet
    import transformers
    from pagedgen.cli.main import main

    import pagedgen.engine.engine
    import pagedgen.engine.opened
    import pagedgen.job

    import_module("transformers.models.llama.modeling_llama")
    assert transformers.AutoModelForCausalLM and transformers.AutoTokenizer and pyarrow.parquet
    assert pagedgen.engine.engine and pagedgen.engine.opened and pagedgen.job
    _say({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.chdir(request["cwd"])
            os.environ.update(request["env"])
            fd = os.open(request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(fd, 2)
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(1, 0)
            sys.argv = ["pagedgen", *request["args"]]
            code = 0
            try:
                main()
            except SystemExit as stop:
                code = stop.code or 0
            except BaseException:
                import traceback

                traceback.print_exc()
                code = 99
            sys.stderr.flush()
            os._exit(code)
        _say({"pid": pid})
        _, status = os.waitpid(pid, 0)
        _say({"code": os.waitstatus_to_exitcode(status)})


if __name__ == "__main__":
    _serve()
