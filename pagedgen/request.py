"""The nouns that pass between the parts: what is asked for (`Request`), its life in the engine (`Sequence`), the answer."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from .sampling_params import SamplingParams


@dataclass(frozen=True)
class Request:
    """One prompt, tokenized and checked: it fits the context and the KV pool.

    `max_tokens` is the row's own limit already cut to the room the prompt leaves. `eos_token_ids` are the model's, none when
    the row ignores them. Random draws are keyed by (`seed`, `row_index`, `turn_index`, sample, position) alone. Rows share K/V
    only with rows of the same `cache_salt`. `later_tokens`: what the conversation's `later_turns` may add to its length.
    `sample_indices`: the samples to draw, when it isn't all of them (the others are there from an earlier run).
    """

    row_index: int
    prompt_token_ids: SequenceOf[int]
    params: SamplingParams
    max_tokens: int
    eos_token_ids: frozenset[int]
    seed: int
    turn_index: int = 0
    cache_salt: str = ""
    later_tokens: int = 0
    later_turns: int = 0
    sample_indices: tuple[int, ...] = ()
    num_truncated_tokens: int = 0  # of the prompt, cut before it came here

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def samples(self) -> tuple[int, ...]:
        """Return the indices of the answers it gets: its samples, or the places of its best beams."""
        return self.sample_indices or tuple(range(self.params.n))

    @property
    def num_sequences(self) -> int:
        """Return how many sequences it has in flight: its samples or its beams."""
        return self.params.beam_width if self.params.beam_width > 1 else len(self.samples)

    @property
    def max_kv_tokens(self) -> int:
        """Tokens whose K/V one sequence of the row may ever hold: the last generated token is never fed back."""
        return self.num_prompt_tokens + max(self.max_tokens - 1, 0) + self.later_tokens


class Sequence:
    """A request in flight: waiting → running → finished; a preempted one goes back to waiting.

    Invariants: `token_ids` is prompt plus generated; the first `num_computed_tokens` of them have K/V in the blocks of
    `block_table`, in token order; `len(block_table) * block_size >= num_computed_tokens`. One token is left to compute when
    the sequence decodes, more when it prefills (a prompt, or everything after a preemption).
    """

    __slots__ = (
        "beam_group",
        "block_table",
        "digests",
        "finish_reason",
        "leading",
        "length_kinds",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_expected_blocks",
        "num_pending_samples",
        "num_preemptions",
        "num_prompt_tokens",
        "num_seen_tokens",
        "num_shared_blocks",
        "order",
        "request",
        "rewritten_from",
        "sample_index",
        "score",
        "stop_reason",
        "table_row",
        "text",
        "text_checker",
        "token_ids",
    )

    def __init__(self, request: Request, sample_index: int | None = None):
        """Without `sample_index` it is the row's first; the others are forked from it."""
        self.request = request
        self.sample_index = request.samples[0] if sample_index is None else sample_index
        # Samples or beams that will be forked from this one when its prompt is computed; they then share its blocks.
        self.num_pending_samples = request.num_sequences - 1 if sample_index is None else 0
        self.beam_group: Any = None  # the row's search (`sampling.beam.BeamGroup`) when it has one
        self.score: float | None = None  # of a finished beam
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # prompt tokens whose K/V somebody else had computed, at the first admission
        self.num_seen_tokens = 0  # the most that were ever computed: below it, work is done again
        self.block_table: list[int] = []
        self.digests: list[bytes] = []  # of its first full blocks, owned by engine/prefix_cache.py
        self.num_expected_blocks = 0  # of these, how many are counted as to be used when it is admitted
        self.num_shared_blocks = 0  # first blocks that other rows hold or will look for, when it was admitted
        self.length_kinds: tuple[Any, ...] | None = None  # owned by engine/output_lengths.py
        self.leading: list[bytes] = []  # digests of blocks it computes for others too, owned by engine/leaders.py
        self.order = (0, 0)  # place in the queue, owned by engine/scheduler.py
        self.num_preemptions = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.text: str | None = None
        self.text_checker: object | None = None  # the stop-string search's state, owned by sampling/stops.py
        self.rewritten_from: int | None = None  # first entry of the block table that changed since it was last copied
        self.table_row = -1  # row in the persistent block-table array while running, owned by engine/batch.py

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def generated_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. `text == tokenizer.decode(token_ids)` without the closing EOS, cut at a stop string."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    score: float | None = None  # of a beam: its log-probability over its length to the power of length_penalty


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one prompt, in vLLM's shape. A row error has no completion and a code and sentence instead."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    num_cached_tokens: int = 0  # of the prompt, that another one had computed
    error_code: str | None = None
    error: str | None = None
