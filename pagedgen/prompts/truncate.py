"""Prompts that are too long, cut to fit: at the left or in the middle, in tokens, and what must stay stays.

A text keeps its BOS. A chat keeps everything but a part of its last user message, so that roles, the system message and the
template's own words are whole.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import RowError
from .render import PromptRenderer, Rendered
from .tokenize import PromptTokenizer

_ATTEMPTS = 8  # a shorter text may have other tokens at its seams
_MOST_BYTES = 4  # of a character, each of which may be a token


def prompt_limit(max_model_len: int, max_tokens: int) -> int:
    """Return the most tokens a prompt may have so that `max_tokens`, but at most half of the context, are left."""
    return max_model_len - min(max_tokens, max_model_len // 2)


class Truncator:
    """Cuts prompts by one of the two ways."""

    def __init__(self, renderer: PromptRenderer, tokenizer: PromptTokenizer, way: str):
        assert way in ("truncate-left", "truncate-middle")
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._middle = way == "truncate-middle"

    def cut(self, rendered: Rendered, token_ids: list[int], limit: int) -> tuple[Rendered, list[int]]:
        """Return the prompt and its token ids, at most `limit`.

        Raises:
            RowError: what must stay is too long already.
        """
        if len(token_ids) <= limit:
            return rendered, token_ids
        if rendered.messages:
            return self._cut_chat(rendered, token_ids, limit)
        head = 1 if token_ids[0] == self._tokenizer.bos_token_id else 0
        pieces = self._kept(token_ids[head:], limit - head)
        if rendered.text is not None:
            pieces = self._whole_characters(*pieces)
        if not (head or pieces[0] or pieces[1]):
            raise RowError(
                "prompt_too_long", f"the prompt has {len(token_ids)} tokens, and room for {limit} leaves nothing of it"
            )
        return rendered, [*token_ids[:head], *pieces[0], *pieces[1]]

    def _cut_chat(self, rendered: Rendered, token_ids: list[int], limit: int) -> tuple[Rendered, list[int]]:
        messages = list(rendered.messages)
        place = max((i for i, m in enumerate(messages) if m["role"] == "user" and m.get("content")), default=None)
        if place is None:
            raise RowError("prompt_too_long", f"the chat has {len(token_ids)} tokens and no user message to cut")
        content = self._tokenizer.encode_piece(messages[place]["content"])
        keep = len(content)
        for _ in range(_ATTEMPTS):
            keep = max(0, keep - (len(token_ids) - limit))
            messages[place] = {**messages[place], "content": self._text_of(content, keep)}
            text = self._renderer.render_chat(messages, rendered.given)
            token_ids = self._tokenizer.encode_template_text(text)
            if len(token_ids) <= limit:
                return replace(rendered, text=text, messages=tuple(messages)), token_ids
            if not keep:
                break
        raise RowError(
            "prompt_too_long", f"the chat has {len(token_ids)} tokens without its last user message, more than {limit}"
        )

    def _kept(self, token_ids: list[int], keep: int) -> tuple[list[int], list[int]]:
        """Return what is kept before and behind the cut."""
        front = (keep + 1) // 2 if self._middle else 0
        return token_ids[:front], token_ids[len(token_ids) - (keep - front) :]

    def _whole_characters(self, before: list[int], behind: list[int]) -> tuple[list[int], list[int]]:
        """Leave out the tokens at the cut that hold only a part of a character."""
        decode = self._tokenizer.decode_piece
        for _ in range(_MOST_BYTES):
            if before and decode(before[-_MOST_BYTES:]).endswith("\ufffd"):
                before = before[:-1]
            if behind and decode(behind[:_MOST_BYTES]).startswith("\ufffd"):
                behind = behind[1:]
        return before, behind

    def _text_of(self, content: list[int], keep: int) -> str:
        """Return the text of what is kept."""
        before, behind = self._whole_characters(*self._kept(content, keep))
        return self._tokenizer.decode_piece(before) + self._tokenizer.decode_piece(behind)
