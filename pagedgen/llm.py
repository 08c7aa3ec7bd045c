"""The library: `LLM.generate` and `LLM.chat`, in the shapes vLLM's users know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import threads
from .config import EngineConfig, PromptConfig
from .errors import RowError, UsageError
from .machine import without_collector
from .request import CompletionOutput, Request, RequestOutput
from .request import Sequence as SequenceInFlight
from .sampling_params import SamplingParams
from .stats import RunStats

Prompt = str | Mapping[str, Any]


class LLM:
    """A model kept loaded between calls.

    Keyword arguments are those of `config.EngineConfig` (`dtype`, `max_model_len`, `block_size`, `seed` …).

    Raises:
        UsageError: unknown settings, or a model that can't run; before weights load.
    """

    def __init__(self, model: str, **settings: Any):
        try:
            config = EngineConfig(model=model, **settings)
        except TypeError as error:
            raise UsageError(str(error).replace("EngineConfig.__init__()", "LLM()")) from error
        threads.prepare()
        with without_collector():
            from .engine.engine import Engine
            from .engine.opened import open_model

            self._engine = Engine(open_model(config))
        self.stats = self._engine.stats

    def get_tokenizer(self) -> Any:
        """Return the transformers tokenizer."""
        return self._engine.opened.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt: a string, or `{"prompt": str}`, or `{"prompt_token_ids": [int]}`. Answers in input order.

        A `cache_salt` beside it keeps a prompt's K/V from prompts with another one.

        A prompt that can't be run is answered with `error_code` and `error` and no output; the others run.

        Raises:
            ValueError: as many sampling_params as prompts are needed, or one for all.
        """
        from .prompts.render import PromptRenderer

        single = isinstance(prompts, (str, Mapping))
        rows = [prompts] if single else list(prompts)
        values = [dict(p) if isinstance(p, Mapping) else _as_columns(p) for p in rows]
        return self._answer(values, PromptRenderer(self.get_tokenizer()), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of lists), through the chat template.

        Raises:
            UsageError: the model's tokenizer has no chat template.
        """
        from .prompts.render import PromptRenderer

        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        renderer = PromptRenderer(self.get_tokenizer(), PromptConfig(messages_column="messages"))
        renderer.check_columns(["messages"])
        return self._answer([{"messages": c} for c in conversations], renderer, sampling_params, use_tqdm)

    def _answer(
        self,
        rows: list[dict[str, Any]],
        renderer: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        from .prompts.tokenize import PromptTokenizer

        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(rows)
        else:
            params = list(sampling_params)
            if not all(isinstance(p, SamplingParams) for p in params):
                raise TypeError("sampling_params must be SamplingParams, one for each prompt or one for all")
            if len(params) != len(rows):
                raise ValueError(f"{len(params)} sampling_params for {len(rows)} prompts: give one for each, or one for all")
        opened = self._engine.opened
        tokenizer = PromptTokenizer(opened.tokenizer, opened.spec.vocab_size)
        outputs: dict[int, RequestOutput] = {}
        requests: list[Request] = []
        texts: list[str | None] = []
        for index, values in enumerate(rows):
            texts.append(None)
            try:
                rendered = renderer.render(values)
                if len(rendered.turns) > 1:
                    raise RowError(
                        "unsupported_content", "several turns are answered by the command line; here, chat takes one"
                    )
                texts[index] = rendered.text
                ids = tokenizer.tokenize([rendered])[0]
                if isinstance(ids, RowError):
                    raise ids
                salt = values.get("cache_salt") or ""
                if not isinstance(salt, str):
                    raise RowError("not_text", f"cache_salt is {type(salt).__name__}, not text")
                request = opened.make_request(index, ids, params[index], cache_salt=salt)
            except RowError as error:
                outputs[index] = _failed(index, texts[index], None, error)
                continue
            if request.max_tokens == 0:
                empty = [CompletionOutput(i, "", [], "length") for i in range(params[index].n)]
                outputs[index] = RequestOutput(str(index), texts[index], ids, empty)
            else:
                requests.append(request)
        if requests:
            self._run(requests, texts, outputs, use_tqdm)
        return [outputs[i] for i in range(len(rows))]

    def _run(self, requests: list[Request], texts: list[str | None], outputs: dict[int, RequestOutput], use_tqdm: bool) -> None:
        from tqdm import tqdm

        from .engine.planner import RequestLengths

        def on_finished(sequence: SequenceInFlight) -> None:
            index = sequence.request.row_index
            completion = CompletionOutput(
                sequence.sample_index,
                sequence.text or "",
                sequence.generated_token_ids,
                sequence.finish_reason,
                sequence.stop_reason,
                sequence.score,
            )
            done = outputs.get(index)
            if done is None:
                prompt_ids = list(sequence.request.prompt_token_ids)
                done = RequestOutput(str(index), texts[index], prompt_ids, num_cached_tokens=sequence.num_cached_tokens)
                outputs[index] = done
            done.outputs.append(completion)
            done.outputs.sort(key=lambda c: c.index)
            bar.update()

        def on_error(request: Request, sample_index: int, error: RowError) -> None:
            index = request.row_index
            answered = outputs[index].outputs if index in outputs else []
            outputs[index] = replace(_failed(index, texts[index], list(request.prompt_token_ids), error), outputs=answered)
            bar.update()

        self._engine.stats = self.stats = RunStats()
        with tqdm(total=sum(r.params.n for r in requests), desc="Processed prompts", disable=not use_tqdm) as bar:
            self._engine.generate(
                requests, self._engine.plan(RequestLengths(requests)), on_finished=on_finished, on_error=on_error
            )


def _as_columns(prompt: Any) -> dict[str, Any]:
    """Return a bare prompt as a row: text, or a list of token ids."""
    return {"prompt_token_ids": prompt} if isinstance(prompt, list) else {"prompt": prompt}


def _failed(index: int, prompt: str | None, token_ids: list[int] | None, error: RowError) -> RequestOutput:
    return RequestOutput(str(index), prompt, token_ids, [], error_code=error.code, error=error.message)
