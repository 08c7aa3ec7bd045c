"""Conversations of several turns: each turn is answered as if it had come alone, and only what is new is computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedgen.engine.planner import RequestLengths
from pagedgen.errors import RowError
from pagedgen.prompts.render import PromptRenderer
from pagedgen.prompts.tokenize import PromptTokenizer
from pagedgen.prompts.turns import Conversation
from pagedgen.sampling_params import SamplingParams
from pagedgen.stats import RunStats

TURNS = [
    ("hello", "and now?", "once more, please", "why", "thanks"),
    ("a much longer first turn " * 3, "short"),
    ("x",),
    ("one", "two", "three"),
]


class Talk:
    """Runs conversations on an engine and remembers every turn's request and answer."""

    def __init__(self, run):
        self.run = run
        opened = run.engine.opened
        self.renderer = PromptRenderer(opened.tokenizer)
        self.tokenizer = PromptTokenizer(opened.tokenizer, opened.spec.vocab_size)

    def __call__(self, conversations, params):
        opened, states, done, errors = self.run.engine.opened, {}, {}, {}
        requests = []
        for row, turns in enumerate(conversations):
            rendered = self.renderer.render({"turns": list(turns)})
            conversation = Conversation(self.renderer, self.tokenizer, rendered)
            states.update({(row, sample): conversation.fork() for sample in range(params.n)})
            ids = self.tokenizer.tokenize([rendered])[0]
            later = conversation.later_tokens(params.max_tokens)
            requests.append(opened.make_request(row, ids, params, later_tokens=later))

        def on_finished(s):
            request = s.request
            done[request.row_index, s.sample_index, request.turn_index] = (request, s.generated_token_ids, s.num_cached_tokens)
            ids = s.generated_token_ids[:-1] if s.finish_reason == "stop" else s.generated_token_ids
            prompt = states[request.row_index, s.sample_index].next_prompt(s.text, list(request.prompt_token_ids), ids)
            if prompt is None:
                return None
            try:
                return opened.make_request(request.row_index, prompt, params, turn_index=request.turn_index + 1)
            except RowError as error:
                errors[request.row_index, s.sample_index, request.turn_index + 1] = error
                return None

        self.run.engine.stats = RunStats()
        self.run.engine.generate(
            requests,
            self.run.engine.plan(RequestLengths(requests)),
            on_finished=on_finished,
            on_error=lambda r, i, e: errors.__setitem__((r.row_index, i, r.turn_index), e),
        )
        return done, errors


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_gpu_blocks_override": 60}, {"max_num_batched_tokens": 16, "max_num_seqs": 8}, {"enable_prefix_caching": False}],
)
def test_a_turn_is_answered_as_if_it_came_alone(tiny_model, engine_run, eager_admission, settings):
    """Greedy and sampled, one and three samples, in a large and a small pool: the tokens of each turn's prompt run alone."""
    run = engine_run(tiny_model("llama"), block_size=4, **settings)
    alone = engine_run(tiny_model("llama"), block_size=16, enable_prefix_caching=False)
    for params in (
        SamplingParams(max_tokens=9, ignore_eos=True),
        SamplingParams(max_tokens=9, n=3, temperature=1.0, ignore_eos=True),
    ):
        done, errors = Talk(run)(TURNS, params)
        assert not errors
        assert sorted(done) == [
            (row, sample, turn) for row, turns in enumerate(TURNS) for sample in range(params.n) for turn in range(len(turns))
        ]
        for (row, sample, turn), (request, token_ids, _) in done.items():
            got = alone.run([request])[(row, sample) if params.n > 1 else row]
            assert got.generated_token_ids == token_ids, (row, sample, turn)
        if "num_gpu_blocks_override" in settings and params.n == 3:
            assert run.stats.preemptions > 0
        else:
            assert run.stats.kept_tokens > 0


def test_only_new_tokens_are_computed(tiny_model, engine_run):
    run = engine_run(tiny_model("llama"), block_size=4)
    # Special tokens that a random model generates are part of the text here, so that the text stands for all ids.
    done, _ = Talk(run)(TURNS, SamplingParams(max_tokens=9, ignore_eos=True, skip_special_tokens=False))
    for (row, sample, turn), (request, _, cached) in done.items():
        if turn:
            before, token_ids, _ = done[row, sample, turn - 1]
            # All of it but the last generated token, which nobody had fed back.
            assert cached == before.num_prompt_tokens + len(token_ids) - 1
            assert list(request.prompt_token_ids[:cached]) == (list(before.prompt_token_ids) + token_ids)[:cached]
        else:
            assert cached == 0
    last = [max(key for key in done if key[0] == row) for row in range(len(TURNS))]
    assert run.stats.computed_tokens == sum(done[key][0].num_prompt_tokens + 9 - 1 for key in last)


@pytest.mark.demo
def test_a_conversation_of_five_turns_grows_by_its_new_tokens_only(demo_model, engine_run):
    run = engine_run(demo_model, dtype="auto")
    turns = ("Name a river.", "Where does it end?", "How long is it?", "Name another one.", "Which of them is longer?")
    done, _ = Talk(run)([turns], SamplingParams(max_tokens=24))
    last = done[0, 0, 4]
    assert run.stats.computed_tokens == last[0].num_prompt_tokens + len(last[1]) - 1
    assert run.stats.kept_tokens == sum(done[0, 0, t][0].num_prompt_tokens + len(done[0, 0, t][1]) - 1 for t in range(4))


def test_a_template_that_rewrites_earlier_turns_costs_time_and_nothing_else(tiny_model, engine_run):
    """Only the newest answer is shown to the model in full: the common beginning ends before it."""
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' and loop.index < loop.length - 1 %}..."
        "{% else %}{{ m['content'] }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    run = engine_run(tiny_model("llama", chat_template=template), block_size=4)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    done, _ = Talk(run)(TURNS, params)
    for (row, _, turn), (request, token_ids, cached) in done.items():
        assert run.answer([list(request.prompt_token_ids)], params, [row])[row] == token_ids
        if turn:
            assert 0 < cached < request.num_prompt_tokens
            rewritten = run.engine.opened.tokenizer.decode(request.prompt_token_ids).count("...")
            assert rewritten == max(0, turn - 1)


def test_a_conversation_that_fills_the_context_ends_with_an_error_in_its_place(tiny_model, engine_run):
    run = engine_run(tiny_model("llama", max_position_embeddings=64), block_size=4)
    done, errors = Talk(run)([("x" * 20, "y" * 20, "z" * 20)], SamplingParams(max_tokens=9, ignore_eos=True))
    assert sorted(done) == [(0, 0, 0), (0, 0, 1)]
    assert errors[0, 0, 2].code == "prompt_too_long"
    assert run.stats.blocks.final_used == 0


def test_draws_of_later_turns_are_not_those_of_the_first(tiny_model, engine_run, make_prompts):
    """The same prompt as turn 0 and as turn 1 of the same row: other random numbers."""
    run = engine_run(tiny_model("llama"))
    params = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
    answers = []
    for turn in (0, 1, 0):
        request = run.engine.opened.make_request(0, make_prompts([9])[0], params, turn_index=turn)
        answers.append(run.run([request])[0].generated_token_ids)
    assert answers[0] == answers[2] != answers[1]


MT_BENCH = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat" / "mt_bench_question.jsonl"


@pytest.mark.demo
@pytest.mark.skipif(not MT_BENCH.is_file(), reason="the conversations are not beside this checkout")
def test_mt_bench_rows_through_a_small_pool(demo_model, engine_run, eager_admission):
    """Two turns each; in a pool so small that conversations are preempted, the same answers."""
    conversations = [json.loads(line)["turns"] for line in MT_BENCH.read_text().splitlines()[:8]]
    params = SamplingParams(max_tokens=24)
    want, _ = Talk(engine_run(demo_model, dtype="auto"))(conversations, params)
    run = engine_run(demo_model, dtype="auto", num_gpu_blocks_override=24)
    got, _ = Talk(run)(conversations, params)
    assert {k: v[1] for k, v in got.items()} == {k: v[1] for k, v in want.items()}
    assert len(got) == 16
    assert run.stats.preemptions > 0
