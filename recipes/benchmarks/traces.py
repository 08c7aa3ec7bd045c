"""The scheduler on real traces, in simulation: how full the pool is, what is computed twice, what common beginnings save.

    python recipes/benchmarks/traces.py azure2023_conv.csv --pool-gib 20 --pool-gib 80
    python recipes/benchmarks/traces.py mooncake_fast25_conversation.jsonl --pool-gib 40

An 8B-class model (32 layers, 8 KV heads of 128, 16 bits: 128 KiB a token) on a device of 2,000 GB/s and 600 TFLOP/s: a step
takes its GEMMs (weights read once, or 16 GFLOP a token, whichever is more) and its attention (K/V read). Arrival times are not
used: this is an offline job. Policies:

    ours          output lengths unknown, learned while rows end; groups together; prompts spread over steps
    at once       the same, with prompts in steps as large as they come
    ours, known   the same with each row's length known, longest first
    first-come    in the order of the trace, room for prompt and most output reserved, nothing shared
    lru           (traces with hash_ids) in the order of the trace, admission as in "at once", cached blocks dropped by last use

One JSON line each. `bound`: the time of all GEMM and attention work in the fewest steps that the pool allows.
"""

from __future__ import annotations

import argparse
import json
from time import perf_counter
from typing import Any

from pagedgen.engine.admission import Admission
from pagedgen.engine.block_manager import BlockManager
from pagedgen.engine.feed import ListFeed
from pagedgen.engine.order import PlannedFeed
from pagedgen.engine.scheduler import ScheduledStep, Scheduler
from pagedgen.engine.simulation import simulate
from pagedgen.request import Request, Sequence
from pagedgen.rows.traces import HASHED_TOKENS, read_trace
from pagedgen.sampling_params import SamplingParams

BYTES_PER_TOKEN = 128 * 1024
WEIGHTS_BYTES, READ_PER_S = 16e9, 2e12
FLOP_PER_TOKEN, FLOP_PER_S = 16e9, 600e12
# Of a step whose arithmetic takes as long as reading the weights.
KNEE_TOKENS = int(WEIGHTS_BYTES / READ_PER_S * FLOP_PER_S / FLOP_PER_TOKEN)
MAX_ROWS = 4096
MAX_TOKENS = 2048


class Roofline:
    """What a step takes on the device above."""

    def step_s(self, step: ScheduledStep, sampled: list[Sequence]) -> float:
        """See `engine.simulation.CostModel`."""
        read = sum(s.num_computed_tokens for s in step.sequences) * BYTES_PER_TOKEN
        return gemm_s(sum(step.num_scheduled_tokens)) + read / READ_PER_S


def gemm_s(num_tokens: float) -> float:
    """Return the seconds of one step's GEMMs."""
    return max(WEIGHTS_BYTES / READ_PER_S, num_tokens * FLOP_PER_TOKEN / FLOP_PER_S)


class WorstCase(Admission):
    """Room for each row's prompt and the most it may get is reserved when it starts."""

    def begin(self, running: Any, waiting: Any) -> None:
        self._reserved = sum(self._most(s) for s in running)

    def fits(self, sequence: Any, new_shared_blocks: int, kept_blocks: int) -> bool:
        return self._reserved + self._most(sequence) <= self._blocks.num_blocks

    def admitted(self, sequence: Any, new_shared_blocks: int) -> None:
        self._reserved += self._most(sequence)

    def _most(self, sequence: Any) -> int:
        return self._blocks.blocks_for(sequence.request.max_kv_tokens)


def run(rows: list[tuple[Any, int]], policy: str, num_blocks: int, block_size: int, budget: int) -> dict[str, Any]:
    """Run one policy and return its line's content."""
    shares = policy != "first-come" and block_size == HASHED_TOKENS
    blocks = BlockManager(num_blocks, block_size, prefix_caching=shares)
    if policy == "lru":  # a server can't know who will come: all blocks are equally wanted
        blocks.cache.users = lambda digest: 1  # type: ignore[method-assign]
    admission = WorstCase(blocks, reserve_blocks=0) if policy == "first-come" else None
    scheduler = Scheduler(
        blocks,
        max_num_seqs=min(MAX_ROWS, budget),
        max_num_batched_tokens=budget,
        keeps_prefixes=shares and policy != "lru",
        knee_tokens=KNEE_TOKENS if policy.startswith("ours") else 0,
        admission=admission,
    )
    scheduler.prefix.enabled = shares
    known = policy == "ours, known"
    params = SamplingParams(max_tokens=MAX_TOKENS)
    requests = []
    for i, (prompt, made) in enumerate(rows):
        most, ends = (max(made, 1), frozenset[int]()) if known else (max(made, MAX_TOKENS), frozenset({2}))
        requests.append(Request(i, prompt, params, most, ends, 0))
    feed: Any = ListFeed(requests)
    sharing = None
    if policy in ("ours", "ours, known", "at once"):
        feed = PlannedFeed(feed, block_size)
        feed.read(lambda: False)
        sharing = feed.sharing
    begin = perf_counter()
    done = simulate(feed, blocks, scheduler, lambda r, _: max(1, rows[r.row_index][1]), Roofline())
    useful = sum(len(p) + n for p, n in rows)
    line = {
        "policy": policy,
        "pool_gib": num_blocks * block_size * BYTES_PER_TOKEN / 2**30,
        "seconds": round(done.seconds, 1),
        "over_bound": round(done.seconds / lower_bound_s(rows, num_blocks, block_size, done.saved_tokens), 3),
        "steps_over_bound": round(done.steps / least_steps(rows, num_blocks, block_size), 3) if not shares else None,
        "pool_use": round(done.use_before_drain, 4),
        "recomputed": round(done.recomputed_tokens / useful, 5),
        "preemptions": done.preemptions,
        "rows_in_flight": round(done.mean_rows, 1),
        "steps": done.steps,
        "simulated_in_s": round(perf_counter() - begin, 1),
    }
    if shares:
        attainable = sharing.attainable_tokens if sharing else None
        line |= {"saved_tokens": done.saved_tokens, "attainable_tokens": attainable, "given_up_too_early": done.evictions}
        line["saved_share"] = round(done.saved_tokens / attainable, 4) if attainable else None
    return line


def lower_bound_s(rows: list[tuple[Any, int]], num_blocks: int, block_size: int, saved_tokens: int) -> float:
    """Return the least time for rows that computes all but `saved_tokens` of their prompts, whatever the order.

    Decode steps at least as many as keep all blocks busy to the last, or as the longest row takes; every token's GEMM, every
    decoded token's reading of its context. (Reading for prompts is left out; so is a pool in which rows share blocks.)
    """
    read = tokens = 0
    for prompt, made in rows:
        life = max(made, 1)
        tokens += len(prompt) + life - 1
        read += (life - 1) * len(prompt) + life * (life - 1) // 2
    steps = max(n for _, n in rows) if saved_tokens else least_steps(rows, num_blocks, block_size)
    gemm = max(steps * gemm_s(1), (tokens - saved_tokens) * FLOP_PER_TOKEN / FLOP_PER_S)
    return gemm + read * BYTES_PER_TOKEN / READ_PER_S


def least_steps(rows: list[tuple[Any, int]], num_blocks: int, block_size: int) -> float:
    """Return the steps that keep all blocks busy to the last, or that the longest row takes, whichever is more."""
    area = sum(-(-(len(prompt) + t) // block_size) for prompt, made in rows for t in range(max(made, 1)))
    return max(max(n for _, n in rows), area / num_blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--pool-gib", type=float, action="append", required=True)
    parser.add_argument("--rows", type=int, help="only the first so many")
    parser.add_argument("--budget", type=int, default=16_384, help="tokens in a step")
    parser.add_argument("--policy", action="append", help="only this one, and others given")
    args = parser.parse_args()
    rows = list(read_trace(args.trace, args.rows))
    hashed = args.trace.endswith(".jsonl")
    block_size = HASHED_TOKENS if hashed else 16
    policies = args.policy or ["ours", "at once", "ours, known", *(["lru"] if hashed else []), "first-come"]
    for gib in args.pool_gib:
        num_blocks = int(gib * 2**30 / BYTES_PER_TOKEN / block_size)
        for policy in policies:
            line = run(rows, policy, num_blocks, block_size, args.budget)
            print(json.dumps({"benchmark": "traces", "trace": args.trace, "budget": args.budget, **line}), flush=True)


if __name__ == "__main__":
    main()
