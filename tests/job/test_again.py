"""The same command again, or nearly the same: what is gone on with, what is refused and why, what is done anew."""

from __future__ import annotations

import json
import random
import shutil
from unittest import mock

import pyarrow.parquet as pq
import pytest
from command import read_jsonl
from echo import EchoJobs
from job_runs import leftovers, mixed_rows, write_jsonl

from pagedgen.config import PromptConfig
from pagedgen.errors import UsageError
from pagedgen.sampling_params import SamplingParams
from pagedgen.stopping import Stopper


class Broken(Exception):
    """The engine dies, as by a kill."""


@pytest.fixture(scope="module")
def jobs(tiny_model):
    return EchoJobs(tiny_model("llama"))


@pytest.fixture
def source(tmp_path):
    return write_jsonl(tmp_path / "in.jsonl", mixed_rows(100))


def die_after(count):
    """Return what raises at the count-th answer."""
    seen = []

    def after_row():
        seen.append(1)
        if len(seen) == count:
            raise Broken

    return after_row


def leave_half_done(jobs, source, output, *, answers=40, **settings):
    """Run a job that dies; the answers before are on disk."""
    with pytest.raises(Broken):
        jobs.run([source], output, rng=random.Random(1), after_row=die_after(answers), flush_s=0.0, **settings)
    assert list((output.parent / f"{output.name}.parts").glob("part-*")), "there is something to go on with"


SAMPLED = SamplingParams(temperature=1.0, n=4)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_samples_that_are_there_are_kept_and_the_others_made(jobs, source, tmp_path, suffix):
    """Some of a row's samples are kept, some are missing: each is there once in the end, as if nothing had happened."""
    whole, output = tmp_path / f"whole.{suffix}", tmp_path / f"out.{suffix}"
    jobs.run([source], whole, sampling=SAMPLED, token_ids=True)
    leave_half_done(jobs, source, output, sampling=SAMPLED, token_ids=True)
    parts = sorted((tmp_path / f"out.{suffix}.parts").glob("part-*"))
    kept = b""
    for part in parts:  # of every row, drop samples 1 and 3
        lines = [line for line in part.read_bytes().splitlines(keepends=True) if line.split()[2] in (b"0", b"2")]
        part.write_bytes(b"".join(lines))
        kept += part.read_bytes()
    report = jobs.run([source], output, sampling=SAMPLED, token_ids=True)
    assert report.stats["rows_reused"] == kept.count(b"\n") > 0
    assert output.read_bytes() == whole.read_bytes()


def test_a_finished_job_is_not_done_again(jobs, source, tmp_path):
    output = tmp_path / "out.jsonl"
    first = jobs.run([source], output)
    before = output.stat().st_mtime_ns
    again = jobs.run([source], output)
    assert (again.is_repeat, again.num_results, again.num_errors) == (True, first.num_results, first.num_errors)
    assert again.exit_code(0.0) == first.exit_code(0.0) == 3
    assert again.exit_code(0.5) == 0
    assert output.stat().st_mtime_ns == before
    assert not jobs.run([source], output, overwrite=True).is_repeat


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sampling": SamplingParams(temperature=0.7)}, "sampling.temperature was 0.0, is 0.7"),
        ({"sampling": SamplingParams(stop=("x",))}, "sampling.stop"),
        ({"sampling": SamplingParams(max_tokens=3)}, "sampling.max_tokens was 512, is 3"),
        ({"prompts": PromptConfig(system_prompt="Be brief.")}, "prompts.system_prompt"),
        ({"prompts": PromptConfig(prompt_template="{{ prompt }}!")}, "prompts.prompt_template"),
        ({"too_long": "skip"}, "prompts.too_long"),
        ({"limit": 50}, "rows.limit"),
        ({"sample": 50}, "rows.sample"),
        ({"shard": (0, 2)}, "rows.shard"),
        ({"max_total_tokens": 10**6}, "rows.max_total_tokens"),
        ({"id_column": "label"}, "rows.id_column"),
        ({"token_ids": True}, "output.token_ids"),
        ({"format": "openai-batch"}, "prompts.format"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_job_begun_otherwise_is_refused_with_the_field(jobs, source, tmp_path, change, named):
    output = tmp_path / "out.jsonl"
    leave_half_done(jobs, source, output)
    parts = {p.name: p.read_bytes() for p in (tmp_path / "out.jsonl.parts").iterdir()}
    with pytest.raises(UsageError) as told:
        jobs.run([source], output, **change)
    assert named in str(told.value)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out.jsonl.parts").iterdir()} == parts, "nothing is lost"
    jobs.run([source], output)
    finished = output.read_bytes()
    with pytest.raises(UsageError) as told:
        jobs.run([source], output, **change)
    assert named in str(told.value)
    assert output.read_bytes() == finished


def test_what_does_not_shape_results_may_change(jobs, source, tmp_path):
    output, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    jobs.run([source], whole)
    leave_half_done(jobs, source, output)
    moved = tmp_path / "elsewhere.jsonl"
    shutil.copy(source, moved)
    jobs.run([moved], output, stats=str(tmp_path / "s.json"), flush_s=5.0, grace_s=1.0, deadline_s=1e6, on_error="continue")
    assert output.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("where", ["weights", "config", "chat template", "input"])
def test_other_content_at_the_same_path_is_refused(tiny_model, tmp_path, where):
    model = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), model)
    source = write_jsonl(tmp_path / "in.jsonl", mixed_rows(100))
    leave_half_done(EchoJobs(model), source, tmp_path / "out.jsonl")
    if where == "input":
        write_jsonl(source, [*mixed_rows(99), {"prompt": "another last row"}])
        named = "input[0]"
    elif where == "weights":
        weights = model / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-5] ^= 1
        weights.write_bytes(bytes(content))
        named = "model.files.model.safetensors"
    elif where == "config":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
        named = "model.files.config.json"
    else:
        jinja = model / "chat_template.jinja"
        jinja.write_text(jinja.read_text() + "!")
        named = "chat_template"
    with pytest.raises(UsageError, match=named.replace("[", r"\[").replace("]", r"\]")):
        EchoJobs(model).run([source], tmp_path / "out.jsonl")


def test_restart_throws_away_what_is_there(jobs, source, tmp_path):
    output = tmp_path / "out.jsonl"
    leave_half_done(jobs, source, output)
    report = jobs.run([source], output, restart=True, token_ids=True)
    assert report.stats["rows_reused"] == 0
    assert "token_ids" in read_jsonl(output)[0]
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_retry_errors_makes_only_the_failed_rows_again(jobs, tmp_path, suffix, monkeypatch):
    """Rows fail for a reason that goes away; with it gone the output is that of a job that never failed."""
    rows = [{"id": i, "prompt": f"prompt {i}"} for i in range(50)]
    rows += [{"id": 50, "turns": ["one", "two"]}]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    whole, output = tmp_path / f"whole.{suffix}", tmp_path / f"out.{suffix}"
    jobs.run([source], whole, token_ids=True)
    answer = EchoJobs.__init__.__globals__["EchoEngine"]._answer

    def failing(self, request, on_finished):
        from pagedgen.errors import RowError

        if request.row_index % 5 == 0:
            on_finished.__self__.on_error(request, 0, RowError("nan_logits", "not a number"))
        else:
            answer(self, request, on_finished)

    with monkeypatch.context() as patch:
        patch.setattr("echo.EchoEngine._answer", failing)
        report = jobs.run([source], output, token_ids=True)
        assert report.num_errors == 12
        assert jobs.run([source], output, token_ids=True).is_repeat
    report = jobs.run([source], output, token_ids=True, retry_errors=True)
    assert report.num_errors == 0
    assert report.stats["rows_reused"] == 40
    assert output.read_bytes() == whole.read_bytes()
    assert not leftovers(tmp_path)


def test_retry_errors_of_a_stopped_job(jobs, source, tmp_path):
    """What failed before it was stopped is tried again as well."""
    output, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    jobs.run([source], whole)
    leave_half_done(jobs, source, output)
    report = jobs.run([source], output, retry_errors=True)
    assert report.num_errors == 8
    assert output.read_bytes() == whole.read_bytes()


def test_rows_are_chosen_by_seed_and_keep_their_index(jobs, source, tmp_path):
    outputs = [tmp_path / f"{i}.jsonl" for i in range(2)]
    for output in outputs:
        jobs.run([source], output, sample=30)
    chosen = [r["row_index"] for r in read_jsonl(outputs[0])]
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert len(set(chosen)) == 30
    assert chosen == sorted(chosen)
    assert chosen != list(range(30))
    jobs.run([source], tmp_path / "all.jsonl", sample=1000)
    assert len(read_jsonl(tmp_path / "all.jsonl")) == 100


def test_a_token_budget_takes_rows_in_order_and_skips_the_others(jobs, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x" * 10}] * 20)
    sampling = SamplingParams(max_tokens=40)
    report = jobs.run([source], tmp_path / "o.jsonl", sampling=sampling, max_total_tokens=50 * 7 + 49)
    got = read_jsonl(tmp_path / "o.jsonl")
    assert [r["finish_reason"] for r in got] == ["stop"] * 7 + ["skipped"] * 13
    assert {r["stop_reason"] for r in got[7:]} == {"max_total_tokens"}
    assert report.exit_code(0.0) == 0
    assert report.stats["rows"] == {"total": 20, "skipped": 13, "stop": 7}


def test_prompts_too_long_are_skipped_or_cut(jobs, tmp_path):
    rows = [{"prompt": "ab" * 400}, {"messages": [{"role": "user", "content": "ab" * 400}]}, {"prompt": "short"}]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    sampling = SamplingParams(max_tokens=100)
    jobs.run([source], tmp_path / "error.jsonl", sampling=sampling)
    assert [r["error_code"] for r in read_jsonl(tmp_path / "error.jsonl")] == ["prompt_too_long"] * 2 + [None]
    report = jobs.run([source], tmp_path / "skip.jsonl", sampling=sampling, too_long="skip")
    got = read_jsonl(tmp_path / "skip.jsonl")
    assert [(r["finish_reason"], r["stop_reason"]) for r in got] == [("skipped", "too_long")] * 2 + [("stop", None)]
    assert report.exit_code(0.0) == 0
    for way in ("truncate-left", "truncate-middle"):
        jobs.run([source], tmp_path / f"{way}.jsonl", sampling=sampling, too_long=way)
        got = read_jsonl(tmp_path / f"{way}.jsonl")
        assert [r["num_prompt_tokens"] for r in got[:2]] == [412, 412]
        assert [r["num_truncated_tokens"] for r in got] == [800 - 412, got[1]["num_truncated_tokens"], 0]
        assert got[1]["num_truncated_tokens"] > 380


def test_a_stopped_job_says_how_far_it_is(jobs, source, tmp_path):
    stopper = Stopper(grace_s=0)
    report = jobs.run([source], tmp_path / "o.jsonl", stopper=stopper, after_row=lambda: stopper.stop("TERM"), flush_s=0.0)
    assert report.exit_code(0.0) == 75
    assert report.num_results == 8 + 16, "the bad rows and those of the step that was running"
    stats = json.loads((tmp_path / "o.jsonl.stats.json").read_text())
    assert (stats["partial"], stats["stopped_by"]) == (True, "TERM")
    jobs.run([source], tmp_path / "o.jsonl")
    assert len(read_jsonl(tmp_path / "o.jsonl")) == 100


def test_other_files_in_the_parts_directory_are_not_touched(jobs, source, tmp_path):
    parts = tmp_path / "o.jsonl.parts"
    parts.mkdir()
    (parts / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="other files"):
        jobs.run([source], tmp_path / "o.jsonl")
    assert (parts / "thesis.txt").read_text() == "mine"


def test_parquet_columns_are_the_inputs_own(jobs, tmp_path):
    import pyarrow as pa

    table = pa.table(
        {"id": pa.array([1, None, 2**63 - 1], pa.int64()), "prompt": ["a", None, "c"], "z": pa.array([b"x", b"", None])}
    )
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=1)
    jobs.run([tmp_path / "in.parquet"], tmp_path / "o.parquet", sampling=SAMPLED)
    got = pq.read_table(tmp_path / "o.parquet")
    assert got.column("id").to_pylist() == [v for v in (1, None, 2**63 - 1) for _ in range(4)]
    assert got.schema.field("z").type == pa.binary()


OPENAI = [
    {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p" if i % 3 else None}}
    for i in range(9)
]


def test_no_file_that_is_not_the_jobs_is_replaced(jobs, source, tmp_path):
    batch = write_jsonl(tmp_path / "b.errors.jsonl", OPENAI)
    with pytest.raises(UsageError, match=r"failures' file .* is one of the inputs"):
        jobs.run([batch], tmp_path / "b.jsonl")
    theirs = tmp_path / "o.errors.jsonl"
    theirs.write_text("mine")
    with pytest.raises(UsageError, match=r"failures' file .* exists"):
        jobs.run([batch], tmp_path / "o.jsonl")
    assert theirs.read_text() == "mine"
    with pytest.raises(UsageError, match="another output of this command"):
        jobs.run([source], tmp_path / "q.jsonl", stats=str(tmp_path / "q.jsonl.manifest.json"))
    beside = shutil.copy(source, tmp_path / "r.jsonl.manifest.json")
    with pytest.raises(UsageError, match="is one of the inputs"):
        jobs.run([beside], tmp_path / "r.jsonl", format="jsonl")


def test_another_jobs_unfinished_rows_outlive_a_repetition(jobs, source, tmp_path):
    """A is finished; B, which was to replace it, was killed. A again is a repetition, and B can still go on."""
    output = tmp_path / "out.jsonl"
    jobs.run([source], output)
    leave_half_done(jobs, source, output, overwrite=True, sampling=SAMPLED)
    assert jobs.run([source], output).is_repeat
    assert "another job's unfinished rows" in " ".join(jobs.notes)
    assert jobs.run([source], output, overwrite=True, sampling=SAMPLED).stats["rows_reused"] > 0


def test_an_unfinished_retry_outlives_a_repetition(jobs, source, tmp_path):
    output = tmp_path / "out.jsonl"
    jobs.run([source], output)
    before = output.read_bytes()
    with mock.patch("pagedgen.jobs.run.Run._finish", side_effect=Broken), pytest.raises(Broken):
        jobs.run([source], output, retry_errors=True)
    assert jobs.run([source], output).is_repeat
    assert "--retry-errors of this job is unfinished" in " ".join(jobs.notes)
    assert jobs.run([source], output, retry_errors=True).stats["rows_reused"] == 92
    assert output.read_bytes() == before


def test_an_output_within_its_own_input_folder_can_go_on_and_be_repeated(jobs, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "in.jsonl", mixed_rows(100))
    output = folder / "out.jsonl"
    with pytest.raises(Broken):
        jobs.run([folder], output, after_row=die_after(40), flush_s=0.0)
    report = jobs.run([folder], output)
    assert report.stats["rows_reused"] > 0
    assert len(read_jsonl(output)) == 100
    assert jobs.run([folder], output).is_repeat
    assert jobs.run([str(folder / "*")], output).is_repeat


def test_the_date_that_a_template_prints_is_that_of_the_jobs_begin(tiny_model, tmp_path, monkeypatch):
    """Llama 3.2's template prints the date; a job that goes on tomorrow prints today's."""
    import datetime

    from pagedgen.prompts import render

    template = "{{ strftime_now('%d %b %Y %H:%M') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    jobs = EchoJobs(tiny_model("llama", chat_template=template))
    source = write_jsonl(tmp_path / "in.jsonl", [{"messages": [{"role": "user", "content": f"m{i}"}]} for i in range(100)])

    class Clock(datetime.datetime):
        today = datetime.datetime(2026, 1, 1, 12)

        @classmethod
        def now(cls, tz=None):
            return cls.today

    monkeypatch.setattr(render.datetime, "datetime", Clock)
    output = tmp_path / "o.jsonl"
    leave_half_done(jobs, source, output)
    Clock.today = Clock(2026, 1, 2, 12)
    jobs.run([source], output)
    assert {r["response"].split("m")[0] for r in read_jsonl(output)} == {"01 Jan 2026 00:00"}
    Clock.today = Clock(2026, 1, 3, 12)
    assert jobs.run([source], output).is_repeat


def test_a_finished_openai_batch_is_whole_only_with_its_failures(jobs, tmp_path):
    batch, output = write_jsonl(tmp_path / "in.jsonl", OPENAI), tmp_path / "o.jsonl"
    jobs.run([batch], output)
    assert jobs.run([batch], output).is_repeat
    with pytest.raises(UsageError, match="can't go on from a finished OpenAI batch"):
        jobs.run([batch], output, retry_errors=True)
    (tmp_path / "o.errors.jsonl").unlink()
    with pytest.raises(UsageError, match="exists"):
        jobs.run([batch], output)


def test_several_chat_templates_of_one_tokenizer(tiny_model, tmp_path):
    jobs = EchoJobs(tiny_model("llama"))
    tokenizer = jobs.opened.tokenizer
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ messages }}"}
    source = write_jsonl(tmp_path / "in.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    assert jobs.run([source], tmp_path / "o.jsonl").exit_code(0.0) == 0


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_shard_may_have_no_row(jobs, tmp_path, suffix):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    for i in range(3):
        assert jobs.run([source], tmp_path / f"s{i}.{suffix}", shard=(i, 3)).exit_code(0.0) == 0
    from pagedgen.jobs.merge import merge

    assert (
        merge([str(tmp_path / f"s{i}.{suffix}") for i in range(3)], str(tmp_path / f"o.{suffix}"), overwrite=False).num_results
        == 2
    )


def test_a_stopped_jobs_statistics_count_what_was_kept(jobs, source, tmp_path):
    output = tmp_path / "o.jsonl"
    leave_half_done(jobs, source, output)
    stopper = Stopper()
    report = jobs.run([source], output, stopper=stopper, after_row=lambda: stopper.stop("TERM"), flush_s=0.0)
    stats = json.loads((tmp_path / "o.jsonl.stats.json").read_text())
    lines = sum(len(p.read_bytes().splitlines()) for p in (tmp_path / "o.jsonl.parts").glob("part-*"))
    assert report.num_results == lines
    assert stats["rows"]["total"] + stats["rows_reused"] == lines


def test_null_in_a_prompt_template_is_a_row_error(jobs, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"q": "a", "c": None}, {"q": None, "c": "x"}])
    template = PromptConfig(prompt_template="{{ q }}{% if c is defined %} {{ c }}{% endif %}")
    jobs.run([source], tmp_path / "o.jsonl", prompts=template)
    got = read_jsonl(tmp_path / "o.jsonl")
    assert [r["error_code"] for r in got] == [None, "template_error"]
    assert got[0]["response"] == "a|0|0"


def test_a_touched_input_is_the_same_input(jobs, source, tmp_path):
    jobs.run([source], tmp_path / "o.jsonl", after_row=source.touch)
    assert len(read_jsonl(tmp_path / "o.jsonl")) == 100


def test_rows_made_of_an_input_that_changed_are_not_gone_on_with(jobs, source, tmp_path):
    content = source.read_text()

    def change():
        source.write_text(content + '{"prompt": "late"}\n')

    with pytest.raises(UsageError, match="changed while the job ran"):
        jobs.run([source], tmp_path / "o.jsonl", after_row=change, flush_s=0.0)
    source.write_text(content)
    with pytest.raises(UsageError, match="--restart"):
        jobs.run([source], tmp_path / "o.jsonl")
    jobs.run([source], tmp_path / "o.jsonl", restart=True)
    assert len(read_jsonl(tmp_path / "o.jsonl")) == 100
