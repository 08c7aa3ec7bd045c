"""When a row ends, and why: a stop string, EOS or a stop token id, max_tokens."""

from __future__ import annotations

from typing import Any

from ..request import Sequence
from .beam import BeamGroup
from .detokenize import IncrementalDetokenizer, decode


class _StopStringSearch:
    """Looks for stop strings in a growing completion, across token borders."""

    def __init__(self, tokenizer: Any, sequence: Sequence):
        params = sequence.request.params
        self._stops = params.stop
        self._overlap = max(map(len, params.stop)) - 1
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._tail = ""

    def feed(self, token_ids: list[int]) -> bool:
        """Return True when a stop string has probably appeared; the full text decides."""
        piece = self._detokenizer.feed(token_ids)
        if not piece:
            return False
        window = self._tail + piece
        self._tail = window[len(window) - min(len(window), self._overlap) :]
        return any(stop in window for stop in self._stops)


class StopChecker:
    """Decide after each token whether a row ends, and make its text when it does."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def check(self, sequence: Sequence) -> bool:
        """Set finish_reason, stop_reason and text of a sequence that just got a token; return True when it has ended.

        An EOS on the last allowed token counts as stop. A stop string found in the completion cuts the text before it (after
        it with include_stop_str_in_output); the token ids keep every id.
        """
        request, params = sequence.request, sequence.request.params
        generated = sequence.num_generated_tokens
        token = sequence.token_ids[-1]
        ends = generated >= params.min_tokens and (token in request.eos_token_ids or token in params.stop_token_ids)
        last = generated >= request.max_tokens
        if params.stop and self._stop_string_ends(sequence, certain=ends or last):
            return True
        if ends:
            return self._finish(sequence, "stop", None if token in request.eos_token_ids else token)
        if last:
            return self._finish(sequence, "length", None)
        return False

    def beam_answers(self, group: BeamGroup) -> list[Sequence]:
        """Return a finished search's best beams, as many as were asked for, as sequences that have ended."""
        answers = []
        for rank, hypothesis in enumerate(group.finished[: group.request.params.n]):
            answer = Sequence(group.request, rank)
            answer.token_ids += hypothesis.token_ids
            answer.score = hypothesis.score
            last = hypothesis.token_ids[-1]
            ends = last in group.ending_token_ids
            stop_reason = last if ends and last not in group.request.eos_token_ids else None
            self._finish(answer, "stop" if ends else "length", stop_reason)
            answers.append(answer)
        return answers

    def _stop_string_ends(self, sequence: Sequence, *, certain: bool) -> bool:
        """Return True when a stop string ends the row. `certain` looks even where the running search saw nothing: text that
        waits for the rest of a character is not searched until then."""
        params = sequence.request.params
        if sequence.text_checker is None:
            sequence.text_checker = _StopStringSearch(self._tokenizer, sequence)
        search = sequence.text_checker
        assert isinstance(search, _StopStringSearch)
        token_ids = sequence.generated_token_ids
        found = search.feed(token_ids)
        if len(token_ids) < params.min_tokens or not (found or certain):
            return False
        text = decode(self._tokenizer, token_ids, skip_special_tokens=params.skip_special_tokens)
        exempt = 0  # text that was complete before min_tokens can't end the row afterwards
        if params.min_tokens > 1:
            before = token_ids[: params.min_tokens - 1]
            exempt = len(decode(self._tokenizer, before, skip_special_tokens=params.skip_special_tokens))
        hits = [(text.find(stop, max(0, exempt - len(stop) + 1)), stop) for stop in params.stop]
        hits = [(at, stop) for at, stop in hits if at >= 0]
        if not hits:
            return False
        at, stop = min(hits)
        sequence.text = text[: at + len(stop)] if params.include_stop_str_in_output else text[:at]
        sequence.finish_reason, sequence.stop_reason = "stop", stop
        return True

    def _finish(self, sequence: Sequence, reason: str, stop_reason: int | None) -> bool:
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        ids = sequence.generated_token_ids
        if reason == "stop":
            ids = ids[:-1]  # the closing EOS or stop token is in the ids, not in the text
        sequence.text = decode(self._tokenizer, ids, skip_special_tokens=sequence.request.params.skip_special_tokens)
        return True
