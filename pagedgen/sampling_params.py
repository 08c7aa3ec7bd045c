"""How one row's tokens are chosen and when it ends. Names and meanings are vLLM's, except where noted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

DEFAULT_MAX_TOKENS = 512
_INTEGERS = {"n", "top_k", "seed", "max_tokens", "min_tokens", "beam_width"}


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one row.

    Differences from vLLM: `temperature` defaults to 0 (greedy) and `max_tokens` to 512. Filters apply in the order
    temperature, top_k, top_p, min_p, each on the renormalized survivors of the one before. Beam search and its three settings
    are those of transformers' `generate`.

    Raises:
        ValueError: a value is of the wrong type or out of range; the message names the field, the value and the range.
    """

    n: int = 1  # samples of each row; with beams, how many of the best
    beam_width: int = 1  # above 1: beam search
    length_penalty: float = 1.0  # a beam's score is its log-probability over its length to this power
    early_stopping: bool | str = False  # true, false or "never", as transformers means them
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None  # None: the run's seed
    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", tuple(_sequence("stop", stop)))
        object.__setattr__(self, "stop_token_ids", tuple(_sequence("stop_token_ids", self.stop_token_ids)))
        _number("temperature", self.temperature, low=0.0)
        _number("top_p", self.top_p, low=0.0, high=1.0, exclude_low=True)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _integer("top_k", self.top_k, low=-1)
        _integer("n", self.n, low=1)
        _integer("max_tokens", self.max_tokens, low=0)
        _integer("min_tokens", self.min_tokens, low=0)
        if self.seed is not None:
            _integer("seed", self.seed, low=0, high=2**64 - 1)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r:.40}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold non-empty strings, not {text!r}")
            if text.encode("utf-8", "replace").decode() != text:
                raise ValueError(f"stop {text!r} is not valid Unicode text")
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, low=0)
        _integer("beam_width", self.beam_width, low=1)
        _number("length_penalty", self.length_penalty, low=-10.0, high=10.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f'early_stopping must be true, false or "never", not {self.early_stopping!r}')
        if self.beam_width > 1:
            self._check_beams()
        elif self.n > 1 and self.greedy:
            raise ValueError(f"n {self.n} needs a temperature above 0: greedy samples are all the same")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")

    def _check_beams(self) -> None:
        if self.n > self.beam_width:
            raise ValueError(f"n {self.n} is more than beam_width {self.beam_width}: there are only so many beams")
        if not self.greedy:
            raise ValueError(f"beam_width {self.beam_width} is a search without chance: temperature must be 0")
        if self.stop:
            raise ValueError("stop texts can't end a beam; use stop_token_ids")

    @property
    def num_sequences(self) -> int:
        """Sequences a row has in flight: its samples or its beams."""
        return max(self.n, self.beam_width)

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken and no random number is drawn."""
        return self.temperature == 0.0 or self.top_k == 1

    def override(self, values: Mapping[str, Any] | None) -> SamplingParams:
        """Return a copy with a row's own values; null means "not given".

        Raises:
            ValueError: an unknown name, or a value that `SamplingParams` refuses.
        """
        if values is None:
            return self
        if not isinstance(values, Mapping):
            raise ValueError(f"sampling_params must be an object, not {type(values).__name__}")
        known = {f.name for f in fields(self)}
        unknown = sorted(str(name) for name in values if name not in known)
        given = {name: value for name, value in values.items() if value is not None}
        for name in given.keys() & _INTEGERS:  # a nullable integer column often comes as floats
            if isinstance(given[name], float) and given[name].is_integer():
                given[name] = int(given[name])
        unknown = [name for name in unknown if name in given]
        if unknown:
            raise ValueError(f"sampling_params has unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        return replace(self, **given)


def _sequence(name: str, value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a list, not {value!r:.40}")
    return list(value)


def _number(name: str, value: Any, *, low: float, high: float = math.inf, exclude_low: bool = False) -> None:
    try:
        finite = not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # an integer past every float
        finite = False
    if not finite:
        raise ValueError(f"{name} must be a finite number, not {value!r:.40}")
    if value < low or value > high or (exclude_low and value == low):
        bracket = "(" if exclude_low else "["
        raise ValueError(f"{name} {value!r:.40} is outside {bracket}{low:g}, {high:g}]")


def _integer(name: str, value: Any, *, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, not {value!r:.40}")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} {value!r:.40} must be {limit}")
