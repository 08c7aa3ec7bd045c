"""What `pagedgen plan` and `pagedgen tune` do: a job's needs and its run foretold, from a measured machine profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

from ..config import EngineConfig, JobConfig
from ..errors import InputError, OutputError, RowError, UsageError
from ..machine import cache_root, cpu_name, without_collector
from ..request import Request
from ..stats import RunStats
from .report import COMPILING, PlanReport, Progress
from .setup import Job, device_name, estimate_plan


class _GroupFeed:
    """All rows of a reader (`engine.feed.Feed`); counts those that end before the engine."""

    def __init__(self, groups: Iterator[Any]):
        self._groups = groups
        self.exhausted = False
        self.not_run: Counter[str] = Counter()

    def take(self, *, wait: bool) -> list[Request]:
        """See `engine.feed.Feed`."""
        group = next(self._groups, None)
        if group is None:
            self.exhausted = True
            return []
        self.not_run += group.not_run()
        requests: list[Request] = group.requests
        return requests


def stored_profile(opened: Any) -> Any:
    """Return the profile that `tune` stored for a model on this machine, or None."""
    from ..engine.profile import load_profile

    profile = load_profile(_path(opened))
    if profile is None:
        return None
    if not opened.config.cascade_attention:
        profile = replace(profile, spared_s_per_token=0.0)
    return profile.for_block_size(opened.config.block_size)


def tuned(opened: Any, config: EngineConfig) -> Any:
    """Return an opened model with what `tune` found where the flags leave it open: how many tokens and rows a step needs.

    Rows in flight only become more, since what a row may ask for (`n`, beams) is bounded by them.
    """
    profile = stored_profile(opened)
    if profile is None or config.max_num_batched_tokens is not None:
        return opened
    rows = opened.config.max_num_seqs
    if config.max_num_seqs is None:
        rows = max(rows, min(profile.num_seqs, opened.config.max_num_batched_tokens))
    return replace(opened, config=replace(opened.config, knee_tokens=profile.knee_tokens, max_num_seqs=rows))


def _path(opened: Any) -> Any:
    from ..engine.profile import profile_path

    return profile_path(cache_root(), opened.spec, opened.config, _machine(opened.config.device))


def _machine(device: str) -> str:
    return device_name(device) or cpu_name()


def read_rows(job: Job, progress: Progress, stop: Callable[[], bool] = lambda: False) -> tuple[Any, Counter[str]]:
    """Read all rows of a job; return them as an `engine.order.PlannedFeed`, to be closed, and what didn't get there."""
    from ..engine.order import PlannedFeed

    progress.phase("reading prompts")
    feed = _GroupFeed(job.reader().groups())
    rows = PlannedFeed(feed, job.opened.config.block_size)
    try:
        rows.read(stop)
    except BaseException:
        rows.close()
        raise
    if job.source.schema() is None and not any(extent["num_rows"] for extent in job.source.extents.values()):
        rows.close()
        raise InputError(f"the input has no rows: {', '.join(job.config.inputs)}")
    return rows, feed.not_run


def trace_rows(opened: Any, path: str, config: JobConfig) -> tuple[Any, dict[int, int], Counter[str]]:
    """Read a trace's rows as prompts of made-up tokens; return them, each row's output length, and what can't run.

    Raises:
        InputError: it can't be read or has no rows; UsageError: the sampling flags don't fit the model.
    """
    from ..engine.feed import ListFeed
    from ..engine.order import PlannedFeed
    from ..rows.traces import read_trace

    requests, outputs, not_run = [], {}, Counter[str]()
    for index, (prompt, made) in enumerate(read_trace(path, config.limit)):
        outputs[index] = max(1, made)
        params = replace(config.sampling, max_tokens=max(config.sampling.max_tokens, outputs[index]))
        try:
            requests.append(opened.make_request(index, prompt, params))
        except RowError as error:
            if error.code != "prompt_too_long":  # then it is true of every row
                raise UsageError(str(error)) from error
            not_run["num_too_long"] += 1
    if not requests and not not_run:
        raise InputError(f"{path}: the trace has no rows")
    rows = PlannedFeed(ListFeed(requests), opened.config.block_size)
    try:
        rows.read(lambda: False)
    except BaseException:
        rows.close()
        raise
    return rows, outputs, not_run


def report(
    opened: Any,
    config: JobConfig,
    estimate: Callable[[Any], tuple[Any, str]],
    rows: Any,
    lengths: Callable[[Request, int], int],
    *,
    files: list[str],
    stats: RunStats,
    progress: Progress,
) -> PlanReport:
    """Foretell a job whose rows were read; `estimate` makes the plan from their lengths (`setup.estimate_plan`)."""
    from ..engine.forecast import block_size_costs, forecast, histogram, recommend_block_size, warnings

    read_s = sum(stats.time_split_s.get(phase, 0.0) for phase in ("read", "tokenize"))
    plan, source = estimate(rows.lengths)
    profile = stored_profile(opened)
    progress.phase("simulating the run")
    engine = opened.config
    told = forecast(rows, engine, plan.num_blocks, profile, lengths, is_ample=plan.is_ample)
    columns = rows.lengths.arrays()
    prompt_lens = columns["prompt_lens"]
    outputs = _output_lens(rows, lengths)
    costs = block_size_costs(prompt_lens, outputs, rows.sharing, profile)
    what_if = []
    most = plan.peak_blocks_needed
    for name, num_blocks in _other_pools(opened.spec, engine, plan.max_block_num):
        if num_blocks >= most and plan.num_blocks >= most:
            continue  # the job has all it can use either way
        pool = min(num_blocks, max(most, 1))
        other = asdict(forecast(rows, engine, pool, profile, lengths, is_ample=pool >= most))
        del other["waterline"]
        what_if.append({"what": name, "num_blocks": num_blocks, **other})
    details = asdict(told)
    details["wall_s"] = None if told.generate_s is None else told.generate_s + profile.start_s + read_s
    sharing = asdict(rows.sharing)
    sharing["group_sizes"] = sharing["group_sizes"][:10].tolist()
    sharing["group_tokens"] = sharing["group_tokens"][:10].tolist()
    return PlanReport(
        plan.to_dict(),
        opened.spec.to_dict(),
        engine.to_dict(),
        config.sampling.max_tokens,
        source,
        files,
        forecast=details,
        sharing=sharing,
        block_sizes=[asdict(c) for c in costs],
        recommended_block_size=recommend_block_size(costs, plan.block_size, pool_is_short=_is_short(plan)),
        prompt_lengths=histogram(prompt_lens),
        what_if=what_if,
        warnings=warnings(opened.spec, plan, prompt_lens, outputs, told),
        profile=None if profile is None else asdict(profile),
    )


def _other_pools(spec: Any, config: EngineConfig, num_blocks: int) -> list[tuple[str, int]]:
    """Return what would change the pool's blocks, and how many it then had: more or less memory, K/V of another dtype."""
    found = [("half the memory for K/V", num_blocks // 2), ("twice the memory for K/V", num_blocks * 2)]
    if config.backend != "gpu":  # which has no int8
        other = "int8" if config.kv_cache_dtype == "auto" else "auto"
        other_bytes = replace(spec, kv_cache_dtype=spec.dtype if other == "auto" else other).bytes_per_token
        found.append((f"--kv-cache-dtype {other}", num_blocks * spec.bytes_per_token // other_bytes))
    return [(what, max(1, count)) for what, count in found]


def assumed_lengths(config: JobConfig) -> Callable[[Request, int], int]:
    """Return how long rows are taken to get: as long as they may, or --assume-output-tokens where they may end earlier."""
    from ..engine.output_lengths import has_exact_length

    assumed = config.assume_output_tokens
    return lambda request, _: request.max_tokens if assumed is None or has_exact_length(request) else assumed


def suited_block_size(opened: Any, config: JobConfig, rows: Any, device_memory_bytes: int | None = None) -> int:
    """Return the block size to recommend for rows that were read."""
    from ..engine.forecast import block_size_costs, recommend_block_size

    columns = rows.lengths.arrays()
    if not len(rows):
        return int(opened.config.block_size)
    outputs = _output_lens(rows, assumed_lengths(config))
    costs = block_size_costs(columns["prompt_lens"], outputs, rows.sharing, stored_profile(opened))
    plan, _ = estimate_plan(opened, rows.lengths, device_memory_bytes=device_memory_bytes, must_fit=False)
    return recommend_block_size(costs, plan.block_size, pool_is_short=_is_short(plan))


def _is_short(plan: Any) -> bool:
    """Return True when rows must wait for blocks."""
    return bool(plan.peak_blocks_needed > plan.max_block_num)


def _output_lens(rows: Any, lengths: Callable[[Request, int], int]) -> Any:
    """Return how long each row's first answer is taken to get: (num_rows,)."""
    import numpy as np

    requests = (rows.request(i) for i in range(len(rows)))
    return np.array([min(lengths(r, 0), r.max_tokens) for r in requests], dtype=np.int64)


def tune(config: EngineConfig, progress: Progress) -> tuple[Any, str]:
    """Measure this machine with a model and store the profile; return it and its path.

    Raises:
        OutputError: it can't be stored.
    """
    stats = RunStats()  # the clock starts before the imports, as a run's does
    progress.phase("opening the model")
    with without_collector():
        from ..engine.engine import Engine
        from ..engine.opened import open_model
        from ..engine.profile import save_profile
        from ..engine.tuning import MOST_ROWS, fit_profile, measure_block_sizes, measure_steps

        opened = open_model(config)
        resolved = opened.config
        if config.max_num_seqs is None:
            assert resolved.max_num_batched_tokens is not None
            rows = min(MOST_ROWS[resolved.device], resolved.max_num_batched_tokens)
            opened = replace(opened, config=replace(resolved, max_num_seqs=rows))
    if opened.precompilation is not None:
        progress.note(COMPILING)
    progress.phase(f"loading {config.model} ({opened.spec.dtype}, {opened.config.device})")
    engine = Engine(opened, stats)
    start_s = perf_counter() - stats.started - engine.compiling_s
    progress.phase("measuring steps")
    steps = measure_steps(engine, progress.note)
    profile = fit_profile(steps, _machine(opened.config.device), opened.config.block_size or 0, start_s)
    if config.max_num_batched_tokens is not None:
        profile.knee_tokens = 0  # what larger steps are like wasn't seen
    if config.max_num_seqs is not None or config.max_num_batched_tokens is not None:
        profile.num_seqs = 0
    progress.phase("measuring block sizes")
    profile.decode_s_by_block_size = measure_block_sizes(engine)
    path = _path(opened)
    try:
        save_profile(path, profile)
    except OSError as error:
        raise OutputError(f"{path}: the profile can't be written: {error.strerror} (errno {error.errno})") from error
    return profile, str(path)
