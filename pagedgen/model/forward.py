"""A model as the runner sees it: one packed batch in, the logits of the rows that are sampled out."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from .attention import AttentionStep
from .linear import MeasuredBuckets, common_buckets, split_rows


class Forward(Protocol):
    """Runs a packed batch. Makes K and V of its tokens known to the pool through `attention.attend`."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        sample_positions: torch.Tensor,
        step: AttentionStep,
        *,
        best_among: int | None = None,
    ) -> torch.Tensor:
        """Return logits (num_sampled, vocab) of `sample_positions` among tokens `input_ids` (T,) at `positions` (T,).

        best_among: only the largest of each row's first so many logits is wanted. A model that finds it without all of them
        returns its id instead, the first of equal ones, (num_sampled,) int64; -1 where it is no number.
        """

    def compile_products(self) -> None:
        """Run what is compiled besides attention, so that it is."""

    def thin(self) -> Forward:
        """Return a forward pass of as few layers as take the memory that all take, to learn from it how much that is."""


class ModuleForward:
    """The forward pass by transformers' own modules, with our attention in each layer.

    `row_buckets` fills while products are measured (see `products.make_row_invariant`); empty where rows needn't be invariant.
    """

    def __init__(self, model: nn.Module, row_buckets: MeasuredBuckets):
        self._model = model
        self._row_buckets = row_buckets

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        sample_positions: torch.Tensor,
        step: AttentionStep,
        *,
        best_among: int | None = None,
    ) -> torch.Tensor:
        """See `Forward.__call__`."""
        live = input_ids.shape[0]
        padded = self._padded_rows(live)
        if padded > live:
            input_ids, positions = (nn.functional.pad(t, (0, padded - live)) for t in (input_ids, positions))
        output = self._model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=sample_positions,
            paged_step=step,
        )
        return output.logits[0]

    def compile_products(self) -> None:
        """See `Forward.compile_products`: nothing is."""

    def thin(self) -> Forward:
        """See `Forward.thin`."""
        return self

    def _padded_rows(self, num_tokens: int) -> int:
        """Return the rows to run so that every product of the step hits an agreeing row bucket without copying."""
        buckets = common_buckets(self._row_buckets.values())
        return sum(split_rows(num_tokens, buckets)) if buckets else num_tokens
