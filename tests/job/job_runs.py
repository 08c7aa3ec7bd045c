"""What the tests of whole jobs share: starting the command, killing it, and comparing what it leaves."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time

from command import COMMAND, ENV


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start(*args, cwd, **env):
    """Start the command in a process of its own."""
    return subprocess.Popen(
        [*COMMAND, *map(str, args)], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**ENV, **env}
    )


def finish(*args, cwd, **env):
    """Run the command in a process of its own to its end; return exit code and stderr."""
    process = start(*args, cwd=cwd, **env)
    _, err = process.communicate(timeout=300)
    return process.returncode, err.decode()


def end_at(process, number, seconds):
    """Send a signal after a while, unless the process is gone by then; return exit code and stderr."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.002)
    if process.poll() is None:
        process.send_signal(number)
    _, err = process.communicate(timeout=120)
    return process.returncode, err.decode()


def mixed_rows(count, seed=0):
    """Rows of all kinds: texts, chats, bad ones, with parameters of their own."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        text = "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(1, 60)))
        row = {"id": f"r{i}", "prompt": text, "label": i if i % 7 else None}
        if i % 11 == 5:
            row["prompt"] = None
        if i % 13 == 6:
            row = {"id": f"r{i}", "messages": [{"role": "user", "content": text}]}
        if i % 5 == 2:
            row["sampling_params"] = {"max_tokens": rng.randint(1, 40)}
        rows.append(row)
    return rows


def read_bytes(path):
    return path.read_bytes() if path.exists() else None


def leftovers(directory):
    """Return what a finished job must not leave behind."""
    return [name for name in os.listdir(directory) if name.endswith((".parts", ".tmp"))]
