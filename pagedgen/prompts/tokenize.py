"""From rendered prompts to token ids, in groups; what can't be tokenized becomes a row error."""

from __future__ import annotations

import copy
from typing import Any

from ..errors import RowError
from .render import Rendered


class PromptTokenizer:
    """Tokenize with exactly one BOS and never an EOS at the end.

    A chat's text is tokenized as its template wrote it (special tokens included, none added). Plain text gets what the
    tokenizer adds by default, except when it already begins with the BOS text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int):
        self._fast = _fast_backend(tokenizer)
        # A tokenizer's own call sets its backend anew each time, which fails while another thread decodes with it.
        self._tokenizer = tokenizer if self._fast is not None else copy.deepcopy(tokenizer)
        self._vocab_size = vocab_size
        self._bos = getattr(tokenizer, "bos_token", None)
        self.num_plain = 0  # prompts that are text, not a rendered chat
        self.num_bos_kept = 0  # of these, how many brought their own BOS

    def tokenize(self, prompts: list[Rendered]) -> list[list[int] | RowError]:
        """Return each prompt's token ids, or why it has none."""
        results: list[list[int] | RowError] = [[] for _ in prompts]
        plain, whole = [], []  # whole: the text holds its special tokens already
        for place, prompt in enumerate(prompts):
            if prompt.token_ids is not None:
                results[place] = self._checked(prompt.token_ids)
            elif prompt.from_template:
                whole.append(place)
            elif self._bos and prompt.text and prompt.text.startswith(self._bos):
                self.num_bos_kept += 1
                whole.append(place)
            else:
                plain.append(place)
        self.num_plain += sum(p.text is not None and not p.from_template for p in prompts)
        for places, add_special_tokens in ((plain, True), (whole, False)):
            texts = [prompts[place].text or "" for place in places]
            for place, ids in zip(places, self._encode(texts, add_special_tokens), strict=True):
                results[place] = ids if isinstance(ids, RowError) else self._checked(ids)
        return results

    def decodes_to(self, token_ids: list[int], text: str) -> bool:
        """Return True when ids stand for a text, special tokens included."""
        return self.decode_piece(token_ids) == text

    def encode_template_text(self, text: str) -> list[int]:
        """Return the token ids of what a chat template wrote, or of a piece of it.

        Raises:
            RowError: it can't be tokenized.
        """
        ids = self._encode([text], add_special_tokens=False)[0]
        ids = ids if isinstance(ids, RowError) else self._checked(ids)
        if isinstance(ids, RowError):
            raise ids
        return ids

    def encode_piece(self, text: str) -> list[int]:
        """Return the token ids of a piece of text that has been tokenized as part of a prompt."""
        return self._ids_of([text], add_special_tokens=False)[0]

    def decode_piece(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @property
    def bos_token_id(self) -> int | None:
        return getattr(self._tokenizer, "bos_token_id", None)

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int] | RowError]:
        if not texts:
            return []
        try:
            encoded = self._ids_of(texts, add_special_tokens)
        except (TypeError, ValueError, UnicodeError):
            if len(texts) == 1:  # for example a lone surrogate, which is no text
                return [RowError("not_text", "the prompt is not valid Unicode text")]
            return [self._encode([text], add_special_tokens)[0] for text in texts]
        return [self._without_eos(ids, text, add_special_tokens) for ids, text in zip(encoded, texts, strict=True)]

    def _ids_of(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        if self._fast is not None:
            # What the tokenizer's own call does, less its dictionaries, masks and offsets, which take half of the time.
            return [e.ids for e in self._fast.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
        return [list(ids) for ids in self._tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]]

    def _without_eos(self, ids: list[int], text: str, added: bool) -> list[int]:
        """Drop an EOS that the tokenizer put at the end of a prompt: the answer would begin after its own end."""
        eos = getattr(self._tokenizer, "eos_token_id", None)
        eos_text = getattr(self._tokenizer, "eos_token", None)
        is_only_bos = len(ids) == 1 and eos == getattr(self._tokenizer, "bos_token_id", None)
        if added and ids and ids[-1] == eos and not is_only_bos and not (eos_text and text.endswith(eos_text)):
            ids.pop()
        return ids

    def _checked(self, ids: list[int]) -> list[int] | RowError:
        if not ids:
            return RowError("empty_prompt", "the prompt has no tokens")
        bad = next((i for i in ids if not 0 <= i < self._vocab_size), None)
        if bad is not None:
            return RowError("bad_token_ids", f"token id {bad} is outside the vocabulary of {self._vocab_size}")
        return ids


def _fast_backend(tokenizer: Any) -> Any:
    """Return the `tokenizers.Tokenizer` under a transformers tokenizer, set as its own call sets it; None where that call is
    another one."""
    from transformers import PreTrainedTokenizerFast

    own = getattr(type(tokenizer), "_encode_plus", None)
    if own is None or own is not PreTrainedTokenizerFast._encode_plus:
        return None
    tokenizer("", add_special_tokens=False)  # sets truncation, padding and the like on the backend
    return tokenizer.backend_tokenizer
