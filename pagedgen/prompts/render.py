"""From a row's columns to what the tokenizer sees: plain text, a rendered chat, or token ids. Knows no model."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import PromptConfig
from ..errors import InputError, RowError
from .template import PromptTemplate

MESSAGES_COLUMN = "messages"
TURNS_COLUMN = "turns"
# In this order; the first that a row has is its prompt.
PROMPT_COLUMNS = ("prompt", "text", "question")
TOKEN_IDS_COLUMN = "prompt_token_ids"
_COLUMNS = (MESSAGES_COLUMN, *PROMPT_COLUMNS, TURNS_COLUMN, TOKEN_IDS_COLUMN)
# What a chat's template is given besides the messages, when the row has it.
CHAT_COLUMNS = ("tools", "documents")


@dataclass(frozen=True)
class Rendered:
    """What to tokenize. Exactly one of `text` and `token_ids` is set; a chat's template already wrote its special tokens.

    `turns`: what the user says in a conversation of several turns; the text is then the first one's. `messages`: what a chat's
    text was rendered from, and `given` what the template got besides.
    """

    text: str | None = None
    token_ids: list[int] | None = None
    turns: tuple[str, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def from_template(self) -> bool:
        return bool(self.messages)


class PromptRenderer:
    """Find a row's prompt and render it.

    Without named columns or a template a row's prompt is its `messages`, else `prompt`, `text`, `question`, `turns`,
    `prompt_token_ids`.
    """

    def __init__(self, tokenizer: Any, config: PromptConfig | None = None):
        self._tokenizer = tokenizer
        self._config = config = config or PromptConfig()
        self._template = PromptTemplate(config.prompt_template) if config.prompt_template is not None else None
        # Some chat templates print the date. All of a job's rows are told one, even when it goes on another day; the hour is
        # left out, so that shards that are run on one day are told the same.
        self.told_time: datetime.datetime | None = None
        if "strftime_now" in str(getattr(tokenizer, "chat_template", None)):
            self.tell_time(datetime.datetime.now().replace(hour=0, minute=0, second=0, microsecond=0))

    def tell_time(self, time: datetime.datetime) -> None:
        """Let chat templates that ask for the time be told this one."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        self.told_time = time
        templates = self._tokenizer.chat_template
        for template in templates.values() if isinstance(templates, dict) else [templates]:
            # The compiled template is the one that `apply_chat_template` takes from its cache.
            _compile_jinja_template(template).globals["strftime_now"] = time.strftime

    def columns(self) -> list[str]:
        """Return the columns that rendering may look at."""
        config = self._config
        if self._template is not None:
            return [*self._template.columns, *CHAT_COLUMNS]
        named = config.prompt_column or config.messages_column
        return [*((named,) if named else _COLUMNS), *CHAT_COLUMNS]

    def check_columns(self, names: list[str]) -> None:
        """Refuse columns that aren't there, and chats without a template, before anything is loaded.

        Raises:
            InputError: the message names the columns found.
        """
        config = self._config
        found = ", ".join(names) or "none"
        for flag, column in (("--prompt-column", config.prompt_column), ("--messages-column", config.messages_column)):
            if column is not None and column not in names:
                raise InputError(f"{flag} {column}: no such column; found {found}")
        chat = config.makes_chats or config.messages_column is not None
        if self._template is not None:
            missing = [c for c in self._template.columns if c not in names]
            if missing and len(missing) == len(self._template.columns):
                raise InputError(f"--prompt-template names {', '.join(missing)}: no such column; found {found}")
        elif not (config.prompt_column or config.messages_column):
            if not any(c in names for c in _COLUMNS):
                raise InputError(
                    f"no prompt column: looked for {', '.join(_COLUMNS)}, found {found}; name one with --prompt-column"
                )
            chat |= MESSAGES_COLUMN in names or (TURNS_COLUMN in names and not any(c in names for c in PROMPT_COLUMNS))
        if chat and not getattr(self._tokenizer, "chat_template", None):
            raise InputError(
                "the rows are to be chats, but the model's tokenizer has no chat template; pass one with --chat-template FILE"
            )

    def render(self, values: Mapping[str, Any]) -> Rendered:
        """Return what to tokenize of one row.

        Raises:
            RowError: there is no prompt, or it can't be rendered.
        """
        config = self._config
        if self._template is not None:
            return self._text(self._template.render(values), values)
        column = self._column(values)
        value = values[column]
        if column == config.messages_column or (column == MESSAGES_COLUMN and config.prompt_column is None):
            return self._chat(normalize_messages(value), values)
        if column == TURNS_COLUMN and config.prompt_column is None:
            turns = _turns(value)
            return self._chat([user_message(turns[0])], values, turns)
        if value is None:
            raise RowError("null_prompt", f"column {column} is null")
        if column == TOKEN_IDS_COLUMN:
            return Rendered(token_ids=_token_ids(value))
        if not isinstance(value, str):
            raise RowError("not_text", f"column {column} holds {type(value).__name__}, not text")
        return self._text(value, values)

    def num_turns(self, values: Mapping[str, Any]) -> int:
        """Return how many turns the conversation of a row has; 1 where it is none."""
        if self._template is not None or self._config.prompt_column or self._config.messages_column:
            return 1
        try:
            return len(_turns(values[TURNS_COLUMN])) if self._column(values) == TURNS_COLUMN else 1
        except RowError:
            return 1

    def _text(self, text: str, values: Mapping[str, Any]) -> Rendered:
        if self._config.makes_chats:
            if not text:
                raise RowError("empty_prompt", "the prompt is empty")
            return self._chat([user_message(text)], values)
        return Rendered(text=text)

    def _chat(self, messages: list[dict[str, Any]], values: Mapping[str, Any], turns: tuple[str, ...] = ()) -> Rendered:
        if self._config.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._config.system_prompt}, *messages]
        given = {name: _objects(values[name], name) for name in CHAT_COLUMNS if values.get(name) is not None}
        return Rendered(self.render_chat(messages, given), turns=turns, messages=tuple(messages), given=given)

    def _column(self, values: Mapping[str, Any]) -> str:
        named = self._config.messages_column or self._config.prompt_column
        if named:
            if named not in values:
                raise RowError("missing_prompt", f"the row has no column {named}")
            return named
        present = [c for c in _COLUMNS if c in values]
        if present:  # in Parquet every row has every column, most of them null
            return next((c for c in present if values[c] is not None), present[0])
        raise RowError(
            "missing_prompt",
            f"the row has none of the columns {', '.join(_COLUMNS)}",
        )

    def render_chat(self, messages: list[dict[str, Any]], given: Mapping[str, Any]) -> str:
        """Render messages by the tokenizer's template, which is `given` tools and documents too.

        A last message of the assistant is continued, not answered.

        Raises:
            RowError: the template refuses them.
        """
        continued = messages[-1]["role"] == "assistant"
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not continued, continue_final_message=continued, **given
            )
        except Exception as error:  # a template is foreign code and raises what it likes
            reason = str(error).strip() or type(error).__name__
            raise RowError("template_error", f"the chat template refused the messages: {reason}") from error


def normalize_messages(value: Any) -> list[dict[str, Any]]:
    """Return messages as templates want them: null members dropped, text parts joined without a separator.

    Raises:
        RowError: not messages, none of them, or a part that is not text.
    """
    value = _from_json_text(value)
    if value is None:
        raise RowError("null_prompt", "messages are null")
    if not isinstance(value, (list, tuple)):
        raise RowError("not_text", f"messages are {type(value).__name__}, not a list")
    if not value:
        raise RowError("no_messages", "the list of messages is empty")
    messages = []
    for place, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RowError("not_text", f"message {place} is not an object with a role")
        kept = without_nulls(message)
        if "content" not in kept and "tool_calls" not in kept:
            raise RowError("null_prompt", f"message {place} ({message['role']}) has no content")
        if "content" in kept:
            kept["content"] = _join_parts(kept["content"], place)
        messages.append(kept)
    return messages


def without_nulls(value: Any) -> Any:
    """Return a value without members that are null: Parquet gives every object the members of all."""
    if isinstance(value, Mapping):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(v) for v in value]
    return value


def _objects(value: Any, column: str) -> list[Any]:
    """Return the tools or documents of a row: a list of objects, or the JSON text of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError("template_error", f"column {column} is not JSON: {error}") from error
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, Mapping) for v in value):
        raise RowError("template_error", f"column {column} is not a list of objects")
    return without_nulls(value)


def user_message(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _from_json_text(value: Any) -> Any:
    """Return a list that is given as JSON text, as in a CSV file; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _turns(value: Any) -> tuple[str, ...]:
    value = _from_json_text(value)
    if value is None:
        raise RowError("null_prompt", "turns are null")
    if not isinstance(value, (list, tuple)) or any(not isinstance(turn, str) for turn in value):
        raise RowError("not_text", "turns are not a list of texts")
    if not value:
        raise RowError("no_messages", "the list of turns is empty")
    return tuple(value)


def _join_parts(content: Any, place: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RowError("not_text", f"message {place} has content of type {type(content).__name__}")
    texts = []
    for part in content:
        if not isinstance(part, Mapping):
            raise RowError("not_text", f"message {place} has a content part that is not an object")
        kind = part.get("type")
        if kind != "text":
            raise RowError("unsupported_content", f"message {place} has a part of type {kind}; only text can be used")
        if not isinstance(part.get("text"), str):
            raise RowError("not_text", f"message {place} has a text part without text")
        texts.append(part["text"])
    return "".join(texts)


def _token_ids(value: Any) -> list[int]:
    if not isinstance(value, (list, tuple)) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
        raise RowError("bad_token_ids", f"{TOKEN_IDS_COLUMN} is not a list of integers")
    return list(value)
