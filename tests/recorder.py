"""The bits of the logits a run makes."""

from __future__ import annotations

import torch


class InPlaceOfSampler:
    """A function of (logits, sequences) in a sampler's place, which asks for logits even where ids would do."""

    def __init__(self, function):
        self._function = function

    def best_among(self, sequences):
        return None

    def __call__(self, logits, sequences):
        return self._function(logits, sequences)


class LogitsRecorder:
    """Stands before the sampler and keeps every row's logits by (row, sample, position)."""

    def __init__(self, sampler):
        self._sampler = sampler
        self.seen = {}

    def best_among(self, sequences):
        return None

    def __call__(self, logits, sequences):
        for row, sequence in zip(logits, sequences, strict=True):
            key = (sequence.request.row_index, sequence.sample_index, len(sequence.token_ids))
            bits = row.contiguous().view(torch.uint8).numpy().tobytes()
            assert self.seen.setdefault(key, bits) == bits, f"logits of {key} changed within one run"
        return self._sampler(logits, sequences)


def recorded(run, prompts, params, rows=None):
    """Run prompts; return every row's logits at every position, and the tokens of each row."""
    recorder = LogitsRecorder(run.engine._sampler)
    run.engine._sampler = recorder
    try:
        done = run.sequences(prompts, params, rows)
    finally:
        run.engine._sampler = recorder._sampler
    return recorder.seen, {key: s.generated_token_ids for key, s in done.items()}
