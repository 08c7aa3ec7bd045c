"""A job's input and model, opened and checked, and the manifest of what shapes its results. No weights."""

from __future__ import annotations

import datetime
import json
import os
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import JobConfig
from ..errors import InputError, UsageError
from ..machine import cache_root
from ..prompts.render import PromptRenderer
from ..rows.inputs import Input, Selection
from ..rows.manifest import MANIFEST_FORMAT, model_hashes, template_hash
from ..rows.openai_batch import looks_like_batch
from ..rows.schema import Result
from ..rows.sources import Source
from ..stats import RunStats
from .reader import RowReader


@dataclass
class Job:
    """Everything a job is made of but the weights."""

    config: JobConfig
    opened: Any  # engine.opened.OpenedModel
    source: Input
    selection: Selection
    renderer: PromptRenderer
    id_column: str | None
    openai: bool
    stats: RunStats
    manifest: dict[str, Any]
    may_replace: bool = False  # there was a file at the output's place when the job was checked

    def adopt_time(self, other: dict[str, Any]) -> None:
        """Take over the time that an earlier run's chat template was told, so that all rows are told the same."""
        time = other.get("prompts", {}).get("told_time")
        if time is not None and self.manifest["prompts"]["told_time"] is not None:
            self.manifest["prompts"]["told_time"] = time
            self.renderer.tell_time(datetime.datetime.fromisoformat(time))

    def reader(self, stored: Iterator[Result] | None = None) -> RowReader:
        """Return a reader of the job's rows; see `RowReader`."""
        return RowReader(
            self.config,
            self.opened,
            self.source,
            self.selection,
            self.renderer,
            openai=self.openai,
            stats=self.stats,
            stored=stored,
        )


def estimate_plan(
    opened: Any,
    lengths: Any,
    *,
    device_memory_bytes: int | None = None,
    covers_all_rows: bool = True,
    must_fit: bool = True,
    **not_run: Any,
) -> tuple[Any, str]:
    """Plan before the weights are loaded; return the plan and where the memory's size comes from.

    Raises:
        MemoryPlanError: the pool can't hold one row.
    """
    from ..engine import memory
    from ..engine.planner import estimate_activation_bytes, plan_requests

    config, spec = opened.config, opened.spec
    activation = estimate_activation_bytes(
        spec, max_num_batched_tokens=config.max_num_batched_tokens, max_num_seqs=config.max_num_seqs
    )
    if device_memory_bytes is not None:
        device = memory.DeviceMemory(device_memory_bytes, device_memory_bytes, "given")
    else:
        device = memory.device_memory(config.device)
    weights = spec.weights_bytes + (spec.tied_head_bytes if config.device == "cpu" else 0)
    plan = plan_requests(
        lengths,
        spec,
        config,
        device=device,
        own_bytes=0,
        pending_bytes=weights + activation,
        activation_peak_bytes=activation,
        covers_all_rows=covers_all_rows,
        must_fit=must_fit,
        **not_run,
    )
    return plan, device.source


def prepare(config: JobConfig, opened: Any, sources: list[Source], stats: RunStats, *, planning: bool = False) -> Job:
    """Check a job's input and settings against each other and the model. A plan has no manifest.

    Raises:
        UsageError: the job can't be run at all; the message names the flag or column.
    """
    outside = [t for t in config.sampling.stop_token_ids if t >= opened.spec.vocab_size]
    if outside:
        raise UsageError(f"--stop-token-ids {outside[0]} is outside the model's vocabulary of {opened.spec.vocab_size}")
    if config.sampling.num_sequences > opened.config.max_num_seqs:
        flag = "--beam-width" if config.sampling.beam_width > 1 else "--n"
        raise UsageError(
            f"{flag} {config.sampling.num_sequences} is more than --max-num-seqs {opened.config.max_num_seqs}: "
            "a row's samples or beams must be able to run together"
        )
    source = Input(sources, config.limit)
    source.schema()  # refuses files of different columns
    names = source.sample_columns()
    openai = config.format == "openai-batch" or (config.format == "auto" and looks_like_batch(names))
    renderer = PromptRenderer(opened.tokenizer, config.prompts)
    if openai:
        _check_openai(config, opened)
    elif names:
        renderer.check_columns(names)
    for flag, column in (("--id-column", config.id_column), ("--cache-salt-column", config.cache_salt_column)):
        if column is not None and (openai or column not in names):
            raise InputError(f"{flag} {column}: no such column; found {', '.join(names) or 'none'}")
    selection = Selection(_chosen(config, source), config.shard)
    id_column = config.id_column or ("id" if "id" in names and not openai else None)
    job = Job(config, opened, source, selection, renderer, id_column, openai, stats, {})
    if not planning:
        with stats.timed("hash"):
            job.manifest = _manifest(job)
    return job


def _check_openai(config: JobConfig, opened: Any) -> None:
    if config.output is not None and config.output.endswith(".parquet"):
        raise UsageError(f"--output {config.output}: the output of an OpenAI batch is JSON lines; give it the suffix .jsonl")
    if config.prompts.prompt_column or config.prompts.messages_column or config.prompts.prompt_template:
        raise UsageError("an OpenAI batch says where its prompts are: no --prompt-column, --messages-column, --prompt-template")
    if not getattr(opened.tokenizer, "chat_template", None):
        raise InputError("the rows are to be chats, but the model's tokenizer has no chat template; pass --chat-template FILE")


def _chosen(config: JobConfig, source: Input) -> frozenset[int] | None:
    """Return the rows of `--sample`, which depend on the seed and the number of rows only."""
    if config.sample is None:
        return None
    total = source.count()
    return frozenset(random.Random(config.engine.seed).sample(range(total), min(config.sample, total)))


# Of the engine's settings, those that shape results.
_ENGINE_SETTINGS = ("dtype", "kv_cache_dtype", "device", "backend", "block_size", "max_model_len", "seed")


def _manifest(job: Job) -> dict[str, Any]:
    """Return everything that shapes the job's results, and nothing else."""
    config, opened = job.config, job.opened
    engine = opened.config
    manifest = {
        "format": MANIFEST_FORMAT,
        "versions": _versions(engine.device),
        "model": _model_identity(opened),
        "engine": {
            **{name: getattr(engine, name) for name in _ENGINE_SETTINGS},
            "quantization": opened.spec.quantization,
            "weight_levels": opened.spec.weight_levels,
        },
        "gpu": device_name(engine.device),
        "sampling": asdict(config.sampling),
        "prompts": {
            **asdict(config.prompts),
            "chat_template": template_hash(getattr(opened.tokenizer, "chat_template", None)),
            "told_time": job.renderer.told_time and job.renderer.told_time.isoformat(),
            "too_long": config.too_long,
            "format": "openai-batch" if job.openai else "rows",
        },
        "rows": {
            "limit": config.limit,
            "sample": config.sample,
            "shard": None if config.shard is None else list(config.shard),
            "max_total_tokens": config.max_total_tokens,
            "id_column": job.id_column,
            "cache_salt_column": config.cache_salt_column,
        },
        "output": {
            "token_ids": config.token_ids,
            "cached_tokens": config.cached_tokens,
            "model_name": engine.model if job.openai else None,
        },
        "input": job.source.fingerprint(),
    }
    return json.loads(json.dumps(manifest))  # as it comes back from a file


def _versions(device: str) -> dict[str, str]:
    names = ["torch", "transformers", "tokenizers", "numpy", "numba", "jinja2"]
    if device == "cuda":
        names.append("triton")
    return {"pagedgen": __version__, **{name: version(name) for name in names}}


def device_name(device: str) -> str | None:
    """Return the GPU's name: another one runs other kernels. (A CPU's is noted apart: see `machine.cpu_name`.)"""
    if device != "cuda":
        return None
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "a GPU that is not here"


def _model_identity(opened: Any) -> dict[str, Any]:

    directory = Path(opened.files.path)
    if directory.is_dir():
        return {"files": model_hashes(directory, cache_root() / "hashes.json")}
    commit = getattr(opened.hf_config, "_commit_hash", None)
    return {"name": opened.files.name, "commit": commit or opened.files.revision or os.environ.get("HF_REVISION")}
