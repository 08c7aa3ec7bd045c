"""`pagedgen tune`: measure this machine with a model, for `plan` and for the defaults of `run`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from pagedgen.config import EngineConfig
from pagedgen.job import tune as measure

from . import options as opt
from .output import RunProgress, say
from .plan_output import show_profile


def tune(
    model: opt.Model,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
    revision: opt.Revision = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    allow_pickle: opt.AllowPickle = False,
    dtype: opt.Dtype = "auto",
    kv_cache_dtype: opt.KvCacheDtype = "auto",
    quantization: opt.Quantization = "none",
    device: opt.Device = "auto",
    block_size: opt.BlockSize = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    threads: opt.Threads = None,
) -> None:
    """Measure what steps of MODEL take on this machine, and keep it: `plan` foretells times by it."""
    config = EngineConfig(
        model=model,
        revision=revision,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        quantization=quantization,
        device=device,
        block_size=opt.parse_block_size(block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        threads=threads,
    )
    with RunProgress("none" if as_json else "auto") as shown:
        profile, path = measure(config, shown)
    if as_json:
        say(json.dumps({**asdict(profile), "path": path}, indent=2))
    else:
        show_profile(profile, path)
