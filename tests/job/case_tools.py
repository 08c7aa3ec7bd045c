"""What the tests of cases from the field share."""

from __future__ import annotations

import json
import re
from unittest import mock

from command import pagedgen

from pagedgen.config import PromptConfig
from pagedgen.errors import OutputError, RowError
from pagedgen.prompts.render import PromptRenderer
from pagedgen.prompts.tokenize import PromptTokenizer

BOS, EOS = 1, 2
BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STRICT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "{% if loop.previtem is defined and loop.previtem['role'] == m['role'] %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def user(content):
    return {"role": "user", "content": content}


def read_jsonl(path):
    """Return a file's rows. Only a newline ends one; text's `splitlines` knows other ends, which answers may hold."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def stats_of(out):
    return json.loads(out.with_name(out.name + ".stats.json").read_text())


def plan_of(model, *args):
    done = pagedgen("plan", model, *args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def column(rows, name):
    return [row[name] for row in rows]


def one_line(text):
    """Return a message without the line breaks and frames that depend on the terminal."""
    return " ".join(re.sub(r"[│\n]", " ", text).split())


class Prompts:
    """A model's prompts as the command makes them: text and token ids of a row's columns."""

    def __init__(self, model):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self._renderer = PromptRenderer(self.tokenizer, PromptConfig())
        self._tokens = PromptTokenizer(self.tokenizer, 263)

    def text(self, values):
        return self._renderer.render(values).text

    def ids(self, values):
        ids = self._tokens.tokenize([self._renderer.render(values)])[0]
        assert not isinstance(ids, RowError), ids
        return ids


# Input


def leave_unwritten(*args):
    """Run a job whose output can't be written: all its rows are finished and stay in its parts."""
    with mock.patch("pagedgen.jobs.run.write_output", side_effect=OutputError("no space left")):
        done = pagedgen(*args)
    assert done.returncode == 4, done.stderr


def parts_of(out):
    """Return a job's parts, oldest first."""
    return sorted(out.with_name(out.name + ".parts").glob("part-*.jsonl"))


def keep_lines(out, wanted):
    """Take all results out of a job's parts but those whose row, sample and turn are wanted."""
    for part in parts_of(out):
        lines = part.read_bytes().splitlines(keepends=True)
        part.write_bytes(b"".join(line for line in lines if wanted(*map(int, line.split(b" ", 4)[1:4]))))
