"""pagedgen against other engines on the same prompts: speed, load, memory, and whose tokens are the model's own.

    python recipes/benchmarks/compare.py smollm2-135m --make-workloads out/workloads
    python recipes/benchmarks/compare.py smollm2-135m out/workloads/*.jsonl --dtype float32 --golden out/golden.jsonl \\
        --python vllm=/path/to/vllm/bin/python --python openvino=/path/to/openvino/bin/python --openvino-model out/ov

Each engine runs in its own interpreter (`--python`, else this one) as a process of its own, in turn, `--rounds` times there and
back; seconds are medians. All get the same token ids (texts and chats are tokenized once, here), decode greedily and have each
row's max_tokens and ignore_eos. An engine that can't take part is skipped with a word: missing (not installed),
interpreterless, unconverted (OpenVINO without a model), unshared (nothing to prime), failed (its last words are on stderr).

    pagedgen                 the library, with its defaults
    vllm                     its LLM, on the device its build is for; prefix caching on
    openvino                 GenAI's continuous batching, prefix caching on; --openvino-model is a folder that
                             `optimum-cli export openvino --task text-generation-with-past --weight-format fp32` wrote
    transformers             generate, in padded batches of --batch-size, sorted by prompt length
    transformers-continuous  its continuous batching (generate_batch's manager)
    NAME-primed              any of them, the beginnings that rows share run once before the rows, in the time that counts

Output: tables on stderr; on stdout one JSON line for each workload and engine:

    generate_s, tokens_per_s  from the first row given to the last answer; load and a warm-up of two short rows are not in it
    load_s, whole_s           imports, loading and warm-up; the whole process
    ratio, whole_ratio        output tokens a second over the fastest peer's (not pagedgen's variants), without and with load
    peak_rss_bytes            of the engine's processes, each at its own peak; on a GPU, host memory only
    rows_agree, tokens_agree  with --golden: share of rows that have the golden tokens, and of tokens before a row's first other
                              one. Golden is transformers' generate in fp32, row by row, computed once and kept in the file.
    rows_changed_by_shuffle   with --shuffled: share of rows whose tokens change when the rows come in another order, with no
                              more than three eighths of them in flight

`--pagedgen-options NAME=FLAGS` adds pagedgen-NAME with these settings of `LLM`; `--vllm-options` likewise, in capitals for
environment variables; `--openvino-options` with `--model DIR`, the scheduler's settings and, in capitals, the device's
properties. `--dtype auto` is each engine's own choice; with another one OpenVINO's K/V cache has it too, which its default may
round further. On a CPU vLLM takes most of the memory for K/V unless `--kv-gib` is given, and leaves one core to its scheduler;
`--vllm-options 'cores=--VLLM_CPU_OMP_THREADS_BIND 0-1'` adds it with threads on cores 0 and 1.

Workloads that --make-workloads writes:

"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pagedgen.recipes.benchmarks.engines import contest, report, workloads
from pagedgen.recipes.benchmarks.engines.golden import Golden

from pagedgen.config import EngineConfig
from pagedgen.engine.opened import OpenedModel, open_model

DATA = Path(__file__).resolve().parents[2] / "data"
PRIMED = "-primed"
WITH_OPTIONS = ("pagedgen", "vllm", "openvino")
DEFAULT_ENGINES = ["pagedgen", "vllm", "openvino", "openvino-primed", "transformers", "transformers-continuous"]


def parse_options(text: str) -> tuple[str, dict[str, Any]]:
    """Return a variant's name and settings: `int8=--quantization int8 --no-enable-prefix-caching`."""
    name, equals, flags = text.partition("=")
    words = shlex.split(flags)
    if not (name and equals and words and words[0].startswith("--")):
        raise argparse.ArgumentTypeError(f"{text!r} isn't NAME=--flag value ...")
    settings: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            off = word.startswith("--no-")
            key = word.removeprefix("--no-" if off else "--").replace("-", "_")
            settings[key] = not off
        else:
            settings[key] = _value(word)
    return name, settings


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


def parse_python(text: str) -> tuple[str, str]:
    """Return an engine and its interpreter."""
    name, equals, path = text.partition("=")
    if not equals or name not in contest.MODULES:
        raise argparse.ArgumentTypeError(f"{text!r} isn't NAME=PATH with one of {', '.join(contest.MODULES)}")
    return name, path


def choose_engines(args: argparse.Namespace) -> list[contest.Engine]:
    """Return the engines that `--engines` names and the variants.

    Raises:
        SystemExit: an unknown engine.
    """
    pythons = dict(args.python)
    pythons.setdefault("transformers-continuous", pythons.get("transformers", sys.executable))
    converted = {"model": str(args.openvino_model)} if args.openvino_model else {}

    def engine(adapter: str, variant: str = "", options: dict[str, Any] | None = None, primed: bool = False) -> contest.Engine:
        name = adapter + (f"-{variant}" if variant else "") + (PRIMED if primed else "")
        settings = {**(converted if adapter == "openvino" else {}), **(options or {})}
        return contest.Engine(name, adapter, pythons.get(adapter, sys.executable), settings, primed)

    engines = []
    for name in args.engines.split(","):
        adapter = name.removesuffix(PRIMED)
        if adapter not in contest.MODULES:
            raise SystemExit(f"no engine {name}; known are {', '.join(contest.MODULES)}, each also with {PRIMED}")
        engines.append(engine(adapter, primed=name != adapter))
    for adapter in WITH_OPTIONS:
        engines += [engine(adapter, variant, options) for variant, options in getattr(args, f"{adapter}_options")]
    return engines


def local_folder(model: str) -> Path:
    """Return the model's folder, so that all engines read the same files; a Hugging Face id is fetched first."""
    if Path(model).is_dir():
        return Path(model).resolve()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))


def golden_answers(path: Path, held: contest.Contest, rows: list[workloads.Row], python: str) -> list[list[int]]:
    """Return the rows' golden tokens, from the file or by transformers in fp32, a row at a time."""
    exact = replace(held, dtype="float32", batch_size=1, kv_bytes=None)

    def compute(rows: list[workloads.Row]) -> list[list[int]]:
        print(f"golden answers of {len(rows)} rows", file=sys.stderr, flush=True)
        try:
            return exact.run(contest.Engine("golden", "transformers", python), rows)["tokens"]
        except contest.Skipped as why:
            raise SystemExit(f"no golden answers: transformers {why}") from None

    return Golden(path, held.model, held.eos_token_ids).answers(rows, compute)


def compare(args: argparse.Namespace, opened: OpenedModel) -> list[dict[str, Any]]:
    """Hold every workload's contest; print its lines as they come and return all."""
    engines = choose_engines(args)
    kv_bytes = None if args.kv_gib is None else int(args.kv_gib * 2**30)
    eos_token_ids = list(opened.spec.eos_token_ids)
    held = contest.Contest(local_folder(opened.files.path), args.dtype, eos_token_ids, args.batch_size, kv_bytes)
    python = dict(args.python).get("transformers", sys.executable)
    lines = []
    for path in args.workloads:
        rows = workloads.read(path, opened.tokenizer, limit=args.limit, max_model_len=opened.spec.max_model_len)
        golden = golden_answers(args.golden, held, rows, python) if args.golden else None
        for line in held.hold(path.stem, rows, engines, rounds=args.rounds, golden=golden, shuffled=args.shuffled):
            print(json.dumps(line), flush=True)
            lines.append(line)
    return lines


def parser() -> argparse.ArgumentParser:
    text = (__doc__ or "") + "\n".join("    " + line for line in workloads.SHAPES.splitlines())
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory, a Hugging Face id, or smollm2-135m")
    parser.add_argument("workloads", type=Path, nargs="*", metavar="WORKLOAD.jsonl")
    parser.add_argument("--engines", default=",".join(DEFAULT_ENGINES), metavar="NAME,NAME...")
    parser.add_argument("--python", type=parse_python, action="append", default=[], metavar="NAME=PATH")
    for name in WITH_OPTIONS:
        parser.add_argument(f"--{name}-options", type=parse_options, action="append", default=[], metavar="NAME=FLAGS")
    parser.add_argument("--openvino-model", type=Path, metavar="DIR")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--kv-gib", type=float, help="room for K/V, for all engines that can be told (default: their own)")
    parser.add_argument("--batch-size", type=int, default=32, help="rows of a padded batch (transformers)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=int, help="the first rows of each workload")
    parser.add_argument("--golden", type=Path, metavar="FILE", help="golden answers, made where they are missing")
    parser.add_argument("--shuffled", action="store_true")
    parser.add_argument("--figure", type=Path, help="a .png or .svg")
    parser.add_argument("--make-workloads", type=Path, metavar="DIR", help="write workloads there, and compare nothing")
    parser.add_argument("--seed", type=int, default=0, help="of --make-workloads")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if bool(args.workloads) == bool(args.make_workloads):
        raise SystemExit("give workloads to compare on, or --make-workloads DIR")
    if args.figure and not find_spec("matplotlib"):
        raise SystemExit("--figure needs matplotlib: pip install 'pagedgen[bench]'")
    opened = open_model(EngineConfig(model=args.model))
    if args.make_workloads:
        for path in workloads.make(opened.tokenizer, DATA, args.make_workloads, args.seed):
            print(path)
        return
    lines = compare(args, opened)
    report.print_table(lines)
    if args.figure:
        report.draw(lines, args.figure)


if __name__ == "__main__":
    main()
