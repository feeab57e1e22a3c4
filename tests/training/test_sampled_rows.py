"""What a stage has sampled is what the next one trains: the same ids, behind the ids of the same prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.models.tokenizers import MADE
from tests.training.runs import PAID, start
from transformers import PreTrainedTokenizerBase

from covey.config.schema import Config, Data, Keep
from covey.models.policy import Policy
from covey.models.tiny import CHAT_TEMPLATE, build_model
from covey.runs.examples import LoggedSample, as_jsonl, correct_examples, preference_pairs
from covey.runs.rollouts import read_rollouts, recorded_steps
from covey.sampling.prompts import EncodedProblem, encode_examples
from covey.tasks.examples import examples_of
from covey.tasks.files import read_problems
from covey.tasks.sampled import SAMPLED
from covey.training import pipeline
from covey.training.run import Run
from covey.types import AnswerTokens, SampledTokens
from covey_verify.errors import DataError

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
def trained(monkeypatch: pytest.MonkeyPatch) -> list[EncodedProblem]:
    """What loops over given examples train, put down here."""
    seen: list[EncodedProblem] = []

    def noted(train: Callable[[Run], None], run: Run) -> None:
        seen.extend(run.train_set)
        train(run)

    listening = {name: partial(noted, pipeline.LOOPS[name]) for name in pipeline.STEP_BUILDERS}
    monkeypatch.setattr(pipeline, "LOOPS", {**pipeline.LOOPS, **listening})
    return seen


def config(model: Path, file: Path, data: dict[str, Any], stages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": str(model),
        "data": {"task": None, "train": str(file), "test": None, **data},
        "rewards": [f"{PAID}:odd"],
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
    tmp_path: Path, trained: list[EncodedProblem], kind: str, settings: str, method: str, learns: str
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


def test_a_tools_words_are_read_and_not_trained(tmp_path: Path, byte_level_policy: Policy) -> None:
    tokens = AnswerTokens((5, 8, 9, 6), (True, False, False, True))
    problem = [{"role": "user", "content": "?"}]
    turns = [("assistant", "look"), ("tool", "42"), ("assistant", "It is 42")]
    said = [{"role": role, "content": content} for role, content in turns]
    no = AnswerTokens((7, 2), (True, True))
    group = [
        LoggedSample(0, 0, "p", problem, "lookIt is 42", "stop", 1.0, {}, said, tokens, (3, 4), "x"),
        LoggedSample(0, 0, "p", problem, "no", "stop", 0.0, {}, (), no, (3, 4), "x"),
    ]
    (row,) = preference_pairs([group], Keep(), {})
    assert row[SAMPLED]["inserted"] == {"chosen": [[1, 3]]}
    row[SAMPLED]["tokenizer"] = byte_level_policy.vocabulary_hash
    (file := tmp_path / "pairs.jsonl").write_text(as_jsonl([row]))
    (found,) = read_problems(file, Data(system="Be brief.", prompt="question", completion="gold"))
    (example,) = examples_of([found], "dpo", Data(), 0.0)
    (encoded,) = encode_examples(byte_level_policy, [example], Config())
    assert encoded.tokens.tolist() == [3, 4]
    assert [a.tokens.tolist() for a in encoded.answers] == [[5, 8, 9, 6], [7, 2]]
    assert encoded.answers[0].trained.tolist() == [True, False, False, True]


@pytest.fixture
def byte_level_policy() -> Policy:
    tokenizer = MADE["byte_level"]
    return Policy(build_model(tokenizer, 0, layers=1, hidden=32), tokenizer)


def written(folder: Path, row: Any) -> Path:
    (file := folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return file


def test_rows_whose_texts_or_tokens_were_changed_are_refused(
    tmp_path: Path, byte_level_policy: Policy
) -> None:
    sample = LoggedSample(
        0, 0, "p", "1+1=", "2", "stop", 1.0, {"r": 1.0}, (), AnswerTokens((7, 2), (True, True)), (3, 4), "x"
    )
    (row,) = correct_examples([[sample]], "r", Keep(), {})
    assert read_problems(written(tmp_path, row), Data())[0].sampled_tokens == SampledTokens(
        "x", (3, 4), {"completion": AnswerTokens((7, 2), (True, True))}
    )
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*was changed after.*Remove sampled_tokens"):
        read_problems(written(tmp_path, {**row, "completion": "3"}), Data())
    damaged = {**row, SAMPLED: {**row[SAMPLED], "completion": [7, -2]}}
    with pytest.raises(DataError, match=r"rows.jsonl:1: sampled_tokens is damaged"):
        read_problems(written(tmp_path, damaged), Data())
    texts = {k: v for k, v in row.items() if k != SAMPLED}
    assert read_problems(written(tmp_path, texts), Data(template="Q {prompt}"))[0].prompt == "Q 1+1="
    (problem,) = read_problems(written(tmp_path, row), Data())
    with pytest.raises(DataError, match=r"rows.jsonl:1: its tokens come from tokenizer x; this model has"):
        encode_examples(byte_level_policy, examples_of([problem], "sft", Data(), 0.0), Config())


def test_a_way_through_parquet_or_csv_keeps_the_tokens(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table
    said = [{"role": "user", "content": "1+1="}]
    tool = [{"role": "assistant", "content": "look", "name": "x"}, {"role": "tool", "content": "2"}]
    answer = AnswerTokens((7, 8, 2), (True, False, True))
    done = [*tool, {"role": "assistant", "content": "2"}]
    first = LoggedSample(0, 0, "p", said, "look2", "stop", 1.0, {"r": 1.0}, done, answer, (3, 4), "x")
    plain = AnswerTokens((9,), (True,))
    second = LoggedSample(0, 0, "q", said, "3", "stop", 1.0, {"r": 1.0}, (), plain, (3, 4), "x")
    rows = correct_examples([[first, second]], "r", Keep(), {})
    parquet.write_table(table.from_pylist(rows), tmp_path / "rows.parquet")
    found = [p.sampled_tokens.answers["completion"] for p in read_problems(tmp_path / "rows.parquet", Data())]
    assert found == [answer, plain]
