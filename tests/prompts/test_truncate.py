"""Prompts that are too long are cut to the limit, and what must stay stays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedgen.errors import RowError
from pagedgen.prompts.render import PromptRenderer, Rendered
from pagedgen.prompts.tokenize import PromptTokenizer
from pagedgen.prompts.truncate import Truncator, prompt_limit

WAYS = ["truncate-left", "truncate-middle"]
BOS = 1
HALF = "\ufffd"  # what a part of a character decodes to


class Cutting:
    """Tokenizes rows and cuts them; every byte is a token."""

    def __init__(self, tokenizer, way):
        self.renderer = PromptRenderer(tokenizer)
        self.tokenizer = PromptTokenizer(tokenizer, 263)
        self._truncator = Truncator(self.renderer, self.tokenizer, way)

    def ids(self, values):
        (ids,) = self.tokenizer.tokenize([self.renderer.render(values)])
        assert isinstance(ids, list)
        return ids

    def cut(self, values, limit):
        """Return the new prompt, its ids and what they stand for."""
        rendered, ids = self._truncator.cut(self.renderer.render(values), self.ids(values), limit)
        return rendered, ids, self.tokenizer.decode_piece(ids)


@pytest.fixture(scope="module")
def cuttings(tiny_model):
    from transformers import AutoTokenizer

    tokenizers = {bos: AutoTokenizer.from_pretrained(tiny_model("llama", bos=bos)) for bos in (False, True)}
    return {(way, bos): Cutting(tokenizer, way) for bos, tokenizer in tokenizers.items() for way in WAYS}


def chat(user, *, system="be brief", before=(), after=()):
    return {"messages": [{"role": "system", "content": system}, *before, {"role": "user", "content": user}, *after]}


LEFT, MIDDLE = WAYS


@pytest.mark.parametrize(
    ("max_model_len", "max_tokens", "limit"),
    [(100, 10, 90), (100, 50, 50), (100, 1000, 50), (101, 1000, 51), (1, 5, 1), (8, 0, 8)],
)
def test_the_limit_leaves_room_for_the_answer_but_at_least_half_to_the_prompt(max_model_len, max_tokens, limit):
    assert prompt_limit(max_model_len, max_tokens) == limit


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_that_fits_stays_as_it_is(cuttings, way):
    cutting = cuttings[way, True]
    for values in ({"prompt": "hello"}, chat("hello"), {"prompt_token_ids": [7, 8, 9]}):
        ids = cutting.ids(values)
        rendered, got, _ = cutting.cut(values, len(ids))
        assert got == ids
        assert rendered == cutting.renderer.render(values)


def test_text_is_cut_at_the_left_or_in_the_middle(cuttings):
    values = {"prompt": "0123456789"}
    assert cuttings[LEFT, False].cut(values, 4)[2] == "6789"
    assert cuttings[MIDDLE, False].cut(values, 4)[2] == "0189"
    assert cuttings[MIDDLE, False].cut(values, 5)[2] == "01289"
    assert cuttings[LEFT, False].cut(values, 1)[2] == "9"
    assert cuttings[MIDDLE, False].cut(values, 1)[2] == "0"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("text", ["0123456789", "<s>0123456789"])
def test_a_text_keeps_its_one_bos(cuttings, way, text):
    for limit in range(1, 12):
        ids = cuttings[way, True].cut({"prompt": text}, limit)[1]
        assert len(ids) == min(limit, 11)
        assert ids[0] == BOS
        assert ids.count(BOS) == 1


@pytest.mark.parametrize("way", WAYS)
def test_token_ids_are_cut_as_they_are(cuttings, way):
    ids = cuttings[way, False].cut({"prompt_token_ids": [*range(10, 30)]}, 5)[1]
    assert ids == ([25, 26, 27, 28, 29] if way == LEFT else [10, 11, 12, 28, 29])


def test_a_chat_loses_part_of_its_last_user_message_only(cuttings):
    before = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "answer"}]
    values = chat("0123456789", before=before)
    head = "<|system|>be brief<|end|><|user|>first<|end|><|assistant|>answer<|end|><|user|>"
    tail = "<|end|><|assistant|>"
    fixed = len(cuttings[LEFT, False].ids(values)) - 10
    assert cuttings[LEFT, False].cut(values, fixed + 4)[2] == head + "6789" + tail
    assert cuttings[MIDDLE, False].cut(values, fixed + 5)[2] == head + "01289" + tail
    rendered, ids, text = cuttings[LEFT, False].cut(values, fixed)
    assert (len(ids), text) == (fixed, head + tail)
    assert rendered.text == text
    assert [m["content"] for m in rendered.messages] == ["be brief", "first", "answer", ""]
    assert values == chat("0123456789", before=before)  # the row itself is as it was


@pytest.mark.parametrize("way", WAYS)
def test_a_chat_whose_other_parts_are_too_long_is_a_row_error(cuttings, way):
    values = chat("0123456789")
    fixed = len(cuttings[way, False].ids(values)) - 10
    with pytest.raises(RowError, match=f"{fixed} tokens without its last user message, more than {fixed - 1}") as caught:
        cuttings[way, False].cut(values, fixed - 1)
    assert caught.value.code == "prompt_too_long"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("messages", [[{"role": "system", "content": "long " * 9}], [{"role": "user", "content": ""}]])
def test_a_chat_without_a_user_message_to_cut_is_a_row_error(cuttings, way, messages):
    with pytest.raises(RowError, match="no user message to cut"):
        cuttings[way, False].cut({"messages": messages}, 2)


@pytest.mark.parametrize("way", WAYS)
def test_a_user_message_before_the_assistants_last_word_is_the_one_to_cut(cuttings, way):
    values = chat("x" * 50, after=[{"role": "assistant", "content": "Sure"}])
    _, ids, text = cuttings[way, False].cut(values, 40)
    assert len(ids) == 40
    assert text.startswith("<|system|>be brief<|end|><|user|>x")
    assert text.endswith("<|assistant|>Sure")


@pytest.mark.parametrize("way", WAYS)
def test_the_first_of_several_turns_is_cut_and_the_others_stay(cuttings, way):
    rendered, ids, text = cuttings[way, False].cut({"turns": ["x" * 50, "second"]}, 20)
    assert len(ids) == 20
    assert rendered.turns == ("x" * 50, "second")
    assert rendered.messages == ({"role": "user", "content": "x" * 17},)
    assert rendered.text == text


TEXTS = st.text(st.sampled_from("aé日😀 \n") | st.characters(codec="utf-8"), min_size=1, max_size=40).filter(
    lambda t: HALF not in t
)


@settings(deadline=None, max_examples=80)
@given(content=TEXTS, room=st.integers(0, 60), way=st.sampled_from(WAYS), bos=st.booleans())
def test_a_cut_chat_is_within_its_limit_whole_in_its_frame_and_without_halves_of_characters(cuttings, content, room, way, bos):
    cutting = cuttings[way, bos]
    empty, full = chat(""), chat(content)
    fixed = len(cutting.ids(empty))
    _, ids, text = cutting.cut(full, fixed + room)
    assert len(ids) <= fixed + room
    assert HALF not in text
    head, tail = "<|system|>be brief<|end|><|user|>", "<|end|><|assistant|>"
    assert text.startswith(head) and text.endswith(tail)
    kept = text[len(head) : len(text) - len(tail)]
    if way == LEFT:
        assert content.endswith(kept)
    else:
        assert any(content.startswith(kept[:i]) and content.endswith(kept[i:]) for i in range(len(kept) + 1))
    if len(content.encode()) > room:
        assert len(ids) > fixed + room - 4 * (1 + (way == MIDDLE))  # no more is lost than the halves of characters


@settings(deadline=None, max_examples=80)
@given(content=TEXTS, limit=st.integers(9, 60), way=st.sampled_from(WAYS), bos=st.booleans())
def test_a_cut_text_is_within_its_limit_and_keeps_its_bos(cuttings, content, limit, way, bos):
    whole = cuttings[way, bos].ids({"prompt": content})
    _, ids, _ = cuttings[way, bos].cut({"prompt": content}, limit)
    assert len(ids) <= min(limit, len(whole))
    assert (ids[0] == BOS) == bos


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bos", [False, True])
def test_a_cut_text_has_no_halves_of_characters(cuttings, way, bos):
    for limit in range(4, 20):
        _, ids, text = cuttings[way, bos].cut({"prompt": "é日😀" * 9}, limit)
        assert len(ids) <= limit
        assert HALF not in text


class Merging:
    """A tokenizer whose pieces join to other tokens than they came from: a pair of equal characters is one token, and what is
    decoded from the middle of a run splits anew."""

    bos_token = eos_token = bos_token_id = eos_token_id = None

    def __call__(self, texts, add_special_tokens):
        return {"input_ids": [self._ids(text) for text in texts]}

    def _ids(self, text):
        ids, i = [], 0
        while i < len(text):
            pair = i + 1 < len(text) and text[i] == text[i + 1]
            ids.append(ord(text[i]) + (128 if pair else 0))
            i += 1 + pair
        return ids

    def decode(self, ids, **_):
        return "".join(chr(i % 128) * (1 + i // 128) for i in ids)

    def apply_chat_template(self, messages, **_):
        return "".join(f"<{m['content']}>" for m in messages)


@settings(deadline=None)
@given(content=st.text("ab", min_size=1, max_size=40), room=st.integers(0, 40), way=st.sampled_from(WAYS))
def test_other_tokens_at_the_seams_never_lead_above_the_limit(content, room, way):
    tokenizer = Merging()
    renderer, prompt_tokenizer = PromptRenderer(tokenizer), PromptTokenizer(tokenizer, 256)
    rendered = renderer.render({"messages": [{"role": "user", "content": content}]})
    (ids,) = prompt_tokenizer.tokenize([rendered])
    cut, got = Truncator(renderer, prompt_tokenizer, way).cut(rendered, ids, 2 + room)
    assert len(got) <= 2 + room
    assert isinstance(cut, Rendered)
    assert prompt_tokenizer.encode_template_text(cut.text) == got
