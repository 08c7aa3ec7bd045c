"""What admission expects of a row, measured on the scheduler without a model: recomputed tokens, pool use and steps.

    python recipes/benchmarks/admission.py

512 rows of 100 prompt tokens and up to 500 more through 2,000 blocks of 16, up to 256 rows in flight; once all rows run to
their limit, once each ends at a random length (seed 0). One JSON line for each share of the remaining tokens that a row is
expected to get.
"""

from __future__ import annotations

import json

import numpy as np

from pagedgen.engine.block_manager import BlockManager
from pagedgen.engine.scheduler import Scheduler
from pagedgen.request import Request, Sequence
from pagedgen.sampling_params import SamplingParams

NUM_ROWS, PROMPT_LEN, MAX_TOKENS, NUM_BLOCKS = 512, 100, 500, 2000


def simulate(share: float, ends_early: bool) -> dict:
    """Run all rows through the scheduler, one made-up token a step each, and return the JSON line's content."""
    rng = np.random.default_rng(0)
    blocks = BlockManager(NUM_BLOCKS, 16)
    scheduler = Scheduler(blocks, max_num_seqs=256, max_num_batched_tokens=8192, expected_share=share)
    params = SamplingParams(max_tokens=MAX_TOKENS)
    lengths = rng.integers(1, MAX_TOKENS + 1, NUM_ROWS) if ends_early else np.full(NUM_ROWS, MAX_TOKENS)
    for row in range(NUM_ROWS):
        scheduler.add(Sequence(Request(row, [row] * PROMPT_LEN, params, MAX_TOKENS, frozenset(), 0)))
    used, steps = [], 0
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        steps += 1
        if scheduler.num_waiting:
            used.append(blocks.num_used_blocks / NUM_BLOCKS)
        scheduler.advance(step)
        for sequence in step.sequences:
            if sequence.num_uncomputed_tokens == 0:
                sequence.token_ids.append(0)
                if sequence.num_generated_tokens == lengths[sequence.request.row_index]:
                    scheduler.finish(sequence)
    useful = NUM_ROWS * PROMPT_LEN + int(lengths.sum())
    return {
        "benchmark": "admission",
        "expected_share": share,
        "rows_end": "early" if ends_early else "at their limit",
        "recomputed_share": round(scheduler.num_recomputed_tokens / useful, 3),
        "pool_use_before_drain": round(sum(used) / len(used), 2),
        "steps": steps,
        "preemptions": scheduler.num_preemptions,
        "seed": 0,
    }


def main() -> None:
    for ends_early in (False, True):
        for share in (0.0, 0.5, 0.75, 1.0):
            print(json.dumps(simulate(share, ends_early)))


if __name__ == "__main__":
    main()
