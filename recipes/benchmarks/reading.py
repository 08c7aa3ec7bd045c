"""How fast prompts are read, rendered and tokenized, against the tokenizers library's own batch call on the same texts.

    python recipes/benchmarks/reading.py MODEL PROMPTS [--repeat 5]

Prints one JSON line: tokens a second of both (best of the repetitions, which alternate) and their ratio. `reader` is everything
a job does to a row before the engine gets it.
"""

from __future__ import annotations

import argparse
import json
from time import perf_counter

from pagedgen.config import EngineConfig, JobConfig
from pagedgen.engine.opened import open_model
from pagedgen.jobs.setup import prepare
from pagedgen.rows.sources import expand_inputs
from pagedgen.stats import RunStats


def measure(model: str, prompts: list[str], repeat: int = 5) -> dict[str, float]:
    """Return the tokens a second of both, and reader / library."""
    config = JobConfig(prompts, EngineConfig(model=model))
    opened = open_model(config.engine)
    sources, _ = expand_inputs(prompts)
    job = prepare(config, opened, sources, RunStats(), planning=True)
    texts = [job.renderer.render(row.values).text for chunk in job.source.chunks() for row in chunk.rows]
    library = opened.tokenizer.backend_tokenizer
    library_s, reader_s, num_tokens = [], [], 0
    for _ in range(repeat):
        begin = perf_counter()
        ids = [encoding.ids for encoding in library.encode_batch(texts)]
        library_s.append(perf_counter() - begin)
        begin = perf_counter()
        read = sum(request.num_prompt_tokens for group in job.reader().groups() for request in group.requests)
        reader_s.append(perf_counter() - begin)
        num_tokens = sum(map(len, ids))
        assert read == num_tokens
    return {
        "rows": len(texts),
        "tokens": num_tokens,
        "library_tokens_per_s": round(num_tokens / min(library_s)),
        "reader_tokens_per_s": round(num_tokens / min(reader_s)),
        "ratio": round(min(library_s) / min(reader_s), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.model, arguments.prompts, arguments.repeat)))


if __name__ == "__main__":
    main()
