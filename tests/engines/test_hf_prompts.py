"""From requests to token ids: chat, special tokens, and length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.normalizers import Replace

from daskinfer.engines.hf import Prompt, PromptEncoder
from daskinfer.errors import RowError
from daskinfer.records import FailureKind, Request, SamplingParams
from tests.engines import tiny
from tests.engines.tiny import BOS, END, EOS, VOCAB, make_tokenizer, words

USER, SYSTEM, ASSISTANT = (VOCAB[f"<|{role}|>"] for role in ("user", "system", "assistant"))


def encoder(limit: int | None = 64, *, two: bool = False, **tokenizer: Any) -> PromptEncoder:
    return PromptEncoder(make_tokenizer(**tokenizer), limit, len(VOCAB), encoder_decoder=two)


def chat(limit: int | None = 64) -> PromptEncoder:
    return encoder(limit, template=tiny.TEMPLATE)


def ids(text: str) -> list[int]:
    return [VOCAB[word] for word in text.split()]


def encode(it: PromptEncoder, value: Any, *, raw: bool = False, system: str | None = None, **params: Any) -> Prompt:
    return it.encode(Request(1, value, SamplingParams(**{"max_new_tokens": 4} | params), raw, system))


def refused(it: PromptEncoder, value: Any, **options: Any) -> RowError:
    with pytest.raises(RowError) as caught:
        encode(it, value, **options)
    return caught.value


# ---------------------------------------------------------------- what the model reads


def test_text_is_a_user_message_where_there_is_a_template() -> None:
    prompt = encode(chat(), "w1 w2")
    assert list(prompt.input) == [USER, *ids("w1 w2"), END, ASSISTANT]
    assert prompt.id == 1
    assert list(encode(chat(), "w1", system="w9").input) == [SYSTEM, *ids("w9"), END, USER, *ids("w1"), END, ASSISTANT]
    assert list(encode(chat(), "w1 w2", raw=True).input) == ids("w1 w2")
    assert list(encode(encoder(), "w1 w2").input) == ids("w1 w2")


def test_messages() -> None:
    talk = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": "w2"},
        {"role": "user", "content": "w3"},
    ]
    middle = [USER, *ids("w1"), END, ASSISTANT, *ids("w2"), END, USER, *ids("w3"), END, ASSISTANT]
    assert list(encode(chat(), talk).input) == middle
    assert list(encode(chat(), talk, system="w9").input) == [SYSTEM, *ids("w9"), END, *middle]
    own = [{"role": "system", "content": "w8"}, *talk]
    assert list(encode(chat(), own, system="w9").input) == [SYSTEM, *ids("w8"), END, *middle]
    assert own[0] == {"role": "system", "content": "w8"}


def test_last_message_of_the_assistant_is_continued() -> None:
    talk = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]
    assert list(encode(chat(), talk).input) == [USER, *ids("w1"), END, ASSISTANT, *ids("w2 w3")]


def test_ids_go_as_they_are() -> None:
    it = encoder(bos=True, template=tiny.TEMPLATE)
    assert list(encode(it, [9, BOS, EOS, 10]).input) == [9, BOS, EOS, 10]
    assert list(encode(it, np.array([9, 10])).input) == [9, 10]


def test_no_template() -> None:
    error = refused(encoder(), [{"role": "user", "content": "w1"}])
    assert error.row_kind == FailureKind.WRONG_TYPE
    assert "no chat template" in error.message
    assert "no chat template" in refused(encoder(), "w1", system="w2").message
    assert "system=" in refused(chat(), "w1", system="w2", raw=True).message
    assert "system=" in refused(chat(), [9], system="w2").message


def test_templates_that_refuse_say_why() -> None:
    picky = encoder(template="{{ raise_exception('roles must alternate') }}")
    error = refused(picky, "w1")
    assert error.row_kind == FailureKind.INVALID_ROW
    assert "roles must alternate" in error.message
    assert "chat template" in refused(encoder(template="{{ messages[0].nothing + 'x' }}"), "w1").message


def test_parts_of_text_are_joined_and_others_refused() -> None:
    parts = [{"type": "text", "text": "w1 "}, {"type": "text", "text": "w2"}]
    assert encode(chat(), [{"role": "user", "content": parts}]).input == encode(chat(), "w1 w2").input
    image = [{"type": "image", "url": "x"}, *parts]
    error = refused(chat(), [{"role": "user", "content": image}])
    assert "'image'" in error.message


def test_c09_messages_from_parquet(tmp_path: Path) -> None:
    talks: list[list[dict[str, Any]]] = [
        [{"role": "system", "content": "w1"}, {"role": "user", "content": "w2 w3"}],
        [{"role": "user", "content": "w4"}],
        [
            {"role": "user", "content": "w5", "name": "w6"},
            {"role": "assistant", "content": "w7"},
            {"role": "user", "content": "w8"},
        ],
    ]
    template = tiny.TEMPLATE.replace("{{ m['content'] }}", "{% if m.name %}{{ m.name }} {% endif %}{{ m['content'] }}")
    it = encoder(template=template)
    path = tmp_path / "talks.parquet"
    pd.DataFrame({"messages": talks}).to_parquet(path)
    read = pd.read_parquet(path)["messages"]
    before = json.dumps([[dict(m) for m in talk] for talk in read], default=str)
    assert isinstance(read[0], np.ndarray)
    for talk, stored in zip(talks, read, strict=True):
        assert encode(it, stored).input == encode(it, talk).input
    assert json.dumps([[dict(m) for m in talk] for talk in read], default=str) == before


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("", FailureKind.EMPTY_PROMPT),
        (" \n\t ", FailureKind.EMPTY_PROMPT),
        ([], FailureKind.EMPTY_PROMPT),
        (None, FailureKind.MISSING_PROMPT),
        (7, FailureKind.WRONG_TYPE),
        (b"w1", FailureKind.WRONG_TYPE),
        ("\ud800", FailureKind.INVALID_ROW),
        ([len(VOCAB)], FailureKind.INVALID_ROW),
        ([{"role": "user"}], FailureKind.INVALID_ROW),
    ],
)
def test_c04_what_cannot_be_used(value: Any, kind: str) -> None:
    assert refused(chat(), value).row_kind == kind


def test_c04_text_without_tokens() -> None:
    silent = make_tokenizer(bos=True)
    silent.backend_tokenizer.normalizer = Replace("w1", "")
    error = refused(PromptEncoder(silent, 64, len(VOCAB)), "w1 w1")
    assert error.row_kind == FailureKind.EMPTY_PROMPT


# ---------------------------------------------------------------- beginning of sequence


def test_c12_exactly_one_bos() -> None:
    it = encoder(bos=True, template=tiny.TEMPLATE_WITH_BOS)
    own_template = f"<s> <|user|> {words(3)} <|end|> <|assistant|>"
    for value, raw in (
        ([{"role": "user", "content": words(3)}], False),
        (own_template, True),
        (words(3), True),
        (f"<s> {words(3)}", True),
    ):
        tokens = list(encode(it, value, raw=raw).input)
        assert tokens.count(BOS) == 1, value
        assert tokens[0] == BOS
    assert encode(it, own_template, raw=True).input == encode(it, words(3)).input
    assert BOS not in encode(encoder(), words(3)).input


# ---------------------------------------------------------------- length


@given(st.integers(1, 60), st.integers(0, 50), st.booleans())
@settings(max_examples=200)
def test_c02_prompt_and_answer_fit(tokens: int, new: int, two: bool) -> None:
    limit = 32
    it = ENCODERS[two]
    if new > 0 and (tokens > limit if two else tokens >= limit):
        error = refused(it, words(tokens), max_new_tokens=new)
        assert error.row_kind == FailureKind.TOO_LONG
        assert f"{tokens} tokens" in error.message
        assert f"{limit}" in error.message
        return
    prompt = encode(it, words(tokens), max_new_tokens=new)
    assert len(prompt.input) == tokens
    assert prompt.truncated == 0
    room = prompt.params.max_new_tokens
    if new == 0:
        assert room == 0
    else:
        assert room == min(new, limit if two else limit - tokens) >= 1
    assert prompt.tokens == tokens + room


ENCODERS = {two: encoder(32, two=two) for two in (False, True)}


def test_c19_no_limit_is_no_limit() -> None:
    prompt = encode(encoder(None), words(5000), max_new_tokens=900)
    assert (len(prompt.input), prompt.params.max_new_tokens) == (5000, 900)


@pytest.mark.parametrize("new", [4, 900])
def test_c19_raw_text_is_cut_from_the_side_asked_for(new: int) -> None:
    it = encoder(32, bos=True)
    text = words(100)
    kept = 32 - min(new, 16) - 1
    left = encode(it, text, raw=True, truncate="left", max_new_tokens=new)
    right = encode(it, text, raw=True, truncate="right", max_new_tokens=new)
    assert list(left.input) == [BOS, *ids(text)[-kept:]]
    assert list(right.input) == [BOS, *ids(text)[:kept]]
    assert left.truncated == right.truncated == 100 - kept
    assert left.params.max_new_tokens == min(new, 16)
    assert list(encode(it, ids(text), truncate="left", max_new_tokens=new).input) == ids(text)[-kept - 1 :]


def test_c19_a_prompt_that_fits_is_never_cut() -> None:
    for truncate in (None, "left", "right"):
        prompt = encode(encoder(32), words(31), max_new_tokens=900, truncate=truncate)
        assert (len(prompt.input), prompt.truncated, prompt.params.max_new_tokens) == (31, 0, 1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_c19_of_a_chat_only_the_last_user_message_is_cut(side: str) -> None:
    talk = [
        {"role": "system", "content": "w1 w2"},
        {"role": "user", "content": "w3"},
        {"role": "assistant", "content": "w4"},
        {"role": "user", "content": words(100)},
    ]
    prompt = encode(chat(40), talk, truncate=side)
    tokens = list(prompt.input)
    head = [SYSTEM, *ids("w1 w2"), END, USER, *ids("w3"), END, ASSISTANT, *ids("w4"), END, USER]
    assert len(tokens) == 36
    assert tokens[: len(head)] == head
    assert tokens[-2:] == [END, ASSISTANT]
    content = tokens[len(head) : -2]
    assert content == (ids(words(100))[-len(content) :] if side == "left" else ids(words(100))[: len(content)])
    assert prompt.truncated == 100 - len(content)
    assert talk[-1]["content"] == words(100)


def test_c19_nothing_left_to_cut() -> None:
    system = [{"role": "system", "content": words(50)}, {"role": "user", "content": words(50)}]
    error = refused(chat(40), system, truncate="left")
    assert error.row_kind == FailureKind.TOO_LONG
    assert "40" in error.message
    no_user = [{"role": "system", "content": words(50)}]
    assert refused(chat(40), no_user, truncate="left").row_kind == FailureKind.TOO_LONG
    tight = encoder(2, bos=True)
    assert refused(tight, words(5), truncate="left").row_kind == FailureKind.TOO_LONG


def test_c19_a_cut_text_may_have_other_tokens() -> None:
    tokenizer: Any = make_tokenizer(template=tiny.TEMPLATE)
    decode = tokenizer.decode
    tokenizer.decode = lambda part: f"{decode(part)} w1 w1"  # as where a word is cut in the middle
    prompt = encode(PromptEncoder(tokenizer, 40, len(VOCAB)), words(100), truncate="right")
    assert len(prompt.input) == 36
    assert prompt.truncated == 103 - 36


def test_c60_no_warning_about_the_tokenizers_own_limit() -> None:
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 5
    assert len(encode(PromptEncoder(tokenizer, 64, len(VOCAB)), words(20)).input) == 20
    assert tokenizer.deprecation_warnings == {}


def test_special_tokens_that_cannot_be_told_from_the_text() -> None:
    tokenizer = make_tokenizer()
    plain = tokenizer.encode
    tokenizer.encode = lambda text, **how: plain(text, **how) if how else [BOS, EOS]
    assert list(encode(PromptEncoder(tokenizer, 64, len(VOCAB)), "w1").input) == ids("w1")


def test_origin_and_parameters_travel() -> None:
    params = SamplingParams(max_new_tokens=3, temperature=0.5, seed=9)
    prompt = chat().encode(Request(7, "w1", params, origin=42))
    assert (prompt.id, prompt.row, prompt.params) == (7, 42, params)
