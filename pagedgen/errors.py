"""Typed errors, each with the exit code the CLI gives it.

    PagedgenError                exit 1
    ├── UsageError               exit 2   flags, configuration or files that can't be run at all; told before weights load
    │   ├── InputError                    no such file, no rows, no usable column
    │   ├── ModelError                    no such model, or one that can't be run here
    │   └── MemoryPlanError               the KV pool can't hold one row
    └── OutputError              exit 4   the output can't be written

`RowError` is apart: it marks one row and never ends a run. Exit 75 (stopped by a signal or the deadline) is no error.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_INTERNAL = 1
EXIT_USAGE = 2
EXIT_ROW_ERRORS = 3
EXIT_OUTPUT = 4
EXIT_STOPPED = 75


class PagedgenError(Exception):
    """Base of every error a user can cause or must know of."""

    exit_code = EXIT_INTERNAL


class UsageError(PagedgenError):
    """A flag, a value or a combination that can't be run; the message names the field, the value and the fix."""

    exit_code = EXIT_USAGE


class InputError(UsageError):
    """Input files that can't be read as prompts at all."""


class ModelError(UsageError):
    """A model that is not there, or that this version can't run; the message says why."""


class MemoryPlanError(UsageError):
    """Memory that can't hold the model and one row; the message has every number."""


class OutputError(PagedgenError):
    """The output can't be written."""

    exit_code = EXIT_OUTPUT


# Every `error_code` a row can carry, with what it means. The README's table is checked against this one.
ROW_ERROR_CODES = {
    "bad_json": "the line is not a JSON object",
    "bad_csv": "the line is not a CSV record of the header's columns",
    "bad_request": "the line is no OpenAI batch request that can be answered",
    "unreadable": "the file is broken here; what follows in it is lost",
    "missing_prompt": "the row has no prompt column or the value is missing",
    "null_prompt": "the prompt is null",
    "not_text": "the prompt is not text (or messages are not a list of role and content)",
    "empty_prompt": "the prompt has no tokens",
    "no_messages": "the list of messages is empty",
    "unsupported_content": "a message holds a part that is not text",
    "template_error": "the chat template or the prompt template refused the row",
    "bad_token_ids": "a token id is outside the model's vocabulary",
    "bad_sampling_params": "the row's sampling_params can't be used",
    "prompt_too_long": "the prompt leaves no room for a token within max_model_len",
    "nan_logits": "the model's output for the row is not a number",
    "kv_pool_too_small": "the row needs more blocks than the KV pool has",
}


class RowError(Exception):
    """What is wrong with one row: a code of `ROW_ERROR_CODES` and a sentence."""

    def __init__(self, code: str, message: str):
        assert code in ROW_ERROR_CODES, code
        super().__init__(message)
        self.code = code
        self.message = message
