"""What a step costs on the host besides the model: block manager and scheduler, and packing beside them.

    python recipes/benchmarks/host_cost.py

Rows of a common beginning of 256 tokens and 256 of their own decode with room for all, then in a pool 10 % too small, so that
rows are preempted, swapped and admitted again. Medians over steps, in milliseconds; one JSON line for each number of rows.
`schedule_ms` is allocator + scheduler (`schedule` and `advance`), `pack_ms` building the batch. `growth` compares a row's cost
with the line before: 1.0 is linear.
"""

from __future__ import annotations

import json
from statistics import median
from time import perf_counter

from pagedgen.engine.admission import Admission
from pagedgen.engine.batch import BlockTableArray, build_batch
from pagedgen.engine.block_manager import BlockManager
from pagedgen.engine.scheduler import Scheduler
from pagedgen.request import Request, Sequence
from pagedgen.sampling_params import SamplingParams

BLOCK_SIZE, PREFIX_LEN, OWN_LEN, STEPS = 32, 256, 256, 200


class EagerAdmission(Admission):
    """All rows at once, though they must evict each other when they grow."""

    def fits(self, sequence: Sequence, new_shared_blocks: int, kept_blocks: int) -> bool:
        return True


def measure(num_rows: int, pool_share: float) -> dict[str, float]:
    """Decode rows through the scheduler, one made-up token a step each, and return the medians of the steps' costs."""
    length = PREFIX_LEN + OWN_LEN
    own_blocks = -(-(OWN_LEN + STEPS) // BLOCK_SIZE)
    num_blocks = PREFIX_LEN // BLOCK_SIZE + int(pool_share * num_rows * own_blocks)
    blocks = BlockManager(num_blocks, BLOCK_SIZE, host_blocks=num_blocks)
    admission = EagerAdmission(blocks, reserve_blocks=0)
    scheduler = Scheduler(blocks, max_num_seqs=num_rows, max_num_batched_tokens=num_rows * length, admission=admission)
    tables = BlockTableArray(num_rows)
    params = SamplingParams(max_tokens=STEPS)
    for row in range(num_rows):
        tokens = list(range(PREFIX_LEN)) + [1000 + row] * OWN_LEN
        scheduler.add(Sequence(Request(row, tokens, params, STEPS, frozenset(), 0)))
    schedule_s: list[float] = []
    pack_s: list[float] = []
    rows: list[int] = []
    while scheduler.has_unfinished:
        start = perf_counter()
        step = scheduler.schedule()
        scheduled = perf_counter()
        blocks.take_moves()
        tables.update(scheduler.running)
        batch = build_batch(step, tables, BLOCK_SIZE)
        packed = perf_counter()
        scheduler.advance(step)
        advanced = perf_counter()
        if step.num_decodes > 0.8 * num_rows:
            schedule_s.append(scheduled - start + advanced - packed)
            pack_s.append(packed - scheduled)
            rows.append(len(batch.seq_lens_kv))
        for sequence in step.sequences:
            if not sequence.num_uncomputed_tokens:
                sequence.token_ids.append(7)
                if sequence.num_generated_tokens == STEPS:
                    scheduler.finish(sequence)
    return {
        "schedule_ms": round(1e3 * median(schedule_s), 3),
        "worst_schedule_ms": round(1e3 * max(schedule_s), 3),
        "pack_ms": round(1e3 * median(pack_s), 3),
        "rows_in_step": median(rows),
        "preemptions": scheduler.num_preemptions,
        "moved_blocks": sum(blocks.pool.num_moves.values()),
    }


def main() -> None:
    for pool_share in (1.0, 0.9):
        before: float | None = None
        for num_rows in (64, 128, 256, 512, 1024):
            line = measure(num_rows, pool_share)
            per_row = line["schedule_ms"] / line["rows_in_step"]
            growth = None if before is None else round(per_row / before, 2)
            before = per_row
            print(json.dumps({"benchmark": "host_cost", "rows": num_rows, "pool": pool_share, **line, "growth": growth}))


if __name__ == "__main__":
    main()
