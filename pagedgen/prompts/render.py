"""From a row's columns to what the tokenizer sees: plain text, a rendered chat, or token ids. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InputError, RowError, UsageError

MESSAGES_COLUMN = "messages"
TURNS_COLUMN = "turns"
# In this order; the first that a row has is its prompt.
PROMPT_COLUMNS = ("prompt", "text", "question")
TOKEN_IDS_COLUMN = "prompt_token_ids"
_COLUMNS = (MESSAGES_COLUMN, *PROMPT_COLUMNS, TURNS_COLUMN, TOKEN_IDS_COLUMN)


@dataclass(frozen=True)
class Rendered:
    """What to tokenize. Exactly one of `text` and `token_ids` is set; a chat's template already wrote its special tokens.

    `turns`: what the user says in a conversation of several turns; the text is then the first one's.
    """

    text: str | None = None
    token_ids: list[int] | None = None
    from_template: bool = False
    turns: tuple[str, ...] = ()


class PromptRenderer:
    """Find a row's prompt and render it.

    Without named columns a row's prompt is its `messages`, else `prompt`, `text`, `question`, `turns`, `prompt_token_ids`.
    """

    def __init__(self, tokenizer: Any, *, prompt_column: str | None = None, messages_column: str | None = None):
        self._tokenizer = tokenizer
        self._prompt_column = prompt_column
        self._messages_column = messages_column

    def check_columns(self, names: list[str], *, has_rows: bool) -> None:
        """Refuse columns that aren't there, and chats without a template, before anything is loaded.

        Raises:
            InputError: the message names the columns found.
        """
        if self._prompt_column and self._messages_column:
            raise UsageError("--prompt-column and --messages-column exclude each other: a row has one prompt")
        if not has_rows:
            return
        found = ", ".join(names) or "none"
        for flag, column in (("--prompt-column", self._prompt_column), ("--messages-column", self._messages_column)):
            if column is not None and column not in names:
                raise InputError(f"{flag} {column}: no such column; found {found}")
        if self._prompt_column or self._messages_column:
            chat = self._messages_column is not None
        else:
            candidates = _COLUMNS
            if not any(c in names for c in candidates):
                raise InputError(
                    f"no prompt column: looked for {', '.join(candidates)}, found {found}; name one with --prompt-column"
                )
            chat = MESSAGES_COLUMN in names or (TURNS_COLUMN in names and not any(c in names for c in PROMPT_COLUMNS))
        if chat and not getattr(self._tokenizer, "chat_template", None):
            raise InputError(
                "the rows hold messages, but the model's tokenizer has no chat template; pass one with --chat-template FILE"
            )

    def render(self, values: Mapping[str, Any]) -> Rendered:
        """Return what to tokenize of one row.

        Raises:
            RowError: there is no prompt, or it can't be rendered.
        """
        column = self._column(values)
        value = values[column]
        if column == self._messages_column or (column == MESSAGES_COLUMN and self._prompt_column is None):
            return Rendered(text=self.render_chat(value), from_template=True)
        if column == TURNS_COLUMN and self._prompt_column is None:
            turns = _turns(value)
            return Rendered(text=self.render_chat([user_message(turns[0])]), from_template=True, turns=turns)
        if value is None:
            raise RowError("null_prompt", f"column {column} is null")
        if column == TOKEN_IDS_COLUMN:
            return Rendered(token_ids=_token_ids(value))
        if not isinstance(value, str):
            raise RowError("not_text", f"column {column} holds {type(value).__name__}, not text")
        return Rendered(text=value)

    def _column(self, values: Mapping[str, Any]) -> str:
        named = self._messages_column or self._prompt_column
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

    def render_chat(self, value: Any) -> str:
        """Render messages by the tokenizer's template. A last message of the assistant is continued, not answered.

        Raises:
            RowError: they are no messages, or the template refuses them.
        """
        messages = normalize_messages(value)
        continued = messages[-1]["role"] == "assistant"
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not continued, continue_final_message=continued
            )
        except Exception as error:  # a template is foreign code and raises what it likes
            reason = str(error).strip() or type(error).__name__
            raise RowError("template_error", f"the chat template refused the messages: {reason}") from error


def normalize_messages(value: Any) -> list[dict[str, Any]]:
    """Return messages as templates want them: null members dropped, text parts joined without a separator.

    Raises:
        RowError: not messages, none of them, or a part that is not text.
    """
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
        kept = {k: v for k, v in message.items() if v is not None}
        if "content" not in kept and "tool_calls" not in kept:
            raise RowError("null_prompt", f"message {place} ({message['role']}) has no content")
        if "content" in kept:
            kept["content"] = _join_parts(kept["content"], place)
        messages.append(kept)
    return messages


def user_message(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _turns(value: Any) -> tuple[str, ...]:
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
