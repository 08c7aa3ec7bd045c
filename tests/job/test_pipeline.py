"""Reading, rendering and tokenizing run ahead of the engine, which never waits for them."""

from __future__ import annotations

import importlib.util
import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from command import pagedgen
from echo import EchoJobs
from job_runs import write_jsonl

from pagedgen.engine import feed, generation
from pagedgen.jobs.feed import RowFeed
from pagedgen.jobs.reader import RowReader

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "data" / "ifeval_sample.jsonl"


@pytest.fixture
def ifeval(tmp_path):
    """As many rows as IFEval has, from the sample of it."""
    rows = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    return write_jsonl(tmp_path / "in.jsonl", [{**rows[i % len(rows)], "i": i} for i in range(541)])


@pytest.fixture
def quick_model(tiny_model, demo_model, tmp_path):
    """A tiny model with the demo model's tokenizer: its steps are far shorter than a real one's."""
    path = tmp_path / "model"
    shutil.copytree(tiny_model("llama", vocab_size=49152, eos_token_id=2), path)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (demo_model / name).is_file():
            shutil.copy(demo_model / name, path / name)
    return path


@pytest.mark.demo
def test_the_engine_never_waits_for_input_after_its_first_step(quick_model, ifeval, tmp_path, monkeypatch):
    for module in (feed, generation):
        monkeypatch.setattr(module, "LOOKAHEAD_ROWS", 64)
    taken_in = []
    take = RowFeed._next
    monkeypatch.setattr(RowFeed, "_next", lambda self, wait: taken_in.append(bool(self.at_end)) or take(self, wait))
    steps = []
    run_step = generation.Generation._run_step

    def counted(self, step, batch):
        steps.append(len(taken_in))
        return run_step(self, step, batch)

    monkeypatch.setattr(generation.Generation, "_run_step", counted)
    out = tmp_path / "out.jsonl"
    done = pagedgen(
        "run", quick_model, ifeval, "-o", out, "--max-tokens", 8, "--max-num-seqs", 32, "--ignore-eos", "--sort", "none"
    )
    assert done.returncode == 0, done.stderr
    stats = json.loads((tmp_path / "out.jsonl.stats.json").read_text())
    assert stats["num_steps"] > 100
    assert steps[-1] > steps[0] + 1, "rows were still being taken in while the engine ran"
    assert stats["input_waits"] == 0
    assert "wait for input" not in stats["time_split_s"]


@pytest.mark.demo
def test_reading_is_as_fast_as_the_tokenizers_library(demo_model, ifeval):
    spec = importlib.util.spec_from_file_location("reading", ROOT / "recipes" / "benchmarks" / "reading.py")
    reading = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reading)
    assert max(reading.measure(str(demo_model), [str(ifeval)])["ratio"] for _ in range(3)) >= 0.8


@pytest.mark.parametrize(
    ("where", "sort"), [("reader", "length"), ("engine", "length"), ("reader", "prefix"), ("engine", "prefix")]
)
def test_what_either_side_raises_is_told_and_the_thread_ends(tiny_model, tmp_path, monkeypatch, where, sort):
    """What was finished before is kept; by the plan nothing is before all rows were read."""
    jobs = EchoJobs(tiny_model("llama"), sort=sort)
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(5000)])
    before = threading.active_count()
    for module in (feed, generation):
        monkeypatch.setattr(module, "LOOKAHEAD_ROWS", 64)
    seen = []

    def break_down():
        seen.append(1)
        if where == "engine" and len(seen) == 200:
            raise KeyError("broke")

    group = RowReader._group
    if where == "reader":

        def broken(self, rows):
            if rows[0].index > 3000:
                raise KeyError("broke")
            return group(self, rows)

        monkeypatch.setattr(RowReader, "_group", broken)
    with pytest.raises(KeyError, match="broke"):
        jobs.run([source], tmp_path / "o.jsonl", after_row=break_down)
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
    parts = [line for p in (tmp_path / "o.jsonl.parts").glob("part-*") for line in p.read_bytes().splitlines()]
    assert len(parts) >= (0 if (where, sort) == ("reader", "prefix") else 192)


def test_the_queue_is_bounded_by_tokens(tiny_model, tmp_path):
    """However long the rows are, a reader that nobody takes from stops."""
    from pagedgen.jobs import feed as row_feed
    from pagedgen.jobs.reader import Group
    from pagedgen.request import Request
    from pagedgen.sampling_params import SamplingParams

    made = []

    def groups():
        for i in range(1000):
            made.append(i)
            yield Group([Request(i, [0] * 50_000, SamplingParams(), 1, frozenset(), 0)])

    taken = row_feed.RowFeed(groups(), lambda group: group.requests)
    time.sleep(1)
    assert 5 <= len(made) <= 8
    count = 0
    while not taken.exhausted:
        count += len(taken.take(wait=True))
    taken.close()
    assert count == 1000
