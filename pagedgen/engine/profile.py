"""What a step takes on a machine, as `pagedgen tune` measured it, and where that is kept. No torch.

A step's seconds = a table over its tokens (GEMMs and all that grows with them) + what attention reads and multiplies + what
each sampled row costs. The same model, dtype, device, kernels and number of threads have one profile.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..config import EngineConfig
from ..model.spec import ModelSpec
from .scheduler import ScheduledStep

FORMAT = 1


@dataclass
class MachineProfile:
    """One machine's measurements for one model."""

    machine: str
    tokens: list[int]  # in a step
    table_s: list[float]  # what steps of so many tokens take, attention and sampling apart
    decode_s_per_token: float  # for each token of context that a decoding row reads
    prefill_s_per_pair: float  # for each (token, token of context) of a prompt
    sample_s_per_row: float
    start_s: float  # from the command to the first step
    decode_s_by_block_size: dict[str, float] = field(default_factory=dict)  # attention of `decode_rows` rows, all layers
    max_num_batched_tokens: int = 0  # the knee: where larger steps stop being faster by the token
    fit_error: float = 0.0  # mean of |predicted - measured| ÷ measured, over the measured steps
    format: int = FORMAT

    def step_s(self, step: ScheduledStep, num_sampled: int) -> float:
        """Return the seconds of a step, before its tokens are counted as computed."""
        context = pairs = 0
        for i, (sequence, count) in enumerate(zip(step.sequences, step.num_scheduled_tokens, strict=True)):
            start = sequence.num_computed_tokens
            if i < step.num_decodes:
                context += start + 1
            else:
                pairs += count * start + count * (count + 1) // 2
        return self.predict(sum(step.num_scheduled_tokens), context, pairs, num_sampled)

    def predict(self, num_tokens: int, context: int, pairs: int, num_sampled: int) -> float:
        """Return a step's seconds: `context` tokens read by decoding rows, `pairs` of prompt tokens and what they see."""
        table = float(np.interp(num_tokens, self.tokens, self.table_s))
        if num_tokens > self.tokens[-1]:
            table *= num_tokens / self.tokens[-1]
        return table + context * self.decode_s_per_token + pairs * self.prefill_s_per_pair + num_sampled * self.sample_s_per_row


def profile_path(root: Path, spec: ModelSpec, config: EngineConfig, machine: str) -> Path:
    """Return where the profile of a model on a machine is kept."""
    same = {
        "model": spec.to_dict(),
        "device": config.device,
        "backend": config.backend,
        "threads": config.threads,
        "block_size": config.block_size,
        "machine": machine,
    }
    digest = hashlib.sha256(json.dumps(same, sort_keys=True, default=list).encode()).hexdigest()[:16]
    return root / "profiles" / f"{digest}.json"


def load_profile(path: Path) -> MachineProfile | None:
    """Return a stored profile; None when there is none that can be read."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if document.get("format") != FORMAT:
            return None
        return MachineProfile(**document)
    except (OSError, ValueError, TypeError):
        return None


def save_profile(path: Path, profile: MachineProfile) -> None:
    """Store a profile.

    Raises:
        OSError: it can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(profile), indent=2) + "\n", encoding="utf-8")
