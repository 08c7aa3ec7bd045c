"""What 8-bit weights and 8-bit K/V cost in quality: perplexity of real text, and greedy tokens that stay the same.

    python recipes/benchmarks/quality.py smollm2-135m TEXT.jsonl [--column prompt] [--rows 64] [--new-tokens 64]

Each row's text is scored in windows of --window tokens and then continued greedily as a prompt, by the model as it is and with
`--quantization int8`, `--kv-cache-dtype int8` and both. Prints a table, and one JSON line a way.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedgen import threads
from pagedgen.config import EngineConfig
from pagedgen.engine.batch import BlockTableArray, build_batch
from pagedgen.engine.engine import Engine
from pagedgen.engine.opened import open_model
from pagedgen.engine.planner import RequestLengths
from pagedgen.engine.scheduler import ScheduledStep
from pagedgen.machine import cpu_name
from pagedgen.request import Request, Sequence
from pagedgen.sampling_params import SamplingParams

WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "weights int8": {"quantization": "int8"},
    "K/V int8": {"kv_cache_dtype": "int8"},
    "both int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
}


def perplexity(engine: Engine, windows: list[list[int]]) -> float:
    """Return exp of the mean negative log-likelihood of each window's tokens after its first."""
    block_size = engine.opened.config.block_size or 1
    total, count = 0.0, 0
    engine.runner.allocate_cache(-(-max(map(len, windows)) // block_size))
    for window in windows:
        sequence = Sequence(Request(0, window, SamplingParams(), 1, frozenset(), 0))
        sequence.block_table = list(range(-(-len(window) // block_size)))
        tables = BlockTableArray(1)
        tables.update([sequence])
        batch = build_batch(ScheduledStep([sequence], [len(window)], 0), tables, block_size)
        logits = engine.runner.run(replace(batch, sample_positions=np.arange(len(window) - 1)))
        chosen = torch.log_softmax(logits.float(), dim=-1).gather(1, torch.tensor(window[1:])[:, None])
        total, count = total - float(chosen.double().sum()), count + len(window) - 1
    engine.runner.release_cache()
    return math.exp(total / count)


def continuations(engine: Engine, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Return each prompt's greedy continuation."""
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    requests = [engine.opened.make_request(i, prompt, params) for i, prompt in enumerate(prompts)]
    done: dict[int, list[int]] = {}

    def finished(sequence: Sequence) -> None:
        done[sequence.request.row_index] = sequence.generated_token_ids

    def failed(request: Request, sample: int, error: Exception) -> None:
        raise SystemExit(f"row {request.row_index}: {error}")

    engine.generate(requests, engine.plan(RequestLengths(requests)), on_finished=finished, on_error=failed)
    return [done[i] for i in range(len(prompts))]


def same_start(a: list[int], b: list[int]) -> int:
    """Return how many tokens two continuations have in common before they part."""
    return next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--column", default="prompt")
    for name, default in (("rows", 64), ("window", 512), ("new-tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    threads.prepare()
    texts = [str(json.loads(line)[args.column]) for line in args.text.read_text(encoding="utf-8").splitlines()][: args.rows]
    print(f"{'':<14}{'perplexity':>12}{'rows as before':>16}{'tokens before':>15}")
    plain: list[list[int]] = []
    for way, settings in WAYS.items():
        engine = Engine(open_model(EngineConfig(args.model, dtype=args.dtype, **settings)))
        prompts = [engine.opened.tokenizer(text)["input_ids"][: args.window] for text in texts]
        value = perplexity(engine, [p for p in prompts if len(p) > 1])
        answers = continuations(engine, prompts, args.new_tokens)
        plain = plain or answers
        same = [same_start(a, b) for a, b in zip(answers, plain, strict=True)]
        rows, tokens = sum(n == args.new_tokens for n in same) / len(same), sum(same) / (len(same) * args.new_tokens)
        print(f"{way:<14}{value:>12.4f}{rows:>16.1%}{tokens:>15.1%}")
        result = {"perplexity": round(value, 4), "rows_agree": round(rows, 4), "tokens_agree": round(tokens, 4)}
        facts = {"benchmark": "quality", "way": way, **result, "cpu": cpu_name(), **vars(args), "text": args.text.name}
        print(json.dumps({**facts, "dtype": engine.opened.spec.dtype, "weight_levels": engine.opened.spec.weight_levels}))


if __name__ == "__main__":
    main()
