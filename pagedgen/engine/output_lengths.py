"""How long rows will get, learned from those that have ended: survival curves. NumPy only.

A row's curve comes from the rows most like it that have been seen often enough: those of its group, else those of about its
prompt's length, else all. Rows in flight count for as far as they have come (they are censored, not left out: the first to end
are the short ones), and so do rows that their limit ended. Before anything was seen, a row ends anywhere up to its limit.

The estimator: Kaplan and Meier 1958, with a few made-up rows of even lengths in the place of what is not known yet.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np

from ..request import Request, Sequence

_SEEN_ENOUGH = 16  # rows of a kind that have ended, before it has a curve of its own
_MADE_UP_ROWS = 4.0
_MOST_KINDS = 4096
_ALL = "all"
# Generated tokens: bins of one token at first, later of about 6 %.
EDGES = np.unique(np.concatenate([np.arange(17), np.geomspace(17, 1 << 20, 190).astype(np.int64)]))


def has_exact_length(request: Request) -> bool:
    """Return True when nothing but its limit can end a row."""
    params = request.params
    return not (request.eos_token_ids or params.stop or params.stop_token_ids or request.later_tokens)


class OutputLengths:
    """Counts of generated tokens, by kind of row."""

    def __init__(self) -> None:
        self._ended: dict[Hashable, np.ndarray] = {}  # rows that ended by themselves, by bin
        self._cut: dict[Hashable, np.ndarray] = {}  # rows that their limit ended
        self._seen: dict[Hashable, int] = {}
        self._curves: dict[tuple[Hashable, int], np.ndarray] = {}
        self._in_flight: dict[Hashable, np.ndarray] = {}
        self._num_seen = self._num_at_curves = 0

    def observe(self, sequence: Sequence) -> None:
        """Take note of a row that has ended."""
        bin_ = int(np.searchsorted(EDGES, sequence.num_generated_tokens, side="right")) - 1
        counts = self._cut if sequence.finish_reason == "length" else self._ended
        for kind in self._kinds(sequence):
            if kind not in self._seen and len(self._seen) >= _MOST_KINDS:
                continue
            self._seen[kind] = self._seen.get(kind, 0) + 1
            counts.setdefault(kind, np.zeros(len(EDGES)))[bin_] += 1
        self._num_seen += 1

    def refresh(self, running: Iterable[Sequence]) -> None:
        """Draw the curves anew if enough rows have ended since the last time; `running` are in flight."""
        if self._num_seen < self._num_at_curves + 1 + self._num_at_curves // 16:
            return
        self._num_at_curves = self._num_seen
        self._curves.clear()
        self._in_flight.clear()
        for sequence in running:
            bin_ = int(np.searchsorted(EDGES, sequence.num_generated_tokens, side="right")) - 1
            for kind in self._kinds(sequence):
                if kind in self._seen:
                    self._in_flight.setdefault(kind, np.zeros(len(EDGES)))[bin_] += 1

    def survival(self, rows: list[Sequence], after: np.ndarray) -> np.ndarray:
        """Return the share of rows like each that go on for `after` (K,) tokens more than it has: (num_rows, K)."""
        has = np.array([s.num_generated_tokens for s in rows])
        limits = np.array([s.request.max_tokens + s.request.later_tokens for s in rows])
        then = has[:, None] + after[None, :]
        alive = (then < limits[:, None]).astype(np.float64)
        alike: dict[tuple[Hashable, int], list[int]] = {}
        for i, sequence in enumerate(rows):
            kinds = self._kinds(sequence)
            if kinds:
                kind = next((k for k in kinds if self._seen.get(k, 0) >= _SEEN_ENOUGH), _ALL)
                alike.setdefault((kind, int(limits[i])), []).append(i)
        for (kind, limit), members in alike.items():
            curve = self._curve(kind, limit)
            now = np.interp(has[members], EDGES, curve)[:, None]
            alive[members] *= np.minimum(1.0, np.interp(then[members], EDGES, curve) / np.maximum(now, 1e-9))
        return alive

    def _curve(self, kind: Hashable, limit: int) -> np.ndarray:
        """Return the share of rows of a kind that get more tokens than each edge says."""
        curve = self._curves.get((kind, limit))
        if curve is None:
            nothing = np.zeros(len(EDGES))
            ended = self._ended.get(kind, nothing)
            reached = ended + self._cut.get(kind, nothing) + self._in_flight.get(kind, nothing)
            at_risk = np.cumsum(reached[::-1])[::-1]
            widths = np.diff(EDGES, append=EDGES[-1] + 1)
            even = np.minimum(1.0, widths / np.maximum(limit - EDGES, 1))
            hazard = (ended + _MADE_UP_ROWS * even) / (at_risk + _MADE_UP_ROWS)
            curve = np.concatenate([[1.0], np.cumprod(1 - hazard)[:-1]])
            self._curves[kind, limit] = curve
        return curve

    def _kinds(self, sequence: Sequence) -> tuple[Hashable, ...]:
        """Return the kinds a row belongs to, the narrowest first; none when its length is known."""
        if sequence.length_kinds is None:
            kinds: tuple[Hashable, ...] = (sequence.num_prompt_tokens.bit_length(), _ALL)
            if 0 < sequence.num_shared_blocks <= len(sequence.digests):
                kinds = (sequence.digests[sequence.num_shared_blocks - 1], *kinds)
            sequence.length_kinds = () if has_exact_length(sequence.request) else kinds
        return sequence.length_kinds
