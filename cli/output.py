"""The output sink: results may go to stdout, everything else here goes to stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from time import monotonic
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from pagedgen.errors import OutputError


class _Stderr(Console):
    """A reader of the log that goes away, or a full disk behind it, must not end the job."""

    def on_broken_pipe(self) -> None:
        pass

    def print(self, *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().print(*args, **kwargs)


stderr = _Stderr(stderr=True, emoji=False)


def say(text: str) -> None:
    """Print a command's result on stdout.

    Raises:
        OutputError: stdout is closed or full.
    """
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except (OSError, AttributeError, ValueError) as error:
        raise OutputError(f"can't write to stdout: {error}") from error


_PLAIN_LINE_EVERY_S = 10.0


def fail(message: str) -> None:
    """Print an error in one sentence."""
    stderr.print(f"pagedgen: {message}", style="red", markup=False, highlight=False, soft_wrap=True)


def gib(num_bytes: int) -> str:
    """Return bytes for people."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def print_event(event: dict[str, Any]) -> None:
    """Print one JSON line on stderr."""
    with contextlib.suppress(OSError, ValueError):
        print(json.dumps(event), file=sys.stderr, flush=True)  # noqa: T201


class RunProgress:
    """Shows a job's progress: a bar on a terminal, a line now and then elsewhere, JSON lines on request, or nothing."""

    def __init__(self, mode: str):
        """mode: auto, plain, json or none."""
        if mode == "auto":
            mode = "bar" if stderr.is_terminal else "plain"
        self._mode = mode
        self._total: int | None = None
        self._is_generating = False
        self._started = self._printed = monotonic()
        self._bar: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def phase(self, text: str) -> None:
        """See `job.Progress.phase`."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._say({"event": "phase", "phase": text}, f"{text} …")

    def note(self, text: str) -> None:
        """See `job.Progress.note`."""
        self._say({"event": "note", "note": text}, f"note: {text}")

    def rows(self, total: int | None) -> None:
        """See `job.Progress.rows`."""
        if not self._is_generating:
            self._is_generating = True
            self._started = self._printed = monotonic()
        self._total = total
        what = "rows as they are read" if total is None else f"{total:,} rows"
        self._say({"event": "generate", "rows": total}, f"generating {what} …" if self._mode != "bar" else "")
        if self._bar is not None:
            self._bar.update(self._task, total=total)
        elif self._mode == "bar":
            columns = (
                TextColumn("{task.completed:,.0f}/{task.fields[of]} rows"),
                BarColumn(),
                TextColumn("{task.fields[speed]:,.0f} tokens/s  blocks {task.fields[blocks]}  ETA {task.fields[eta]}"),
            )
            self._bar = Progress(*columns, console=stderr, transient=True)
            self._task = self._bar.add_task("", total=total, of="?", speed=0.0, blocks="", eta="?")
            self._bar.start()

    def step(self, report: Any) -> None:
        """See `job.Progress.step`."""
        now = monotonic()
        speed = report.generated_tokens / max(now - self._started, 1e-9)
        # An upper bound: rows may end before they have all the tokens they may get.
        eta_s = report.tokens_left / speed if speed and self._total is not None else None
        of = "?" if self._total is None else f"{self._total:,}"
        eta = "?" if eta_s is None else f"at most {eta_s:,.0f} s"
        if self._bar is not None:
            blocks = f"{report.used_blocks}/{report.total_blocks}"
            self._bar.update(self._task, completed=report.num_finished, of=of, speed=speed, blocks=blocks, eta=eta)
        elif now - self._printed >= _PLAIN_LINE_EVERY_S:
            self._printed = now
            facts = {
                "rows": report.num_finished,
                "total": self._total,
                "tokens_per_s": round(speed, 1),
                "used_blocks": report.used_blocks,
                "total_blocks": report.total_blocks,
                "eta_at_most_s": None if eta_s is None else round(eta_s),
            }
            self._say(
                {"event": "progress", **facts},
                f"{report.num_finished:,}/{of} rows  {speed:,.0f} tokens/s  "
                f"blocks {report.used_blocks}/{report.total_blocks}  ETA {eta}",
            )

    def _say(self, event: dict[str, Any], text: str) -> None:
        if self._mode == "json":
            print_event(event)
        elif self._mode != "none" and text:
            stderr.print(text, style="dim", markup=False, highlight=False)


def show_end(report: Any, max_error_rate: float, max_tokens_note: str, mode: str) -> None:
    """Tell how a job ended: its closing table, why it stopped, which rows failed."""
    if report.stopping_error is not None:
        fail(f"stopped at the first error, {report.stopping_error}; finished rows are kept, the same command tries again")
    elif report.stopped_by is not None:
        kept = f"with {report.num_results:,} results finished and kept; the same command goes on"
        fail(f"stopped by {report.stopped_by} {kept if report.output != '-' else 'before anything was written to stdout'}")
        if mode == "json":
            print_event({"event": "stopped", "by": report.stopped_by, "results": report.num_results})
    elif report.is_repeat:
        text = f"{report.output} is there already, complete with {report.num_results:,} results; --overwrite makes it anew"
        if mode == "json":
            print_event({"event": "done", "output": report.output, "is_repeat": True})
        elif mode != "none":
            stderr.print(text, markup=False, highlight=False, soft_wrap=True)
    else:
        show_summary(report.stats, report.output, report.stats_path, max_tokens_note, mode)
    if report.stopped_by is None and report.exit_code(max_error_rate):
        which = f"all {report.num_results:,} rows failed"
        if report.num_errors < report.num_results:
            which = (
                f"{report.num_errors:,} of {report.num_results:,} rows failed, more than --max-error-rate "
                f"{max_error_rate:g} allows"
            )
        fail(f"{which}; the first: {report.first_error}")


def show_summary(stats: dict[str, Any], output: str, stats_path: str | None, max_tokens_note: str, mode: str) -> None:
    """Print the closing table of a run; with progress as JSON its numbers as one more line, without progress nothing."""
    if mode == "none":
        return
    if mode == "json":
        print_event({"event": "done", "output": output, "stats_path": stats_path, "stats": stats})
        return
    table = Table(title="pagedgen run", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    rows = {k: v for k, v in stats["rows"].items() if k != "total"}
    table.add_row("rows", f"{stats['rows']['total']:,} ({', '.join(f'{v:,} {k}' for k, v in rows.items())})")
    if stats["rows_reused"]:
        table.add_row("reused", f"{stats['rows_reused']:,} results of an earlier run")
    if stats["row_errors"]:
        table.add_row("row errors", ", ".join(f"{v:,} {k}" for k, v in stats["row_errors"].items()))
    now = f", {stats['generated_tokens']:,} of them now" if stats["generated_tokens"] != stats["output_tokens"] else ""
    table.add_row("tokens", f"{stats['prompt_tokens']:,} prompt, {stats['output_tokens']:,} generated{now}{max_tokens_note}")
    table.add_row(
        "speed",
        f"{stats['tokens_per_s']:,.1f} generated tokens/s over {stats['generate_s']:.1f} s "
        f"(start-up {stats['startup_s']:.1f} s, wall {stats['wall_s']:.1f} s)",
    )
    split = sorted(stats["time_split_s"].items(), key=lambda item: -item[1])
    table.add_row("time", ", ".join(f"{name} {seconds:.2f} s" for name, seconds in split))
    blocks = stats["blocks"]
    table.add_row(
        "blocks",
        f"{blocks['total']:,} of {blocks['block_size']} tokens; peak {blocks['peak']:,}, mean in use "
        f"{blocks['mean_utilization']:.1%}, of those slots filled {blocks['slot_utilization']:.1%}, "
        f"mean table {blocks['mean_table_length']:.1f}"
        + (f", {blocks['saved_by_sharing']:.1%} saved by sharing" if blocks["saved_by_sharing"] else ""),
    )
    table.add_row(
        "padding saved",
        f"{stats['padding_saved']:.1%} ({stats['packed_tokens']:,} tokens, {stats['padded_tokens']:,} in padded "
        f"batches of {stats['config']['engine']['max_num_seqs']:,} rows)",
    )
    prefix = stats["prefix_cache"]
    if prefix["shareable_tokens"] or prefix["saved_tokens"]:
        table.add_row(
            "prefix cache",
            f"{prefix['saved_tokens']:,} prompt tokens of {prefix['hit_rows']:,} rows not computed again "
            f"({prefix['shareable_tokens']:,} could be shared); {prefix['evictions']:,} blocks given up too early",
        )
    if stats["kept_tokens"]:
        table.add_row("conversations", f"{stats['kept_tokens']:,} tokens kept from turn to turn")
    table.add_row("preemptions", f"{stats['preemptions']:,} ({stats['recomputed_tokens']:,} tokens recomputed)")
    swap = stats["swap"]
    moved = {name: count for name, count in swap["moved_blocks"].items() if name != "device to device"}
    if any(swap["blocks"].values()):
        sizes = ", ".join(f"{count:,} blocks on {tier}" for tier, count in swap["blocks"].items() if count)
        table.add_row("swap space", f"{sizes}; moved: {', '.join(f'{n:,} {name}' for name, n in moved.items()) or 'none'}")
    table.add_row("peak memory", gib(stats["peak_memory_bytes"]))
    config = stats["config"]["engine"]
    kv_cache = ", int8 K/V" if config["kv_cache_dtype"] == "int8" else ""
    table.add_row(
        "ran as", f"{config['dtype']}{kv_cache} on {config['device']} ({config['backend']} kernels), seed {config['seed']}"
    )
    table.add_row("output", "stdout" if output == "-" else output)
    if stats_path:
        table.add_row("statistics", stats_path)
    stderr.print(table)
