"""Beams, conversations, prefix cache, swap space and block map from the command line."""

from __future__ import annotations

import json
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command import pagedgen, read_jsonl

from pagedgen.engine.block_map import read_block_map
from pagedgen.errors import InputError


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def prompts(tmp_path):
    return write_jsonl(tmp_path / "p.jsonl", [{"id": i, "prompt": "a common beginning, then " + "x" * i} for i in range(8)])


def stats_of(out):
    return json.loads(out.with_name(out.name + ".stats.json").read_text())


def test_beams_come_best_first_with_their_scores(tiny_model, prompts, tmp_path):
    out = tmp_path / "o.jsonl"
    done = pagedgen(
        "run", tiny_model(), prompts, "-o", out, "--beam-width", 4, "--n", 3, "--max-tokens", 8, "--length-penalty", 0.5,
        "--early-stopping", "never", "--audit",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = read_jsonl(out)
    assert [(r["row_index"], r["sample_index"]) for r in rows] == [(i, n) for i in range(8) for n in range(3)]
    for first, second in pairwise(rows):
        if first["row_index"] == second["row_index"]:
            assert first["score"] >= second["score"]
    stats = stats_of(out)
    assert stats["generated_tokens"] == sum(r["num_generated_tokens"] for r in rows)
    assert stats["blocks"]["saved_by_sharing"] > 0
    assert "saved by sharing" in done.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--beam-width", 4, "--n", 5], "n 5 is more than beam_width 4"),
        (["--beam-width", 4, "--temperature", 1], "temperature must be 0"),
        (["--beam-width", 4, "--early-stopping", "maybe"], "--early-stopping maybe is not one of true, false, never"),
        (["--length-penalty", 2], "no effect without --beam-width"),
        (["--disk-swap", "20GiB"], "--disk-swap 20GiB is not a directory and a size"),
        (["--disk-swap", "/tmp:"], "--disk-swap /tmp: is not a directory and a size"),
        (["--disk-swap", "/x:b:1MiB"], "--disk-swap /x:b: No such file"),
        (["--beam-width", 200], "--beam-width 200 is more than --max-num-seqs 128"),
        (["--n", 300000, "--temperature", 1], "--n 300000 is more than --max-num-seqs 128"),
        (["--block-map", "-"], "--block-map needs the name of a file"),
        (["--disk-swap", "/no/such/place:1GiB"], "--disk-swap /no/such/place: No such file or directory"),
        (["--swap-space", "4"], "did you mean 4GiB?"),
        (["--swap-space", "900TiB"], "host memory has"),
        (["--watermark", 1], "--watermark 1.0 must be at least 0 and below 1"),
        (["--cache-salt-column", "nothing"], "--cache-salt-column nothing: no such column"),
        (["--block-map", "o.jsonl"], "--block-map o.jsonl is another output"),
        (["--block-map", "./o.jsonl.stats.json"], "is another output"),
        (["--swap-space", "12GiB", "--kv-cache-memory-bytes", "16GiB"], "bytes that are free"),
    ],
)
def test_flags_that_make_no_sense_are_told_before_weights_load(tiny_model, prompts, tmp_path, flags, named):
    done = pagedgen("run", tiny_model(), prompts, "-o", "o.jsonl", *flags, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert named in done.stderr.replace("\n", " ")
    assert "loading" not in done.stderr
    assert not (tmp_path / "o.jsonl").exists()


def test_prefix_cache_on_and_off_write_the_same_answers(tiny_model, prompts, tmp_path):
    outs = [tmp_path / "on.jsonl", tmp_path / "off.jsonl"]
    for out, flag in zip(outs, ("--enable-prefix-caching", "--no-enable-prefix-caching"), strict=True):
        done = pagedgen(
            "run", tiny_model(), prompts, "-o", out, flag, "--max-tokens", 5, "--block-size", 4, "--audit", "--cached-tokens"
        )
        assert done.returncode == 0, done.stderr
    on, off = map(read_jsonl, outs)
    assert [r["response"] for r in on] == [r["response"] for r in off]
    # One row led. All others found the six blocks of the 25 common bytes, and what more of the x's they share.
    found = sorted(r["num_cached_tokens"] for r in on)
    assert found[0] == 0
    assert found[1] >= 24
    assert {r["num_cached_tokens"] for r in off} == {0}
    stats = stats_of(outs[0])
    assert stats["cached_tokens"] == stats["prefix_cache"]["saved_tokens"] == sum(r["num_cached_tokens"] for r in on)
    assert (stats["blocks"]["final_used"], stats["blocks"]["final_cached"]) == (0, 0)
    assert stats_of(outs[1])["prefix_cache"]["enabled"] is False


def test_salts_keep_rows_apart(tiny_model, tmp_path):
    rows = [{"prompt": "the very same prompt", "salt": salt} for salt in (None, "", "A", "B", "A", 7)]
    out = tmp_path / "o.jsonl"
    done = pagedgen(
        "run", tiny_model(), write_jsonl(tmp_path / "p.jsonl", rows), "-o", out, "--cache-salt-column", "salt",
        "--block-size", 4, "--max-tokens", 3, "--sort", "none", "--cached-tokens",
    )  # fmt: skip
    assert done.returncode == 3
    got = read_jsonl(out)
    assert [r["num_cached_tokens"] > 0 for r in got] == [False, True, False, False, True, False]
    assert (got[5]["error_code"], got[5]["error"]) == ("not_text", "column salt holds int, not text")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_row_for_each_turn(tiny_model, tmp_path, suffix):
    rows = [
        {"question_id": 1, "category": "a", "turns": ["hello", "and then?", "really?"]},
        {"question_id": 2, "category": "b", "turns": ["just one"]},
        {"question_id": 3, "category": "c", "turns": []},
        {"question_id": 4, "category": "d", "turns": None},
        {"question_id": 5, "category": "e", "turns": ["two", "turns"]},
    ]
    source, out = tmp_path / f"p.{suffix}", tmp_path / f"o.{suffix}"
    if suffix == "jsonl":
        write_jsonl(source, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), source)
    done = pagedgen(
        "run", tiny_model(), source, "-o", out, "--max-tokens", 6, "--ignore-eos", "--audit", "--n", 2, "--temperature", 1,
        "--cached-tokens",
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    got = read_jsonl(out) if suffix == "jsonl" else pq.read_table(out).to_pylist()
    assert [(r["question_id"], r["sample_index"], r["turn_index"]) for r in got] == [
        (q, s, t) for q, turns in ((1, 3), (2, 1), (3, 1), (4, 1), (5, 2)) for s in range(2) for t in range(turns)
    ]
    assert [r["error_code"] for r in got if r["question_id"] in (3, 4)] == ["no_messages"] * 2 + ["null_prompt"] * 2
    answered = [r for r in got if r["error"] is None]
    assert all(r["num_generated_tokens"] == 6 for r in answered)
    assert all((r["num_cached_tokens"] > 0) == (r["turn_index"] > 0) for r in answered)
    stats = stats_of(out)
    assert stats["kept_tokens"] == sum(r["num_cached_tokens"] for r in answered) > 0
    assert stats["rows"]["total"] == len(got)
    assert "kept from turn to turn" in done.stderr


def test_a_conversation_that_ends_early_has_an_error_for_every_turn_it_lost(tiny_model, tmp_path):
    rows = [
        {"turns": ["x" * 30, "y" * 30, "z", "and on"]},
        {"turns": ["short", "short"]},
        {"turns": [1, 2]},
        {"turns": "text"},
        {"turns": 3, "prompt": "a column of the same name beside a prompt"},
    ]
    out = tmp_path / "o.jsonl"
    done = pagedgen(
        "run", tiny_model(), write_jsonl(tmp_path / "p.jsonl", rows), "-o", out, "--max-tokens", 20, "--ignore-eos",
        "--max-model-len", 80,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    got = read_jsonl(out)
    assert [(r["row_index"], r["turn_index"], r["error_code"]) for r in got] == [
        (0, 0, None), (0, 1, "prompt_too_long"), (0, 2, "prompt_too_long"), (0, 3, "prompt_too_long"),
        (1, 0, None), (1, 1, None), (2, 0, "not_text"), (3, 0, "not_text"), (4, 0, None),
    ]  # fmt: skip
    assert [r["num_prompt_tokens"] is None for r in got] == [False, True, True, True, False, False, True, True, False]


def test_turns_need_a_chat_template_and_no_beams(tiny_model, tmp_path):
    source = write_jsonl(tmp_path / "p.jsonl", [{"turns": ["a", "b"]}, {"turns": ["a"]}])
    done = pagedgen("run", tiny_model(chat_template=None), source, "-o", tmp_path / "o.jsonl")
    assert done.returncode == 2
    assert "no chat template" in done.stderr
    done = pagedgen("run", tiny_model(), source, "-o", tmp_path / "o.jsonl", "--beam-width", 2, "--max-tokens", 4)
    assert done.returncode == 3
    assert [r["error_code"] for r in read_jsonl(tmp_path / "o.jsonl")] == ["bad_sampling_params"] * 2 + [None]


def test_a_small_pool_with_swap_space_writes_the_same_answers(tiny_model, prompts, tmp_path):
    answers = []
    for name, flags in (("a", []), ("b", ["--max-block-num", 24, "--swap-space", "2MiB", "--disk-swap", f"{tmp_path}:2MiB"])):
        out = tmp_path / f"{name}.jsonl"
        done = pagedgen(
            "run", tiny_model(), prompts, "-o", out, "--max-tokens", 40, "--ignore-eos", "--block-size", 4, "--audit", *flags
        )
        assert done.returncode == 0, done.stderr
        answers.append([r["response"] for r in read_jsonl(out)])
    assert answers[0] == answers[1]
    assert "swap space" in done.stderr
    plan = pagedgen("plan", tiny_model(), prompts, "--swap-space", "2MiB", "--disk-swap", f"{tmp_path}:3MiB", "--json")
    assert plan.returncode == 0, plan.stderr
    numbers = json.loads(plan.stdout)
    assert (numbers["host_blocks"] > 0, numbers["disk_blocks"] > 0) == (True, True)


def test_the_block_map_can_be_looked_at(tiny_model, prompts, tmp_path):
    path = tmp_path / "map.jsonl"
    done = pagedgen(
        "run", tiny_model(), prompts, "-o", tmp_path / "o.jsonl", "--max-tokens", 30, "--ignore-eos", "--block-size", 4,
        "--max-block-num", 40, "--block-map", path, "--block-map-every", 5,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    block_map = read_block_map(str(path))
    assert block_map.header["num_blocks"] == 40
    assert [s["step"] for s in block_map.snapshots] == list(range(0, 5 * len(block_map.snapshots), 5))
    for snapshot in block_map.snapshots:
        used = [block_id for block_id, *_ in snapshot["used"]]
        cached = [block_id for block_id, _ in snapshot["cached"]]
        assert len({*used, *cached}) == len(used) + len(cached) <= 40
        assert all(0 <= filled <= 4 and refs >= 1 for *_, filled, refs in snapshot["used"])
    assert any(refs > 1 for s in block_map.snapshots for *_, refs in s["used"]), "the common beginning is shared"
    shown = pagedgen("blocks", path, "--step", 12, "--width", 40)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("step 10: 40 blocks of 4 tokens")
    cells = lines[1][8:]
    at = block_map.at(12)
    assert len(cells) == 40
    assert cells.count("·") == 40 - len(at["used"]) - len(at["cached"])
    assert sum(c.isdigit() or c == "+" for c in cells) == sum(refs > 1 for *_, refs in at["used"])
    assert pagedgen("blocks", path).stdout.startswith(f"step {block_map.snapshots[-1]['step']}:")


def test_files_that_are_no_block_map_are_told(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_block_map(str(tmp_path / "none"))
    header = json.dumps({"version": 1, "block_size": 4, "num_blocks": 2, "host_blocks": 0, "disk_blocks": 0, "every": 1})
    for content, named in (
        ("", "no block map"), ("[1]", "no block map"), ('{"version": 99}', "no block map"), (header + "\n", "no snapshot"),
        (header + '\n{"step": 1}\n', "damaged"),
        (header + '\n{"step":0,"used":[[2,0,0,1,1]],"cached":[],"host":[],"disk":[]}\n', "damaged"),
        (header + '\n{"step":0,"used":[["x"]],"cached":[],"host":[],"disk":[]}\n', "damaged"),
        ("[" * 200_000, "no block map"),
        ('{"version": 1}\n{"step":0,"used":[],"cached":[],"host":[],"disk":[]}\n', "damaged"), ("\xff\xfe", "can't read"),
    ):  # fmt: skip
        path = tmp_path / "map"
        path.write_bytes(content.encode("latin-1"))
        done = pagedgen("blocks", path)
        assert done.returncode == 2, content
        assert named in done.stderr.replace("\n", " "), content
    path.write_text(header + '\n{"step":0,"used":[],"cached":[],"host":[],"disk":[]}\n{"step":1,"us')
    assert pagedgen("blocks", path).stdout.startswith("step 0:")  # its writer was killed


def test_a_huge_block_map_is_shown_without_its_free_blocks(tmp_path):
    path = tmp_path / "map"
    header = {"version": 1, "block_size": 4, "num_blocks": 10**12, "host_blocks": 3, "disk_blocks": 0, "every": 1}
    used = [[7, 0, 0, 4, 1], [10**12 - 1, 1, 0, 1, 2]]
    path.write_text(
        json.dumps(header) + "\n" + json.dumps({"step": 3, "used": used, "cached": [[8, 5]], "host": [1], "disk": []})
    )
    done = pagedgen("blocks", path, "--width", 10)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:5] == [
        "     0  ·······█░·", "        … 999,999,999,980 free blocks", "999999999990  ·········2",
        "host: 1 of 3 blocks hold something",
    ]  # fmt: skip


def test_a_config_file_may_say_when_a_search_ends(tiny_model, prompts, tmp_path):
    config = tmp_path / "c.toml"
    config.write_text("beam-width = 2\nearly-stopping = true\nmax-tokens = 3\nswap-space = 0\n")
    out = tmp_path / "o.jsonl"
    done = pagedgen("run", tiny_model(), prompts, "-o", out, "--config", config)
    assert done.returncode == 0, done.stderr
    assert stats_of(out)["config"]["sampling"]["early_stopping"] is True
    config.write_text('block-map = "a\\u0000b"\n')
    done = pagedgen("run", tiny_model(), prompts, "-o", out, "--overwrite", "--config", config)
    assert (done.returncode, "NUL character" in done.stderr) == (2, True)


def test_a_row_that_asks_for_too_many_samples_is_one_error(tiny_model, tmp_path):
    rows = [{"prompt": "x", "sampling_params": {"n": 10**9, "temperature": 1}}, {"prompt": "x"}]
    out = tmp_path / "o.jsonl"
    done = pagedgen("run", tiny_model(), write_jsonl(tmp_path / "p.jsonl", rows), "-o", out, "--max-tokens", 2)
    assert done.returncode == 3, done.stderr
    assert [r["error_code"] for r in read_jsonl(out)] == ["bad_sampling_params", None]


def test_plan_counts_beams_and_samples(tiny_model, prompts, tmp_path):
    peaks = []
    for flags in ([], ["--n", 2], ["--beam-width", 4, "--no-enable-prefix-caching"]):
        done = pagedgen("plan", tiny_model(), prompts, "--json", "--max-tokens", 50, *flags)
        assert done.returncode == 0, done.stderr
        peaks.append(json.loads(done.stdout)["peak_blocks_needed"])
    assert peaks == sorted(peaks)
    assert len(set(peaks)) == 3
