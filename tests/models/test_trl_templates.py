"""The chat templates of TRL, which mark what an assistant says: the same tokens are trained here."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from covey.models.policy import Policy
from covey.models.template import template_facts
from covey.models.tiny import build_model, build_tokenizer
from covey.proof.check_template import LOOK_UP
from covey.sampling.prompts import encode_examples
from covey.sampling.tools.readable import written_call
from covey.tasks.examples import Example
from covey.types import Problem
from covey_verify.errors import DataError
from covey_verify.types import Messages

if (found := find_spec("trl")) is None:
    pytest.skip("trl, whose templates are compared with, is not installed", allow_module_level=True)
FOLDER = Path(str(found.submodule_search_locations[0])) / "chat_templates"
NAMES = sorted(p.stem.removesuffix("_training") for p in FOLDER.glob("*_training.jinja"))
CONTROL = re.compile(
    r"<\|[^|<>\s{}]*\|?>|<[a-z_]+\|>|<｜[^｜<>\s]*｜>|</?(?:start_of_turn|end_of_turn|think|tool_call)>"
)
OF_IMAGES = ("idefics3", "llava_next", "smolvlm")
ASKED: Messages = [{"role": "user", "content": "some question"}]
CONVERSATIONS: dict[str, Messages] = {
    "one": [{"role": "assistant", "content": "some answer"}],
    "the thoughts separately": [
        {"role": "assistant", "content": "some answer", "reasoning_content": "some thought"}
    ],
}


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A small tokenizer that knows the control words of a template."""
    source = (FOLDER / f"{name}.jinja").read_text()
    tokenizer = build_tokenizer(["user assistant some question some answer some thought 1+2=3"] * 3, 500)
    words = sorted(set(CONTROL.findall(source)) - set(tokenizer.get_vocab()))
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    tokenizer.bos_token = "<|im_start|>" if "bos_token" in source else None
    tokenizer.chat_template = source
    return tokenizer


def told(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("name", [n for n in NAMES if n not in OF_IMAGES])
def test_what_is_trained_is_what_trl_marks_or_is_refused(name: str, kind: str) -> None:
    """Up to line breaks, ends and marks of thoughts that stand in one of the prompts."""
    tokenizer = tokenizer_of(name)
    policy = Policy(build_model(tokenizer, 0, context=2048, hidden=32, layers=1), tokenizer)
    said = CONVERSATIONS[kind]
    config: Any = SimpleNamespace(data=SimpleNamespace(long_prompts="error"))
    try:
        (found,) = encode_examples(
            policy, [Example("answer", Problem("row 1", ASKED), (said,), (1.0,))], config
        )
    except DataError as error:
        assert "row 1: " in str(error)
        return
    (answer,) = found.answers
    ours = told(tokenizer.decode(answer.tokens[answer.trained]))
    marked = tokenizer.apply_chat_template(
        [*ASKED, *said],
        chat_template=(FOLDER / f"{name}_training.jinja").read_text(),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    pairs = zip(marked["input_ids"], marked["assistant_masks"], strict=True)
    theirs = told(tokenizer.decode([token for token, own in pairs if own]))
    prompt, facts = told(tokenizer.decode(found.tokens)), template_facts(tokenizer)
    end = tokenizer.decode([policy.end_id if facts.turn_end is None else facts.turn_end])
    assert ours.endswith(end)
    # GLM's turns end where the next one begins: here with the tokenizer's end, at TRL with that beginning.
    ours, theirs = (text.partition(end)[0].removesuffix("<|user|>") for text in (ours, theirs))
    assert theirs.endswith(ours) or ours.endswith(theirs)
    assert (prompt + ours).endswith(theirs) or (prompt + theirs).endswith(ours)
    marks = facts.marks
    whole = prompt.rpartition("question")[2] + ours
    opened, closed = (whole.count(told(mark)) for mark in (marks.open, marks.close))
    assert opened == closed <= 1 or marks.answer


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jinja")), ids=lambda p: p.stem)
def test_calls_that_a_template_shows_are_read_back(path: Path) -> None:
    if path.stem.endswith("_training") or path.stem in OF_IMAGES:
        pytest.skip("a variant for training, or of images")
    tokenizer = tokenizer_of(path.stem)
    ends = [n for n in (tokenizer.eos_token_id, template_facts(tokenizer).turn_end) if n is not None]
    made = SimpleNamespace(tokenizer=tokenizer, end_ids=ends)
    written = written_call(made, {"tools": [LOOK_UP]}, [LOOK_UP])
    assert written.is_readable or not written.text
