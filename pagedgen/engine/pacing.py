"""How prompts are spread over steps. Plain Python.

Taken in all at once, prompts make a few steps long and leave those between them with so few tokens that reading the weights is
most of what they do. So a step that has enough of them takes no more than would fill what is free of the pool over the next
ones: more where many rows have left, about as much as leaves otherwise. What is free beyond a small share of the pool is filled
at once.
"""

from __future__ import annotations

_STEPS = 12  # over which what is free is filled
_SHARE = 0.04  # of the pool, that may be left free for it


def prompt_tokens(knee_tokens: int, num_decoding: int, *, free_blocks: int, num_blocks: int, block_size: int) -> int:
    """Return how many tokens of prompts a step takes beside its decoding rows, at least a block's.

    `knee_tokens`: of a step that takes longer by the token if it has more.
    """
    blocks = max(free_blocks // _STEPS, free_blocks - int(_SHARE * num_blocks), 1)
    return max(knee_tokens - num_decoding, blocks * block_size)
