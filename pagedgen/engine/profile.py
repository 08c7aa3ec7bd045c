"""What a step takes on a machine, as `pagedgen tune` measured it, and where that is kept. No torch.

A step's seconds = a table over its tokens (GEMMs and all that grows with them) + what attention reads and multiplies + what
each sampled row costs. The same model, dtype, device, kernels and number of threads have one profile.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config import EngineConfig
from ..model.spec import ModelSpec
from ..request import Sequence
from .scheduler import ScheduledStep

FORMAT = 3


@dataclass
class MachineProfile:
    """One machine's measurements for one model."""

    machine: str
    block_size: int  # that the steps were measured with
    tokens: list[int]  # in a step
    table_s: list[float]  # what steps of so many tokens take, attention and sampling apart
    decode_s_per_token: float  # for each token of context that a decoding row reads
    prefill_s_per_pair: float  # for each (token, token of context) of a prompt
    sample_s_per_row: float
    random_s_per_row: float  # more for each row whose token is drawn at random
    beam_s_per_row: float  # more for each beam whose continuations are looked at
    spared_s_per_token: float  # less for each token of context that cascade attention reads for another row already
    start_s: float  # from the command to the first step
    decode_s_by_block_size: dict[str, float] = field(default_factory=dict)  # attention of `decode_rows` rows, all layers
    knee_tokens: int = 0  # where larger steps stop being faster by the token
    num_seqs: int = 0  # rows in flight that come near the fastest by the row; 0: not measured
    fit_error: float = 0.0  # mean of |predicted - measured| ÷ measured, over the measured steps
    format: int = FORMAT

    def for_block_size(self, size: int) -> MachineProfile:
        """Return the profile of runs with another block size: attention of decoding rows takes another time."""
        here, there = (self.decode_s_by_block_size.get(str(s)) for s in (self.block_size, size))
        ratio = there / here if here and there else 1.0
        decode, spared = self.decode_s_per_token * ratio, self.spared_s_per_token * ratio
        return replace(self, block_size=size, decode_s_per_token=decode, spared_s_per_token=spared)

    def step_s(self, step: ScheduledStep, sampled: list[Sequence]) -> float:
        """Return the seconds of a step, before its tokens are counted as computed; `sampled` get a token, and their samples.

        A beam search's first step looks at the prompt's logits alone.
        """
        context = pairs = 0
        for i, (sequence, count) in enumerate(zip(step.sequences, step.num_scheduled_tokens, strict=True)):
            start = sequence.num_computed_tokens
            if i < step.num_decodes:
                context += start + 1
            else:
                pairs += count * start + count * (count + 1) // 2
        tables = [s.block_table[: s.num_shared_blocks] for s in step.sequences[: step.num_decodes]]
        spared = sum(map(len, tables)) - len(set().union(*tables))
        num_beams = sum(s.beam_group is not None for s in sampled)
        drawn = [s for s in sampled if s.beam_group is None]
        return self.predict(
            sum(step.num_scheduled_tokens),
            context,
            pairs,
            num_beams + sum(1 + s.num_pending_samples for s in drawn),
            sum(1 + s.num_pending_samples for s in drawn if s.request.params.temperature > 0),
            spared * self.block_size,
            num_beams,
        )

    def predict(
        self,
        num_tokens: int,
        context: int,
        pairs: int,
        num_sampled: int,
        num_random: int = 0,
        spared: int = 0,
        num_beams: int = 0,
    ) -> float:
        """Return a step's seconds: `context` tokens read by decoding rows, `spared` of them read for others as well, `pairs` of
        prompt tokens and what they see."""
        table = float(np.interp(num_tokens, self.tokens, self.table_s))
        if num_tokens > self.tokens[-1]:
            table *= num_tokens / self.tokens[-1]
        attention = context * self.decode_s_per_token - spared * self.spared_s_per_token + pairs * self.prefill_s_per_pair
        drawn = num_random * self.random_s_per_row + num_beams * self.beam_s_per_row
        return table + attention + num_sampled * self.sample_s_per_row + drawn


def profile_path(root: Path, spec: ModelSpec, config: EngineConfig, machine: str) -> Path:
    """Return where the profile of a model on a machine is kept."""
    same = {
        "model": spec.to_dict(),
        "device": config.device,
        "backend": config.backend,
        "threads": config.threads,
        "machine": machine,
    }
    digest = hashlib.sha256(json.dumps(same, sort_keys=True, default=list).encode()).hexdigest()[:16]
    return root / "profiles" / f"{digest}.json"


def load_profile(path: Path) -> MachineProfile | None:
    """Return a stored profile; None when there is none that can be read."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            return None
        profile = MachineProfile(**document)
        profile.predict(1, 1, 1, 1)
        return profile if profile.tokens else None
    except (OSError, ValueError, TypeError):
        return None


def save_profile(path: Path, profile: MachineProfile) -> None:
    """Store a profile.

    Raises:
        OSError: it can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(profile), indent=2) + "\n", encoding="utf-8")
