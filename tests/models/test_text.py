"""What a model wrote as text: decode(prompt + completion) less decode(prompt), its end left out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from covey.models.policy import Policy
from covey.models.text import FaithfulText, continuation_ids
from covey.models.tiny import build_model
from covey.rewards.ends import token_ends
from covey.sampling.base import Request, SamplingParams
from covey.sampling.local import LocalSampler
from tests.models.tokenizers import MADE, WORDS, byte_fallback, byte_level


@pytest.mark.parametrize("kind", MADE)
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=6), st.lists(st.integers(0, 10**6), max_size=8))
def test_it_is_what_a_completion_adds_to_its_prompt(kind: str, words: list[str], drawn: list[int]) -> None:
    tokenizer = MADE[kind]
    prompt = tokenizer("".join(words))["input_ids"]
    ids = [n % len(tokenizer) for n in drawn]
    silent = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    said = ids[: next((n for n in range(len(ids), 0, -1) if ids[n - 1] not in silent), 0)]
    whole, before = (tokenizer.decode(t, clean_up_tokenization_spaces=False) for t in (prompt + said, prompt))
    text = FaithfulText(tokenizer, [tokenizer.eos_token_id])
    if whole.startswith(before):  # else a broken character has changed the prompt's own text
        assert text(ids) == whole.removeprefix(before)
    ends = token_ends(ids, text)
    assert ends == sorted(ends)
    assert ends[-1:] in ([], [len(text(ids))]) or text(ids).endswith("\ufffd")


@pytest.mark.parametrize("kind", MADE)
def test_forms_of_special_tokens_and_first_spaces_are_kept(kind: str) -> None:
    tokenizer = MADE[kind]
    text = FaithfulText(tokenizer, [tokenizer.eos_token_id])
    mark, end, pad = (tokenizer.convert_tokens_to_ids(t) for t in ("<mark>", tokenizer.eos_token, "<|pad|>"))
    inner = tokenizer("so", add_special_tokens=False)["input_ids"]
    so = tokenizer.decode(inner)
    assert text([mark, *inner, end, pad]).replace(" ", "") == f"<mark>{so}"
    assert text([*inner, mark, end]).endswith("so<mark>")
    assert text([end]) == text([]) == ""
    assert tokenizer.eos_token in text([*inner, end, *inner]), "an end in the middle was written"


def test_an_answer_gets_no_first_space_from_a_tokenizer_that_lower_cases() -> None:
    """Neither encoding gave `So` back, and the one with a space in front was trained."""
    tokenizer = byte_fallback()
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), backend.normalizer])
    for text, tokens in (("So", ["s", "o"]), (" So", ["▁", "s", "o"])):
        assert tokenizer.convert_ids_to_tokens(continuation_ids(tokenizer, text)) == tokens


def test_padding_with_a_word_leaves_the_word_in_answers() -> None:
    """A tokenizer that pads with its token `1` turned the answer 11 into an empty text."""
    tokenizer = byte_level()
    tokenizer.pad_token = "1"
    one = tokenizer.convert_tokens_to_ids("1")
    assert FaithfulText(tokenizer, [tokenizer.eos_token_id])([one, one, tokenizer.eos_token_id]) == "11"


def test_an_indented_program_keeps_its_first_space() -> None:
    tokenizer = MADE["byte_fallback"]
    ids = tokenizer.convert_tokens_to_ids(["▁▁▁▁", "ret", "u", "r", "n"])
    assert tokenizer.decode(ids) == "   return", "what decoding alone makes of it"
    assert FaithfulText(tokenizer, [2])(ids) == "    return"


def test_a_stop_string_may_be_a_special_token() -> None:
    tokenizer = MADE["byte_level"]
    policy = Policy(build_model(tokenizer, 0, layers=1, hidden=32), tokenizer)
    request = Request(np.array([5, 6]), list(range(400)))
    found = [
        s.completion for s in LocalSampler(policy).sample([request], SamplingParams(24, stop=("<mark>",)))
    ]
    stopped = [c for c in found if c.text.endswith("<mark>")]
    assert len(stopped) > 3
    assert all(c.finish == "stop" and c.text.count("<mark>") == 1 for c in stopped)
    assert sum("<mark>" in c.text for c in found) == len(stopped)
