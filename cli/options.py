"""Options that `run` and `plan` share, and how their values are read."""

from __future__ import annotations

import datetime
import difflib
import re
import time
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from pagedgen.errors import InputError, UsageError

_UNITS = {
    "": 1,
    "B": 1,
    "K": 1000,
    "KB": 1000,
    "M": 10**6,
    "MB": 10**6,
    "G": 10**9,
    "GB": 10**9,
    "T": 10**12,
    "TB": 10**12,
}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

MODEL, INPUT, RUNTIME, SAMPLING = "Model", "Input", "Memory and schedule", "Sampling"

Model = Annotated[str, typer.Argument(help="A model directory, a demo model's name, or a Hugging Face id.")]
Inputs = Annotated[
    list[str],
    typer.Argument(
        help="JSONL, CSV, TSV or Parquet files, globs, directories, hf:NAME[:[CONFIG:]SPLIT], or - for stdin.",
        metavar="PROMPTS...",
    ),
]
Format = Annotated[
    str,
    typer.Option(help="auto (by suffix and shape), jsonl, csv, tsv, parquet or openai-batch.", rich_help_panel=INPUT),
]

PromptColumn = Annotated[str | None, typer.Option(help="Column with the prompt text.", rich_help_panel=INPUT)]
MessagesColumn = Annotated[str | None, typer.Option(help="Column with chat messages.", rich_help_panel=INPUT)]
IdColumn = Annotated[
    str | None,
    typer.Option(help="Column that becomes the output's id (else `id`, else the row's index).", rich_help_panel=INPUT),
]
PromptTemplate = Annotated[
    str | None,
    typer.Option(
        help="Jinja2 template over the row's columns, or a file with one: 'Q: {{ question }}'.",
        metavar="TEXT|FILE",
        rich_help_panel=INPUT,
    ),
]
SystemPrompt = Annotated[
    str | None,
    typer.Option(help="System message of every chat that has none; makes text prompts chats.", rich_help_panel=INPUT),
]
AsChat = Annotated[
    bool, typer.Option("--as-chat", help="A text prompt is what the user says in a chat.", rich_help_panel=INPUT)
]
TooLong = Annotated[
    str,
    typer.Option(
        help="Prompts too long for the context: error, skip, truncate-left or truncate-middle (leaving room for max_tokens).",
        rich_help_panel=INPUT,
    ),
]
Sample = Annotated[int | None, typer.Option(help="Take so many rows, chosen at random by --seed.", rich_help_panel=INPUT)]
Shard = Annotated[
    str | None,
    typer.Option(help="Take every Nth row from the Ith on (from 0); `merge` joins.", metavar="I/N", rich_help_panel=INPUT),
]
MaxTotalTokens = Annotated[
    int | None,
    typer.Option(
        help="Take rows, in input order and at their full length, until so many tokens; skip the others.",
        rich_help_panel=INPUT,
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Read only the first rows.", rich_help_panel=INPUT)]
ChatTemplate = Annotated[
    str | None,
    typer.Option(help="File with a Jinja chat template, instead of the tokenizer's.", metavar="FILE", rich_help_panel=INPUT),
]

Revision = Annotated[str | None, typer.Option(help="Revision of a Hugging Face model.", rich_help_panel=MODEL)]
TrustRemoteCode = Annotated[bool, typer.Option(help="Run the model repository's own code.", rich_help_panel=MODEL)]
AllowPickle = Annotated[bool, typer.Option(help="Load pickled weights, which can run code.", rich_help_panel=MODEL)]
Dtype = Annotated[
    str,
    typer.Option(
        help="auto, float32, bfloat16 or float16. auto: on GPU the checkpoint's (bfloat16 for a float32 one); "
        "on CPU bfloat16 where it has bf16 arithmetic, else float32.",
        rich_help_panel=MODEL,
    ),
]
KvCacheDtype = Annotated[
    str,
    typer.Option(
        help="auto (--dtype's) or int8: about half of bfloat16's bytes, but K and V are rounded to 8 bits, so that tokens can "
        "differ from auto's; not on GPU.",
        rich_help_panel=RUNTIME,
    ),
]
Quantization = Annotated[
    str,
    typer.Option(
        help="none, or int8 (on CPU): most linear maps with 8-bit weights and inputs; faster, with other answers.",
        rich_help_panel=MODEL,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(help="Longest prompt plus completion, in tokens. (default: the model's)", rich_help_panel=MODEL),
]

Device = Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=RUNTIME)]
BlockSize = Annotated[
    str | None,
    typer.Option(
        help="Tokens in a KV block, or auto: what `plan` recommends for these rows. (default: 16 on GPU, 32 on CPU)",
        metavar="TOKENS",
        rich_help_panel=RUNTIME,
    ),
]
Watermark = Annotated[float, typer.Option(help="Share of the pool kept free when rows are admitted.", rich_help_panel=RUNTIME)]
Sort = Annotated[
    str,
    typer.Option(
        help="Order of work: prefix (rows with common beginnings together; all rows are read first), length (longest "
        "first) or none. The output's order is the input's.",
        rich_help_panel=RUNTIME,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(help="CPU threads. (default: the cores this process may use)", rich_help_panel=RUNTIME),
]
IgnoreEos = Annotated[bool, typer.Option(help="Don't end at the model's EOS.", rich_help_panel=SAMPLING)]
MaxNumSeqs = Annotated[
    int | None, typer.Option(help="Most rows in flight. (default: 256 on GPU, 128 on CPU)", rich_help_panel=RUNTIME)
]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option(help="Most tokens in a step. (default: 8192 on GPU, 1024 on CPU)", rich_help_panel=RUNTIME)
]
GpuMemoryUtilization = Annotated[
    float, typer.Option(help="Share of the device's total memory to use, weights included.", rich_help_panel=RUNTIME)
]
KvCacheMemoryBytes = Annotated[
    str | None,
    typer.Option(help="Size of the KV pool, e.g. 4GiB, instead of what is free.", metavar="BYTES", rich_help_panel=RUNTIME),
]
NumGpuBlocksOverride = Annotated[
    int | None,
    typer.Option(
        "--max-block-num",
        "--num-gpu-blocks-override",
        help="Blocks in the KV pool, instead of what fits.",
        rich_help_panel=RUNTIME,
    ),
]

EnablePrefixCaching = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Compute the common beginnings of prompts once.",
        rich_help_panel=RUNTIME,
    ),
]
SwapSpace = Annotated[
    str | None,
    typer.Option(
        help="Host memory for blocks that are needed again when the pool is full, e.g. 4GiB.",
        metavar="BYTES",
        rich_help_panel=RUNTIME,
    ),
]
DiskSwap = Annotated[
    str | None,
    typer.Option(
        help="A directory and a size, e.g. /scratch:20GiB, for blocks that host memory has no room for.",
        metavar="PATH:BYTES",
        rich_help_panel=RUNTIME,
    ),
]

Seed = Annotated[int, typer.Option(help="Seed of the random draws and of --sample.", rich_help_panel=SAMPLING)]
N = Annotated[
    int, typer.Option("--n", help="Samples (or best beams) of each row, on rows of their own.", rich_help_panel=SAMPLING)
]
BeamWidth = Annotated[int, typer.Option(help="Above 1: beam search.", rich_help_panel=SAMPLING)]
MaxTokens = Annotated[
    int | None, typer.Option(help="Most tokens to generate for a row. (default: 512)", rich_help_panel=SAMPLING)
]


def _read_config(ctx: typer.Context, path: str | None) -> str | None:
    """Take a TOML file's values as the defaults of this command's flags.

    Raises:
        InputError: it can't be read; UsageError: a name that is no flag of the command.
    """
    if path is None:
        return None
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"--config {path}: can't be read: {error}") from error
    flags = {}  # every spelling of a flag -> its parameter
    for parameter in ctx.command.params:
        if parameter.name not in ("config", "model", "prompts"):
            flags.update(dict.fromkeys((o.lstrip("-").replace("_", "-") for o in parameter.opts), parameter.name))
    if any("\0" in value for value in values.values() if isinstance(value, str)):
        raise UsageError(f"--config {path}: a value holds a NUL character")
    unknown = sorted(k for k in values if k.replace("_", "-") not in flags)
    if unknown:
        known = ", ".join(sorted(f for f in flags if len(f) > 1))
        close = difflib.get_close_matches(unknown[0].replace("_", "-"), flags, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {known}"
        raise UsageError(f"--config {path}: no such flag: {', '.join(unknown)}; {hint}")
    ctx.default_map = {flags[k.replace("_", "-")]: v for k, v in values.items()}
    return path


Config = Annotated[
    str | None,
    typer.Option(
        help="TOML file with values for these flags; flags given here win.",
        metavar="FILE",
        is_eager=True,
        callback=_read_config,
    ),
]


def parse_bytes(text: str | None, flag: str) -> int | None:
    """Return "4GiB", "500MB" or "1024" as bytes.

    Raises:
        UsageError: not a size.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in _UNITS:
        raise UsageError(f"{flag} {text} is not a size; write it like 80GiB, 500MB or 1073741824")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if 0 < size < 2**20:
        raise UsageError(f"{flag} {text} is {size:,.0f} bytes; did you mean {match[1]}GiB?")
    if size > 2**60:
        raise UsageError(f"{flag} {text:.40} is more than any device has")
    return int(size)


def parse_disk_swap(text: str | None) -> tuple[str | None, int]:
    """Return "DIR:20GiB" as a directory and bytes.

    Raises:
        UsageError: no directory, or not a size.
    """
    if text is None:
        return None, 0
    path, colon, size = text.rpartition(":")
    if not colon or not path or not size:
        raise UsageError(f"--disk-swap {text} is not a directory and a size; write it like /scratch:20GiB")
    return path, parse_bytes(size, "--disk-swap") or 0


def parse_block_size(text: str | int | None) -> int | None:
    """Return a block size as a number; None for none and for auto.

    Raises:
        UsageError: neither.
    """
    if text is None or text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--block-size {text} is not a number of tokens, nor auto") from None


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """Return "0/4" as (0, 4).

    Raises:
        UsageError: not a shard.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if not match:
        raise UsageError(f"--shard {text} is not a shard; write it like 0/4")
    return int(match[1]), int(match[2])


_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(text: str | None, flag: str) -> float | None:
    """Return "2h30m", "90s" or "5400", or the seconds until "2026-12-01T08:00", as seconds.

    Raises:
        UsageError: neither.
    """
    if text is None:
        return None
    if re.fullmatch(r"(\d+(\.\d+)?[smhd])+|\d+(\.\d+)?", text):
        return sum(float(n) * _SECONDS[unit] for n, unit in re.findall(r"(\d+(?:\.\d+)?)([smhd]?)", text))
    try:
        return max(0.0, datetime.datetime.fromisoformat(text).astimezone().timestamp() - time.time())
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{flag} {text:.40} is neither a duration like 2h30m nor a time like 2026-12-01T08:00") from error


def read_prompt_template(text: str | None) -> str | None:
    """Return a prompt template: the text itself when it names a column, else the content of the file it names.

    Raises:
        InputError: it can't be read.
    """
    if text is None or "{{" in text or "{%" in text:
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompt-template {text:.60}: no {{{{ column }}}} in it, and no such file: {error}") from error


def read_template(path: str | None) -> str | None:
    """Return the text of a template file.

    Raises:
        InputError: it can't be read.
    """
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--chat-template {path}: can't be read: {error}") from error
