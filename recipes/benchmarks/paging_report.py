"""Tables and a figure of what `paging.py` measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def print_tables(line: dict[str, Any]) -> None:
    """Print the result for people, on stderr."""
    console = Console(stderr=True)
    table = Table(title=f"{line['rows']} rows, {line['kv_tokens']:,} KV slots ({line['kv_bytes'] / 2**20:,.0f} MiB)")
    columns = ("static", "paged", "paged_small")
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left")
    percents = ("kv_utilization", "kv_with_finished", "pool_utilization", "prompt_padding", "decode_padding", "recomputed")
    styles = dict.fromkeys(percents, ".1%") | {"rows_in_flight": ".1f", "steps": ",", "peak_kv_bytes": ",", "seconds": ".1f"}
    for key, style in styles.items():
        table.add_row(key, *(format(line[c][key], style) if key in line[c] else "" for c in columns))
    console.print(table)
    console.print(
        f"static / paged: {line['ratio']}x the seconds; with {line['batch_rows']} rows in flight {line['small_ratio']}x the "
        f"seconds, {line['memory_ratio']}x the KV memory. {line['rows_that_agree']} of {line['rows']} rows have the same "
        f"tokens ({line['dtype']})."
    )
    table = Table("block size", "lost in last blocks", "table entries", "peak MiB", "seconds", title="paged, by block size")
    for size, at in line["block_sizes"].items():
        peak_mib = at["peak_kv_bytes"] / 2**20
        cells = f"{at['last_block_waste']:.1%}", f"{at['mean_table_length']:.1f}", f"{peak_mib:,.1f}", f"{at['seconds']:,.1f}"
        table.add_row(str(size), *cells)
    console.print(table)


def draw(line: dict[str, Any], path: Path) -> None:
    """Draw both comparisons: bars of static and paged, and what a block size costs; needs matplotlib (the `bench` extra)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    labels = ("KV utilization", "prompt padding", "decode padding", "rows in flight")
    for i, (name, color) in enumerate((("static", "tab:gray"), ("paged", "tab:blue"))):
        result = line[name]
        shares = [
            result["kv_utilization"],
            result["prompt_padding"],
            result["decode_padding"],
            result["rows_in_flight"] / line["rows"],
        ]
        bars = left.bar([x + 0.4 * i for x in range(4)], [100 * s for s in shares], width=0.38, label=name, color=color)
        left.bar_label(bars, [*(f"{s:.0%}" for s in shares[:3]), f"{result['rows_in_flight']:.1f}"], padding=2)
    left.set(ylim=(0, 110), ylabel="%", title=f"{line['rows']} rows in {line['kv_tokens']:,} KV slots: {line['ratio']}x")
    left.set_xticks([x + 0.2 for x in range(4)], labels)
    left.legend(frameon=False)
    sizes = list(line["block_sizes"])
    results = [line["block_sizes"][size] for size in sizes]
    fastest = min(r["seconds"] for r in results)
    right.plot(sizes, [100 * r["last_block_waste"] for r in results], "o-", label="slots lost in last blocks")
    right.plot(sizes, [100 * (r["seconds"] / fastest - 1) for r in results], "s--", label="time beyond the fastest")
    right.set_xscale("log", base=2)
    right.set_xticks(sizes, [str(size) for size in sizes])
    right.set(xlabel="block size (tokens)", ylabel="%", title=f"What a block size costs ({line['device']})")
    right.legend(frameon=False)
    figure.savefig(path)
