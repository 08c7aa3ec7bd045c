"""A model opened for planning: its files, tokenizer, shapes and the resolved settings; everything but the weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..config import EngineConfig
from ..errors import RowError, UsageError
from ..machine import without_collector
from ..model import loader
from ..model.inspection import inspect_model
from ..model.spec import ModelSpec
from ..request import Request
from ..sampling_params import SamplingParams
from . import memory


@dataclass(frozen=True)
class OpenedModel:
    """What is known of a model and a device before weights load."""

    config: EngineConfig  # resolved
    files: loader.ModelFiles
    hf_config: Any
    tokenizer: Any
    spec: ModelSpec

    @property
    def num_token_ids(self) -> int:
        """Ids below this can be chosen: the embedding may be padded past the last token the tokenizer knows."""
        return min(self.spec.vocab_size, max(self.tokenizer.get_vocab().values(), default=self.spec.vocab_size - 1) + 1)

    @cached_property
    def precompilation(self) -> loader.Precompilation | None:
        """The process that compiles attention while the rest is compiled, started when first asked for.

        None where it is compiled already, or there is no core for it.
        """
        config = self.config
        assert config.block_size and config.threads
        if config.backend != "cpu" or config.threads == 1:
            return None
        return loader.start_precompilation(self.spec, config.block_size)

    def check_params(self, params: SamplingParams) -> None:
        """Refuse parameters that don't fit the model or the engine.

        Raises:
            RowError: bad_sampling_params, with the field and the limit.
        """
        outside = [t for t in params.stop_token_ids if t >= self.spec.vocab_size]
        if outside:
            raise RowError(
                "bad_sampling_params",
                f"stop_token_ids {outside} are outside the vocabulary of {self.spec.vocab_size}",
            )
        name = "beam_width" if params.beam_width > 1 else "n"
        if params.num_sequences > (self.config.max_num_seqs or 1):
            raise RowError(
                "bad_sampling_params",
                f"{name} {params.num_sequences} is more than --max-num-seqs {self.config.max_num_seqs}",
            )
        ending = self._eos_token_ids(params) | set(params.stop_token_ids)
        if params.beam_width > 1 and params.beam_width * max(2, 1 + len(ending)) > self.num_token_ids:
            raise RowError(
                "bad_sampling_params", f"beam_width {params.beam_width} is too large for {self.num_token_ids} tokens"
            )

    def _eos_token_ids(self, params: SamplingParams) -> frozenset[int]:
        return frozenset() if params.ignore_eos else frozenset(self.spec.eos_token_ids)

    def make_request(
        self,
        row_index: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        turn_index: int = 0,
        cache_salt: str = "",
        later_tokens: int = 0,
        later_turns: int = 0,
        num_truncated_tokens: int = 0,
        sample_indices: tuple[int, ...] = (),
    ) -> Request:
        """Return the engine's request for one prompt; `later_tokens` is cut to what the context has room for.

        Raises:
            RowError: the prompt leaves no room, or the parameters don't fit the model.
        """
        assert self.config.max_model_len is not None
        room = self.config.max_model_len - len(prompt_token_ids)
        if room < 1:
            raise RowError(
                "prompt_too_long",
                f"the prompt has {len(prompt_token_ids)} tokens; max_model_len {self.config.max_model_len} leaves no room",
            )
        self.check_params(params)
        max_tokens = min(params.max_tokens, room)
        return Request(
            row_index=row_index,
            prompt_token_ids=prompt_token_ids,
            params=params,
            max_tokens=max_tokens,
            eos_token_ids=self._eos_token_ids(params),
            seed=self.config.seed if params.seed is None else params.seed,
            turn_index=turn_index,
            cache_salt=cache_salt,
            later_tokens=min(later_tokens, room - max_tokens),
            later_turns=later_turns,
            num_truncated_tokens=num_truncated_tokens,
            sample_indices=sample_indices,
        )


@without_collector()
def open_model(config: EngineConfig, *, planning: bool = False, chat_template: str | None = None) -> OpenedModel:
    """Open a model without its weights and resolve the settings for it.

    `planning` allows a device that isn't here.

    Raises:
        ModelError: no such model, or one that can't run; UsageError: settings that contradict it.
    """
    device = _choose_device(config.device, planning)
    files = loader.locate(
        config.model,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        allow_pickle=config.allow_pickle,
    )
    hf_config = loader.load_config(files)
    dtype = loader.best_dtype(device, hf_config) if config.dtype == "auto" else config.dtype
    tokenizer = loader.load_tokenizer(files)
    if chat_template is not None:
        _check_template(chat_template)
        tokenizer.chat_template = chat_template
    spec = inspect_model(files, hf_config, dtype, loader.load_eos_token_ids(files, hf_config, tokenizer), config.quantization)
    if config.kv_cache_dtype != "auto":
        spec = replace(spec, kv_cache_dtype=config.kv_cache_dtype)
    resolved = config.resolve(
        device=device,
        dtype=dtype,
        max_model_len=spec.max_model_len,
        limited_by=spec.max_model_len_limited_by,
        threads=config.threads or len(os.sched_getaffinity(0)),
    )
    if not planning:
        memory.check_swap_space(resolved)
    return OpenedModel(resolved, files, hf_config, tokenizer, spec)


def _check_template(template: str) -> None:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        _compile_jinja_template(template)
    except TemplateSyntaxError as error:
        raise UsageError(f"--chat-template: not a Jinja template: {error.message} (line {error.lineno})") from error


def _choose_device(device: str, planning: bool) -> str:
    import torch

    has_gpu = torch.cuda.is_available()
    if device == "auto":
        return "cuda" if has_gpu else "cpu"
    if device == "cuda" and not has_gpu and not planning:
        raise UsageError("--device cuda: this machine has no usable CUDA device (`plan` takes --device-memory for another one)")
    return device
