"""Where results may go, checked before any work."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import OutputError, UsageError

_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True)
class OutputPath:
    """A job's output: a file, or - for stdout, and its format (jsonl or parquet)."""

    name: str
    format: str

    @property
    def path(self) -> Path | None:
        """Return the file, None for stdout."""
        return None if self.name == "-" else Path(self.name)

    @property
    def manifest(self) -> Path | None:
        """Return where the manifest of a JSON lines output lies; a Parquet output holds its own."""
        path = self.path
        return None if path is None or self.format == "parquet" else path.with_name(path.name + ".manifest.json")

    @property
    def errors(self) -> Path | None:
        """Return where the failures of an OpenAI batch go."""
        path = self.path
        return None if path is None else path.with_name(f"{path.stem}.errors{path.suffix}")


def check_output(output: str, inputs: list[Path]) -> OutputPath:
    """Return an output after checking that it can be written. An existing file may be there.

    Raises:
        UsageError: unknown suffix, or one of the inputs; OutputError: the directory is missing or can't be written.
    """
    if output == "-":
        if sys.stdout is None:
            raise OutputError("can't write to stdout: it is closed")
        return OutputPath(output, "jsonl")
    if Path(output).suffix not in _FORMATS:
        raise UsageError(f"--output {output}: the suffix must be one of {', '.join(_FORMATS)} (or - for JSONL on stdout)")
    check_writable(output, "--output", overwrite=True, inputs=inputs)
    return OutputPath(output, _FORMATS[Path(output).suffix])


def check_writable(name: str, flag: str, *, overwrite: bool, inputs: list[Path]) -> None:
    """Refuse a path that can't be written or must not be.

    Raises:
        UsageError: one of the inputs, an existing file without --overwrite, a directory or a device; OutputError: its
            directory is missing or can't be written.
    """
    path = Path(name)
    try:
        if path.is_dir():
            raise UsageError(f"{flag} {name} is a directory")
        if path.exists():
            if not path.is_file():
                raise UsageError(f"{flag} {name} is not a regular file")
            if any(file.samefile(path) for file in inputs if file.exists()):
                raise UsageError(f"{flag} {name} is one of the inputs")
            if not overwrite:
                raise UsageError(f"{flag} {name} exists; pass --overwrite to replace it")
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except RuntimeError as error:  # a circle of links
        raise UsageError(f"{flag} {name}: {error}") from error
    except OSError as error:
        raise OutputError(f"can't write {name}: {error.strerror} (errno {error.errno})") from error
