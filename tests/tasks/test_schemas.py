"""Rows of other projects are read as they mean them, and a column that nobody reads is named."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.config.load import load_config
from covey.config.python_objects import MAX_STREAMED, with_objects
from covey.config.schema import Data
from covey.rewards.contract import Context
from covey.rewards.loading import load_rewards
from covey.tasks.columns import find_readers, print_readers, system_notes
from covey.tasks.examples import UNTRAINED, examples_of
from covey.tasks.files import read_problems
from covey.tasks.source import load_source
from covey.types import Completion, Problem
from covey_verify.errors import ConfigError, DataError

ASKED = [{"role": "user", "content": "1+1="}]


def read(folder: Path, *rows: dict[str, Any], **settings: Any) -> list[Problem]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_problems(file, Data(**settings))


def test_verls_rows_have_their_reference_in_reward_model(tmp_path: Path) -> None:
    row = {
        "data_source": "gsm8k",
        "prompt": ASKED,
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 7},
    }
    (problem,) = read(tmp_path, row)
    (tmp_path / "cs.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str == ground_truth and extra_info['index'] == 7)\n"
    )
    rewards = load_rewards(["cs.py:compute_score"], tmp_path)
    given = next(iter(rewards)).arguments(problem, [completion("2")], Context())
    assert (given["ground_truth"], given["data_source"]) == ("2", "gsm8k")
    # A reference that the user names himself wins.
    (problem,) = read(tmp_path, {**row, "answer": "3"})
    assert problem.columns["answer"] == "3"


def completion(text: str) -> Completion:
    return Completion(np.array([1]), np.zeros(1, np.float32), text, "stop")


def test_a_function_that_requires_a_ground_truth_is_not_given_none(tmp_path: Path) -> None:
    (tmp_path / "cs.py").write_text("def score(solution_str, ground_truth):\n    return 0.0\n")
    reward = next(iter(load_rewards(["cs.py:score"], tmp_path)))
    assert "ground_truth" in str(reward.problem_with(["gold"]))
    assert reward.problem_with(["answer"]) is None
    assert reward.problem_with(["ground_truth"]) is None


@pytest.mark.parametrize("setting", ["answer", "columns"])
def test_a_setting_may_name_a_place_inside_a_column(tmp_path: Path, setting: str) -> None:
    row = {"prompt": "1+1=", "meta": {"solution": {"final": "2"}}}
    named = (
        {"answer": "meta.solution.final"}
        if setting == "answer"
        else {"columns": {"answer": "meta.solution.final"}}
    )
    assert read(tmp_path, row, **named)[0].columns["answer"] == "2"
    with pytest.raises(DataError, match=r"no column 'meta\.nothing'"):
        read(tmp_path, row, answer="meta.nothing")


def test_a_column_with_a_dot_in_its_name_is_that_column(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "a.b": "2", "a": {"b": "3"}}
    assert read(tmp_path, row, answer="a.b")[0].columns["answer"] == "2"


def test_alpacas_input_is_a_part_of_the_question(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add.", "input": "3 and 1", "output": "4"},
        {"instruction": "Say hello.", "input": "", "output": "Hello."},
    ]
    problems = read(tmp_path, *rows)
    assert [p.prompt for p in problems] == ["Add.\n\n3 and 1", "Say hello."]
    examples = examples_of(problems, "sft", Data(), 0.0)
    assert [e.answers for e in examples] == [("4",), ("Hello.",)]


def test_an_input_that_the_settings_pass_over_is_named(tmp_path: Path) -> None:
    settings = {"prompt": "instruction", "completion": "output"}
    row = {"instruction": "Add.", "input": "3 and 1", "output": "4"}
    data = Data(**settings)
    problems = read(tmp_path, row, **settings)
    found = find_readers(problems, examples_of(problems, "sft", data, 0.0), data, (), {})
    assert found == {"input": [], "output": ["the answers to learn from"]}
    said: list[tuple[str, str]] = []
    print_readers(found, lambda text, style="": said.append((text, style)))
    assert any("'input'" in text and "data.template" in text and style == "yellow" for text, style in said)
    # With the template that it advises everything is read.
    settings["template"] = "{prompt}\n\n{input}"
    problems = read(tmp_path, row, **settings)
    assert problems[0].prompt == "Add.\n\n3 and 1"
    assert find_readers(problems, (), Data(**settings), (), {})["input"] == ["data.template"]


def test_sharegpts_conversations_are_messages(tmp_path: Path) -> None:
    row = {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": "1+1="},
            {"from": "gpt", "value": "2", "weight": 0},
            {"from": "human", "value": "2+2="},
            {"from": "gpt", "value": "4"},
        ],
    }
    (problem,) = read(tmp_path, row)
    assert [m["role"] for m in problem.prompt] == ["system", "user"]
    (example,) = examples_of([problem], "sft", Data(), 0.0)
    (answer,) = example.answers
    assert [(m["role"], m.get(UNTRAINED)) for m in answer] == [
        ("assistant", 0),
        ("user", None),
        ("assistant", None),
    ]


def test_openais_pairs_are_pairs(tmp_path: Path) -> None:
    row = {
        "input": {"messages": ASKED, "tools": [], "parallel_tool_calls": True},
        "preferred_output": [{"role": "assistant", "content": "2"}],
        "non_preferred_output": [{"role": "assistant", "content": "3"}],
    }
    (example,) = examples_of(read(tmp_path, row), "dpo", Data(), 0.0)
    assert [answer[0]["content"] for answer in example.answers] == ["2", "3"]
    assert example.problem.prompt == ASKED


@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}, {"training": 0}, {"loss": False}])
def test_every_projects_flag_of_an_untrained_message_is_one(tmp_path: Path, flag: dict[str, object]) -> None:
    said = [
        *ASKED,
        {"role": "assistant", "content": "BAD", **flag},
        *ASKED,
        {"role": "assistant", "content": "2"},
    ]
    (example,) = examples_of(read(tmp_path, {"messages": said}), "sft", Data(), 0.0)
    assert [UNTRAINED in m for m in example.answers[0]] == [True, False, False]
    assert set(example.answers[0][0]) == {"role", "content", UNTRAINED}


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "assistant", "content": "2", "weight": 0.5}], "weight: '0.5'"),
        ([{"role": "assistant", "content": "2", "train": "no"}], "train: 'no'"),
        ([{"role": "assistant", "content": "2", "weight": 0}], "no trained message"),
    ],
)
def test_flags_that_cannot_be_kept_are_refused(tmp_path: Path, messages: list[Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        examples_of(read(tmp_path, {"messages": [*ASKED, *messages]}), "sft", Data(), 0.0)


def test_a_rows_own_system_message_wins_and_is_named(tmp_path: Path) -> None:
    own = {"prompt": [{"role": "system", "content": "Row's."}, *ASKED]}
    problems = read(tmp_path, own, {"prompt": "2+2="}, system="Config's.")
    systems = [[m["content"] for m in p.prompt if m["role"] == "system"] for p in problems]
    assert systems == [["Row's."], ["Config's."]]
    (note,) = system_notes(problems, Data(system="Config's."))
    assert "rows.jsonl:1" in note
    assert not system_notes(problems, Data())


def test_a_template_never_tells_the_answer(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "answer": "2", "topic": "sums"}
    assert read(tmp_path, row, template="{topic}: {prompt}")[0].prompt == "sums: 1+1="
    with pytest.raises(DataError, match="correct answer"):
        read(tmp_path, row, template=r"{prompt} Put it into \boxed{answer}.")
    assert read(tmp_path, row, template=r"{prompt} \boxed{ answer }")[0].prompt == r"1+1= \boxed{ answer }"
    with pytest.raises(DataError, match="names column 'hint'"):
        read(tmp_path, row, template="{prompt} {hint}")


def test_who_reads_what_is_known_of_rewards_tools_and_copies(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def near(completion, scale):\n    return float(scale)\n")
    data = Data(answer="gold")
    problems = read(
        tmp_path, {"prompt": "1+1=", "gold": "2", "scale": 1, "secret": 3, "source": "me"}, answer="gold"
    )
    rewards = load_rewards(["math_answer", "r.py:near"], tmp_path)
    found = find_readers(problems, (), data, rewards, {"Walk.reset": ["secret"]})
    assert found["gold"] == ["copied to answer"]
    assert "math_answer" in found["answer"]
    assert (found["scale"], found["secret"], found["source"]) == (["near"], ["Walk.reset"], [])


def counted() -> Iterator[dict[str, str]]:
    return ({"prompt": f"{n}+1=", "answer": str(n + 1)} for n in itertools.count())


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"rollout": {"prompts_per_step": 4, "max_resampling_rounds": 2}}, 2 * 4 * 3),
        ({"method": "sft", "train": {"steps": 2, "batch_size": 5}}, 2 * 5),
        ({"method": "dpo", "train": {"steps": 2, "batch_size": 9}, "data": {"held_out": 0.1}}, 20),
    ],
)
def test_an_endless_iterator_is_read_as_far_as_the_steps_can_take(
    settings: dict[str, Any], rows: int
) -> None:
    answered = ({**row, "completion": "2", "chosen": "2", "rejected": "3"} for row in counted())
    settings = {"model": "tiny", "train": {"steps": 2}, **settings}
    settings["data"] = {"train": answered, **settings.get("data", {})}
    resolved = load_config(values=with_objects(settings))
    assert len(load_source(resolved).rows) == rows
    assert any(f"the first {rows} rows" in note for note in resolved.notes)
    assert next(answered)["prompt"] == f"{rows + 1}+1=", "one row shows that there are more"
    assert len(load_source(resolved).rows) == rows, "and kept for who reads it again"


def test_an_iterator_that_ends_is_the_same_as_a_list_of_its_rows() -> None:
    rows = list(itertools.islice(counted(), 16))
    settings = {"model": "tiny", "train": {"steps": 2}, "rollout": {"prompts_per_step": 8}}
    both = [load_config(values=with_objects({**settings, "data": {"train": t}})) for t in (rows, iter(rows))]
    assert {str(resolved.config.data.train) for resolved in both} == {"an object in Python: 16 rows"}


def test_an_iterator_of_which_a_run_takes_more_than_memory_holds_is_refused() -> None:
    settings = {"model": "tiny", "data": {"train": counted()}, "train": {"steps": 100_000}}
    with pytest.raises(ConfigError, match=rf"more than {MAX_STREAMED:,} rows .* Lower train\.steps"):
        load_config(values=with_objects(settings))


class Table:
    """As a pandas.DataFrame: iteration gives the names of columns."""

    columns = ("instruction", "input", "output", "tags")

    def __iter__(self) -> Any:
        return iter(self.columns)

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        # pandas' forms of a missing number and of a list that comes from parquet.
        return [{"instruction": "Say hi.", "input": math.nan, "output": "hi", "tags": np.array(["a", "b"])}]


def test_a_table_is_its_rows_and_several_tables_are_named() -> None:
    settings = {"model": "tiny", "method": "sft", "data": {"train": Table()}}
    (example,) = load_source(load_config(values=with_objects(settings))).examples
    assert example.problem.prompt == "Say hi."
    assert example.problem.columns["input"] is None
    assert example.problem.columns["tags"] == ["a", "b"]
    with pytest.raises(ConfigError, match="'validation', 'train'"):
        tables = {"validation": [{"prompt": "a"}], "train": [{"prompt": "b"}]}
        with_objects({"data": {"train": tables}})


def test_a_config_reads_verls_rows_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(json.dumps({"prompt": ASKED, "reward_model": {"ground_truth": "2"}}))
    (tmp_path / "run.yaml").write_text("{model: tiny, data: {train: q.jsonl}, rewards: [math_answer]}")
    (problem,) = load_source(load_config(tmp_path / "run.yaml")).train
    assert problem.columns["answer"] == "2"


def test_a_column_without_a_name_is_refused() -> None:
    """A table of pandas that was made from lists numbers its columns."""
    settings = with_objects({"data": {"train": [{0: "1+1=", 1: "2"}]}})
    with pytest.raises(DataError, match=r"data\.train: row 1: the column 0 has a name that is not text"):
        load_source(load_config(values=settings))


TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {}}]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is 2"},
]


@pytest.mark.parametrize(
    ("messages", "asked", "answer"),
    [
        (TALK, 3, "It is 2"),
        (TALK[:2], 1, "Hello"),
        (TALK[:3], 3, None),
        (TALK[:4], 3, None),
        (TALK[:1], 1, None),
    ],
)
def test_a_conversation_asks_its_last_question_where_the_model_answers(
    tmp_path: Path, messages: list[Any], asked: int, answer: str | None
) -> None:
    (file := tmp_path / "talk.jsonl").write_text(json.dumps({"messages": messages}))
    resolved = load_config(values={"model": "tiny", "data": {"train": file}, "rewards": ["math_answer"]})
    (problem,) = load_source(resolved).train
    assert [m["role"] for m in problem.prompt] == [m["role"] for m in messages[:asked]]
    assert problem.columns.get("answer") == answer
    imitated = {"method": "sft", "data": {"train": file, "test": file}}
    if asked < len(messages):
        source = load_source(load_config(values={"model": "tiny", **imitated}))
        (example,) = source.examples
        assert [m["content"] for m in example.problem.prompt] == ["Hi"]
        assert source.test == [problem]


def test_the_model_s_text_is_no_column_that_a_reward_reads(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def near(completion, answer):\n    return 1.0\n")
    problems = read(tmp_path, {"prompt": "1+1=", "completion": "2", "answer": "2"})
    found = find_readers(problems, (), Data(), load_rewards(["r.py:near"], tmp_path), {})
    assert found == {"completion": [], "answer": ["near"]}
