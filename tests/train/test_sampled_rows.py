"""What a stage has sampled is what the next one trains: the same ids, behind the ids of the same prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.models.test_text import MADE
from tests.train.test_runs import start
from transformers import PreTrainedTokenizerBase

from covey.models.tiny import CHAT_TEMPLATE, build_model
from covey.prompts import Prompted
from covey.runs.rollouts import read_rollouts, recorded_steps
from covey.training import given
from covey.training.given import Lesson
from covey.training.run import Run

STOP = [*"0123456789aeiouxr+:=", "<mark>"]
"""A model that has learned nothing ends what it writes too."""
SETTINGS: dict[str, dict[str, Any]] = {
    "text": {},
    "a worked column": {"completion": "gold"},
    "worked columns": {"completion": "<think>{why}</think>{gold}"},
    "a template": {"template": "Q: {prompt} A:"},
    "a chat": {"chat": True, "system": "Be brief.", "template": "Q: {prompt}", "prompt": "question"},
    "a name": {"prompt": "question", "answer": "gold", "columns": {"reason": "why"}},
}


def folder_of(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    tokenizer.chat_template = CHAT_TEMPLATE
    build_model(tokenizer, 0, layers=1, hidden=32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def odd(completion: Any) -> float:
    """Half of all texts, whatever they say."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return sum(map(ord, text)) % 2


def sampled_in(folder: Path) -> set[tuple[tuple[int, ...], ...]]:
    """(ids of the prompt, ids of the completion) of all that was sampled."""
    found = set()
    for step in recorded_steps(folder):
        log = read_rollouts(folder, step)
        ends = [0, *log.arrays["prompt_ends"].tolist()]
        for number, places in enumerate(log.groups.values()):
            prompt = log.arrays["prompt_tokens"][ends[number] : ends[number + 1]]
            for place in places:
                found.add((tuple(prompt.tolist()), tuple(log.of_completion(place)["tokens"].tolist())))
    return found


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Prompted]:
    """What loops over given examples train, put down here."""
    seen: list[Prompted] = []
    train = given.train

    def noted(run: Run, lesson: Lesson) -> None:
        seen.extend(run.train_set)
        train(run, lesson)

    monkeypatch.setattr(given, "train", noted)
    return seen


def config(model: Path, file: Path, data: dict[str, Any], stages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": str(model),
        "data": {"task": None, "train": str(file), "test": None, **data},
        "rewards": [f"{__file__}:odd"],
        "rollout": {"group_size": 8, "prompts_per_step": 4, "max_tokens": 16, "stop": STOP},
        "train": {"steps": 1, "batch_size": 4},
        "eval": {"every": 0},
        "stages": stages,
    }


def asked(folder: Path, name: str) -> Path:
    rows = [{name: f"{a}+1=", "gold": str(a + 1), "why": "so it is"} for a in range(4)]
    (file := folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(
    ("kind", "settings", "method", "learns"),
    [
        ("byte_level", "text", "rejection_sampling", "sft"),
        ("byte_level", "a worked column", "rejection_sampling", "sft"),
        ("byte_fallback", "worked columns", "rejection_sampling", "sft"),
        ("metaspace", "a name", "rejection_sampling", "sft"),
        ("byte_level", "a chat", "rejection_sampling", "sft"),
        ("byte_fallback", "a template", "pairs", "dpo"),
        ("byte_level", "a chat", "pairs", "kto"),
    ],
)
def test_the_next_stage_trains_the_ids_that_were_sampled(
    tmp_path: Path, trained: list[Prompted], kind: str, settings: str, method: str, learns: str
) -> None:
    model, data = folder_of(MADE[kind], tmp_path / "model"), SETTINGS[settings]
    file = asked(tmp_path, data.get("prompt", "prompt"))
    later = {"method": learns, "data": {"examples": f"1-{method}"}}
    stages = [{"method": method, "train": {"steps": 2}}, later]
    start(tmp_path / "run", **config(model, file, data, stages))
    sampled = sampled_in(tmp_path / "run" / f"1-{method}")
    assert trained
    for example in trained:
        for answer in example.answers:
            assert answer.trained.all()
            assert (tuple(example.tokens.tolist()), tuple(answer.tokens.tolist())) in sampled
