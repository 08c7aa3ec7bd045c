"""Results on disk while a job runs: what was written comes back once and in order, and damage is never taken for a result."""

from __future__ import annotations

import random
import shutil

import pytest

from pagedgen.errors import OutputError
from pagedgen.rows import durable, parts
from pagedgen.rows.parts import PartStore
from pagedgen.rows.schema import Result

HOUR = 3600.0


def open_store(directory):
    return PartStore(directory, flush_s=HOUR)


def made(row, sample=0, turn=0, text="x", **fields):
    return Result(row, sample, turn, response=text, finish_reason="stop", **fields)


def key_of(result):
    return result.row_index, result.sample_index, result.turn_index


def part_files(directory):
    return sorted(p for p in directory.iterdir() if p.name.startswith("part-"))


@pytest.fixture
def small_fan_in(monkeypatch):
    monkeypatch.setattr(parts, "FAN_IN", 4)


def test_results_come_in_the_order_of_their_keys(tmp_path):
    store = open_store(tmp_path)
    keys = [(row, sample, turn) for row in (0, 2, 9, 10, 11, 100) for sample in range(2) for turn in range(2)]
    shuffled = random.Random(0).sample(keys, len(keys))
    for start in range(0, len(shuffled), 5):
        store.add([made(*key) for key in shuffled[start : start + 5]])
        store.flush()
    assert [key_of(r) for r in store.results()] == keys
    assert [key_of(r) for r in open_store(tmp_path).results()] == keys


def test_every_field_comes_back_as_it_was(tmp_path):
    results = [
        Result(0),
        Result(1, 2, 3, "a\nb\r\x00\u2028 \ud800 ü", [1, 2**31 - 1], "length", "stop", 5, 6, 7, 8, -0.1, 2**64 - 1, None, None),
        Result(2, error_code="bad_json", error="why\nnot", num_prompt_tokens=0),
        Result(3, response="", token_ids=[], finish_reason="skipped", stop_reason="", score=0.0, seed=0),
        Result(2**53 + 1, response="x" * 3_000_000),
    ]
    store = open_store(tmp_path)
    store.add(results)
    store.flush()
    assert list(open_store(tmp_path).results()) == results
    assert open_store(tmp_path).num_damaged_lines == 0


def test_the_latest_of_equal_keys_counts_within_a_part_and_across_parts(tmp_path, small_fan_in):
    store = open_store(tmp_path)
    store.add([made(1, text="first"), made(1, text="second")])
    store.flush()
    assert [r.response for r in store.results()] == ["second"]
    for i in range(30):
        store.add([made(1, text=f"later {i}"), made(i + 2)])
        store.flush()
        again = {r.row_index: r.response for r in open_store(tmp_path).results()}
        assert again[1] == f"later {i}"
        assert len(again) == i + 2


def test_nothing_is_on_disk_before_a_flush_is_due(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    assert not list(store.results())
    store.add([made(0)])
    store.flush_if_due()
    assert part_files(tmp_path) == []
    assert not list(store.results())
    store._flush_s = 0
    store.flush_if_due()
    assert len(part_files(tmp_path)) == 1
    monkeypatch.setattr(parts, "_FLUSH_RESULTS", 3)
    store.add([made(1), made(2)])
    assert len(part_files(tmp_path)) == 1
    store.add([made(3)])
    assert len(part_files(tmp_path)) == 2
    monkeypatch.setattr(parts, "_FLUSH_BYTES", 100)
    store.add([made(4, text="x" * 100)])
    assert len(part_files(tmp_path)) == 3
    store.flush()
    assert len(part_files(tmp_path)) == 3


def test_compaction_keeps_every_result_and_the_number_of_files_small(tmp_path, small_fan_in):
    store = open_store(tmp_path)
    expected = {}
    rng = random.Random(1)
    for i in range(200):
        row = rng.randrange(150)
        store.add([made(row, text=str(i))])
        store.flush()
        expected[row] = str(i)
        assert len(part_files(tmp_path)) <= 3 * 4  # three of each of four levels
        if i % 37 == 0:
            store = open_store(tmp_path)  # as after a restart
    for each in (store, open_store(tmp_path)):
        assert {r.row_index: r.response for r in each.results()} == expected
        assert [r.row_index for r in each.results()] == sorted(expected)


def test_parts_are_compacted_at_the_real_fan_in(tmp_path):
    store = open_store(tmp_path)
    for i in range(parts.FAN_IN + 1):
        store.add([made(i)])
        store.flush()
    assert len(part_files(tmp_path)) == 2
    assert [r.row_index for r in store.results()] == list(range(parts.FAN_IN + 1))


def test_parts_that_were_joined_but_not_removed_are_removed_and_count_once(tmp_path, small_fan_in):
    """A crash between the rename of the larger part and the removal of its sources, at each of them."""
    work, before = tmp_path / "work", tmp_path / "before"
    work.mkdir()
    store = open_store(work)
    for i in range(3):
        store.add([made(i, text=f"old {i}"), made(9, text=f"try {i}")])
        store.flush()
    shutil.copytree(work, before)
    store.add([made(3), made(9, text="try 3")])
    store.flush()
    (joined,) = part_files(work)
    expected = list(store.results())
    for left in range(4):
        crashed = tmp_path / f"crashed{left}"
        crashed.mkdir()
        shutil.copy(joined, crashed)
        for source in part_files(before)[left:]:
            shutil.copy(source, crashed)
        (crashed / ".pagedgen-1-0.tmp").write_bytes(b"half a part")
        assert list(open_store(crashed).results()) == expected
        assert [p.name for p in crashed.iterdir()] == [joined.name]


def test_a_compaction_that_is_cut_short_leaves_its_sources(tmp_path, small_fan_in, monkeypatch):
    store = open_store(tmp_path)
    for i in range(3):
        store.add([made(i)])
        store.flush()
    real, calls = durable.os.replace, []

    def failing_second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(durable.os, "replace", failing_second)
    store.add([made(3)])
    with pytest.raises(OutputError, match="errno 28"):
        store.flush()
    monkeypatch.undo()
    monkeypatch.setattr(parts, "FAN_IN", 4)
    for each in (store, open_store(tmp_path)):
        assert [r.row_index for r in each.results()] == [0, 1, 2, 3]
    for i in range(4, 40):
        store.add([made(i)])
        store.flush()
    assert [r.row_index for r in open_store(tmp_path).results()] == list(range(40))
    assert len(part_files(tmp_path)) <= 12


@pytest.mark.parametrize("failing", ["open", "write", "fsync", "replace"])
def test_results_that_could_not_be_written_are_written_at_the_next_try(tmp_path, monkeypatch, failing):
    store = open_store(tmp_path)
    store.add([made(0)])
    store.flush()

    def broken(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable.os, failing, broken)
    store.add([made(1), made(2)])
    with pytest.raises(OutputError, match="errno 28"):
        store.flush()
    monkeypatch.undo()
    assert [r.row_index for r in open_store(tmp_path).results()] == [0]
    store.flush()
    assert [r.row_index for r in open_store(tmp_path).results()] == [0, 1, 2]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_part_that_can_not_be_read_is_told(tmp_path):
    store = open_store(tmp_path)
    store.add([made(0)])
    store.flush()
    part_files(tmp_path)[0].unlink()
    with pytest.raises(OutputError, match="part-"):
        list(store.results())


# Damage. Five results of known bytes; what is whole comes back, and nothing else.

WRITTEN = [made(i, text=t) for i, t in enumerate(["plain", "ü", "日本", "\ud800", 'quote " and \\'])]


@pytest.fixture
def damaged(tmp_path):
    """Write the five results, change the file's bytes by a function, and read what is left."""
    store = open_store(tmp_path)
    store.add(WRITTEN)
    store.flush()
    (file,) = part_files(tmp_path)
    content = file.read_bytes()

    def read_after(change):
        file.write_bytes(change(content))
        again = open_store(tmp_path)
        return list(again.results()), again.num_damaged_lines

    read_after.content = content
    return read_after


def test_a_part_cut_anywhere_keeps_the_lines_that_are_whole(damaged):
    content = damaged.content
    for length in range(len(content) + 1):
        got, num_damaged = damaged(lambda whole, n=length: whole[:n])
        # A last line that lacks only its newline is whole.
        whole = content[: length + 1].count(b"\n") if content[length : length + 1] == b"\n" else content[:length].count(b"\n")
        assert got == WRITTEN[:whole]
        assert num_damaged <= 1


def test_a_flipped_bit_costs_its_line_and_no_other(damaged):
    content = damaged.content
    rng = random.Random(2)
    for place in rng.sample(range(len(content)), min(len(content), 300)):
        changed = bytearray(content)
        changed[place] ^= 1 << rng.randrange(8)
        got, num_damaged = damaged(lambda _, changed=changed: bytes(changed))
        line = content[:place].count(b"\n")
        lost = {line, line + 1} if content[place : place + 1] == b"\n" else {line}
        assert got == [r for i, r in enumerate(WRITTEN) if i not in lost]
        assert num_damaged >= 1


def test_trailing_nul_bytes_are_no_result(damaged):
    """What some file systems leave behind a power cut."""
    assert damaged(lambda c: c + bytes(5000)) == (WRITTEN, 1)
    assert damaged(lambda c: c[:-1] + bytes(4096)) == (WRITTEN[:-1], 1)
    assert damaged(lambda c: bytes(len(c))) == ([], 1)


def test_an_empty_part_and_foreign_lines_hold_no_result(damaged):
    assert damaged(lambda _: b"") == ([], 0)
    assert damaged(lambda c: b"\n\n" + c + b'{"row_index": 1}\n') == (WRITTEN, 3)
    assert damaged(lambda c: c.replace(b"\n", b"\r\n")) == ([], 5)


@pytest.mark.parametrize("line", [b"00000000", b"00000000 "])
def test_a_checksum_without_a_body_is_no_result(damaged, line):
    assert damaged(lambda c: c + line + b"\n") == (WRITTEN, 1)


def test_a_damaged_line_is_left_out_when_parts_are_joined(tmp_path, small_fan_in):
    store = open_store(tmp_path)
    for i in range(3):
        store.add([made(i), made(i + 10)])
        store.flush()
    file = part_files(tmp_path)[1]
    content = file.read_bytes()
    file.write_bytes(content[: content.index(b"\n") + 20])
    store = open_store(tmp_path)
    store.add([made(3)])
    store.flush()
    assert len(part_files(tmp_path)) == 1
    assert [r.row_index for r in open_store(tmp_path).results()] == [0, 1, 2, 3, 10, 12]


def test_a_damaged_line_is_counted_once_however_often_it_is_read(damaged, tmp_path):
    damaged(lambda c: c[:-5])
    store = open_store(tmp_path)
    for _ in range(2):
        assert len(list(store.results())) == 4
    assert store.num_damaged_lines == 1


def test_an_older_result_counts_where_the_later_one_is_damaged(tmp_path):
    store = open_store(tmp_path)
    for text in ("older", "newer"):
        store.add([made(0, text=text)])
        store.flush()
    file = part_files(tmp_path)[1]
    file.write_bytes(file.read_bytes()[:-5])
    assert [r.response for r in open_store(tmp_path).results()] == ["older"]
