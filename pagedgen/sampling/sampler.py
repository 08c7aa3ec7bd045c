"""From logits to one token a row. A row's token depends on its own logits, parameters and draw, never on its neighbours."""

from __future__ import annotations

import numpy as np
import torch

from ..request import Sequence
from .philox import uniforms

# How many candidates are sorted first for top_p; rows whose nucleus is larger sort the whole vocabulary.
_NUCLEUS_GUESS = 1024


class Sampler:
    """Choose each row's next token.

    `num_token_ids`: ids from here on are padding of the embedding that no text stands for; they are never chosen.
    """

    def __init__(self, num_token_ids: int):
        self._num_token_ids = num_token_ids

    def __call__(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """Return a token id for each row of logits (S, vocab) in any float dtype."""
        logits = logits[:, : self._num_token_ids]
        held_back = [i for i, s in enumerate(sequences) if s.num_generated_tokens < s.request.params.min_tokens]
        if held_back:
            logits = self._without_ends(logits, sequences, held_back)
        random = [i for i, s in enumerate(sequences) if not s.request.params.greedy]
        if len(random) < len(sequences):
            tokens = logits.argmax(dim=-1).tolist()
        else:
            tokens = [0] * len(sequences)
        if random:
            for i, token in zip(random, self._draw(logits[random], [sequences[i] for i in random]), strict=True):
                tokens[i] = token
        return tokens

    def _without_ends(self, logits: torch.Tensor, sequences: list[Sequence], rows: list[int]) -> torch.Tensor:
        """Exclude the tokens that would end a row before its min_tokens."""
        logits = logits.clone()
        for i in rows:
            request = sequences[i].request
            ends = sorted({*request.eos_token_ids, *request.params.stop_token_ids})
            logits[i, [t for t in ends if t < self._num_token_ids]] = float("-inf")
        return logits

    def _draw(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        params = [s.request.params for s in sequences]
        device = logits.device
        u = uniforms(
            np.array([s.request.seed for s in sequences], dtype=np.uint64),
            np.array([s.request.row_index for s in sequences]),
            np.zeros(len(sequences), dtype=np.int64),
            np.array([s.num_generated_tokens for s in sequences]),
        )
        temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
        scaled = logits.float() / temperature[:, None]
        chosen = [-1] * len(sequences)
        filtered = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
        plain = [i for i in range(len(params)) if i not in set(filtered)]
        if plain:
            probs = torch.softmax(scaled[plain], dim=-1)
            for i, token in zip(plain, _pick(probs, [params[i].min_p for i in plain], u[plain]), strict=True):
                chosen[i] = token
        for i in filtered:
            chosen[i] = _draw_from_sorted(scaled[i], params[i].top_k, params[i].top_p, params[i].min_p, float(u[i]))
        return chosen


def _pick(probs: torch.Tensor, min_ps: list[float], u: np.ndarray) -> list[int]:
    """Draw by inverting the cumulative distribution in id order, after the min_p filter. probs (S, vocab) fp32."""
    if any(min_ps):
        floor = torch.tensor(min_ps, dtype=probs.dtype, device=probs.device) * probs.amax(dim=-1)
        probs = torch.where(probs >= floor[:, None], probs, torch.zeros((), dtype=probs.dtype, device=probs.device))
    cumulative = probs.double().cumsum(dim=-1)
    target = torch.from_numpy(u).to(probs.device) * cumulative[:, -1]
    index = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return index.clamp(max=probs.shape[-1] - 1).tolist()


def _draw_from_sorted(scaled: torch.Tensor, top_k: int, top_p: float, min_p: float, u: float) -> int:
    """Draw one row with top_k, top_p and min_p. Candidates are ordered by logit, ties by id."""
    vocab = scaled.shape[0]
    count = min(top_k, vocab) if top_k > 0 else min(_NUCLEUS_GUESS, vocab)
    log_total = torch.logsumexp(scaled, dim=-1)
    ids = _top_ids(scaled, count)
    probs = torch.exp(scaled[ids] - log_total).double()
    if top_k <= 0 and count < vocab and float(probs.sum()) < top_p:
        ids = _top_ids(scaled, vocab)
        probs = torch.exp(scaled[ids] - log_total).double()
    if top_k > 0:
        probs = probs / probs.sum()
    if top_p < 1.0:  # keep the smallest head that reaches top_p, at least one
        before = probs.cumsum(dim=-1) - probs
        kept = int((before < top_p).sum())
        ids, probs = ids[:kept], probs[:kept]
    if min_p > 0.0:
        keep = probs >= min_p * probs[0]
        ids, probs = ids[keep], probs[keep]
    cumulative = probs.cumsum(dim=-1)
    index = int(torch.searchsorted(cumulative, cumulative[-1:] * u, right=True)[0])
    return int(ids[min(index, len(ids) - 1)])


def _top_ids(scaled: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of the `count` largest logits, ties by id."""
    if count == scaled.shape[0]:
        return torch.sort(scaled, descending=True, stable=True).indices
    threshold = torch.topk(scaled, count).values[-1]
    ids = torch.nonzero(scaled >= threshold)[:, 0]  # in id order, ties at the threshold included
    return ids[torch.sort(scaled[ids], descending=True, stable=True).indices][:count]
