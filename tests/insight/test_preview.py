"""`covey preview`: what it says of what was sampled, and that nothing is trained or written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from covey.cli import main
from covey.commands.preview import Extent, preview, rl_stage
from covey.commands.preview_experiments import reread_answers
from covey.commands.preview_waves import Pilot, sample_in_waves
from covey.config.load import ResolvedConfig, load_config
from covey.errors import Stopped
from covey.insight.advice import advice
from covey.insight.answers import Advice, PromptForm, Readings, answer_forms
from covey.insight.forecast import Workload, evaluations_of, pace_at
from covey.insight.preview import Longer, Preview, SampledGroups, UpdateTiming
from covey.insight.preview_report import lines, record
from covey.rewards.scorer import Rewards, ScoringStats
from covey.rollouts.learned import rewards_of
from covey.sampling.base import Request, SampledCompletion, SamplingParams
from covey.sampling.prompts import EncodedProblem
from covey.system.console import RunConsole
from covey.types import Completion, Group, Problem
from covey_verify.extract import Thoughts
from tests import fakes
from tests.training.runs import FAST, StopAt, varied

CONFIG = load_config(values={"data": {"task": "sums"}, "rollout": {"max_tokens": 100, "group_size": 4}})


def scored(rewards: list[float], name: str = "p") -> Group:
    """A group whose completions are not much shorter than the limit."""
    return lengthened(fakes.group(rewards, name=name), "stop", list(range(60)))


def of(groups: list[Group], **rollout: object) -> Preview:
    stage = load_config(
        values={"data": {"task": "sums"}, "rollout": {"max_tokens": 100, "group_size": 4, **rollout}}
    )
    samples = SampledGroups(groups, 2.0, len(groups), ScoringStats())
    timing = UpdateTiming(0.0, 1.0, 100)
    return Preview(stage, samples, {"weights": 10**9}, 2 * 10**9, held_out=10, problems=40, update=timing)


def lengthened(group: Group, finish: str, tokens: list[int]) -> Group:
    """The same group, its completions ``tokens`` and ended so."""
    array = np.array(tokens)
    own = [
        Completion(array, np.full(len(array), -0.5, np.float32), c.text, finish) for c in group.completions
    ]
    return replace(group, completions=tuple(own))


def test_half_of_the_groups_alive_is_enough() -> None:
    found = of([scored([1, 0, 1, 0], name=f"p{i}") for i in range(6)])
    assert found.promise == "yes"
    assert advice(found) == []
    assert record(found)["pass@1"]["value"] == 0.5


def test_never_correct_asks_for_a_cold_start() -> None:
    found = of([scored([0, 0, 0, 0], name=f"p{i}") for i in range(6)])
    assert found.promise == "no"
    (one,) = advice(found)
    assert "none of 24 completions was correct" in one.finding
    assert "method: sft" in one.remedy


def test_rare_successes_ask_for_a_larger_group() -> None:
    """One of 8 correct: a group of 2 is live in 1/4 of the cases, of 4 in half of them."""
    found = of([scored([1, *[0] * 7], name=f"p{i}") for i in range(12)], group_size=2)
    assert found.dead(2).value == pytest.approx(0.75)
    (one,) = advice(found)
    assert one.remedy == "rollout.group_size 4"
    assert record(found)["completions_for_a_live_group"]["2"] == pytest.approx(8)


def test_truncation_asks_for_more_tokens_unless_it_is_a_loop() -> None:
    rewards = [1, 0, 0, 0]
    ended = [lengthened(scored(rewards, f"p{i}"), "stop", list(range(40))) for i in range(3)]
    long = [lengthened(scored(rewards, f"q{i}"), "length", list(range(100))) for i in range(3)]
    (one,) = advice(of([*ended, *long]))
    assert one.remedy == "rollout.max_tokens 200"
    assert "50 % are truncated" in one.finding
    looping = [lengthened(scored(rewards, f"q{i}"), "length", [1, 2, 3] * 33) for i in range(3)]
    (one,) = advice(of([*ended, *looping]))
    assert "100 % of these repeat themselves" in one.finding
    assert "max_tokens" not in one.remedy
    (one,) = advice(of([fakes.group(rewards, [9] * 4, f"p{i}") for i in range(6)]))
    assert one.remedy == "rollout.max_tokens 32"


def test_copies_ask_for_temperature() -> None:
    copies = [
        replace(g, completions=(g.completions[0],) * 4)
        for g in (scored([0, 0, 0, 0], name=f"p{i}") for i in range(4))
    ]
    given = advice(of([*copies, scored([1, 0, 0, 1])], temperature=0.3))
    assert given[0].remedy == "rollout.temperature 1"
    assert "in 4 of 5 groups all completions are identical" in given[0].finding


def test_another_temperature_is_recommended_where_it_is_clearly_better() -> None:
    dead, live = ([scored(r, name=f"p{i}") for i in range(16)] for r in ([0, 0, 0, 0], [1, 0, 1, 0]))
    found = replace(of(dead), others={1.3: live, 0.7: dead})
    given = advice(found)[0]
    assert given.remedy == "rollout.temperature 1.3"
    assert record(found)["temperatures"]["1.3"]["dead"]["value"] == 0
    assert any("at temperature 0.7, 16 problems: pass rate 0 %" in line for line in lines(found))
    few = replace(of(dead[:3]), others={1.3: live[:3]})
    assert "temperature" not in advice(few)[0].remedy, "three problems prove nothing"


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
    if found["truncated"] > 0.1:
        assert found["continued"]["max_tokens"] == 24
        assert found["continued"]["completions"] <= 16
    assert found["rewards"]["seconds"]["varied"] > 0
    assert set(found["memory"]) >= {"weights", "optimizer", "sampling", "update"}
    assert not (tmp_path / "out").exists()


def test_a_stopped_preview_shows_the_groups_so_far(tmp_path: Path) -> None:
    stage = rl_stage(
        load_config(values={**FAST, "rewards": (varied,), "rollout": {**FAST["rollout"], "max_running": 8}})
    )
    found = preview(stage, RunConsole(quiet=True), StopAt(120), Extent(4, 16))
    assert found.samples.stopped
    assert 0 < len(found.samples.groups) < 16
    assert found.forecast() is None
    assert any("stopped before all 16" in line for line in lines(found))
    with pytest.raises(Stopped):
        preview(stage, RunConsole(quiet=True), StopAt(1), Extent(4, 16))


def test_a_run_folder_and_supervised_learning_are_refused(tmp_path: Path, capsys) -> None:
    assert main(["preview", str(tmp_path)]) == 2
    assert "covey show" in capsys.readouterr().err
    path = tmp_path / "sft.yaml"
    path.write_text("method: sft\ndata: {task: last_digit}\n")
    assert main(["preview", str(path)]) == 2
    assert "nothing to preview" in capsys.readouterr().err


def test_of_a_pipeline_the_stage_that_samples() -> None:
    resolved = load_config(
        values={**FAST, "rewards": (varied,), "stages": [{"method": "sft"}, {"train": {"steps": 7}}]}
    )
    assert rl_stage(resolved).config.train.steps == 7
    assert any("stage 2 starts from the model of stage 1" in note for note in resolved.notes)


def test_a_verdict_that_does_not_read_what_is_written_is_named() -> None:
    """A chat model's sentences never passed float(completion), and nothing said that they held the number."""
    plain = fakes.group([0, 0, 0, 0])
    groups = []
    for n, answer in enumerate(("42", "17")):
        written = tuple(replace(c, text=f"That makes {answer}.") for c in plain.completions)
        groups.append(replace(plain, completions=written, problem=Problem(str(n), "", {"answer": answer})))
    stage = load_config(values={"model": "tiny", "rewards": ["math_answer"]})
    measured = SampledGroups(groups, 1.0, 2, ScoringStats())
    found = Preview(stage, measured, {}, 0, 0, 2)
    assert any(
        "100 % of the completions contain the correct answer, and 0 % are correct" in str(a)
        for a in advice(found)
    )
    unpaid = [replace(g, completions=plain.completions) for g in groups]
    other = Preview(stage, replace(measured, groups=unpaid), {}, 0, 0, 2)
    assert not any("contain the correct answer" in str(a) for a in advice(other))


class SlowModel:
    """A sampler whose clock runs ``seconds`` for a token of each running completion; all have ``length``.

    It runs ``reading`` more for a token of all of them, as if the weights were read.
    """

    def __init__(self, seconds: float, length: int, reading: float = 0.0) -> None:
        self.seconds, self.length, self.reading, self.now = seconds, length, reading, 0.0

    def monotonic(self) -> float:
        return self.now

    def sample(self, requests: list[Request], params: SamplingParams) -> Iterator[SampledCompletion]:
        tokens = min(self.length, params.max_tokens)
        self.now += tokens * (self.reading + self.seconds * sum(len(r.streams) for r in requests))
        finish = "stop" if tokens < params.max_tokens else "length"
        for number, request in enumerate(requests):
            for sample in range(len(request.streams)):
                own = Completion(np.arange(tokens), np.full(tokens, -0.5, np.float32), "51", finish)
                yield SampledCompletion(number, sample, own)


@dataclass
class Quiet:
    """A journal that prints nothing."""

    console: RunConsole = field(default_factory=lambda: RunConsole(quiet=True))


@dataclass
class MeasuredRun:
    """The parts of a run that sampling of a preview uses."""

    resolved: ResolvedConfig
    sampler: SlowModel
    rewards: Rewards
    journal: Quiet

    @property
    def monitor(self) -> MeasuredRun:
        """It is its own monitor."""
        return self

    def on_sample(self, done: int, total: int) -> None:
        """Report nothing."""


def pilot_of(
    model: SlowModel, rewards: list[object], monkeypatch: pytest.MonkeyPatch, **rollout: object
) -> Pilot:
    monkeypatch.setattr("covey.commands.preview_waves.time", model)
    settings = {"rollout": {"max_tokens": 512, **rollout}}
    stage = load_config(values={"model": "tiny", "rewards": rewards, **settings})
    problems = [EncodedProblem(Problem(f"p{n}", "17*3", {"answer": "51"}), np.arange(5)) for n in range(32)]
    own = rewards_of(stage, stage.config.rewards)
    return Pilot(MeasuredRun(stage, model, own, Quiet()), problems)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "groups", "samples", "limit"),
    [(1e-5, 32, 8, None), (1e-3, 16, 8, None), (5e-3, 3, 8, None), (1e-2, 2, 5, None), (0.1, 2, 4, 67)],
)
def test_the_speed_decides_how_much_is_sampled(
    seconds: float, groups: int, samples: int, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Completions of 200 tokens in 27 seconds; of GSM8K there was no line in ten minutes.

    The slowest takes 54 s for 4 completions of 67 tokens of 2 problems: a first wave takes at most twice its
    seconds.
    """
    model = SlowModel(seconds, 200)
    found = sample_in_waves(pilot_of(model, ["math_answer"], monkeypatch), range(4, 9), 27.0)
    assert (len(found.groups), len(found.groups[0].completions), found.limit) == (groups, samples, limit)
    assert model.now < 65
    assert found.by_time


def test_all_that_was_asked_for_is_sampled_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SlowModel(1.0, 200)
    found = sample_in_waves(pilot_of(model, ["math_answer"], monkeypatch), range(8, 9), None)
    assert (len(found.groups), found.limit, found.by_time) == (32, None, False)


@pytest.mark.parametrize("seconds", [27.0, None])
@pytest.mark.parametrize(("prompts", "size"), [(2, 8), (3, 8), (4, 12), (16, 8)])
def test_sampling_is_timed_with_as_many_completions_at_once_as_a_step_has(
    prompts: int, size: int, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 434 tokens/s, the speed of 64 at once, a step of 16 was forecast; it ran at 262."""
    reading, width = 0.01, prompts * size
    model = SlowModel(1e-4, 200, reading)
    rollout = {"prompts_per_step": prompts, "group_size": size}
    pilot = pilot_of(model, ["math_answer"], monkeypatch, **rollout)
    found = sample_in_waves(pilot, range(4, 9), seconds)
    # A token of one completion: its own seconds, and its part of the reading.
    assert found.seconds == pytest.approx((1e-4 + reading / width) * 200 * 8 * len(found.groups))
    assert model.now < 60 or seconds is None


def test_an_evaluation_is_timed_with_its_own_number_of_completions_at_once() -> None:
    values = {"rollout": {"prompts_per_step": 2, "group_size": 4}, "eval": {"problems": 10, "samples": 1}}
    stage = load_config(values={"data": {"task": "sums"}, **values})
    paces = {8: 0.3, 16: 0.2, 32: 0.15}  # 0.1 s for a token, and 1.6 s for a token of all
    groups = [scored([1, 0, 1, 0])]
    samples = SampledGroups(groups, 1.0, 1, ScoringStats(), paces=paces)
    timing = UpdateTiming(0.0, 1.0, 9)
    expected = Preview(stage, samples, {}, 0, held_out=10, problems=40, update=timing).forecast()
    assert expected is not None
    assert expected.evaluation == pytest.approx(20 * 60 * (0.1 + 1.6 / 20))


def test_the_time_of_more_and_of_fewer_completions_than_were_measured_follows_the_same_line() -> None:
    paces = {32: 0.002, 64: 0.0015}  # 0.001 s for a token, and 0.032 s for a token of all
    assert [pace_at(paces, width) for width in (1, 48, 512)] == pytest.approx(
        [0.033, 0.001 + 0.032 / 48, 0.001 + 0.032 / 512]
    )
    # Noise would give 512 completions a negative time, and one completion the time of two.
    noisy = {32: 0.01, 64: 0.004}
    assert pace_at(noisy, 512) == pytest.approx(0.004 * 64 / 512)
    assert pace_at({32: 0.01, 64: 0.02}, 512) == pytest.approx(0.02)


def test_of_what_had_no_time_to_end_nothing_is_concluded() -> None:
    long = [lengthened(scored([0, 0, 0, 0], f"p{i}"), "length", list(range(30))) for i in range(2)]
    found = of(long)
    found = replace(found, samples=replace(found.samples, limit=30, by_time=True))
    assert found.promise == "unknown"
    assert found.length == 100, "they may go on to the limit"
    assert found.work.trained == found.work.completions, "no group is known to be dead"
    said = "\n".join(lines(found))
    assert "sampled only 30 of 100 tokens" in said
    assert "pass rate" not in said
    (one,) = advice(found)
    assert "--groups 4" in one.remedy


def test_more_tokens_are_advised_only_if_continued_completions_end_and_earn() -> None:
    """Twice the tokens were advised where the truncated completions rambled and would never have answered."""
    ended = [lengthened(scored([1, 0, 0, 1], f"p{i}"), "stop", list(range(40))) for i in range(3)]
    long = [lengthened(scored([0, 0, 0, 0], f"q{i}"), "length", list(range(100))) for i in range(3)]
    found = of([*ended, *long])

    def with_longer(finish: str, tokens: int, rewards: list[float]) -> Advice:
        groups = [lengthened(scored(rewards), finish, list(range(tokens)))]
        return next(
            a
            for a in advice(replace(found, longer=Longer(groups, 200, np.zeros(4))))
            if "truncated" in a.finding
        )

    assert with_longer("stop", 130, [1, 0, 1, 0]).remedy == "rollout.max_tokens 144"
    rambling = with_longer("length", 200, [0, 0, 0, 0])
    assert "continued to 200 tokens, none ended: more tokens would help little" in rambling.finding
    assert rambling.remedy.startswith("keep rollout.max_tokens: completions that end earn 0.5")
    assert rambling.sample.startswith('"')
    worthless = with_longer("stop", 130, [0, 0, 0, 0])
    assert "4 ended and none was correct: their rewards are low" in worthless.finding


def test_a_temperature_with_more_correct_answers_is_recommended() -> None:
    """At .7 41 % were correct beside 9 % at 1, and nothing was said, as partial rewards kept all alive."""
    few = [scored([1, 0.2, 0.1, 0.3] if i % 3 == 0 else [0.2, 0, 0.1, 0.3], f"p{i}") for i in range(16)]
    many = [scored([1, 1, 0.1, 0.3], f"p{i}") for i in range(16)]
    one = next(a for a in advice(replace(of(few), others={0.7: many})) if "temperature" in a.remedy)
    assert one.remedy == "rollout.temperature 0.7"
    assert "with as many live groups" in one.finding
    assert not any("temperature" in a.remedy for a in advice(replace(of(few), others={0.7: few})))


PLAIN = PromptForm(chat=False, template=False, marks=Thoughts(), from_file=True)


def said(texts: list[str], finish: str, prompt: object = "", **wording: object) -> list[Advice]:
    plain = lengthened(scored([0] * len(texts)), finish, list(range(60)))
    own = tuple(replace(c, text=text) for c, text in zip(plain.completions, texts, strict=True))
    problem = Problem("p", prompt, {}, thoughts=wording.get("marks", Thoughts()))
    group = replace(plain, completions=own, problem=problem)
    return advice(replace(of([group, group]), wording=PLAIN._replace(**wording)))


def test_what_the_reward_will_meet_is_named_with_a_sample() -> None:
    four = ["The answer is"] * 4
    (base, *_) = said(four, "length")
    assert "no chat template" in base.finding and base.sample == '"The answer is"'
    (plain, *_) = said(four, "length", template=True)
    assert plain.remedy == "data.chat: true"
    (stop, *_) = said(["7\nQuestion: 1+1\nAnswer: 2"] * 4, "length", "Question: 3+4\nAnswer:")
    assert stop.remedy == 'rollout.stop: ["\\nQuestion:"]' or stop.remedy == 'rollout.stop: ["\\nAnswer:"]'
    (special, *_) = said(["7<|eot|>and then"] * 4, "length", chat=True, specials=["<|eot|>"])
    assert special.remedy.startswith("rollout.stop: ['<|eot|>']")
    opened = Thoughts(begun=True)
    (thoughts, *_) = said(
        ["so"] * 4, "length", chat=True, marks=opened, unopened='{"enable_thinking": false}'
    )
    assert (
        "opens thoughts in the prompt (<think>), and 8 of 8 completions end before </think>"
        in thoughts.finding
    )
    assert 'data.chat_template_kwargs: {"enable_thinking": false}' in thoughts.remedy
    assert thoughts.remedy.startswith("a larger rollout.max_tokens")
    (ended, *_) = said(["so"] * 4, "stop", chat=True, marks=opened)
    assert ended.remedy == "a cold start that closes them", "more tokens would not"
    assert not any(
        "thoughts" in a.finding for a in said(["so</think>7"] * 4, "stop", chat=True, marks=opened)
    )


def bare(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)


@pytest.mark.parametrize(
    ("rewards", "text", "accepted", "remedy"),
    [
        ((bare,), "17 times 3 makes {}.", "'42'", "extract(completion, 'last_number')"),
        (("math_answer",), "It is {}.", "boxed{42}", "rewards: [{math_answer: {rule: last_number}}]"),
        (("exact_answer",), "{}", "<answer>42</answer>", "rewards: [{exact_answer: {rule: whole}}]"),
        ((bare,), "Here:\n```python\n{}\n```\nDone.", "'42'", "covey_verify.extract.code_block"),
    ],
)
def test_an_answer_in_another_form_is_told_from_an_incorrect_one(
    rewards: tuple[object, ...], text: str, accepted: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict itself is asked whether it pays what the model wrote, written otherwise."""
    plain = fakes.group([0, 0, 0, 0])
    groups = []
    for answer in ("42", "17", "93"):
        written = tuple(replace(c, text=text.format(answer), finish="stop") for c in plain.completions)
        groups.append(replace(plain, completions=written, problem=Problem(answer, "", {"answer": answer})))
    pilot = pilot_of(SlowModel(0.0, 1), list(rewards), monkeypatch)
    readings = reread_answers(pilot, SampledGroups(groups, 1.0, 3, ScoringStats()), {})
    assert readings is not None
    assert (readings.tried, len(readings.accepted), readings.by_chance) == (12, 12, 0)
    measured = SampledGroups(groups, 1.0, 3, ScoringStats())
    one = advice(Preview(pilot.run.resolved, measured, {}, 0, 0, 2, readings=readings, wording=PLAIN))[0]
    assert "12 of 12 completions that" in one.finding
    assert accepted in one.finding
    assert remedy in one.remedy
    assert "42" in one.sample


def test_an_answer_that_is_there_by_chance_is_no_reading() -> None:
    group = scored([0, 0, 0, 0])
    found = [("so 1", next(answer_forms("so 1", Thoughts())))] * 4
    measured = of([group, group])
    assert any(
        "another form" in str(a)
        for a in advice(replace(measured, readings=Readings(8, found, 0, "v", False), wording=PLAIN))
    )
    assert not any(
        "another form" in str(a)
        for a in advice(replace(measured, readings=Readings(8, found, 3, "v", False), wording=PLAIN))
    )
