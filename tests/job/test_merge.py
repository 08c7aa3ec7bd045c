"""Shards of a job, run apart and merged, are the job's own output; a row that is missing or there twice is told."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
from command import pagedgen
from echo import EchoJobs
from job_runs import mixed_rows, write_jsonl


@pytest.fixture(scope="module")
def jobs(tiny_model):
    return EchoJobs(tiny_model("llama"))


@pytest.fixture
def shards(jobs, tmp_path):
    """Return a function that runs a job whole and in three shards; it returns the whole output and the shards'."""

    def run(suffix="jsonl", rows=None, **settings):
        source = write_jsonl(tmp_path / "in.jsonl", mixed_rows(2500) if rows is None else rows)
        whole = tmp_path / f"whole.{suffix}"
        jobs.run([source], whole, **settings)
        outputs = [tmp_path / f"shard{i}.{suffix}" for i in range(3)]
        for i, output in enumerate(outputs):
            jobs.run([source], output, shard=(i, 3), **settings)
        return whole, outputs

    return run


def test_merged_json_lines_are_the_bytes_of_the_whole_job(shards, tmp_path):
    whole, outputs = shards()
    done = pagedgen("merge", *reversed(outputs), "-o", tmp_path / "merged.jsonl")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "merged.jsonl").read_bytes() == whole.read_bytes()
    merged, own = (json.loads((tmp_path / f"{n}.jsonl.manifest.json").read_text()) for n in ("merged", "whole"))
    assert merged == own


@pytest.mark.parametrize("sample", [None, 700])
def test_merged_parquet_has_the_rows_of_the_whole_job(shards, tmp_path, sample):
    whole, outputs = shards("parquet", sample=sample)
    done = pagedgen("merge", *outputs, "-o", tmp_path / "merged.parquet")
    assert done.returncode == 0, done.stderr
    assert pq.read_table(tmp_path / "merged.parquet").equals(pq.read_table(whole))
    assert len(pq.read_table(whole)) == (sample or 2500)


def test_openai_batches_are_merged_with_their_failures(shards, tmp_path):
    rows = [
        {
            "custom_id": f"c{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": f"p{i}" if i % 9 else None},
        }
        for i in range(100)
    ]
    _, outputs = shards(rows=rows)
    done = pagedgen("merge", *outputs, "-o", tmp_path / "merged.jsonl")
    assert done.returncode == 0, done.stderr
    for name in ("{}.jsonl", "{}.errors.jsonl"):
        assert (tmp_path / name.format("merged")).read_bytes() == (tmp_path / name.format("whole")).read_bytes()
    assert len((tmp_path / "merged.errors.jsonl").read_bytes().splitlines()) == 12


def test_what_can_not_be_merged_is_told(shards, jobs, tmp_path):
    whole, (first, second, third) = shards(rows=mixed_rows(30))
    other = tmp_path / "other.jsonl"
    jobs.run([tmp_path / "in.jsonl"], other, shard=(2, 3), token_ids=True)
    odd = tmp_path / "odd.jsonl"
    odd.write_bytes(third.read_bytes()[:-40])
    (tmp_path / "odd.jsonl.manifest.json").write_bytes((tmp_path / "shard2.jsonl.manifest.json").read_bytes())
    for given, said in [
        ([first, second], "shard 2/3 is missing"),
        ([first, second, second, third], "shard 1/3 is given twice"),
        ([first, second, whole], "is no shard"),
        ([first, second, other], "output.token_ids was false, is true"),
        ([first, second, odd], "is no whole output"),
        ([first, second, tmp_path / "none.jsonl"], "no such file"),
        ([first, second, tmp_path / "in.jsonl"], "is no whole output"),
    ]:
        done = pagedgen("merge", *given, "-o", tmp_path / "merged.jsonl")
        assert done.returncode == 2
        assert said in done.stderr.replace("\n", " ")
        assert not (tmp_path / "merged.jsonl").exists()


def test_rows_that_a_forged_shard_repeats_or_lacks_are_found(shards, tmp_path):
    """Even where manifests fit: the rows themselves are looked at."""
    import hashlib

    _, (first, second, third) = shards(rows=mixed_rows(30))
    lines = second.read_bytes().splitlines(keepends=True)
    for forged, said in [
        (lines[:3] + lines[2:], "row 7 (sample 0, turn 0) is there twice"),
        (lines[:2] + lines[3:], "row 7 is in no"),
    ]:
        second.write_bytes(b"".join(forged))
        beside = tmp_path / "shard1.jsonl.manifest.json"
        manifest = json.loads(beside.read_text())
        manifest["result"]["bytes"] = second.stat().st_size
        manifest["result"]["hash"] = hashlib.blake2b(second.read_bytes(), digest_size=16).hexdigest()
        beside.write_text(json.dumps(manifest))
        done = pagedgen("merge", first, second, third, "-o", tmp_path / "merged.jsonl")
        assert done.returncode == 2
        assert said in done.stderr.replace("\n", " ")
