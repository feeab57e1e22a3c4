"""`covey preview`: what it says of what was sampled, and that nothing is trained or written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from covey.cli import main
from covey.commands.preview import preview, rl_stage
from covey.config.load import load_config
from covey.errors import Stopped
from covey.insight.forecast import Workload, evaluations_of
from covey.insight.gpus import Subject
from covey.insight.preview import Measured, Preview
from covey.learner.memory import Shape
from covey.rewards.scorer import ScoringStats
from covey.system.console import RunConsole
from covey.types import Completion, Group, Problem
from tests import fakes
from tests.train.test_runs import FAST, StopAt, varied

CONFIG = load_config(values={"data": {"task": "sums"}, "rollout": {"max_tokens": 100, "group_size": 4}})


def scored(rewards: list[float], name: str = "p") -> Group:
    """A group whose completions are not much shorter than the limit."""
    return lengthened(fakes.group(rewards, name=name), "stop", list(range(60)))


def of(groups: list[Group], **rollout: object) -> Preview:
    stage = load_config(
        values={"data": {"task": "sums"}, "rollout": {"max_tokens": 100, "group_size": 4, **rollout}}
    )
    measured = Measured(groups, 2.0, len(groups), ScoringStats(), update=1.0, update_tokens=100)
    return Preview(stage, measured, {"weights": 10**9}, 2 * 10**9, held_out=10, problems=40)


def lengthened(group: Group, finish: str, tokens: list[int]) -> Group:
    """The same group, its completions ``tokens`` and ended so."""
    array = np.array(tokens)
    own = [
        Completion(array, np.full(len(array), -0.5, np.float32), c.text, finish) for c in group.completions
    ]
    return replace(group, completions=tuple(own))


def test_half_of_the_groups_alive_is_enough() -> None:
    found = of([scored([1, 0, 1, 0], name=f"p{i}") for i in range(6)])
    assert found.word == "yes"
    assert found.advice() == []
    assert found.record()["pass@1"]["value"] == 0.5


def test_never_correct_asks_for_a_cold_start() -> None:
    found = of([scored([0, 0, 0, 0], name=f"p{i}") for i in range(6)])
    assert found.word == "no"
    (advice,) = found.advice()
    assert "no answer was correct in 24 completions" in advice.finding
    assert "method: sft" in advice.remedy


def test_rare_successes_ask_for_a_larger_group() -> None:
    """One of 8 correct: a group of 2 is live in 1/4 of the cases, of 4 in half of them."""
    found = of([scored([1, *[0] * 7], name=f"p{i}") for i in range(12)], group_size=2)
    assert found.dead(2).value == pytest.approx(0.75)
    (advice,) = found.advice()
    assert advice.remedy == "rollout.group_size 4"
    assert found.record()["price_of_a_live_group"]["2"] == pytest.approx(8)


def test_truncation_asks_for_more_tokens_unless_it_is_a_loop() -> None:
    rewards = [1, 0, 0, 0]
    ended = [lengthened(scored(rewards, f"p{i}"), "stop", list(range(40))) for i in range(3)]
    long = [lengthened(scored(rewards, f"q{i}"), "length", list(range(100))) for i in range(3)]
    (advice,) = of([*ended, *long]).advice()
    assert advice.remedy == "rollout.max_tokens 200"
    assert "50% are truncated" in advice.finding
    looping = [lengthened(scored(rewards, f"q{i}"), "length", [1, 2, 3] * 33) for i in range(3)]
    (advice,) = of([*ended, *looping]).advice()
    assert "100% of these repeat themselves" in advice.finding
    assert "max_tokens" not in advice.remedy
    (advice,) = of([fakes.group(rewards, [9] * 4, f"p{i}") for i in range(6)]).advice()
    assert advice.remedy == "rollout.max_tokens 32"


def test_copies_ask_for_temperature() -> None:
    copies = [
        replace(g, completions=(g.completions[0],) * 4)
        for g in (scored([0, 0, 0, 0], name=f"p{i}") for i in range(4))
    ]
    advice = of([*copies, scored([1, 0, 0, 1])], temperature=0.3).advice()
    assert advice[0].remedy == "rollout.temperature 1"
    assert "4 of 5 groups are one text" in advice[0].finding


def test_another_temperature_is_recommended_where_it_is_clearly_better() -> None:
    dead, live = ([scored(r, name=f"p{i}") for i in range(16)] for r in ([0, 0, 0, 0], [1, 0, 1, 0]))
    found = replace(of(dead), others={1.3: live, 0.7: dead})
    advice = found.advice()[0]
    assert advice.remedy == "rollout.temperature 1.3"
    assert found.record()["temperatures"]["1.3"]["dead"]["value"] == 0
    assert any("at temperature 0.7: pass rate 0 %" in line for line in found.lines())
    few = replace(of(dead[:3]), others={1.3: live[:3]})
    assert "temperature" not in few.advice()[0].remedy, "three problems prove nothing"


def test_of_completions_without_a_token_no_time_is_computed() -> None:
    shape = Shape(10, 10, 5, 1, 2, 1, 1, 2, 4, number=4, exact=True)
    empty = [lengthened(scored([1, 0, 1, 0]), "stop", [])]
    assert replace(of(empty), subject=Subject(shape, [3])).elsewhere() == []
    some = [lengthened(scored([1, 0, 1, 0]), "stop", [1])]
    assert replace(of(some), subject=Subject(shape, [3])).elsewhere()


def test_what_resampling_costs() -> None:
    """dapo, half of the groups dead, 4 further rounds: 1 + 1/2 + ... + 1/16 of P groups are sampled, of
    which 1 - 1/32 of P are kept."""
    config, algorithm = CONFIG.config, CONFIG.algorithm
    work = Workload.of(config, algorithm, dead=0.5, length=10.0)
    asked = config.rollout.prompts_per_step * 4
    assert work.completions == pytest.approx(asked * 31 / 16)
    assert work.trained == pytest.approx(asked * 31 / 32)
    grpo = load_config(values={"algorithm": "dr_grpo", "rollout": {"group_size": 4}})
    work = Workload.of(grpo.config, grpo.algorithm, dead=0.5, length=10.0)
    assert (work.completions, work.trained) == (asked, asked / 2)


def test_the_forecast_adds_up() -> None:
    found = of([scored([1, 0, 1, 0], name=f"p{i}") for i in range(6)]).forecast()
    assert found is not None
    assert found.hours * 3600 == pytest.approx(
        200 * (found.rollout + found.update) + 2 * found.evaluation, rel=1e-9
    )
    assert evaluations_of(CONFIG.config, 10) == (2, 50)
    assert evaluations_of(CONFIG.config, 0) == (0, 0)


def test_a_pass_over_all_problems_before_the_first_step_is_counted() -> None:
    """Twice 40 problems of 60 tokens, where 24 of as many took 2 seconds."""
    groups = [scored([1, 0, 1, 0], name=f"p{i}") for i in range(6)]
    without, found = of(groups).forecast(), of(groups, prepass=2, curriculum="frontier").forecast()
    assert without is not None
    assert found is not None
    assert found.prepass == pytest.approx(2.0 * 80 / 24)
    assert found.tokens - without.tokens == 80 * 60
    assert (found.hours - without.hours) * 3600 == pytest.approx(found.prepass)
    assert "6.7 s measuring every problem, 200 steps" in "\n".join(found.lines())


def test_what_an_estimator_samples_besides_is_counted() -> None:
    """vine_ppo, two continuations: 30 of 100 tokens in parts of 25 have one cut, after which 5 are left.

    By lines at most three cuts, half of the completion left on average. A greedy baseline is one more.
    """
    rollout = {"group_size": 4, "max_tokens": 100, "prompts_per_step": 2}

    def work(**algorithm: object) -> Workload:
        stage = load_config(values={"algorithm": algorithm, "rollout": rollout})
        return Workload.of(stage.config, stage.algorithm, dead=0.0, length=30.0)

    vine = {"most": 4, "continuations": 2}
    assert work(name="vine_ppo", advantage={**vine, "split_by": "tokens"}).tokens == 8 * (30 + 2 * 5)
    assert work(name="vine_ppo", advantage=vine).tokens == 8 * (30 + 3 * 2 * 15)
    assert work(name="dr_grpo").tokens == 8 * 30
    assert work(name="remax").completions == 10


def test_a_preview_samples_continuations_and_forecasts_them(tmp_path: Path, capsys) -> None:
    """Hardly anybody ends within 12 tokens: parts of 6 have one cut, after which 6 are left."""
    path = config_file(tmp_path, "algorithm: {name: vine_ppo, advantage: {split_by: tokens, most: 2}}\n")
    assert main(["preview", str(path), "--groups", "4", "--samples", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    again, whole = found["forecast"]["continued"], found["forecast"]["tokens"]
    each = 4 * 6  # continuations, and what is left of 12 tokens
    assert 0.7 * each < again / (4 * 4 * 4) <= each
    assert whole == pytest.approx(again + 4 * 4 * 4 * found["length"]["mean"])
    assert found["forecast"]["update"] > 0


def config_file(tmp_path: Path, text: str = "") -> Path:
    (tmp_path / "rewards.py").write_text(
        "def varied(completion):\n    return len(completion) + sum(map(ord, completion)) % 7\n"
    )
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {task: last_digit, train_size: 64, test_size: 8}\nrewards: [rewards.py:varied]\nthreads: 1\n"
        "rollout: {group_size: 4, prompts_per_step: 4, max_tokens: 12}\ntrain: {steps: 4}\noutput: "
        f"{tmp_path / 'out'}\n{text}"
    )
    return path


def test_a_real_preview_measures_everything_and_writes_nothing(tmp_path: Path, capsys) -> None:
    assert (
        main(["preview", str(config_file(tmp_path)), "--groups", "6", "--temperature", "0.5", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["can_learn"] == "yes"
    assert (found["groups"], found["completions"]) == (6, 48)
    assert found["forecast"]["update"] > 0
    assert found["forecast"]["hours"] > 0
    assert found["tokens_per_second"] > 0
    assert set(found["temperatures"]) == {"0.5"}
    assert found["rewards"]["seconds"]["varied"] > 0
    assert set(found["memory"]) >= {"weights", "optimizer", "sampling", "update"}
    assert not (tmp_path / "out").exists()


def test_what_there_is_after_a_stop(tmp_path: Path) -> None:
    stage = rl_stage(
        load_config(values={**FAST, "rewards": (varied,), "rollout": {**FAST["rollout"], "max_running": 8}})
    )
    found = preview(stage, RunConsole(quiet=True), StopAt(30), groups=16, samples=4)
    assert found.measured.stopped
    assert 0 < len(found.measured.groups) < 16
    assert found.forecast() is None
    assert any("stopped before all 16" in line for line in found.lines())
    with pytest.raises(Stopped):
        preview(stage, RunConsole(quiet=True), StopAt(1), groups=16, samples=4)


def test_a_run_folder_and_supervised_learning_are_refused(tmp_path: Path, capsys) -> None:
    assert main(["preview", str(tmp_path)]) == 2
    assert "covey show" in capsys.readouterr().err
    path = tmp_path / "sft.yaml"
    path.write_text("method: sft\ndata: {task: last_digit}\n")
    assert main(["preview", str(path)]) == 2
    assert "nothing to preview" in capsys.readouterr().err


def test_of_a_pipeline_the_stage_that_samples() -> None:
    loaded = load_config(
        values={**FAST, "rewards": (varied,), "stages": [{"method": "sft"}, {"train": {"steps": 7}}]}
    )
    assert rl_stage(loaded).config.train.steps == 7
    assert any("stage 2 begins with the model of stage 1" in note for note in loaded.notes)


def test_a_verdict_that_does_not_read_what_is_written_is_named() -> None:
    """A chat model's sentences never passed float(completion), and nothing said that they held the number."""
    plain = fakes.group([0, 0, 0, 0])
    groups = []
    for n, answer in enumerate(("42", "17")):
        written = tuple(replace(c, text=f"That makes {answer}.") for c in plain.completions)
        groups.append(replace(plain, completions=written, problem=Problem(str(n), "", {"answer": answer})))
    stage = load_config(values={"model": "tiny", "rewards": ["math_answer"]})
    measured = Measured(groups, 1.0, 2, ScoringStats())
    found = Preview(stage, measured, {}, 0, 0, 2)
    assert any("stands in 100% of the completions, and 0% are correct" in str(a) for a in found.advice())
    unpaid = [replace(g, completions=plain.completions) for g in groups]
    other = Preview(stage, replace(measured, groups=unpaid), {}, 0, 0, 2)
    assert not any("stands in" in str(a) for a in other.advice())
