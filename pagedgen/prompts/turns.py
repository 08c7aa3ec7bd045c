"""Conversations of several turns: the next turn's prompt, made so that it begins with what is computed already."""

from __future__ import annotations

from typing import Any

from .render import PromptRenderer, Rendered, user_message
from .tokenize import PromptTokenizer


class Conversation:
    """One conversation as it goes on. Knows texts and token ids, not the engine."""

    def __init__(self, renderer: PromptRenderer, tokenizer: PromptTokenizer, first: Rendered):
        """`first`: the first turn's prompt, which has the `turns` of all."""
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._first = first
        self._messages: list[dict[str, Any]] = list(first.messages)

    @property
    def num_turns(self) -> int:
        return len(self._first.turns)

    @property
    def num_asked(self) -> int:
        """Turns the user has had."""
        return sum(message["role"] == "user" for message in self._messages)

    def fork(self) -> Conversation:
        """Return the same conversation, to go on in another way."""
        other = Conversation(self._renderer, self._tokenizer, self._first)
        other._messages = list(self._messages)
        return other

    def later_tokens(self, max_tokens: int) -> int:
        """Return how many tokens the turns after the first are expected to add, each answered at its full length.

        Raises:
            RowError: the template refuses the conversation.
        """
        if self.num_turns == 1:
            return 0
        messages = list(self._first.messages)
        for turn in self._first.turns[1:]:
            messages += [{"role": "assistant", "content": ""}, user_message(turn)]
        first = self._tokenize(list(self._first.messages))
        whole = self._tokenize(messages)
        return len(whole) - len(first) + max_tokens * (self.num_turns - 1)

    def next_prompt(self, answer: str, prompt_token_ids: list[int], answer_token_ids: list[int]) -> list[int] | None:
        """Take the assistant's answer and return the token ids of the next turn's prompt; None after the last turn.

        answer_token_ids: those that stand for `answer`, without a closing EOS. Where the template only adds to what it wrote
        before, the prompt is the old one, the generated ids as they are, and the tokens of what was added; else, and where the
        answer was cut or the ids don't stand for it, the whole conversation is tokenized again.

        Raises:
            RowError: the conversation can't be rendered or tokenized.
        """
        if self.num_asked == self.num_turns:
            return None
        before = self._render(self._messages)
        self._messages += [{"role": "assistant", "content": answer}, user_message(self._first.turns[self.num_asked])]
        whole = self._render(self._messages)
        if whole.startswith(before + answer) and self._tokenizer.decodes_to(answer_token_ids, answer):
            added = self._tokenizer.encode_template_text(whole[len(before) + len(answer) :])
            return [*prompt_token_ids, *answer_token_ids, *added]
        return self._tokenize(self._messages)

    def _render(self, messages: list[dict[str, Any]]) -> str:
        return self._renderer.render_chat(messages, self._first.given)

    def _tokenize(self, messages: list[dict[str, Any]]) -> list[int]:
        return self._tokenizer.encode_template_text(self._render(messages))
