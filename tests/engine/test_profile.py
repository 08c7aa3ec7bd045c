"""The machine profile: fitted, kept, used."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from pagedgen.engine.profile import MachineProfile, load_profile, save_profile
from pagedgen.engine.scheduler import ScheduledStep
from pagedgen.engine.tuning import MeasuredStep, fit_profile
from pagedgen.request import Request, Sequence
from pagedgen.sampling_params import SamplingParams


def true_seconds(tokens, context, pairs, sampled):
    return 0.01 + 1e-4 * tokens + 3e-7 * context + 2e-8 * pairs + 1e-5 * sampled


@pytest.fixture
def steps():
    """Steps of a machine whose costs are known, with noise."""
    rng = np.random.default_rng(0)
    shapes = [(n, n * c, 0, n) for n in (1, 2, 4, 8, 16, 32, 64, 128) for c in (16, 300, 1000)]
    shapes += [(16 * k, 0, k * 136, k) for k in (1, 2, 4, 8, 16, 32, 64)]
    shapes += [(1024, 0, 1024 * s + 1024 * 1025 // 2, 0) for s in (0, 1024, 2048)]
    return [MeasuredStep(*s, true_seconds(*s) * rng.uniform(0.97, 1.03)) for s in shapes for _ in range(5)]


def test_the_fit_finds_the_costs(steps):
    profile = fit_profile(steps, "a machine", 32, 5.0)
    assert profile.fit_error < 0.05
    for shape in ((40, 40 * 500, 0, 40), (700, 100, 700 * 701 // 2, 3), (1024, 0, 1024 * 1500, 0), (1, 2000, 0, 1)):
        assert profile.predict(*shape) == pytest.approx(true_seconds(*shape), rel=0.12)
    assert profile.predict(2048, 0, 0, 0) == pytest.approx(2 * profile.predict(1024, 0, 0, 0))
    assert profile.knee_tokens in (512, 1024)
    assert profile.num_seqs == 128


@pytest.mark.parametrize(("fixed_s", "row_s", "best"), [(0.01, 1e-2, 32), (0.01, 1e-3, 256), (0.005, 1e-3, 128), (9.0, 0, 512)])
def test_as_few_rows_in_flight_as_come_near_the_fastest(fixed_s, row_s, best):
    steps = [MeasuredStep(k, 0, 0, k, fixed_s + row_s * k) for k in (16, 32, 64, 128, 256, 512)]
    steps += [MeasuredStep(1024, 0, 1, 4, fixed_s + row_s * 1024)]  # prompts, which are no rows in flight
    assert fit_profile(steps, "a machine", 32, 5.0).num_seqs == best


def test_a_machine_that_is_slow_for_one_pass_is_not_taken_for_slow(steps):
    """What one pass over the workloads measured while the machine was twice as slow doesn't weigh."""
    slow = [dataclasses.replace(s, seconds=2 * s.seconds) for s in steps[::5]]
    profile = fit_profile([*slow, *steps], "a machine", 32, 5.0)
    assert profile.predict(700, 100, 700 * 701 // 2, 3) == pytest.approx(true_seconds(700, 100, 700 * 701 // 2, 3), rel=0.12)


def test_it_is_kept_and_a_broken_file_is_none(tmp_path, steps):
    profile = fit_profile(steps, "a machine", 32, 5.0)
    path = tmp_path / "p" / "x.json"
    assert load_profile(path) is None
    save_profile(path, profile)
    assert load_profile(path) == profile
    for text in ("{", "[]", json.dumps({"format": 1}), json.dumps({**json.loads(path.read_text()), "format": 99})):
        path.write_text(text)
        assert load_profile(path) is None


def test_other_block_sizes_cost_what_was_measured():
    profile = MachineProfile("m", 32, [1], [0.1], 2e-6, 0, 0, 0, 0, 0, 0, decode_s_by_block_size={"16": 3.0, "32": 2.0})
    assert profile.for_block_size(16).decode_s_per_token == pytest.approx(3e-6)
    assert profile.for_block_size(128).decode_s_per_token == 2e-6


@pytest.mark.parametrize(
    ("waste", "shareable", "decode_s", "short", "best"),
    [
        ((0.02, 0.04, 0.08, 0.16), (0, 0, 0, 0), None, True, 8),  # memory is short
        ((0.02, 0.04, 0.08, 0.16), (0, 0, 0, 0), None, False, 32),  # nothing speaks against the default
        ((0.001, 0.002, 0.004, 0.3), (0, 0, 0, 0), None, True, 32),
        ((0, 0, 0, 0), (0.9, 0.9, 0.5, 0.1), None, False, 16),  # short common beginnings
        ((0, 0, 0, 0), (0, 0, 0, 0), (4.0, 2.0, 1.5, 1.0), False, 64),
    ],
)
def test_the_recommended_block_size_is_the_one_that_costs_least(waste, shareable, decode_s, short, best):
    from pagedgen.engine.forecast import BlockSizeCost, recommend_block_size

    costs = [
        BlockSizeCost(size, waste[i], 1.0, shareable[i], None if decode_s is None else decode_s[i])
        for i, size in enumerate((8, 16, 32, 64))
    ]
    assert recommend_block_size(costs, 32, pool_is_short=short) == best


@pytest.mark.parametrize(
    ("params", "seconds"), [({"n": 4, "temperature": 1.0}, 4 * (1 + 100)), ({"beam_width": 4}, 1 + 10_000)]
)
def test_a_prompts_step_samples_all_its_samples_and_searches_once(params, seconds):
    profile = MachineProfile("m", 32, [1], [0], 0, 0, 1, 100, 10_000, 0, 0)
    first = Sequence(Request(0, [5, 6, 7], SamplingParams(max_tokens=4, **params), 4, frozenset(), 0))
    first.beam_group = object() if "beam_width" in params else None
    assert profile.step_s(ScheduledStep([first], [3], 0), [first]) == seconds
