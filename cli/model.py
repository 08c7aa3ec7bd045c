"""`pagedgen model`: the demo model."""

from __future__ import annotations

from typing import Annotated

import typer

from .output import say, stderr

app = typer.Typer(help="Fetch the demo model.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="smollm2-135m")],
    force: Annotated[bool, typer.Option("--force", help="Fetch again even if it is cached.")] = False,
) -> None:
    """Fetch a demo model into the cache and print its directory."""
    from pagedgen.model.demo import DEMO_MODELS, cache_path, fetch

    if name in DEMO_MODELS and (force or not (cache_path(name) / "config.json").is_file()):
        stderr.print(f"fetching {name} …", style="dim", highlight=False)
    say(str(fetch(name, force=force)))
