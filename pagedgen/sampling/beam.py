"""Beam search for one row: which beams go on, which are finished, when to stop. NumPy only; knows nothing of blocks.

The rules, and the meaning of `length_penalty` and `early_stopping`, are those of transformers' `generate` (fp32 scores): the
(1 + number of ending tokens) × width best continuations of all beams are looked at; those that end are finished if they are
among the first `width`, the best `width` others go on. A finished beam's score is the sum of its tokens' log-probabilities over
its generated length to the power of `length_penalty`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..request import Sequence


@dataclass(frozen=True)
class Hypothesis:
    """A finished beam: what it generated and its score."""

    token_ids: list[int]
    score: float


@dataclass(frozen=True)
class Selection:
    """The beams that go on: beam i is beam `parents[i]` plus `tokens[i]`."""

    parents: list[int]
    tokens: list[int]


class BeamGroup:
    """A row's search. `beams` holds its sequences, best first: one while the prompt is computed, then `width`.

    Beams that are out of step (some were computed, others had no room) wait: the best continuations of each are kept here
    until all have theirs.
    """

    def __init__(self, leader: Sequence):
        request = leader.request
        self.request = request
        self.width = request.params.beam_width
        self.ending_token_ids = request.eos_token_ids | frozenset(request.params.stop_token_ids)
        self.num_candidates = max(2, 1 + len(self.ending_token_ids)) * self.width
        self.beams = [leader]
        self.finished: list[Hypothesis] = []  # best first, at most `width`
        self._scores = np.zeros(1, dtype=np.float32)
        self._num_generated = 0
        self._candidates: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._suspended: list[tuple[list[int], int]] | None = None

    def suspend(self) -> Sequence:
        """Go back to one sequence that holds the prompt; return it. `resume` takes the beams up again."""
        if self._num_generated and self._suspended is None:
            self._suspended = [(beam.token_ids, beam.num_seen_tokens) for beam in self.beams]
        leader = self.beams[0]
        self.beams = [leader]
        self._candidates.clear()
        leader.token_ids = list(self.request.prompt_token_ids)
        leader.num_computed_tokens = min(leader.num_computed_tokens, len(leader.token_ids))
        leader.num_seen_tokens = min(leader.num_seen_tokens, len(leader.token_ids))
        leader.num_pending_samples = self.width - 1
        return leader

    @property
    def is_suspended(self) -> bool:
        return self._suspended is not None

    def resume(self, children: list[Sequence]) -> None:
        """Go on with the beams as they were, on sequences that were just forked from the prompt's."""
        assert self._suspended is not None
        self.beams += children
        for beam, (token_ids, num_seen) in zip(self.beams, self._suspended, strict=True):
            beam.token_ids, beam.num_seen_tokens = token_ids, num_seen
        self._suspended = None

    def offer(self, beam: Sequence, log_probs: np.ndarray, token_ids: np.ndarray) -> bool:
        """Take one beam's best continuations, (num_candidates,) fp32 and int64, best first; return True when all are there."""
        self._candidates[id(beam)] = (log_probs, token_ids)
        return len(self._candidates) == len(self.beams)

    def select(self) -> Selection | None:
        """Choose who goes on; None when the search has ended and `finished` holds its answers.

        `beams` must have become `width` sequences, and each have got its token, before the next call.
        """
        candidates = [self._candidates[id(beam)] for beam in self.beams]
        self._candidates.clear()
        totals = np.concatenate([values + score for (values, _), score in zip(candidates, self._scores, strict=True)])
        tokens = np.concatenate([ids for _, ids in candidates])
        parents = np.repeat(np.arange(len(candidates)), [len(ids) for _, ids in candidates])
        best = np.argsort(-totals, kind="stable")[: self.num_candidates]
        totals, tokens, parents = totals[best], tokens[best], parents[best]
        length = self._num_generated + 1
        ends = np.isin(tokens, list(self.ending_token_ids)) | (length >= self.request.max_tokens)

        for place in range(min(self.width, len(totals))):
            if ends[place]:
                self._finish(int(parents[place]), int(tokens[place]), totals[place], length)
        self.finished.sort(key=lambda h: -h.score)  # stable: the older of equals stays first
        del self.finished[self.width :]

        going = np.flatnonzero(~ends)[: self.width]
        self._num_generated = length
        if not len(going) or self._can_stop(float(totals[going[0]])):
            return None
        self._scores = totals[going]
        return Selection(parents[going].tolist(), tokens[going].tolist())

    def extend(self, selection: Selection) -> None:
        """Give each beam its parent's tokens and its own new one."""
        before = [beam.token_ids for beam in self.beams]
        for beam, parent, token in zip(self.beams, selection.parents, selection.tokens, strict=True):
            beam.token_ids = [*before[parent], token]

    def _finish(self, parent: int, token: int, total: np.float32, length: int) -> None:
        score = float(total) / float(length) ** self.request.params.length_penalty
        generated = self.beams[parent].token_ids[self.request.num_prompt_tokens :]
        self.finished.append(Hypothesis([*generated, token], score))

    def _can_stop(self, best_total: float) -> bool:
        """Return True when no running beam is expected to beat the finished ones."""
        if len(self.finished) < self.width:
            return False
        params = self.request.params
        if params.early_stopping is True:
            return True
        length = self._num_generated
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self.request.max_tokens
        return best_total / float(length) ** params.length_penalty <= self.finished[-1].score
