"""The built-in verifiers in a run: found before it, called in groups, trusted by canaries."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes import completion

from covey.cli import main
from covey.config.load import load_config
from covey.models.tiny import build_tokenizer
from covey.rewards.ends import token_ends
from covey.rewards.loading import load_rewards
from covey.rewards.reading import ReplyReader
from covey.rewards.reward_checks import ask_canaries, check_references, rehearse
from covey.rewards.scorer import Scorer
from covey.tasks.gym import gym_problems
from covey.types import Completion, Group, Problem
from covey_verify.errors import ConfigError, CoveyError, DataError, SandboxUnavailable
from covey_verify.mathematics.steps import (
    split,
    token_spans,
)
from covey_verify.programs import provers
from covey_verify.sandbox import choice
from covey_verify.sandbox.base import SandboxBackend
from covey_verify.sandbox.choice import choose
from covey_verify.sandbox.process import ProcessSandbox
from covey_verify.texts import judge
from covey_verify.types import StepRewards

with_coq = pytest.mark.skipif(shutil.which("coqchk") is None, reason="Coq is not installed")
SQUARE = [{"input": [n], "output": n * n} for n in range(4)]
TRUE = "forall n : nat, n + 0 = n"
PROOF = "intros n. induction n; simpl; congruence."
DECLARED = "(declare-const x Int)(declare-const y Int)(declare-const p Bool)"
FORMULA = "(and (> x 2) (< y x) p)"
WORKED = "48/2 = <<48/2=24>>24 clips\n48+24 = <<48+24=72>>72 clips\n#### 72"
LABELS = {"48/2 = <<48/2=24>>24 clips": 1, "48+24 =  <<48+24=72>>72 clips": -1, "#### 72": 0}


def test_preflight_lists_the_rows_or_refuses(sandbox: SandboxBackend) -> None:
    rewards = load_rewards(["code_tests"], Path())
    problems = [Problem(f"t:{i}", "p", {"tests": SQUARE if i else [], "entry_point": "f"}) for i in range(4)]
    kept, bad = check_references(problems, rewards, most=0.5)
    assert [p.id for p in kept] == ["t:1", "t:2", "t:3"]
    assert list(bad) == ["t:0"]
    with pytest.raises(DataError, match="t:0: code_tests: column 'tests'"):
        check_references(problems, rewards, most=0.1)


@with_coq
def test_the_example_says_what_is_paid_and_why_the_rest_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", "examples/proofs/tried.jsonl", "examples/proofs.yaml"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["reward"] for row in rows] == [1.0, 1.0, *[0.0] * 7, None]
    assert all(row["detail"]["proves"] for row in rows[2:])


@with_coq
def test_canaries_and_rehearsal() -> None:
    row = {"theorem": TRUE, "proof": PROOF}
    rewards, problem = load_rewards(["proves"], Path()), Problem("p", "?", row)
    rehearse(problem, rewards)
    assert ask_canaries(Scorer(rewards), problem, {}) == {"proves": 0}
    wrong = [
        ({"theorem": " "}, "has to be a proposition"),
        ({"theorem": "True", "prover": ["coq"]}, "'header' and 'prover' texts"),
        ({"theorem": "True", "axioms": [{"classic": 1}]}, "'axioms' a list of names"),
        ({"theorem": TRUE, "header": 3}, "'header' and 'prover' texts"),
        ({"theorem": TRUE, "axioms": "classic"}, "a list"),
        ({"theorem": "n = 1"}, "does not accept the theorem 'n = 1': "),
        ({"theorem": TRUE, "header": "Require Import Nowhere."}, "does not accept the header: "),
    ]
    bad = [Problem(str(n), "?", columns) for n, (columns, _) in enumerate(wrong)]
    kept, why = check_references([*bad, problem], rewards, 1.0)
    assert kept == [problem]
    assert all(says in why[str(n)] for n, (_, says) in enumerate(wrong)) and len(why) == len(wrong)


@pytest.mark.parametrize(("prover", "program"), [("coq", "coqc"), ("lean", "lean")])
def test_a_prover_that_is_missing_is_an_error_before_the_run(
    prover: str, program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rewards = load_rewards([{"proves": {"prover": prover}}], Path())
    monkeypatch.setenv("PATH", str(tmp_path))
    getattr(provers, prover).cache_clear()
    with pytest.raises(ConfigError, match=f"proves needs {program}, which is not on the PATH: .*install"):
        rehearse(Problem("p", "?", {"theorem": TRUE}), rewards)


def test_it_has_canaries() -> None:
    row = {"declarations": DECLARED, "formula": FORMULA}
    rewards, problem = load_rewards(["smt"], Path()), Problem("p", "?", row)
    assert ask_canaries(Scorer(rewards), problem, {}) == {"smt": 0}


@pytest.mark.parametrize("name", ["chain_sum", "countdown"])
def test_the_oracle_is_paid_and_nothing_near_it(name: str, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    try:
        rewards = load_rewards(["gym_answer"], Path())
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    problems = gym_problems(f"gym:{name}", "train", 3)
    assert [p.prompt for p in gym_problems(f"gym:{name}", "train", 3)] == [p.prompt for p in problems]
    witness = tmp_path / "witness"
    for problem in problems:
        oracle = str(problem.columns["answer"])
        answers = (oracle, "1" + oracle, f"open('{witness}', 'w')", "")
        texts = [completion(f"<answer>{a}</answer>") for a in answers]
        assert rewards.score_group(problem, np.array([1]), texts).rewards.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert not witness.exists()


def test_a_missing_extra_or_task_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.tasks.gym.importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"covey\[gym\]"):
        gym_problems("gym:chain_sum", "train", 3)


def asked(count: int, **settings: Any) -> Group:
    rewards = load_rewards([{"judge": {"url": "http://127.0.0.1:9", "model": "m", **settings}}], Path())
    completions = [completion(f"the answer must be four {n}") for n in range(count)]
    return rewards.score_group(Problem("p", "2+2="), np.array([1]), completions)


def test_a_group_is_judged_at_once_and_failures_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reply(_: str, body: dict[str, Any], *__: object) -> object:
        key = re.findall(r"verdicts-[0-9a-f]{8}", body["messages"][0]["content"])[-1]
        said = json.dumps({key: [True]}) if "four 1" in body["messages"][1]["content"] else "nonsense"
        return {"choices": [{"message": {"content": said}}]}

    monkeypatch.setattr(judge, "ask", reply)
    group = asked(12, patience={"tries": 1, "rest": 0.0})
    judged = [n == 1 or n > 9 for n in range(12)]
    assert (group.rewards == 1.0).tolist() == judged and (~np.isnan(group.rewards)).tolist() == judged
    assert {s.status for s in group.components["judge"].scores} == {"ok", "infra_error"}
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "judge.py" not in said, "nothing is wrong with its code"


@pytest.mark.parametrize("patience", [{"retries": 3}, {"tries": 0}, {"timeout": "soon"}, {"asked": 3}])
def test_patience_is_checked_before_anything_is_asked(patience: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"judge.patience: .*{next(iter(patience))}"):
        asked(1, patience=patience)


@pytest.mark.parametrize("criteria", [[], {"Is it right?": 0.0}, {"Is it right?": 2.0, "Is it long?": -1.0}])
def test_criteria_of_which_nothing_can_be_met_are_refused(criteria: object) -> None:
    with pytest.raises(ConfigError, match="at least one criterion"):
        asked(1, criteria=criteria)


def test_a_function_used_twice_pays_brevity_when_right_and_effort_when_wrong() -> None:
    right = {"limit": 4, "gated_by": "math_answer:correct"}
    wrong = {"limit": 4, "short": -1.0, "long": -0.5, "gated_by": "math_answer:incorrect", "name": "effort"}
    rewards = load_rewards(["math_answer", {"cosine_length": right}, {"cosine_length": wrong}], Path())
    problem = Problem("1", "1 + 1", {"answer": "2"})
    texts = {"\\boxed{2}": 2, "\\boxed{3}": 4}
    completions = [
        Completion(np.zeros(n, np.int64), np.zeros(n, np.float32), text, "stop") for text, n in texts.items()
    ]
    group = rewards.score_group(problem, np.zeros(1, np.int64), completions, strict=True)
    assert group.components["cosine_length"].values.tolist() == [0.75, 0.0]
    assert group.components["effort"].values.tolist() == [0.0, -0.5]
    with pytest.raises(ConfigError, match="give one a `name:`"):
        load_rewards(["math_answer", "math_answer"], Path())


def test_format_pays_only_where_an_answer_was_found() -> None:
    gated = {"answer_format": {"weight": 0.1, "gated_by": "math_answer"}}
    rewards = load_rewards([{"math_answer": {"rule": "answer_tag"}}, gated], Path())
    texts = (
        "<think>so</think><answer>4</answer>",
        "<think>so</think><answer>5</answer>",
        "<answer></answer>",
    )
    problem = Problem("p", "2+2=", {"answer": "4"})
    group = rewards.score_group(problem, completion().tokens, [completion(t) for t in texts])
    assert group.rewards == pytest.approx([1.1, 0.1, 0.0])


@pytest.mark.parametrize("text", ["48/2 = 24\n\n24+1 = 25", "für ∑ 数 🙂 é\n\nok", " leading  spaces \n\n x"])
def test_every_token_belongs_to_the_step_it_ends_in(text: str) -> None:
    tokenizer = build_tokenizer(["48/2 = 24"] * 3, vocab_size=300)
    tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    decode = lambda some: tokenizer.decode(some, skip_special_tokens=True)
    ends = token_ends(tokens, decode)
    assert ends == sorted(ends)
    assert ends[-1] == len(decode(tokens))
    spans = token_spans(split(text), ends)
    assert spans[0][0] == 0 and spans[-1][1] == len(tokens)
    assert all(b == c for (_, b), (c, _) in pairwise(spans))
    for (a, b), (start, end) in zip(split(text), spans, strict=True):
        said = decode(tokens[start:end])
        assert text[a:b].strip() in said or said.strip() in text[a:b]


def test_steps_reach_the_group_as_token_ends() -> None:
    tokenizer = build_tokenizer([WORKED] * 3, vocab_size=300)
    rewards = load_rewards(["calculations"], Path())
    rewards = replace(
        rewards, reader=ReplyReader(lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True))
    )
    texts = (WORKED, WORKED.replace("=72>>", "=73>>"), "no steps")
    completions = []
    for text in texts:
        tokens = np.array([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id])
        completions.append(Completion(tokens, np.zeros(len(tokens), np.float32), text, "stop"))
    group = rewards.score_group(Problem("p", "?"), np.array([1]), completions)
    assert group.rewards.tolist() == [1.0, 0.0, 0.0]
    (steps,) = [c.steps for c in group.components.values()]
    assert [list(s.values) for s in steps] == [[1, 1, 0], [1, -1, 0], []]
    assert steps[0].ends[-1] == len(completions[0].tokens) - 1
    assert steps[2] == StepRewards([], [])
    assert math.isfinite(steps[1].total)


@pytest.mark.parametrize("labels", [None, ["right"], {"a": 2}, {"a": "1"}, {"a": float("nan")}])
def test_labels_that_are_none_are_found_before_training(labels: object) -> None:
    good = Problem("good", "?", {"step_labels": LABELS})
    bad = Problem("bad", "?", {"step_labels": labels})
    _, found = check_references([good, bad], load_rewards(["step_labels"], Path()), most=0.5)
    assert list(found) == ["bad"] and "-1, 0 or 1" in found["bad"]


def test_without_a_tokenizer_there_are_no_steps_but_a_value() -> None:
    group = load_rewards(["calculations"], Path()).score_group(
        Problem("p", "?"), np.array([1]), [completion(WORKED)]
    )
    assert group.rewards.tolist() == [1.0]


def test_without_a_sandbox_that_holds_model_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    leaky = {"landlock": lambda *_: ProcessSandbox("unsafe_local")}
    monkeypatch.setattr(choice, "MAKERS", leaky)
    monkeypatch.setattr("covey.rewards.loading.choose", choose.__wrapped__)
    monkeypatch.setattr(choice, "MAKERS", {**leaky, "remote": choice.MAKERS["landlock"]})
    with pytest.raises(SandboxUnavailable):
        load_rewards(["code_tests"], Path())


SECRET = "http://me:geheim@127.0.0.1:9/v1"


@pytest.mark.parametrize(
    "values",
    [
        {"rewards": [{"judge": {"url": SECRET, "model": "m"}}]},
        {"rollout": {"sampler": {"url": SECRET}}},
        {"rollout": {"sampler": {"url": ["http://127.0.0.1:8", SECRET]}}},
        {"sandbox": {"backend": "remote", "url": SECRET}},
    ],
)
def test_a_password_in_an_address_is_refused_and_not_repeated(values: dict, tmp_path: Path) -> None:
    with pytest.raises(CoveyError, match="environment variables") as caught:
        resolved = load_config(values={"model": "tiny", "data": {"task": "last_digit"}, **values})
        load_rewards(resolved.config.rewards, tmp_path)
    assert "geheim" not in str(caught.value)
