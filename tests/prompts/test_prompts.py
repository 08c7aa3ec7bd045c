"""Which column is the prompt, chats through the template, exactly one BOS; a row that can't be used says why."""

from __future__ import annotations

import pytest

from pagedgen.config import PromptConfig
from pagedgen.errors import ROW_ERROR_CODES, InputError, RowError, UsageError
from pagedgen.prompts.render import PromptRenderer, Rendered
from pagedgen.prompts.tokenize import PromptTokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model("llama"))


@pytest.fixture(scope="module")
def bos_tokenizer(tiny_model):
    from transformers import AutoTokenizer

    template = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    return AutoTokenizer.from_pretrained(tiny_model("llama", bos=True, chat_template=template))


def renderer_of(tokenizer, **settings):
    return PromptRenderer(tokenizer, PromptConfig(**settings))


def render_and_tokenize(tokenizer, values, **settings):
    rendered = renderer_of(tokenizer, **settings).render(values)
    return PromptTokenizer(tokenizer, 263).tokenize([rendered])[0]


def error_code(tokenizer, values, **settings):
    try:
        ids = render_and_tokenize(tokenizer, values, **settings)
    except RowError as error:
        return error.code
    return ids.code if isinstance(ids, RowError) else None


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"prompt": "hello"}, None),
        ({"prompt": ""}, "empty_prompt"),
        ({"prompt": None}, "null_prompt"),
        ({"id": 4}, "missing_prompt"),
        ({"messages": []}, "no_messages"),
        ({"messages": None}, "null_prompt"),
        ({"messages": "hi"}, "not_text"),
        ({"messages": [{"content": "no role"}]}, "not_text"),
        ({"messages": [{"role": "user", "content": None}]}, "null_prompt"),
        ({"messages": [{"role": "user", "content": 5}]}, "not_text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "template_error"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "unsupported_content",
        ),
        ({"prompt": 123}, "not_text"),
        ({"prompt": ["a"]}, "not_text"),
        ({"prompt": "bad \ud800 surrogate"}, "not_text"),
        ({"prompt_token_ids": [7, 8]}, None),
        ({"prompt_token_ids": []}, "empty_prompt"),
        ({"prompt_token_ids": [-1, 5]}, "bad_token_ids"),
        ({"prompt_token_ids": [263]}, "bad_token_ids"),
        ({"prompt_token_ids": [True]}, "bad_token_ids"),
        ({"prompt_token_ids": "abc"}, "bad_token_ids"),
    ],
)
def test_each_kind_of_row_has_its_own_reason(tokenizer, values, code):
    assert error_code(tokenizer, values) == code
    assert code is None or code in ROW_ERROR_CODES


def test_empty_prompt_is_the_bos_alone_where_there_is_one(bos_tokenizer):
    assert render_and_tokenize(bos_tokenizer, {"prompt": ""}) == [1]


def test_column_order_and_named_columns(tokenizer):
    row = {"question": "q", "text": "t", "prompt": "p", "messages": [USER], "other": "o"}
    render = PromptRenderer(tokenizer).render
    assert render(row).from_template
    for column in ("prompt", "text", "question"):
        row.pop("messages", None)
        assert render(row).text == row.pop(column)
    assert renderer_of(tokenizer, prompt_column="other").render(row).text == "o"
    named = renderer_of(tokenizer, messages_column="other").render({"other": [USER]})
    assert named == PromptRenderer(tokenizer).render({"messages": [USER]})


def test_null_columns_give_way_to_the_one_with_a_prompt(tokenizer):
    """In Parquet every row has every column; the null ones say nothing."""
    render = PromptRenderer(tokenizer).render
    assert render({"messages": None, "prompt": "p", "text": None}).text == "p"
    assert render({"messages": None, "prompt": None, "prompt_token_ids": [9]}).token_ids == [9]
    assert error_code(tokenizer, {"messages": None, "prompt": None}) == "null_prompt"


def test_a_named_column_may_hold_token_ids(tokenizer):
    assert renderer_of(tokenizer, prompt_column="prompt_token_ids").render({"prompt_token_ids": [7]}).token_ids == [7]


def test_two_named_columns_exclude_each_other():
    with pytest.raises(UsageError, match="exclude each other"):
        PromptConfig(prompt_column="a", messages_column="b")


def test_a_signal_while_rendering_is_no_row_error(tokenizer):
    class Interrupting:
        chat_template = "x"

        def apply_chat_template(self, *args, **kwargs):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PromptRenderer(Interrupting()).render({"messages": [USER]})


def test_unknown_columns_name_those_found(tokenizer):
    with pytest.raises(InputError, match="found a, b"):
        renderer_of(tokenizer, prompt_column="x").check_columns(["a", "b"])
    with pytest.raises(InputError, match="found a, b"):
        PromptRenderer(tokenizer).check_columns(["a", "b"])


def test_chats_need_a_template(tiny_model):
    from transformers import AutoTokenizer

    bare = AutoTokenizer.from_pretrained(tiny_model("llama", chat_template=None))
    with pytest.raises(InputError, match="--chat-template"):
        PromptRenderer(bare).check_columns(["messages"])
    PromptRenderer(bare).check_columns(["prompt"])


def test_text_parts_are_joined_and_null_members_ignored(tokenizer):
    parts = [{"type": "text", "text": "Hi ", "image_url": None}, {"type": "text", "text": "there", "image_url": None}]
    got = render_and_tokenize(tokenizer, {"messages": [{"role": "user", "content": parts, "name": None}]})
    assert got == render_and_tokenize(tokenizer, {"messages": [{"role": "user", "content": "Hi there"}]})


def test_chat_ids_are_the_templates_own_with_one_bos(bos_tokenizer):
    got = render_and_tokenize(bos_tokenizer, {"messages": [USER]})
    assert got == bos_tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert got.count(1) == 1


def test_plain_text_gets_one_bos_even_when_it_brings_its_own(bos_tokenizer):
    renderer, tokenizer = PromptRenderer(bos_tokenizer), PromptTokenizer(bos_tokenizer, 263)
    plain, own = tokenizer.tokenize([renderer.render({"prompt": t}) for t in ("hi", "<s>hi")])
    assert plain == own == bos_tokenizer("hi")["input_ids"]
    assert tokenizer.num_bos_kept == 1


def test_an_eos_the_tokenizer_appends_is_dropped(tokenizer):
    class Appending:
        bos_token, eos_token, eos_token_id, bos_token_id = None, "</s>", 2, None

        def __call__(self, texts, add_special_tokens):
            ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
            return {
                "input_ids": [
                    i + [2] * (add_special_tokens and not t.endswith("</s>")) for i, t in zip(ids, texts, strict=True)
                ]
            }

    got = PromptTokenizer(Appending(), 263).tokenize([Rendered(text="ab"), Rendered(text="ab</s>")])
    assert got == tokenizer(["ab", "ab</s>"], add_special_tokens=False)["input_ids"]


def test_a_last_assistant_message_is_continued(tokenizer):
    text = PromptRenderer(tokenizer).render({"messages": [USER, {"role": "assistant", "content": "Sure, "}]}).text
    assert text.rstrip().endswith("Sure,")
    assert text.count("<|assistant|>") == 1


def test_one_bad_text_does_not_cost_its_group(tokenizer):
    prompts = [Rendered(text="a"), Rendered(text="\ud800"), Rendered(text="b")]
    first, bad, last = PromptTokenizer(tokenizer, 263).tokenize(prompts)
    assert (first, last) == tuple(tokenizer(["a", "b"])["input_ids"])
    assert bad.code == "not_text"
