"""From token ids to text: once when a row ends, and piece by piece only for rows that look for stop strings."""

from __future__ import annotations

from typing import Any

_REPLACEMENT = "\ufffd"


def decode(tokenizer: Any, token_ids: list[int], *, skip_special_tokens: bool) -> str:
    """Return the text of all ids at once: the one definition of a completion's text."""
    return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


class IncrementalDetokenizer:
    """Text as it grows, in pieces that never split a character.

    Each piece is the difference between two decodes of a short window, since a token's text depends on its neighbours
    (spaces, characters of several bytes). A piece that ends in an incomplete character is held back.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window_start = 0  # ids before this are no longer decoded
        self._read_end = 0  # text of ids before this has been handed out

    def feed(self, token_ids: list[int]) -> str:
        """Return the text that became certain; `token_ids` is the whole completion so far."""
        known = decode(self._tokenizer, token_ids[self._window_start : self._read_end], skip_special_tokens=self._skip)
        grown = decode(self._tokenizer, token_ids[self._window_start :], skip_special_tokens=self._skip)
        if len(grown) <= len(known) or grown.endswith(_REPLACEMENT):
            return ""
        self._window_start, self._read_end = self._read_end, len(token_ids)
        return grown[len(known) :]
