"""Run `test_on_gpu.py` on the CPU, in Triton's interpreter: the same kernels, the same comparisons, fp32 and fp16.

In a process of its own: TRITON_INTERPRET must be set before Triton is imported, and the compile tests need it unset.
The interpreter computes bf16 wrongly, silently; those cases are skipped there, and nothing else may be.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_kernels_match_the_reference_in_the_interpreter():
    triton = pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", str(Path(__file__).with_name("test_on_gpu.py"))]
    command += ["-q", "-p", "no:cacheprovider"]
    # Triton 3.6's interpreter makes scalars of one-element arrays: deprecated by NumPy, an error from 2.4 on.
    command += ["-W", "ignore:Conversion of an array:DeprecationWarning"]
    # The interpreter multiplies by NumPy. In OpenBLAS's AVX2 kernels a row's bits depend on its place, in this one they don't.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OPENBLAS_CORETYPE": "Nehalem"}
    environment.pop("PYTEST_ADDOPTS", None)
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    output = result.stdout + result.stderr
    if triton.__version__.startswith("3.6.") and "only 0-dimensional arrays can be converted" in output:
        pytest.skip("Triton 3.6's interpreter does not work with NumPy 2.4 and later")
    assert result.returncode == 0, output
    skips = re.findall(r"^SKIPPED .*", result.stdout, flags=re.MULTILINE)
    assert all("computes bf16 wrongly" in line for line in skips), output
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None, output
    assert int(passed[1]) > 100, output
