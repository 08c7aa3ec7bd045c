"""The command line as a user meets it: exit codes, one sentence for what is wrong, what goes to which stream."""

from __future__ import annotations

import json
import os
import subprocess

import pyarrow.parquet as pq
import pytest
from command import COMMAND, ENV, pagedgen, read_jsonl


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"r{i}", "prompt": f"row {i} " * (i + 1), "label": i}) + "\n" for i in range(6)))
    return path


HOLES = [
    {"id": 1, "prompt": "hello"},
    {"id": 2, "prompt": ""},
    {"id": 3, "prompt": None},
    {"id": 4},
    {"id": 5, "messages": []},
    {"id": 6, "prompt": 123},
    {"id": 7, "prompt": "world"},
    {"id": 8, "prompt": "x", "sampling_params": {"max_tokens": -1}},
    {"id": 9, "prompt": "x", "sampling_params": {"max_tokens": 0}},
    {"id": 10, "prompt": "x", "sampling_params": {"max_tokens": 10**9}},
    {"id": 11, "prompt": "x", "sampling_params": {"stop_token_ids": [9999]}},
    {"id": 12, "prompt": "x" * 600},
    {"id": 13, "prompt_token_ids": [-1, 5]},
]


def test_run_writes_rows_in_order_and_statistics(tiny_model, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    done = pagedgen("run", tiny_model(), prompts, "-o", out, "--max-tokens", 5, "--ignore-eos", "--token-ids", "--audit")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    rows = read_jsonl(out)
    assert [r["id"] for r in rows] == [f"r{i}" for i in range(6)]
    assert [r["label"] for r in rows] == list(range(6))
    assert all(len(r["token_ids"]) == 5 and r["finish_reason"] == "length" for r in rows)
    stats = json.loads((tmp_path / "out.jsonl.stats.json").read_text())
    for key in (
        "rows", "prompt_tokens", "cached_tokens", "generated_tokens", "wall_s", "startup_s", "generate_s", "tokens_per_s",
        "time_split_s", "num_steps", "blocks", "padding_saved", "preemptions", "recomputed_tokens", "peak_memory_bytes",
        "config",
    ):  # fmt: skip
        assert key in stats
    for key in ("total", "peak", "mean_utilization", "slot_utilization", "mean_table_length", "series"):
        assert key in stats["blocks"]
    assert {"read", "tokenize", "prefill", "decode", "sample", "write"} <= set(stats["time_split_s"])
    assert stats["rows"] == {"total": 6, "length": 6}
    assert stats["prompt_tokens"] == sum(r["num_prompt_tokens"] for r in rows)
    assert stats["generated_tokens"] == 30
    assert stats["config"]["engine"]["seed"] == 0
    assert "padding saved" in done.stderr


def test_bad_rows_stay_in_place_and_the_rest_runs(tiny_model, tmp_path):
    source, out = tmp_path / "holes.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(r) + "\n" for r in HOLES) + "{broken\n")
    done = pagedgen("run", tiny_model(), source, "-o", out, "--max-tokens", 3, "--ignore-eos", "--max-model-len", 99)
    assert done.returncode == 3, done.stderr
    assert "10 of 14 rows failed, more than --max-error-rate 0 allows; the first: row 1: " in done.stderr.replace("\n", " ")
    rows = read_jsonl(out)
    assert [r["id"] for r in rows] == [*range(1, 14), None]
    codes = [r["error_code"] for r in rows]
    assert codes == [
        None, "empty_prompt", "null_prompt", "missing_prompt", "no_messages", "not_text", None, "bad_sampling_params", None,
        None, "bad_sampling_params", "prompt_too_long", "bad_token_ids", "bad_json",
    ]  # fmt: skip
    assert all((r["error"] is not None) == (r["finish_reason"] == "error") for r in rows)
    assert (rows[8]["response"], rows[8]["finish_reason"], rows[8]["num_generated_tokens"]) == ("", "length", 0)
    assert rows[9]["num_generated_tokens"] == 98
    assert "holes.jsonl line 14" in rows[13]["error"]
    good = tmp_path / "good.jsonl"
    good.write_text(json.dumps(HOLES[0]) + "\n" + json.dumps(HOLES[6]) + "\n")
    assert pagedgen("run", tiny_model(), good, "-o", tmp_path / "g.jsonl", "--max-tokens", 3, "--ignore-eos").returncode == 0
    assert [r["response"] for r in read_jsonl(tmp_path / "g.jsonl")] == [rows[0]["response"], rows[6]["response"]]
    allowed = pagedgen(
        "run", tiny_model(), source, "-o", out, "--max-tokens", 3, "--overwrite", "--max-error-rate", 0.9, "--max-model-len", 99
    )
    assert allowed.returncode == 0


def test_samples_are_rows_of_their_own_in_order(tiny_model, prompts, tmp_path):
    with prompts.open("a") as file:
        file.write('{"id": "bad", "prompt": null}\n')
    out = tmp_path / "out.jsonl"
    done = pagedgen("run", tiny_model(), prompts, "-o", out, "--n", 3, "--temperature", 1, "--seed", 4, "--max-tokens", 5)
    assert done.returncode == 3, done.stderr
    rows = read_jsonl(out)
    assert [(r["row_index"], r["sample_index"]) for r in rows] == [(i, n) for i in range(7) for n in range(3)]
    assert [r["error_code"] for r in rows] == [None] * 18 + ["null_prompt"] * 3
    assert len({r["response"] for r in rows[:3]}) > 1
    stats = json.loads((tmp_path / "out.jsonl.stats.json").read_text())
    assert stats["rows"]["total"] == 21
    assert stats["prompt_tokens"] == sum(r["num_prompt_tokens"] for r in rows if r["sample_index"] == 0 and not r["error"])


@pytest.mark.parametrize("stop_early", [False, True])
def test_parquet_in_and_out(tiny_model, tmp_path, stop_early):
    import pyarrow as pa

    chat = [{"role": "user", "content": "hi"}]
    table = pa.table(
        {"id": pa.array([2**62, 5], pa.int64()), "messages": [chat, None], "w": pa.array([1.5, None], pa.float32())}
    )
    source, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(table, source)
    stop = ["--stop", "a", "--stop", "b", "--stop", "c"] if stop_early else []
    done = pagedgen("run", tiny_model(), source, "-o", out, "--max-tokens", 4, "--ignore-eos", "--token-ids", *stop)
    assert done.returncode == 3, done.stderr
    got = pq.read_table(out)
    assert got.column("id").to_pylist() == [2**62, 5]
    assert got.schema.field("messages").type == table.schema.field("messages").type
    assert got.schema.field("w").type == pa.float32()
    assert got.column("error_code").to_pylist() == [None, "null_prompt"]
    assert got.schema.field("token_ids").type == pa.list_(pa.int32())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "MODEL", "nothing.jsonl", "-o", "o.jsonl"], "no such file: nothing.jsonl"),
        (["run", "MODEL", "PROMPTS", "-o", "o.csv"], "suffix"),
        (["run", "MODEL", "PROMPTS", "-o", "existing.jsonl"], "--overwrite"),
        (["run", "MODEL", "PROMPTS", "-o", "PROMPTS"], "one of the inputs"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--stats", "PROMPTS"], "one of the inputs"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--stats", "o.jsonl"], "is another output of this command: the output"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--stats", "."], "is a directory"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--stats", "existing.jsonl"], "--overwrite"),
        (["run", "MODEL", "PROMPTS", "-o", "pipe.jsonl"], "not a regular file"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--kv-cache-memory-bytes", "1000"], "did you mean 1000GiB"),
        (
            ["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--max-block-num", "1", "--block-size", "4"],
            "allowed by --max-block-num",
        ),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--max-block-num", "2000000000"], "bytes"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--stop-token-ids", "263"], "--stop-token-ids 263"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--chat-template", "bad.jinja"], "not a Jinja template"),
        (["run", "MODEL", "x" * 300 + ".jsonl", "-o", "o.jsonl"], "File name too long"),
        (["run", "x" * 300, "PROMPTS", "-o", "o.jsonl"], "x" * 20),
        (["run", "labels.jsonl", "PROMPTS", "-o", "o.jsonl"], "is a file, not a model directory"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--prompt-column", "prompt", "--messages-column", "id"], "exclude"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--prompt-column", "x"], "found id, prompt, label"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--id-column", "x"], "found id, prompt, label"),
        (["run", "MODEL", "labels.jsonl", "-o", "o.jsonl"], "no prompt column"),
        (["run", "MODEL", "empty.jsonl", "-o", "o.jsonl"], "no rows"),
        (["run", "NOTEMPLATE", "chat.jsonl", "-o", "o.jsonl"], "--chat-template"),
        (["run", "ENCODER", "PROMPTS", "-o", "o.jsonl"], "encoder-decoder"),
        (["run", "nowhere/at/all", "PROMPTS", "-o", "o.jsonl"], "no such model directory"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--temperature", "-1"], "temperature"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--temperature", "1", "--top-p", "0"], "top_p"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--top-p", "0.9"], "--temperature"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--stop", ""], "stop"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--n", "2"], "temperature"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--max-tokens", "many"], "valid integer"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--block-size", "24"], "--block-size 24"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--dtype", "int3"], "--dtype int3"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--max-model-len", "9999"], "--max-model-len 9999"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--kv-cache-memory-bytes", "lots"], "not a size"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--max-error-rate", "7"], "--max-error-rate"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--progress", "loud"], "--progress loud"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--chat-template", "gone.jinja"], "gone.jinja"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--device", "cuda"], "CUDA"),
        (["run", "MODEL", "PROMPTS", "-o", "o.jsonl", "--no-such-flag"], "--no-such-flag"),
        (["run", "MODEL", "PROMPTS"], "--output"),
        (["plan", "MODEL", "nothing.jsonl"], "no such file"),
        (["plan", "MODEL", "PROMPTS", "--device-memory", "1MiB"], "no memory for the KV pool"),
        (["plan", "MODEL", "PROMPTS", "--device-memory", "80"], "did you mean 80GiB"),
        (["run", "smollm2-135M", "PROMPTS", "-o", "o.jsonl"], "did you mean smollm2-135m"),
        (["plan", "MODEL", "PROMPTS", "--max-tokens", "-3"], "max_tokens"),
        (["model", "get", "gpt-5"], "no demo model gpt-5"),
    ],
    ids=lambda v: " ".join(v[-2:]) if isinstance(v, list) else "",
)
def test_what_can_not_run_is_told_in_one_sentence_with_exit_code_2(tiny_model, prompts, tmp_path, arguments, said):
    import torch

    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    (tmp_path / "existing.jsonl").write_text("kept\n")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "labels.jsonl").write_text('{"label": 1}\n')
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    (tmp_path / "bad.jinja").write_text("{% if %}")
    os.mkfifo(tmp_path / "pipe.jsonl")
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    (encoder / "config.json").write_text('{"model_type": "t5"}')
    (encoder / "model.safetensors").write_bytes(b"")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (encoder / name).write_bytes((tiny_model() / name).read_bytes())
    names = {
        "MODEL": tiny_model(), "PROMPTS": prompts, "ENCODER": encoder,
        "NOTEMPLATE": tiny_model("llama", chat_template=None),
    }  # fmt: skip
    done = pagedgen(*[names.get(a, a) for a in arguments], cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    assert "loading" not in done.stderr, "told before weights load"
    assert done.stdout == ""
    assert not (tmp_path / "o.jsonl").exists()
    assert (tmp_path / "existing.jsonl").read_text() == "kept\n"


def test_a_full_device_behind_stdout_is_an_output_error(tiny_model, prompts):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "run", str(tiny_model()), str(prompts), "-o", "-", "--max-tokens", "3"],
            stdout=full, stderr=subprocess.PIPE, text=True, env=ENV, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 4
    assert "errno 28" in done.stderr
    assert "Traceback" not in done.stderr


def test_rows_that_ask_for_nothing_are_no_errors(tiny_model, prompts, tmp_path):
    plan = json.loads(pagedgen("plan", tiny_model(), prompts, "--json", "--max-tokens", 0).stdout)
    assert (plan["num_rows"], plan["num_row_errors"]) == (6, 0)
    done = pagedgen("run", tiny_model(), prompts, "-o", tmp_path / "o.jsonl", "--max-tokens", 0)
    assert done.returncode == 0, done.stderr
    assert {r["finish_reason"] for r in read_jsonl(tmp_path / "o.jsonl")} == {"length"}


def test_a_log_that_can_not_be_written_does_not_end_the_job(tiny_model, prompts, tmp_path):
    for mode in ("plain", "json"):
        out = tmp_path / f"{mode}.jsonl"
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [*COMMAND, "run", str(tiny_model()), str(prompts), "-o", str(out), "--max-tokens", "3", "--progress", mode],
                stdout=subprocess.PIPE, stderr=full, text=True, env=ENV, timeout=120, check=False,
            )  # fmt: skip
        assert done.returncode == 0
        assert len(read_jsonl(out)) == 6


def test_a_job_without_a_usable_row_loads_nothing_and_says_so(tiny_model, tmp_path):
    (tmp_path / "bad.jsonl").write_text("{broken\n[]\n")
    done = pagedgen("run", tiny_model(), tmp_path / "bad.jsonl", "-o", tmp_path / "o.jsonl")
    assert done.returncode == 3
    assert "loading" not in done.stderr
    assert [r["error_code"] for r in read_jsonl(tmp_path / "o.jsonl")] == ["bad_json", "bad_json"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_directory(tiny_model, prompts, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    done = pagedgen("run", tiny_model(), prompts, "-o", locked / "o.jsonl")
    assert done.returncode == 4


def test_missing_output_directory_is_an_output_error(tiny_model, prompts, tmp_path):
    done = pagedgen("run", tiny_model(), prompts, "-o", tmp_path / "no" / "o.jsonl")
    assert done.returncode == 4
    assert "errno 2" in done.stderr
    assert "loading" not in done.stderr


def test_stdout_holds_json_lines_and_nothing_else(tiny_model, prompts):
    done = pagedgen("run", tiny_model(), prompts, "-o", "-", "--max-tokens", 3, "--progress", "json")
    assert done.returncode == 0
    assert [json.loads(line)["row_index"] for line in done.stdout.splitlines()] == list(range(6))
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert {"event": "generate", "rows": 6} in events
    assert events[-1]["event"] == "done"
    assert events[-1]["stats"]["rows"]["total"] == 6


def test_a_closed_reader_ends_the_run_quietly(tiny_model, prompts):
    reader, pipe = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*COMMAND, "run", str(tiny_model()), str(prompts), "-o", "-", "--max-tokens", "3"],
            stdout=pipe, stderr=subprocess.PIPE, text=True, env=ENV, timeout=120, check=False,
        )  # fmt: skip
    finally:
        os.close(pipe)
    assert done.returncode == 4
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_plan_is_one_json_document(tiny_model, prompts):
    done = pagedgen("plan", tiny_model(), prompts, "--json", "--dtype", "float32", "--max-tokens", 10)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    for key in (
        "weights_bytes", "activation_peak_bytes", "bytes_per_token", "bytes_per_block", "block_size", "available_kv_bytes",
        "max_block_num", "num_rows", "num_too_long", "prompt_tokens", "padded_tokens", "padding_saved", "peak_blocks_needed",
        "max_concurrent_rows",
    ):  # fmt: skip
        assert key in plan
    assert plan["bytes_per_token"] == 2 * 3 * 2 * 16 * 4
    assert plan["num_rows"] == 6
    assert plan["prompt_tokens"] == sum(len(f"row {i} " * (i + 1)) for i in range(6))
    assert plan["max_block_num"] == plan["available_kv_bytes"] // plan["bytes_per_block"]


def test_plan_for_another_device_needs_no_such_device(tiny_model, prompts):
    done = pagedgen("plan", tiny_model(), prompts, "--json", "--device", "cuda", "--device-memory", "80GiB")
    plan = json.loads(done.stdout)
    assert plan["block_size"] == 16
    assert plan["device_total_bytes"] == 80 * 2**30
    assert plan["max_num_seqs"] == 256
    table = pagedgen("plan", tiny_model(), prompts, "--device-memory", "1GiB")
    assert "max_block_num" in table.stdout


def test_plan_foretells_what_run_does(tiny_model, prompts, tmp_path):
    """Row errors and sizes of a plan are those of the run with the same flags."""
    flags = ["--block-size", "4", "--max-block-num", "8", "--max-tokens", "4", "--dtype", "float32"]
    plan = json.loads(pagedgen("plan", tiny_model(), prompts, "--json", *flags).stdout)
    pagedgen("run", tiny_model(), prompts, "-o", tmp_path / "o.jsonl", *flags, "--ignore-eos")
    stats = json.loads((tmp_path / "o.jsonl.stats.json").read_text())
    assert plan["num_too_large"] == stats["row_errors"]["kv_pool_too_small"] > 0
    assert stats["blocks"]["total"] == 8
    assert stats["plan"]["prompt_tokens"] == plan["prompt_tokens"]
    assert stats["plan"]["bytes_per_block"] == plan["bytes_per_block"]


def test_default_max_tokens_is_said(tiny_model, prompts):
    done = pagedgen("run", tiny_model(), prompts, "-o", "-", "--limit", 1)
    assert "max_tokens 512, the default" in done.stderr


def test_version_and_no_arguments():
    assert pagedgen("--version").stdout.strip() == "0.1.0"
    assert "run" in pagedgen().stdout + pagedgen().stderr


@pytest.mark.parametrize(
    ("args", "code", "said"), [(["--version"], 0, "."), (["run", "--nonsense"], 2, ""), (["run", "--help"], 0, "--threads")]
)
def test_the_installed_command_ends_at_once_with_its_whole_output(args, code, said):
    """It leaves by `os._exit`: what was printed and the exit code must be there all the same."""
    done = subprocess.run([*COMMAND, *args], env=ENV, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert said in done.stdout and (code == 0 or "No such option" in done.stderr)


def test_the_installed_command_needs_no_open_streams():
    done = subprocess.run(["sh", "-c", '"$@" >&- 2>&-', "sh", *COMMAND, "--nonsense"], env=ENV, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", b"")
