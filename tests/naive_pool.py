"""What blocks really hold, stood in for by numbers: the slow, obvious twin of the pool's tensors.

A slot's K/V depends on its token and on every token before it. So each slot holds the hash of the whole prefix that ends there,
and a row's table is right exactly when its slots hold the hashes of the row's own prefixes.
"""

from __future__ import annotations

import json

from pagedgen.engine.admission import Admission
from pagedgen.engine.tiers import Tier

SALTS = ("", "a")


def num_held(blocks, tier):
    """Blocks of a tier that hold something."""
    return blocks.pool.sizes[tier] - len(blocks.pool.free[tier])


class NaivePool:
    """Memory of all tiers, block by block, as lists of numbers."""

    def __init__(self, blocks):
        self.blocks = blocks
        self.size = blocks.block_size
        self.memory = {tier: [[None] * self.size for _ in range(n)] for tier, n in blocks.pool.sizes.items()}

    def make_moves(self):
        """Make the moves that are due; within a batch all are read before any is written."""
        for batch in self.blocks.take_moves():
            read = [list(self.memory[batch.source][source]) for source, _ in batch.pairs]
            for (_, destination), content in zip(batch.pairs, read, strict=True):
                self.memory[batch.destination][destination] = content

    def chain(self, sequence, num_tokens):
        """The content of a sequence's first slots: each the hash of what came before and its token."""
        return self.extend(hash((sequence.request.cache_salt,)), sequence.token_ids[:num_tokens])

    def compute(self, sequence, num_tokens):
        """Compute a sequence's next tokens into its table, from what the table holds, as attention does."""
        start = sequence.num_computed_tokens
        chain = self.read(sequence, start)[-1] if start else hash((sequence.request.cache_salt,))
        content = self.extend(chain, sequence.token_ids[start : start + num_tokens])
        for position, held in enumerate(content, start):
            block_id = sequence.block_table[position // self.size]
            self.memory[Tier.DEVICE][block_id][position % self.size] = held

    def read(self, sequence, num_tokens):
        device = self.memory[Tier.DEVICE]
        return [device[sequence.block_table[i // self.size]][i % self.size] for i in range(num_tokens)]

    def check(self, sequences):
        """Every row finds its own tokens, every indexed block holds what it is said to hold, and all counts add up."""
        self.blocks.audit(sequences)
        for sequence in sequences:
            n = sequence.num_computed_tokens
            assert self.read(sequence, n) == self.chain(sequence, n), f"row {sequence.request.row_index} reads other tokens"
        for block in self.blocks.cache.blocks():
            self.check_indexed(block)

    def check_indexed(self, block):
        if block.parent is None:
            salt = json.loads(block.namespace).get("salt")
            chains = [hash((s,)) for s in (SALTS if salt is None else [salt])]  # without sharing a row's salt isn't named
        else:
            tier, block_id = block.parent.address
            chains = [self.memory[tier][block_id][-1]]
        tier, block_id = block.address
        assert any(self.extend(chain, block.tokens) == self.memory[tier][block_id] for chain in chains), (
            f"{tier.name} block {block_id} does not hold what the index says"
        )

    @staticmethod
    def extend(chain, tokens):
        content = []
        for token in tokens:
            chain = hash((chain, token))
            content.append(chain)
        return content


class EagerAdmission(Admission):
    """Admits rows by the tokens they have now, so that they must evict each other."""

    def fits(self, *row):
        return True
