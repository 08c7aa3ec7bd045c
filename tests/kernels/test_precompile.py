"""Attention compiled in a process of its own: later ones find it, and what can't be kept isn't tried."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")

START = """
from pagedgen.kernels.cpu.precompile import start_precompilation
process = start_precompilation("float32", "float32", 32, 64)
print("nothing to do" if process is None else "started")
if process is not None:
    process.wait()
"""
DECODE = """
import torch
from pagedgen.kernels.cpu import load_kernels
from pagedgen.kernels.cpu.attention import paged_decode, write_kv
cache = torch.zeros(4, 3, 64, 32).transpose(2, 3), torch.zeros(4, 3, 32, 64)
key, query = torch.ones(2, 3, 64), torch.ones(2, 9, 64)
write_kv(key, key, *cache, torch.tensor([0, 40]))
lengths = torch.tensor([1, 9], dtype=torch.int32)
paged_decode(query, *cache, torch.tensor([[0], [1]], dtype=torch.int32), lengths, torch.empty_like(query), scale=0.1)
for kernel in (load_kernels("attend")[0].attend, load_kernels("write")[0].store_kv):
    print(sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()))
"""
# A run comes to the kernels through the call of all layers, by other signatures and in another order of imports.
LAYERS = """
from pagedgen.kernels.cpu import load_kernels, stack
attend = load_kernels("attend")[0].attend
stack._functions(False, "float32", "float32", "float32")
for kernel in (attend, load_kernels("write")[0].store_kv):
    print(sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()))
"""


def _run(code: str, cache: str) -> list[str]:
    environment = {**os.environ, "PAGEDGEN_CACHE": cache}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    ).stdout.splitlines()


@pytest.mark.slow
def test_what_one_process_compiles_later_ones_find(tmp_path):
    cache = str(tmp_path)
    assert _run(START, cache) == ["started"]
    assert _run(LAYERS, cache) == ["1 0", "1 0"]
    assert _run(DECODE, cache) == ["1 0", "1 0"]
    assert _run(START, cache) == ["nothing to do"]


TIMED = """
from pagedgen.kernels.compiled import Compiling
from pagedgen.kernels.cpu import stack
with Compiling() as compiling:
    stack._functions(False, "float32", "float32", "float32")
print(compiling.seconds)
"""


@pytest.mark.slow
def test_compiling_is_timed_and_what_is_found_is_not(tmp_path):
    (first,), (later,) = (_run(TIMED, str(tmp_path)) for _ in range(2))
    assert float(first) > 1
    assert float(later) == 0


def test_nothing_is_started_where_nothing_can_be_kept(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    assert _run(START, str(tmp_path / "file")) == ["nothing to do"]
