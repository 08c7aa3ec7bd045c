"""Everything a run can be told. Frozen: `EngineConfig.resolve()` returns a new, complete one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .errors import UsageError
from .sampling_params import SamplingParams

TOO_LONG = ("error", "skip", "truncate-left", "truncate-middle")
FORMATS = ("auto", "jsonl", "csv", "tsv", "parquet", "openai-batch")
ON_ERROR = ("continue", "stop")

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "int8")  # auto: the model's
DEVICES = ("auto", "cpu", "cuda")
QUANTIZATIONS = ("none", "int8")
BACKENDS = ("auto", "reference", "cpu", "gpu")
SORTS = ("prefix", "length", "none")


@dataclass(frozen=True)
class EngineConfig:
    """The engine's settings; None and "auto" mean "choose", and `resolve()` chooses (but `kv_cache_dtype` "auto" is `dtype`).

    Raises:
        UsageError: a value is out of its range; the message names the flag, the value and what is allowed.
    """

    model: str
    revision: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str = "none"
    device: str = "auto"
    backend: str = "auto"
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    knee_tokens: int = 0  # see `engine.scheduler.Scheduler`; what `tune` found, where max_num_batched_tokens isn't given
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    swap_space_bytes: int = 0
    disk_swap_path: str | None = None
    disk_swap_bytes: int = 0
    cascade_attention: bool = True
    watermark: float = 0.01
    sort: str = "prefix"
    threads: int | None = None
    seed: int = 0
    audit: bool = False

    def __post_init__(self) -> None:
        _choice("--dtype", self.dtype, DTYPES)
        _choice("--kv-cache-dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _choice("--quantization", self.quantization, QUANTIZATIONS)
        _choice("--device", self.device, DEVICES)
        _choice("--backend", self.backend, BACKENDS)
        _choice("--sort", self.sort, SORTS)
        size = self.block_size
        if size is not None and (size < 4 or size > 1024 or size & (size - 1)):
            raise UsageError(f"--block-size {size} must be a power of two from 4 to 1024")
        for flag, value, most in (
            ("--max-model-len", self.max_model_len, 2**31 - 1),
            ("--max-num-seqs", self.max_num_seqs, 2**16),
            ("--max-num-batched-tokens", self.max_num_batched_tokens, 2**20),
            ("--kv-cache-memory-bytes", self.kv_cache_memory_bytes, 2**60),
            ("--max-block-num", self.num_gpu_blocks_override, 2**31 - 1),  # block ids are 32-bit
            ("--threads", self.threads, 1024),
        ):
            if value is not None and not 1 <= value <= most:
                raise UsageError(f"{flag} {value} must be between 1 and {most}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UsageError(f"--gpu-memory-utilization {self.gpu_memory_utilization} must be above 0 and at most 1")
        if not 0 <= self.watermark < 1:
            raise UsageError(f"--watermark {self.watermark} must be at least 0 and below 1")
        for flag, value in (("--swap-space", self.swap_space_bytes), ("--disk-swap", self.disk_swap_bytes)):
            if not 0 <= value <= 2**60:
                raise UsageError(f"{flag} {value} must be between 0 and 2**60 bytes")
        if (self.disk_swap_path is None) != (self.disk_swap_bytes == 0):
            raise UsageError("--disk-swap needs a directory and a size above 0")
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"--seed {self.seed} must be between 0 and 2**64 - 1")

    def resolve(
        self,
        *,
        device: str,
        dtype: str,
        max_model_len: int,
        limited_by: str,
        threads: int,
    ) -> EngineConfig:
        """Return a copy with nothing left to choose, given what the device and the model are.

        Raises:
            UsageError: settings that contradict each other or the model.
        """
        if self.max_model_len is not None and self.max_model_len > max_model_len:
            raise UsageError(
                f"--max-model-len {self.max_model_len} is too long for the model: at most {max_model_len}, {limited_by}"
            )
        on_gpu = device == "cuda"
        if on_gpu and self.quantization != "none":
            raise UsageError(f"--quantization {self.quantization} runs on --device cpu only")
        max_num_seqs = self.max_num_seqs or (256 if on_gpu else 128)
        budget = self.max_num_batched_tokens
        if budget is None:
            budget = max(max_num_seqs, 8192 if on_gpu else 1024)
        elif budget < max_num_seqs:
            if self.max_num_seqs is not None:
                raise UsageError(
                    f"--max-num-batched-tokens {budget} is less than --max-num-seqs {max_num_seqs}: "
                    "every running row needs one token a step"
                )
            max_num_seqs = budget
        backend = self.backend
        if backend == "auto":
            backend = "gpu" if on_gpu else "cpu"
        if (backend == "gpu") != on_gpu and backend != "reference":
            raise UsageError(f"--backend {backend} can't run on --device {device}")
        if self.kv_cache_dtype == "int8" and backend == "gpu":
            raise UsageError(
                "--kv-cache-dtype int8 runs on the cpu and reference backends only, not on gpu: leave it out or take "
                "--device cpu"
            )
        return replace(
            self,
            device=device,
            dtype=dtype,
            backend=backend,
            block_size=self.block_size or (16 if on_gpu else 32),
            max_model_len=self.max_model_len or max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            threads=threads,
            sort="length" if self.sort == "prefix" and not self.enable_prefix_caching else self.sort,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class PromptConfig:
    """How a row's columns become its prompt; see the flags of the same names.

    Raises:
        UsageError: settings that exclude each other.
    """

    prompt_column: str | None = None
    messages_column: str | None = None
    prompt_template: str | None = None
    system_prompt: str | None = None
    as_chat: bool = False

    def __post_init__(self) -> None:
        named = {
            "--prompt-column": self.prompt_column,
            "--messages-column": self.messages_column,
            "--prompt-template": self.prompt_template,
        }
        given = [flag for flag, value in named.items() if value is not None]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} exclude each other: a row has one prompt")

    @property
    def makes_chats(self) -> bool:
        """Return True when a text is what the user says in a chat, rather than what the model continues."""
        return self.as_chat or self.system_prompt is not None


@dataclass(frozen=True)
class JobConfig:
    """What to read, what to ask, where to write, when to stop.

    Raises:
        UsageError: a value is out of its range, or two exclude each other.
    """

    inputs: list[str]
    engine: EngineConfig
    sampling: SamplingParams = field(default_factory=SamplingParams)
    prompts: PromptConfig = field(default_factory=PromptConfig)
    format: str = "auto"
    output: str | None = None  # None only for a plan
    stats: str | None = None
    id_column: str | None = None
    cache_salt_column: str | None = None
    limit: int | None = None
    sample: int | None = None  # so many rows, chosen by the engine's seed
    shard: tuple[int, int] | None = None  # (i, n): every nth row from the ith on
    max_total_tokens: int | None = None
    auto_block_size: bool = False  # the size `plan` recommends for the rows
    assume_output_tokens: int | None = None  # for a plan: of rows that may end by themselves
    too_long: str = "error"
    chat_template: str | None = None
    token_ids: bool = False
    cached_tokens: bool = False
    block_map: str | None = None
    block_map_every: int = 100
    overwrite: bool = False
    restart: bool = False
    retry_errors: bool = False
    on_error: str = "continue"
    flush_s: float = 10.0
    grace_s: float = 20.0
    deadline_s: float | None = None  # seconds from the start of the command

    def __post_init__(self) -> None:
        _choice("--too-long", self.too_long, TOO_LONG)
        _choice("--format", self.format, FORMATS)
        _choice("--on-error", self.on_error, ON_ERROR)
        for flag, value, low in (
            ("--limit", self.limit, 1),
            ("--sample", self.sample, 1),
            ("--max-total-tokens", self.max_total_tokens, 1),
            ("--assume-output-tokens", self.assume_output_tokens, 1),
            ("--flush-every", self.flush_s, 0),
            ("--grace", self.grace_s, 0),
            ("--deadline", self.deadline_s, 0),
        ):
            if value is not None and not low <= value < 2**62:
                raise UsageError(f"{flag} {value:g} must be at least {low}, and below 2**62")
        if self.shard is not None and not 0 <= self.shard[0] < self.shard[1]:
            raise UsageError(f"--shard {self.shard[0]}/{self.shard[1]}: shards of n are numbered from 0 to n - 1")
        if self.shard is not None and self.max_total_tokens is not None:
            raise UsageError("--max-total-tokens counts over the whole input: it can't be used with --shard")
        if self.retry_errors and self.on_error == "stop":
            raise UsageError("--retry-errors and --on-error stop exclude each other")
        if self.retry_errors and (self.restart or self.overwrite):
            raise UsageError("--retry-errors goes on from an output; --overwrite and --restart throw it away")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _choice(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{flag} {value} is not one of {', '.join(allowed)}")
