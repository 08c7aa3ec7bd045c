"""Processes that compile kernels for different dtypes at one time don't mix them up on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).with_name("test_cpu.py")


def test_two_dtypes_compiled_at_one_time_stay_apart(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def start(dtype):
        chosen = f"test_decode_equals_reference_at_block_edges and 32-torch.{dtype}"
        command = [sys.executable, "-m", "pytest", "-q", str(KERNELS), "-k", chosen, "-p", "no:cacheprovider"]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=KERNELS.parents[2])

    for _ in range(2):  # compiled at one time, then loaded
        running = [start(dtype) for dtype in ("float32", "bfloat16", "float16")]
        for process in running:
            out, _ = process.communicate(timeout=300)
            assert process.returncode == 0, out
