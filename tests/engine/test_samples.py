"""Parallel samples: one prompt pass, blocks shared until they are written, and the same tokens whatever the pool."""

from __future__ import annotations

import pytest
import torch
from recorder import InPlaceOfSampler

from pagedgen.errors import RowError
from pagedgen.sampling_params import SamplingParams


def tokens(done):
    return {key: s.generated_token_ids for key, s in done.items()}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("prompt_len", [1, 7, 8, 9, 30])
def test_the_prompt_is_computed_once_and_its_blocks_are_shared(tiny_model, engine_run, make_prompts, backend, prompt_len):
    run = engine_run(tiny_model("llama"), backend=backend, block_size=8)
    params = SamplingParams(n=5, temperature=1.0, max_tokens=6, ignore_eos=True)
    done = run.sequences(make_prompts([prompt_len]), params)
    assert sorted(done) == [(0, i) for i in range(5)]
    assert len({tuple(ids) for ids in tokens(done).values()}) > 1
    assert run.stats.computed_tokens == prompt_len + 5 * 5
    shared = prompt_len // 8
    single = -(-(prompt_len + 5) // 8)
    assert run.stats.blocks.peak == shared + 5 * (single - shared)
    assert run.stats.blocks.to_dict()["saved_by_sharing"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_case_pr_01_samples_do_not_depend_on_the_pool_or_the_company(
    tiny_model, engine_run, make_prompts, eager_admission, family, dtype
):
    """n in {1, 3, 5} through a pool for about four sequences against a pool for all, in another order, in chunks."""
    model = tiny_model(family)
    prompts = make_prompts([20] * 6 + [3, 17])
    params = [SamplingParams(n=n, temperature=1.0, max_tokens=40, ignore_eos=True) for n in (3, 5, 3, 5, 3, 5, 3, 5)]
    settings = {"dtype": dtype, "block_size": 4}
    want = tokens(engine_run(model, **settings).sequences(prompts, params))
    pressed = engine_run(model, num_gpu_blocks_override=60, **settings)
    assert tokens(pressed.sequences(prompts, params)) == want
    assert pressed.stats.preemptions > 0
    other = engine_run(model, max_num_batched_tokens=11, **settings)
    assert tokens(other.sequences(prompts[::-1], params[::-1], list(range(8))[::-1])) == want


def test_every_sample_attends_to_its_own_tokens(tiny_model, engine_run, make_prompts):
    """The last logits of each sample have the bits of a run whose prompt is that sample's whole text."""
    run = engine_run(tiny_model("llama"), dtype="bfloat16", block_size=4)
    seen = {}
    sampler = run.engine._sampler

    def record(logits, sequences):
        for row, s in zip(logits, sequences, strict=True):
            seen[s.sample_index, len(s.token_ids)] = row.contiguous().view(torch.uint8).numpy().tobytes()
        return sampler(logits, sequences)

    run.engine._sampler = InPlaceOfSampler(record)
    prompt = make_prompts([10])[0]
    done = run.sequences([prompt], SamplingParams(n=4, temperature=1.5, max_tokens=13, ignore_eos=True))
    bits = {sample: seen[sample, 10 + 12] for sample in range(4)}
    for (_, sample), s in done.items():
        seen.clear()
        run.sequences([s.token_ids[:-1]], SamplingParams(max_tokens=1, ignore_eos=True))
        assert seen[0, 22] == bits[sample]


def test_samples_that_can_not_run_together_are_refused(tiny_model, engine_run):
    run = engine_run(tiny_model("llama"), max_num_seqs=3)
    with pytest.raises(RowError, match="--max-num-seqs 3"):
        run.engine.opened.make_request(0, [9], SamplingParams(n=4, temperature=1.0))
    with pytest.raises(ValueError, match="greedy samples are all the same"):
        SamplingParams(n=2)


def test_a_row_larger_than_the_pool_is_told_for_each_sample(tiny_model, engine_run, make_prompts):
    run = engine_run(tiny_model("llama"), block_size=4, num_gpu_blocks_override=4)
    params = SamplingParams(n=2, temperature=1.0, max_tokens=3, ignore_eos=True)
    done = run.sequences(make_prompts([30, 9]), params)
    assert {key: getattr(d, "code", None) for key, d in done.items()} == {
        (0, 0): "kv_pool_too_small", (0, 1): "kv_pool_too_small", (1, 0): None, (1, 1): None,
    }  # fmt: skip
