"""Failures of such tools in the field: what became of prompts (TK). A name carries the case's number."""

from __future__ import annotations

import os
import shutil
from unittest import mock

import pytest
from case_tools import BOS, BOS_TEMPLATE, EOS, STRICT_TEMPLATE, Prompts, column, one_line, plan_of, read_jsonl, stats_of, user
from command import pagedgen
from job_runs import write_jsonl

from pagedgen.engine.model_runner import ModelRunner


def test_tk_01_every_prompt_has_exactly_one_bos(tiny_model, tmp_path):
    model, out = tiny_model("llama", bos=True, chat_template=BOS_TEMPLATE), tmp_path / "out.jsonl"
    prompts = Prompts(model)
    chat = {"messages": [user("hi")]}
    rendered = {"prompt": "<s><|user|>hi<|end|><|assistant|>"}
    rows = [chat, rendered, {"prompt": "plain text"}, {"prompt": "<s>again"}]
    apply = prompts.tokenizer.apply_chat_template
    expected = list(apply(chat["messages"], tokenize=True, add_generation_prompt=True, return_dict=False))
    assert prompts.ids(rows[0]) == prompts.ids(rows[1]) == expected
    assert prompts.ids(rows[2]) == list(prompts.tokenizer("plain text")["input_ids"])
    assert [prompts.ids(row).count(BOS) for row in rows] == [1, 1, 1, 1]
    assert all(prompts.ids(row)[0] == BOS and EOS not in prompts.ids(row) for row in rows)
    source = write_jsonl(tmp_path / "bos.jsonl", rows)
    done = pagedgen("run", model, source, "-o", out, "--token-ids", "--max-tokens", 5, "--ignore-eos")
    assert done.returncode == 0, done.stderr
    got = read_jsonl(out)
    assert column(got, "num_prompt_tokens") == [len(prompts.ids(row)) for row in rows]
    assert got[0]["token_ids"] == got[1]["token_ids"]
    assert one_line(done.stderr).count("2 prompts begin with the BOS text themselves") == 1  # one notice for both


def test_tk_01_an_eos_that_the_tokenizer_appends_is_never_in_a_prompt(tiny_model, tmp_path):
    from tokenizers import Tokenizer, processors

    model, out = tmp_path / "model", tmp_path / "out.jsonl"
    shutil.copytree(tiny_model("llama", bos=True), model)
    backend = Tokenizer.from_file(str(model / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)])
    backend.save(str(model / "tokenizer.json"))
    prompts = Prompts(model)
    assert prompts.tokenizer("plain")["input_ids"][-1] == EOS
    assert prompts.ids({"prompt": "plain"}) == prompts.tokenizer("plain")["input_ids"][:-1]
    done = pagedgen("run", model, write_jsonl(tmp_path / "p.jsonl", [{"prompt": "plain"}]), "-o", out, "--max-tokens", 2)
    assert done.returncode == 0, done.stderr
    assert column(read_jsonl(out), "num_prompt_tokens") == [6]


def test_tk_02_chats_without_a_template_fail_before_the_weights_load(tiny_model, tmp_path):
    model, out = tiny_model("llama", chat_template=None), tmp_path / "out.jsonl"
    source = write_jsonl(tmp_path / "chat.jsonl", [{"id": 1, "messages": [user("hi")]}])
    done = pagedgen("run", model, source, "-o", out)
    assert done.returncode == 2
    assert "no chat template" in one_line(done.stderr) and "--chat-template" in one_line(done.stderr)
    assert "loading" not in done.stderr and "Traceback" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["chat.jsonl"]


def test_tk_02_a_template_in_a_file_of_its_own_just_works(tiny_model, tmp_path):
    model, out = tmp_path / "model", tmp_path / "out.jsonl"
    shutil.copytree(tiny_model("llama", chat_template=None), model)
    (model / "chat_template.jinja").write_text(STRICT_TEMPLATE)
    source = write_jsonl(tmp_path / "chat.jsonl", [{"id": 1, "messages": [user("hi")]}])
    done = pagedgen("run", model, source, "-o", out, "--max-tokens", 2)
    assert done.returncode == 0, done.stderr
    assert column(read_jsonl(out), "num_prompt_tokens") == [len("<hi>") + 1]  # user, h, i, end, assistant


def test_tk_03_rows_that_the_template_refuses_fail_alone(tiny_model, tmp_path):
    model, out = tiny_model("llama", chat_template=STRICT_TEMPLATE), tmp_path / "out.jsonl"
    chats = [
        [user("hi")],
        [{"role": "system", "content": "be brief"}, user("hi")],
        [user("hi"), user("are you there?")],
        [user("hi"), {"role": "assistant", "content": "well,"}],
        [user("hello")],
    ]
    source = write_jsonl(tmp_path / "roles.jsonl", [{"messages": chat} for chat in chats])
    done = pagedgen("run", model, source, "-o", out, "--max-tokens", 3, "--ignore-eos")
    assert done.returncode == 3, done.stderr
    rows = read_jsonl(out)
    assert column(rows, "error_code") == [None, "template_error", "template_error", None, None]
    assert "no system role here" in rows[1]["error"]
    assert "roles must alternate" in rows[2]["error"]
    assert [r["num_generated_tokens"] for r in rows] == [3, 0, 0, 3, 3]
    prompts = Prompts(model)
    # The rule: a last message of the assistant is continued. Nothing stands behind it, neither its end nor a new beginning.
    assert prompts.text({"messages": chats[3]}) == "<|user|>hi<|end|><|assistant|>well,"
    assert rows[3]["num_prompt_tokens"] == len(prompts.ids({"messages": chats[3]}))


def limit_rows():
    return [
        {"prompt_token_ids": [10 + i % 200 for i in range(length)], "sampling_params": {"max_tokens": most}}
        for length in (62, 63, 64, 65)
        for most in (1, 100)
    ]


def test_tk_04_a_prompt_may_fill_the_context_up_to_one_token(tiny_model, tmp_path):
    model, out = tiny_model("llama", bos=True, max_position_embeddings=64), tmp_path / "out.jsonl"
    source = write_jsonl(tmp_path / "limit.jsonl", limit_rows())
    positions = []

    def run(self, batch, *args, _run=ModelRunner.run, **kwargs):
        positions.append(int(batch.positions.max()))
        return _run(self, batch, *args, **kwargs)

    with mock.patch.object(ModelRunner, "run", run):
        done = pagedgen("run", model, source, "-o", out, "--ignore-eos")
    assert done.returncode == 3, done.stderr
    rows = read_jsonl(out)
    assert column(rows, "num_generated_tokens") == [1, 2, 1, 1, 0, 0, 0, 0]
    assert column(rows, "finish_reason") == ["length"] * 4 + ["error"] * 4
    assert column(rows, "error_code") == [None] * 4 + ["prompt_too_long"] * 4
    for row in rows[4:]:
        assert "leaves no room" in row["error"] and str(row["num_prompt_tokens"]) in row["error"]
    assert positions and max(positions) < 64


def test_tk_04_plan_agrees_on_what_fits(tiny_model, tmp_path):
    model = tiny_model("llama", bos=True, max_position_embeddings=64)
    plan = plan_of(model, write_jsonl(tmp_path / "limit.jsonl", limit_rows()))
    assert (plan["num_rows"], plan["num_too_long"], plan["prompt_tokens"]) == (8, 4, 2 * (62 + 63))
    assert plan["max_new_tokens"] == 1 + 2 + 1 + 1


def test_tk_04_a_context_beyond_the_models_positions_is_refused_at_start(tiny_model, tmp_path):
    model, out = tiny_model("llama", bos=True, max_position_embeddings=64), tmp_path / "out.jsonl"
    source = write_jsonl(tmp_path / "limit.jsonl", limit_rows())
    done = pagedgen("run", model, source, "-o", out, "--max-model-len", 128)
    assert done.returncode == 2
    assert "--max-model-len 128" in one_line(done.stderr) and "64" in done.stderr and "loading" not in done.stderr
    assert not out.exists()
    scaled = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    wider = tiny_model("llama", max_position_embeddings=128, rope_parameters=scaled)
    assert plan_of(wider, source, "--max-model-len", 128)["num_too_long"] == 0


def long_rows(count=1000):
    return [{"prompt": "y" * 9_000 + "z" * 1_000 if i == 500 else f"row {i}"} for i in range(count)]


@pytest.fixture
def long_job(tiny_model, tmp_path):
    """Return the arguments of a job with one prompt that is far too long, and its output."""
    model = tiny_model("llama", bos=True, max_position_embeddings=2048)
    source, out = write_jsonl(tmp_path / "long1.jsonl", long_rows()), tmp_path / "out.jsonl"
    return ["run", model, source, "-o", out, "--max-tokens", 2, "--ignore-eos"], out


def others_done(rows):
    assert column(rows, "row_index") == list(range(1000))
    assert column(rows, "prompt") == column(long_rows(), "prompt")
    return all(r["finish_reason"] == "length" and r["num_generated_tokens"] == 2 for r in rows if r["row_index"] != 500)


@pytest.mark.parametrize("flags", [[], ["--too-long", "error"]])
def test_tk_05_one_prompt_that_is_too_long_is_one_row_error(long_job, flags):
    args, out = long_job
    done = pagedgen(*args, *flags)
    assert done.returncode == 3, done.stderr
    rows = read_jsonl(out)
    assert others_done(rows)
    assert (rows[500]["finish_reason"], rows[500]["error_code"]) == ("error", "prompt_too_long")
    assert "10001 tokens" in rows[500]["error"] and "2048" in rows[500]["error"]  # with the BOS
    assert stats_of(out)["rows"] == {"total": 1000, "error": 1, "length": 999}


def test_tk_05_on_error_stop_ends_before_any_generation_and_names_the_row(long_job):
    args, out = long_job
    done = pagedgen(*args, "--on-error", "stop")
    assert done.returncode == 3, done.stderr
    assert "row 500" in one_line(done.stderr) and "10001 tokens" in one_line(done.stderr)
    assert not out.exists()
    assert "loading" not in done.stderr and stats_of(out)["generated_tokens"] == 0


def test_tk_05_skip_passes_over_the_row_without_an_error(long_job):
    args, out = long_job
    done = pagedgen(*args, "--too-long", "skip")
    assert done.returncode == 0, done.stderr
    rows = read_jsonl(out)
    assert others_done(rows)
    assert (rows[500]["finish_reason"], rows[500]["stop_reason"], rows[500]["error"]) == ("skipped", "too_long", None)
    assert (rows[500]["response"], rows[500]["num_prompt_tokens"], rows[500]["num_generated_tokens"]) == (None, 10001, 0)


def test_tk_05_truncate_left_keeps_the_bos_and_the_end(long_job, tmp_path):
    args, out = long_job
    done = pagedgen(*args, "--too-long", "truncate-left", "--token-ids")
    assert done.returncode == 0, done.stderr
    rows = read_jsonl(out)
    assert others_done(rows)
    left = 2048 - 2  # room for max_tokens
    assert (rows[500]["num_prompt_tokens"], rows[500]["num_truncated_tokens"]) == (left, 10001 - left)
    assert rows[500]["num_generated_tokens"] == 2
    ids = Prompts(args[1]).ids(long_rows()[500])
    same = write_jsonl(tmp_path / "same.jsonl", [{"prompt_token_ids": [BOS, *ids[-(left - 1) :]]}])
    whole = tmp_path / "same.out.jsonl"
    done = pagedgen("run", args[1], same, "-o", whole, "--max-tokens", 2, "--ignore-eos", "--token-ids")
    assert done.returncode == 0, done.stderr
    assert read_jsonl(whole)[0]["token_ids"] == rows[500]["token_ids"]


def test_tk_05_truncate_left_keeps_a_chats_head_and_its_last_words(tiny_model, tmp_path):
    model, out = tiny_model("llama", bos=True, chat_template=BOS_TEMPLATE, max_position_embeddings=2048), tmp_path / "o.jsonl"
    system = {"role": "system", "content": "be brief"}
    source = write_jsonl(tmp_path / "chat.jsonl", [{"messages": [system, user("y" * 9_000 + "z" * 1_000)]}])
    done = pagedgen(
        "run", model, source, "-o", out, "--max-tokens", 2, "--ignore-eos", "--token-ids", "--too-long", "truncate-left"
    )
    assert done.returncode == 0, done.stderr
    row = read_jsonl(out)[0]
    frame = len(Prompts(model).ids({"messages": [system, user("")]}))
    assert row["num_prompt_tokens"] == 2046
    cut = [system, user(("y" * 9_000 + "z" * 1_000)[-(2046 - frame) :])]
    same, whole = write_jsonl(tmp_path / "same.jsonl", [{"messages": cut}]), tmp_path / "same.out.jsonl"
    done = pagedgen("run", model, same, "-o", whole, "--max-tokens", 2, "--ignore-eos", "--token-ids")
    assert done.returncode == 0, done.stderr
    assert (read_jsonl(whole)[0]["token_ids"], read_jsonl(whole)[0]["num_prompt_tokens"]) == (row["token_ids"], 2046)


# Output
