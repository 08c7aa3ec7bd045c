"""The library in vLLM's shapes."""

from __future__ import annotations

import pytest

from pagedgen import LLM, SamplingParams, UsageError


@pytest.fixture(scope="module")
def llm(tiny_model):
    return LLM(str(tiny_model()), dtype="float32", audit=True)


def test_generate_answers_in_order(llm):
    outputs = llm.generate(["a", "bb", "ccc"], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert [o.prompt for o in outputs] == ["a", "bb", "ccc"]
    assert [o.request_id for o in outputs] == ["0", "1", "2"]
    for output in outputs:
        (completion,) = output.outputs
        assert output.finished
        assert len(completion.token_ids) == 4
        assert completion.finish_reason == "length"
        assert completion.text == llm.get_tokenizer().decode(completion.token_ids, skip_special_tokens=True)
    assert llm.stats.generated_tokens == 12


def test_one_prompt_dicts_and_token_ids(llm):
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    ids = llm.get_tokenizer()("hey")["input_ids"]
    answers = [
        llm.generate(p, params, use_tqdm=False)[0].outputs[0].token_ids
        for p in ("hey", {"prompt": "hey"}, [{"prompt_token_ids": ids}])
    ]
    assert answers[0] == answers[1] == answers[2]


def test_params_for_each_prompt(llm):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 0, 3)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 0, 3]
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        llm.generate(["a"], params[:2])


def test_a_bad_prompt_does_not_cost_the_others(llm):
    prompts = ["", "fine", {"prompt": 5}, None, [9, 8], [-1], b"x"]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
    codes = ["empty_prompt", None, "not_text", "null_prompt", None, "bad_token_ids", "not_text"]
    assert [o.error_code for o in outputs] == codes
    assert outputs[0].outputs == []


def test_chat_one_and_many(llm):
    message = [{"role": "user", "content": "hi"}]
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    one = llm.chat(message, params, use_tqdm=False)
    many = llm.chat([message, message], params, use_tqdm=True)
    assert len(one) == 1
    assert [o.outputs[0].token_ids for o in many] == [one[0].outputs[0].token_ids] * 2
    assert one[0].prompt == "<|user|>hi<|end|><|assistant|>"


def test_unknown_settings_are_refused():
    with pytest.raises(UsageError, match="blok_size"):
        LLM("m", blok_size=16)


def test_the_second_call_is_not_charged_for_the_firsts_pool(tiny_model, monkeypatch):
    """A device that the first call's pool fills: the next call must find that memory free again."""
    from pagedgen.engine import memory

    llm = LLM(str(tiny_model()), dtype="float32", audit=True, gpu_memory_utilization=1.0)
    base = memory.resident_bytes()
    size = 64 * 2**20

    def device(name):
        held = llm._engine.runner._cache
        pool = held.kv.numel() * held.kv.element_size() if held is not None else 0
        return memory.DeviceMemory(base + size, size - pool, "test")

    monkeypatch.setattr(memory, "device_memory", device)
    monkeypatch.setattr("pagedgen.engine.engine._own_bytes", lambda d: base + size - device(d).free_bytes)
    monkeypatch.setattr(llm._engine, "_activation_peak_bytes", 0)
    totals = []
    for _ in range(2):
        llm.generate(["a" * 300] * 200, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        totals.append(llm.stats.blocks.total)
    assert totals[0] == totals[1] > 0
    assert llm._engine.runner._cache is None


def test_samples_are_the_outputs_of_one_request(llm):
    params = [
        SamplingParams(n=3, temperature=1.0, max_tokens=4, ignore_eos=True),
        SamplingParams(n=2, temperature=1.0, max_tokens=0),
    ]
    first, empty = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [c.index for c in first.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in first.outputs}) > 1
    assert [c.text for c in empty.outputs] == ["", ""]


def test_several_turns_are_not_silently_cut_to_one(tiny_model):
    llm = LLM(str(tiny_model()), dtype="float32")
    one, two = llm.generate([{"turns": ["only"]}, {"turns": ["first", "second"]}], SamplingParams(max_tokens=2), use_tqdm=False)
    assert one.outputs
    assert (two.error_code, two.outputs) == ("unsupported_content", [])


def test_prompts_share_within_a_salt_and_beams_have_scores(tiny_model):
    llm = LLM(str(tiny_model()), dtype="float32", block_size=4)
    prompts = [{"prompt": "a common beginning", "cache_salt": salt} for salt in ("a", "b", "a")]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert [o.num_cached_tokens for o in outputs] == [0, 0, 16]
    best = llm.generate("x", SamplingParams(beam_width=3, n=2, max_tokens=4), use_tqdm=False)[0].outputs
    assert best[0].score >= best[1].score
