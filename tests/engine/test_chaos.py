"""A fault at every allocation, every copy and every step in turn (in CI at 30 of each, spread over all).

The counts stay right and nobody else notices.
"""

from __future__ import annotations

import os

import pytest
from naive_pool import num_held
from test_prefix_cache import shared_prompts

from pagedgen.engine.block_manager import BlockManager
from pagedgen.engine.planner import RequestLengths
from pagedgen.engine.scheduler import Scheduler
from pagedgen.engine.swap import BlockStore
from pagedgen.engine.tiers import Tier
from pagedgen.sampling_params import SamplingParams
from pagedgen.stats import RunStats

NIGHTLY = os.environ.get("PAGEDGEN_PROFILE") == "nightly"


class Job:
    """One job with everything in it: shared prefixes, samples, beams, a pool far too small, host and disk swap, audited."""

    def __init__(self, engine_run, model, make_prompts, tmp_path):
        prompts = shared_prompts(make_prompts, rows=3, prefix=14) + make_prompts([18, 25], seed=5)
        greedy = SamplingParams(max_tokens=9, ignore_eos=True)
        self.params = [greedy] * 6 + [
            SamplingParams(n=3, temperature=1.0, max_tokens=9, ignore_eos=True),
            SamplingParams(beam_width=3, n=2, max_tokens=9, ignore_eos=True),
        ]
        self.run = engine_run(
            model, block_size=4, num_gpu_blocks_override=24, swap_space_bytes=3 * 3072, disk_swap_path=str(tmp_path),
            disk_swap_bytes=2**20, max_num_batched_tokens=24, max_num_seqs=12,
        )  # fmt: skip
        self.engine = self.run.engine
        opened = self.engine.opened
        self.requests = [opened.make_request(i, p, q) for i, (p, q) in enumerate(zip(prompts, self.params, strict=True))]
        self.engine._round_trip_s = {Tier.HOST: 0.0, Tier.DISK: 0.0}  # tiny models compute a block sooner than a disk reads it

    def answer(self):
        """Run the job; return {(row, sample): (ids, score)} of what was answered."""
        self.engine.stats = RunStats()
        done = {}
        self.engine.generate(  # not `run.run`: a row that was cancelled is not answered
            self.requests,
            self.engine.plan(RequestLengths(self.requests)),
            on_finished=lambda s: done.__setitem__((s.request.row_index, s.sample_index), (s.generated_token_ids, s.score)),
            on_error=lambda *error: pytest.fail(str(error)),
        )
        return done


@pytest.fixture(scope="module")
def job(tiny_model, engine_run, make_prompts, tmp_path_factory):
    return Job(engine_run, tiny_model("llama"), make_prompts, tmp_path_factory.mktemp("swap"))


@pytest.fixture
def watched(monkeypatch, eager_admission):
    """Remember the block manager of a run, to recount it afterwards."""
    made = []
    original = BlockManager.__init__

    def remember(self, *args, **settings):
        original(self, *args, **settings)
        made.append(self)

    monkeypatch.setattr(BlockManager, "__init__", remember)
    return made


class FaultAt:
    """Wraps a method: its k-th call, counted from 0, does something else."""

    def __init__(self, monkeypatch, owner, name, fault):
        self.calls, self.at = 0, None
        original = getattr(owner, name)

        def wrapped(this, *args, **settings):
            number, self.calls = self.calls, self.calls + 1
            if number == self.at:
                return fault(this, original, *args, **settings)
            return original(this, *args, **settings)

        monkeypatch.setattr(owner, name, wrapped)

    def each(self, count):
        """Yield the places to put a fault at: each in the nightly profile, else some spread over all."""
        for k in range(0, count, 1 if NIGHTLY else max(1, -(-count // 30))):
            self.calls, self.at = 0, k
            yield k


def assert_nothing_left(blocks):
    blocks.audit([])
    assert blocks.num_used_blocks == blocks.num_cached_blocks == 0
    assert all(num_held(blocks, tier) == 0 for tier in Tier)


def test_the_job_uses_everything(job, watched):
    answers = job.answer()
    stats = job.engine.stats
    assert len(answers) == 6 + 3 + 2
    assert stats.preemptions >= 3
    assert stats.prefix.saved_tokens > 0
    moved = stats.swap.moved_blocks
    assert {"device to device", "device to host", "host to device"} <= moved.keys()
    assert any("disk" in name for name in moved)
    assert_nothing_left(watched[-1])


@pytest.mark.parametrize("name", ["reserve", "admit"])
def test_out_of_blocks_at_every_allocation(job, watched, monkeypatch, name):
    """The allocator has nothing to give, once: somebody waits or is preempted, every answer is the same."""
    fault = FaultAt(monkeypatch, BlockManager, name, lambda *_: False)
    if name == "admit":  # an empty pool always has room for a row: the fault may come only while others run
        original = BlockManager.admit
        monkeypatch.setattr(
            BlockManager, "admit", lambda self, *a: original(self, *a) or (self.num_used_blocks == 0 and original(self, *a))
        )
    want = job.answer()
    for k in fault.each(fault.calls):
        assert job.answer() == want, f"call {k}"
        assert_nothing_left(watched[-1])


def test_an_exception_at_every_allocation(job, watched, monkeypatch):
    """Nobody expects it: the run ends with it, after all blocks were returned, and what was answered is right."""

    def fails(*_):
        raise MemoryError("not now")

    want = job.answer()
    fault = FaultAt(monkeypatch, BlockManager, "_take", fails)
    job.answer()
    for k in fault.each(fault.calls):
        with pytest.raises(MemoryError, match="not now"):
            job.answer()
        assert_nothing_left(watched[-1])
        assert job.run.engine.runner._cache is None, f"call {k}: the pool was not given back"
    fault.at = None
    assert job.answer() == want


@pytest.mark.parametrize("error", [RuntimeError("device-side failure"), OSError(5, "Input/output error")])
def test_an_exception_at_every_copy(job, watched, monkeypatch, error):
    """Blocks that could not be copied or moved are computed again: every row is answered as if nothing had happened."""

    def fails(*_):
        raise error

    fault = FaultAt(monkeypatch, BlockStore, "_move_batch", fails)
    want = job.answer()
    for k in fault.each(fault.calls):
        assert job.answer() == want, f"copy {k}"
        assert job.engine.stats.swap.failed_moves == 1
        assert_nothing_left(watched[-1])


def test_an_exception_at_every_copy_of_a_lone_search(tiny_model, engine_run, make_prompts, watched, monkeypatch):
    """The step that needed the copy is empty then; the row's next table must not inherit entries of the old one."""
    run = engine_run(tiny_model("llama"), block_size=4)
    params = SamplingParams(beam_width=3, n=3, max_tokens=40, ignore_eos=True)
    prompts = make_prompts([10])

    def answer():
        return {key: (s.generated_token_ids, s.score) for key, s in run.sequences(prompts, params).items()}

    def fails(*_):
        raise RuntimeError("not this time")

    fault = FaultAt(monkeypatch, BlockStore, "_move_batch", fails)
    want = answer()
    assert fault.calls > 10
    for k in fault.each(fault.calls):
        assert answer() == want, f"copy {k}"
        assert_nothing_left(watched[-1])


def test_copies_that_always_fail_end_the_run_with_their_error(job, watched, monkeypatch):
    def fails(*_):
        raise RuntimeError("the device is broken")

    monkeypatch.setattr(BlockStore, "_move_batch", fails)
    monkeypatch.setattr("pagedgen.engine.generation._MOST_FAILED_MOVES", 3)
    with pytest.raises(RuntimeError, match="the device is broken"):
        job.answer()
    assert_nothing_left(watched[-1])


def test_a_copy_that_half_succeeds_before_it_fails(job, watched, monkeypatch):
    def half(this, original, source, destination, pairs):
        original(this, source, destination, pairs[: len(pairs) // 2 + 1])
        raise RuntimeError("the rest is lost")

    fault = FaultAt(monkeypatch, BlockStore, "_move_batch", half)
    want = job.answer()
    for k in fault.each(fault.calls):
        assert job.answer() == want, f"copy {k}"
        assert_nothing_left(watched[-1])


@pytest.mark.parametrize("which", ["oldest", "youngest", "waiting"])
def test_a_row_cancelled_at_every_step(job, watched, monkeypatch, which):
    """A row that is taken out, running or waiting, leader or follower, costs the others nothing."""
    gone = []

    def cancel(scheduler, original):
        rows = scheduler.waiting if which == "waiting" else scheduler.running
        if rows:
            victim = rows[-1] if which == "youngest" else rows[0]
            group = victim.beam_group
            gone.append((victim.request.row_index, None if group else victim.sample_index, victim.num_pending_samples))
            for member in list(group.beams) if group else [victim]:
                scheduler.cancel(member)
        return original(scheduler)

    fault = FaultAt(monkeypatch, Scheduler, "schedule", cancel)
    want = job.answer()
    for k in fault.each(fault.calls):
        gone.clear()
        answers = job.answer()
        lost = {
            key
            for key in want
            for row, sample, pending in gone
            if key[0] == row and (sample is None or pending or key[1] == sample)
        }
        assert answers == {key: value for key, value in want.items() if key not in lost}, f"step {k}, cancelled {gone}"
        assert_nothing_left(watched[-1])
