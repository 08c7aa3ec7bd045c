"""`pagedgen plan`: what would fit and what the job needs, without weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from pagedgen.config import EngineConfig, JobConfig, PromptConfig
from pagedgen.errors import UsageError
from pagedgen.job import plan_only
from pagedgen.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams

from . import options as opt
from .output import RunProgress, say
from .plan_output import show_plan


def plan(
    ctx: typer.Context,
    model: opt.Model,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="As of `run`; none with --trace.", metavar="[PROMPTS]...", show_default=False),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            help="Plan from lengths alone: CSV or JSON lines with input_length and output_length (and hash_ids).",
            metavar="FILE",
            rich_help_panel=opt.INPUT,
        ),
    ] = None,
    assume_output_tokens: Annotated[
        int | None,
        typer.Option(help="Of rows that may end by themselves. (default: --max-tokens)", rich_help_panel=opt.INPUT),
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="Plan for a device of this size, e.g. 80GiB, instead of measuring this one.",
            metavar="BYTES",
            rich_help_panel=opt.RUNTIME,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
    format: opt.Format = "auto",
    prompt_column: opt.PromptColumn = None,
    messages_column: opt.MessagesColumn = None,
    prompt_template: opt.PromptTemplate = None,
    system_prompt: opt.SystemPrompt = None,
    as_chat: opt.AsChat = False,
    too_long: opt.TooLong = "error",
    id_column: opt.IdColumn = None,
    limit: opt.Limit = None,
    sample: opt.Sample = None,
    shard: opt.Shard = None,
    max_total_tokens: opt.MaxTotalTokens = None,
    seed: opt.Seed = 0,
    chat_template: opt.ChatTemplate = None,
    n: opt.N = 1,
    beam_width: opt.BeamWidth = 1,
    max_tokens: opt.MaxTokens = None,
    revision: opt.Revision = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    allow_pickle: opt.AllowPickle = False,
    dtype: opt.Dtype = "auto",
    kv_cache_dtype: opt.KvCacheDtype = "auto",
    quantization: opt.Quantization = "none",
    max_model_len: opt.MaxModelLen = None,
    device: opt.Device = "auto",
    block_size: opt.BlockSize = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    gpu_memory_utilization: opt.GpuMemoryUtilization = 0.9,
    kv_cache_memory_bytes: opt.KvCacheMemoryBytes = None,
    num_gpu_blocks_override: opt.NumGpuBlocksOverride = None,
    enable_prefix_caching: opt.EnablePrefixCaching = True,
    swap_space: opt.SwapSpace = None,
    disk_swap: opt.DiskSwap = None,
    watermark: opt.Watermark = 0.01,
    sort: opt.Sort = "prefix",
    threads: opt.Threads = None,
    ignore_eos: opt.IgnoreEos = False,
) -> None:
    """Compute max_block_num, what the job will need and how it will run. Reads config and tokenizer only."""
    if (trace is None) == (not prompts):
        raise UsageError("plan wants PROMPTS or --trace FILE, one of them")
    try:
        sampling = SamplingParams(
            n=n,
            beam_width=beam_width,
            temperature=1.0 if n > 1 and beam_width == 1 else 0.0,  # samples need one; which doesn't matter for a plan
            max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
            ignore_eos=ignore_eos,
        )
    except ValueError as error:
        raise UsageError(f"sampling: {error}") from error
    disk_swap_path, disk_swap_bytes = opt.parse_disk_swap(disk_swap)
    config = JobConfig(
        inputs=prompts or [],
        prompts=PromptConfig(
            prompt_column=prompt_column,
            messages_column=messages_column,
            prompt_template=opt.read_prompt_template(prompt_template),
            system_prompt=system_prompt,
            as_chat=as_chat,
        ),
        format=format,
        id_column=id_column,
        limit=limit,
        sample=sample,
        shard=opt.parse_shard(shard),
        max_total_tokens=max_total_tokens,
        auto_block_size=block_size == "auto",
        assume_output_tokens=assume_output_tokens,
        too_long=too_long,
        chat_template=opt.read_template(chat_template),
        sampling=sampling,
        engine=EngineConfig(
            model=model,
            revision=revision,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            quantization=quantization,
            device=device,
            seed=seed,
            block_size=opt.parse_block_size(block_size),
            sort=sort,
            threads=threads,
            watermark=watermark,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=opt.parse_bytes(kv_cache_memory_bytes, "--kv-cache-memory-bytes"),
            num_gpu_blocks_override=num_gpu_blocks_override,
            enable_prefix_caching=enable_prefix_caching,
            swap_space_bytes=opt.parse_bytes(swap_space, "--swap-space") or 0,
            disk_swap_path=disk_swap_path,
            disk_swap_bytes=disk_swap_bytes,
        ),
    )
    with RunProgress("none" if as_json else "auto") as shown:
        report = plan_only(config, shown, ctx.obj, opt.parse_bytes(device_memory, "--device-memory"), trace)
    if as_json:
        details = asdict(report)
        say(json.dumps({**details.pop("plan"), **details}, indent=2))
    else:
        show_plan(report)
