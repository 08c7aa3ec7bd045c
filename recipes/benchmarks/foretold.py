"""What `pagedgen plan` foretells against what `pagedgen run` then does: peak blocks, generation and wall seconds.

    pagedgen tune smollm2-135m && python recipes/benchmarks/foretold.py smollm2-135m

Ten jobs of random token ids, each run once by the command line: mixed lengths, common beginnings, samples, small pools, few
rows in flight, small steps. Rows run to their max_tokens, which a plan can know. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Rows:
    """Makes rows of random token ids."""

    def __init__(self, seed: int):
        self._rng = random.Random(seed)

    def ids(self, count: int) -> list[int]:
        return [self._rng.randrange(100, 40_000) for _ in range(count)]

    def row(self, prompt: list[int], new: int, **more: Any) -> Row:
        return {"prompt_token_ids": prompt, "sampling_params": {"max_tokens": new, "ignore_eos": True, **more}}

    def spread(self, median: float, sigma: float, low: int, high: int) -> int:
        return min(high, max(low, round(median * 2.718281828 ** self._rng.gauss(0, sigma))))

    def mixed(self, count: int) -> list[Row]:
        """Lengths like a chat log's: log-normal, prompts of 16 to 1024 tokens, outputs of 16 to 128."""
        return [self.row(self.ids(self.spread(110, 1.0, 16, 1024)), self.spread(48, 0.7, 16, 128)) for _ in range(count)]

    def shared(self, count: int, prefixes: int, length: int, new: int) -> list[Row]:
        """Rows that begin with one of a few common prompts."""
        common = [self.ids(length) for _ in range(prefixes)]
        return [self.row(common[i % prefixes] + self.ids(self._rng.randint(8, 40)), new) for i in range(count)]


def jobs(seed: int) -> list[tuple[str, list[Row], list[str]]]:
    """Return (name, rows, flags) of the ten jobs."""
    make = Rows(seed)
    trunk = make.ids(256)
    tree = [make.row(trunk + branch + make.ids(12), 24) for branch in (make.ids(128), make.ids(128)) for _ in range(16)]
    return [
        ("mixed lengths", make.mixed(48), []),
        ("mixed, pool too small", make.mixed(48), ["--max-block-num", "120"]),
        ("mixed, 8 rows in flight", make.mixed(24), ["--max-num-seqs", "8"]),
        ("mixed, steps of 256 tokens", make.mixed(32), ["--max-num-batched-tokens", "256"]),
        ("mixed, blocks of 16", make.mixed(32), ["--block-size", "16"]),
        ("4 prefixes of 512", make.shared(48, 4, 512, 32), []),
        ("4 prefixes, pool too small", make.shared(48, 4, 512, 32), ["--max-block-num", "64"]),
        ("two levels of prefixes", tree, []),
        ("long prompts", [make.row(make.ids(900 + 60 * i), 16) for i in range(10)], []),
        ("4 samples a row", [make.row(make.ids(60), 64, n=4, temperature=0.8, seed=i) for i in range(10)], []),
    ]


def compare(model: str, name: str, rows: list[Row], flags: list[str], folder: Path) -> dict[str, Any]:
    """Plan and run one job; return both sides."""
    prompts, output = folder / "prompts.jsonl", folder / "out.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [str(Path(sys.executable).with_name("pagedgen"))]
    plan = json.loads(
        subprocess.run([*command, "plan", model, str(prompts), "--json", *flags], check=True, stdout=subprocess.PIPE).stdout
    )
    if plan["forecast"]["generate_s"] is None:
        raise SystemExit(f"no profile of {model} on this machine (with these flags); `pagedgen tune {model}` makes it")
    run = [*command, "run", model, str(prompts), "-o", str(output), "--overwrite", "--progress", "none", *flags]
    subprocess.run(run, check=True)
    stats = json.loads(Path(f"{output}.stats.json").read_text())
    told = plan["forecast"]
    pairs = {
        "peak_blocks": (told["peak_blocks"], stats["blocks"]["peak"]),
        "generate_s": (told["generate_s"], stats["generate_s"]),
        "wall_s": (told["wall_s"], stats["wall_s"]),
        "steps": (told["steps"], stats["num_steps"]),
    }
    return {
        "job": name,
        **{k: {"told": round(a, 1), "was": round(b, 1), "off": round(a / b - 1, 3)} for k, (a, b) in pairs.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="jobs whose name holds this text")
    args = parser.parse_args()
    lines = []
    print("| job | peak blocks: told, was | generation s: told, was | wall s: told, was |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, rows, flags in (job for job in jobs(args.seed) if args.only in job[0]):
            line = compare(args.model, name, rows, flags, Path(folder))
            cells = [
                f"{line[k]['told']}, {line[k]['was']} ({line[k]['off']:+.1%})" for k in ("peak_blocks", "generate_s", "wall_s")
            ]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
            lines.append(line)
    worst = {k: max(abs(line[k]["off"]) for line in lines) for k in ("peak_blocks", "generate_s", "wall_s")}
    print(json.dumps({"benchmark": "foretold", "model": args.model, "seed": args.seed, "worst": worst, "jobs": lines}))


if __name__ == "__main__":
    main()
