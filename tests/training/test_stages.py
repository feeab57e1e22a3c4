"""Stages that make examples, the pipelines they stand in, and pairs from any run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.training.runs import PAID, StopAt, metrics_of, start
from tests.training.short_answers import SHORT

from covey.cli import main
from covey.config.load import load_config
from covey.config.schema import Keep
from covey.errors import CheckpointError, Stopped
from covey.insight.result import stage_table
from covey.runs.examples import LoggedSample, correct_examples, preference_pairs
from covey.runs.reader import load_recorded
from covey.system.signals import StopSignal
from covey.tasks.classifier import TextClassifier
from covey.training.options import RunOptions
from covey.types import Problem
from covey_verify.errors import ConfigError, CoveyError, DataError


def drawn(
    text: str, reward: float | None, finish: str = "stop", prompt: Any = "2+2=", **more: float
) -> LoggedSample:
    return LoggedSample(0, 0, "p", prompt, text, finish, reward, {"answer": reward, **more})


def test_pairs_are_the_best_against_the_worst_by_a_margin() -> None:
    group = [
        drawn("four", 1.0), drawn("5", 0.0), drawn("4!", 0.6), drawn("six", 0.5),
        drawn("cut", 2.0, "length"), drawn("?", None),
    ]  # fmt: skip
    known = {"p": Problem("p", "2+2=", {"answer": "4", "completion": "worked"})}

    def found(**keep: Any) -> list[tuple[object, object, object]]:
        rows = preference_pairs([group, group], Keep(**keep), known)
        assert all(row["answer"] == "4" and "completion" not in row for row in rows)
        return [(r["chosen"], r["rejected"], r["margin"]) for r in rows]

    assert found(per_problem=1) == [("four", "5", 1.0)]
    assert found() == [("four", "5", 1.0), ("4!", "six", pytest.approx(0.1))]
    assert found(margin=0.5) == [("four", "5", 1.0)]
    chat = [drawn("4", 1.0, prompt=[{"role": "user", "content": "2+2="}]), drawn("5", 0.0, prompt=[])]
    (row,) = preference_pairs([chat], Keep(), {})
    assert row["chosen"] == [{"role": "assistant", "content": "4"}]


def test_rejection_sampling_keeps_what_is_correct_once_and_passes_the_filters() -> None:
    group = [
        drawn("a  four", 1.0, language=1.0), drawn("a four", 1.0, language=1.0),
        drawn("b", 1.0, language=0.5),
        drawn("c", 0.0, language=1.0), drawn("d", 1.0, "length", language=1.0), drawn("e", 1.0, language=1.0),
    ]  # fmt: skip

    def texts(**keep: Any) -> list[object]:
        return [row["completion"] for row in correct_examples([group], "answer", Keep(**keep), {})]

    assert texts() == ["a  four", "b", "e"]
    assert texts(least={"language": 0.9}) == ["a  four", "e"]
    assert texts(per_problem=1) == ["a  four"]


def pipeline(**more: Any) -> dict[str, Any]:
    return {
        "rollout": SHORT,
        "train": {"steps": 2, "lr": 1e-3, "batch_size": 4, "save_every": 1},
        "eval": {"problems": 2, "samples": 1},
        "data": {"task": "last_digit", "train_size": 32, "test_size": 4},
        "rewards": (),
        "stages": [
            {"method": "sft", "train": {"steps": 1},
             "data": {"completion": "{answer}"}},
            {"method": "pairs", "rewards": [
                {"math_answer": {"rule": "last_number", "verdict": True}}, {f"{PAID}:varied": 0.01}]},
            {"method": "dpo", "data": {"examples": "2-pairs"}},
            {"method": "reward_model", "data": {"examples": ["2-pairs", "2-pairs"], "replay": 0.5}},
            {"method": "rl", "algorithm": "grpo", "rewards": [
                {"math_answer": {"rule": "last_number", "weight": 0, "verdict": True}},
                {"reward_model": {"model": "4-reward_model"}}]},
        ],
        **more,
    }  # fmt: skip


def test_a_pipeline_of_every_kind_of_stage(tmp_path: Path) -> None:
    results = start(tmp_path / "run", **pipeline())
    assert [r.kind for r in results] == ["model", "examples", "model", "reward model", "model"]
    rows = [json.loads(line) for line in (tmp_path / "run/2-pairs/examples.jsonl").read_text().splitlines()]
    assert rows
    assert {"prompt", "chosen", "rejected", "margin", "answer"} <= set(rows[0])
    recorded = {r.folder.name: yaml.safe_load((r.folder / "config.yaml").read_text()) for r in results}
    assert [c["model"] for c in recorded.values()] == [
        "tiny", "../1-sft/final", "../1-sft/final", "../3-dpo/final", "../3-dpo/final",
    ]  # fmt: skip
    assert recorded["3-dpo"]["data"]["examples"] == ["../2-pairs"]
    assert recorded["5-rl"]["rewards"][1]["reward_model"]["model"] == "../4-reward_model/final"
    table = stage_table([r.folder for r in results])
    assert len(table) == 6
    assert f"{len(rows)} examples" in table[2]
    assert start(tmp_path / "run", **pipeline())[0].record() == results[0].record()  # nothing is done twice
    (tmp_path / "run").rename(tmp_path / "moved")
    resolved = load_recorded(tmp_path / "moved/5-rl")
    assert resolved.config.rewards[1]["reward_model"]["model"] == str(tmp_path / "moved/4-reward_model/final")
    assert load_recorded(tmp_path / "moved/3-dpo").config.data.examples == (tmp_path / "moved/2-pairs",)


class StopBehind(StopSignal):
    """Asks for a stop once there is a file."""

    def __init__(self, folder: Path, file: str) -> None:
        super().__init__()
        self.folder, self.file = folder, file

    def check(self) -> None:
        if any(self.folder.glob(self.file)):
            self.request("stopped by the test")
        super().check()


def test_edited_stages_are_refused_before_one_begins(tmp_path: Path) -> None:
    sft = {"method": "sft", "train": {"steps": 1}, "data": {"completion": "{answer}"}}
    longer, other = ({**sft, "train": {"steps": 1, **more}} for more in ({"steps": 2}, {"lr": 5e-3}))
    pairs = {"method": "pairs", "rewards": (f"{PAID}:varied",)}
    run = tmp_path / "run"

    def again(*stages: dict[str, Any]) -> list[str]:
        return [r.folder.name for r in start(run, **pipeline(stages=list(stages)))]

    assert again(sft, sft, sft) == ["1-sft", "2-sft", "3-sft"]
    with pytest.raises(CheckpointError, match=r"2-sft began from the result of .*1-sft.*Remove"):
        again(longer, sft, sft)
    # A folder was removed, as the refusal of other settings advises; the last stage began from its model.
    kept = {name: (run / name / "final/model.safetensors").read_bytes() for name in ("1-sft", "3-sft")}
    (run / "2-sft").rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=r"3-sft began from the result of .*2-sft"):
        again(sft, other, sft)
    shutil.rmtree(run / "1-sft")
    with pytest.raises(CheckpointError, match=r"3-sft began from the result of .*1-sft"):
        again(other, sft, sft)  # by way of the second, which is gone too
    assert [p.name for p in run.iterdir() if p.is_dir()] == ["3-sft"]
    shutil.rmtree(run / "3-sft")
    assert again(sft, sft, sft) == ["1-sft", "2-sft", "3-sft"]
    assert kept == {name: (run / name / "final/model.safetensors").read_bytes() for name in kept}
    # Stages that the config does not have would be shown as the run's.
    for stages, others in (
        ([sft, sft], "3-sft"),
        ([sft, pairs, sft], "2-sft"),
        ([sft], "1-sft, 2-sft, 3-sft"),
    ):
        with pytest.raises(ConfigError, match=f"holds {others} of another config"):
            again(*stages)
    assert again(sft, sft, longer) == ["1-sft", "2-sft", "3-sft"]
    assert again(sft, sft, longer, sft)[-1] == "4-sft"


def test_a_stage_that_does_not_follow_from_another_is_kept(tmp_path: Path) -> None:
    stages = [*pipeline()["stages"][:3], {"method": "sft", "train": {"steps": 1}, "model": "1-sft",
                                          "data": {"completion": "{answer}"}}]  # fmt: skip
    start(tmp_path / "run", **pipeline(stages=stages))
    before = (tmp_path / "run/4-sft/result.json").stat().st_mtime_ns
    shutil.rmtree(tmp_path / "run/3-dpo")
    stages[2] = {**stages[2], "loss": {"beta": 0.3}}
    assert [r.folder.name for r in start(tmp_path / "run", **pipeline(stages=stages))][2:] == [
        "3-dpo",
        "4-sft",
    ]
    assert (tmp_path / "run/4-sft/result.json").stat().st_mtime_ns == before
    shutil.rmtree(tmp_path / "run/2-pairs")
    with pytest.raises(CheckpointError, match=r"3-dpo began from the result of .*2-pairs"):
        start(tmp_path / "run", **pipeline(stages=stages))


def test_a_run_of_one_stage_is_not_mixed_with_stages(tmp_path: Path) -> None:
    sft = {"method": "sft", "train": {"steps": 1}, "data": {"completion": "{answer}"}}
    start(tmp_path / "run", **pipeline(stages=[sft]))
    with pytest.raises(ConfigError, match="holds a run of one stage"):
        start(tmp_path / "run", **pipeline(stages=[sft, sft]))


def test_a_pipeline_that_was_moved_continues_strictly(tmp_path: Path) -> None:
    settings = pipeline(stages=pipeline()["stages"][:3])
    with pytest.raises(Stopped):
        start(tmp_path / "first", StopBehind(tmp_path / "first", "3-dpo/checkpoints/*"), **settings)
    assert not (tmp_path / "first/3-dpo/final").exists()
    shutil.copytree(tmp_path / "first", tmp_path / "moved")
    results = start(tmp_path / "moved", options=RunOptions(strict=True), **settings)
    assert [r.steps for r in results if r.kind == "model"] == [1, 2]


def test_a_stage_that_was_stopped_makes_the_same_examples(tmp_path: Path) -> None:
    settings = {
        "method": "pairs", "rollout": SHORT, "train": {"steps": 3, "save_every": 1}, "algorithm": "grpo",
    }  # fmt: skip
    counter = StopAt()
    start(tmp_path / "whole", counter, **settings)
    for at in (counter.checks // 3, counter.checks // 2):
        with pytest.raises(Stopped):
            start(tmp_path / "parts", StopAt(at), **settings)
    start(tmp_path / "parts", **settings)
    for name in ("examples.jsonl", "metrics.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    assert not (tmp_path / "whole/final").exists()


def test_a_stage_does_not_mix_completions_of_rows_with_other_rows(tmp_path: Path) -> None:
    asked = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
    (file := tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    settings = {
        "method": "pairs", "rollout": SHORT, "train": {"steps": 3, "save_every": 1}, "algorithm": "grpo",
        "rewards": ["math_answer"], "data": {"task": None, "train": str(file)},
    }  # fmt: skip
    with pytest.raises(Stopped):
        start(tmp_path / "run", StopAt(20), **settings)
    file.write_text("".join(json.dumps(row) + "\n" for row in reversed(asked)))
    with pytest.raises(ConfigError, match=r"the data have changed since.*Restore the data"):
        start(tmp_path / "run", **settings)
    assert not (tmp_path / "run/examples.jsonl").exists()


def test_a_stage_that_yields_nothing_ends_there_and_the_ones_before_are_kept(tmp_path: Path) -> None:
    settings = pipeline()
    settings["stages"] = [settings["stages"][0], {"method": "rejection_sampling"}, {"method": "sft"}]
    settings["rewards"] = [{f"{PAID}:nothing": 1.0}]
    with pytest.raises(
        DataError, match=r"2-rejection_sampling: none of 16 sampled completions is kept.*keep.least"
    ):
        start(tmp_path / "run", **settings)
    assert (tmp_path / "run/1-sft/final/model.safetensors").exists()
    assert not (tmp_path / "run/2-rejection_sampling/examples.jsonl").exists()


def test_pairs_of_any_run_are_read_by_dpo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path / "run", algorithm="grpo", rollout=SHORT, train={"steps": 3})
    assert main(["pairs", str(tmp_path / "run"), "-o", str(tmp_path / "out/pairs.jsonl"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in (tmp_path / "out/pairs.jsonl").read_text().splitlines()]
    assert said["pairs"] == len(rows) > 0
    data = {"task": None, "train": tmp_path / "out/pairs.jsonl", "test": None, "held_out": 0}
    dpo: dict[str, Any] = {
        "method": "dpo",
        "data": data,
        "rewards": (),
        "train": {"steps": 1, "batch_size": 2},
    }
    with pytest.raises(DataError, match=r"pairs.jsonl:1: .*come from tokenizer.*Remove sampled_tokens"):
        start(tmp_path / "other", **dpo)  # a tiny model makes a tokenizer of its own for these pairs
    start(tmp_path / "dpo", model=str(tmp_path / "run/final"), **dpo)
    assert metrics_of(tmp_path / "dpo")[0]["optimizer/grad_norm"] > 0
    assert main(["pairs", str(tmp_path / "run"), "-o", str(tmp_path / "x.jsonl"), "--margin", "1e9"]) == 3
    assert "ask for less (--margin)" in capsys.readouterr().err
    assert main(["pairs", str(tmp_path / "none"), "-o", str(tmp_path / "x.jsonl")]) == 3
    assert not (tmp_path / "x.jsonl").exists()


MATHS = [
    "Solve 3x + 4 = 10 for x.",
    "The sum of 7 and 12 is 19.",
    "Let f be a prime number, then f > 1.",
    "12 * 4 = 48",
]
OTHERS = [
    "The bird sang in the tree.",
    "Rain is expected on Sunday.",
    "She bought a red coat.",
    "The actor won a prize.",
]
CORPUS = [
    "Find x if 5x + 2 = 12.",
    "A red bird sang on Sunday.",
    "3 + 9 = 12",
    "He bought a coat in the rain.",
]


def test_a_few_labelled_lines_pick_mathematics_from_a_corpus(tmp_path: Path) -> None:
    classifier = TextClassifier([*MATHS, *OTHERS], [1.0] * 4 + [0.0] * 4)
    assert [classifier.probability(text) > 0.5 for text in CORPUS] == [True, False, True, False]
    lines = [{"text": t, "label": True} for t in MATHS] + [{"text": t, "label": False} for t in OTHERS]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus = [{"text": t, "prompt": "Say:", "completion": t} for t in CORPUS]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in corpus))
    data = {
        "task": None,
        "train": tmp_path / "corpus.jsonl",
        "test": None,
        "examples": tmp_path / "labels.jsonl",
    }
    sft = {
        "method": "sft",
        "data": {"train": None, "examples": "1-filter"},
        "train": {"steps": 1, "batch_size": 2},
    }
    results = start(tmp_path / "run", data=data, rewards=(), stages=[{"method": "filter"}, sft])
    assert [r.kind for r in results] == ["examples", "model"]
    again = start(tmp_path / "run", data=data, rewards=(), stages=[{"method": "filter"}, sft])
    assert [r.record() for r in again] == [r.record() for r in results]  # it is not asked for steps
    picked = [
        json.loads(x)["text"] for x in (tmp_path / "run/1-filter/examples.jsonl").read_text().splitlines()
    ]
    assert picked == [CORPUS[0], CORPUS[2]]
    with pytest.raises(DataError, match=r"no row has a probability above 0.99"):
        start(tmp_path / "strict", data=data, rewards=(), method="filter", keep={"score": 0.99})
    (tmp_path / "labels.jsonl").write_text(
        2 * (json.dumps(lines[0]) + "\n") + json.dumps({**lines[0], "label": 0})
    )
    with pytest.raises(DataError, match=r"Solve 3x.* is labelled both true and false"):
        start(tmp_path / "both", data=data, rewards=(), method="filter")
    (tmp_path / "labels.jsonl").write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(DataError, match="have the same label"):
        start(tmp_path / "one", data=data, rewards=(), method="filter")


def test_a_stage_that_is_named_has_to_come_before(tmp_path: Path) -> None:
    settings = pipeline()
    settings["stages"] = [{"method": "dpo", "data": {"task": None, "examples": "2-pairs"}}, {"method": "rl"}]
    with pytest.raises(
        ConfigError, match=r"data.examples '2-pairs' is not an earlier stage; these are: none"
    ):
        start(tmp_path / "run", **settings)
    assert load_config(values={"method": "dpo", "data": {"examples": "a.jsonl"}}).config.data.examples == (
        Path("a.jsonl"),
    )


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        (
            {"method": "dpo", "data": {"examples": "9-pairs"}},
            r"3-dpo: data.examples '9-pairs' is not an earlier",
        ),
        ({"method": "dpo", "data": {"examples": "3-dpo"}}, "these are: 1-sft, 2-pairs"),
        ({"method": "dpo", "data": {"examples": "1-sft"}}, "is a stage of method sft; .* pairs, filter"),
        (
            {"method": "sft", "data": {"examples": "2-pairs"}},
            "use a stage of method rejection_sampling, filter",
        ),
        ({"method": "sft", "data": {"examples": "none.jsonl"}}, "stage 3-sft: none.jsonl: no such file"),
        ({"method": "rl", "model": "4-sft"}, "3-rl: model '4-sft' is not an earlier stage"),
        ({"method": "rl", "model": "2-pairs"}, "model '2-pairs' is a stage of method pairs"),
        (
            {"method": "rl", "rewards": [{"reward_model": {"model": "1-sft"}}]},
            "the model of a reward '1-sft' is a stage of method sft",
        ),
    ],
)
def test_a_pipeline_is_refused_before_its_first_stage(
    tmp_path: Path, stage: dict[str, Any], said: str
) -> None:
    settings = pipeline(model="no/such-model")
    settings["stages"] = [*settings["stages"][:2], stage]
    with pytest.raises(CoveyError, match=said):
        start(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "pairs", "rollout": {"group_size": 1}}, "a pair has two completions"),
        (
            {"method": "rl", "data": {"task": "sums", "examples": "a.jsonl"}},
            "method rl does not learn from examples",
        ),
        (
            {"method": "dpo", "data": {"train": "a.jsonl", "replay": 0.1}},
            "data.replay: data.examples has only one",
        ),
    ],
)
def test_settings_of_stages_that_nothing_would_read(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(values=settings)


def test_a_filter_for_a_reward_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keep.least: there is no reward 'tongue'; there are: varied"):
        start(tmp_path / "run", method="rejection_sampling", keep={"least": {"tongue": 1}}, algorithm="grpo")


@pytest.mark.parametrize("name", ["r1_zero", "r1", "sft_dpo_rl", "iterative_grpo", "proofs"])
def test_the_recipes_are_configs(name: str) -> None:
    stages = load_config(Path(f"examples/{name}.yaml")).stages()
    names = [f"{n}-{stage.config.method}" for n, stage in enumerate(stages, start=1)]
    asked = [str(path) for stage in stages for path in stage.config.data.examples]
    asked += [
        of["model"] for s in stages for r in s.config.rewards for of in r.values() if "model" in str(of)
    ]
    assert {a for a in asked if not Path("examples", a).is_file()} <= set(names)
    assert names[-1].endswith("-rl")
