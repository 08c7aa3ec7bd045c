"""Draws by counter, filters against a naive twin, greedy rows untouched by their neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedgen.request import Request, Sequence
from pagedgen.sampling.philox import philox4x32, uniforms
from pagedgen.sampling.sampler import Sampler, _largest
from pagedgen.sampling_params import SamplingParams

VOCAB = 50


def sequence(params, row=0, generated=0, eos=(), seed=0):
    made = Sequence(Request(row, [1, 2, 3], params, params.max_tokens, frozenset(eos), params.seed or seed))
    made.token_ids += [5] * generated
    return made


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, want):
    """The known-answer vectors of the Random123 library."""
    got = philox4x32(np.array([counter], dtype=np.uint32), np.array([key], dtype=np.uint32))
    assert got[0].tolist() == want


def test_uniforms_depend_on_each_part_and_nothing_else():
    n = 500
    base = [np.full(n, 7, dtype=np.uint64), np.arange(n), np.zeros(n, int), np.zeros(n, int)]
    draws = uniforms(*base)
    assert ((draws >= 0) & (draws < 1)).all()
    assert len(set(draws.tolist())) == n
    assert 0.45 < draws.mean() < 0.55
    order = np.random.default_rng(0).permutation(n)
    assert (uniforms(*(b[order] for b in base)) == draws[order]).all()
    for changed in range(4):
        other = [b.copy() for b in base]
        other[changed] = other[changed] + base[changed].dtype.type(1)
        assert (uniforms(*other) != draws).mean() > 0.99


def naive_candidates(logits, params):
    """Filter a distribution in the plainest way; return {id: probability} renormalized."""
    p = torch.softmax(logits.double() / params.temperature, dim=-1)
    order = sorted(range(len(p)), key=lambda i: (-float(logits[i]), i))
    if params.top_k > 0:
        order = order[: params.top_k]
    total = sum(float(p[i]) for i in order)
    kept, reached = [], 0.0
    for i in order:
        if params.top_p < 1.0 and reached >= params.top_p:
            break
        kept.append(i)
        reached += float(p[i]) / total
    top = float(p[kept[0]])
    kept = [i for i in kept if float(p[i]) >= params.min_p * top]
    total = sum(float(p[i]) for i in kept)
    return {i: float(p[i]) / total for i in kept}


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"top_k": 1}, {"top_k": 5}, {"top_k": -1}, {"top_p": 0.9}, {"top_p": 1e-9}, {"min_p": 0.2}, {"min_p": 1.0},
        {"top_k": 10, "top_p": 0.7, "min_p": 0.1}, {"temperature": 3.0, "top_p": 0.99},
    ],
)  # fmt: skip
def test_draws_follow_the_naive_distribution(settings):
    params = SamplingParams(**{"temperature": 1.0, **settings})
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    want = naive_candidates(logits, params)
    draws = 2000
    tokens = Sampler(VOCAB)(logits.expand(draws, VOCAB), [sequence(params, row=r, seed=7) for r in range(draws)])
    assert set(tokens) <= set(want)
    for token, probability in want.items():
        share = tokens.count(token) / draws
        assert abs(share - probability) < 4 * (probability * (1 - probability) / draws) ** 0.5 + 1e-3


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_off_is_not_greedy_on_uniform_logits(top_k):
    params = SamplingParams(temperature=1.0, top_k=top_k)
    tokens = Sampler(VOCAB)(torch.zeros(2000, VOCAB), [sequence(params, row=r, seed=7) for r in range(2000)])
    assert len(set(tokens)) == VOCAB


def test_large_nucleus_sorts_everything():
    """A nucleus past the first guess of candidates gives the distribution of the full sort."""
    vocab = 5000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(2)) * 0.01
    params = SamplingParams(temperature=1.0, top_p=0.95)
    want = naive_candidates(logits, params)
    tokens = Sampler(vocab)(logits.expand(500, vocab), [sequence(params, row=r) for r in range(500)])
    assert set(tokens) <= set(want)
    assert len(set(tokens)) > 400


def test_rows_do_not_see_each_other():
    """A row's token is the same alone, among others, and in another place."""
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(3))
    settings = [
        SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_p=0.5),
        SamplingParams(temperature=1.5, top_k=3), SamplingParams(temperature=1.0, min_p=0.3),
        SamplingParams(top_k=1, temperature=2.0),
        SamplingParams(temperature=1.0, seed=99), SamplingParams(temperature=1.0, min_tokens=4),
    ]  # fmt: skip
    rows = [sequence(p, row=i, eos=[9]) for i, p in enumerate(settings)]
    sampler = Sampler(VOCAB)
    together = sampler(logits, rows)
    assert [sampler(logits[i : i + 1], [rows[i]])[0] for i in range(8)] == together
    assert sampler(logits.flip(0), rows[::-1])[::-1] == together
    assert together[0] == int(logits[0].argmax())
    assert together[5] == int(logits[5].argmax())


def test_min_tokens_holds_back_every_end():
    logits = torch.zeros(2, VOCAB)
    logits[:, 9], logits[:, 8] = 10.0, 9.0
    params = SamplingParams(min_tokens=3, stop_token_ids=[8])
    rows = [sequence(params, eos=[9], generated=2), sequence(params, eos=[9], generated=3)]
    first, second = Sampler(VOCAB)(logits, rows)
    assert first not in (8, 9)
    assert second == 9


def test_ids_past_the_tokenizer_are_never_chosen():
    logits = torch.zeros(300, VOCAB)
    logits[:, 40:] = 50.0
    params = [SamplingParams(), SamplingParams(temperature=1.5), SamplingParams(temperature=1.5, top_p=0.9)] * 100
    tokens = Sampler(40)(logits, [sequence(p, row=r) for r, p in enumerate(params)])
    assert max(tokens) < 40


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"temperature": -0.1}, "temperature"), ({"temperature": float("nan")}, "temperature"), ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"), ({"top_k": -2}, "top_k"), ({"top_k": 1.5}, "top_k"), ({"min_p": 2}, "min_p"),
        ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": "5"}, "max_tokens"), ({"max_tokens": True}, "max_tokens"),
        ({"stop": [""]}, "stop"), ({"stop": [3]}, "stop"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"ignore_eos": "yes"}, "ignore_eos"), ({"seed": -1}, "seed"),
        ({"temperature": 10**400}, "temperature"), ({"stop": "\ud800"}, "stop"), ({"best_of": 3}, "best_of"),
        ({"min_tokens": 600}, "min_tokens"),
    ],
)  # fmt: skip
def test_bad_values_name_their_field(values, named):
    with pytest.raises(ValueError, match=named):
        SamplingParams().override(values)


def test_integral_floats_are_integers_for_a_row():
    assert SamplingParams().override({"max_tokens": 5.0, "top_k": 3.0}).max_tokens == 5
    with pytest.raises(ValueError, match="max_tokens"):
        SamplingParams().override({"max_tokens": 5.5})


def test_logits_that_are_no_numbers_are_reported_by_row():
    logits = torch.randn(4, VOCAB)
    logits[1, 7], logits[2, 3] = float("nan"), float("inf")
    for params in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9)):
        tokens = Sampler(VOCAB)(logits, [sequence(params, row=r) for r in range(4)])
        assert [t < 0 for t in tokens] == [False, True, True, False]


def test_nulls_are_not_given():
    base = SamplingParams(max_tokens=7, temperature=0.5)
    assert base.override({"max_tokens": None, "temperature": None, "best_of": None}) == base
    assert base.override(None) == base
    assert base.override({"max_tokens": 3, "stop": "END"}).stop == ("END",)


@pytest.mark.parametrize(
    "settings", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tiny_temperature_is_greedy(settings, dtype):
    """Any positive temperature is legal, down to those at which logits / temperature overflows."""
    logits = (torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(5)) * 30).to(dtype)
    for temperature in (1e-3, 1e-20, 1e-40, 5e-324):
        params = SamplingParams(temperature=temperature, **settings)
        tokens = Sampler(VOCAB)(logits, [sequence(params, row=r) for r in range(40)])
        best = logits.amax(dim=-1)
        assert all(logits[r, t] == best[r] for r, t in enumerate(tokens))


def test_ties_are_ordered_by_id():
    logits = torch.zeros(200, VOCAB)
    logits[:, 30:] = -0.0
    params = SamplingParams(temperature=1.0, top_k=7)
    tokens = Sampler(VOCAB)(logits, [sequence(params, row=r) for r in range(200)])
    assert set(tokens) == set(range(7))


def test_planner_knows_the_samplers_work_space():
    from pagedgen.engine import planner
    from pagedgen.sampling import sampler

    assert planner.SAMPLER_ROWS == sampler.ROWS_AT_ONCE


def test_equal_values_are_ordered_by_id_however_many_are_asked_for():
    """bf16 logits are equal by the dozen; `topk` alone orders those by its count and by what is beside them."""
    values = torch.randint(0, 4, (3, 5000), generator=torch.Generator().manual_seed(0)).float()
    values[1, 7] = -0.0
    for count in (1, 3, 40, 1000, 5000):
        got = _largest(values, count)
        for row, ids in zip(values.tolist(), got.tolist(), strict=True):
            assert ids == sorted(range(5000), key=lambda i: (-row[i], i))[:count]
        assert torch.equal(_largest(values[2:], count), got[2:])
