"""The device copy of the block tables follows the host's, copying only what changed; warm-up leaves nothing behind."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from pagedgen.engine.batch import BlockTableArray
from pagedgen.engine.block_manager import BlockManager
from pagedgen.engine.model_runner import DeviceBlockTables
from pagedgen.request import Request, Sequence
from pagedgen.sampling_params import SamplingParams


def test_mirror_follows_random_lives_of_rows():
    """Rows join, grow, leave and come back; the gathered tables equal the host's after every step."""
    rng = np.random.default_rng(0)
    blocks = BlockManager(400, 4)
    copied = []

    def to_device(array):
        copied.append(array.size)
        return torch.from_numpy(array.copy())

    for _ in range(2):  # a second array of the same shape, as the next call of the engine makes
        tables = BlockTableArray(8, width=2)
        mirror = DeviceBlockTables(tables, to_device)
        running = []
        for step in range(300):
            if len(running) < 8 and rng.random() < 0.4:
                running.append(Sequence(Request(step, [0], SamplingParams(), 1, frozenset(), 0)))
            for s in running:
                if rng.random() < 0.5:
                    blocks.reserve(s, 4 * len(s.block_table) + 4)
            if running and rng.random() < 0.3:
                blocks.release(running.pop(int(rng.integers(len(running)))))
            running = [s for s in running if s.block_table or blocks.reserve(s, 1)]
            tables.update(running)
            if not running:
                continue
            rows = np.array([s.table_row for s in running])
            width = max(len(s.block_table) for s in running)
            batch = SimpleNamespace(table_rows=rows, block_tables=tables.array[rows, :width])
            assert mirror.gather(batch).numpy().tolist() == batch.block_tables.tolist()
            for s, got in zip(running, batch.block_tables, strict=True):
                assert got[: len(s.block_table)].tolist() == s.block_table
                assert (got[len(s.block_table) :] == -1).all()
        for s in running:
            blocks.release(s)
    assert blocks.num_free_blocks == 400


def test_unchanged_tables_are_not_copied_again():
    blocks = BlockManager(8, 4)
    row = Sequence(Request(0, [0], SamplingParams(), 1, frozenset(), 0))
    blocks.reserve(row, 4)
    tables = BlockTableArray(2)
    sizes = []
    mirror = DeviceBlockTables(tables, lambda a: (sizes.append(a.size), torch.from_numpy(a.copy()))[1])
    tables.update([row])
    batch = SimpleNamespace(table_rows=np.array([row.table_row]), block_tables=np.zeros((1, 1)))
    mirror.gather(batch)
    sizes.clear()
    mirror.gather(batch)
    assert sizes == [1]  # the row's number alone


def test_warm_up_measures_and_gives_its_pool_back(tiny_model, engine_run):
    run = engine_run(tiny_model("llama"))
    assert run.engine.runner._cache is None
    assert run.engine._activation_peak_bytes >= 0
