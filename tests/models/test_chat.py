"""Chats: what a row and the config give the model's template arrives there, or is said not to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import covey
from covey.cli import main
from covey.commands.inference import evaluate_once
from covey.config.load import load_config
from covey.models.tiny import CHAT_TEMPLATE
from covey.system.console import RunConsole
from covey_verify.errors import ConfigError, CoveyError, DataError
from tests.models.chat_models import WITH_TOOLS, model_with
from tests.training.runs import start

ADD = {"type": "function", "function": {"name": "add", "description": "a sum", "parameters": {}}}
ROW: dict[str, Any] = {"prompt": [{"role": "user", "content": "1+1="}], "completion": "2"}


def varied(completion: Any) -> float:
    """Differs between completions, so that every run learns."""
    return float(sum(map(ord, str(completion))))


def prompts_of(
    tmp_path: Path, row: dict[str, Any], template: str | None = WITH_TOOLS, **settings: Any
) -> str:
    """What the model reads of a row in training, as the rollout log has it."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    model = model_with(tmp_path / "model", template)
    data = {"train": str(tmp_path / "rows.jsonl"), "test": str(tmp_path / "rows.jsonl"), **settings}
    # The run's own data settings are for a built-in task.
    data = {"task": None, **data}
    start(tmp_path / "run", model=str(model), data=data, train={"steps": 1}, rewards=(varied,))
    with np.load(tmp_path / "run" / "rollouts" / "step_000001.npz") as arrays:
        tokens = arrays["prompt_tokens"][: arrays["prompt_ends"][0]]
    return AutoTokenizer.from_pretrained(model).decode(tokens)


@pytest.mark.parametrize("tools", [[ADD], json.dumps([ADD])], ids=["list", "text"])
def test_tools_of_a_row_reach_the_model(tmp_path: Path, tools: Any) -> None:
    assert "a sum" in prompts_of(tmp_path, {**ROW, "tools": tools})


def test_template_arguments_reach_the_model_and_a_row_wins(tmp_path: Path) -> None:
    said = {"chat_template_kwargs": {"enable_thinking": False}}
    assert "no<|im_start|>assistant" in prompts_of(tmp_path / "a", ROW, **said)
    row = {**ROW, "chat_template_kwargs": {"enable_thinking": True}, "documents": [{"text": "a book"}]}
    seen = prompts_of(tmp_path / "b", row, **said)
    assert "no<|im_start|>" not in seen
    assert "a book" in seen


@pytest.mark.parametrize(
    "content", [[{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}], ["1+1="]]
)
def test_parts_of_text_reach_a_template_as_their_text(tmp_path: Path, content: Any) -> None:
    whole = prompts_of(tmp_path / "a", ROW)
    assert prompts_of(tmp_path / "b", {**ROW, "prompt": [{"role": "user", "content": content}]}) == whole


def test_the_same_in_supervised_learning_evaluation_and_sampling(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", WITH_TOOLS)
    lengths = {}
    for name, row in (("plain", ROW), ("tools", {**ROW, "tools": [ADD] * 40})):
        # Forty tools do not fit the context: whatever reads them says so.
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        settings = {
            "model": str(model),
            "data": {"train": tmp_path / f"{name}.jsonl", "test": tmp_path / f"{name}.jsonl"},
            "rewards": [lambda completion: 1.0],
            "rollout": {"max_tokens": 4},
        }
        lengths[name] = load_config(values=settings)
    evaluate_once(lengths["plain"], RunConsole(quiet=True))
    with pytest.raises(DataError, match="prompts are too long: with rollout"):
        evaluate_once(lengths["tools"], RunConsole(quiet=True))
    data = {"task": None, "train": tmp_path / "tools.jsonl"}
    with pytest.raises(DataError, match="exceed the model"):
        start(tmp_path / "run", model=str(model), method="sft", data=data, rewards=(varied,))
    asked = {"prompts": ["1+1="], "max_tokens": 2, "chat": True}
    assert covey.sample(str(model), **asked)
    with pytest.raises(CoveyError):
        covey.sample(str(model), **asked, chat_template_kwargs={"tools": ["no schema"]})


@pytest.mark.parametrize(
    ("row", "settings", "says"),
    [
        ({**ROW, "tools": [ADD]}, {}, "ignores tools"),
        (ROW, {"chat_template_kwargs": {"enable_thinkng": False}}, "ignores enable_thinkng"),
        ({"prompt": "1+1=", "tools": [ADD]}, {}, "plain text without a chat template"),
        ({"prompt": "1+1="}, {"chat_template_kwargs": {"x": 1}}, "text prompts go without a template"),
        ({"prompt": [*ROW["prompt"], {"role": "assistant", "content": "It is"}]}, {}, "begins another one"),
    ],
)
def test_what_the_model_is_not_told_of_is_said_once(
    tmp_path: Path, capsys, row: dict[str, Any], settings: dict[str, Any], says: str
) -> None:
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 5)
    model = model_with(tmp_path / "model", CHAT_TEMPLATE.replace("in tools or []", "in []"))
    data = {"train": tmp_path / "rows.jsonl", "test": tmp_path / "rows.jsonl", **settings}
    values = {"model": str(model), "data": data, "rewards": [lambda completion: 1.0]}
    evaluate_once(load_config(values={**values, "rollout": {"max_tokens": 2}}), RunConsole())
    assert capsys.readouterr().out.count(says) == 1


def test_a_prompt_to_sample_is_one_text_of_whole_characters() -> None:
    """Messages were taken for the text of the user's message; half a character ended in a traceback."""
    with pytest.raises(ConfigError, match="is a list, not a text"):
        covey.sample("tiny", [[{"role": "user", "content": "hi"}]], chat=True)  # type: ignore[list-item]
    with pytest.raises(DataError, match=r"prompts: .*half of a surrogate pair \(.ud83d\)"):
        covey.sample("tiny", ["broken \ud83d emoji"])


def test_a_model_without_a_template_is_a_mistake_with_a_remedy(tmp_path: Path, capsys) -> None:
    with pytest.raises(
        ConfigError,
        match=r"model: the prompt is a chat, but this model has no chat template.*chat_template.jinja",
    ):
        prompts_of(tmp_path, ROW, template=None)
    assert main(["sample", str(tmp_path / "model"), "1+1=", "--chat"]) == 2
    assert "no chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "settings", "says"),
    [
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "url": "x.png"}]}]},
            {},
            "rows.jsonl:1: 'prompt' must be text or a list of {role, content} messages, each content",
        ),
        ({"prompt": [{"role": "user", "content": True}]}, {}, "each content text or parts of text"),
        ({**ROW, "tools": ["add"]}, {}, "rows.jsonl:1: 'tools' goes to the chat template"),
        ({**ROW, "tools": "[{"}, {}, "rows.jsonl:1: tools: not valid JSON"),
        ({**ROW, "chat_template_kwargs": 3}, {}, "chat_template_kwargs must be an object"),
        (ROW, {"chat_template_kwargs": {"tokenize": False}}, "tokenize is not a variable of the template"),
        (
            {"prompt": [{"role": "user", "content": "x"}]},
            {"system": "be brief"},
            "rows.jsonl:1: the chat temp",
        ),
    ],
)
def test_mistakes_name_the_row(tmp_path: Path, row: dict[str, Any], settings: Any, says: str) -> None:
    refuses_system = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    with pytest.raises(CoveyError) as caught:
        prompts_of(tmp_path, row, refuses_system + WITH_TOOLS, **settings)
    assert says in str(caught.value)
