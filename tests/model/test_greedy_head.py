"""The best token without all logits, against the largest of all logits: the same token, whatever the numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorder import recorded
from torch import nn

from pagedgen.model.greedy_head import GreedyHead, make_greedy_head
from pagedgen.model.panels import PanelLinear
from pagedgen.sampling_params import SamplingParams
from pagedgen.threads import set_threads


def slow_twin(panels, x, num_ids):
    """The first of the largest logits of each row, -1 where it is no number."""
    logits = panels(x)[:, :num_ids]
    out = []
    for row in logits:
        best = row.max()
        out.append(int((row == best).nonzero()[0, 0]) if torch.isfinite(best) else -1)
    return out


def heads(weight):
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False).requires_grad_(False)
    linear.weight.copy_(weight)
    panels = PanelLinear(linear)
    return panels, GreedyHead(linear, panels)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("vocab", "size"), [(1000, 64), (49, 576), (5, 4), (4097, 256)])
def test_equals_the_largest_logit(stored, vocab, size):
    torch.manual_seed(0)
    panels, head = heads(torch.randn(vocab, size).to(stored).float())
    x = torch.randn(130, size) * torch.logspace(-3, 3, 130)[:, None]
    x[:, 0] *= 50  # an outlier takes most of the levels
    x[[3, 7, 50]] *= torch.tensor([1e-25, 1e-32, 1e-42])[:, None]
    x[9] = 0
    for num_ids in (vocab, vocab - 1, max(1, vocab // 3)):
        for rows in (1, 2, 13, 130):
            assert head(x[:rows], num_ids).tolist() == slow_twin(panels, x[:rows], num_ids)


@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([4, 20, 96]), spread=st.sampled_from([0.0, 1e-6, 1e-3, 1.0]))
def test_close_and_equal_logits(seed, size, spread):
    """Channels that differ by little or nothing: rounding must never decide between them."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(1, size, generator=generator) + spread * torch.randn(200, size, generator=generator)
    if seed % 2:
        weight = weight.bfloat16().float()
    weight[seed % 150 + 50] = weight[seed % 50]
    panels, head = heads(weight)
    x = torch.randn(9, size, generator=generator)
    x[3] = 0
    assert head(x, 200).tolist() == slow_twin(panels, x, 200)


def test_what_is_no_number_is_said_and_nobody_elses_business():
    torch.manual_seed(0)
    panels, head = heads(torch.randn(100, 32))
    x = torch.randn(8, 32)
    want = slow_twin(panels, x, 100)
    x[1, 3], x[2, 5], x[4] = float("nan"), float("inf"), 3e38
    got = head(x, 100).tolist()
    assert (got[1], got[2], got[4]) == (-1, -1, -1)
    assert [got[i] for i in (0, 3, 5, 6, 7)] == [want[i] for i in (0, 3, 5, 6, 7)]
    assert head(torch.empty(0, 32), 100).shape == (0,)


def test_any_number_of_threads_finds_the_same():
    torch.manual_seed(0)
    panels, head = heads(torch.randn(3000, 64))
    x, before = torch.randn(70, 64), torch.get_num_threads()
    try:
        for threads in (1, 2):
            set_threads(threads, "cpu")
            assert head(x, 3000).tolist() == slow_twin(panels, x, 3000)
    finally:
        set_threads(before, "cpu")


def test_where_it_can_not_be_used():
    linear = nn.Linear(64, 100, bias=False).requires_grad_(False)
    panels = PanelLinear(linear)
    assert make_greedy_head(linear, panels, torch.float32) is not None
    assert make_greedy_head(linear, panels, torch.bfloat16) is None  # logits that rounding made equal: the first of them
    assert make_greedy_head(linear, linear, torch.float32) is None
    linear.weight[3, 4] = float("nan")
    assert make_greedy_head(linear, panels, torch.float32) is None
    odd = nn.Linear(66, 100, bias=False).requires_grad_(False)
    assert make_greedy_head(odd, PanelLinear(odd), torch.float32) is None


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_rows_get_the_tokens_that_logits_give(tiny_model, engine_run, make_prompts, family):
    """Also beside rows that need logits, whose steps have them all."""
    prompts = make_prompts([5, 9, 20, 33])
    run = engine_run(tiny_model(family), dtype="float32")
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    _, want = recorded(run, prompts, greedy)
    done = run.sequences(prompts, greedy)
    assert {key: s.generated_token_ids for key, s in done.items()} == want
    mixed = [greedy, SamplingParams(max_tokens=5, temperature=1.0, ignore_eos=True), greedy, greedy]
    done = run.sequences(prompts, mixed)
    assert all(done[row].generated_token_ids == want[row] for row in (0, 2, 3))
