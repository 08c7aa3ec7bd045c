"""Whether a waiting row may start: does the pool hold it together with what the running rows will still grow to? NumPy only.

For a grid of moments ahead (in tokens each row gets until then) the expected use of the pool is added up: each row's own blocks
then, times the chance that it is still there; what rows share counts once. A row is admitted while the largest of these sums,
with a margin for chance, fits. Where all lengths are known this is the peak of what is to come itself.

Rows that start together also end together: they fill the pool at their end only, and leave it empty for the next. So the later
the moment, the less of the pool may be taken then (`_STAGGER` less when the last running row is to end): the first rows
start in smaller numbers, others join them while they grow, and from then on there are rows of every age.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..request import Sequence
from .block_manager import BlockManager
from .output_lengths import OutputLengths, has_exact_length

_MOMENTS = np.unique(np.concatenate([np.arange(4), np.geomspace(4, 1 << 17, 44).astype(np.int64)]))
_EXACT_MOMENTS = 128
_STAGGER = 0.35
_HALF_A_BLOCK = 0.5
_WAIT_CALLS = 4  # after a refusal, calls until it is asked again although no block came free


class Admission:
    """Forecasts the pool's use for one scheduler."""

    def __init__(self, blocks: BlockManager, *, reserve_blocks: int, deviations: float = 1.25, is_ample: bool = False):
        """`reserve_blocks` stay free. `deviations`: the margin, in standard deviations of the expected use. `is_ample`: as many
        rows as ever run at once fit, however long they get, so none has to wait for room.
        """
        self._blocks = blocks
        self._is_ample = is_ample
        self._reserve = reserve_blocks
        self._deviations = deviations
        self.lengths = OutputLengths()
        self._after = _MOMENTS
        self._mean = self._variance = np.zeros(0)
        self._fixed = 0
        self._refused: tuple[int, int] | None = None

    def is_futile(self) -> bool:
        """Return True shortly after a refusal, while nothing has changed for the better."""
        if self._refused is None:
            return False
        available, calls = self._refused
        if calls and self._blocks.num_available_blocks <= available:
            self._refused = (available, calls - 1)
            return True
        self._refused = None
        return False

    def begin(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Forecast the running rows' use; `waiting` are some of those that may be asked for."""
        if self._is_ample:
            return
        rows = list(running)
        self.lengths.refresh(rows)
        self._after = _moments([*rows, *waiting])
        self._mean, self._variance = np.zeros(len(self._after)), np.zeros(len(self._after))
        if rows:
            self._mean, self._variance = self._use(rows)
        # Blocks that rows share are there as long as anyone holds one.
        own_now = sum(max(0, len(s.block_table) - s.num_shared_blocks) for s in rows)
        self._fixed = self._blocks.num_used_blocks - own_now

    def fits(self, sequence: Sequence, new_shared_blocks: int, kept_blocks: int) -> bool:
        """Return True when a row is expected to fit beside those counted so far.

        `new_shared_blocks`: blocks of its beginning that are not in use yet; `kept_blocks`: idle blocks that must stay.
        """
        if self._is_ample:
            return True
        mean, variance = self._use([sequence])
        use = self._mean + mean + self._deviations * np.sqrt(self._variance + variance)
        room = self._blocks.num_blocks - self._reserve - kept_blocks - self._fixed - new_shared_blocks
        end = self._after[self._mean + mean > _HALF_A_BLOCK].max(initial=1)
        if (use <= room * (1 - _STAGGER * np.minimum(self._after / end, 1))).all():
            return True
        self._refused = (self._blocks.num_available_blocks, _WAIT_CALLS)
        return False

    def admitted(self, sequence: Sequence, new_shared_blocks: int) -> None:
        """Count a row that was just admitted."""
        if self._is_ample:
            return
        self._fixed += new_shared_blocks
        mean, variance = self._use([sequence])
        self._mean = self._mean + mean
        self._variance = self._variance + variance

    def _use(self, rows: list[Sequence]) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance, (K,) each, of the rows' own blocks at each moment; samples not yet forked included."""
        size = self._blocks.block_size
        tokens = np.array([len(s.token_ids) for s in rows])[:, None]
        shared = np.array([s.num_shared_blocks for s in rows])[:, None]
        pending = np.array([s.num_pending_samples for s in rows])[:, None]
        prompts = np.array([s.num_prompt_tokens // size for s in rows])[:, None]
        blocks = -(-(tokens + self._after) // size)
        own = np.maximum(blocks - shared, 0)
        forked = np.maximum(blocks - np.maximum(shared, prompts), 0)  # a sample shares its prompt's full blocks
        alive = self.lengths.survival(rows, self._after)
        chance = alive * (1 - alive)
        return (alive * (own + pending * forked)).sum(0), (chance * (own**2 + pending * forked**2)).sum(0)


def _moments(rows: list[Sequence]) -> np.ndarray:
    """Return the moments to look at, (K,) tokens ahead: rows of known length make peaks just before they end."""
    exact = [s.request.max_tokens - s.num_generated_tokens - 1 for s in rows if has_exact_length(s.request)]
    if not exact:
        return _MOMENTS
    ends = np.unique(np.maximum(exact, 0))
    if len(ends) > _EXACT_MOMENTS:
        ends = ends[np.linspace(0, len(ends) - 1, _EXACT_MOMENTS).astype(np.int64)]
    return np.union1d(ends, _MOMENTS)  # rows that are not looked at may end later
