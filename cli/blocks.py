"""`pagedgen blocks`: a block map's snapshot as a grid, one cell a block."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from pagedgen.job import read_block_map

from .output import say

_FILL = "▁▂▃▄▅▆▇█"
_COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan", "bright_red", "bright_green", "bright_yellow", "bright_blue")


def blocks(
    file: Annotated[str, typer.Argument(help="A file that `run --block-map` wrote.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Show the pool as it was after this step. (default: the last)")
    ] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Cells in a line. (default: what fits)")] = None,
) -> None:
    """Show which block belongs to which row: a cell a block, a colour a row."""
    block_map = read_block_map(file)
    shown = block_map.at(step)
    terminal = Console()
    text = io.StringIO()
    console = Console(file=text, width=terminal.width, force_terminal=terminal.is_terminal, emoji=False)
    header = block_map.header
    cells = min(width or max(1, terminal.width - 8), header["num_blocks"] or 1)
    rows = {(row, sample) for _, row, sample, _, _ in shown["used"]}
    free = header["num_blocks"] - len(shown["used"]) - len(shown["cached"])
    console.print(
        f"step {shown['step']:,}: {header['num_blocks']:,} blocks of {header['block_size']} tokens; "
        f"{len(shown['used']):,} used by {len(rows):,} rows and samples, {len(shown['cached']):,} cached, {free:,} free",
        highlight=False,
    )
    shown_before = -1
    for line, texts in _device_lines(shown, cells, header["block_size"], header["num_blocks"]):
        if line != shown_before + 1:
            console.print(f"        … {(line - shown_before - 1) * cells:,} free blocks", highlight=False)
        shown_before = line
        console.print(Text(f"{line * cells:>6}  ").append_text(texts), soft_wrap=True)
    rest = header["num_blocks"] - (shown_before + 1) * cells
    if rest > 0:
        console.print(f"        … {rest:,} free blocks", highlight=False)
    for tier in ("host", "disk"):
        if header[f"{tier}_blocks"]:
            console.print(
                f"{tier}: {len(shown[tier]):,} of {header[f'{tier}_blocks']:,} blocks hold something", highlight=False
            )
    console.print(
        f"{_FILL} how full, a digit: shared by so many tables (+: ten or more), ░ cached for rows to come, · free",
        highlight=False,
    )
    say(text.getvalue().rstrip("\n"))


def _device_lines(
    shown: dict[str, list[list[int]]], cells: int, block_size: int, num_blocks: int
) -> Iterator[tuple[int, Text]]:
    """Yield the lines that hold a block that isn't free, with their numbers."""
    grid: dict[int, Text] = {block_id: Text("░", style="dim") for block_id, _ in shown["cached"]}
    for block_id, row, sample, filled, ref_count in shown["used"]:
        if ref_count > 1:
            glyph = str(ref_count) if ref_count < 10 else "+"
        else:
            glyph = _FILL[min(len(_FILL), max(1, -(-filled * len(_FILL) // block_size))) - 1]
        style = _COLOURS[(row * 7 + sample) % len(_COLOURS)]
        grid[block_id] = Text(glyph, style=style if ref_count == 1 else f"{style} reverse")
    free = Text("·", style="dim")
    for line in sorted({block_id // cells for block_id in grid}):
        ids = range(line * cells, min((line + 1) * cells, num_blocks))
        yield line, Text().join(grid.get(block_id, free) for block_id in ids)
