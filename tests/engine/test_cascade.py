"""Groups of decoding rows that attend to a common beginning together: which, and that the answers' bits stay the same."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedgen.engine.batch import BlockTableArray
from pagedgen.engine.cascade import _best_groups, group_decodes
from pagedgen.engine.scheduler import ScheduledStep
from pagedgen.request import Request, Sequence
from pagedgen.sampling_params import SamplingParams


def naive_best(common):
    """The most block reads that any cut of the rows into runs of neighbours spares."""
    n = len(common) + 1
    best = 0
    for count in range(n):
        for cuts in combinations(range(1, n), count):
            edges = [0, *cuts, n]
            spared = 0
            for first, end in pairwise(edges):
                if end - first > 1:
                    gain = (end - first - 1) * min(common[first : end - 1])
                    spared += gain if gain >= 4 else 0
            best = max(best, spared)
    return best


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_spares_nearly_as_many_reads_as_the_best_cut(common):
    groups = _best_groups(np.array(common))
    ends = 0
    spared = 0
    for first, end, blocks in groups:
        assert first >= ends
        assert end - first > 1
        assert 0 < blocks <= min(common[first : end - 1])
        ends = end
        spared += (end - first - 1) * blocks
    assert spared >= 0.6 * naive_best(common)
    if len(set(common)) <= 2 and 0 in common:  # groups of one level
        assert spared == naive_best(common)


def sequence(row, table, num_computed):
    one = Sequence(Request(row, [0] * (num_computed + 1), SamplingParams(), 9, frozenset(), 0))
    one.block_table, one.num_computed_tokens = table, num_computed
    return one


def test_decodes_are_put_beside_those_they_share_with_and_prefills_stay_behind():
    a, b = [1, 2, 3, 4], [5, 6, 7, 8]
    rows = [sequence(0, [*a, 20], 17), sequence(1, [*b, 21], 18), sequence(2, [*a, 22], 19), sequence(3, [9, 23], 6)]
    rows += [sequence(4, [*b, 24], 17), sequence(5, [*a, 30], 16)]
    prefill = sequence(6, [*a, 25], 16)
    tables = BlockTableArray(8, width=4)
    tables.update([*rows, prefill])
    step, shared = group_decodes(ScheduledStep([*rows, prefill], [1] * 6 + [3], 6), tables, 4)
    assert step.sequences[-1] is prefill
    assert step.num_scheduled_tokens == [1] * 6 + [3]
    together = [
        ({s.request.row_index for s in step.sequences[low:high]}, blocks)
        for low, high, blocks in zip(shared.row_bounds, shared.row_bounds[1:], shared.num_shared_blocks, strict=False)
    ]
    assert sorted(together, key=lambda g: min(g[0])) == [({0, 2, 5}, 4), ({1, 4}, 4), ({3}, 0)]
    assert shared.num_spared_reads == 2 * 4 + 4


def test_rows_that_share_nothing_or_only_a_block_still_written_are_left_as_they_are():
    rows = [sequence(0, [1, 2], 5), sequence(1, [3, 4], 5)]
    tables = BlockTableArray(4)
    tables.update(rows)
    step = ScheduledStep(rows, [1, 1], 2)
    assert group_decodes(step, tables, 4) == (step, None)
    fork = [sequence(0, [1, 2, 3, 4, 5], 18), sequence(1, [1, 2, 3, 4, 5], 18)]
    tables = BlockTableArray(4)
    tables.update(fork)
    _, shared = group_decodes(ScheduledStep(fork, [1, 1], 2), tables, 4)
    assert shared.num_shared_blocks.tolist() == [4]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_the_engine_gives_the_same_bits_with_and_without(tiny_model, engine_run, family, dtype):
    """Two levels of common beginnings, samples of a row, and rows on their own; every logit."""
    rng = np.random.default_rng(0)
    trunk, branches = rng.integers(3, 90, 33).tolist(), [rng.integers(3, 90, 16).tolist() for _ in range(2)]
    prompts = [trunk + branches[i % 2] + rng.integers(3, 90, 1 + i).tolist() for i in range(8)]
    prompts += [rng.integers(3, 90, 20).tolist() for _ in range(2)]
    logits, spared = {}, {}
    for on in (True, False):
        run = engine_run(tiny_model(family), dtype=dtype, block_size=4, cascade_attention=on)
        seen = logits[on] = {}
        sampler = run.engine._sampler.__class__.__call__

        def record(self, values, sequences, seen=seen, sampler=sampler):
            for value, s in zip(values, sequences, strict=True):
                seen[s.request.row_index, s.num_generated_tokens] = value.clone()
            return sampler(self, values, sequences)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run.engine._sampler.__class__, "__call__", record)
            patch.setattr(run.engine._sampler.__class__, "best_among", lambda self, sequences: None)
            run.answer(prompts, SamplingParams(max_tokens=10, ignore_eos=True))
        spared[on] = run.engine.stats.spared_block_reads
    assert spared[True] > 100
    assert spared[False] == 0
    assert logits[True].keys() == logits[False].keys()
    assert all((logits[True][k] == logits[False][k]).all() for k in logits[True])
