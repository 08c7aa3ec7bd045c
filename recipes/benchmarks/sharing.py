"""What sharing saves, measured through the command line; one JSON line each.

    python recipes/benchmarks/sharing.py MODEL PROMPTS [--limit N] [--max-tokens M]

1. prefix: PROMPTS with the prefix cache off and on, in turn: tokens computed, seconds of generation and their ratio.
2. beams: one prompt of 200 tokens, 4 beams, 64 new tokens: blocks at the peak and on the mean against four copies.
3. conversation: five turns: tokens computed against the length of the whole conversation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TURNS = ["Name a river.", "Where does it end?", "How long is it?", "Name another one.", "Which of the two is longer?"]


def run(model: str, prompts: Path, directory: Path, *flags: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a job; return its statistics and its rows."""
    out = directory / "out.jsonl"
    command = [
        sys.executable,
        "-c",
        "from pagedgen.cli.main import command; command()",
        "run",
        model,
        str(prompts),
        "-o",
        str(out),
    ]
    subprocess.run([*command, "--overwrite", "--progress", "none", *flags], check=True)
    stats = json.loads(Path(f"{out}.stats.json").read_text())
    return stats, [json.loads(line) for line in out.read_text().splitlines()]


def prefix(model: str, prompts: Path, directory: Path, flags: list[str]) -> dict[str, Any]:
    """Compare the prefix cache off and on."""
    off, rows_off = run(model, prompts, directory, *flags, "--no-enable-prefix-caching")
    on, rows_on = run(model, prompts, directory, *flags)
    cache = on["prefix_cache"]
    return {
        "rows": on["rows"]["total"],
        "prompt_tokens": on["prompt_tokens"],
        "shareable_tokens": cache["shareable_tokens"],
        "saved_share": round(cache["saved_tokens"] / max(1, cache["shareable_tokens"]), 4),
        "computed_tokens_off": off["computed_tokens"],
        "computed_tokens_on": on["computed_tokens"],
        "generate_s_off": round(off["generate_s"], 1),
        "generate_s_on": round(on["generate_s"], 1),
        "ratio": round(off["generate_s"] / on["generate_s"], 2),
        "peak_blocks_off": off["blocks"]["peak"],
        "peak_blocks_on": on["blocks"]["peak"],
        "same_answers": [r["response"] for r in rows_off] == [r["response"] for r in rows_on],
        "dtype": on["config"]["engine"]["dtype"],
    }


def beams(model: str, directory: Path) -> dict[str, Any]:
    """Count the blocks of four beams."""
    prompts = directory / "beam.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": list(range(100, 300))}) + "\n")
    stats, _ = run(model, prompts, directory, "--beam-width", "4", "--max-tokens", "64", "--ignore-eos", "--block-size", "16")
    blocks = stats["blocks"]
    copies = 4 * -(-(200 + 63) // 16)
    return {
        "peak_blocks": blocks["peak"],
        "four_copies": copies,
        "fewer_at_peak": round(1 - blocks["peak"] / copies, 3),
        "fewer_on_the_mean": round(blocks["saved_by_sharing"], 3),
        "blocks_copied": stats["swap"]["moved_blocks"].get("device to device", 0),
    }


def conversation(model: str, directory: Path) -> dict[str, Any]:
    """Count the tokens a conversation computes."""
    prompts = directory / "turns.jsonl"
    prompts.write_text(json.dumps({"turns": TURNS}) + "\n")
    stats, rows = run(model, prompts, directory, "--max-tokens", "48")
    return {
        "turns": len(rows),
        "length": rows[-1]["num_prompt_tokens"] + rows[-1]["num_generated_tokens"],
        "computed_tokens": stats["computed_tokens"],
        "prompt_tokens_of_all_turns": stats["prompt_tokens"],
        "kept_tokens": stats["kept_tokens"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--limit", default="64")
    parser.add_argument("--max-tokens", default="16")
    arguments = parser.parse_args()
    flags = ["--limit", arguments.limit, "--max-tokens", arguments.max_tokens]
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        for name, line in (
            ("prefix", prefix(arguments.model, arguments.prompts, where, flags)),
            ("beams", beams(arguments.model, where)),
            ("conversation", conversation(arguments.model, where)),
        ):
            print(json.dumps({"benchmark": f"sharing/{name}", **line}), flush=True)


if __name__ == "__main__":
    main()
