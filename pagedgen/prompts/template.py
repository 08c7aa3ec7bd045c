"""Prompt templates: Jinja2 over a row's columns, sandboxed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import RowError, UsageError


class PromptTemplate:
    """A template that makes one prompt of a row's columns, for example `Q: {{ question }}\\nA:`.

    Raises:
        UsageError: not a Jinja2 template, or one without a column.
    """

    def __init__(self, source: str):
        from jinja2 import StrictUndefined, TemplateSyntaxError, meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        # A column may be called like one of Jinja's own functions, of which only `range` is of use here.
        environment.globals = {"range": environment.globals["range"]}
        try:
            syntax = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise UsageError(f"--prompt-template: not a Jinja2 template: {error.message} (line {error.lineno})") from error
        except (SyntaxError, RecursionError) as error:  # Python's own limits on what it becomes
            raise UsageError(f"--prompt-template is nested too deeply: {error}") from error
        self.columns = sorted(meta.find_undeclared_variables(syntax))
        if not self.columns:
            raise UsageError("--prompt-template names no column; write it like 'Q: {{ question }}'")

    def render(self, values: Mapping[str, Any]) -> str:
        """Return a row's prompt.

        Raises:
            RowError: a column is missing, or the template fails on the row.
        """
        try:
            # Parquet gives every row every column; null is as good as absent.
            return self._template.render({name: value for name, value in values.items() if value is not None})
        except Exception as error:  # a template is foreign code and raises what it likes
            reason = str(error).strip() or type(error).__name__
            raise RowError("template_error", f"the prompt template failed: {reason:.300}") from error
