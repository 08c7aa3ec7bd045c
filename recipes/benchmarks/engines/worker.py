"""Answer one job with one engine: `python worker.py JOB.json RESULT.json`, in that engine's own interpreter.

Stands alone: it imports nothing of pagedgen but, for the engine of that name, its library, since other engines live in
environments without it. Every engine gets the same rows, `{"ids": [...], "max_tokens": N, "ignore_eos": bool}`, and decodes
greedily; its answers may or may not end with the EOS, and may go on behind it.

An engine is a function that loads the job's model and returns how it answers rows. Loading includes imports and a warm-up of
two short rows, so that the first answer doesn't pay for what is compiled or allocated once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any

START = perf_counter()
CPU_BATCH_TOKENS = 512  # of transformers' continuous batching
Job = dict[str, Any]
Row = dict[str, Any]
Answer = Callable[[list[Row]], list[list[int]]]


def open_pagedgen(job: Job) -> tuple[Answer, str]:
    """pagedgen's library with its defaults, but for what the job's options say."""
    from importlib.metadata import version

    from pagedgen import LLM, SamplingParams

    settings = job["options"] | _given(max_num_seqs=job["max_num_seqs"], kv_cache_memory_bytes=job["kv_bytes"])
    llm = LLM(job["model"], **{"dtype": job["dtype"], **settings})

    def answer(rows: list[Row]) -> list[list[int]]:
        params = [SamplingParams(max_tokens=row["max_tokens"], ignore_eos=row["ignore_eos"]) for row in rows]
        outputs = llm.generate([{"prompt_token_ids": row["ids"]} for row in rows], params, use_tqdm=False)
        failed = [output.error for output in outputs if output.error]
        if failed:
            raise RuntimeError(failed[0])
        return [output.outputs[0].token_ids for output in outputs]

    return answer, version("pagedgen")


def open_vllm(job: Job) -> tuple[Answer, str]:
    """vLLM's `LLM` with prefix caching, on whatever device its build is for.

    Options are the `LLM`'s or, in capitals, environment variables.
    """
    environment, settings = _split_capitals(job["options"])
    os.environ.update({name: str(value) for name, value in environment.items()})
    import vllm

    settings |= _given(max_num_seqs=job["max_num_seqs"], kv_cache_memory_bytes=job["kv_bytes"])
    llm = vllm.LLM(**{"model": job["model"], "dtype": job["dtype"], "enable_prefix_caching": True, **settings})

    def params(row: Row) -> Any:
        ends = [] if row["ignore_eos"] else job["eos_token_ids"]
        return vllm.SamplingParams(
            temperature=0.0, max_tokens=row["max_tokens"], ignore_eos=row["ignore_eos"], stop_token_ids=ends
        )

    def answer(rows: list[Row]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": row["ids"]} for row in rows]
        outputs = llm.generate(prompts, [params(row) for row in rows], use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return answer, vllm.__version__


def open_openvino(job: Job) -> tuple[Answer, str]:
    """OpenVINO GenAI's continuous batching with prefix caching.

    Options are the scheduler's (`max_num_batched_tokens` ...) or, in capitals, the device's properties. The plugin may
    round K/V further than the rest unless told otherwise: a job that names a dtype has its K/V in it too.
    """
    import openvino
    import openvino_genai as genai

    properties, settings = _split_capitals(job["options"])
    folder, device = settings.pop("model"), settings.pop("device", "CPU")
    scheduler = genai.SchedulerConfig()
    settings |= _given(max_num_seqs=job["max_num_seqs"], cache_size=job["kv_bytes"] and -(-job["kv_bytes"] // 2**30))
    for name, value in {"enable_prefix_caching": True, **settings}.items():
        setattr(scheduler, name, value)
    precision = {"float32": "f32", "bfloat16": "bf16"}.get(job["dtype"])
    properties = _given(INFERENCE_PRECISION_HINT=precision, KV_CACHE_PRECISION=precision) | properties
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, device, properties)

    def config(row: Row) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = row["max_tokens"]
        config.do_sample = False
        config.ignore_eos = row["ignore_eos"]
        if not row["ignore_eos"]:
            config.stop_token_ids = set(job["eos_token_ids"])
        return config

    def answer(rows: list[Row]) -> list[list[int]]:
        prompts = [openvino.Tensor(_int64([row["ids"]])) for row in rows]
        return [list(r.m_generation_ids[0]) for r in pipeline.generate(prompts, [config(row) for row in rows])]

    return answer, genai.__version__


def open_transformers(job: Job) -> tuple[Answer, str]:
    """transformers' `generate` in left-padded batches, sorted by prompt length; a batch runs to its longest max_tokens."""
    import torch
    import transformers

    model = _transformers_model(job)
    batch_rows = job["max_num_seqs"] or job["batch_size"]

    def answer_batch(batch: list[Row]) -> list[list[int]]:
        width = max(len(row["ids"]) for row in batch)
        padding = [width - len(row["ids"]) for row in batch]
        ids = torch.tensor([[0] * n + row["ids"] for n, row in zip(padding, batch, strict=True)], device=model.device)
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in padding], device=model.device)
        ends = None if batch[0]["ignore_eos"] else job["eos_token_ids"]
        config = transformers.GenerationConfig(
            do_sample=False, pad_token_id=0, eos_token_id=ends, max_new_tokens=max(row["max_tokens"] for row in batch)
        )
        out = model.generate(ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
        return [tokens[: row["max_tokens"]] for tokens, row in zip(out, batch, strict=True)]

    def answer(rows: list[Row]) -> list[list[int]]:
        tokens: dict[int, list[int]] = {}
        order = sorted(range(len(rows)), key=lambda i: (rows[i]["ignore_eos"], len(rows[i]["ids"])))
        for _, same_ends in groupby(order, key=lambda i: rows[i]["ignore_eos"]):
            places = list(same_ends)
            for start in range(0, len(places), batch_rows):
                batch = places[start : start + batch_rows]
                tokens.update(zip(batch, answer_batch([rows[i] for i in batch]), strict=True))
        return [tokens[i] for i in range(len(rows))]

    return answer, transformers.__version__


def open_transformers_continuous(job: Job) -> tuple[Answer, str]:
    """transformers' continuous batching: what `generate_batch` does, by its manager, which takes a max_tokens for each row.

    As with `generate_batch`, making the cache is part of each call. Its sizes are inferred from a GPU's memory; on a CPU that
    makes masks of many GiB, so there the cache gets the blocks that the rows need, and a step `CPU_BATCH_TOKENS`.
    """
    import transformers
    from transformers.generation.continuous_batching.utils import WorkloadHints

    model = _transformers_model(job)
    config = transformers.GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=job["eos_token_ids"])
    batching = transformers.ContinuousBatchingConfig(**_given(max_requests_per_batch=job["max_num_seqs"]))

    def answer(rows: list[Row]) -> list[list[int]]:
        if model.device.type == "cpu":
            batching.max_batch_tokens = CPU_BATCH_TOKENS
            batching.num_blocks = sum(-(-(len(row["ids"]) + row["max_tokens"]) // batching.page_size) for row in rows)
        hints = WorkloadHints(
            max_prompt_length=max(len(row["ids"]) for row in rows),
            max_generated_length=max(row["max_tokens"] for row in rows),
            num_requests=len(rows),
        )
        tokens: dict[str, list[int]] = {}
        with model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=batching, workload_hints=hints
        ) as manager:
            # As `add_requests` does: rows with a common beginning one after the other.
            for i in sorted(range(len(rows)), key=lambda i: rows[i]["ids"], reverse=True):
                ends = -1 if rows[i]["ignore_eos"] else job["eos_token_ids"]
                manager.add_request(rows[i]["ids"], str(i), max_new_tokens=rows[i]["max_tokens"], eos_token_id=ends)
            while len(tokens) < len(rows):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("the generation thread ended")
                if result is not None and result.is_finished():
                    if result.error:
                        raise RuntimeError(result.error)
                    tokens[result.request_id] = result.generated_tokens
        return [tokens[str(i)] for i in range(len(rows))]

    return answer, transformers.__version__


def _transformers_model(job: Job) -> Any:
    """Load the model to where it can run; its own generation settings are dropped, since every row brings its own."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=job["dtype"], **job["options"])
    model.generation_config = GenerationConfig()
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def _given(**settings: Any) -> dict[str, Any]:
    """Return the settings that are set: an engine's own default stands where one is None."""
    return {name: value for name, value in settings.items() if value is not None}


def _split_capitals(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options written in capitals, and the others."""
    capitals = {name: value for name, value in options.items() if name.isupper()}
    return capitals, {name: value for name, value in options.items() if name not in capitals}


def _int64(values: list[list[int]]) -> Any:
    import numpy

    return numpy.array(values, dtype=numpy.int64)


def _peak_rss_bytes() -> int:
    """Return the peak resident memory of this process and of those below it, each at its own peak; 0 where /proc isn't.

    `ru_maxrss` would not do: at its start it has the value of the process that spawned this one.
    """
    peaks: dict[int, tuple[int, int]] = {}  # pid: (parent, peak)
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            status = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        except OSError:  # ended meanwhile
            continue
        peaks[int(status["Pid"])] = (int(status["PPid"]), 1024 * int(status.get("VmHWM", "0 kB").split()[0]))
    total, below = 0, [os.getpid()]
    while below:
        pid = below.pop()
        total += peaks.get(pid, (0, 0))[1]
        below += [child for child, (parent, _) in peaks.items() if parent == pid]
    return total


ENGINES: dict[str, Callable[[Job], tuple[Answer, str]]] = {
    "pagedgen": open_pagedgen,
    "vllm": open_vllm,
    "openvino": open_openvino,
    "transformers": open_transformers,
    "transformers-continuous": open_transformers_continuous,
}


def main() -> None:
    job_path, result_path = map(Path, sys.argv[1:])
    job: Job = json.loads(job_path.read_text())
    answer, version = ENGINES[job["engine"]](job)
    # Backwards, so that no cache of beginnings has anything of the job's own rows.
    answer([{"ids": row["ids"][:-17:-1], "max_tokens": 2, "ignore_eos": True} for row in job["rows"][:2]])
    ready = perf_counter()
    if job["primes"]:
        answer([{"ids": ids, "max_tokens": 1, "ignore_eos": True} for ids in job["primes"]])
    tokens = answer(job["rows"])
    done = perf_counter()
    result = {
        "tokens": tokens,
        "version": version,
        "load_s": ready - START,
        "generate_s": done - ready,
        "peak_rss_bytes": _peak_rss_bytes(),
    }
    result_path.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
