"""`pagedgen blocks`: a block map's snapshot as a grid, one cell a block."""

from __future__ import annotations

import io
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
    console = Console(file=text, width=terminal.width, force_terminal=terminal.is_terminal, color_system=terminal.color_system)  # type: ignore[arg-type]
    header = block_map.header
    cells = width or max(1, terminal.width - 8)
    rows = {(row, sample) for _, row, sample, _, _ in shown["used"]}
    free = header["num_blocks"] - len(shown["used"]) - len(shown["cached"])
    console.print(
        f"step {shown['step']:,}: {header['num_blocks']:,} blocks of {header['block_size']} tokens; "
        f"{len(shown['used']):,} used by {len(rows):,} rows and samples, {len(shown['cached']):,} cached, {free:,} free",
        highlight=False,
    )
    grid = _device_cells(shown, header["num_blocks"], header["block_size"])
    for start in range(0, len(grid), cells):
        console.print(Text(f"{start:>6}  ").append_text(Text().join(grid[start : start + cells])), soft_wrap=True)
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


def _device_cells(shown: dict[str, list[list[int]]], num_blocks: int, block_size: int) -> list[Text]:
    """Return a cell for each block of the device."""
    grid = [Text("·", style="dim")] * num_blocks
    for block_id, _ in shown["cached"]:
        grid[block_id] = Text("░", style="dim")
    for block_id, row, sample, filled, ref_count in shown["used"]:
        if ref_count > 1:
            glyph = str(ref_count) if ref_count < 10 else "+"
        else:
            glyph = _FILL[max(0, -(-filled * len(_FILL) // block_size) - 1)]
        style = _COLOURS[(row * 7 + sample) % len(_COLOURS)]
        grid[block_id] = Text(glyph, style=style if ref_count == 1 else f"{style} reverse")
    return grid
