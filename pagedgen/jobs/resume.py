"""What earlier runs left, and whether this job may go on from it or take its place."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..config import JobConfig
from ..errors import UsageError
from ..machine import cpu_name
from ..rows.manifest import differences
from ..rows.output_path import OutputPath, check_writable
from ..rows.parts import PartStore
from ..rows.workspace import Workspace, finished_manifest, unfinished_manifest
from .output import import_finished
from .report import Progress
from .setup import Job


def find_finished(job: Job, output: OutputPath, workspace: Workspace) -> dict[str, Any] | None:
    """Return the manifest of this job's output when it is there and whole.

    Raises:
        UsageError: another file is at its place and may not be replaced.
    """
    path = output.path
    if path is None or job.config.overwrite or not path.exists():
        return None
    there = finished_manifest(path)
    if there is None:
        if _same_job(workspace.manifest(), job) and _beside(output, job):
            return None  # the output was being replaced, as by --retry-errors, when the run ended
        raise UsageError(f"--output {path} exists; pass --overwrite to replace it")
    facts = there.pop("result")
    job.adopt_time(there)
    different = differences(there, job.manifest)
    if different:
        raise UsageError(
            f"--output {path} exists and was made by another job: {some(different)}; pass --overwrite to replace it"
        )
    return facts


def _same_job(before: dict[str, Any] | None, job: Job) -> bool:
    if before is None:
        return False
    job.adopt_time(before["job"])
    return not differences(before["job"], job.manifest)


def _beside(output: OutputPath, job: Job) -> bool:
    """Return True when this job's manifest lies beside its output, whole or not."""
    if output.manifest is None:
        return False
    try:
        beside = json.loads(output.manifest.read_text(encoding="utf-8"))
        return not differences({k: v for k, v in beside.items() if k != "result"}, job.manifest)
    except (OSError, ValueError, AttributeError):
        return False


def clear_up(job: Job, workspace: Workspace, progress: Progress) -> None:
    """The job's output is there: remove what a run that ended between writing and clearing up left behind, and nothing else."""
    before = workspace.manifest()
    if before is None or (_same_job(before, job) and not before["retries"]):
        workspace.end()
    elif before["retries"]:
        progress.note(f"a --retry-errors of this job is unfinished in {workspace.directory}; the same command goes on with it")
    else:
        progress.note(f"{workspace.directory} holds another job's unfinished rows, which are left as they are")


def begin(job: Job, output: OutputPath, workspace: Workspace, from_output: bool, progress: Progress) -> None:
    """Take up what an earlier run of the same job left in the workspace, or begin; `from_output`: with what didn't fail in the
    output.

    Raises:
        UsageError: it is another job's.
    """
    before = workspace.manifest()
    if before is not None and not job.config.restart:
        job.adopt_time(before["job"])
        different = differences(before["job"], job.manifest)
        if different and workspace.has_parts():
            raise UsageError(
                f"{workspace.directory} holds a job that was begun otherwise: {some(different)}. Give the same settings to go "
                "on with it, --restart to throw its rows away, or another --output"
            )
        if before["spoiled"]:
            raise UsageError(
                f"the input changed while the rows in {workspace.directory} were made, and which are of what can't be told; "
                "--restart makes them anew"
            )
        if not different:
            if before["made_on"] != cpu_name():
                progress.note(f"this job was begun on another machine ({before['made_on']}); the last bits may differ here")
            return
    workspace.restart()
    if from_output:
        assert output.path is not None
        import_finished(output.path, PartStore(workspace.directory, flush_s=job.config.flush_s))
    workspace.begin({"job": job.manifest, "made_on": cpu_name(), "retries": from_output, "spoiled": False})


def some(lines: list[str]) -> str:
    """Return the first of several sentences, and how many more there are."""
    return "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")


def stats_path(config: JobConfig) -> str | None:
    """Return where statistics go: `--stats`, or beside the output."""
    return config.stats or (None if config.output == "-" else f"{config.output}.stats.json")


def check_side_files(config: JobConfig, output: OutputPath, inputs: list[Path], *, openai: bool, going_on: bool) -> None:
    """Check all that is written beside the output, before any work.

    What an earlier run of the job wrote there (`going_on`) may be replaced.

    Raises:
        UsageError: an input, another output, a directory, or somebody's file; OutputError: it can't be written.
    """
    stats = stats_path(config)
    for flag, given in (("--block-map", config.block_map), ("--stats", config.stats)):
        if given in ("", "-"):
            raise UsageError(f"{flag} needs the name of a file")
    # What has its place by the output's name belongs to it; a path that was named may be somebody's file.
    files = [
        ("--stats", stats, config.overwrite or config.stats is None or (going_on and _is_pagedgens(config.stats))),
        ("--block-map", config.block_map, config.overwrite or (going_on and _is_pagedgens(config.block_map))),
        ("the manifest", output.manifest, True),
        ("the failures' file", output.errors if openai else None, config.overwrite or going_on),
    ]
    taken = {} if output.path is None else {real(output.path): "the output"}
    for what, name, may_replace in files:
        if name is None:
            continue
        check_writable(str(name), what, overwrite=may_replace, inputs=inputs)
        if real(name) in taken:
            raise UsageError(f"{what} {name} is another output of this command: {taken[real(name)]}")
        taken[real(name)] = what


def _is_pagedgens(name: str | None) -> bool:
    """Return True for a file that looks like statistics or a block map of ours."""
    try:
        with open(name or "", encoding="utf-8") as file:
            text = file.read(1 << 24)
        found = json.loads(text if text.startswith("{\n") else text.partition("\n")[0])
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and ("time_split_s" in found or "num_blocks" in found)


def refuse_inside(workspace: Workspace, config: JobConfig, inputs: list[Path]) -> None:
    """Refuse files within the directory that is removed at the end.

    Raises:
        UsageError: an input or a side file lies there.
    """
    for name in [*inputs, config.stats, config.block_map]:
        if name is not None and real(name).parent == real(workspace.directory) and "-" not in config.inputs:
            raise UsageError(f"{name} lies in {workspace.directory}, which pagedgen removes")


def real(name: Path | str) -> Path:
    """Return a path without links, as far as there are no circles."""
    return Path(os.path.realpath(name))


def begun_block_size(output: str) -> int | None:
    """Return the block size of the run that left an output or its parts, where one did: results are bound to it."""
    begun = unfinished_manifest(output)
    there = begun["job"] if begun is not None else finished_manifest(Path(output)) if Path(output).exists() else None
    size = None if there is None else there.get("engine", {}).get("block_size")
    return size if isinstance(size, int) else None


def own_files(config: JobConfig) -> set[Path]:
    """Return what a job writes, which a directory or glob among its inputs doesn't mean."""
    output = config.output
    if output is None or output == "-":
        return set()
    path = OutputPath(output, "jsonl")
    names = [output, stats_path(config), config.block_map, path.manifest, path.errors]
    return {real(name) for name in names if name is not None}
