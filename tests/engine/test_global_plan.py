"""The plan at work in simulation: what prompts have in common is computed once, the pool is full, little is computed twice."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pagedgen.config import EngineConfig
from pagedgen.engine.admission import Admission
from pagedgen.engine.block_manager import BlockManager
from pagedgen.engine.feed import ListFeed
from pagedgen.engine.order import PlannedFeed
from pagedgen.engine.output_lengths import EDGES, OutputLengths, has_exact_length
from pagedgen.engine.scheduler import Scheduler, make_scheduler
from pagedgen.engine.simulation import simulate
from pagedgen.request import Request, Sequence
from pagedgen.sampling_params import SamplingParams

SIZE = 16


def request(row, prompt, max_tokens, *, eos=(2,), **params):
    return Request(row, prompt, SamplingParams(max_tokens=max_tokens, **params), max_tokens, frozenset(eos), 0)


def run(requests, num_blocks, lengths=None, *, sort="prefix", **settings):
    config = EngineConfig("m", sort=sort, block_size=SIZE, max_num_seqs=64, max_num_batched_tokens=512, **settings)
    blocks, scheduler = make_scheduler(config, num_blocks)
    feed, planned = ListFeed(requests), None
    if sort == "prefix":
        feed = planned = PlannedFeed(feed, SIZE)
    done = simulate(feed, blocks, scheduler, lengths or (lambda r, sample: r.max_tokens))
    blocks.audit([])
    assert blocks.num_used_blocks == 0
    sharing = planned.sharing if planned is not None else None
    if planned is not None:
        planned.close()
    return done, sharing


def tree(rng, levels, rows, max_tokens=24):
    """Rows under common beginnings within common beginnings, shuffled. `levels`: (branches, tokens) of each level."""
    paths = [[]]
    for branches, tokens in levels:
        paths = [path + rng.integers(0, 999, tokens).tolist() for path in paths for _ in range(branches)]
    prompts = [path + rng.integers(0, 999, rng.integers(1, 60)).tolist() for path in paths for _ in range(rows)]
    rng.shuffle(prompts)
    return [request(i, p, max_tokens) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("num_blocks", [90, 150, 400])
@pytest.mark.parametrize("levels", [[(12, 320)], [(4, 200), (5, 150)], [(3, 96), (3, 100), (3, 130)]], ids=str)
def test_common_beginnings_are_computed_once_in_any_pool(levels, num_blocks):
    requests = tree(np.random.default_rng(0), levels, 10)
    done, sharing = run(requests, num_blocks)
    assert sharing.attainable_tokens > 20_000
    assert done.saved_tokens >= 0.99 * sharing.attainable_tokens
    # A dozen rows in flight, all of which run to their limit, which nobody knows at first.
    assert done.recomputed_tokens <= 0.05 * done.computed_tokens
    in_order, _ = run(requests, num_blocks, sort="none")
    assert done.computed_tokens <= in_order.computed_tokens


def test_the_order_is_what_saves_in_a_small_pool():
    requests = tree(np.random.default_rng(1), [(12, 320)], 10)
    planned, sharing = run(requests, 90)
    in_order, _ = run(requests, 90, sort="none")
    assert planned.saved_tokens == sharing.attainable_tokens
    assert in_order.saved_tokens < 0.6 * sharing.attainable_tokens


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("num_blocks", [800, 2500])
def test_the_pool_is_full_until_the_drain_and_little_is_computed_twice(num_blocks, knows):
    """Log-normal lengths, unknown or known; first come, first served."""
    rng = np.random.default_rng(0)
    prompts = np.clip(rng.lognormal(5, 0.8, 1500), 10, 1500).astype(int)
    outputs = np.clip(rng.lognormal(5, 0.7, 1500), 1, 1000).astype(int)
    requests = [
        request(i, [0] * p, int(o) if knows else 1000, eos=() if knows else (2,))
        for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))
    ]
    blocks = BlockManager(num_blocks, SIZE, prefix_caching=False)
    scheduler = Scheduler(blocks, max_num_seqs=1024, max_num_batched_tokens=4096)
    done = simulate(ListFeed(requests), blocks, scheduler, lambda r, _: int(outputs[r.row_index]))
    useful = int(prompts.sum() + outputs.sum())
    assert done.generated_tokens == outputs.sum()
    # 33 and 85 rows in flight. Chance weighs less where there are more: recipes/benchmarks/traces.py has 130 to 480.
    assert done.live_before_drain > (0.95 if knows else 0.93)
    assert done.recomputed_tokens < (0.002 if knows else 0.025) * useful
    area = sum(sum(-(-(p + t) // SIZE) for t in range(o)) for p, o in zip(prompts, outputs, strict=True)) / num_blocks
    assert done.steps_before_drain < 1.08 * area


class WeightsOrTokens:
    """A step takes what reading the weights does, or longer by the token."""

    KNEE = 480

    def step_s(self, step, sampled):
        return float(max(self.KNEE, sum(step.num_scheduled_tokens)))


def test_prompts_are_spread_over_steps():
    """A hundred and thirty decodes a step; prompts of three hundred and thirty tokens come at once or not at all."""
    rng = np.random.default_rng(3)
    prompts = np.clip(rng.lognormal(6, 0.6, 2000), 10, 1500).astype(int)
    outputs = np.clip(rng.lognormal(5, 0.7, 2000), 1, 1000).astype(int)
    runs = {}
    for knee in (0, WeightsOrTokens.KNEE):
        blocks = BlockManager(6000, SIZE, prefix_caching=False)
        scheduler = Scheduler(blocks, max_num_seqs=1024, max_num_batched_tokens=8192, knee_tokens=knee)
        requests = [request(i, [0] * p, 1000, eos=(2,)) for i, p in enumerate(prompts)]
        runs[knee] = simulate(ListFeed(requests), blocks, scheduler, lambda r, _: int(outputs[r.row_index]), WeightsOrTokens())
    at_once, spread = runs.values()
    assert spread.generated_tokens == at_once.generated_tokens == outputs.sum()
    assert spread.seconds < 0.92 * at_once.seconds
    assert spread.live_before_drain > 0.94


@pytest.mark.parametrize("num_blocks", [24, 40, 400])
@pytest.mark.parametrize("ends", [None, 13], ids=["to their limits", "by themselves"])
def test_beams_and_later_turns_run_to_their_ends_in_any_pool(num_blocks, ends):
    rng = np.random.default_rng(0)
    eos = () if ends is None else (0, 2)
    requests = []
    for i in range(24):
        prompt = rng.integers(0, 999, rng.integers(1, 80)).tolist()
        if i % 3 == 0:
            requests.append(request(i, prompt, 40, eos=eos, beam_width=4, n=2))
        elif i % 3 == 1:
            turns = dataclasses.replace(request(i, prompt, 20, eos=eos), later_turns=2, later_tokens=2 * 20 + 30)
            requests.append(turns)
        else:
            requests.append(request(i, prompt, 20, eos=eos, n=3, temperature=1.0))
    done, _ = run(requests, num_blocks, None if ends is None else lambda r, _: ends)
    long, short = (40, 20) if ends is None else (ends, ends)
    assert done.generated_tokens == 8 * (2 * long + 3 * short + 3 * short)


def test_rows_of_one_length_do_not_all_start_and_end_together():
    requests = [request(i, [i] * 100, 500, eos=()) for i in range(256)]
    done, _ = run(requests, 1000)
    assert done.recomputed_tokens == 0
    assert done.live_before_drain > 0.74  # 0.58 when they do


def test_samples_are_forecast_before_they_are_forked():
    requests = [request(i, [i] * 100, 64, eos=(), n=8, temperature=1.0) for i in range(20)]
    done, _ = run(requests, 200)
    assert done.generated_tokens == 20 * 8 * 64
    assert done.recomputed_tokens < 0.02 * done.computed_tokens
    assert done.live_before_drain > 0.6  # eight prompts of 100 tokens each would be reserved for a row that has one


def test_survival_counts_rows_in_flight_and_ends_at_the_limit():
    lengths = OutputLengths()
    ended = Sequence(request(0, [0] * 20, 100))
    ended.token_ids += [0] * 10
    ended.finish_reason = "stop"
    for _ in range(40):
        lengths.observe(ended)
    running = [Sequence(request(1, [0] * 20, 100)) for _ in range(60)]
    for s in running:
        s.token_ids += [0] * 50
    lengths.refresh(running)
    new = Sequence(request(2, [0] * 20, 100))
    alive = lengths.survival([new], np.array([0, 5, 12, 40, 98, 99, 100, 5000]))[0]
    assert alive[0] == 1
    assert alive[1] > 0.9
    assert 0.5 < alive[2] < 0.7  # 40 of 100 ended at 10, 60 go on
    assert abs(alive[3] - alive[2]) < 0.05  # nobody was seen to end in between
    assert alive[4] < alive[3]  # nothing is known past 50: an even chance up to the limit
    assert alive[6] == alive[7] == 0
    known = Sequence(request(3, [0] * 20, 30, eos=()))
    assert has_exact_length(known.request)
    assert lengths.survival([known], np.array([0, 29, 30])).tolist() == [[1, 1, 0]]
    assert (np.diff(EDGES) > 0).all()


def naive_peak(rows, size):
    """The most blocks that rows of known remaining lengths ever hold together, by walking through every step."""
    return max(sum(-(-(tokens + t) // size) for tokens, left in rows if t < left) for t in range(max(left for _, left in rows)))


@pytest.mark.parametrize("seed", range(8))
def test_known_lengths_are_admitted_up_to_their_true_peak(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    shapes = [(int(p), int(o)) for p, o in zip(rng.integers(1, 200, 12), rng.integers(1, 120, 12), strict=True)]
    blocks = BlockManager(4000, SIZE, prefix_caching=False)
    running = []
    for i, (p, o) in enumerate(shapes):
        s = Sequence(request(i, [0] * p, o, eos=()))
        assert blocks.admit(s, [], p)
        running.append(s)
    candidate = Sequence(request(99, [0] * 150, 60, eos=()))
    peak = naive_peak([(p, o) for p, o in [*shapes, (150, 60)]], SIZE)
    for capacity, fits in ((peak, True), (peak - 1, False)):
        monkeypatch.setattr("pagedgen.engine.admission._STAGGER", 0.0)
        admission = Admission(blocks, reserve_blocks=4000 - capacity)
        admission.begin(running, [candidate])
        assert admission.fits(candidate, 0, 0) == fits


def test_rows_wait_in_a_file_when_they_are_many(tmp_path, monkeypatch):
    from pagedgen.engine import order

    monkeypatch.setattr(order, "_BYTES_IN_MEMORY", 1000)
    requests = [request(i, [i % 3] * 40 + [i], 5 + i) for i in range(100)]
    feed = PlannedFeed(ListFeed(requests), SIZE, directory=str(tmp_path))
    feed.read(lambda: False)
    taken = []
    while not feed.exhausted:
        taken += feed.take(wait=True)
    feed.close()
    assert sorted(taken, key=lambda r: r.row_index) == requests
    assert [r.row_index % 3 for r in taken] == sorted((r.row_index % 3 for r in taken), key=[0, 2, 1].index)
    assert taken[0].row_index == 99  # the most is expected of it
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_rows_past_the_sixteen_looked_at_are_seen_to_their_ends():
    """Short rows hide what a long one behind them grows to."""
    requests = [request(i, [i] * 16, 10, eos=()) for i in range(40)] + [
        request(100 + i, [i] * 16, 1500, eos=()) for i in range(20)
    ]
    done, _ = run(requests, 100, sort="none")
    assert done.recomputed_tokens <= 0.02 * done.computed_tokens


def test_a_full_disk_under_the_rows_that_wait_is_told(tmp_path):
    from pagedgen.errors import OutputError

    class Full:
        def seek(self, at):
            pass

        def write(self, data):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    feed = PlannedFeed(ListFeed([request(0, [1, 2, 3], 5)]), SIZE, directory=str(tmp_path))
    feed.close()
    feed._spool._file = Full()
    with pytest.raises(OutputError, match=rf"{tmp_path}.*No space left.*errno 28"):
        feed.read(lambda: False)
