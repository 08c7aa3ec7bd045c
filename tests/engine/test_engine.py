"""The engine's counters, limits and edges on a tiny model; the golden chats on the demo model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorder import InPlaceOfSampler

from pagedgen.errors import RowError
from pagedgen.sampling_params import SamplingParams

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden" / "chat_fp32.jsonl"


def test_counters_add_up(tiny_model, engine_run, make_prompts, eager_admission):
    run = engine_run(tiny_model("llama"), block_size=4, num_gpu_blocks_override=24)
    prompts = make_prompts([20] * 12)
    done = run.sequences(prompts, SamplingParams(max_tokens=30, ignore_eos=True))
    stats = run.stats
    assert stats.generated_tokens == sum(s.num_generated_tokens for s in done.values()) == 360
    assert stats.preemptions == sum(s.num_preemptions for s in done.values()) > 0
    # Every token but each row's last is computed once, and again as often as it was dropped.
    assert stats.computed_tokens == 12 * (20 + 29) + stats.recomputed_tokens
    blocks = stats.blocks.to_dict()
    assert blocks["total"] == 24
    assert blocks["peak"] <= 24
    assert 0.7 < blocks["mean_utilization"] <= 1
    assert 0.8 < blocks["slot_utilization"] <= 1
    assert blocks["last_block_waste"] == pytest.approx(1 - blocks["slot_utilization"])
    assert 5 <= blocks["mean_table_length"] <= 13
    assert blocks["series"][0]["step"] == 0
    assert stats.num_steps == stats.blocks.num_steps


def test_case_kv_01_lengths_around_a_block(tiny_model, engine_run, reference_generate, make_prompts):
    """Lengths at and beside multiples of the block size, together and one at a time; the audit recounts every step."""
    prompts = make_prompts([1, 3, 4, 5, 7, 8, 9])
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    want = reference_generate(tiny_model("llama"), prompts, 9)
    run = engine_run(tiny_model("llama"), block_size=4)
    assert run.answer(prompts, params) == want
    for row, prompt in enumerate(prompts):
        assert run.answer([prompt], params, [row])[row] == want[row]


def test_context_limit_is_exact(tiny_model, engine_run, make_prompts):
    """Prompt plus completion fill the context and no more; a prompt that fills it alone is a row error."""
    run = engine_run(tiny_model("llama", max_position_embeddings=64))
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    done = run.sequences(make_prompts([62, 63, 1]), params)
    assert [done[i].num_generated_tokens for i in range(3)] == [2, 1, 63]
    assert {s.finish_reason for s in done.values()} == {"length"}
    for length in (64, 65):
        with pytest.raises(RowError, match=f"{length} tokens; max_model_len 64"):
            run.engine.opened.make_request(0, [9] * length, params)


def test_case_pr_03_a_row_larger_than_the_pool_is_told_and_the_rest_runs(tiny_model, engine_run, make_prompts):
    run = engine_run(tiny_model("llama"), block_size=4, num_gpu_blocks_override=16)
    prompts = make_prompts([20, 70, 40, 20])
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (10, 10, 100, 10)]
    done = run.sequences(prompts, params)
    assert [getattr(d, "code", "fine") for _, d in sorted(done.items())] == [
        "fine",
        "kv_pool_too_small",
        "kv_pool_too_small",
        "fine",
    ]
    assert "needs 20 blocks" in done[1].message
    assert "the pool has 16" in done[1].message


@pytest.mark.parametrize("caching", [True, False])
def test_case_kv_02_many_rows_of_every_ending_leave_no_block(tiny_model, engine_run, make_prompts, caching):
    """2,000 rows that end by EOS, stop token, stop string, length and error, some of 3 samples, through 64 blocks."""
    import numpy as np

    rng = np.random.default_rng(0)
    run = engine_run(tiny_model("llama"), block_size=4, num_gpu_blocks_override=64, audit=False, enable_prefix_caching=caching)
    prompts = make_prompts(rng.integers(5, 61, size=2000))
    for i in range(0, 2000, 5):  # every fifth row begins like its neighbours
        prompts[i][:12] = prompts[0][:12]
    prompts[700] = [9] * 300  # larger than the pool
    kinds = [
        SamplingParams(max_tokens=6, temperature=1.0),
        SamplingParams(max_tokens=12, temperature=1.5, stop_token_ids=tuple(range(7, 60))),
        SamplingParams(max_tokens=12, temperature=1.5, stop=tuple("abcdefgh")),
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=6, temperature=1.0, n=3),
    ]
    done = run.sequences(prompts, [kinds[i % 5] if i != 700 else kinds[0] for i in range(2000)])
    answered = [s for s in done.values() if not isinstance(s, RowError)]
    assert len(answered) == 1999 + 2 * 400  # one row is an error
    reasons = {(s.finish_reason, type(s.stop_reason).__name__) for s in answered}
    assert reasons >= {("length", "NoneType"), ("stop", "int"), ("stop", "str")}
    blocks = run.stats.blocks.to_dict()
    assert 0 < blocks["peak"] <= 64
    # What nobody will look for is not kept, so nothing is cached either when the last row has ended.
    assert (blocks["final_used"], blocks["final_cached"]) == (0, 0)
    assert (run.stats.prefix.saved_tokens > 0) == caching


def test_case_pr_02_seeded_samples_do_not_depend_on_company(tiny_model, engine_run, make_prompts, eager_admission):
    """Same (seed, row): same tokens alone, in a crowd, in another order, preempted; other row or seed: other tokens."""
    model = tiny_model("llama")
    prompt = make_prompts([9])[0]
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    want = engine_run(model).answer([prompt] * 8, params)
    assert len({tuple(ids) for ids in want.values()}) == 8
    pressed = engine_run(model, block_size=4, num_gpu_blocks_override=12)
    assert pressed.answer([prompt] * 8, params, list(range(7, -1, -1))) == want
    assert pressed.stats.preemptions > 0
    assert engine_run(model).answer([prompt], params, [5])[5] == want[5]
    assert engine_run(model, seed=1).answer([prompt] * 8, params) != want


@pytest.mark.demo
@pytest.mark.skipif(not GOLDEN.is_file(), reason="the golden outputs are not beside this checkout")
@pytest.mark.parametrize(
    ("num_rows", "settings"),
    [(48, {}), (12, {"block_size": 16, "max_num_batched_tokens": 96, "num_gpu_blocks_override": 40})],
)
def test_golden_chats(demo_model, engine_run, eager_admission, num_rows, settings):
    """Chats in fp32: every token of what transformers gives."""
    rows = [json.loads(line) for line in GOLDEN.read_text().splitlines()][:num_rows]
    run = engine_run(demo_model, **settings)
    tokenizer = run.engine.opened.tokenizer
    from pagedgen.prompts.render import PromptRenderer
    from pagedgen.prompts.tokenize import PromptTokenizer

    renderer = PromptRenderer(tokenizer)
    prompts = PromptTokenizer(tokenizer, 49152).tokenize([renderer.render(row) for row in rows])
    assert prompts == [row["prompt_token_ids"] for row in rows]
    got = run.answer(prompts, SamplingParams(max_tokens=256))
    different = [row["id"] for i, row in enumerate(rows) if got[i] != row["token_ids"]]
    assert not different
    assert (run.stats.preemptions > 0) == bool(settings)


def test_a_model_that_gives_no_numbers_ends_its_rows_with_an_error(tiny_model, engine_run, make_prompts):
    run = engine_run(tiny_model("llama"))
    sampler = run.engine._sampler

    def broken(logits, sequences):
        logits = logits.clone()
        for i, s in enumerate(sequences):
            if s.request.row_index == 1 and s.num_generated_tokens == 3:
                logits[i] = float("nan")
        return sampler(logits, sequences)

    want = run.answer(make_prompts([5, 9, 20]))
    run.engine._sampler = InPlaceOfSampler(broken)
    done = run.sequences(make_prompts([5, 9, 20]))
    assert done[1].code == "nan_logits"
    assert {row: done[row].generated_token_ids for row in (0, 2)} == {row: want[row] for row in (0, 2)}
