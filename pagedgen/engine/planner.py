"""What a job needs and what fits, in numbers, before it runs. Pure arithmetic over lengths and sizes: no torch, no device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..config import EngineConfig
from ..errors import MemoryPlanError
from ..model.spec import DTYPE_BYTES, ModelSpec
from ..request import Request
from .memory import DeviceMemory, available_kv_bytes

# The sampler's work space (see `sampling.sampler.ROWS_AT_ONCE`, which a test compares; this module loads no torch).
SAMPLER_ROWS, SAMPLER_BYTES_PER_LOGIT = 32, 48


@dataclass(frozen=True)
class Plan:
    """One job on one device. Rows that can't run (too long, or larger than the pool) are in no other number."""

    weights_bytes: int
    activation_peak_bytes: int
    bytes_per_token: int
    bytes_per_block: int
    block_size: int
    device_total_bytes: int
    device_free_bytes: int
    available_kv_bytes: int
    max_block_num: int
    host_blocks: int  # of swap space, no more than the job's rows have
    disk_blocks: int
    num_blocks: int  # to allocate: what fits, but no more than the job can ever use at once (or just what was asked for)
    num_rows: int
    num_row_errors: int  # rows that have no usable prompt
    num_too_long: int  # prompts that leave no room within max_model_len
    num_skipped: int  # rows beyond --max-total-tokens
    num_too_large: int  # rows that need more blocks than the pool has
    prompt_tokens: int
    max_new_tokens: int
    padded_tokens: int
    padding_saved: float
    peak_blocks_needed: int
    max_concurrent_rows: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    covers_all_rows: bool  # False: planned on the rows read ahead, more were to come

    @property
    def is_ample(self) -> bool:
        """Return True when the pool holds as many rows as run at once, whichever they are and however long they get."""
        return self.covers_all_rows and self.num_blocks >= self.peak_blocks_needed

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def estimate_activation_bytes(spec: ModelSpec, *, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Estimate the memory of the largest step besides weights and pool; `run` measures it instead.

    Per token the widest moment of a layer: residual and its norm, q/k/v and the attention output, or gate, up and their
    product. Per sampled row its logits, and the sampler's work space for the rows it draws together.
    """
    width = DTYPE_BYTES[spec.dtype]
    attention = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    per_token = (4 * spec.hidden_size + max(attention, 3 * spec.intermediate_size)) * width
    logits = max_num_seqs * spec.vocab_size * width
    sampler = min(max_num_seqs, SAMPLER_ROWS) * spec.vocab_size * SAMPLER_BYTES_PER_LOGIT
    return max_num_batched_tokens * per_token + logits + sampler


def padded_tokens(lengths: np.ndarray, batch_rows: int) -> int:
    """Return the tokens that batches of `batch_rows` rows in the given order compute when padded to their longest row."""
    total = 0
    for start in range(0, len(lengths), batch_rows):
        batch = lengths[start : start + batch_rows]
        total += int(batch.max()) * len(batch)
    return total


def plan_job(
    spec: ModelSpec,
    *,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    prompt_lens: np.ndarray,
    max_tokens: np.ndarray,
    samples: np.ndarray | None = None,
    beams: np.ndarray | None = None,
    later_tokens: np.ndarray | None = None,
    num_row_errors: int = 0,
    num_too_long: int = 0,
    num_empty: int = 0,
    num_skipped: int = 0,
    device_total_bytes: int,
    device_free_bytes: int,
    activation_peak_bytes: int,
    available_kv_bytes: int,
    num_gpu_blocks_override: int | None = None,
    swap_space_bytes: int = 0,
    disk_swap_bytes: int = 0,
    prefix_caching: bool = False,
    covers_all_rows: bool = True,
    must_fit: bool = True,
) -> Plan:
    """Plan a job from its rows' lengths.

    prompt_lens, max_tokens: (num_rows,) tokens of each row with a usable prompt, and how many it may generate; samples
    (num_rows,): how many sequences of each, which share the prompt's full blocks (default: one); beams (num_rows,): True where
    these must run together; later_tokens (num_rows,): what later turns may add. Rows that ended before
    (`num_row_errors`, `num_too_long`, `num_skipped`, and `num_empty` that ask for no token) are only counted. With
    `covers_all_rows` False more rows are to come, and the pool takes all there is.

    Raises:
        MemoryPlanError: there is no pool, or (`must_fit`) it can't hold even the shortest row; the message has every number.
    """
    bytes_per_block = spec.bytes_per_block(block_size)
    if num_gpu_blocks_override and num_gpu_blocks_override * bytes_per_block > device_free_bytes:
        raise MemoryPlanError(
            f"--max-block-num {num_gpu_blocks_override:,} needs {num_gpu_blocks_override * bytes_per_block:,} bytes "
            f"({bytes_per_block:,} a block), the device has {device_free_bytes:,} free"
        )
    max_block_num = num_gpu_blocks_override or max(0, available_kv_bytes // bytes_per_block)
    too_long = prompt_lens >= max_model_len
    # The last generated token is never fed back, so it needs no slot.
    kv_tokens = prompt_lens + np.maximum(np.minimum(max_tokens, max_model_len - prompt_lens) - 1, 0)
    kv_tokens = kv_tokens + (0 if later_tokens is None else later_tokens)
    one = -(-kv_tokens // block_size)
    all_n = np.ones(len(prompt_lens), dtype=np.int64) if samples is None else samples
    all_shared = np.where(all_n > 1, prompt_lens // block_size, 0)
    all_needs = all_shared + all_n * (one - all_shared)
    blocks = one if beams is None else np.where(beams, all_needs, one)
    too_large = ~too_long & (blocks > max_block_num)
    runs = ~too_long & ~too_large
    if max_block_num == 0 or (must_fit and bool((~too_long).any()) and not runs.any()):
        smallest = int(blocks[~too_long].min()) if (~too_long).any() else 1
        if available_kv_bytes <= 0 and not num_gpu_blocks_override:
            raise MemoryPlanError(
                f"there is no memory for the KV pool beside weights of {spec.weights_bytes:,} bytes, activations of "
                f"{activation_peak_bytes:,} (and --swap-space, on a CPU): the device has {device_total_bytes:,}, "
                f"{device_free_bytes:,} of them free; use a smaller --max-num-batched-tokens, --max-num-seqs or --swap-space, "
                "or a device with more memory"
            )
        fits = "are allowed by --max-block-num" if num_gpu_blocks_override else f"fit into {max(available_kv_bytes, 0):,} bytes"
        raise MemoryPlanError(
            f"the KV pool can't hold one row: the shortest needs {smallest} blocks of {bytes_per_block:,} bytes "
            f"({block_size} tokens), {max_block_num} {fits} "
            f"(device {device_total_bytes:,}, free {device_free_bytes:,}, weights {spec.weights_bytes:,}, "
            f"activations {activation_peak_bytes:,}); use a smaller --max-tokens, --max-num-batched-tokens or --block-size, "
            "or a device with more memory"
        )
    n, lens, needs = all_n[runs], prompt_lens[runs], all_needs[runs]
    prompt_tokens = int(lens.sum())
    padded = padded_tokens(lens, max_num_seqs)
    largest = np.argsort(-needs / np.maximum(n, 1), kind="stable")
    in_flight = int(np.searchsorted(np.cumsum(n[largest]), max_num_seqs)) + 1
    peak = int(needs[largest][:in_flight].sum())
    # Beside the rows in flight, a prefix cache uses room for what later rows will look for.
    most = int(needs.sum()) if covers_all_rows else 2**62  # blocks the job's rows have
    usable = most if prefix_caching or not covers_all_rows else peak
    mean_blocks = float(needs.mean()) if len(needs) else 1.0
    return Plan(
        weights_bytes=spec.weights_bytes,
        activation_peak_bytes=activation_peak_bytes,
        bytes_per_token=spec.bytes_per_token,
        bytes_per_block=bytes_per_block,
        block_size=block_size,
        device_total_bytes=device_total_bytes,
        device_free_bytes=device_free_bytes,
        available_kv_bytes=available_kv_bytes,
        max_block_num=int(max_block_num),
        host_blocks=min(swap_space_bytes // bytes_per_block, most),
        disk_blocks=min(disk_swap_bytes // bytes_per_block, most),
        num_blocks=num_gpu_blocks_override or min(int(max_block_num), max(usable, 1)),
        num_rows=len(prompt_lens) + num_row_errors + num_too_long + num_empty + num_skipped,
        num_skipped=num_skipped,
        num_row_errors=num_row_errors,
        num_too_long=num_too_long + int(too_long.sum()),
        num_too_large=int(too_large.sum()),
        prompt_tokens=prompt_tokens,
        max_new_tokens=int((n * np.minimum(max_tokens, max_model_len - prompt_lens)[runs]).sum()),
        padded_tokens=padded,
        padding_saved=1 - prompt_tokens / padded if padded else 0.0,
        peak_blocks_needed=peak,
        max_concurrent_rows=int(min(len(needs), max_num_seqs, max_block_num / mean_blocks)),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        covers_all_rows=covers_all_rows,
    )


class RequestLengths:
    """What a plan needs of requests, in a few bytes each."""

    def __init__(self, requests: Iterable[Request] = ()):
        self._columns = {name: array("q") for name in ("prompt_lens", "max_tokens", "samples", "beams", "later_tokens")}
        self.add(requests)

    def add(self, requests: Iterable[Request]) -> None:
        """Take note of more requests."""
        for request in requests:
            self._columns["prompt_lens"].append(request.num_prompt_tokens)
            self._columns["max_tokens"].append(request.max_tokens)
            self._columns["samples"].append(request.num_sequences)
            self._columns["beams"].append(request.params.beam_width > 1)
            self._columns["later_tokens"].append(request.later_tokens)

    def arrays(self) -> dict[str, Any]:
        """Return `plan_job`'s arguments, each (num_rows,)."""
        found = {name: np.array(column, dtype=np.int64) for name, column in self._columns.items()}
        return found | {"beams": found["beams"] > 0}


def plan_requests(
    requests: RequestLengths,
    spec: ModelSpec,
    config: EngineConfig,
    *,
    device: DeviceMemory,
    own_bytes: int,
    pending_bytes: int,
    activation_peak_bytes: int,
    covers_all_rows: bool = True,
    must_fit: bool = True,
    **not_run: Any,
) -> Plan:
    """Plan requests on a device; see `plan_job` and `memory.available_kv_bytes`.

    Raises:
        MemoryPlanError: the pool can't hold even the shortest row.
    """
    assert config.block_size and config.max_model_len and config.max_num_seqs and config.max_num_batched_tokens
    own_swap_bytes = config.swap_space_bytes if config.device == "cpu" else 0  # host memory is the device's own there
    pending_bytes += own_swap_bytes
    available = config.kv_cache_memory_bytes
    if own_swap_bytes and available is not None and available + own_swap_bytes > device.free_bytes:
        raise MemoryPlanError(
            f"--kv-cache-memory-bytes {available:,} and --swap-space {own_swap_bytes:,} are more than the "
            f"{device.free_bytes:,} bytes that are free"
        )
    if available is None:
        available = available_kv_bytes(
            device, utilization=config.gpu_memory_utilization, own_bytes=own_bytes, pending_bytes=pending_bytes
        )
    return plan_job(
        spec,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        **requests.arrays(),
        device_total_bytes=device.total_bytes,
        device_free_bytes=device.free_bytes - own_swap_bytes,
        activation_peak_bytes=activation_peak_bytes,
        available_kv_bytes=available,
        num_gpu_blocks_override=config.num_gpu_blocks_override,
        swap_space_bytes=config.swap_space_bytes,
        disk_swap_bytes=config.disk_swap_bytes,
        prefix_caching=config.enable_prefix_caching,
        covers_all_rows=covers_all_rows,
        must_fit=must_fit,
        **not_run,
    )
