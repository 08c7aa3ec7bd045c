"""The `pagedgen` command: registers the subcommands and is the one place where errors become messages and exit codes."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from typing import Annotated

import typer

from pagedgen import __version__
from pagedgen.errors import EXIT_INTERNAL, EXIT_OUTPUT, EXIT_USAGE, PagedgenError
from pagedgen.stopping import Stopper

from . import blocks, merge, model, plan, run, signals, tune
from .output import fail

app = typer.Typer(
    name="pagedgen",
    help="Offline batch generation over a paged KV cache: every completion, in order, exactly once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run")(run.run)
app.command("plan")(plan.plan)
app.command("tune")(tune.tune)
app.command("merge")(merge.merge)
app.command("blocks")(blocks.blocks)
app.add_typer(model.app, name="model")


def _version(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; every error ends in one sentence and a documented exit code.

    PAGEDGEN_TRACEBACK=1 shows the traceback as well.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    stopper = Stopper()
    signals.install(stopper)
    try:
        app(obj=stopper)
    except PagedgenError as error:
        _show_traceback()
        fail(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        _show_traceback()
        where = f" {error.filename}" if error.filename else ""
        fail(f"can't use{where}: {error.strerror or error} (errno {error.errno})")
        sys.exit(EXIT_USAGE)
    except Exception as error:
        _show_traceback()
        fail(f"internal error: {type(error).__name__}: {error}. This is a bug in pagedgen; PAGEDGEN_TRACEBACK=1 shows where")
        sys.exit(EXIT_INTERNAL)


def command() -> None:
    """`main` as the installed command: with its last word said the process is gone.

    Python's own end would take every module and tensor apart first, which after a run takes longer than opening the model did.
    """
    status = [EXIT_INTERNAL]  # of a SystemExit, or of what nobody caught
    atexit.register(_leave, status)  # the first one registered is the last one to run
    try:
        main()
        status[0] = 0
    except SystemExit as end:
        status[0] = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise


def _leave(status: list[int]) -> None:
    for stream in filter(None, (sys.stdout, sys.stderr)):  # Python has none where the descriptor was closed before
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more
            status[0] = status[0] or EXIT_OUTPUT
    os._exit(status[0])


def _show_traceback() -> None:
    if os.environ.get("PAGEDGEN_TRACEBACK"):
        traceback.print_exc()
