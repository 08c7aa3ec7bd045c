"""A decode step with all layers in one compiled call, against the same kernels called one by one from Python.

    python recipes/benchmarks/layers.py smollm2-135m [--context 200] [--steps 30] [--quantization int8 --kv-cache-dtype int8]

Both ways take turns, step by step, on the same rows; one JSON line for each number of rows: median milliseconds of both and the
median of the ratios of neighbouring steps.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from time import perf_counter

import numpy as np

from pagedgen.config import EngineConfig
from pagedgen.engine.batch import PackedBatch
from pagedgen.engine.engine import Engine
from pagedgen.engine.model_runner import dummy_batch
from pagedgen.engine.opened import open_model
from pagedgen.model.decoder import FusedDecoder

ROWS = (1, 4, 16, 64, 128)


def decoding(num_rows: int, context: int, block_size: int) -> PackedBatch:
    """Return a batch of rows that each decode their last token, over blocks of their own."""
    batch = dummy_batch([context] * num_rows, block_size, decodes=True)
    batch.block_tables[:] = np.arange(batch.block_tables.size).reshape(batch.block_tables.shape)
    batch.slot_mapping[:] = batch.block_tables[:, -1].astype(np.int64) * block_size + (context - 1) % block_size
    return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--kv-cache-dtype", default="auto")
    args = parser.parse_args()
    config = EngineConfig(
        args.model, dtype="float32", quantization=args.quantization, kv_cache_dtype=args.kv_cache_dtype, max_num_seqs=max(ROWS)
    )
    opened = open_model(config)
    runner = Engine(opened).runner
    forward, block_size = runner._model, opened.config.block_size
    assert block_size
    if not isinstance(forward, FusedDecoder) or forward.stack is None:
        parser.exit(2, f"{args.model}: its layers don't run in one call on this machine\n")
    stack = forward.stack
    runner.allocate_cache(max(ROWS) * -(-args.context // block_size))
    for num_rows in ROWS:
        batch = decoding(num_rows, args.context, block_size)
        times: dict[str, list[float]] = {"one_call": [], "kernel_by_kernel": []}
        for step in range(args.steps + 1):
            for way in sorted(times, reverse=step % 2 == 1):
                forward.stack = stack if way == "one_call" else None
                start = perf_counter()
                runner.run(batch, best_among=1)
                if step:  # the first one may compile
                    times[way].append((perf_counter() - start) * 1e3)
        ratio = median(b / a for a, b in zip(times["one_call"], times["kernel_by_kernel"], strict=True))
        line = (
            {"rows": num_rows} | {f"{way}_ms": round(median(of), 2) for way, of in times.items()} | {"ratio": round(ratio, 2)}
        )
        print(json.dumps({"benchmark": "layers"} | line), flush=True)


if __name__ == "__main__":
    main()
