"""OpenAI's batch files: what a request may say, and the response's shape."""

from __future__ import annotations

import io
import json

import pytest

from pagedgen.errors import RowError
from pagedgen.rows.openai_batch import looks_like_batch, response_line, to_row
from pagedgen.rows.schema import Result
from pagedgen.rows.sinks import OpenAISink
from pagedgen.rows.sources import Chunk, Row
from pagedgen.sampling_params import SamplingParams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def request(url=CHAT, **body):
    if url == CHAT:
        body = {"messages": MESSAGES, **body}
    return {"custom_id": "c1", "method": "POST", "url": url, "body": {"model": "m", **body}}


def refusal(values):
    with pytest.raises(RowError) as caught:
        to_row(values)
    assert caught.value.code == "bad_request"
    return caught.value.message


def test_a_batch_is_told_by_its_keys():
    assert looks_like_batch(request())
    assert looks_like_batch({"custom_id": 1, "url": "x", "body": {}, "more": 1})
    for name in ("custom_id", "url", "body"):
        assert not looks_like_batch({k: v for k, v in request().items() if k != name})
    assert looks_like_batch({"custom_id": "c", "url": "x", "body": None})  # a bad request, but one
    assert not looks_like_batch({"prompt": "hi"})


def test_a_chat_request_becomes_messages_and_sampling_params():
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = to_row(request(temperature=0.5, n=2, stop=["x"], seed=3, max_tokens=9, tools=tools, top_k=4))
    assert row.pop("sampling_params") == {"temperature": 0.5, "n": 2, "stop": ["x"], "seed": 3, "max_tokens": 9, "top_k": 4}
    assert row == {"messages": MESSAGES, "tools": tools}


@pytest.mark.parametrize(
    ("prompt", "column", "value"),
    [
        ("hi", "prompt", "hi"),
        (["hi"], "prompt", "hi"),
        ([1, 2], "prompt_token_ids", [1, 2]),
        ([[1, 2]], "prompt_token_ids", [1, 2]),
        (None, "prompt", None),
        ("", "prompt", ""),
    ],
)
def test_a_completion_request_becomes_one_prompt(prompt, column, value):
    assert to_row(request(COMPLETIONS, prompt=prompt)) == {column: value, "sampling_params": {}}


def test_a_completion_request_without_a_prompt_has_none():
    assert to_row(request(COMPLETIONS)) == {"prompt": None, "sampling_params": {}}


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], []])
def test_several_prompts_in_one_request_are_refused(prompt):
    assert f"{len(prompt)} prompts" in refusal(request(COMPLETIONS, prompt=prompt))


def test_the_newer_name_of_max_tokens_counts_and_null_is_not_given():
    params = SamplingParams(max_tokens=5, temperature=0.7)

    def with_body(**body):
        return params.override(to_row(request(**body))["sampling_params"])

    assert with_body(max_tokens=7).max_tokens == 7
    assert with_body(max_completion_tokens=8).max_tokens == 8
    assert with_body(max_tokens=7, max_completion_tokens=8).max_tokens == 8
    assert with_body(max_tokens=7, max_completion_tokens=None).max_tokens == 7
    assert with_body(max_tokens=None, temperature=None, stop=None) == params


NEUTRAL = {
    "stream": False, "frequency_penalty": 0.0, "presence_penalty": 0, "logprobs": False, "top_logprobs": 0, "logit_bias": {},
    "echo": False, "best_of": 1, "suffix": "", "tool_choice": "auto", "response_format": {"type": "text"},
    "parallel_tool_calls": True, "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "x", "unknown": None,
}  # fmt: skip


def test_fields_that_change_nothing_are_accepted():
    assert to_row(request(**NEUTRAL)) == {"messages": MESSAGES, "sampling_params": {}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", True), ("frequency_penalty", 0.1), ("logprobs", True), ("logprobs", 1), ("top_logprobs", 2), ("echo", True),
        ("logit_bias", {"5": 1}), ("best_of", 2), ("best_of", True), ("suffix", "x"), ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}), ("functions", []), ("audio", {}), ("temprature", 1), ("stream", 0),
        ("frequency_penalty", False),
    ],
)  # fmt: skip
def test_fields_that_would_change_the_answer_are_refused_by_name(name, value):
    assert f"body.{name} " in refusal(request(**{name: value}))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"custom_id": None}, "custom_id"),
        ({"custom_id": 7}, "custom_id"),
        ({"method": "GET"}, "method 'GET'"),
        ({"method": None}, "method None"),
        ({"url": "/v1/embeddings"}, "url '/v1/embeddings'"),
        ({"url": ["/v1/completions"]}, "url"),
        ({"body": None}, "body"),
        ({"body": [1]}, "body"),
        ({"body": "text"}, "body"),
    ],
)
def test_what_is_no_request_is_refused_with_the_fields_name(change, named):
    assert named in refusal({**request(), **change})


@pytest.mark.parametrize("name", ["custom_id", "url", "body"])
def test_a_request_without_a_field_is_refused_with_its_name(name):
    assert name in refusal({k: v for k, v in request().items() if k != name})


def test_a_request_without_a_method_is_a_post():
    assert to_row({k: v for k, v in request().items() if k != "method"})["messages"] == MESSAGES


# Responses


def done(row, sample=0, text="ok", **fields):
    return Result(row, sample, response=text, finish_reason="stop", **fields)


def test_a_chat_response_has_a_choice_for_each_sample_and_counts_its_prompt_once():
    results = [
        done(7, 0, "a", num_prompt_tokens=5, num_generated_tokens=2),
        Result(7, 1, response="b", finish_reason="length", num_prompt_tokens=5, num_generated_tokens=4),
    ]
    line, failed = response_line(request(), results, "default")
    assert not failed
    assert list(line) == ["id", "custom_id", "response", "error"]
    assert (line["id"], line["custom_id"], line["error"]) == ("batch_req_000000000007", "c1", None)
    assert line["response"]["status_code"] == 200
    body = line["response"]["body"]
    assert (body["object"], body["created"], body["model"]) == ("chat.completion", 0, "m")
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    assert [(c["index"], c["message"]["role"], c["message"]["content"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "assistant", "a", "stop"),
        (1, "assistant", "b", "length"),
    ]


def test_a_completion_response_has_text_and_our_model_where_the_request_names_none():
    values = request(COMPLETIONS, prompt="x")
    del values["body"]["model"]
    body = response_line(values, [done(1, num_prompt_tokens=1)], "default")[0]["response"]["body"]
    assert (body["object"], body["model"]) == ("text_completion", "default")
    assert body["choices"] == [{"index": 0, "text": "ok", "logprobs": None, "finish_reason": "stop"}]
    assert body["id"] != response_line(values, [done(2)], "default")[0]["response"]["body"]["id"]


@pytest.mark.parametrize("values", [request(), {}, {"body": [1], "custom_id": "c1"}, {"url": 5}])
def test_a_failed_request_tells_code_and_message_even_without_its_fields(values):
    results = [done(3), Result(3, 1, error_code="bad_request", error="why")]
    line, failed = response_line(values, results, "default")
    assert failed
    assert line["custom_id"] == values.get("custom_id")
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"]["error"]["code"] == "bad_request"
    assert line["response"]["body"]["error"]["message"] == "why"


def test_a_skipped_request_is_a_failure_that_says_so():
    line, failed = response_line(request(), [Result(3, finish_reason="skipped", stop_reason="too_long")], "default")
    assert failed
    assert line["response"]["body"]["error"]["code"] == "too_long"
    assert line["response"]["body"]["error"]["message"] == "skipped: too_long"


def test_failures_go_to_a_file_of_their_own_in_the_order_of_the_requests():
    out, errors = io.BytesIO(), io.BytesIO()
    sink = OpenAISink(out, errors, "default")
    rows = [Row(i, i + 1, {**request(), "custom_id": f"c{i}"}) for i in range(6)]
    results = [[done(i) if i % 3 else Result(i, error_code="bad_json", error="x")] for i in range(6)]
    sink.write(Chunk(rows[:4]), list(enumerate(results[:4])))
    sink.write(Chunk(rows[4:]), list(enumerate(results[4:])))
    sink.close({})
    ids = [[json.loads(line)["custom_id"] for line in f.getvalue().splitlines()] for f in (out, errors)]
    assert ids == [["c1", "c2", "c4", "c5"], ["c0", "c3"]]
