"""A job whose engine answers at once with an echo of the prompt: everything around the engine, thousands of rows a second."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

from pagedgen.config import EngineConfig, JobConfig
from pagedgen.engine.feed import Control
from pagedgen.job import run_job
from pagedgen.request import Sequence
from pagedgen.stopping import Stopper


class EchoEngine:
    """Stands for `engine.engine.Engine`. `order` shuffles rows within what it holds, so that they finish out of order."""

    rng = None
    after_row = staticmethod(lambda: None)

    def __init__(self, opened, stats):
        self.opened, self.stats = opened, stats

    def plan(self, requests, **not_run):
        return SimpleNamespace(to_dict=dict)

    def generate(self, feed, plan, *, on_finished, on_error, on_step, on_note, control, block_map=None):
        held = []
        report = SimpleNamespace(num_finished=0, generated_tokens=0, tokens_left=0, used_blocks=0, total_blocks=1)
        while not (feed.exhausted and not held):
            if control() is not Control.GO_ON:
                return False
            if len(held) < 4096:  # it looks ahead no further than an engine does
                taken = feed.take(wait=not held)
                held += taken
                if taken and self.rng is not None:
                    self.rng.shuffle(held)
            for _ in range(min(len(held), 16)):
                self._answer(held.pop(), on_finished)
                self.after_row()
            on_step(report)
        return True

    def _answer(self, request, on_finished):
        for sample in request.samples:
            following = request
            while following is not None:
                sequence = Sequence(following, sample)
                sequence.token_ids += [*following.prompt_token_ids[-3:], 2]
                sequence.text = f"{self.opened.tokenizer.decode(following.prompt_token_ids)}|{sample}|{following.turn_index}"
                sequence.finish_reason = "stop"
                sequence.score = 0.5 if following.params.beam_width > 1 else None
                following = on_finished(sequence)


class Quiet:
    """Progress that nobody sees; the notes are kept."""

    def __init__(self):
        self.notes = []

    def phase(self, text):
        pass

    def rows(self, total):
        pass

    def step(self, report):
        pass

    def note(self, text):
        self.notes.append(text)


class EchoJobs:
    """Runs jobs on one opened model; see `EchoEngine`."""

    def __init__(self, model, **settings):
        from pagedgen.engine.opened import open_model

        self._engine = EngineConfig(model=str(model), dtype="float32", **settings)
        self.opened = open_model(self._engine)
        self.opened.__dict__["precompilation"] = None  # nothing is computed
        self.notes = []

    def run(self, inputs, output, *, rng=None, after_row=None, stopper=None, **settings):
        """Run a job; `after_row` is called after each row's answer."""
        config = JobConfig([str(i) for i in inputs], self._engine, output=str(output), **settings)
        progress = Quiet()
        engine = type("Engine", (EchoEngine,), {"rng": rng, "after_row": staticmethod(after_row or (lambda: None))})
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch("pagedgen.engine.opened.open_model", return_value=self.opened))
            stack.enter_context(mock.patch("pagedgen.engine.engine.Engine", engine))
            report = run_job(config, progress, stopper or Stopper(grace_s=0))
        self.notes = progress.notes
        return report
