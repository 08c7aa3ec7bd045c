"""What a job tells while it runs, and what it hands back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import EXIT_OK, EXIT_ROW_ERRORS, EXIT_STOPPED

COMPILING = "compiling the CPU kernels, which takes a while, once on this machine"


class Progress(Protocol):
    """What a job tells while it runs; the CLI shows it."""

    def phase(self, text: str) -> None:
        """A new phase has begun."""

    def rows(self, total: int | None) -> None:
        """Generation begins, or more is known: there are so many answers to generate; None while rows are still being read."""

    def step(self, report: Any) -> None:
        """A step has ended (`engine.generation.StepReport`)."""

    def note(self, text: str) -> None:
        """Something the user should know that is no error."""


@dataclass
class JobReport:
    """What a job hands back. `stopped_by`: why it ended before its rows did; `is_repeat`: its output was there already."""

    stats: dict[str, Any] = field(default_factory=dict)
    output: str = "-"
    stats_path: str | None = None
    num_results: int = 0  # in the output, or kept by a stopped run
    num_errors: int = 0
    first_error: str | None = None
    stopped_by: str | None = None
    stopping_error: str | None = None
    is_repeat: bool = False

    def exit_code(self, max_error_rate: float) -> int:
        """Return the documented exit code, when no more than this share of the results may be errors. All of them never may."""
        if self.stopping_error is not None:
            return EXIT_ROW_ERRORS
        if self.stopped_by is not None:
            return EXIT_STOPPED
        too_many = self.num_errors > max_error_rate * self.num_results or 0 < self.num_results == self.num_errors
        return EXIT_ROW_ERRORS if too_many else EXIT_OK


@dataclass
class PlanReport:
    """What `plan` hands back: the plan's numbers and what they were made from."""

    plan: dict[str, Any]
    model: dict[str, Any]
    config: dict[str, Any]
    max_tokens: int
    memory_source: str
    files: list[str]
    forecast: dict[str, Any]  # `engine.forecast.Forecast`, and wall_s
    sharing: dict[str, Any]
    block_sizes: list[dict[str, Any]]
    recommended_block_size: int
    prompt_lengths: list[dict[str, int]]  # a histogram
    what_if: list[dict[str, Any]]  # the forecast with other pools
    warnings: list[str]
    profile: dict[str, Any] | None  # what the times come from
