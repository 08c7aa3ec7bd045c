"""Runs one packed batch through the model: tensors to the device, paged attention in every layer, logits of the needed rows."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch

from ..kernels.api import SharedPrefixes, load_backend
from ..model.attention import AttentionStep
from ..model.forward import Forward
from ..model.spec import ModelSpec
from ..request import Request, Sequence
from ..sampling_params import SamplingParams
from . import memory
from .batch import BlockTableArray, PackedBatch, SharedGroups, build_batch
from .kv_cache import KVCache
from .scheduler import ScheduledStep
from .swap import MEASURED_BLOCKS, BlockStore
from .tiers import Address, MoveBatch, Tier

# Long enough that the GPU's split decode takes all the room for partial results it ever takes.
_LONG_CONTEXT = 32_768
# Of the batch that is timed: enough that a token takes what it takes in larger ones.
_FEW_TOKENS = 128


class ModelRunner:
    """A loaded model and, once attached, its KV pool. Knows nothing of requests or scheduling."""

    def __init__(
        self,
        model: Forward,
        spec: ModelSpec,
        *,
        device: str,
        backend: str,
        block_size: int,
        max_model_len: int,
    ):
        self._model = model
        self._spec = spec
        self._device = torch.device(device)
        self._backend = load_backend(backend)
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._checked_layers: set[int] = set()
        self._cache: KVCache | None = None
        self._store: BlockStore | None = None
        self.prefill_s_per_token = 0.0  # measured by warm_up
        self._mirror: DeviceBlockTables | None = None

    def allocate_cache(
        self, num_blocks: int, *, host_blocks: int = 0, disk_blocks: int = 0, disk_path: str | None = None
    ) -> None:
        """Allocate the KV pool and the tiers below it (see `swap.BlockStore`)."""
        spec = self._spec
        self.release_cache()  # the old pool goes before the new one comes
        self._cache = KVCache(
            num_blocks=num_blocks,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            block_size=self._block_size,
            head_dim=spec.head_dim,
            dtype=getattr(torch, spec.kv_cache_dtype),
            device=str(self._device),
            key_transposed=self._backend.KEY_TRANSPOSED,
        )
        self._store = BlockStore(
            self._cache.kv, self._backend, host_blocks=host_blocks, disk_blocks=disk_blocks, disk_path=disk_path
        )

    def move_blocks(self, batches: list[MoveBatch]) -> tuple[set[Address], list[Exception]]:
        """Make copies and moves of whole blocks; return what was spoiled by failures, see `swap.BlockStore.move`."""
        assert self._store is not None
        return self._store.move(batches)

    def round_trip_s(self, tier: Tier, disk_path: str | None = None) -> float:
        """Measure the seconds a block takes to a tier and back, in a small pool of its own."""
        self.allocate_cache(
            MEASURED_BLOCKS,
            host_blocks=MEASURED_BLOCKS if tier == Tier.HOST else 0,
            disk_blocks=MEASURED_BLOCKS if tier == Tier.DISK else 0,
            disk_path=disk_path,
        )
        assert self._store is not None
        try:
            return self._store.round_trip_s(tier)
        finally:
            self.release_cache()

    def run(self, batch: PackedBatch, tables: BlockTableArray | None = None, *, best_among: int | None = None) -> torch.Tensor:
        """Run a batch; return the logits (num_sampled, vocab) of `batch.sample_positions`, in the model's dtype.

        best_among: the best of each row's first so many ids will do, see `Forward.__call__`.

        `tables` is the persistent array that `batch.block_tables` was taken from; on a GPU its mirror is brought up to date
        and gathered there instead of copying every row's table.
        """
        assert self._cache is not None, "no KV pool allocated"
        decodes = batch.num_decodes
        block_tables = self._block_tables(batch, tables)
        seq_lens = self._to_device(batch.seq_lens_kv)
        cu_seqlens = batch.cu_seqlens_q[decodes:] - batch.cu_seqlens_q[decodes]
        step = AttentionStep(
            backend=self._backend,
            cache_layers=self._cache.layers,
            num_tokens=batch.num_tokens,
            num_decodes=decodes,
            slot_mapping=self._to_device(batch.slot_mapping),
            decode_block_tables=block_tables[:decodes],
            decode_seq_lens=seq_lens[:decodes],
            prefill_block_tables=block_tables[decodes:],
            prefill_cu_seqlens_q=self._to_device(cu_seqlens),
            prefill_seq_lens=seq_lens[decodes:],
            max_seqlen_q=int(np.diff(cu_seqlens).max(initial=0)),
            max_model_len=self._max_model_len,
            decode_shared=self._shared_prefixes(batch.shared),
            checked_layers=self._checked_layers,
        )
        with torch.inference_mode():
            return self._model(
                self._to_device(batch.input_ids),
                self._to_device(batch.positions),
                self._to_device(batch.sample_positions),
                step,
                best_among=best_among,
            )

    def warm_up(self, *, max_num_batched_tokens: int, max_num_seqs: int, sample: Callable[[torch.Tensor], object]) -> int:
        """Learn what steps take, in a pool of their own: return the peak of memory of the largest ones, in bytes.

        A few rows first, which compile the kernels and measure the products' row buckets, and then the time a prompt token
        takes. The largest steps are a full one of prompts and one of decodes (on a GPU at a long context, which needs the most
        room for partial results); `sample` is given each one's logits, for the sampler's share. The peak is what was taken
        beyond what was held before.
        """
        size, limit = self._block_size, self._max_model_len
        rows = min(max_num_seqs, max_num_batched_tokens)
        full = [min(len(part), limit) for part in np.array_split(np.arange(max_num_batched_tokens), rows)]
        few = [min(size, limit)] * min(rows, max(1, min(_FEW_TOKENS, max_num_batched_tokens) // size))
        self.allocate_cache(sum(-(-n // size) for n in full))
        on_gpu = self._device.type == "cuda"
        for lengths, decodes in ((few, False), (few, True)):
            sample(self.run(dummy_batch(lengths, size, decodes=decodes)))
        self.run(dummy_batch(few, size, decodes=True), best_among=1)
        self.synchronize()
        batch = dummy_batch(few, size, decodes=False)
        start = perf_counter()
        self.run(batch)
        self.synchronize()
        self.prefill_s_per_token = (perf_counter() - start) / batch.num_tokens

        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        else:
            assert self._cache is not None
            self._cache.kv.zero_()  # memory that is first touched counts from then on; the pool's is not the step's
            before = memory.resident_bytes()
            memory.reset_peak()
        context = min(_LONG_CONTEXT if on_gpu else size, limit)
        whole, self._model = self._model, self._model.thin()
        try:
            for lengths, decodes in ((full, False), ([context] * max_num_seqs, True)):
                sample(self.run(dummy_batch(lengths, size, decodes=decodes)))
        finally:
            self._model = whole
        self.synchronize()
        peak = (torch.cuda.max_memory_allocated() if on_gpu else memory.peak_resident_bytes()) - before
        self.release_cache()
        return max(0, peak)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def release_cache(self) -> None:
        """Give the KV pool's memory back."""
        if self._store is not None:
            self._store.close()
        self._store = self._cache = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor

    def _shared_prefixes(self, groups: SharedGroups | None) -> SharedPrefixes | None:
        if groups is None:
            return None
        return SharedPrefixes(
            row_bounds=self._to_device(groups.row_bounds),
            num_shared_blocks=self._to_device(groups.num_shared_blocks),
            num_rows=int(groups.row_bounds[-1]),
            max_shared_blocks=int(groups.num_shared_blocks.max()),
        )

    def _block_tables(self, batch: PackedBatch, tables: BlockTableArray | None) -> torch.Tensor:
        if tables is None or self._device.type != "cuda":
            return self._to_device(batch.block_tables)
        if self._mirror is None or self._mirror.source is not tables:
            self._mirror = DeviceBlockTables(tables, self._to_device)
        return self._mirror.gather(batch)


class DeviceBlockTables:
    """A block-table array kept on the device: only rows that changed since the last step are copied."""

    def __init__(self, source: BlockTableArray, to_device: Callable[[np.ndarray], torch.Tensor]):
        self.source = source
        self._to_device = to_device
        self._tables: torch.Tensor | None = None

    def gather(self, batch: PackedBatch) -> torch.Tensor:
        """Return the batch's block tables (S, B) on the device, after catching up with the source."""
        array = self.source.array
        changed = self.source.take_changed_rows()
        if self._tables is None or self._tables.shape != array.shape:
            self._tables = self._to_device(array.copy())
        elif len(changed):
            self._tables[self._to_device(changed)] = self._to_device(array[changed])
        rows = self._tables.index_select(0, self._to_device(batch.table_rows))
        return rows[:, : batch.block_tables.shape[1]]


def dummy_batch(lengths: list[int], block_size: int, *, decodes: bool) -> PackedBatch:
    """Return a batch of rows of the given lengths, all of token 0: whole prompts, or each row's last token.

    Decoding rows repeat one block in their tables: they only read, and what they read doesn't matter.
    """
    sequences, next_block = [], 0
    for row, length in enumerate(lengths):
        sequence = Sequence(Request(row, [0] * length, SamplingParams(), 1, frozenset(), 0))
        num_blocks = -(-length // block_size)
        if decodes:
            sequence.num_computed_tokens = length - 1
            sequence.block_table = [0] * (num_blocks - 1) + [row]
        else:
            sequence.block_table = list(range(next_block, next_block + num_blocks))
        next_block += num_blocks
        sequences.append(sequence)
    tables = BlockTableArray(len(sequences))
    tables.update(sequences)
    counts = [1] * len(lengths) if decodes else lengths
    return build_batch(ScheduledStep(sequences, counts, len(lengths) if decodes else 0), tables, block_size)
