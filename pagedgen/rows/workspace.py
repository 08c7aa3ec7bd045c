"""A job's directory while it runs, `<output>.parts/`: the lock, the manifest, the parts. Gone when the output is there.

It is begun by writing the manifest and ended by removing it; files without a manifest are what a beginning or an end that was
killed left behind, and worth nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import IO, Any

from ..errors import OutputError, UsageError
from .durable import file_hash, lock, remove, sync_directory, telling, whole_file, write_whole
from .output_path import OutputPath
from .parts import PART_NAME

_MANIFEST, _LOCK, _STDIN = "manifest.json", "lock", "stdin"


_OWN_NAMES = re.compile(rf"{_MANIFEST}|{_LOCK}|{_STDIN}|{PART_NAME.pattern}|\.pagedgen-\d+-\d+\.tmp|\.nfs\w+")
_FIELDS = {"job": dict, "made_on": str, "retries": bool, "spoiled": bool}


def unfinished_manifest(output: str) -> dict[str, Any] | None:
    """Return the manifest of the job that was begun for an output, without taking its lock.

    Raises:
        OutputError: it is broken.
    """
    return _manifest(_directory(output))


def _directory(output: str) -> Path:
    target = Path(output).resolve()
    return target.with_name(target.name + ".parts")


def _manifest(directory: Path) -> dict[str, Any] | None:
    path = directory / _MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        manifest = None
    if isinstance(manifest, dict) and all(isinstance(manifest.get(name), kind) for name, kind in _FIELDS.items()):
        return manifest
    # It is written whole: the disk or somebody's hand broke it.
    raise OutputError(f"{path} is broken, so what is finished can't be gone on with; remove {directory}")


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
            self.directory = _directory(output)
        with telling(self.directory):
            made = not self.directory.exists()
            self.directory.mkdir(exist_ok=True)
            if made:
                sync_directory(self.directory.parent)
            elif not self._temporary:
                foreign = next((p.name for p in self.directory.iterdir() if not _OWN_NAMES.fullmatch(p.name)), None)
                if foreign is not None:
                    raise UsageError(f"{self.directory} holds other files than pagedgen's ({foreign}); give another --output")
            self._lock: int | None = lock(self.directory / _LOCK)
            try:
                if self.manifest() is None:
                    self._clear(keep={_LOCK})
            except BaseException:
                self.close()
                raise

    def manifest(self) -> dict[str, Any] | None:
        """Return the manifest of a job that was begun here."""
        return _manifest(self.directory)

    def begin(self, manifest: dict[str, Any]) -> None:
        """Write the manifest: from now on what is here is worth keeping."""
        write_whole(self.directory / _MANIFEST, [json.dumps(manifest, indent=1).encode()])

    def restart(self) -> None:
        """Throw away what an earlier run left."""
        self._remove(_MANIFEST)
        self._clear(keep={_LOCK, _STDIN})

    def spoil(self) -> None:
        """Note that what is here can't be gone on with."""
        before = self.manifest()
        if before is not None:
            self.begin({**before, "spoiled": True})

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
            self.close()  # NFS keeps a file that is open, and its directory with it
            self.directory.rmdir()
        self.close()

    def has_parts(self) -> bool:
        """Return True when finished rows are here."""
        return any(PART_NAME.fullmatch(path.name) for path in self.directory.iterdir())

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
            remove(self.directory / name)
            sync_directory(self.directory)

    def _clear(self, keep: set[str]) -> None:
        for path in self.directory.iterdir():
            if path.name not in keep:
                remove(path)


def finished_manifest(output: Path) -> dict[str, Any] | None:
    """Return the manifest of a finished output, None where the file isn't one, or isn't whole."""
    if output.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        from .sinks import MANIFEST_KEY

        try:
            with output.open("rb") as file:  # Arrow can't open every name
                metadata = pq.read_metadata(file).metadata or {}
            manifest = json.loads(metadata[MANIFEST_KEY.encode()])
        except (pa.ArrowException, KeyError, ValueError):
            return None
        return manifest if _is_manifest(manifest) else None
    beside = OutputPath(str(output), "jsonl")
    assert beside.manifest is not None and beside.errors is not None
    try:
        manifest = json.loads(beside.manifest.read_text(encoding="utf-8"))
        facts = manifest["result"]
        whole = output.stat().st_size == facts["bytes"] and file_hash(output) == facts["hash"]
        whole = whole and ("errors_hash" not in facts or file_hash(beside.errors) == facts["errors_hash"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return manifest if whole and _is_manifest(manifest) else None


def _is_manifest(manifest: Any) -> bool:
    """Return True for what has the parts of a manifest that are looked at."""
    parts: list[Any] = [manifest.get(name) for name in ("rows", "prompts", "result")] if isinstance(manifest, dict) else [None]
    counts = ("num_rows", "num_results", "num_errors")
    return all(isinstance(part, dict) for part in parts) and all(isinstance(parts[-1].get(name), int) for name in counts)
