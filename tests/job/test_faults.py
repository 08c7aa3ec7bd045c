"""Every write, fsync, rename and read fails once, in each way it can: nothing torn is taken for whole, and nothing is lost."""

from __future__ import annotations

import os
import random

import pytest
from echo import EchoJobs
from job_runs import leftovers, mixed_rows, write_jsonl

from pagedgen.errors import OutputError, PagedgenError
from pagedgen.rows import durable

CALLS = ("open", "write", "fsync", "replace", "read", "fchmod", "lseek", "close")


class Died(BaseException):
    """The process is gone: nothing after it runs that could tidy up."""


class FaultyOs:
    """Stands for `os` in rows/durable.py: counts the calls and breaks the nth."""

    def __init__(self, nth=None, kind="error"):
        self.nth, self.kind, self.count, self.broken = nth, kind, 0, None

    def __getattr__(self, name):
        real = getattr(os, name)
        return self._counted(name, real) if name in CALLS else real

    def _counted(self, name, real):
        def call(*args, **kwargs):
            if self.broken is not None and self.kind == "death":
                raise Died  # whatever tidies up after an exception is not there after a death
            self.count += 1
            if self.count != self.nth:
                return real(*args, **kwargs)
            self.broken = name
            if name == "write":
                real(args[0], bytes(args[1])[: len(args[1]) // 2])  # half of it reached the disk
            if name == "close":
                real(*args, **kwargs)
            if self.kind == "death":
                raise Died
            raise OSError(28, "No space left on device")

        return call


@pytest.fixture(scope="module")
def jobs(tiny_model):
    return EchoJobs(tiny_model("llama"))


@pytest.fixture
def job(jobs, tmp_path):
    write_jsonl(tmp_path / "in.jsonl", mixed_rows(60))

    def run(output, **settings):
        return jobs.run([tmp_path / "in.jsonl"], output, rng=random.Random(3), flush_s=0.0, **settings)

    return run


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", ["error", "death"])
def test_every_call_that_can_fail(job, tmp_path, monkeypatch, suffix, kind):
    wanted = tmp_path / f"wanted.{suffix}"
    job(wanted)
    counting = FaultyOs()
    monkeypatch.setattr(durable, "os", counting)
    job(tmp_path / f"counted.{suffix}")
    assert counting.count > 40
    told = []
    for nth in range(1, counting.count + 1):
        output = tmp_path / f"out.{suffix}"
        faulty = FaultyOs(nth, kind)
        monkeypatch.setattr(durable, "os", faulty)
        try:
            job(output)
            assert faulty.broken in ("close", "fchmod", None) or kind == "death" or output.read_bytes() == wanted.read_bytes()
        except (PagedgenError, OSError, Died) as error:
            told.append((faulty.broken, error))
        if output.exists():
            assert output.read_bytes() == wanted.read_bytes(), f"call {nth} ({faulty.broken}) left a torn output"
        monkeypatch.setattr(durable, "os", os)
        report = job(output)
        assert report.exit_code(1.0) == 0
        assert output.read_bytes() == wanted.read_bytes(), f"call {nth} ({faulty.broken})"
        assert not leftovers(tmp_path), f"call {nth} ({faulty.broken})"
        for path in tmp_path.glob(f"out.{suffix}*"):
            path.unlink()
    for call, error in told:
        if kind == "error":
            assert isinstance(error, PagedgenError) or call in ("read", "open", "lseek", "close"), (call, error)
            assert "28" in str(error) or "No space" in str(error), (call, error)
        else:
            assert isinstance(error, Died), (call, error)
    assert kind == "death" or any(isinstance(error, OutputError) for _, error in told)
