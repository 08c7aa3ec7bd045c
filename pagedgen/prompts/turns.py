"""Conversations of several turns: the next turn's prompt, made so that it begins with what is computed already."""

from __future__ import annotations

from typing import Any

from ..errors import RowError
from .render import PromptRenderer, Rendered, user_message
from .tokenize import PromptTokenizer


class Conversation:
    """One conversation as it goes on. Knows texts and token ids, not the engine."""

    def __init__(self, renderer: PromptRenderer, tokenizer: PromptTokenizer, turns: tuple[str, ...]):
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._turns = turns
        self._messages: list[dict[str, Any]] = [user_message(turns[0])]

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    @property
    def num_asked(self) -> int:
        """Turns the user has had."""
        return (len(self._messages) + 1) // 2

    def fork(self) -> Conversation:
        """Return the same conversation, to go on in another way."""
        other = Conversation(self._renderer, self._tokenizer, self._turns)
        other._messages = list(self._messages)
        return other

    def later_tokens(self, max_tokens: int) -> int:
        """Return how many tokens the turns after the first are expected to add, each answered at its full length.

        Raises:
            RowError: the template refuses the conversation.
        """
        if len(self._turns) == 1:
            return 0
        messages: list[dict[str, Any]] = []
        for turn in self._turns:
            messages += [user_message(turn), {"role": "assistant", "content": ""}]
        first = self._tokenize(self._renderer.render_chat(messages[:1]))
        whole = self._tokenize(self._renderer.render_chat(messages[:-1]))
        return len(whole) - len(first) + max_tokens * (len(self._turns) - 1)

    def next_prompt(self, answer: str, prompt_token_ids: list[int], answer_token_ids: list[int]) -> list[int] | None:
        """Take the assistant's answer and return the token ids of the next turn's prompt; None after the last turn.

        answer_token_ids: those that stand for `answer`, without a closing EOS. Where the template only adds to what it wrote
        before, the prompt is the old one, the generated ids as they are, and the tokens of what was added; else, and where the
        answer was cut or the ids don't stand for it, the whole conversation is tokenized again.

        Raises:
            RowError: the conversation can't be rendered or tokenized.
        """
        if self.num_asked == len(self._turns):
            return None
        before = self._renderer.render_chat(self._messages)
        self._messages += [{"role": "assistant", "content": answer}, user_message(self._turns[self.num_asked])]
        whole = self._renderer.render_chat(self._messages)
        if whole.startswith(before + answer) and self._tokenizer.decodes_to(answer_token_ids, answer):
            return [*prompt_token_ids, *answer_token_ids, *self._tokenize(whole[len(before) + len(answer) :])]
        return self._tokenize(whole)

    def _tokenize(self, text: str) -> list[int]:
        token_ids = self._tokenizer.tokenize([Rendered(text=text, from_template=True)])[0]
        if isinstance(token_ids, RowError):
            raise token_ids
        return token_ids
