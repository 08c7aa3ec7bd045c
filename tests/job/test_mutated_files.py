"""Files with random bytes changed: never a traceback, never a hang, never a row that isn't there, documented exit codes."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from echo import EchoJobs

from pagedgen.errors import ROW_ERROR_CODES, UsageError

FILES = 10_000 if os.environ.get("PAGEDGEN_PROFILE") == "nightly" else 400
ROWS = [
    {"id": i, "prompt": f"the prompt {i} " * (i % 5 + 1), "messages": None, "n": [i, {"a": None}], "é": "ü€😀"}
    for i in range(40)
]
LONGEST_S = 20


@pytest.fixture(scope="module")
def jobs(tiny_model):
    return EchoJobs(tiny_model("llama"))


def whole_files():
    lines = "".join(json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(ROWS)).encode()
    csv = "id,prompt\n" + "".join(f'{r["id"]},"{r["prompt"]}, ""quoted""\nsecond line"\n' for r in ROWS)
    parquet = pa.BufferOutputStream()
    table = pa.Table.from_pylist([{**r, "n": r["id"]} for r in ROWS])
    pq.write_table(table, parquet, row_group_size=10, write_page_checksum=True)
    return {
        "in.jsonl": lines,
        "in.jsonl.gz": gzip.compress(lines[: len(lines) // 2]) + gzip.compress(lines[len(lines) // 2 :]),
        "in.jsonl.zst": pa.compress(lines, "zstd", asbytes=True),
        "in.csv": csv.encode(),
        "in.parquet": parquet.getvalue().to_pybytes(),
    }


def mutate(data, rng):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at = rng.randrange(len(data))
        how = rng.random()
        if how < 0.6:
            data[at] = rng.randrange(256)
        elif how < 0.75:
            del data[at : at + rng.randint(1, 30)]
        elif how < 0.9:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 30)))
        else:
            data[at : at + 50] = b"\0" * len(data[at : at + 50])
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data) or b"x"


def too_slow(number, frame):
    raise TimeoutError(f"a file took more than {LONGEST_S} s")


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.jsonl.zst", "in.csv", "in.parquet"])
def test_a_mutated_file_is_read_as_far_as_it_can_be(jobs, tmp_path, name):
    original = whole_files()[name]
    source, output = tmp_path / name, tmp_path / "out.jsonl"
    source.write_bytes(original)
    jobs.run([source], output)
    prompts = {row["prompt"] for row in read(output)}
    assert len(prompts) == len(ROWS)
    rng = random.Random(name)
    refused = failed = 0
    before = signal.signal(signal.SIGALRM, too_slow)
    try:
        for _ in range(FILES // 5):
            mutated = mutate(original, rng)
            source.write_bytes(mutated)
            signal.alarm(LONGEST_S)
            try:
                report = jobs.run([source], output, overwrite=True, restart=True)
            except UsageError:  # exit code 2
                refused += 1
                continue
            finally:
                signal.alarm(0)
            got = read(output)
            assert len(got) == report.num_results
            assert [row["row_index"] for row in got] == list(range(len(got)))
            if name == "in.jsonl":  # counted another way
                assert len(got) == sum(bool(line.strip()) for line in mutated.removeprefix(b"\xef\xbb\xbf").split(b"\n"))
            if name == "in.parquet":  # its pages have checksums, so that a row is right or an error
                assert all(row["error"] or row["prompt"] in prompts for row in got)
                assert len(got) <= len(ROWS)
            for row in got:
                if row["error"] is None:
                    assert row["response"].startswith(row["prompt"] or "")  # the answer to this very row's prompt
                else:
                    assert row["error_code"] in ROW_ERROR_CODES
            failed += report.num_errors > 0
    finally:
        signal.signal(signal.SIGALRM, before)
    assert refused + failed, "mutations that nobody noticed are no test"


def read(output):
    return [json.loads(line) for line in output.read_bytes().split(b"\n")[:-1]]
