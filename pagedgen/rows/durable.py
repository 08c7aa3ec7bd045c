"""Files that are whole or absent: written beside their place, synced to disk, renamed. All results reach the disk through here.

Every call of the operating system that can lose data goes through this module's `os`, so that a test can fail each of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from ..errors import OutputError, UsageError

_CHUNK_BYTES = 1 << 20
_numbers = itertools.count()  # of temporary files of this process


class _HashingWriter(io.RawIOBase):
    """A new file that hashes what is written to it, in order."""

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._digest = hashlib.blake2b(digest_size=16)
        self.num_bytes = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += os.write(self._fd, view[done:])
        self._digest.update(view)
        self.num_bytes += len(view)
        return len(view)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)


class WholeFile:
    """A file on its way to its place: write to `file`, then `sync()` and `place()`. Without that nothing of it stays.

    A symbolic link is followed and an existing file's permissions are kept. After `sync()` everything is on disk and
    `num_bytes` and `hexdigest` (BLAKE2b, 128 bits) are final. Until `place()` it lies in the directory `via`, which must be on
    the same file system, else beside its place.
    """

    def __init__(self, path: Path, via: Path | None = None):
        self._target = path.resolve()
        self._temporary = (via or self._target.parent) / f".pagedgen-{os.getpid()}-{next(_numbers)}.tmp"
        self._raw = _HashingWriter(self._temporary)
        self.file: IO[bytes] = io.BufferedWriter(self._raw, _CHUNK_BYTES)

    @property
    def num_bytes(self) -> int:
        return self._raw.num_bytes

    @property
    def hexdigest(self) -> str:
        return self._raw.hexdigest()

    def sync(self) -> None:
        """Bring everything to disk."""
        self.file.flush()
        if self._target.exists():
            os.fchmod(self._raw.fileno(), self._target.stat().st_mode & 0o7777)
        os.fsync(self._raw.fileno())

    def place(self) -> None:
        """Put the synced file in its place."""
        self.file.close()
        os.replace(self._temporary, self._target)
        sync_directory(self._target.parent)

    def abandon(self) -> None:
        """Remove what was written, if it was not placed."""
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            self._raw.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink()


@contextlib.contextmanager
def whole_file(path: Path, via: Path | None = None) -> Iterator[WholeFile]:
    """Open a new file that replaces the one at `path`, synced to disk, when the block ends without an exception.

    Raises:
        OutputError: with path and errno, when any step fails; what was at `path` is untouched then.
    """
    with telling(path):
        whole = WholeFile(path, via)
        try:
            yield whole
            whole.sync()
            whole.place()
        finally:
            whole.abandon()


@contextlib.contextmanager
def telling(path: Path | str, what: str = "write") -> Iterator[None]:
    """Turn an operating system's error into one that names what could not be written (or read)."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"can't {what} {path}: {error.strerror or error} (errno {error.errno})") from error


def write_whole(path: Path, chunks: Iterable[bytes], via: Path | None = None) -> None:
    """Write a file whole or not at all.

    Raises:
        OutputError: with path and errno.
    """
    with whole_file(path, via) as whole:
        for chunk in chunks:
            whole.file.write(chunk)


def remove(path: Path) -> None:
    """Remove a file that is there."""
    os.unlink(path)


def sync_directory(path: Path) -> None:
    """Bring a directory's names to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield a file's content in chunks."""
    fd = os.open(path, os.O_RDONLY)
    try:
        while chunk := os.read(fd, _CHUNK_BYTES):
            yield chunk
    finally:
        with contextlib.suppress(OSError):  # nothing is lost by it
            os.close(fd)


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield a file's lines without their ends; what stands behind the last newline is a line too."""
    rest = b""
    for chunk in read_chunks(path):
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        yield from lines
    if rest:
        yield rest


def file_hash(path: Path, start: int = 0, end: int | None = None) -> str:
    """Return the BLAKE2b hash (128 bits, hex) of a file's bytes from `start` to `end`."""
    digest = hashlib.blake2b(digest_size=16)
    left = (path.stat().st_size if end is None else end) - start
    fd = os.open(path, os.O_RDONLY)
    try:
        os.lseek(fd, start, os.SEEK_SET)
        while left > 0 and (chunk := os.read(fd, min(_CHUNK_BYTES, left))):
            digest.update(chunk)
            left -= len(chunk)
    finally:
        os.close(fd)
    return digest.hexdigest()


def lock(path: Path) -> int:
    """Take a lock file, until the process ends or the returned descriptor is closed.

    Raises:
        UsageError: another process has it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = path.exists() and os.path.samestat(os.fstat(fd), path.stat())
    except BlockingIOError:
        is_there = False
    except BaseException:
        os.close(fd)
        raise
    if not is_there:  # somebody has it, or removed it between our opening and locking it
        os.close(fd)
        raise UsageError(f"another pagedgen is writing to {path.parent}; wait for it or give another --output")
    return fd
