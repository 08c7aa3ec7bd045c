"""Work on all threads from compiled code: each thread's part is done once, at one time with the others', and can fail. What
kernels are made of becomes machine code in them alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

numba = pytest.importorskip("numba")
import numpy as np
from numba.core.codegen import JITCodeLibrary
from pagedgen.kernels.cpu.jit import inner, on_threads
from pagedgen.kernels.cpu.simd import take_next


@inner
def _add(thread, out, pair, factor):
    out[thread] += pair[0] + factor * pair[1]


@numba.njit
def add_on_threads(out, pair, factor):
    on_threads(_add, out.shape[0], (out, pair, factor))


@inner
def _count(thread, counter, met):
    before = take_next(counter.ctypes.data)
    for _ in range(200_000_000):
        now = take_next(counter.ctypes.data)
        if now != before + 1:  # somebody else counts
            met[thread] = 1
            break
        before = now


@numba.njit(nogil=True)
def count(counter, met):
    on_threads(_count, met.shape[0], (counter, met))


@inner
def _allocate(thread, sizes, out):
    out[thread] = np.empty(sizes[thread], np.uint8).shape[0]


@numba.njit
def allocate(sizes, out):
    on_threads(_allocate, sizes.shape[0], (sizes, out))
    out[:] += 1


@pytest.mark.parametrize("num_threads", [0, 1, 2, 3, 17])
def test_each_part_is_done_once(num_threads):
    """On more threads than there are cores, too; with arguments of several kinds, and one after the other."""
    out = np.zeros(num_threads)
    for _ in range(3):
        add_on_threads(out, (1, 2.5), np.float32(2))
    assert out.tolist() == [18.0] * num_threads


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one thread")
def test_parts_run_at_one_time():
    previous = numba.get_num_threads()
    numba.set_num_threads(2)
    try:
        met = np.zeros(2, np.int64)
        count(np.zeros(1, np.int64), met)
    finally:
        numba.set_num_threads(previous)
    assert met.any()


def test_a_part_that_gets_no_memory_is_an_error_of_the_whole():
    out = np.zeros(3, np.int64)
    with pytest.raises(MemoryError):
        allocate(np.array([1, 1 << 60, 2]), out)
    allocate(np.array([1, 7, 2]), out)
    assert out.tolist() == [2, 8, 3]


def _pairs(assignment):
    """Yield (target, value) of an assignment, of tuples one by one."""
    for target in assignment.targets:
        if isinstance(target, ast.Tuple) and isinstance(assignment.value, ast.Tuple):
            yield from zip(target.elts, assignment.value.elts, strict=False)  # `a, *b = c, d, e` too
        else:
            yield target, assignment.value


def _allocated_and_addressed(function):
    """Return the names of a function's own arrays whose addresses it takes, and those kept alive to the end of a block."""
    own, addressed, kept = set(), set(), set()
    for node in ast.walk(function):
        body = [s for s in node.body if not isinstance(s, ast.Return)] if isinstance(node, ast.FunctionDef | ast.For) else []
        if body and ast.unparse(body[-1]).startswith("keep_alive("):
            kept |= {ast.unparse(argument) for argument in body[-1].value.args}
        for target, value in _pairs(node) if isinstance(node, ast.Assign) else ():
            called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
            if isinstance(target, ast.Name) and (called == "aligned_floats" or (called[:3] == "np." and called != "np.int64")):
                own.add(target.id)
        if isinstance(node, ast.Attribute) and node.attr == "data" and ast.unparse(node.value).endswith(".ctypes"):
            addressed.add(ast.unparse(node.value).removesuffix(".ctypes"))
    return own & addressed, kept


def test_arrays_outlive_the_use_of_their_addresses():
    """Memory that was given back is another's: what a function allocates and addresses, it must use once more at its end."""
    import pagedgen.kernels.cpu as package

    found = 0
    for path in Path(package.__file__).parent.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name != "aligned_floats":  # that one returns it
                addressed, kept = _allocated_and_addressed(function)
                assert addressed <= kept, f"{path.name}: {function.name}"
                found += len(addressed)
    assert found > 4


@inner
def _plus_one(x):
    return x + 1


@inner
def _twice(x):
    return 2 * _plus_one(x)


@pytest.fixture
def translated(monkeypatch):
    """The names of the libraries that became machine code."""
    names = []
    finalize = JITCodeLibrary._finalize_specific

    def listen(self):
        if self.name != "nrt":  # numba's own, once a process
            names.append(self.name)
        finalize(self)

    monkeypatch.setattr(JITCodeLibrary, "_finalize_specific", listen)
    return names


def test_inner_functions_are_translated_with_the_kernel_only(translated):
    @numba.njit
    def kernel(x):
        return _twice(x)

    assert kernel(3) == 8
    assert [name.split(".")[-1] for name in translated] == ["kernel"]


def test_a_plain_function_is_translated_by_itself(translated):
    """The opposite: where numba's method has another name, the test above would see nothing."""

    @numba.njit
    def plain(x):
        return x + 1

    @numba.njit
    def kernel(x):
        return plain(x)

    assert kernel(3) == 4
    assert [name.split(".")[-1] for name in translated] == ["plain", "kernel"]
