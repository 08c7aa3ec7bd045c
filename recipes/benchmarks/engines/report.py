"""A table and a figure of what `compare.py` measured."""

from __future__ import annotations

from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 150
Line = dict[str, Any]
COLUMNS = {  # of a line: heading and format
    "tokens_per_s": ("tokens/s", ",.1f"),
    "ratio": ("ratio", ".2f"),
    "generate_s": ("generation s", ",.1f"),
    "load_s": ("load s", ",.1f"),
    "whole_s": ("whole s", ",.1f"),
    "whole_ratio": ("ratio", ".2f"),
    "peak_rss_gib": ("peak GiB", ".2f"),
    "rows_agree": ("rows agree", ".1%"),
    "tokens_agree": ("tokens agree", ".1%"),
    "rows_changed_by_shuffle": ("changed by shuffle", ".1%"),
}


def print_table(lines: list[Line]) -> None:
    """Print one table over all workloads, on stderr, without the columns that weren't measured."""
    columns = {key: shown for key, shown in COLUMNS.items() if any(key in _with_gib(line) for line in lines)}
    columns = columns or {"tokens_per_s": COLUMNS["tokens_per_s"]}  # all were skipped: a place for why
    table = Table(caption="ratio: output tokens a second over the fastest peer's, of generation and of the whole process")
    for name in ("workload", "engine"):
        table.add_column(name)
    for heading, _ in columns.values():
        table.add_column(heading, justify="right")
    for i, line in enumerate(lines):
        values = _with_gib(line)
        cells = [format(values[key], style) if key in values else "" for key, (_, style) in columns.items()]
        if "skipped" in line:
            cells[0] = line["skipped"]
        last = i + 1 == len(lines) or lines[i + 1]["workload"] != line["workload"]
        table.add_row(line["workload"], f"{line['engine']} {line.get('version', '')}", *cells, end_section=last)
    console = Console(stderr=True, width=max(WIDTH, get_terminal_size().columns))  # a log has 80, too few for the columns
    console.print(table)


def _with_gib(line: Line) -> Line:
    return {**line, "peak_rss_gib": line["peak_rss_bytes"] / 2**30} if "peak_rss_bytes" in line else line


def draw(lines: list[Line], path: Path) -> None:
    """Draw tokens a second and whole seconds, bars of each engine by workload; needs matplotlib (the `bench` extra)."""
    from matplotlib.figure import Figure

    lines = [line for line in lines if "skipped" not in line]
    workloads = list(dict.fromkeys(line["workload"] for line in lines))
    engines = list(dict.fromkeys(line["engine"] for line in lines))
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    panels = (("tokens_per_s", "output tokens/s (more is better)"), ("whole_s", "whole process, seconds (less is better)"))
    width = 0.8 / max(1, len(engines))
    for axes, (key, label) in zip(figure.subplots(1, 2), panels, strict=True):
        for i, engine in enumerate(engines):
            mine = [line for line in lines if line["engine"] == engine]
            places = [workloads.index(line["workload"]) + width * i for line in mine]
            bars = axes.bar(places, [line[key] for line in mine], width=0.95 * width, label=engine)
            axes.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=7)
        axes.set_xticks([x + 0.4 - width / 2 for x in range(len(workloads))], workloads)
        axes.set_ylabel(label)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=len(engines), frameon=False)
    figure.savefig(path)
