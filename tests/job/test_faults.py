"""Every write, fsync, rename and read fails once, in each way it can: nothing torn is taken for whole, and nothing is lost."""

from __future__ import annotations

import os
import random

import pytest
from echo import EchoJobs
from job_runs import leftovers, mixed_rows, write_jsonl

from pagedgen.errors import OutputError, PagedgenError
from pagedgen.rows import durable, parts
from pagedgen.sampling_params import SamplingParams

CALLS = ("open", "write", "fsync", "replace", "read", "fchmod", "lseek", "close", "unlink")


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
                if name == "close":
                    return real(*args, **kwargs)  # a death closes all files
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
                    return None  # the next call finds it dead; this one may come from a destructor
            if self.kind == "death":
                raise Died
            raise OSError(28, "No space left on device")

        return call


@pytest.fixture(scope="module")
def jobs(tiny_model):
    return EchoJobs(tiny_model("llama"))


SCENARIOS = {
    "fresh": {},
    "parquet": {},
    "replacing": {"overwrite": True},
    "samples": {"sampling": SamplingParams(temperature=1.0, n=2)},
    "openai": {},
    "retrying": {"retry_errors": True},
}


class Job:
    """One job in one of the ways it can run; `prepare` makes what is there before."""

    def __init__(self, jobs, directory, scenario):
        self.jobs, self.directory, self.scenario = jobs, directory, scenario
        self.output = directory / ("out.parquet" if scenario == "parquet" else "out.jsonl")
        rows = mixed_rows(60)
        if scenario == "openai":
            rows = [
                {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p" if i % 7 else None}}
                for i in range(60)
            ]
        write_jsonl(directory / "in.jsonl", rows)

    def prepare(self):
        for path in self.directory.glob("out*"):
            path.unlink()
        if self.scenario == "replacing":
            self.output.write_text("old")
        elif self.scenario == "retrying":
            self.run(retry_errors=False)

    def run(self, **more):
        settings = {**SCENARIOS[self.scenario], **more}
        return self.jobs.run([self.directory / "in.jsonl"], self.output, rng=random.Random(3), flush_s=0.0, **settings)

    def left(self):
        """Return the outputs that are there."""
        files = [self.output, self.output.with_name("out.errors.jsonl")]
        return [path.read_bytes() if path.exists() else None for path in files]


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("kind", ["error", "death"])
def test_every_call_that_can_fail(jobs, tmp_path, monkeypatch, scenario, kind):
    monkeypatch.setattr(parts, "FAN_IN", 3)  # parts are joined too
    job = Job(jobs, tmp_path, scenario)
    job.prepare()
    before = job.left()
    counting = FaultyOs()
    monkeypatch.setattr(durable, "os", counting)
    job.run()
    monkeypatch.setattr(durable, "os", os)
    wanted = job.left()
    assert counting.count > 60
    told = []
    for nth in range(1, counting.count + 1):
        job.prepare()
        faulty = FaultyOs(nth, kind)
        monkeypatch.setattr(durable, "os", faulty)
        try:
            job.run()
        except (PagedgenError, OSError, Died) as error:
            told.append((faulty.broken, error))
        left = job.left()
        for there, old, new in zip(left, before, wanted, strict=True):
            assert there in (old, new), f"call {nth} ({faulty.broken}) left a torn output"
        monkeypatch.setattr(durable, "os", os)
        assert job.run().exit_code(0.9) == 0
        assert job.left() == wanted, f"call {nth} ({faulty.broken})"
        assert not leftovers(tmp_path), f"call {nth} ({faulty.broken})"
    for call, error in told:
        if kind == "error":
            assert isinstance(error, PagedgenError) or call in ("read", "open", "lseek", "close", "unlink"), (call, error)
            assert "28" in str(error) or "No space" in str(error), (call, error)
        else:
            assert isinstance(error, Died), (call, error)
    assert kind == "death" or any(isinstance(error, OutputError) for _, error in told)
