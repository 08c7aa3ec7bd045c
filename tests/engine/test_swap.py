"""Blocks below the device: swapped or recomputed, cached or not, the same bits; and what happens when a move fails."""

from __future__ import annotations

import os

import pytest
import torch
from pagedgen.kernels.api import load_backend
from recorder import recorded
from test_prefix_cache import shared_prompts

from pagedgen.engine.swap import BlockStore
from pagedgen.engine.tiers import Address, MoveBatch, Tier, batch_moves
from pagedgen.errors import MemoryPlanError, UsageError
from pagedgen.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
MIB = 2**20


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("gemma2", "bfloat16")])
def test_bits_do_not_depend_on_cache_swap_or_order(
    tiny_model, engine_run, make_prompts, eager_admission, always_worth_it, tmp_path, family, dtype
):
    """Cache on and off; no preemption, recompute, host, disk, both; reversed: identical logits and tokens."""
    model = tiny_model(family)
    prompts = shared_prompts(make_prompts, rows=5) + make_prompts([30, 7], seed=9)
    params = [PARAMS] * 9 + [SamplingParams(n=3, temperature=1.0, max_tokens=24, ignore_eos=True)] * 3
    settings = {"dtype": dtype, "block_size": 4}
    want = recorded(engine_run(model, enable_prefix_caching=False, **settings), prompts, params)
    host, disk = {"swap_space_bytes": MIB}, {"disk_swap_path": str(tmp_path), "disk_swap_bytes": MIB}
    tight = {"swap_space_bytes": 4 * 3072, **disk}  # few blocks in host memory, the rest on disk
    for caching in (True, False):
        for pool, tiers in ((None, {}), (30, {}), (30, host), (30, disk), (30, tight)):
            run = engine_run(model, enable_prefix_caching=caching, num_gpu_blocks_override=pool, **tiers, **settings)
            what = f"caching {caching}, pool {pool}, {tiers}"
            assert recorded(run, prompts, params) == want, what
            order = list(range(len(prompts)))[::-1]
            assert recorded(run, prompts[::-1], params[::-1], order) == want, what
            assert (run.stats.preemptions > 0) == (pool is not None)
            moved = run.stats.swap.moved_blocks
            assert (moved.get("device to host", 0) > 0) == ("swap_space_bytes" in tiers), what
            assert (moved.get("disk to device", 0) > 0) == (tiers is disk or tiers is tight), what
            if tiers is host:
                assert run.stats.recomputed_tokens < 4 * run.stats.preemptions, "only the part of a block is computed again"


def test_another_block_size_gives_the_same_tokens_in_fp32(
    tiny_model, engine_run, make_prompts, eager_admission, always_worth_it
):
    prompts = shared_prompts(make_prompts, rows=5)
    want = engine_run(tiny_model("llama"), enable_prefix_caching=False).answer(prompts, PARAMS)
    for block_size, pool in ((4, 30), (8, 16), (16, 9), (32, 5)):
        run = engine_run(tiny_model("llama"), block_size=block_size, num_gpu_blocks_override=pool, swap_space_bytes=MIB)
        assert run.answer(prompts, PARAMS) == want
        assert run.stats.preemptions > 0


def test_cold_prefixes_spill_before_they_are_dropped(tiny_model, engine_run, make_prompts, always_worth_it):
    """Two groups whose rows alternate through a pool for little more than one row."""
    prompts = shared_prompts(make_prompts, rows=6, prefix=40)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    settings = {"block_size": 4, "num_gpu_blocks_override": 14, "sort": "none", "max_num_seqs": 1}
    dropped = engine_run(tiny_model("llama"), **settings)
    want = dropped.answer(prompts, params)
    assert dropped.stats.prefix.evictions > 0
    spilled = engine_run(tiny_model("llama"), swap_space_bytes=MIB, **settings)
    assert spilled.answer(prompts, params) == want
    assert spilled.stats.prefix.evictions == 0
    assert spilled.stats.prefix.saved_tokens == spilled.stats.prefix.shareable_tokens > dropped.stats.prefix.saved_tokens
    assert spilled.stats.swap.moved_blocks["host to device"] > 0


def test_a_tier_that_is_slower_than_computing_again_is_not_used(
    tiny_model, engine_run, make_prompts, eager_admission, monkeypatch
):
    prompts, notes = make_prompts([20] * 8), []
    run = engine_run(tiny_model("llama"), block_size=4, num_gpu_blocks_override=24, swap_space_bytes=MIB)
    requests = [run.engine.opened.make_request(i, p, PARAMS) for i, p in enumerate(prompts)]

    def generate(round_trip_s):
        run.engine._round_trip_s = {Tier.HOST: round_trip_s}
        assert all(s.num_generated_tokens == 24 for s in run.run(requests, on_note=notes.append).values())
        return run.stats

    assert generate(0.0).swap.moved_blocks["device to host"] > 0
    assert not notes
    stats = generate(3600.0)
    assert "host swap space is not used" in notes[0]
    assert stats.swap.moved_blocks == {}
    assert stats.swap.blocks == {"host": 0, "disk": 0}
    assert stats.preemptions > 0


def test_the_rates_are_measured(tiny_model, engine_run, make_prompts, tmp_path):
    run = engine_run(tiny_model("llama"), swap_space_bytes=MIB, disk_swap_path=str(tmp_path), disk_swap_bytes=MIB)
    run.answer(make_prompts([9]))
    swap = run.stats.swap
    assert set(swap.round_trip_s_per_block) == {"host", "disk"}
    assert all(0 < seconds < 1 for seconds in swap.round_trip_s_per_block.values())
    assert 0 < swap.recompute_s_per_block < 1
    assert list(tmp_path.iterdir()) == []  # the file has no name: it can't be left behind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [20, 64])
def test_moves_carry_every_byte_of_a_block(tmp_path, dtype, head_dim):
    """All layers, K and V, any head size, through every pair of tiers."""
    torch.manual_seed(0)
    kv = torch.randn(6, 3, 2, 2, 4, head_dim).to(dtype)
    store = BlockStore(kv, load_backend("cpu"), host_blocks=3, disk_blocks=3, disk_path=str(tmp_path))
    before = kv.clone()
    moves = [
        ((Tier.DEVICE, 0), (Tier.HOST, 2)), ((Tier.DEVICE, 1), (Tier.DISK, 1)), ((Tier.HOST, 2), (Tier.DISK, 0)),
        ((Tier.DISK, 1), (Tier.HOST, 0)), ((Tier.HOST, 0), (Tier.DEVICE, 4)), ((Tier.DISK, 0), (Tier.DEVICE, 5)),
        ((Tier.DEVICE, 2), (Tier.DEVICE, 3)),
    ]  # fmt: skip
    spoiled, errors = store.move(batch_moves([(Address(*a), Address(*b)) for a, b in moves]))
    assert (spoiled, errors) == (set(), [])
    for destination, source in ((4, 1), (5, 0), (3, 2), (0, 0), (1, 1), (2, 2)):
        assert torch.equal(kv[destination], before[source])
    store.close()


def test_a_failed_move_spoils_what_depends_on_it(tmp_path, monkeypatch):
    kv = torch.zeros(4, 1, 2, 1, 4, 8)
    store = BlockStore(kv, load_backend("cpu"), host_blocks=2, disk_blocks=2, disk_path=str(tmp_path))

    def fails(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwritev", fails)
    moves = [
        ((Tier.DEVICE, 0), (Tier.DISK, 0)), ((Tier.DISK, 0), (Tier.HOST, 0)), ((Tier.HOST, 0), (Tier.DEVICE, 1)),
        ((Tier.DEVICE, 2), (Tier.HOST, 1)), ((Tier.DEVICE, 3), (Tier.DEVICE, 1)),
    ]  # fmt: skip
    spoiled, errors = store.move(batch_moves([(Address(*a), Address(*b)) for a, b in moves]))
    assert spoiled == {Address(Tier.DISK, 0), Address(Tier.HOST, 0)}  # device 1 was then written from another place
    assert len(errors) == 1
    assert isinstance(errors[0], OSError)
    store.close()


def test_batches_do_what_the_moves_do_in_order():
    """Random moves between small tiers: one by one and in batches."""
    import random

    for seed in range(300):
        rng = random.Random(seed)
        places = [Address(tier, i) for tier in Tier for i in range(4)]
        moves = [tuple(rng.sample(places, 2)) for _ in range(rng.randint(1, 14))]
        one_by_one = {place: str(place) for place in places}
        for source, destination in moves:
            one_by_one[destination] = one_by_one[source]
        batched = {place: str(place) for place in places}
        batches = batch_moves(moves)
        for batch in batches:
            assert isinstance(batch, MoveBatch)
            read = [batched[Address(batch.source, s)] for s, _ in batch.pairs]
            for (_, d), value in zip(batch.pairs, read, strict=True):
                batched[Address(batch.destination, d)] = value
        assert batched == one_by_one
        assert sum(len(b.pairs) for b in batches) == len(moves)


def test_independent_moves_share_a_batch():
    """Making room alternates with reading back; the moves are made in two batches all the same."""
    moves = []
    for i in range(8):
        moves.append((Address(Tier.DEVICE, i), Address(Tier.HOST, i)))
        moves.append((Address(Tier.HOST, 20 + i), Address(Tier.DEVICE, i)))
    assert [len(batch.pairs) for batch in batch_moves(moves)] == [8, 8]


def test_swap_space_that_is_not_there_is_refused(tiny_model, engine_run, tmp_path):
    model = tiny_model("llama")
    with pytest.raises(UsageError, match="--disk-swap /nowhere"):
        engine_run(model, disk_swap_path="/nowhere", disk_swap_bytes=MIB)
    with pytest.raises(UsageError, match="are free there"):
        engine_run(model, disk_swap_path=str(tmp_path), disk_swap_bytes=2**59)
    with pytest.raises(MemoryPlanError, match="--swap-space"):
        engine_run(model, swap_space_bytes=2**50)
    with pytest.raises(UsageError, match="--disk-swap"):
        engine_run(model, disk_swap_path=str(tmp_path))


def test_a_disk_that_fails_while_it_is_measured_is_not_used(tiny_model, engine_run, make_prompts, tmp_path, monkeypatch):
    run, notes = engine_run(tiny_model("llama"), disk_swap_path=str(tmp_path), disk_swap_bytes=MIB), []

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", fails)
    request = run.engine.opened.make_request(0, make_prompts([9])[0], PARAMS)
    done = run.run([request], on_note=notes.append)
    assert done[0].num_generated_tokens == 24
    assert notes[0] == "the disk swap space failed while it was measured: [Errno 28] No space left on device"


def test_large_moves_go_through_bounded_memory(tmp_path, monkeypatch):
    kv = torch.randn(40, 2, 2, 1, 4, 8)
    monkeypatch.setattr("pagedgen.engine.swap._STAGING_BYTES", 3 * kv[0].numel() * 4)
    store = BlockStore(kv, load_backend("cpu"), host_blocks=20, disk_blocks=20, disk_path=str(tmp_path))
    before = kv.clone()
    assert len(store._staging) == 3
    for tier in (Tier.HOST, Tier.DISK):
        there = [(Address(Tier.DEVICE, i), Address(tier, 19 - i)) for i in range(20)]
        back = [(Address(tier, 19 - i), Address(Tier.DEVICE, 20 + i)) for i in range(20)]
        assert store.move(batch_moves(there + back)) == (set(), [])
        assert torch.equal(kv[20:], before[:20])
        kv[20:] = before[20:]
    store.close()


def test_a_disk_that_fills_up_costs_recomputation_and_nothing_else(
    tiny_model, engine_run, make_prompts, eager_admission, always_worth_it, tmp_path, monkeypatch
):
    prompts, notes = make_prompts([20] * 10), []
    settings = {"block_size": 4, "num_gpu_blocks_override": 24}
    want = engine_run(tiny_model("llama"), **settings).answer(prompts, PARAMS)
    run = engine_run(tiny_model("llama"), disk_swap_path=str(tmp_path), disk_swap_bytes=MIB, **settings)
    pwritev, written = os.pwritev, []

    def full(fd, data, at):
        written.append(at)
        if len(written) > 20:
            raise OSError(28, "No space left on device")
        return pwritev(fd, data, at)

    monkeypatch.setattr(os, "pwritev", full)
    requests = [run.engine.opened.make_request(i, p, PARAMS) for i, p in enumerate(prompts)]
    done = run.run(requests, on_note=notes.append)
    assert {row: s.generated_token_ids for row, s in done.items()} == want
    assert notes == [
        "blocks could not be moved, their rows are computed again: [Errno 28] No space left on device",
        "the disk swap space failed and is not used any more: [Errno 28] No space left on device",
    ]
    assert run.engine.stats.swap.failed_moves > 0
