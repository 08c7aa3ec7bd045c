"""`pagedgen run`: the main job."""

from __future__ import annotations

from typing import Annotated

import typer

from pagedgen.config import EngineConfig, JobConfig, PromptConfig
from pagedgen.errors import UsageError
from pagedgen.job import run_job
from pagedgen.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams
from pagedgen.stopping import Stopper, slurm_seconds_left

from . import options as opt
from .output import RunProgress, show_end

OUTPUT = "Output"
_EARLY_STOPPING: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}


def run(
    ctx: typer.Context,
    model: opt.Model,
    prompts: opt.Inputs,
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", help="Where to write: .jsonl, .parquet, or - for JSONL on stdout.", rich_help_panel=OUTPUT
        ),
    ],
    config: opt.Config = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing output.", rich_help_panel=OUTPUT)] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw away what a stopped run has finished.", rich_help_panel=OUTPUT)
    ] = False,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Answer again only the rows that failed.", rich_help_panel=OUTPUT)
    ] = False,
    on_error: Annotated[
        str, typer.Option(help="continue, or stop at the first row that fails.", rich_help_panel=OUTPUT)
    ] = "continue",
    grace: Annotated[
        str,
        typer.Option(help="Time that running rows have to finish once the run is to stop.", rich_help_panel=OUTPUT),
    ] = "20s",
    deadline: Annotated[
        str | None,
        typer.Option(
            help="Be gone by then: a duration like 2h30m or a time. (default: the end of the Slurm job, if it is one)",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    flush_every: Annotated[
        str, typer.Option(help="Longest time that a finished row is only in memory.", rich_help_panel=OUTPUT)
    ] = "10s",
    token_ids: Annotated[bool, typer.Option(help="Write the generated token ids as well.", rich_help_panel=OUTPUT)] = False,
    stats: Annotated[
        str | None,
        typer.Option(help="Where statistics go. (default: <output>.stats.json)", metavar="FILE", rich_help_panel=OUTPUT),
    ] = None,
    cached_tokens: Annotated[
        bool,
        typer.Option(
            "--cached-tokens",
            help="Write num_cached_tokens as well; it depends on the schedule, nothing else does.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    progress: Annotated[
        str, typer.Option(help="auto, plain, json (one event a line), or none (nothing but errors).", rich_help_panel=OUTPUT)
    ] = "auto",
    block_map: Annotated[
        str | None,
        typer.Option(
            help="Write which block belongs to which row, for `pagedgen blocks`.", metavar="FILE", rich_help_panel=OUTPUT
        ),
    ] = None,
    block_map_every: Annotated[
        int, typer.Option(min=1, help="Steps between two snapshots of the block map.", rich_help_panel=OUTPUT)
    ] = 100,
    max_error_rate: Annotated[
        float, typer.Option(help="Share of rows that may fail before the exit code is 3.", rich_help_panel=OUTPUT)
    ] = 0.0,
    format: opt.Format = "auto",
    prompt_column: opt.PromptColumn = None,
    messages_column: opt.MessagesColumn = None,
    prompt_template: opt.PromptTemplate = None,
    system_prompt: opt.SystemPrompt = None,
    as_chat: opt.AsChat = False,
    too_long: opt.TooLong = "error",
    id_column: opt.IdColumn = None,
    cache_salt_column: Annotated[
        str | None,
        typer.Option(help="Column with a text: only rows with the same one share K/V.", rich_help_panel=opt.INPUT),
    ] = None,
    limit: opt.Limit = None,
    sample: opt.Sample = None,
    shard: opt.Shard = None,
    max_total_tokens: opt.MaxTotalTokens = None,
    chat_template: opt.ChatTemplate = None,
    n: opt.N = 1,
    beam_width: opt.BeamWidth = 1,
    length_penalty: Annotated[
        float,
        typer.Option(help="A beam's score is its log-probability over its length to this power.", rich_help_panel=opt.SAMPLING),
    ] = 1.0,
    early_stopping: Annotated[
        str,
        typer.Option(help="When a beam search ends: true, false or never, as in transformers.", rich_help_panel=opt.SAMPLING),
    ] = "false",
    max_tokens: opt.MaxTokens = None,
    min_tokens: Annotated[int, typer.Option(help="Fewest tokens before a row may end.", rich_help_panel=opt.SAMPLING)] = 0,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. (default: 0)", rich_help_panel=opt.SAMPLING)] = None,
    top_p: Annotated[
        float, typer.Option(help="Keep the likeliest tokens up to this share.", rich_help_panel=opt.SAMPLING)
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 or -1: all.", rich_help_panel=opt.SAMPLING)] = 0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens below this share of the likeliest one's.", rich_help_panel=opt.SAMPLING)
    ] = 0.0,
    seed: opt.Seed = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End a row before this text (repeatable).", rich_help_panel=opt.SAMPLING)
    ] = None,
    stop_token_ids: Annotated[
        list[int] | None, typer.Option(help="End a row at this token id (repeatable).", rich_help_panel=opt.SAMPLING)
    ] = None,
    ignore_eos: opt.IgnoreEos = False,
    include_stop_str_in_output: Annotated[bool, typer.Option(help="Keep the stop text.", rich_help_panel=opt.SAMPLING)] = False,
    revision: opt.Revision = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    allow_pickle: opt.AllowPickle = False,
    dtype: opt.Dtype = "auto",
    kv_cache_dtype: opt.KvCacheDtype = "auto",
    quantization: opt.Quantization = "none",
    max_model_len: opt.MaxModelLen = None,
    device: opt.Device = "auto",
    backend: Annotated[
        str,
        typer.Option(help="Kernels: auto, cpu, gpu, or reference (slow, plain torch).", rich_help_panel=opt.RUNTIME),
    ] = "auto",
    block_size: opt.BlockSize = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    gpu_memory_utilization: opt.GpuMemoryUtilization = 0.9,
    kv_cache_memory_bytes: opt.KvCacheMemoryBytes = None,
    num_gpu_blocks_override: opt.NumGpuBlocksOverride = None,
    enable_prefix_caching: opt.EnablePrefixCaching = True,
    swap_space: opt.SwapSpace = None,
    disk_swap: opt.DiskSwap = None,
    cascade_attention: Annotated[
        bool,
        typer.Option(
            "--cascade-attention/--no-cascade-attention",
            help="Decoding rows read what they have in common together.",
            rich_help_panel=opt.RUNTIME,
        ),
    ] = True,
    watermark: opt.Watermark = 0.01,
    sort: opt.Sort = "prefix",
    threads: opt.Threads = None,
    audit: Annotated[bool, typer.Option(help="Recount the blocks after every step.", rich_help_panel=opt.RUNTIME)] = False,
) -> None:
    """Generate a completion for every row of PROMPTS and write them in input order.

    Finished rows are kept in OUTPUT.parts/ until the output is there; the same command goes on from them.

    Exit codes: 0 all rows fine, 2 can't be run (told before weights load), 3 finished with row errors, 4 output can't be
    written, 75 stopped by a signal or the deadline, 1 a bug.
    """
    if progress not in ("auto", "plain", "json", "none"):
        raise UsageError(f"--progress {progress} is not one of auto, plain, json, none")
    if not 0 <= max_error_rate <= 1:
        raise UsageError(f"--max-error-rate {max_error_rate} must be between 0 and 1")
    if temperature is None and (top_p != 1.0 or top_k > 1 or min_p != 0.0):
        raise UsageError("--top-p, --top-k and --min-p have no effect on greedy decoding: set --temperature as well")
    early_stopping = early_stopping.lower()  # TOML's true is Python's True
    if early_stopping not in _EARLY_STOPPING:
        raise UsageError(f"--early-stopping {early_stopping} is not one of {', '.join(_EARLY_STOPPING)}")
    if beam_width == 1 and (length_penalty != 1.0 or early_stopping != "false"):
        raise UsageError("--length-penalty and --early-stopping have no effect without --beam-width above 1")
    disk_swap_path, disk_swap_bytes = opt.parse_disk_swap(disk_swap)
    try:
        sampling = SamplingParams(
            n=n,
            beam_width=beam_width,
            length_penalty=length_penalty,
            early_stopping=_EARLY_STOPPING[early_stopping],
            temperature=temperature or 0.0,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
            min_tokens=min_tokens,
            stop=tuple(stop or ()),
            stop_token_ids=tuple(stop_token_ids or ()),
            ignore_eos=ignore_eos,
            include_stop_str_in_output=include_stop_str_in_output,
        )
    except ValueError as error:
        raise UsageError(f"sampling: {error}") from error
    job = JobConfig(
        inputs=prompts,
        prompts=PromptConfig(
            prompt_column=prompt_column,
            messages_column=messages_column,
            prompt_template=opt.read_prompt_template(prompt_template),
            system_prompt=system_prompt,
            as_chat=as_chat,
        ),
        format=format,
        output=output,
        stats=stats,
        id_column=id_column,
        cache_salt_column=cache_salt_column,
        limit=limit,
        sample=sample,
        shard=opt.parse_shard(shard),
        max_total_tokens=max_total_tokens,
        auto_block_size=block_size == "auto",
        too_long=too_long,
        chat_template=opt.read_template(chat_template),
        token_ids=token_ids,
        cached_tokens=cached_tokens,
        overwrite=overwrite,
        restart=restart,
        retry_errors=retry_errors,
        on_error=on_error,
        flush_s=opt.parse_duration(flush_every, "--flush-every") or 0.0,
        grace_s=opt.parse_duration(grace, "--grace") or 0.0,
        deadline_s=opt.parse_duration(deadline, "--deadline"),
        block_map=block_map,
        block_map_every=block_map_every,
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
            backend=backend,
            block_size=opt.parse_block_size(block_size),
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
            watermark=watermark,
            sort=sort,
            cascade_attention=cascade_attention,
            threads=threads,
            seed=seed,
            audit=audit,
        ),
    )
    if job.deadline_s == 0:
        raise UsageError(f"--deadline {deadline} is past")
    ends = [seconds for seconds in (job.deadline_s, slurm_seconds_left()) if seconds is not None]
    stopper: Stopper = ctx.obj
    stopper.limit(grace_s=job.grace_s, deadline_s=min(ends, default=None))
    with RunProgress(progress) as shown:
        report = run_job(job, shown, stopper)
    note = f" (max_tokens {DEFAULT_MAX_TOKENS}, the default)" if max_tokens is None else ""
    show_end(report, max_error_rate, note, progress)
    raise typer.Exit(report.exit_code(max_error_rate))
