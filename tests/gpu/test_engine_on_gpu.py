"""The whole engine on a real device: fp32 greedy against transformers, every schedule; and bf16 runs that repeat themselves."""

from __future__ import annotations

import pytest
import torch

from pagedgen.engine.tiers import Tier
from pagedgen.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen3_moe", "gpt_neox"])
@pytest.mark.parametrize("settings", [{}, {"block_size": 4, "max_num_batched_tokens": 7, "num_gpu_blocks_override": 18}])
def test_greedy_equals_transformers(tiny_model, engine_run, reference_generate, make_prompts, family, settings):
    prompts = make_prompts([1, 15, 16, 17, 33, 48, 49])
    model = tiny_model(family)
    run = engine_run(model, device="cuda", **settings)
    want = reference_generate(model, prompts, 10)
    assert run.answer(prompts, PARAMS) == want
    assert run.answer(prompts[::-1], PARAMS, list(range(7))[::-1]) == want


def test_sharing_beams_and_swapping_give_the_same_tokens(tiny_model, engine_run, make_prompts, eager_admission):
    """A common beginning, samples and beams, in a large pool and in one that swaps to pinned host memory."""
    common = make_prompts([20])[0]
    prompts = [common + tail for tail in make_prompts([3, 9, 5, 7, 4, 8], seed=1)]
    params = [SamplingParams(max_tokens=24, ignore_eos=True)] * 4 + [
        SamplingParams(n=3, temperature=1.0, max_tokens=24, ignore_eos=True),
        SamplingParams(beam_width=3, n=3, max_tokens=24, ignore_eos=True),
    ]
    model = tiny_model("llama")
    want = engine_run(model, device="cuda", enable_prefix_caching=False).answer(prompts, params)
    run = engine_run(model, device="cuda", block_size=4, num_gpu_blocks_override=36, swap_space_bytes=2**20)
    run.engine._round_trip_s = {Tier.HOST: 0.0}  # used whatever the times are
    assert run.answer(prompts, params) == want
    assert run.stats.preemptions > 0
    assert run.stats.prefix.saved_tokens > 0
    assert run.stats.swap.moved_blocks["host to device"] > 0


def test_bf16_repeats_itself(tiny_model, engine_run, make_prompts):
    run = engine_run(tiny_model("llama"), device="cuda", dtype="bfloat16")
    prompts = make_prompts([5, 100, 33])
    assert run.answer(prompts, PARAMS) == run.answer(prompts, PARAMS)
