"""Random lives of rows in the block manager, against a pool that really remembers what is written where."""

from __future__ import annotations

import os
import zlib

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from naive_pool import NaivePool

from pagedgen.engine.block_manager import BlockManager
from pagedgen.engine.prefix_cache import blake2b_128
from pagedgen.engine.tiers import Address, Tier
from pagedgen.request import Request, Sequence
from pagedgen.sampling_params import SamplingParams

NIGHTLY = os.environ.get("PAGEDGEN_PROFILE") == "nightly"
OPERATIONS = 1_000_000 if NIGHTLY else 50_000
MOST_TOKENS = 40

choice = st.integers(0, 1 << 16)


def three_bits(data):
    """A hash so bad that different blocks often have the same digest; only comparing content can tell them apart."""
    return bytes([zlib.crc32(data) % 8])


class BlockLives(RuleBasedStateMachine):
    """Each rule is one operation on the block manager; after each the whole pool is read and recounted."""

    num_operations = 0

    @initialize(
        num_blocks=st.integers(11, 24),
        host_blocks=st.integers(0, 6),
        disk_blocks=st.integers(0, 6),
        prefix_caching=st.booleans(),
        hash_block=st.sampled_from([blake2b_128, three_bits]),
    )
    def make(self, num_blocks, host_blocks, disk_blocks, prefix_caching, hash_block):
        self.blocks = BlockManager(
            num_blocks, 4, prefix_caching=prefix_caching, host_blocks=host_blocks, disk_blocks=disk_blocks,
            record_history=True, hash_block=hash_block,
        )  # fmt: skip
        self.pool = NaivePool(self.blocks)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.added = 0

    def pick(self, rows, number):
        return rows[number % len(rows)]

    @rule(length=st.integers(1, 22), kind=st.integers(0, 2), other=st.integers(0, 1), salt=st.sampled_from(["", "", "a"]))
    def add(self, length, kind, other, salt):
        """Queue a row; most share long beginnings with others."""
        tokens = [kind] * length if other else [kind, *range(7, 6 + length)]
        request = Request(self.added, tokens, SamplingParams(), 20, frozenset(), 0, cache_salt=salt)
        sequence = Sequence(request)
        self.added += 1
        self.blocks.expect(sequence)
        self.waiting.append(sequence)

    @precondition(lambda self: self.waiting)
    @rule(row=choice, chunk=st.integers(1, 30))
    def allocate(self, row, chunk):
        """Admit a waiting row with what is found of it, swapped-out blocks included; or find that there is no room."""
        sequence = self.pick(self.waiting, row)
        hits = self.blocks.match(sequence)
        assert len(hits) * 4 < len(sequence.token_ids), "the last token must be computed"
        known = len(hits) * 4
        end = min(len(sequence.token_ids), known + chunk)
        available = self.blocks.num_available_blocks
        needed = max(-(-end // 4) - len(hits), 0) + self.blocks.num_idle(hits)
        admitted = self.blocks.admit(sequence, hits, end)
        assert admitted == (needed <= available)
        if admitted:
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self.write(sequence, end - known)

    def write(self, sequence, count):
        self.pool.make_moves()
        self.pool.compute(sequence, count)
        sequence.num_computed_tokens += count
        sequence.num_seen_tokens = max(sequence.num_seen_tokens, sequence.num_computed_tokens)

    @precondition(lambda self: self.running)
    @rule(row=choice, count=st.integers(1, 9), token=st.integers(0, 9))
    def append(self, row, count, token):
        """Compute what a row has left, or let it generate; or find that there is no room."""
        sequence = self.pick(self.running, row)
        if not sequence.num_uncomputed_tokens and len(sequence.token_ids) < MOST_TOKENS:
            sequence.token_ids.append(token)
        count = min(count, sequence.num_uncomputed_tokens)
        before = (list(sequence.block_table), self.blocks.num_available_blocks)
        if count and self.blocks.reserve(sequence, sequence.num_computed_tokens + count):
            self.write(sequence, count)
        else:
            assert (sequence.block_table, self.blocks.num_available_blocks) == before

    @precondition(lambda self: self.running)
    @rule(row=choice)
    def index(self, row):
        self.blocks.index(self.pick(self.running, row))

    @precondition(lambda self: 0 < len(self.running) < 8)
    @rule(row=choice)
    def fork(self, row):
        parent = self.pick(self.running, row)
        child = Sequence(parent.request, 1)
        child.token_ids = list(parent.token_ids)
        self.blocks.fork(parent, child)
        self.running.append(child)

    @precondition(lambda self: self.running)
    @rule(row=choice, width=st.integers(2, 4), parents=st.lists(st.integers(0, 3), min_size=4, max_size=4))
    def search(self, row, width, parents):
        """Fork a row into beams, let each write a token of its own, go on from some of them; keep the first."""
        leader = self.pick(self.running, row)
        if leader.num_uncomputed_tokens or len(leader.token_ids) >= MOST_TOKENS or leader.num_generated_tokens == 0:
            return
        beams = [leader]
        for i in range(1, width):
            beams.append(Sequence(leader.request, i))
            beams[-1].token_ids = list(leader.token_ids)
            self.blocks.fork(leader, beams[-1])
        self.running += beams[1:]
        for i, beam in enumerate(beams):
            beam.token_ids.append(100 + i)
        if all(self.blocks.reserve(beam, len(beam.token_ids)) for beam in beams):
            for beam in beams:
                self.write(beam, 1)
            chosen = [p % width for p in parents[:width]]
            tokens = [beam.token_ids for beam in beams]
            self.blocks.reorder(beams, chosen)
            for beam, parent in zip(beams, chosen, strict=True):
                beam.token_ids = list(tokens[parent])
            self.pool.make_moves()
            self.pool.check(self.running)
        for beam in beams[1:]:
            self.blocks.release(beam)
            self.running.remove(beam)

    @precondition(lambda self: self.running)
    @rule(row=choice, keep=st.integers(0, 40), tail=st.lists(st.integers(0, 9), min_size=1, max_size=9))
    def next_turn(self, row, keep, tail):
        """Another row goes on from a part of what a row has computed."""
        sequence = self.pick(self.running, row)
        keep = min(keep, sequence.num_computed_tokens)
        tokens = (sequence.token_ids[:keep] + tail)[:MOST_TOKENS]
        keep = min(keep, len(tokens) - 1)
        request = Request(
            sequence.request.row_index, tokens, SamplingParams(), 20, frozenset(), 0, cache_salt=sequence.request.cache_salt
        )
        successor = Sequence(request)
        self.blocks.hand_over(sequence, successor, keep)
        self.running[self.running.index(sequence)] = successor

    @precondition(lambda self: self.running)
    @rule(row=choice)
    def free(self, row):
        sequence = self.pick(self.running, row)
        self.running.remove(sequence)
        self.blocks.release(sequence)

    @precondition(lambda self: self.running)
    @rule(row=choice)
    def preempt(self, row):
        sequence = self.pick(self.running, row)
        if len(sequence.token_ids) > 4 * self.blocks.num_blocks:
            return
        self.running.remove(sequence)
        self.blocks.preempt(sequence)
        sequence.num_computed_tokens = 0
        self.waiting.append(sequence)

    @rule(tier=st.sampled_from(list(Tier)))
    def evict(self, tier):
        """Make room in a tier as if it were full: a swap-out, a spill, or a block given up."""
        if self.blocks.cache.first_to_go(tier) is not None:
            self.blocks.pool.make_room(tier)
        self.pool.make_moves()

    @precondition(lambda self: self.waiting)
    @rule(row=choice)
    def cancel(self, row):
        sequence = self.pick(self.waiting, row)
        self.waiting.remove(sequence)
        self.blocks.forget(sequence)

    @rule(tier=st.sampled_from(list(Tier)), block=choice)
    def spoil(self, tier, block):
        """Content is lost, as when a move failed: who has it is computed again, nobody else notices."""
        if not self.blocks.pool.sizes[tier]:
            return
        block %= self.blocks.pool.sizes[tier]
        hit = self.blocks.lose([Address(tier, block)], self.running)
        self.pool.memory[tier][block] = [None] * 4
        for sequence in hit:
            sequence.num_computed_tokens = 0
            self.running.remove(sequence)
            self.blocks.preempt(sequence)
            self.waiting.append(sequence)

    @invariant()
    def everything_is_where_it_should_be(self):
        if hasattr(self, "pool"):
            BlockLives.num_operations += 1
            self.pool.make_moves()
            self.pool.check(self.running)

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for sequence in self.running:
            self.blocks.release(sequence)
        for sequence in self.waiting:
            self.blocks.forget(sequence)
        self.blocks.audit([])
        assert self.blocks.num_used_blocks == 0
        assert self.blocks.num_free_blocks == self.blocks.num_blocks, "a block is kept for nobody"
        assert len(self.blocks.cache) == 0


def test_random_operations():
    steps = 100
    examples = OPERATIONS // steps
    BlockLives.num_operations = 0
    while BlockLives.num_operations < OPERATIONS:
        run_state_machine_as_test(
            BlockLives, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None, database=None)
        )
