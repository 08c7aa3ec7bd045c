"""Files that are whole or absent, and where an output may go."""

from __future__ import annotations

import hashlib
import os

import pytest

from pagedgen.errors import OutputError, UsageError
from pagedgen.rows import durable
from pagedgen.rows.durable import file_hash, lock, read_lines, whole_file, write_whole
from pagedgen.rows.output_path import check_output, check_writable


def test_replacing_a_file_keeps_its_permissions_and_follows_links(tmp_path):
    target, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    write_whole(link, [b"ne", b"w"])
    assert target.read_text() == "new"
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("failing", ["open", "write", "fsync", "replace", "fchmod"])
@pytest.mark.parametrize("via", [False, True])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing, via):
    target, other = tmp_path / "o.jsonl", tmp_path / "via"
    other.mkdir()
    target.write_text("old")

    def broken(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable.os, failing, broken)
    with pytest.raises(OutputError, match=r"o\.jsonl.*errno 28"), whole_file(target, other if via else None) as whole:
        whole.file.write(b"new")
    monkeypatch.undo()
    assert target.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["o.jsonl", "via"]
    assert os.listdir(other) == []


def test_an_exception_while_writing_leaves_the_old_file(tmp_path):
    target = tmp_path / "o.jsonl"
    target.write_text("old")
    with pytest.raises(ZeroDivisionError), whole_file(target) as whole:
        whole.file.write(b"half" * (1 // 0))
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["o.jsonl"]


def test_size_and_hash_are_those_of_the_file(tmp_path):
    content = bytes(range(256)) * 10_000
    with whole_file(tmp_path / "x") as whole:
        for start in range(0, len(content), 777):
            whole.file.write(content[start : start + 777])
    assert (tmp_path / "x").read_bytes() == content
    assert whole.num_bytes == len(content)
    assert whole.hexdigest == file_hash(tmp_path / "x") == hashlib.blake2b(content, digest_size=16).hexdigest()
    part = hashlib.blake2b(content[1000:2_000_000], digest_size=16).hexdigest()
    assert file_hash(tmp_path / "x", 1000, 2_000_000) == part


def test_lines_are_the_same_however_the_file_is_read(tmp_path, monkeypatch):
    lines = [b"", b"a" * 10, b"\r", b"", b"last"]
    (tmp_path / "x").write_bytes(b"\n".join(lines))
    for size in (1, 2, 3, 100):
        monkeypatch.setattr(durable, "_CHUNK_BYTES", size)
        assert list(read_lines(tmp_path / "x")) == lines


def test_a_lock_is_taken_once_and_again_when_it_was_let_go(tmp_path):
    first = lock(tmp_path / "lock")
    with pytest.raises(UsageError, match="another pagedgen"):
        lock(tmp_path / "lock")
    os.close(first)
    os.close(lock(tmp_path / "lock"))


def test_an_output_is_checked_before_work(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("{}")
    (tmp_path / "link.jsonl").symlink_to(source)
    for name in ("in.jsonl", "link.jsonl"):
        with pytest.raises(UsageError, match="one of the inputs"):
            check_output(str(tmp_path / name), [source])
    existing = tmp_path / "out.ndjson"
    existing.write_text("kept")
    assert check_output(str(existing), [source]).format == "jsonl"
    assert existing.read_text() == "kept"
    assert check_output(str(tmp_path / "o.parquet"), []).format == "parquet"
    assert check_output("-", []).path is None
    with pytest.raises(UsageError, match="suffix"):
        check_output(str(tmp_path / "o.csv"), [])
    with pytest.raises(OutputError, match="errno"):
        check_output(str(tmp_path / "no" / "o.jsonl"), [])
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UsageError, match="is a directory"):
        check_output(str(tmp_path / "folder.jsonl"), [])
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UsageError, match="not a regular file"):
        check_output(str(tmp_path / "pipe.jsonl"), [])
    assert len(list(tmp_path.iterdir())) == 5  # the checks left nothing


def test_an_existing_file_is_replaced_only_when_that_is_allowed(tmp_path):
    existing = tmp_path / "stats.json"
    existing.write_text("kept")
    with pytest.raises(UsageError, match=r"--stats .* exists; pass --overwrite"):
        check_writable(str(existing), "--stats", overwrite=False, inputs=[])
    check_writable(str(existing), "--stats", overwrite=True, inputs=[])
    assert existing.read_text() == "kept"
