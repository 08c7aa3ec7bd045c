"""From logits to one token a row. A row's token depends on its own logits, parameters and draw, never on its neighbours."""

from __future__ import annotations

import numpy as np
import torch

from ..request import Sequence
from ..sampling_params import SamplingParams
from .philox import uniforms

# How many candidates are sorted first for top_p; rows whose nucleus is larger sort the whole vocabulary.
_NUCLEUS_GUESS = 1024
# Random rows drawn together; bounds the sampler's work space (about 48 bytes a logit).
ROWS_AT_ONCE = 32
# A draw's sample number holds the turn as well; there are fewer samples than this many bits count (`--max-num-seqs`).
TURN_SHIFT = 16


class Sampler:
    """Choose each row's next token.

    `num_token_ids`: ids from here on are padding of the embedding that no text stands for; they are never chosen.
    """

    def __init__(self, num_token_ids: int):
        self._num_token_ids = num_token_ids

    def best_among(self, sequences: list[Sequence]) -> int | None:
        """Return among how many ids each row's token is simply the one with the largest logit; None where logits are needed."""
        for sequence in sequences:
            params = sequence.request.params
            if not params.greedy or params.beam_width > 1 or sequence.num_generated_tokens < params.min_tokens:
                return None
        return self._num_token_ids

    def __call__(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """Return a token id for each row of logits (S, vocab) in any float dtype; -1 where they are no numbers.

        In place of logits there may be the ids themselves, (S,), where `best_among` said that they will do.
        """
        if logits.ndim == 1:
            return logits.tolist()
        logits = logits[:, : self._num_token_ids]
        held_back = [i for i, s in enumerate(sequences) if s.num_generated_tokens < s.request.params.min_tokens]
        if held_back:
            logits = self._without_ends(logits, sequences, held_back)
        best, ids = logits.max(dim=-1)  # NaN counts as the largest
        usable = torch.isfinite(best).tolist()
        tokens = [token if ok else -1 for token, ok in zip(ids.tolist(), usable, strict=True)]
        random = [i for i, s in enumerate(sequences) if usable[i] and not s.request.params.greedy]
        if random:
            for i, token in zip(random, self._draw(logits[random], [sequences[i] for i in random]), strict=True):
                tokens[i] = token
        return tokens

    def continuations(self, logits: torch.Tensor, beams: list[Sequence]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return each beam's best next tokens: log-probabilities in fp32, best first, and ids; none where they are no numbers.

        logits (S, vocab). Probabilities are over the whole vocabulary; only ids a text has are continued with.
        """
        values: list[np.ndarray] = []
        ids: list[np.ndarray] = []
        for start in range(0, len(beams), ROWS_AT_ONCE):
            group = beams[start : start + ROWS_AT_ONCE]
            log_probs = torch.log_softmax(logits[start : start + len(group)].float(), dim=-1)[:, : self._num_token_ids]
            held_back = [i for i, s in enumerate(group) if s.num_generated_tokens < s.request.params.min_tokens]
            if held_back:
                log_probs = self._without_ends(log_probs, group, held_back)
            most = max(s.beam_group.num_candidates for s in group)
            best = _largest(log_probs, min(most, log_probs.shape[1]))
            best_values = log_probs.gather(1, best)
            for sequence, row, row_ids in zip(group, best_values.cpu().numpy(), best.cpu().numpy(), strict=True):
                count = sequence.beam_group.num_candidates if np.isfinite(row[0]) else 0
                values.append(row[:count])
                ids.append(row_ids[:count])
        return values, ids

    def _without_ends(self, logits: torch.Tensor, sequences: list[Sequence], rows: list[int]) -> torch.Tensor:
        """Exclude the tokens that would end a row before its min_tokens."""
        logits = logits.clone()
        for i in rows:
            request = sequences[i].request
            ends = sorted({*request.eos_token_ids, *request.params.stop_token_ids})
            logits[i, [t for t in ends if t < self._num_token_ids]] = float("-inf")
        return logits

    def _draw(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """Draw rows at random, a few at a time: the work space of a large vocabulary is many times its logits."""
        u = uniforms(
            np.array([s.request.seed for s in sequences], dtype=np.uint64),
            np.array([s.request.row_index for s in sequences]),
            np.array([s.sample_index + (s.request.turn_index << TURN_SHIFT) for s in sequences]),
            np.array([s.num_generated_tokens for s in sequences]),
        )
        params = [s.request.params for s in sequences]
        chosen = [-1] * len(sequences)
        filtered = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
        plain = [i for i, p in enumerate(params) if not (p.top_k > 0 or p.top_p < 1.0)]
        for places, draw in ((plain, _draw_plain), (filtered, _draw_filtered)):
            for start in range(0, len(places), ROWS_AT_ONCE):
                rows = places[start : start + ROWS_AT_ONCE]
                group = [params[i] for i in rows]
                scaled = _scale(logits[rows].float(), _column(group, "temperature", torch.float32, logits.device))
                tokens = draw(scaled, group, torch.from_numpy(u[rows]).to(logits.device))
                for i, token in zip(rows, tokens, strict=True):
                    chosen[i] = token
        return chosen


def _scale(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Divide by the temperature, relative to the largest: a tiny temperature gives 0 and -inf, not inf and NaN."""
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature.clamp_min(1e-30)


def _draw_plain(scaled: torch.Tensor, params: list[SamplingParams], u: torch.Tensor) -> list[int]:
    """Draw by inverting the cumulative distribution in id order, after the min_p filter. scaled (S, vocab) fp32."""
    probs = torch.softmax(scaled, dim=-1)
    if any(p.min_p for p in params):
        floor = _column(params, "min_p", probs.dtype, probs.device) * probs.amax(dim=-1, keepdim=True)
        probs = torch.where(probs >= floor, probs, 0.0)
    return _invert(probs.double(), u).tolist()


def _draw_filtered(scaled: torch.Tensor, params: list[SamplingParams], u: torch.Tensor) -> list[int]:
    """Draw with top_k, top_p and min_p, from candidates ordered by logit, ties by id. scaled (S, vocab) fp32."""
    vocab = scaled.shape[1]
    count = min(vocab, max(_NUCLEUS_GUESS, *(p.top_k for p in params)))
    ids, probs = _candidates(scaled, count)
    # A row without top_k whose nucleus is larger than the guess is drawn from the whole order.
    larger = [i for i, p in enumerate(params) if p.top_k <= 0 and count < vocab and float(probs[i].sum()) < p.top_p]
    tokens = _choose(ids, probs, params, u)
    if larger:
        whole = _choose(*_candidates(scaled[larger], vocab), [params[i] for i in larger], u[larger])
        for i, token in zip(larger, whole, strict=True):
            tokens[i] = token
    return tokens


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids (S, count) of each row's largest values in order, equal ones by id. values (S, vocab) fp32.

    `topk` alone orders equal values as it likes, by how many are asked for or what is beside them. The order is made total by
    sorting value and id in one integer: the float's bits, which sort like integers once negative ones are flipped, above the
    inverted id.
    """
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0 makes -0.0 equal to 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(values.shape[1], device=values.device)
    keys = (ordered << 32) | (0xFFFFFFFF - ids)
    return 0xFFFFFFFF - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)


def _candidates(scaled: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids (S, count) of the largest logits in order, and their probabilities among the whole vocabulary (fp64)."""
    top = _largest(scaled, count)
    log_total = torch.logsumexp(scaled, dim=-1, keepdim=True)
    return top, torch.exp(scaled.gather(1, top) - log_total).double()


def _choose(ids: torch.Tensor, probs: torch.Tensor, params: list[SamplingParams], u: torch.Tensor) -> list[int]:
    """Apply top_k, then top_p on what is left, then min_p, and draw. ids, probs (S, count), most likely first."""
    place = torch.arange(probs.shape[1], device=probs.device)
    top_k = _column(params, "top_k", probs.dtype, probs.device)
    probs = torch.where((top_k <= 0) | (place < top_k), probs, 0.0)
    total = torch.where(top_k > 0, probs.sum(dim=-1, keepdim=True), 1.0)
    before = probs.cumsum(dim=-1) - probs
    top_p = _column(params, "top_p", probs.dtype, probs.device)
    probs = torch.where((top_p >= 1.0) | (before < top_p * total), probs, 0.0)  # the first always stays
    probs = torch.where(probs >= _column(params, "min_p", probs.dtype, probs.device) * probs[:, :1], probs, 0.0)
    return ids.gather(1, _invert(probs, u)[:, None])[:, 0].tolist()


def _column(params: list[SamplingParams], name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return one parameter of each row as a column (S, 1)."""
    return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=device)[:, None]


def _invert(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return for each row the first place where the cumulative probability passes u times the total. probs (S, N) fp64."""
    cumulative = probs.cumsum(dim=-1)
    places = torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)[:, 0]
    last = (probs > 0).long().cumsum(dim=-1).argmax(dim=-1)  # rounding must not pick past the last candidate
    return torch.minimum(places, last)
