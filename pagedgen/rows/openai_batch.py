"""OpenAI's batch files: a request a line in, a response a line out, failures in a file of their own.

Shapes as documented for `/v1/batches` (https://platform.openai.com/docs/guides/batch): in `custom_id, method, url, body`, out
`id, custom_id, response {status_code, request_id, body}, error`. `created` is 0 and ids come from the row's index, so that the
same job gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import RowError
from .schema import Result

CHAT_URL, COMPLETIONS_URL = "/v1/chat/completions", "/v1/completions"
_SAMPLING = (
    "n", "temperature", "top_p", "seed", "stop", "max_tokens", "top_k", "min_p", "min_tokens", "ignore_eos",
    "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip
# Fields that change nothing here, and fields that only their neutral value can have.
_IGNORED = {"model", "user", "metadata", "store", "service_tier", "stream_options", "tools", "documents"}
_IGNORED |= {"messages", "prompt", "max_completion_tokens", *_SAMPLING}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,), "frequency_penalty": (0,), "presence_penalty": (0,), "logprobs": (False, 0), "top_logprobs": (0,),
    "logit_bias": ({},), "echo": (False,), "best_of": (1,), "suffix": ("",), "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},), "parallel_tool_calls": (True, False), "repetition_penalty": (1,),
}  # fmt: skip


def looks_like_batch(names: Iterable[str]) -> bool:
    """Return True when these are the columns of a batch file."""
    return {"custom_id", "url", "body"} <= set(names)


def to_row(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a request: `messages` or `prompt` or `prompt_token_ids`, `sampling_params`, `tools`.

    Raises:
        RowError: it is no request that can be answered; the message names the field.
    """
    if not isinstance(values.get("custom_id"), str):
        raise RowError("bad_request", "custom_id is missing or not a text")
    if values.get("method", "POST") != "POST":
        raise RowError("bad_request", f"method {values['method']!r:.40} is not POST")
    url, body = values.get("url"), values.get("body")
    if url not in (CHAT_URL, COMPLETIONS_URL):
        raise RowError("bad_request", f"url {url!r:.60} is not {CHAT_URL} or {COMPLETIONS_URL}")
    if not isinstance(body, Mapping):
        raise RowError("bad_request", "body is missing or not an object")
    for name, value in body.items():
        if name in _IGNORED or value is None or any(_same(value, neutral) for neutral in _NEUTRAL.get(name, ())):
            continue
        raise RowError("bad_request", f"body.{name} can't be used here")
    sampling = {name: body[name] for name in _SAMPLING if name in body}
    if body.get("max_completion_tokens") is not None:
        sampling["max_tokens"] = body["max_completion_tokens"]
    row: dict[str, Any] = {"sampling_params": sampling}
    if url == CHAT_URL:
        row["messages"] = body.get("messages")
        row |= {name: body[name] for name in ("tools", "documents") if name in body}
        return row
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, list) and (not prompt or isinstance(prompt[0], (str, list))):
        raise RowError("bad_request", f"body.prompt has {len(prompt)} prompts; give each a line of its own")
    return row | {"prompt_token_ids" if isinstance(prompt, list) else "prompt": prompt}


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def response_line(values: Mapping[str, Any], results: list[Result], model: str) -> tuple[dict[str, Any], bool]:
    """Return the output line of a request with all its samples, and whether it is a failure."""
    first = results[0]
    chat = values.get("url") == CHAT_URL
    line: dict[str, Any] = {"id": f"batch_req_{first.row_index:012}", "custom_id": values.get("custom_id")}
    failed = next((r for r in results if r.finish_reason in ("error", "skipped")), None)
    if failed is not None:
        skipped = failed.finish_reason == "skipped"
        error = {
            "message": f"skipped: {failed.stop_reason}" if skipped else failed.error,
            "type": "invalid_request_error",
            "param": None,
            "code": failed.stop_reason if skipped else failed.error_code,
        }
        response = {"status_code": 400, "request_id": f"req_{first.row_index:012}", "body": {"error": error}}
        return {**line, "response": response, "error": None}, True
    choices = []
    for result in results:
        choice: dict[str, Any] = {"index": result.sample_index}
        if chat:
            choice["message"] = {"role": "assistant", "content": result.response, "refusal": None}
        else:
            choice["text"] = result.response
        choices.append({**choice, "logprobs": None, "finish_reason": result.finish_reason})
    generated = sum(r.num_generated_tokens for r in results)
    prompt = first.num_prompt_tokens or 0
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{first.row_index:012}",
        "object": "chat.completion" if chat else "text_completion",
        "created": 0,
        "model": (values.get("body") or {}).get("model") or model,
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated},
    }
    response = {"status_code": 200, "request_id": f"req_{first.row_index:012}", "body": body}
    return {**line, "response": response, "error": None}, False
