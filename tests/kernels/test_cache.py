"""Compiled kernels on disk: neither processes that compile at one time nor earlier ones mix dtypes or vector widths up."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).with_name("test_cpu.py")

# The block sizes 8 and 32 take the narrow and the wide vectors. Before them, the counter that numba names code by moves on.
COMPARE = """
import sys
import numba, torch
for _ in range(int(sys.argv[1])):
    numba.njit(lambda x: x)(1)
import test_cpu
from conftest import build_case
for name in sys.argv[2:]:
    for block_size in (8, 32):
        lengths = test_cpu.lengths_around(block_size)
        case = build_case(lengths, [1] * len(lengths), num_heads=3, num_kv_heads=1, head_dim=64, block_size=block_size,
                          dtype=getattr(torch, name), key_transposed=True)
        test_cpu.assert_close(test_cpu.decode(test_cpu.cpu, case), test_cpu.decode(test_cpu.reference, case))
"""


def start(cache, *arguments):
    environment = {**os.environ, "PAGEDGEN_CACHE": str(cache), "PYTHONPATH": str(KERNELS.parent)}
    return subprocess.Popen([sys.executable, "-c", COMPARE, *arguments], env=environment, stderr=subprocess.PIPE, text=True)


def finish(process):
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors


def test_two_dtypes_compiled_at_one_time_stay_apart(tmp_path):
    for _ in range(2):  # compiled at one time, then loaded
        for process in [start(tmp_path, "0", dtype) for dtype in ("float32", "bfloat16", "float16")]:
            finish(process)


@pytest.mark.parametrize(("first", "second"), [(0, 2), (2, 0)])
def test_cached_code_is_not_linked_into_what_a_later_process_compiles(tmp_path, first, second):
    finish(start(tmp_path, str(first), "float32"))
    finish(start(tmp_path, str(second), "float16", "float32"))


def test_every_compiled_function_has_a_name_of_its_own():
    from pagedgen.kernels.cpu import load_kernels

    modules = [load_kernels(name)[0] for name in ("attend", "write", "rows", "gemm", "greedy", "layers")]
    compiled = {id(value): value for m in modules for value in vars(m).values() if hasattr(value, "py_func")}.values()
    names = [function.py_func.__qualname__ for function in compiled]
    assert len(names) > 30
    assert len(names) == len(set(names))


def test_a_module_is_cached_by_all_that_it_is_made_of():
    """A source that is left out may change without what was compiled from it being compiled again."""
    from pagedgen.kernels import cpu

    folder = Path(cpu.__file__).parent

    def made_of(name):
        tree = ast.parse((folder / f"{name}.py").read_text())
        below = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1}
        return {name}.union(*map(made_of, below))

    for name, sources in cpu._SOURCES.items():
        assert {f"{source}.py" for source in made_of(name)} == set(sources)
