"""Why rows end and what their text is, on forced tokens: stop strings across tokens, bytes of one character, EOS last."""

from __future__ import annotations

import pytest

from pagedgen.request import Request, Sequence
from pagedgen.sampling.detokenize import IncrementalDetokenizer, decode
from pagedgen.sampling.stops import StopChecker
from pagedgen.sampling_params import SamplingParams

EOS = 2
HARD_TEXT = '비빔밥 👩🏾‍🚀 图书馆 ü\nUser: "hi"  two spaces\t—'


def byte_fallback_tokenizer():
    """A SentencePiece-like tokenizer: '▁' for spaces, single bytes for what is not in the vocabulary."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for token in ("▁", "▁Paris", "s", "of", "▁of", ".", "a", "b"):
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def byte_level(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model("llama"))


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request, byte_level):
    return byte_level if request.param == "byte_level" else byte_fallback_tokenizer()


def ids_of(tokenizer, text):
    if tokenizer.get_vocab().get("▁Paris"):
        return [3 + b for b in text.encode()]
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def force(tokenizer, ids, **settings):
    """Feed ids one by one until the row ends or they do; return the sequence."""
    settings.setdefault("max_tokens", len(ids))
    params = SamplingParams(**settings)
    sequence = Sequence(Request(0, [5], params, params.max_tokens, frozenset([EOS]), 0))
    checker = StopChecker(tokenizer)
    for token in ids:
        sequence.token_ids.append(token)
        if checker.check(sequence):
            break
    return sequence


def test_text_is_the_decode_of_all_ids(tokenizer):
    ids = ids_of(tokenizer, HARD_TEXT)
    done = force(tokenizer, ids)
    assert done.text == HARD_TEXT == decode(tokenizer, ids, skip_special_tokens=True)
    assert "\ufffd" not in done.text
    assert done.finish_reason == "length"


def test_a_cut_character_shows_as_the_replacement_sign(byte_level):
    """The tail rule: max_tokens inside a character gives U+FFFD, as the tokenizer's own decode does; ids stay complete."""
    ids = ids_of(byte_level, "ab 图")[:-1]
    done = force(byte_level, ids)
    assert done.text == decode(byte_level, ids, skip_special_tokens=True)
    assert done.text.startswith("ab ")
    assert done.generated_token_ids == ids


def test_incremental_pieces_add_up(tokenizer):
    ids = ids_of(tokenizer, HARD_TEXT)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True)
    pieces = [detokenizer.feed(ids[: n + 1]) for n in range(len(ids))]
    assert "".join(pieces) == HARD_TEXT
    assert all("\ufffd" not in p for p in pieces)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["User:", "r\nUs", "bar", "f", "\n", "🤖", "never"])
def test_stop_strings_end_text_exactly(tokenizer, stop, include):
    text = "foo bar\nUser: hi 🤖 more"
    ids = ids_of(tokenizer, text)
    done = force(tokenizer, ids, stop=[stop], include_stop_str_in_output=include)
    if stop == "never":
        assert (done.text, done.finish_reason, done.stop_reason) == (text, "length", None)
    else:
        end = text.index(stop) + (len(stop) if include else 0)
        assert (done.text, done.finish_reason, done.stop_reason) == (text[:end], "stop", stop)
        assert len(done.generated_token_ids) < len(ids)


def test_stop_before_an_incomplete_character_is_found_at_the_end(byte_level):
    """Text that waits for a character's last byte is still searched when the row ends."""
    ids = [*ids_of(byte_level, "ab END 图")[:-1], EOS]
    done = force(byte_level, ids, stop=["END"], max_tokens=99)
    assert (done.text, done.finish_reason, done.stop_reason) == ("ab ", "stop", "END")


def test_earliest_of_several_stops_wins(byte_level):
    done = force(byte_level, ids_of(byte_level, "one two three"), stop=["three", "two", "wo"])
    assert (done.text, done.stop_reason) == ("one ", "two")


def test_min_tokens_exempts_what_came_before(byte_level):
    ids = ids_of(byte_level, "x.y.z.")
    assert force(byte_level, ids, stop=["."]).text == "x"
    done = force(byte_level, ids, stop=["."], min_tokens=4)
    assert (done.text, done.finish_reason) == ("x.y", "stop")


@pytest.mark.parametrize(
    ("ids", "settings", "want"),
    [
        ([10, 11, EOS, 12], {"max_tokens": 8}, ("stop", None, 3)),
        ([10, 42, 12], {"max_tokens": 8, "stop_token_ids": [42]}, ("stop", 42, 2)),
        ([10, 11, 12, 13], {"max_tokens": 3}, ("length", None, 3)),
        ([10, 11, EOS], {"max_tokens": 3}, ("stop", None, 3)),  # EOS on the last allowed token counts as stop
    ],
)
def test_reasons(byte_level, ids, settings, want):
    done = force(byte_level, ids, **settings)
    assert (done.finish_reason, done.stop_reason, done.num_generated_tokens) == want
    text_ids = done.generated_token_ids[:-1] if want[0] == "stop" else done.generated_token_ids
    assert done.text == decode(byte_level, text_ids, skip_special_tokens=True)


def test_every_stop_and_length_against_a_naive_search(tokenizer):
    """All substrings as stops at all lengths against searching the full text after each token."""
    text = "a🚀b\n\nUser图"
    ids = ids_of(tokenizer, text)
    stops = sorted({text[i:j] for i in range(len(text)) for j in range(i + 1, min(i + 4, len(text)) + 1)})
    for stop in stops:
        done = force(tokenizer, ids, stop=[stop])
        naive = next(n for n in range(1, len(ids) + 1) if stop in decode(tokenizer, ids[:n], skip_special_tokens=True))
        assert done.text == text[: text.index(stop)]
        assert done.num_generated_tokens == naive
