"""Beam search equals transformers' in fp32: sequences, order and scores; beams share blocks and survive preemption."""

from __future__ import annotations

import pytest
import torch

from pagedgen.errors import RowError
from pagedgen.sampling_params import SamplingParams

MAX_TOKENS = 20
LENGTHS = [3, 8, 9, 16, 30]


@pytest.fixture(scope="module")
def reference_beams():
    """Beam search of `transformers`, one row at a time: [(generated ids up to the first EOS, score)] in its order."""
    made = {}

    def beams(model, prompts, params, max_tokens=MAX_TOKENS, eos=2, min_tokens=None):
        from transformers import AutoModelForCausalLM

        if model not in made:
            made[model] = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
        answers = {}
        for row, prompt in enumerate(prompts):
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                out = made[model].generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, min_new_tokens=min_tokens,
                    num_beams=params.beam_width, num_return_sequences=params.n, do_sample=False, eos_token_id=eos,
                    length_penalty=params.length_penalty, early_stopping=params.early_stopping, pad_token_id=0,
                    return_dict_in_generate=True, output_scores=True,
                )  # fmt: skip
            for i in range(params.n):
                generated = out.sequences[i, len(prompt) :].tolist()
                lists = [eos] if isinstance(eos, int) else list(eos or [])
                ends = [generated.index(e) for e in lists if e in generated]
                if ends:
                    generated = generated[: min(ends) + 1]
                answers[row, i] = generated, float(out.sequences_scores[i])
        return answers

    return beams


def results(done):
    """{(row, rank): (ids, score)}; rows with one answer are keyed by their number alone."""
    return {key if isinstance(key, tuple) else (key, 0): (s.generated_token_ids, s.score) for key, s in done.items()}


def assert_same(got, want):
    assert {k: ids for k, (ids, _) in got.items()} == {k: ids for k, (ids, _) in want.items()}
    for key, (_, score) in got.items():
        assert score == pytest.approx(want[key][1], abs=1e-4, rel=1e-6)  # with length_penalty -1 scores reach the hundreds


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize(("width", "n"), [(2, 1), (4, 4)])
def test_beams_equal_transformers(
    tiny_model, engine_run, reference_beams, make_prompts, width, n, length_penalty, early_stopping
):
    """Case BM-01's grid, on a model that often ends a sequence (EOS is likely), all rows together."""
    model = tiny_model("llama", vocab_size=64)
    params = SamplingParams(
        beam_width=width, n=n, length_penalty=length_penalty, early_stopping=early_stopping, max_tokens=MAX_TOKENS
    )
    prompts = make_prompts(LENGTHS, vocab_size=64, seed=3)
    want = reference_beams(model, prompts, params)
    run = engine_run(model, block_size=4)
    assert_same(results(run.sequences(prompts, params)), want)


def test_some_beams_of_the_grid_end_early(tiny_model, engine_run, make_prompts):
    """Otherwise the grid would say nothing about finished beams."""
    run = engine_run(tiny_model("llama", vocab_size=64), block_size=4)
    params = SamplingParams(beam_width=4, n=4, max_tokens=MAX_TOKENS)
    done = run.sequences(make_prompts(LENGTHS, vocab_size=64, seed=3), params)
    reasons = [s.finish_reason for s in done.values()]
    assert {"stop", "length"} == set(reasons)
    assert min(s.num_generated_tokens for s in done.values()) < MAX_TOKENS


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "qwen3_moe"])
def test_beams_of_other_families(tiny_model, engine_run, reference_beams, make_prompts, family):
    params = SamplingParams(beam_width=3, n=2, max_tokens=8)
    prompts = make_prompts([5, 17, 12])
    want = reference_beams(tiny_model(family), prompts, params, max_tokens=8)
    assert_same(results(engine_run(tiny_model(family), block_size=8).sequences(prompts, params)), want)


def test_stop_token_ids_end_beams_like_eos_and_min_tokens_hold_them_back(tiny_model, engine_run, reference_beams, make_prompts):
    model = tiny_model("llama", vocab_size=64)
    prompts = make_prompts(LENGTHS, vocab_size=64, seed=3)
    run = engine_run(model, block_size=4)
    params = SamplingParams(beam_width=3, n=3, max_tokens=MAX_TOKENS, stop_token_ids=(24, 30))
    done = run.sequences(prompts, params)
    assert_same(results(done), reference_beams(model, prompts, params, eos=[2, 24, 30]))
    assert {s.stop_reason for s in done.values() if s.finish_reason == "stop"} <= {None, 24, 30}
    held = SamplingParams(beam_width=3, n=3, max_tokens=MAX_TOKENS, min_tokens=6)
    assert_same(results(run.sequences(prompts, held)), reference_beams(model, prompts, held, min_tokens=6))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("caching", [True, False])
def test_beams_do_not_depend_on_pool_chunks_or_company(tiny_model, engine_run, make_prompts, eager_admission, dtype, caching):
    """Preempted searches start again from their prompt and come to the same beams, bit for bit in their scores."""
    model = tiny_model("llama")
    prompts = make_prompts([10, 26, 3, 17, 40, 8])
    params = [SamplingParams(beam_width=w, n=w, max_tokens=24, ignore_eos=i % 2 == 0) for i, w in enumerate((4, 2, 3, 4, 2, 3))]
    params[2] = SamplingParams(n=2, temperature=1.0, max_tokens=24, ignore_eos=True)  # samples among the beams
    settings = {"dtype": dtype, "block_size": 4, "enable_prefix_caching": caching}
    want = results(engine_run(model, **settings).sequences(prompts, params))
    pressed = engine_run(model, num_gpu_blocks_override=48, **settings)
    assert results(pressed.sequences(prompts, params)) == want
    assert pressed.stats.preemptions > 0
    chunked = engine_run(model, max_num_batched_tokens=9, max_num_seqs=6, **settings)
    order = [4, 2, 0, 5, 1, 3]
    assert results(chunked.sequences([prompts[i] for i in order], [params[i] for i in order], order)) == want
    for row in (0, 1):
        alone = results(engine_run(model, **settings).sequences([prompts[row]], [params[row]], [row]))
        assert alone == {key: value for key, value in want.items() if key[0] == row}


def test_beams_share_blocks(tiny_model, engine_run, make_prompts):
    """Beam 4 with a 200-token prompt holds at least 60 % fewer blocks than four copies would."""
    run = engine_run(tiny_model("llama"), block_size=16)
    params = SamplingParams(beam_width=4, max_tokens=64, ignore_eos=True)
    run.sequences(make_prompts([200]), params)
    blocks = run.stats.blocks
    assert blocks.to_dict()["saved_by_sharing"] >= 0.6
    four_copies = 4 * -(-(200 + 63) // 16)
    assert blocks.peak <= 0.4 * four_copies + 4  # the peak is at the end, when the beams differ most


def test_full_blocks_are_never_copied_for_a_beam(tiny_model, engine_run, make_prompts):
    """Reordering exchanges table entries; only a partly filled block that two beams go on from is copied."""
    run = engine_run(tiny_model("llama"), block_size=8)
    params = SamplingParams(beam_width=4, max_tokens=33, ignore_eos=True)
    run.sequences(make_prompts([64]), params)
    copies = run.stats.swap.moved_blocks["device to device"]
    assert 0 < copies <= 3 * 32 * 7 // 8  # at most all beams but one, in each step that does not begin a block


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"beam_width": 4, "n": 5}, "n 5 is more than beam_width 4"),
        ({"beam_width": 4, "temperature": 0.5}, "temperature must be 0"),
        ({"beam_width": 4, "stop": "x"}, "stop texts can't end a beam"),
        ({"beam_width": 0}, "beam_width 0 must be at least 1"),
        ({"beam_width": 2, "early_stopping": "always"}, "early_stopping must be"),
        ({"beam_width": 2, "length_penalty": float("inf")}, "length_penalty must be a finite number"),
        ({"beam_width": 2, "length_penalty": 400.0}, r"length_penalty 400.0 is outside \[-10, 10\]"),
    ],
)
def test_settings_that_make_no_search_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        SamplingParams(**settings)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-10, 10])
def test_extreme_penalties_give_numbers(tiny_model, engine_run, make_prompts, length_penalty, early_stopping):
    import math

    params = SamplingParams(beam_width=2, n=2, length_penalty=length_penalty, early_stopping=early_stopping, max_tokens=300)
    done = engine_run(tiny_model("llama", vocab_size=64)).sequences(make_prompts([5, 9], vocab_size=64), params)
    assert all(math.isfinite(s.score) for s in done.values())


def test_searches_that_can_not_run_here_are_row_errors(tiny_model, engine_run, make_prompts):
    run = engine_run(tiny_model("llama"), max_num_seqs=3, block_size=4, num_gpu_blocks_override=24)
    with pytest.raises(RowError, match="beam_width 4 is more than --max-num-seqs 3"):
        run.engine.opened.make_request(0, [9], SamplingParams(beam_width=4))
    with pytest.raises(RowError, match="too large for 263 tokens"):
        engine_run(tiny_model("llama"), max_num_seqs=200).engine.opened.make_request(0, [9], SamplingParams(beam_width=140))
    done = run.sequences(
        make_prompts([30, 30]),
        [SamplingParams(beam_width=w, max_tokens=24, ignore_eos=True) for w in (3, 2)],
    )
    assert done[0].code == "kv_pool_too_small"
    assert "in 3 beams" in done[0].message
    assert done[1].num_generated_tokens == 24


def test_a_model_that_gives_no_numbers_ends_the_search_with_an_error(tiny_model, engine_run, make_prompts):
    run = engine_run(tiny_model("llama"))
    sampler = run.engine._sampler
    original = sampler.continuations

    def broken(logits, beams):
        logits = logits.clone()
        for i, s in enumerate(beams):
            if s.request.row_index == 1 and s.num_generated_tokens == 3 and i % 2:
                logits[i] = float("nan")
        return original(logits, beams)

    params = SamplingParams(beam_width=3, n=2, max_tokens=9, ignore_eos=True)
    want = results(run.sequences(make_prompts([5, 9, 20]), params))
    sampler.continuations = broken
    done = run.sequences(make_prompts([5, 9, 20]), params)
    assert {done[1, i].code for i in range(2)} == {"nan_logits"}
    for key in ((0, 0), (0, 1), (2, 0), (2, 1)):
        assert (done[key].generated_token_ids, done[key].score) == want[key]
