"""How time grows: a whole run's with its rows, and a decode step's with the rows in it.

    python recipes/benchmarks/scaling.py smollm2-135m [--rows 32] [--dtype float32]

Prompts are random tokens, 20 to 120 of them, and nothing is shared. One JSON line for runs of 1, 4 and 16 times --rows, each
the median of two in turn: `ms_per_row` is level where time is linear. Then one for each number of decoding rows, a step's time
being the difference between runs of few and of more tokens: `growth` beside `more_rows`, both against the line before, shows
cliffs as steps that grow by more than their rows.
"""

from __future__ import annotations

import argparse
import json
import random
from statistics import median
from time import perf_counter

from pagedgen import LLM, SamplingParams

FEW, MORE = 4, 20  # tokens of the runs whose difference is a step's time
STEP_ROWS = (1, 2, 4, 6, 8, 9, 12, 16, 24, 32, 48, 64, 65, 96, 128, 129, 192, 256)


def seconds(llm: LLM, rng: random.Random, num_rows: int, prompt: tuple[int, int], max_tokens: int) -> float:
    """Return the time of one run of rows with prompts of random length and tokens."""
    vocab = len(llm.get_tokenizer())
    rows = [{"prompt_token_ids": [rng.randrange(vocab) for _ in range(rng.randint(*prompt))]} for _ in range(num_rows)]
    start = perf_counter()
    llm.generate(rows, SamplingParams(max_tokens=max_tokens, ignore_eos=True), use_tqdm=False)
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    llm, rng = LLM(args.model, dtype=args.dtype), random.Random(0)
    seconds(llm, rng, 8, (20, 120), FEW)
    sizes = [args.rows * factor for factor in (1, 4, 16)]
    runs: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(2):
        for size in sizes:
            runs[size].append(seconds(llm, rng, size, (20, 120), 24))
    for size, times in runs.items():
        line = {"rows": size, "s": round(median(times), 2), "ms_per_row": round(median(times) / size * 1e3, 1)}
        print(json.dumps({"benchmark": "run_against_rows"} | line), flush=True)
    before: tuple[int, float] | None = None
    for num_rows in STEP_ROWS:
        times = [seconds(llm, rng, num_rows, (20, 20), MORE) - seconds(llm, rng, num_rows, (20, 20), FEW) for _ in range(3)]
        step = median(times) / (MORE - FEW)
        line = {"rows": num_rows, "step_ms": round(step * 1e3, 1)}
        if before:
            line |= {"more_rows": round(num_rows / before[0], 2), "growth": round(step / before[1], 2)}
        print(json.dumps({"benchmark": "step_against_rows"} | line), flush=True)
        before = num_rows, step


if __name__ == "__main__":
    main()
