"""Bugs that other block managers had, each a test of ours. The issue numbers are those projects' public ones."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import numpy as np
import pytest
import torch
from naive_pool import EagerAdmission, NaivePool, num_held
from pagedgen.kernels.api import load_backend

from pagedgen.engine.batch import BlockTableArray, build_batch
from pagedgen.engine.block_manager import BlockManager
from pagedgen.engine.kv_cache import KVCache
from pagedgen.engine.prefix_cache import blake2b_128
from pagedgen.engine.scheduler import ScheduledStep, Scheduler
from pagedgen.engine.swap import BlockStore
from pagedgen.engine.tiers import Address, Tier, batch_moves
from pagedgen.request import Request, Sequence
from pagedgen.sampling_params import SamplingParams


def row(index, tokens, max_tokens=20, salt="", **params):
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0 if params.get("n", 1) > 1 else 0.0, **params)
    return Sequence(Request(index, tokens, params, max_tokens, frozenset(), 0, cache_salt=salt))


class Pool:
    """A block manager with the naive pool beside it, and the few steps the tests take."""

    def __init__(self, num_blocks, **settings):
        self.blocks = BlockManager(num_blocks, 4, record_history=True, **settings)
        self.naive = NaivePool(self.blocks)

    def expect(self, *rows):
        for r in rows:
            self.blocks.expect(r)

    def admit(self, r):
        hits = self.blocks.match(r)
        if not self.blocks.admit(r, hits, len(r.token_ids)):
            return None
        self.naive.make_moves()
        self.compute(r)
        return len(hits)

    def compute(self, r):
        count = r.num_uncomputed_tokens
        self.naive.compute(r, count)
        r.num_computed_tokens += count
        r.num_seen_tokens = r.num_computed_tokens
        self.blocks.index(r)

    def grow(self, r, *tokens):
        """Compute what a row has left and the given tokens; False when there is no room."""
        r.token_ids += tokens
        if not self.blocks.reserve(r, len(r.token_ids)):
            return False
        self.naive.make_moves()
        self.compute(r)
        return True

    def preempt(self, r):
        self.blocks.preempt(r)
        r.num_computed_tokens = 0

    def check(self, *running):
        self.naive.make_moves()
        self.naive.check(running)


PREFIX = list(range(50, 58))  # two blocks of four


def test_vllm_37076_a_block_that_is_hit_is_not_evicted_to_make_room_for_the_same_row():
    pool = Pool(5)
    first, second, later = row(0, [*PREFIX, 1]), row(1, [*PREFIX, *range(9)]), row(2, [*PREFIX, 2])
    pool.expect(first, second, later)
    pool.admit(first)
    pool.blocks.release(first)
    assert pool.blocks.num_cached_blocks == 2
    assert pool.admit(second) == 2  # takes all three free blocks beside the two it found
    pool.check(second)


def test_vllm_49125_a_partly_filled_block_is_never_found():
    """Neither before nor after it went to another tier and back: only whole blocks have a digest."""
    pool = Pool(4, host_blocks=4)
    first = row(0, [*PREFIX, 1, 2, 3])
    pool.expect(first)
    pool.admit(first)
    pool.preempt(first)
    while pool.blocks.num_cached_blocks:
        pool.blocks.pool.make_room(Tier.DEVICE)
    other = row(1, [*PREFIX, 1, 2, 3, 4, 5])
    pool.expect(other)
    assert len(pool.blocks.match(other)) == 2
    assert pool.admit(other) == 2
    pool.check(other)


def test_vllm_44701_a_salt_is_not_mistaken_for_another_name():
    """A row without sharing, a salt that spells its name, and salts that would run together as bare text."""
    shared, private = BlockManager(4, 4).cache, BlockManager(4, 4, prefix_caching=False).cache
    digests = {
        cache.digests(row(index, PREFIX, salt=salt), 1)[0]
        for cache, index, salt in (
            (shared, 0, ""), (shared, 0, "A"), (shared, 0, "0"), (shared, 0, '{"row": 0}'), (shared, 0, "row"),
            (private, 0, ""), (private, 1, "A"),
        )
    }  # fmt: skip
    assert len(digests) == 7
    assert shared.digests(row(5, PREFIX), 1) == shared.digests(row(6, PREFIX), 1)


def test_openvino_genai_3722_equal_digests_of_other_tokens_are_no_hit():
    pool = Pool(12, hash_block=lambda data: b"same")
    rows = [row(i, [i, i + 1, i + 2, i + 3, 9, 9, 9, 9, 1]) for i in range(3)]
    pool.expect(*rows, row(9, rows[0].token_ids))
    assert [pool.admit(r) for r in rows] == [0, 0, 0]
    again = row(3, rows[0].token_ids)
    assert len(pool.blocks.match(again)) == 1  # its own first block; the second's digest was taken by the first
    pool.check(*rows)


def test_equal_digests_behind_another_parent_or_in_another_namespace_are_no_hit():
    """A hash that sees a block's own tokens only, and one that sees nothing: the comparison alone tells them apart."""
    same = [7, 8, 9, 10]
    pool = Pool(12, hash_block=lambda data: blake2b_128(data[-32:]))
    first, other = row(0, [1, 1, 1, 1, *same, 5]), row(1, [2, 2, 2, 2, *same, 5])
    pool.expect(first, other, row(2, first.token_ids))
    pool.admit(first)
    assert pool.admit(other) == 0
    pool.check(first, other)
    pool.blocks.release(first)
    assert len(pool.blocks.match(row(3, first.token_ids))) == 2
    assert len(pool.blocks.match(row(4, [2, 2, 2, 2, *same, 5]))) == 1  # its second block could not be indexed
    pool = Pool(12, hash_block=lambda data: b"")
    first, other = row(0, [*same, 5]), row(1, [*same, 5], salt="a")
    pool.expect(first, other, row(2, [*same, 5]))
    pool.admit(first)
    assert pool.admit(other) == 0
    pool.check(first, other)


def test_blocks_with_the_fewest_remaining_users_go_first():
    """Then the least recently used, then tails; a user that comes back (a preempted row) counts at once."""
    pool = Pool(6)
    a, b = [row(i, [i] * 9) for i in (1, 2)]
    pool.expect(a, b, *(row(9, [1] * 9) for _ in range(2)), row(9, [2] * 9))
    for r in (b, a):
        pool.admit(r)
        pool.blocks.release(r)
    first_to_go = pool.blocks.cache.first_to_go(Tier.DEVICE)
    assert (first_to_go.tokens, first_to_go.depth) == ([2] * 4, 1)
    pool.expect(*(row(9, [2] * 9) for _ in range(2)))
    first_to_go = pool.blocks.cache.first_to_go(Tier.DEVICE)
    assert (first_to_go.tokens, first_to_go.depth) == ([1] * 4, 1)
    pool.expect(row(9, [1] * 9))  # as many users now: the one released first goes first
    first_to_go = pool.blocks.cache.first_to_go(Tier.DEVICE)
    assert (first_to_go.tokens, first_to_go.depth) == ([2] * 4, 1)


def test_kvcached_362_a_digest_does_not_outlive_its_block():
    pool = Pool(3)
    first, again = row(0, [*PREFIX, 1]), row(1, [*PREFIX, 2])
    pool.expect(first, again)
    pool.admit(first)
    pool.blocks.release(first)
    stranger = row(2, list(range(12)))
    pool.expect(stranger)
    pool.admit(stranger)
    assert pool.blocks.match(again) == []
    assert pool.blocks.pool.num_evictions == 2
    pool.check(stranger)


def drive(rows, num_blocks, *, budget=6, max_num_seqs=4, **settings):
    """Run rows through a scheduler and the naive pool until all have their tokens; return the scheduler."""
    pool = Pool(num_blocks, **settings)
    eager = EagerAdmission(pool.blocks, reserve_blocks=0)
    scheduler = Scheduler(pool.blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, admission=eager)
    for r in rows:
        scheduler.add(r)
    tables = BlockTableArray(max_num_seqs, width=1)
    for _ in range(5000):
        if not scheduler.has_unfinished:
            break
        step = scheduler.schedule()
        pool.naive.make_moves()
        tables.update(scheduler.running)
        build_batch(step, tables, 4)
        for s, count in zip(step.sequences, step.num_scheduled_tokens, strict=True):
            pool.naive.compute(s, count)
        scheduler.advance(step)
        pool.check(*scheduler.running)
        for s in step.sequences:
            for member in [s, *scheduler.fork(s)] if s.num_pending_samples and not s.num_uncomputed_tokens else [s]:
                if not member.num_uncomputed_tokens:
                    member.token_ids.append(1000 + 100 * member.sample_index + member.num_generated_tokens)
                    if member.num_generated_tokens == member.request.max_tokens:
                        scheduler.finish(member)
    assert not scheduler.has_unfinished
    assert pool.blocks.num_used_blocks == 0
    pool.check()
    return scheduler


@pytest.mark.parametrize("host_blocks", [0, 3])
def test_vllm_28787_chunked_prefill_and_preemption_truncate_nothing(host_blocks):
    rows = [row(i, list(range(100 * i, 100 * i + 11)), max_tokens=15) for i in range(5)]
    scheduler = drive(rows, 8, budget=5, host_blocks=host_blocks)
    assert scheduler.num_preemptions > 0
    for r in rows:
        assert r.token_ids == [*r.request.prompt_token_ids, *range(1000, 1015)]


def test_vllm_38624_preemption_leaves_no_placeholders_and_thrash_ends():
    """As many rows as fit one at a time; each preempted row begins with what it had and nothing else."""
    rows = [row(i, [i] * 9, max_tokens=20) for i in range(6)]
    scheduler = drive(rows, 7, max_num_seqs=6)
    assert scheduler.num_preemptions > 3
    for r in rows:
        assert r.token_ids == [*r.request.prompt_token_ids, *range(1000, 1020)]


def test_sglang_35270_a_shared_block_counts_once():
    pool = Pool(8)
    first, second, later = row(0, [*PREFIX, 1]), row(1, [*PREFIX, 2]), row(2, [*PREFIX, 3])
    pool.expect(first, second, later)
    pool.admit(first)
    pool.admit(second)
    assert pool.blocks.num_used_blocks == 4
    assert pool.blocks.num_cached_blocks == 0  # in use: it can't make room
    pool.blocks.release(first)
    assert (pool.blocks.num_used_blocks, pool.blocks.num_cached_blocks, pool.blocks.num_available_blocks) == (3, 0, 5)
    pool.blocks.release(second)
    assert (pool.blocks.num_used_blocks, pool.blocks.num_cached_blocks, pool.blocks.num_available_blocks) == (0, 2, 8)
    pool.check()


@pytest.mark.parametrize("block_size", [4, 8, 16])
@pytest.mark.parametrize("length", range(1, 18))
def test_sglang_11970_6888_7130_no_length_leaks_a_block(block_size, length):
    blocks = BlockManager(16, block_size)
    r = row(0, list(range(length)))
    blocks.expect(r)
    assert blocks.admit(r, blocks.match(r), length)
    for end in range(length, length + 20):
        assert blocks.reserve(r, end)
        r.num_computed_tokens = end
    blocks.release(r)
    blocks.audit([])
    assert blocks.num_free_blocks == 16


def test_sglang_jax_982_a_second_release_frees_nothing_again():
    pool = Pool(4)
    r, other = row(0, list(range(9))), row(1, list(range(20, 24)))
    pool.expect(r, other)
    pool.admit(r)
    pool.blocks.release(r)
    pool.admit(other)
    pool.blocks.release(r)  # its table is empty: by whatever path it ends again
    pool.check(other)
    assert pool.blocks.num_free_blocks == 3


def test_sglang_27631_31427_38480_what_is_read_back_is_held():
    """Reading two blocks back makes room on a full device, into a full host tier: not in the place of the two."""
    pool = Pool(4, host_blocks=2)
    first, second = row(0, [*PREFIX, 1]), row(1, list(range(100, 113)))
    pool.expect(first, second)
    pool.admit(first)
    pool.preempt(first)
    pool.admit(second)  # needs the whole device: the first row's two blocks go to the host
    pool.preempt(second)
    assert num_held(pool.blocks, Tier.HOST) == 2
    assert pool.admit(first) == 2  # in goes what it had; one of the second row's blocks takes a place that became free
    pool.check(first)
    assert pool.blocks.pool.num_moves[Tier.HOST, Tier.DEVICE] == 2


def test_tensorrt_llm_12834_12648_counts_and_free_lists_survive_swapping():
    """Swap a row out and in many times, by way of full tiers; after each step the audit recounts everything."""
    pool = Pool(4, host_blocks=2, disk_blocks=3)
    rows = [row(i, list(range(100 * i, 100 * i + 13))) for i in range(3)]
    pool.expect(*rows)
    for turn in range(30):
        r = rows[turn % 3]
        assert pool.admit(r) is not None
        pool.check(r)
        pool.preempt(r)
        pool.check()
    for r in rows:
        pool.blocks.forget(r)
    pool.check()
    assert all(num_held(pool.blocks, tier) == 0 for tier in Tier)


def test_tensorrt_llm_15018_a_block_whose_parent_is_gone_is_not_found():
    """Giving up a block gives up what stands behind it, in whatever tier."""
    pool = Pool(6, host_blocks=4)
    first, again = row(0, [*PREFIX, 1, 2, 3, 4, 5]), row(1, [*PREFIX, 1, 2, 3, 4, 6])
    pool.expect(first, again)
    pool.admit(first)
    pool.blocks.release(first)
    pool.blocks.pool.make_room(Tier.DEVICE)  # the tail goes to the host
    pool.naive.make_moves()
    head = pool.blocks.match(again)[0]
    pool.blocks.pool.give_up(head)
    assert pool.blocks.match(again) == []
    assert num_held(pool.blocks, Tier.HOST) == num_held(pool.blocks, Tier.DEVICE) == 0
    pool.check()


def test_tensorrt_llm_19242_no_row_is_kept_alive_by_the_cache():
    pool = Pool(6)
    first, again = row(0, [*PREFIX, 1]), row(1, [*PREFIX, 2])
    pool.expect(first, again)
    pool.admit(first)
    pool.blocks.release(first)

    class Watched:
        pass

    mark = Watched()
    first.text_checker = mark
    watch = weakref.ref(mark)
    del first, mark
    gc.collect()
    assert watch() is None
    assert len(pool.blocks.match(again)) == 2


def test_transformers_46117_forks_that_find_no_room_to_write_wait_their_turn():
    """Five samples whose copies don't fit: nothing fails, every sample gets all of its tokens."""
    rows = [row(i, [i] * 6, max_tokens=9, n=5) for i in range(3)]
    scheduler = drive(rows, 5, max_num_seqs=15, budget=20)
    assert scheduler.num_preemptions > 0


def test_transformers_45943_rows_keep_their_names(tiny_model, engine_run, make_prompts):
    """Requests with arbitrary row numbers, of which some end at once, are answered under their own."""
    run = engine_run(tiny_model("llama"), block_size=4, num_gpu_blocks_override=16)
    prompts, rows = make_prompts([5, 60, 9, 13, 7]), [90, 3, 41, 2, 77]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 30, 1, 8, 2)]
    done = run.sequences(prompts, params, rows)
    assert done[3].code == "kv_pool_too_small"
    for prompt, p, r in zip(prompts, params, rows, strict=True):
        if r != 3:
            assert done[r].token_ids[: len(prompt)] == prompt
            assert done[r].num_generated_tokens == p.max_tokens


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 20), (3, 24), (2, 64)])
def test_vllm_49716_strides_of_any_shape_lead_to_the_right_slot(backend, heads, head_dim):
    """Write, copy and move blocks of odd shapes; every layer's view finds every token's own K and V."""
    kernels = load_backend(backend)
    cache = KVCache(
        num_blocks=5, num_layers=3, num_kv_heads=heads, block_size=8, head_dim=head_dim, dtype=torch.float32,
        device="cpu", key_transposed=kernels.KEY_TRANSPOSED,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    k, v = (torch.from_numpy(rng.standard_normal((3, 8, heads, head_dim)).astype(np.float32)) for _ in range(2))
    slots = torch.arange(8) + 8  # block 1
    for layer in range(3):
        kernels.write_kv(k[layer], v[layer], cache.layers[layer].key, cache.layers[layer].value, slots)
    store = BlockStore(cache.kv, kernels, host_blocks=2)
    path = [Address(Tier.DEVICE, 1), Address(Tier.DEVICE, 4), Address(Tier.HOST, 1), Address(Tier.DEVICE, 2)]
    store.move(batch_moves(list(pairwise(path))))
    for layer in range(3):
        key, value = cache.layers[layer].key, cache.layers[layer].value
        for block in (1, 4, 2):
            assert torch.equal(key[block].transpose(0, 1), k[layer])
            assert torch.equal(value[block].transpose(0, 1), v[layer])


# From the sources this project grew out of


def test_the_last_partly_filled_block_is_released():
    pool = Pool(4)
    r = row(0, list(range(5)))
    pool.expect(r)
    pool.admit(r)
    pool.blocks.release(r)
    assert pool.blocks.num_free_blocks == 4


def test_two_sharers_are_two_references():
    pool = Pool(8)
    first, second, third = row(0, [*PREFIX, 1]), row(1, [*PREFIX, 2]), row(2, [*PREFIX, 3])
    pool.expect(first, second, third)
    for r in (first, second, third):
        pool.admit(r)
    shared = first.block_table[0]
    assert pool.blocks._ref_counts[shared] == 3
    pool.blocks.release(second)
    pool.blocks.release(first)
    assert pool.blocks._ref_counts[shared] == 1
    pool.check(third)


@pytest.mark.parametrize("state", ["waiting", "leader", "follower", "decoding", "preempted"])
def test_cancelling_releases_in_every_state(state):
    blocks = BlockManager(12, 4)
    scheduler = Scheduler(blocks, max_num_seqs=2, max_num_batched_tokens=6)
    leader, follower, other = row(0, [*PREFIX, *PREFIX]), row(1, [*PREFIX, *PREFIX, 1]), row(2, [9] * 5)
    for r in (leader, follower, other):
        scheduler.add(r)
    if state != "waiting":
        scheduler.advance(scheduler.schedule())
    assert (follower in scheduler.waiting, leader in scheduler.running) == (True, state != "waiting")
    if state in ("decoding", "preempted"):
        while leader.num_uncomputed_tokens:
            scheduler.advance(scheduler.schedule())
        leader.token_ids.append(1)
        if state == "preempted":
            scheduler._preempt(leader)
    victim = {"waiting": other, "follower": follower}.get(state, leader)
    scheduler.cancel(victim)
    assert victim not in scheduler.running
    assert victim not in scheduler.waiting
    blocks.audit(scheduler.running)
    remaining = [r for r in (leader, follower, other) if r is not victim]
    for _ in range(30):
        if not all(r.num_computed_tokens for r in remaining):
            scheduler.advance(scheduler.schedule())
    assert all(r.num_computed_tokens for r in remaining), "nobody waits for a row that is gone"
    for r in remaining:
        scheduler.cancel(r)
    blocks.audit([])
    assert blocks.num_free_blocks == 12
    assert not scheduler.has_unfinished


def test_an_exception_releases_every_row():
    blocks = BlockManager(12, 4)

    def broken_loop():
        with Scheduler(blocks, max_num_seqs=2, max_num_batched_tokens=6) as scheduler:
            for r in (row(0, [*PREFIX, 1]), row(1, [*PREFIX, 2]), row(2, [9] * 5)):
                scheduler.add(r)
            scheduler.advance(scheduler.schedule())
            raise RuntimeError("the loop broke")

    with pytest.raises(RuntimeError, match="the loop broke"):
        broken_loop()
    blocks.audit([])
    assert blocks.num_free_blocks == 12


def test_a_leader_that_is_preempted_lets_its_followers_go_and_does_not_follow_itself():
    blocks = BlockManager(12, 4)
    scheduler = Scheduler(blocks, max_num_seqs=3, max_num_batched_tokens=5)
    leader, follower = row(0, [*PREFIX, *PREFIX, 1]), row(1, [*PREFIX, *PREFIX, 2])
    for r in (leader, follower):
        scheduler.add(r)
    scheduler.advance(scheduler.schedule())  # the first of four chunks
    scheduler.schedule()
    assert scheduler.running == [leader]
    assert scheduler.num_waiting == 1
    scheduler._preempt(leader)
    assert sorted(s.request.row_index for s in scheduler.waiting) == [0, 1]
    for _ in range(12):
        scheduler.advance(scheduler.schedule())
        if not (leader.num_uncomputed_tokens or follower.num_uncomputed_tokens):
            break
    assert (leader.num_uncomputed_tokens, follower.num_uncomputed_tokens) == (0, 0)
    assert scheduler.prefix.saved_tokens == 16  # the follower's; what the leader found again is its own
    blocks.audit(scheduler.running)


def test_a_preempted_row_is_counted_for_all_of_its_prompt():
    """A row that was preempted in the middle of its prompt looks for the rest too: who computes it leads, and it is kept."""
    pool = Pool(16)
    first, second = row(0, [*PREFIX, *PREFIX, 1]), row(1, [*PREFIX, *PREFIX, 2])
    pool.expect(first, second)
    assert pool.blocks.admit(first, [], 4)
    pool.naive.compute(first, 4)
    first.num_computed_tokens = first.num_seen_tokens = 4
    pool.preempt(first)
    assert pool.admit(second) == 1
    assert [pool.blocks.cache.users(d) for d in second.digests] == [1, 1, 1, 1]
    pool.blocks.release(second)
    assert pool.admit(first) == 4
    pool.check(first)


def test_a_conversation_that_fills_the_pool_goes_on_inside_an_indexed_block():
    """No room for a copy: the block is written in place and no longer found by others."""
    pool = Pool(3)
    first, later = row(0, list(range(12))), row(1, list(range(13)))
    pool.expect(first, later)
    pool.admit(first)
    turn = row(0, [*range(10), 50, 51])
    pool.blocks.hand_over(first, turn, 10)
    assert pool.blocks.reserve(turn, 12)
    pool.naive.make_moves()
    pool.compute(turn)
    pool.check(turn)
    assert len(pool.blocks.match(later)) == 2


def test_a_block_nobody_looks_for_is_not_copied_to_be_written():
    pool = Pool(8)
    first, second = row(0, list(range(12))), row(1, [*range(12), 5])
    pool.expect(first, second)
    pool.admit(first)
    pool.admit(second)
    pool.blocks.release(second)
    turn = row(0, [*range(10), 50, 51])
    pool.blocks.hand_over(first, turn, 10)
    assert pool.blocks.reserve(turn, 12)
    assert pool.blocks.take_moves() == []
    pool.compute(turn)
    pool.check(turn)


def test_a_table_wider_than_the_array_does_not_touch_its_neighbour():
    blocks = BlockManager(64, 4)
    tables = BlockTableArray(3, width=2)
    rows = [row(i, [i]) for i in range(3)]
    for r in rows:
        blocks.reserve(r, 8)
    tables.update(rows)
    blocks.reserve(rows[1], 4 * 37)
    tables.update(rows)
    for r in rows:
        line = tables.array[r.table_row]
        assert line[: len(r.block_table)].tolist() == r.block_table
        assert (line[len(r.block_table) :] == -1).all()


def test_a_step_in_flight_keeps_the_tables_it_was_built_with():
    blocks = BlockManager(16, 4)
    tables = BlockTableArray(2, width=4)
    r = row(0, list(range(6)))
    blocks.reserve(r, 6)
    tables.update([r])
    batch = build_batch(ScheduledStep([r], [6], 0), tables, 4)
    before = batch.block_tables.copy()
    blocks.release(r)
    other = row(1, list(range(8)))
    blocks.reserve(other, 8)
    tables.update([other])
    assert np.array_equal(batch.block_tables, before)


def test_blocks_lie_in_the_order_of_the_tokens():
    """Found, read back and fresh blocks in one table: position i is in entry i // block_size."""
    pool = Pool(6, host_blocks=4)
    first, second = row(0, [*PREFIX, *PREFIX, 1]), row(1, [*PREFIX, *PREFIX, 2, 3, 4, 5, 6, 7])
    pool.expect(first, second)
    pool.admit(first)
    pool.blocks.release(first)
    pool.blocks.pool.make_room(Tier.DEVICE)
    pool.blocks.pool.make_room(Tier.DEVICE)  # two of four blocks are on the host now
    assert pool.admit(second) == 4
    pool.check(second)


def test_a_fork_outlives_its_parent():
    pool = Pool(8)
    parent = row(0, [*PREFIX, 1])
    pool.expect(parent)
    pool.admit(parent)
    child = Sequence(parent.request, 1)
    pool.blocks.fork(parent, child)
    pool.blocks.release(parent)
    pool.check(child)
    assert pool.grow(child, 7, 8)
    pool.check(child)
    pool.blocks.release(child)
    assert pool.blocks.num_used_blocks == 0
