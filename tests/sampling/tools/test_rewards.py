"""What rewards learn of calls: those that the run has read, in whatever form its model writes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.commands.scoring import score_file
from covey.models.policy import Policy
from covey.rewards.loading import load_rewards
from covey.rewards.reading import ReplyReader
from covey.sampling.tools.reader import reader_by
from covey.types import Completion, Group, Problem, Transcript
from covey_verify.calls.forms import FORMS
from covey_verify.errors import DataError
from tests.conftest import policy_of
from tests.sampling.tools.schema import SCHEMA

XML, GLM, MISTRAL, LLAMA, GEMMA, LFM2, HARMONY, DEEPSEEK, _ = (form.shown for form in FORMS)
WANTED = [{"name": "look_up", "arguments": {"word": "covey", "most": 2}}]
RIGHT = {
    "tags": ("", '<tool_call>{"name": "look_up", "arguments": {"word": "covey", "most": 2.0}}</tool_call>'),
    "a list": ("", '<tool_call>[{"name": "look_up", "arguments": {"word": "covey", "most": 2}}]</tool_call>'),
    "functions": (
        XML,
        "<tool_call><function=look_up><parameter=word>covey</parameter><parameter=most>2</parameter></function>\
</tool_call>",
    ),
    "pairs": (
        GLM,
        "<tool_call>look_up<arg_key>word</arg_key><arg_value>covey</arg_value><arg_key>most</arg_key>\
<arg_value>2</arg_value></tool_call>",
    ),
    "mistral": (MISTRAL, '[TOOL_CALLS]look_up[ARGS]{"word": "covey", "most": 2}'),
    "gemma": (GEMMA, '<|tool_call>call:look_up{most:2,word:<|"|>covey<|"|>}<tool_call|>'),
    "lfm2": (LFM2, "<|tool_call_start|>[look_up(word='covey', most=2.0)]<|tool_call_end|>"),
    "harmony": (HARMONY, 'to=functions.look_up<|channel|>commentary<|message|>{"word": "covey", "most": 2}'),
    "deepseek": (
        DEEPSEEK,
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{"word": "covey", "most": 2}'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ),
    "llama": (LLAMA, '{"name": "look_up", "parameters": {"word": "covey", "most": 2}}'),
}


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Policy:
    found = policy_of("qwen3")
    monkeypatch.setattr(found.tokenizer, "chat_template", found.tokenizer.chat_template)
    return found


def judged(problem: Problem, texts: list[str], policy: Policy | None = None, turns: Any = ()) -> Group:
    rewards = load_rewards(["tool_calls"], Path())
    rewards = replace(rewards, reader=ReplyReader() if policy is None else reader_by(policy))
    completions = []
    for text in texts:
        ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"] if policy else [1]
        tokens = np.array([*ids, 2])
        plain = policy.decode(ids) if policy else text
        one = Completion(tokens, np.zeros(len(tokens), np.float32), plain, "stop")
        completions.append(replace(one, transcript=Transcript(turns)))
    return rewards.score_group(problem, np.array([1]), completions, strict=True)


ASKED = [{"role": "user", "content": "?"}]


@pytest.mark.parametrize("form", RIGHT)
def test_a_right_call_is_paid_in_each_form(policy: Policy, form: str) -> None:
    mark, text = RIGHT[form]
    policy.tokenizer.chat_template = "{# " + mark + " #}{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = Problem("c", ASKED, {"tool_calls": WANTED}, {"tools": [SCHEMA]})
    wrong = text.replace("covey", "cove")
    assert judged(chat, [text, wrong], policy).rewards.tolist() == [1.0, 0.0]
    if form != "functions" and form != "pairs":  # whose values are texts to whoever knows no schema
        assert judged(Problem("p", "?", {"tool_calls": WANTED}), [text, wrong]).rewards.tolist() == [1.0, 0.0]


def test_calls_that_were_answered_count_turn_by_turn() -> None:
    def said(role: str, *calls: Any) -> dict[str, Any]:
        return {
            "role": role,
            "content": "as its template writes it",
            **({"tool_calls": calls} if calls else {}),
        }

    call = {"type": "function", "function": WANTED[0]}
    problem = Problem("p", ASKED, {"tool_calls": WANTED * 2})
    turns = (said("assistant", call), said("tool"), said("assistant", call), said("tool"), said("assistant"))
    assert judged(problem, ["text"], turns=turns).rewards.tolist() == [1.0]
    broken = {"type": "function", "function": {"name": "", "arguments": {}}, "error": "this is no JSON"}
    group = judged(
        problem, ["text"], turns=(said("assistant", call, broken), said("tool"), said("assistant"))
    )
    (score,) = group.components["tool_calls"].scores
    assert (score.value, score.status, score.detail) == (0.0, "unparsable", "this is no JSON")


def test_a_call_in_reasoning_that_never_ended_is_none(policy: Policy) -> None:
    text = "<think>so " + RIGHT["tags"][1]
    for group in (judged(Problem("c", ASKED, {"tool_calls": WANTED}), [text], policy),):
        assert group.components["tool_calls"].scores[0].status == "no_answer"
        assert group.rewards.tolist() == [0.0]


def test_a_function_of_the_user_gets_the_calls(policy: Policy) -> None:
    def called(completion: Any, turns: list[dict[str, Any]]) -> float:
        return float(turns[0]["tool_calls"][0]["function"]["name"] == "look_up")

    rewards = load_rewards([called], Path())
    completion = Completion(np.array([1]), np.zeros(1, np.float32), RIGHT["tags"][1], "stop")
    assert rewards.score_group(Problem("p", "?"), np.array([1]), [completion]).rewards.tolist() == [1.0]


def test_a_file_may_have_completions_as_messages_with_calls(tmp_path: Path) -> None:
    """A message whose content is null, as servers return calls, ended in a traceback."""
    call = {
        "type": "function",
        "function": {"name": "look_up", "arguments": json.dumps(WANTED[0]["arguments"])},
    }
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    rows = [[said], [said, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "It is 3."}]]
    file = tmp_path / "said.jsonl"

    def written(*completions: object) -> Path:
        made = ({"prompt": ASKED, "completion": c, "tool_calls": WANTED} for c in completions)
        file.write_text("".join(json.dumps(row) + "\n" for row in made))
        return file

    _, means = score_file(written(*rows, "no call"), ["tool_calls"])
    assert means["tool_calls"] == pytest.approx(2 / 3)
    for wrong in (None, [], [3], [{"role": "tool", "content": "3"}]):
        with pytest.raises(DataError, match=r"said\.jsonl:1: 'completion' must be"):
            score_file(written(wrong), ["tool_calls"])
