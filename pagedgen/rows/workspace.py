"""A job's directory while it runs, `<output>.parts/`: the lock, the manifest, the parts. Gone when the output is there.

It is begun by writing the manifest and ended by removing it; files without a manifest are what a beginning or an end that was
killed left behind, and worth nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO, Any

from ..errors import OutputError, UsageError
from .durable import lock, sync_directory, telling, whole_file, write_whole

_MANIFEST, _LOCK, _STDIN = "manifest.json", "lock", "stdin"


class Workspace:
    """The directory; with stdout as output a temporary one that nothing goes on from."""

    def __init__(self, output: str):
        """Make the directory and take its lock.

        Raises:
            UsageError: another process has it, or it isn't one of pagedgen's; OutputError: it can't be written.
        """
        self._temporary = output == "-"
        if self._temporary:
            self.directory = Path(tempfile.mkdtemp(prefix="pagedgen-"))
        else:
            target = Path(output).resolve()
            self.directory = target.with_name(target.name + ".parts")
        with telling(self.directory):
            made = not self.directory.exists()
            self.directory.mkdir(exist_ok=True)
            if made:
                sync_directory(self.directory.parent)
            elif not self._temporary and any(not _is_ours(p) for p in self.directory.iterdir()):
                raise UsageError(f"{self.directory} holds other files than pagedgen's; give another --output")
            self._lock: int | None = lock(self.directory / _LOCK)
            if self.manifest() is None:
                self._clear(keep={_LOCK})

    def manifest(self) -> dict[str, Any] | None:
        """Return the manifest of a job that was begun here."""
        try:
            return json.loads((self.directory / _MANIFEST).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:  # it is written whole: the disk broke it
            raise OutputError(f"{self.directory / _MANIFEST} is broken: {error}; remove {self.directory}") from error

    def begin(self, manifest: dict[str, Any]) -> None:
        """Write the manifest: from now on what is here is worth keeping."""
        write_whole(self.directory / _MANIFEST, [json.dumps(manifest, indent=1).encode()])

    def restart(self) -> None:
        """Throw away what an earlier run left."""
        self._remove(_MANIFEST)
        self._clear(keep={_LOCK, _STDIN})

    def copy_stdin(self, stdin: IO[bytes]) -> Path:
        """Copy all of stdin here, where it can be read twice; return the file."""
        path = self.directory / _STDIN
        with whole_file(path) as whole:
            shutil.copyfileobj(stdin, whole.file, 1 << 20)
        return path

    def end(self) -> None:
        """Remove the directory: its work is in the output, or there was none."""
        with contextlib.suppress(OSError):
            self._remove(_MANIFEST)
            self._clear(keep=set())
            self.directory.rmdir()
        self.close()

    def has_parts(self) -> bool:
        """Return True when finished rows are here."""
        return any(path.name.startswith("part-") for path in self.directory.iterdir())

    def via(self, output: Path) -> Path | None:
        """Return the directory where a new output can be written before it is put in its place; None: beside it."""
        same = self.directory.stat().st_dev == output.resolve().parent.stat().st_dev
        return self.directory if same else None

    def close(self) -> None:
        """Let go of the lock; a temporary directory goes with it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self.remove_temporary()

    def remove_temporary(self) -> None:
        """Remove a directory that nothing goes on from."""
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.directory / name).unlink()
            sync_directory(self.directory)

    def _clear(self, keep: set[str]) -> None:
        for path in self.directory.iterdir():
            if path.name not in keep:
                path.unlink()


def _is_ours(path: Path) -> bool:
    name = path.name
    return name in (_MANIFEST, _LOCK, _STDIN) or name.startswith("part-") or (name.startswith(".") and name.endswith(".tmp"))


def finished_manifest(output: Path) -> dict[str, Any] | None:
    """Return the manifest of a finished output, None where the file isn't one, or isn't whole."""
    if output.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        from .sinks import MANIFEST_KEY

        try:
            metadata = pq.read_metadata(output).metadata or {}
        except (pa.ArrowException, OSError):
            return None
        text = metadata.get(MANIFEST_KEY.encode())
        return None if text is None else json.loads(text)
    from .durable import file_hash

    try:
        manifest = json.loads(manifest_path(output).read_text(encoding="utf-8"))
        facts = manifest["result"]
        whole = output.stat().st_size == facts["bytes"] and file_hash(output) == facts["hash"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if whole else None


def manifest_path(output: Path) -> Path:
    """Return where the manifest of a JSONL output lies."""
    return output.with_name(output.name + ".manifest.json")
