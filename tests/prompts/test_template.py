"""Prompt templates: columns in, text out, and nothing else that a template could reach."""

from __future__ import annotations

import pytest

from pagedgen.config import PromptConfig
from pagedgen.errors import InputError, RowError, UsageError
from pagedgen.prompts.render import PromptRenderer
from pagedgen.prompts.template import PromptTemplate


def rendered(source, **values):
    return PromptTemplate(source).render(values)


def refusal(source, **values):
    with pytest.raises(RowError) as caught:
        rendered(source, **values)
    assert caught.value.code == "template_error"
    return caught.value.message


def test_columns_are_filled_in_and_everything_else_stays():
    assert rendered("Q: {{ q }}\nA: <b>\n", q="1 < 2 & 'x'") == "Q: 1 < 2 & 'x'\nA: <b>\n"
    assert rendered("{{ n }} {{ f }} {{ t }}", n=7, f=0.5, t=True) == "7 0.5 True"
    assert rendered("{{ m.role }}: {{ m['content'] | upper }}", m={"role": "user", "content": "hi"}) == "user: HI"
    assert rendered("{% for o in options %}{{ loop.index }}. {{ o }}\n{% endfor %}", options=["a", "b"]) == "1. a\n2. b\n"


def test_what_a_column_holds_is_no_template():
    assert rendered("{{ q }}", q="{{ 7 * 7 }}{% raw %}") == "{{ 7 * 7 }}{% raw %}"


def test_the_columns_are_those_the_template_looks_up():
    own_names = "{% set z = a %}{{ z }}{% for x in b %}{{ x.y }}{{ loop.index }}{% endfor %}{{ range(3) }}"
    assert PromptTemplate(own_names + "{% if c is defined %}{% endif %}").columns == ["a", "b", "c"]


@pytest.mark.parametrize(
    "source", ["{{", "{{ x", "{% if x %}", "{{ x | no_such_filter }}", "{{ x is no_such_test }}", "{% no %}"]
)
def test_what_is_no_template_is_refused_with_its_line(source):
    with pytest.raises(UsageError, match=r"--prompt-template: .*line 2"):
        PromptTemplate("first\n" + source)


@pytest.mark.parametrize("source", ["", "plain", "{# x #}", "{{ 'x' }}", "{{ range(3) }}", "{% set x = 1 %}{{ x }}"])
def test_a_template_without_a_column_is_refused(source):
    with pytest.raises(UsageError, match="names no column"):
        PromptTemplate(source)


def test_a_column_that_a_row_lacks_is_a_row_error_that_names_it():
    assert "'b'" in refusal("{{ a }} {{ b }}", a=1)
    assert "'y'" in refusal("{{ a.y }}", a={"x": 1})
    assert rendered("{{ b | default('none') }}{{ a }}", a=1) == "none1"


@pytest.mark.parametrize(
    "source",
    [
        "{{ x.__class__ }}",
        "{{ x['__class__'] }}",
        "{{ x | attr('__class__') }}",
        "{{ x | attr('__cla' ~ 'ss__') }}",
        "{{ x.__class__.__mro__[1].__subclasses__() }}",
        "{{ '{0.__class__}'.format(x) }}",
        "{{ '{a.__class__}'.format_map({'a': x}) }}",
        "{{ ('{0.__class__}' | string).format(x) }}",
        "{{ ().__class__.__base__ }}{{ x }}",
        "{{ lipsum.__globals__ }}{{ x }}",
        "{{ cycler.__init__.__globals__ }}{{ x }}",
        "{{ x.upper.__self__ }}",
        "{{ [x] | map(attribute='__class__') | first }}",
        "{{ self.__init__ }}{{ x }}",
        "{% macro m() %}{% endmacro %}{{ m.__call__ }}{{ x }}",
    ],
)
def test_tricks_with_attributes_are_refused(source):
    assert refusal(source, x="text")


@pytest.mark.parametrize(
    "source", ["{{ x.append(1) }}", "{{ x.clear() }}", "{{ x.__setitem__(0, 1) }}", "{% do x.append(1) %}"]
)
def test_a_template_can_not_change_the_row(source):
    row = [1, 2]
    with pytest.raises((RowError, UsageError)):
        rendered(source, x=row)
    assert row == [1, 2]


@pytest.mark.parametrize(
    "source",
    ["{{ 1 // x }}", "{{ range(10**9) | list }}{{ x }}", "{{ x.y }}", "{% include x %}", "{{ x() }}", "{{ x | int + 'a' }}"],
)
def test_whatever_a_template_raises_is_a_row_error(source):
    assert refusal(source, x=0)


def test_a_signal_while_rendering_is_no_row_error():
    class Stopping:
        def __str__(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rendered("{{ x }}", x=Stopping())


def test_the_renderer_uses_the_template_in_place_of_a_column():
    renderer = PromptRenderer(None, PromptConfig(prompt_template="Q: {{ question }}"))
    assert renderer.render({"prompt": "p", "question": "why?"}).text == "Q: why?"
    assert {"question", "tools", "documents"} == set(renderer.columns())
    renderer.check_columns(["question", "prompt"])
    with pytest.raises(InputError, match="question: no such column; found prompt"):
        renderer.check_columns(["prompt"])


def test_a_column_that_only_some_rows_have_is_left_to_the_rows():
    renderer = PromptRenderer(None, PromptConfig(prompt_template="{{ a }}{{ b | default('') }}"))
    renderer.check_columns(["a"])
    assert renderer.render({"a": "x"}).text == "x"


@pytest.mark.parametrize("name", ["dict", "namespace", "cycler", "joiner", "lipsum"])
def test_a_column_named_like_a_function_of_jinja_is_a_column(name):
    assert name in PromptTemplate(f"{{{{ question }}}} {{{{ {name} }}}}").columns
