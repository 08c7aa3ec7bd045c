"""Measures a machine profile: rows of random tokens through the engine itself, every step timed, and the model of `profile.py`
fitted to them. Also what the size of a block costs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import numpy as np
import torch

from ..kernels.api import load_backend
from ..request import Request
from ..sampling_params import SamplingParams
from .batch import BlockTableArray, PackedBatch
from .engine import Engine
from .generation import StepReport
from .kv_cache import KVCache
from .planner import RequestLengths
from .prefix_tree import BLOCK_SIZES
from .profile import MachineProfile

DECODE_ROWS, DECODE_CONTEXT = 64, 512  # of the measurement of block sizes
_KNOTS = tuple(1 << k for k in range(16))


@dataclass(frozen=True)
class Workload:
    """Rows that are run together; the first `common` tokens of their prompts are alike."""

    rows: int
    prompt: int
    new: int
    temperature: float = 0.0
    common: int = 0
    beam_width: int = 1


# The first ones make steps of 2**k prompt tokens and of 2**k decodes, at short contexts; the others tell what longer contexts
# cost, random draws, beams, and reading what rows have in common.
_SHORT = 16
_WORKLOADS = (
    *(Workload(1 << k, _SHORT, 4) for k in range(7)),
    *(Workload(1 << k, 1024 >> k, 4) for k in range(7, 11)),  # in one step, so that they are decoded together
    Workload(24, 256, 5),
    Workload(6, 1024, 5),
    Workload(1, 1800, 4),
    Workload(24, 120, 8),
    Workload(48, _SHORT, 4, temperature=1.0),
    Workload(16, _SHORT, 4, beam_width=3),
    Workload(48, 512, 4, common=480),
)
# All workloads are run so often, one pass after another: a machine's speed changes over minutes, and each shape of step is
# to be seen in more than one of them.
_PASSES = 3
MOST_ROWS = {"cpu": 512, "cuda": 1024}  # in flight that are tried, where no flag says
_KNEE_SHARE = 0.95
# Rows in flight: as few as come near the fastest by the row, each of a context in the middle of a common range.
_ROWS_SHARE, _ROWS_CONTEXT = 0.96, 256


@dataclass
class MeasuredStep:
    """One step: what it computed, and its seconds."""

    num_tokens: int
    context: int
    pairs: int
    num_sampled: int
    seconds: float
    num_random: int = 0
    spared: int = 0
    num_beams: int = 0


def measure_steps(engine: Engine, on_note: Callable[[str], None]) -> list[MeasuredStep]:
    """Run the workloads, pass after pass, and return every step."""
    steps: list[MeasuredStep] = []
    config = engine.opened.config
    assert config.max_model_len and config.max_num_seqs
    rng = np.random.default_rng(0)
    for number, load in itertools.product(range(1, _PASSES + 1), _WORKLOADS):
        length = min(load.prompt, config.max_model_len - load.new)
        if load.rows * load.beam_width > config.max_num_seqs or length < 1:
            continue
        on_note(f"{load.rows} rows of {length} + {load.new} tokens (pass {number} of {_PASSES})")
        params = SamplingParams(max_tokens=load.new, ignore_eos=True, temperature=load.temperature, beam_width=load.beam_width)
        ids = rng.integers(0, engine.opened.num_token_ids, (load.rows, length))
        ids[:, : load.common] = ids[0, : load.common]
        requests = [Request(i, row.tolist(), params, load.new, frozenset(), i) for i, row in enumerate(ids)]
        steps += _timed_steps(engine, requests)
    return steps


def _timed_steps(engine: Engine, requests: list[Request]) -> list[MeasuredStep]:
    """Run rows of one kind and return every step."""
    params = requests[0].params
    at_random, in_beams = params.temperature > 0, params.beam_width > 1
    measured: list[MeasuredStep] = []
    runner, block_size = engine.runner, engine.opened.config.block_size or 0
    run = runner.run
    last: list[float] = []

    def timed_run(batch: PackedBatch, tables: BlockTableArray | None = None, **wanted: int | None) -> torch.Tensor:
        if not last:
            last.append(perf_counter())
        q_lens = np.diff(batch.cu_seqlens_q).astype(np.int64)
        starts = batch.seq_lens_kv - q_lens
        decodes = batch.num_decodes
        pairs = q_lens[decodes:] * starts[decodes:] + q_lens[decodes:] * (q_lens[decodes:] + 1) // 2
        context = int(batch.seq_lens_kv[:decodes].sum())
        sampled = len(batch.sample_rows)
        spared = batch.shared.num_spared_reads * block_size if batch.shared is not None else 0
        measured.append(
            MeasuredStep(
                batch.num_tokens,
                context,
                int(pairs.sum()),
                sampled,
                0.0,
                num_random=sampled * at_random,
                spared=spared,
                num_beams=sampled * in_beams,
            )
        )
        return run(batch, tables, **wanted)

    def on_step(report: StepReport) -> None:
        now = perf_counter()
        measured[-1].seconds = now - last[-1]
        last[:] = [now]

    runner.run = timed_run  # type: ignore[method-assign]
    try:
        plan = engine.plan(RequestLengths(requests))
        engine.generate(requests, plan, on_finished=lambda s: None, on_error=lambda r, i, e: None, on_step=on_step)
    finally:
        del runner.run
    return measured


def fit_profile(steps: list[MeasuredStep], machine: str, block_size: int, start_s: float) -> MachineProfile:
    """Fit the step model: of each shape of step the median, weighted so that relative errors count."""
    shapes: dict[tuple[int, ...], list[MeasuredStep]] = {}
    for step in steps:
        kind = (step.num_tokens, step.context // 256, step.pairs, step.num_random, step.num_beams, step.spared)
        shapes.setdefault(kind, []).append(step)
    rows = [(alike[0], median(s.seconds for s in alike)) for alike in shapes.values()]
    most = max(s.num_tokens for s, _ in rows)
    counts = {s.num_tokens for s, _ in rows}
    seen = sorted({k for k in _KNOTS if k in counts} | {most})
    design = np.array(
        [
            [*_hats(s.num_tokens, seen), s.context, s.pairs, s.num_sampled, s.num_random, s.num_beams, -s.spared]
            for s, _ in rows
        ],
        np.float64,
    )
    seconds = np.array([s for _, s in rows])
    solution = _nonnegative_least_squares(design / seconds[:, None], np.ones(len(rows)))
    table = np.maximum.accumulate(solution[: len(seen)])
    predicted = design @ np.concatenate([table, solution[len(seen) :]])
    by_token = {k: k / t for k, t in zip(seen, table, strict=True) if t > 0}
    knee = next((k for k in seen if by_token.get(k, 0) >= _KNEE_SHARE * max(by_token.values())), most)
    profile = MachineProfile(
        machine=machine,
        block_size=block_size,
        tokens=[int(k) for k in seen],
        table_s=[float(t) for t in table],
        decode_s_per_token=float(solution[-6]),
        prefill_s_per_pair=float(solution[-5]),
        sample_s_per_row=float(solution[-4]),
        random_s_per_row=float(solution[-3]),
        beam_s_per_row=float(solution[-2]),
        spared_s_per_token=float(solution[-1]),
        start_s=start_s,
        knee_tokens=int(knee),
        fit_error=float(np.mean(np.abs(predicted - seconds) / seconds)),
    )
    decoded = [s.num_tokens for s in steps if not s.pairs]  # by steps of as many rows
    return replace(profile, num_seqs=_best_rows(profile, [k for k in seen if k in decoded]))


def _best_rows(profile: MachineProfile, counts: list[int]) -> int:
    """Return how many rows to keep in flight, of the counts that were measured; 0 where there is none."""
    by_second = {k: k / profile.predict(k, k * _ROWS_CONTEXT, 0, k) for k in counts}
    return next((k for k in counts if by_second[k] >= _ROWS_SHARE * max(by_second.values())), 0)


def _hats(x: int, knots: list[int]) -> np.ndarray:
    """Return the weights of the knots in linear interpolation at x."""
    return np.array([np.interp(x, knots, row) for row in np.eye(len(knots))])


def _nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Minimize |a x - b| with x >= 0, by leaving out what would be negative, one by one."""
    scale = np.maximum(np.abs(a).max(axis=0), 1e-30)
    kept = list(range(a.shape[1]))
    while True:
        x = np.zeros(a.shape[1])
        x[kept] = np.linalg.lstsq(a[:, kept] / scale[kept], b, rcond=1e-9)[0] / scale[kept]
        if (x[kept] >= 0).all():
            return x
        kept.remove(min(kept, key=lambda i: x[i] * scale[i]))


def measure_block_sizes(engine: Engine, repeats: int = 7) -> dict[str, float]:
    """Return the seconds that one decode step's attention takes in all layers, by block size (64 rows of 512 tokens)."""
    spec, config = engine.opened.spec, engine.opened.config
    backend = load_backend(config.backend)
    device = torch.device(config.device)
    result = {}
    for size in BLOCK_SIZES:
        blocks = DECODE_ROWS * DECODE_CONTEXT // size
        cache = KVCache(
            num_blocks=blocks,
            num_layers=1,
            num_kv_heads=spec.num_kv_heads,
            block_size=size,
            head_dim=spec.head_dim,
            dtype=getattr(torch, spec.kv_cache_dtype),
            device=config.device,
            key_transposed=backend.KEY_TRANSPOSED,
        )
        cache.kv.zero_()
        layer = cache.layers[0]
        tables = torch.randperm(blocks, dtype=torch.int32).reshape(DECODE_ROWS, -1).to(device)
        lengths = torch.full((DECODE_ROWS,), DECODE_CONTEXT, dtype=torch.int32, device=device)
        query = torch.zeros((DECODE_ROWS, spec.num_heads, spec.head_dim), dtype=getattr(torch, spec.dtype), device=device)
        out = torch.empty_like(query)
        times = []
        for _ in range(repeats + 2):
            start = perf_counter()
            backend.paged_decode(
                query,
                layer.key,
                layer.value,
                tables,
                lengths,
                out,
                scale=1.0,
                key_scales=layer.key_scales,
                value_scales=layer.value_scales,
            )
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(perf_counter() - start)
        result[str(size)] = median(times[2:]) * spec.num_layers
    return result
