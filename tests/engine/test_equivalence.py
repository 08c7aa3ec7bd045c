"""Every schedule gives the tokens of `transformers` generate in fp32, and the same bits of logits in any dtype on CPU."""

from __future__ import annotations

import numpy as np
import pytest
from recorder import recorded

from pagedgen.sampling_params import SamplingParams

FAMILIES = [
    "llama", "llama_mqa", "llama_odd_head_dim", "qwen2", "qwen3", "mistral_window", "gemma2", "gemma3", "phi3", "olmo2",
    "mixtral", "qwen3_moe", "gpt_neox", "gpt_oss", "gpt2",
]  # fmt: skip
MAX_TOKENS = 10
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)


def edge_lengths(block_size):
    return [
        1,
        2,
        block_size - 1,
        block_size,
        block_size + 1,
        2 * block_size,
        3 * block_size - 1,
        3 * block_size,
        3 * block_size + 1,
    ]


@pytest.fixture(scope="module")
def expected(tiny_model, reference_generate, make_prompts):
    """Reference tokens of a family's prompts at a block size's edge lengths; made once."""
    made = {}

    def get(family, block_size):
        if (family, block_size) not in made:
            prompts = make_prompts(edge_lengths(block_size), seed=block_size)
            made[family, block_size] = prompts, reference_generate(tiny_model(family), prompts, MAX_TOKENS)
        return made[family, block_size]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("backend", "block_size", "chunk"),
    [("cpu", b, c) for b in (4, 16, 32) for c in (7, 64, 512)]
    + [("reference", 4, 512), ("reference", 16, 7), ("reference", 32, 64)],
)
def test_greedy_equals_transformers(tiny_model, engine_run, expected, family, backend, block_size, chunk):
    prompts, want = expected(family, block_size)
    run = engine_run(tiny_model(family), backend=backend, block_size=block_size, max_num_batched_tokens=chunk)
    assert run.answer(prompts, PARAMS) == want, "together"
    rows = list(range(len(prompts)))[::-1]
    assert run.answer(prompts[::-1], PARAMS, rows) == want, "reversed"
    for row in (0, len(prompts) // 2, len(prompts) - 1):
        assert run.answer([prompts[row]], PARAMS, [row])[row] == want[row], "alone"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("backend", "chunk"), [("cpu", 512), ("cpu", 7), ("reference", 64)])
def test_preemption_changes_nothing(tiny_model, engine_run, eager_admission, expected, family, backend, chunk):
    prompts, want = expected(family, 4)
    longest = max(edge_lengths(4)) + MAX_TOKENS
    run = engine_run(
        tiny_model(family),
        backend=backend,
        block_size=4,
        max_num_batched_tokens=chunk,
        num_gpu_blocks_override=-(-longest // 4) + 2,
    )
    assert run.answer(prompts, PARAMS) == want
    assert run.stats.preemptions > 0
    assert run.stats.recomputed_tokens > 0


def assert_same_bits(got, want, what, rows=None):
    (got, got_tokens), (want, want_tokens) = got, want
    assert got_tokens == {row: ids for row, ids in want_tokens.items() if rows is None or row in rows}, what
    expected = {key for key in want if rows is None or key[0] in rows}
    assert set(got) == expected, f"{what}: logits of other positions were made"
    different = [key for key, bits in got.items() if want[key] != bits]
    assert not different, f"{what}: logits differ at (row, sample, position) {different[:5]} of {len(got)}"


def check_batch_invariance(engine_run, model, prompts, params, dtype, block_size, small_pool):
    """The same rows together, alone, reversed, in other chunks, preempted, and on one thread: the same bits."""
    # A small budget: where a CPU has no bf16 arithmetic, warming up with a thousand tokens takes a minute.
    settings = {"dtype": dtype, "block_size": block_size, "threads": 2, "max_num_batched_tokens": 256}
    run = engine_run(model, **settings)
    want = recorded(run, prompts, params)
    # One set of logits for each token of each row.
    assert sorted(want[0]) == sorted((row, 0, len(p) + n) for row, p in enumerate(prompts) for n in range(params.max_tokens))
    for row, prompt in enumerate(prompts):
        assert_same_bits(recorded(run, [prompt], params, [row]), want, f"row {row} alone", [row])
    rows = list(range(len(prompts)))[::-1]
    assert_same_bits(recorded(run, prompts[::-1], params, rows), want, "reversed")
    for chunk in (5, 23, 64):
        other = engine_run(model, **{**settings, "max_num_batched_tokens": chunk})
        assert_same_bits(recorded(other, prompts, params), want, f"chunks of {chunk}")
    pressed = engine_run(model, num_gpu_blocks_override=small_pool, sort="length", **settings)
    assert_same_bits(recorded(pressed, prompts, params), want, "preempted")
    assert pressed.stats.preemptions > 0
    single = engine_run(model, **{**settings, "threads": 1})
    assert_same_bits(recorded(single, prompts, params), want, "one thread")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_batch_invariant(tiny_model, engine_run, eager_admission, make_prompts, family, dtype):
    prompts = make_prompts([1, 3, 17, 40, 64, 65, 31, 9], seed=5)
    check_batch_invariance(engine_run, tiny_model(family), prompts, PARAMS, dtype, 16, small_pool=8)


@pytest.mark.demo
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_demo_model_is_batch_invariant(demo_model, engine_run, eager_admission, make_prompts, dtype):
    prompts = make_prompts([5, 40, 33, 129, 200, 64], vocab_size=40000, seed=2)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    check_batch_invariance(engine_run, demo_model, prompts, params, dtype, 32, small_pool=9)


@pytest.mark.demo
@pytest.mark.parametrize(
    ("backend", "block_size", "chunk", "pool"),
    [("cpu", 32, 1024, None), ("cpu", 16, 64, 14), ("cpu", 8, 40, 16), ("reference", 16, 64, 14)],
)
def test_demo_model_equals_transformers(
    demo_model, engine_run, eager_admission, reference_generate, make_prompts, backend, block_size, chunk, pool
):
    prompts = make_prompts([1, 15, 16, 17, 47, 48, 49, 97], vocab_size=40000, seed=9)
    want = reference_generate(demo_model, prompts, MAX_TOKENS)
    run = engine_run(
        demo_model, backend=backend, block_size=block_size, max_num_batched_tokens=chunk, num_gpu_blocks_override=pool
    )
    assert run.answer(prompts, PARAMS) == want
    assert run.answer(prompts[::-1], PARAMS, list(range(len(prompts)))[::-1]) == want
    assert (run.stats.preemptions > 0) == (pool is not None)


def test_random_schedules_give_the_same_tokens(tiny_model, engine_run, make_prompts):
    """Random lengths, limits, pools and chunk sizes against one undisturbed run."""
    rng = np.random.default_rng(4)
    model = tiny_model("llama")
    prompts = make_prompts(rng.integers(1, 60, size=24), seed=8)
    params = [
        SamplingParams(max_tokens=int(n), temperature=t, seed=3)
        for n, t in zip(rng.integers(1, 25, 24), [0.0, 1.0] * 12, strict=True)
    ]
    want = engine_run(model, block_size=16).answer(prompts, params)
    for _ in range(6):
        settings = {
            "block_size": int(rng.choice([4, 8, 32])),
            "max_num_batched_tokens": int(rng.integers(3, 80)),
            "sort": str(rng.choice(["length", "none"])),
        }
        settings["num_gpu_blocks_override"] = int(-(-84 // settings["block_size"]) + rng.integers(0, 8))
        order = rng.permutation(24).tolist()
        run = engine_run(model, **settings)
        got = run.answer([prompts[i] for i in order], [params[i] for i in order], order)
        assert got == want, settings
