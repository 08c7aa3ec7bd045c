"""What a beam search does to the scheduler's sequences and their blocks. NumPy only, as what it searches with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..request import Sequence
from .block_manager import BlockManager
from .scheduler import Scheduler

if TYPE_CHECKING:
    import numpy as np

    from ..sampling.beam import BeamGroup


def advance_search(
    beam: Sequence, log_probs: np.ndarray, token_ids: np.ndarray, scheduler: Scheduler, blocks: BlockManager
) -> bool:
    """Take the continuations of a beam that was computed, see `BeamGroup.offer`; return True when its row's search has ended.

    With those of its row's last beam, all go on: each gets its parent's blocks and tokens and a new token.
    """
    group: BeamGroup = beam.beam_group
    if group.is_suspended:  # the prompt was computed again; its logits are known to lead to these beams
        group.resume(scheduler.fork(beam))
        return False
    if beam not in group.beams:
        return False  # the search has ended by another beam
    if not group.offer(beam, log_probs, token_ids):
        return False
    selection = group.select()
    if selection is None:
        return True
    if len(group.beams) == 1:
        group.beams += scheduler.fork(beam)
    else:
        blocks.reorder(group.beams, selection.parents)
    group.extend(selection)
    return False


def end_search(group: BeamGroup, scheduler: Scheduler) -> None:
    """Give back what a search's beams hold."""
    for member in group.beams:
        scheduler.finish(member)
    group.beams = []
