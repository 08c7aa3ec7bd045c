"""Finished sequences become results. The turns of a conversation, and a row's beams, are handed on together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import RowError
from ..request import Request, Sequence
from ..rows.schema import Result
from .reader import Group
from .setup import Job


class Answers:
    """What is known of rows in flight until all their answers are there."""

    def __init__(self, job: Job, keep: Callable[[list[Result]], None]):
        """`keep` takes results that are to be kept together or not at all."""
        self._job = job
        self._keep = keep
        self._conversations: dict[int, Any] = {}  # by row, of those with several turns
        self._samples_left: dict[int, int] = {}  # by row, of the same rows
        self._going_on: dict[tuple[int, int], Any] = {}  # by (row, sample), once it has an answer
        self._together: dict[tuple[int, int], list[Result]] = {}  # by (row, sample), or (row, -1) of beams

    def expect(self, group: Group) -> int:
        """Take note of a group's requests; return how many results they will have."""
        self._conversations |= group.conversations
        count = 0
        for request in group.requests:
            if request.row_index in group.conversations:
                self._samples_left[request.row_index] = len(request.samples)
            count += len(request.samples) * self._num_turns(request.row_index)
        return count

    def on_finished(self, sequence: Sequence) -> Request | None:
        """Take a finished sequence's answer; return the request of its conversation's next turn, if it has one."""
        request, config = sequence.request, self._job.config
        result = Result(
            request.row_index,
            sequence.sample_index,
            request.turn_index,
            response=sequence.text,
            token_ids=sequence.generated_token_ids if config.token_ids else None,
            finish_reason=sequence.finish_reason or "length",
            stop_reason=None if sequence.stop_reason is None else str(sequence.stop_reason),
            num_prompt_tokens=request.num_prompt_tokens,
            num_truncated_tokens=request.num_truncated_tokens,
            num_cached_tokens=sequence.num_cached_tokens if config.cached_tokens else 0,
            num_generated_tokens=sequence.num_generated_tokens,
            score=sequence.score,
            seed=request.seed,
        )
        if request.params.beam_width > 1:
            self._collect((request.row_index, -1), [result], request.params.n)
            return None
        key = (request.row_index, sequence.sample_index)
        conversation = self._conversation(*key)
        if conversation is None:
            self._keep([result])
            return None
        following = None
        results = [result]
        try:
            following = self._next_turn(conversation, sequence)
        except RowError as error:
            results += self._failed_turns(request, sequence.sample_index, request.turn_index + 1, error, None)
        self._collect(key, results, conversation.num_turns)
        return following

    def on_error(self, request: Request, sample_index: int, error: RowError) -> None:
        """Take the end of a sample that can't be answered, or not any further."""
        self._conversation(request.row_index, sample_index)
        results = self._failed_turns(request, sample_index, request.turn_index, error, request.num_prompt_tokens)
        if request.params.beam_width > 1:
            self._collect((request.row_index, -1), results, request.params.n)
        else:
            self._collect((request.row_index, sample_index), results, self._num_turns(request.row_index))

    def _failed_turns(
        self, request: Request, sample_index: int, turn_index: int, error: RowError, num_prompt_tokens: int | None
    ) -> list[Result]:
        """Return the results of a turn that can't be answered and of all that would have followed."""
        facts: dict[str, Any] = {"error_code": error.code, "error": error.message, "num_prompt_tokens": num_prompt_tokens}
        turns = range(turn_index, self._num_turns(request.row_index))
        return [Result(request.row_index, sample_index, turn, **facts) for turn in turns]

    def _num_turns(self, row_index: int) -> int:
        conversation = self._conversations.get(row_index)
        return 1 if conversation is None else conversation.num_turns

    def _collect(self, key: tuple[int, int], results: list[Result], wanted: int) -> None:
        """Hold results back until all that belong together are there."""
        held = self._together.setdefault(key, [])
        held += results
        if len(held) == wanted:
            self._keep(self._together.pop(key))
            if self._going_on.pop(key, None) is not None:
                self._samples_left[key[0]] -= 1
                if not self._samples_left[key[0]]:
                    del self._samples_left[key[0]], self._conversations[key[0]]

    def _conversation(self, row_index: int, sample_index: int) -> Any:
        """Return a sample's own conversation; None for a row without turns."""
        key = (row_index, sample_index)
        if key not in self._going_on and row_index in self._conversations:
            self._going_on[key] = self._conversations[row_index].fork()
        return self._going_on.get(key)

    def _next_turn(self, conversation: Any, sequence: Sequence) -> Request | None:
        """Return the request of a conversation's next turn; None after the last.

        Raises:
            RowError: it can't be rendered, or leaves no room.
        """
        request, answer_ids = sequence.request, sequence.generated_token_ids
        if sequence.finish_reason == "stop" and not isinstance(sequence.stop_reason, str):
            answer_ids = answer_ids[:-1]  # the closing EOS or stop token is not part of the answer's text
        prompt = conversation.next_prompt(sequence.text or "", list(request.prompt_token_ids), answer_ids)
        if prompt is None:
            return None
        later_turns = conversation.num_turns - conversation.num_asked
        return self._job.opened.make_request(
            request.row_index,
            prompt,
            request.params,
            turn_index=request.turn_index + 1,
            cache_salt=request.cache_salt,
            later_tokens=max(0, request.max_kv_tokens - len(prompt) - request.params.max_tokens) if later_turns else 0,
            later_turns=later_turns,
        )
