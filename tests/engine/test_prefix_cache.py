"""Common prefixes are computed once, whatever lies between, and no output ever shows it."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from pagedgen.engine.block_manager import BlockManager
from pagedgen.engine.prefix_cache import blake2b_128
from pagedgen.sampling_params import SamplingParams

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "prompts" / "gsm8k_8shot_every4th.jsonl"
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def shared_prompts(make_prompts, num_groups=2, rows=5, prefix=20, seed=0):
    """Groups of rows with a common beginning and an end of their own."""
    beginnings = make_prompts([prefix] * num_groups, seed=seed)
    tails = make_prompts([3 + i % 7 for i in range(num_groups * rows)], seed=seed + 1)
    return [beginnings[i % num_groups] + tail for i, tail in enumerate(tails)]


def test_case_pc_01_repeats_and_extensions(tiny_model, engine_run, make_prompts):
    """The same 8 tokens five times (two full blocks), their extensions, and one that differs in its last token only."""
    base = make_prompts([13])[0]
    prompts = [base[:8]] * 5 + [base[:12], base[:13], [*base[:7], base[7] + 1]]
    run = engine_run(tiny_model("llama"), block_size=4)
    off = engine_run(tiny_model("llama"), block_size=4, enable_prefix_caching=False)
    want = off.answer(prompts, PARAMS)
    assert off.stats.prefix.saved_tokens == 0
    done = run.sequences(prompts, PARAMS)
    assert {row: s.generated_token_ids for row, s in done.items()} == want
    cached = {row: s.num_cached_tokens for row, s in done.items()}
    # Both blocks are computed once, by a row that ends with the second; equal rows don't look for it: a row's last token never.
    assert sorted(cached.values()) == [0, 4, 4, 4, 4, 4, 8, 8]
    assert run.stats.prefix.saved_tokens == sum(cached.values())
    # The third block of the row of 13 stands at the end of the row of 12, which has no use for it and so doesn't lead.
    assert run.stats.prefix.shareable_tokens == sum(cached.values()) + 4
    for row, prompt in enumerate(prompts):  # batches of their own
        assert run.answer([prompt], PARAMS, [row])[row] == want[row]
        assert run.stats.prefix.saved_tokens == 0


@pytest.mark.parametrize("chunk", [7, 512])
@pytest.mark.parametrize("sort", ["length", "none"])
def test_a_common_prefix_is_computed_once_though_all_rows_come_together(tiny_model, engine_run, make_prompts, chunk, sort):
    prompts = shared_prompts(make_prompts)
    run = engine_run(tiny_model("llama"), block_size=4, max_num_batched_tokens=max(chunk, 7), max_num_seqs=7, sort=sort)
    done = run.sequences(prompts, PARAMS)
    stats = run.stats
    assert stats.prefix.saved_tokens == stats.prefix.shareable_tokens == 2 * 4 * 20
    assert stats.computed_tokens == sum(len(p) + 5 for p in prompts) - stats.prefix.saved_tokens
    assert stats.prefix.hit_rows == 8
    assert sum(s.num_cached_tokens for s in done.values()) == stats.prefix.saved_tokens


def test_free_memory_keeps_what_later_rows_look_for(tiny_model, engine_run, make_prompts):
    """Many groups whose rows come in turns, few rows in flight: the pool has room for more than the rows in flight."""
    prompts = shared_prompts(make_prompts, num_groups=8, rows=4, prefix=32)
    run = engine_run(tiny_model("llama"), block_size=4, max_num_seqs=3)
    run.sequences(prompts, PARAMS)
    assert run.stats.prefix.evictions == 0
    assert run.stats.prefix.saved_tokens == run.stats.prefix.shareable_tokens == 8 * 3 * 32


def test_rows_that_share_nothing_are_not_kept_waiting(tiny_model, engine_run, make_prompts):
    prompts = [*shared_prompts(make_prompts, num_groups=1), *make_prompts([9, 9], seed=7)]
    run = engine_run(tiny_model("llama"), block_size=4, sort="none")
    first = []
    original = run.engine.runner.run

    def record(batch, tables=None, **wanted):
        first.append(batch.num_tokens)
        return original(batch, tables, **wanted)

    run.engine.runner.run = record
    run.sequences(prompts, PARAMS)
    assert first[0] == len(prompts[0]) + 18  # the leader and both strangers
    assert first[1] == 3 + sum(len(p) - 20 for p in prompts[1:5])  # then the followers, with three decodes


def test_nothing_is_kept_for_nobody(tiny_model, engine_run, make_prompts):
    """Blocks are dropped when their last user is done: without preemption nothing is evicted, and the end is empty."""
    run = engine_run(tiny_model("llama"), block_size=4)
    run.sequences([*shared_prompts(make_prompts), *make_prompts([40, 33])], PARAMS)
    assert (run.stats.blocks.final_used, run.stats.blocks.final_cached, run.stats.prefix.evictions) == (0, 0, 0)


def test_case_pc_02_salts_keep_rows_apart(tiny_model, engine_run, make_prompts):
    prompt = make_prompts([21])[0]
    run = engine_run(tiny_model("llama"), block_size=4)
    salts = ["", "A", "B", "", "A", '"}', '{"salt": "A"}']
    opened = run.engine.opened
    requests = [opened.make_request(i, prompt, PARAMS, cache_salt=salt) for i, salt in enumerate(salts)]
    cached = {row: s.num_cached_tokens for row, s in run.run(requests).items()}
    assert cached == {0: 0, 1: 0, 2: 0, 3: 20, 4: 20, 5: 0, 6: 0}


@pytest.mark.parametrize("crippled", [lambda data: bytes([zlib.crc32(data) % 8]), lambda data: b""])
def test_case_pc_03_equal_digests_never_mix_rows(tiny_model, engine_run, make_prompts, monkeypatch, crippled, eager_admission):
    prompts = make_prompts([24] * 60, seed=3) + shared_prompts(make_prompts, num_groups=4, rows=5, prefix=16)
    want = engine_run(tiny_model("llama"), block_size=4, enable_prefix_caching=False).answer(prompts, PARAMS)

    class Crippled(BlockManager):
        def __init__(self, *args, **settings):
            super().__init__(*args, **{**settings, "hash_block": crippled})

    monkeypatch.setattr("pagedgen.engine.scheduler.BlockManager", Crippled)
    run = engine_run(tiny_model("llama"), block_size=4, num_gpu_blocks_override=60)
    assert run.answer(prompts, PARAMS) == want
    # Where all digests are equal, each row waits for the one before, and there is nothing to find.
    assert run.stats.preemptions + run.stats.prefix.saved_tokens > 0 or not crippled(b"")


def test_digests_do_not_depend_on_the_process():
    code = (
        "from pagedgen.engine.prefix_cache import PrefixCache; from pagedgen.request import Request, Sequence\n"
        "from pagedgen.sampling_params import SamplingParams\n"
        "s = Sequence(Request(3, list(range(40)), SamplingParams(), 1, frozenset(), 0, cache_salt='é'))\n"
        "print([d.hex() for d in PrefixCache(8).digests(s, 5)])"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env={"PYTHONHASHSEED": seed}).stdout
        for seed in ("0", "1", "2")
    }
    assert len(outputs) == 1
    assert len(blake2b_128(b"")) * 8 >= 128


@pytest.mark.parametrize("layers", [("sliding_attention", "full_attention", "sliding_attention"), ("sliding_attention",) * 3])
def test_case_pc_04_sliding_windows(tiny_model, engine_run, reference_generate, make_prompts, layers):
    """A window of 8 on some layers or all, shared prefixes longer and shorter than it, 20 new tokens."""
    model = tiny_model("gemma3", sliding_window=8, layer_types=list(layers))
    beginning = make_prompts([24])[0]
    tails = make_prompts([1, 1, 1, 6, 3, 9], seed=4)
    prompts = [beginning[:n] + tail for n, tail in zip((6, 8, 9, 24, 24, 24), tails, strict=True)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    run = engine_run(model, block_size=4)
    assert run.answer(prompts, params) == reference_generate(model, prompts, 20)
    assert run.stats.prefix.saved_tokens >= 2 * 24 + 2 * 4


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_hits_equal_transformers(tiny_model, engine_run, reference_generate, make_prompts, family):
    prompts = shared_prompts(make_prompts, rows=4, prefix=33)
    want = reference_generate(tiny_model(family), prompts, 8)
    for settings in ({"block_size": 16}, {"block_size": 4, "max_num_batched_tokens": 11}, {"backend": "reference"}):
        run = engine_run(tiny_model(family), **settings)
        assert run.answer(prompts, SamplingParams(max_tokens=8, ignore_eos=True)) == want
        assert run.stats.prefix.saved_tokens > 0


def test_preemption_does_not_inflate_counters(tiny_model, engine_run, make_prompts, eager_admission):
    """Hits are counted once a row, at its first admission; what preempted rows find again stands apart."""
    prompts = shared_prompts(make_prompts, rows=8)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    run = engine_run(tiny_model("llama"), block_size=4, num_gpu_blocks_override=40)
    done = run.sequences(prompts, params)
    stats = run.stats
    assert stats.preemptions > 5
    assert stats.prefix.hit_rows <= len(prompts) - 2
    assert stats.prefix.saved_tokens == sum(s.num_cached_tokens for s in done.values()) <= stats.prefix.shareable_tokens
    assert all(s.num_cached_tokens <= 20 for s in done.values())
    assert stats.prefix.recovered_tokens > 0
    # Every token of the work is computed once, again as often as it was lost, and not at all where it was found.
    assert stats.computed_tokens == sum(len(p) + 29 for p in prompts) - stats.prefix.saved_tokens + stats.recomputed_tokens


@pytest.mark.demo
@pytest.mark.skipif(not GSM8K.is_file(), reason="the few-shot prompts are not beside this checkout")
def test_the_eight_shots_of_gsm8k_are_computed_once(demo_model, engine_run):
    run = engine_run(demo_model, dtype="auto")
    texts = [json.loads(line)["prompt"] for line in GSM8K.read_text().splitlines()][:64]
    prompts = run.engine.opened.tokenizer(texts)["input_ids"]
    run.sequences(prompts, SamplingParams(max_tokens=1))
    prefix = run.stats.prefix
    assert prefix.shareable_tokens > 0.7 * sum(map(len, prompts))
    assert prefix.saved_tokens >= 0.99 * prefix.shareable_tokens
