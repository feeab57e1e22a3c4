"""The audit: a sound record is called sound, each mistake is named, bad files say what is wrong with them."""

from __future__ import annotations

import copy
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.audit.checks.check import apply
from covey.audit.course import TRL_NAMES, findings_from_metrics, named
from covey.audit.frameworks import FRAMEWORKS
from covey.audit.probes import probe
from covey.audit.readers.record_file import read_record
from covey.audit.readers.sources import open_run
from covey.audit.record import AuditRecord
from covey.audit.table import CHECKS, PREDICATES
from covey.audit.writers.recorder import Recorder
from covey.audit.writers.trl import _TrlRecorder
from covey.cli import main
from covey_verify.errors import DataError
from tests.audit.lines import (
    BOS,
    EOS,
    Lines,
    calls,
    derived,
    found,
    motion,
    rollouts,
    rows,
    samples,
    sound,
    terms,
    updates,
    written,
)
from tests.training.runs import start

HEAD = '{"format": "covey-audit", "version": 2}\n'
ROLLOUT = '{"kind": "rollout", "number": 0, "step": 0, "completions": [%s]}\n'
Settings = dict[str, Any]


def every(part: Callable[[Lines], Lines], **values: Any) -> Callable[[Lines], None]:
    """Set fields of all parts; a function gets the part's old fields."""

    def change(lines: Lines) -> None:
        for row in part(lines):
            row |= {k: v(row) if callable(v) else v for k, v in values.items()}

    return change


def settings(**values: Any) -> Callable[[Lines], None]:
    return lambda lines: lines[0]["settings"].update(values)


def both(*changes: Callable[[Lines], None]) -> Callable[[Lines], None]:
    def change(lines: Lines) -> None:
        for one in changes:
            one(lines)

    return change


def advantages(change: Callable[[list[float]], list[float]]) -> Callable[[Lines], None]:
    """Change the advantages of each rollout, given its rewards, in its updates too."""

    def apply_to(lines: Lines) -> None:
        for line in rollouts(lines):
            new = change([s["advantage"] for s in line["completions"]])
            for sample, value in zip(line["completions"], new, strict=True):
                sample["advantage"] = value
            for row in rows(lines):
                if row["rollout"] == line["number"]:
                    row["advantage"] = new[row["completion"]]

    return apply_to


def unequal(lines: Lines) -> None:
    """Make one group easier than the other, so that means and stds of the batch are other ones."""
    for line in rollouts(lines):
        paid = [0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0]
        for sample, reward in zip(line["completions"], paid, strict=True):
            sample["rewards"] = sample["alone"] = {"right": reward}


def of_rewards(give: Callable[[list[float]], list[float]]) -> Callable[[Lines], None]:
    """Advantages as a function of rewards that differ between the groups."""

    def change(lines: Lines) -> None:
        unequal(lines)
        for line in rollouts(lines):
            new = give([s["rewards"]["right"] for s in line["completions"]])
            for place, sample in enumerate(line["completions"]):
                sample["advantage"] = new[place]
                for row in rows(lines):
                    if (row["rollout"], row["completion"]) == (line["number"], place):
                        row["advantage"] = new[place]

    return change


def zscores(rewards: list[float]) -> list[float]:
    """(r - mean) / (std + 1e-4) within groups of four."""
    result = []
    for g in (rewards[:4], rewards[4:]):
        mean = sum(g) / 4
        std = math.sqrt(sum((r - mean) ** 2 for r in g) / 3)
        result += [(r - mean) / (std + 1e-4) for r in g]
    return result


def over(values: list[float], of: list[float], shift: float = 0.0) -> list[float]:
    """(values - shift) over the sample std of another list."""
    mean = sum(of) / len(of)
    std = math.sqrt(sum((x - mean) ** 2 for x in of) / (len(of) - 1))
    return [(v - shift) / (std + 1e-8) for v in values]


def centred(rewards: list[float]) -> list[float]:
    return [r - sum(g) / 4 for g in (rewards[:4], rewards[4:]) for r in g]


def rolled(values: list[Any]) -> list[Any]:
    return [*values[1:], values[0]]


def reordered(lines: Lines) -> None:
    """Put everything of an update's rows but completions and advantages in another order."""
    for update, number in zip(updates(lines), (0, 0, 1, 1), strict=True):
        moved = [{**row} for row in rolled(update["rows"])]
        for row, other in zip(update["rows"], moved, strict=True):
            ids = rollouts(lines)[number]["completions"][other["completion"]]["ids"]
            row |= {**other, "ids": ids, "completion": row["completion"], "advantage": row["advantage"]}


def told_apart(row: dict[str, Any]) -> None:
    """Give a completion log-probs that no other one has."""
    for name in ("logprobs", "old_logprobs"):
        row[name] = [p + 0.003 * row["completion"] for p in row[name]]


def as_calls(lines: Lines, change: Callable[[dict[str, Any]], dict[str, Any]], first: int = 0) -> None:
    """Let the calls of a loss be those of the second update, from the ``first`` on with changed rows."""
    for n, call in enumerate(calls(lines)):
        rows = [change(row) if n >= first else row for row in updates(lines)[1]["rows"]]
        names = ("mask", "logprobs", "old_logprobs")
        spread = [{"advantage": [row["advantage"]] * len(row["mask"])} for row in rows]
        call["rows"] = [
            {name: row[name] for name in names} | own for row, own in zip(rows, spread, strict=True)
        ]


def padded(lines: Lines) -> None:
    """Let copies of the first two completions fill up each batch."""
    for line in rollouts(lines):
        line["completions"] += copy.deepcopy(line["completions"][:2])
    for update in updates(lines):
        update["rows"] += [row | {"completion": row["completion"] + 8} for row in update["rows"][:2]]


def sampled_again(lines: Lines) -> None:
    """Sample the first prompts of many in each of six rollouts."""
    lines[0]["data"].update(rows=900, distinct=900)
    first = rollouts(lines)[0]
    for number in range(2, 6):
        again = [{**s, "ids": [30 + number, *s["ids"][1:]]} for s in first["completions"]]
        lines.append({**first, "number": number, "step": 4, "completions": again})


def rounded(lines: Lines) -> None:
    """Move the log-probs of each token by one number, so that the old ones have eight bits."""
    places = iter(range(1000))
    for line in rollouts(lines):
        for place, sample in enumerate(line["completions"]):
            due = [-(128 + next(places) % 128) / 256 for _ in sample["ids"]]
            by = [a - b for a, b in zip(due, sample["model_logprobs"], strict=True)]
            own = [r for r in rows(lines) if (r["rollout"], r["completion"]) == (line["number"], place)]
            for part in (sample, *own):
                for name in [name for name in part if "logprobs" in name]:
                    part[name] = [a + b for a, b in zip(part[name], by, strict=True)]


def short_and_long(lines: Lines) -> None:
    """Let every other micro-batch of OpenRLHF be twice as long, and each divide by its own tokens."""
    lines[0]["framework"] = "openrlhf"
    for call in calls(lines)[::2]:
        call["rows"] = [{name: [*values, *values] for name, values in row.items()} for row in call["rows"]]


MISTAKES: dict[str, Callable[[Lines], None]] = {
    "nothing_trained": every(rows, mask=lambda r: [0] * len(r["mask"])),
    "tokens_replaced": every(rows, ids=lambda r: [99] * len(r["mask"])),
    "mask_shifted": every(rows, mask=lambda r: [0, *[1] * len(r["mask"])]),
    "end_untrained": every(rows, mask=lambda r: [*[1] * (len(r["mask"]) - 1), 0]),
    "padding_trained": every(rows, mask=lambda r: [*r["mask"], 1]),
    "tool_trained": every(samples, inserted=lambda s: [0, 1, *[0] * (len(s["ids"]) - 2)]),
    "tool_marks_trained": every(samples, ids=lambda s: [8, 30, 9, *s["ids"][3:]]),
    "prompt_trained": both(
        every(samples, prompt_ids=lambda s: [BOS, s["ids"][0]]),
        every(samples, model_logprobs=lambda s: [-5.0, *s["model_logprobs"][1:]]),
    ),
    "end_lost": every(samples, ids=lambda s: [*s["ids"][:-1], 33]),
    "never_ends": both(settings(max_completion_length=3), every(samples, ids=lambda s: [33] * len(s["ids"]))),
    "bos_doubled": every(samples, prompt_ids=[BOS, BOS, 70]),
    "prompt_ended": every(samples, prompt_ids=lambda s: [*s["prompt_ids"], EOS]),
    "template_twice": both(
        lambda lines: lines[0]["tokens"]["names"].update({str(EOS): "<|end|>"}),
        every(samples, prompt=lambda s: [{"role": "user", "content": f"<|user|>{s['prompt']}<|end|>"}]),
    ),
    "template_missing": lambda lines: lines[0]["tokens"].update(opening_logprob=-0.01),
    "kl_own": every(samples, kl_ids=lambda s: s["ids"]),
    "not_finite": lambda lines: updates(lines)[1].update(loss=math.nan),
    "logprobs_shifted": every(
        rows, logprobs=lambda r: rolled(r["logprobs"]), old_logprobs=lambda r: rolled(r["old_logprobs"])
    ),
    "temperature_missing": every(rows, logprobs=lambda r: [0.6 * p - 0.2 for p in r["logprobs"]]),
    "logprobs_differ": every(
        rows,
        logprobs=lambda r: [p - 0.3 for p in r["logprobs"]],
        old_logprobs=lambda r: [p - 0.3 for p in r["old_logprobs"]],
    ),
    "old_stale": every(rows, old_logprobs=lambda r: [p - 0.1 for p in r["old_logprobs"]]),
    "logprobs_order": lambda lines: [
        row.update(old_logprobs=other)
        for update in updates(lines)
        for row, other in zip(
            update["rows"], rolled([r["old_logprobs"] for r in update["rows"]]), strict=True
        )
    ],
    "old_exchanged": lambda lines: as_calls(
        lines, lambda row: row | {"logprobs": row["old_logprobs"], "old_logprobs": row["logprobs"]}
    ),
    "loss_order": both(
        lambda lines: [told_apart(row) for row in rows(lines)],
        lambda lines: as_calls(lines, lambda row: row | {"advantage": -row["advantage"]}),
    ),
    "old_replaced": lambda lines: as_calls(
        lines, lambda row: row | {"old_logprobs": [p - 0.3 for p in row["old_logprobs"]]}, first=1
    ),
    "ratio_stuck": every(rows, old_logprobs=lambda r: r["logprobs"]),
    "sampler_temperature": every(samples, sampler_logprobs=lambda s: s["model_logprobs_at_1"]),
    "sampler_shifted": every(samples, sampler_logprobs=lambda s: [*s["sampler_logprobs"][1:], -0.5]),
    "reference_differs": every(rows, ref_logprobs=lambda r: [p - 0.1 for p in r["ref_logprobs"]]),
    "sampler_differs": every(samples, sampler_logprobs=lambda s: [p - 0.05 for p in s["sampler_logprobs"]]),
    "reference_moves": every(rows, ref_logprobs=lambda r: r["logprobs"]),
    "ratio_wide": both(
        every(lambda lines: updates(lines)[1]["rows"], logprobs=lambda r: [p + 0.8 for p in r["logprobs"]]),
        every(updates, loss=None),
    ),
    "group_mixed": every(samples, group=lambda s: 0),
    "group_of_one": lambda lines: [s.update(group=n % 8) for n, s in enumerate(samples(lines))],
    "advantages_moved": every(rows, advantage=lambda r: -r["advantage"]),
    "advantages_negated": advantages(lambda a: [-x for x in a]),
    "advantages_order": advantages(lambda a: [a[0], a[2], a[1], *a[3:]]),
    "std_missing": of_rewards(centred),
    "std_over_batch": of_rewards(lambda r: over(centred(r), r)),
    "batch_baseline": of_rewards(lambda r: over(r, r, sum(r) / len(r))),
    "baseline_missing": of_rewards(list),
    "advantages_normalized_twice": both(of_rewards(lambda r: over(zscores(r), zscores(r)))),
    "advantages_scaled": advantages(lambda a: [3 * x for x in a]),
    "advantages_differ": advantages(lambda a: [x + 0.1 * n for n, x in enumerate(a)]),
    "std_added": both(settings(scale_rewards="none")),
    "rewards_order": every(samples, alone=lambda s: {"right": 1 - s["rewards"]["right"]}),
    "length_fined": every(
        samples,
        alone=lambda s: {"right": s["rewards"]["right"] + 0.1 * len(s["ids"])},
        empty={"right": -1.0},
    ),
    "prompt_cut": both(
        settings(max_prompt_length=3), every(samples, prompt_ids=lambda s: rolled(s["prompt_ids"]))
    ),
    "group_padded": both(settings(num_generations=4), padded),
    "advantages_huge": advantages(lambda a: [1e4 * x for x in a]),
    "kl_drowns": every(
        rows, token_rewards=lambda r: [s - 50 * (r["completion"] % 3) for s in r["token_scores"]]
    ),
    "pays_list": every(samples, listed={"right": 1.0}),
    "prompts_again": sampled_again,
    "logprobs_rounded": rounded,
    "micro_means": short_and_long,
    "reward_idle": every(samples, rewards=lambda s: {**s["rewards"], "style": 0.0}),
    "gradient_rescaled": both(
        every(calls, moved=False), every(lambda lines: terms(lines, "policy"), gradient_scaled=0.3)
    ),
    "reward_cut": every(rows, token_scores=lambda r: [10.0 if s else 0.0 for s in r["token_scores"]]),
    "entropy_sign": both(
        settings(**{"algorithm.entropy.coef": 0.01}),
        every(lambda lines: terms(lines, "entropy"), factor=0.005),
    ),
    "coefficient_differs": every(lambda lines: terms(lines, "kl"), factor=0.5),
    "gradient_kept": every(lambda lines: terms(lines, "policy"), gradient_kept=True),
    "correction_constant": every(rows, corrections=lambda r: [0.2] * len(r["mask"])),
    "rewards_in_batch": every(samples, alone={"right": 1.0}),
    "weights_zero": both(settings(reward_weights=[0.0]), advantages(lambda a: [0.0 for _ in a])),
    "rewards_missing": every(samples, rewards={"right": None}, alone={"right": None}),
    "pays_empty": every(samples, empty={"right": 1.0}),
    "rewards_constant": both(
        every(samples, rewards={"right": 0.0}, alone={"right": 0.0}), advantages(lambda a: [0.0 for _ in a])
    ),
    "pays_any_row": every(samples, elsewhere=lambda s: s["alone"]),
    "reward_drowned": every(
        samples, rewards=lambda s: {**s["rewards"], "style": 1e-4 * (s["group"] + len(s["ids"]))}
    ),
    "reordered_alone": reordered,
    "answers_differ": lambda lines: samples(lines)[1]["row"].update(answer="7"),
    "answer_empty": lambda lines: [s["row"].update(answer=" ") for s in samples(lines)[:4]],
    "rows_duplicated": lambda lines: lines[0]["data"].update(distinct=5),
    "eval_is_train": lambda lines: lines[0]["data"].update(eval_in_train=10),
    "kl_sign": settings(beta=-0.04),
    "loss_differs": every(updates, loss=lambda u: u["loss"] + 0.5),
    "wrong_way": every(
        rows, after_logprobs=lambda r: [p - (0.01 if r["advantage"] > 0 else -0.01) for p in r["logprobs"]]
    ),
    "rate_zero": every(updates, learning_rate=0.0, weights_changed=0.0),
    "warmup_long": settings(warmup_steps=2000, max_steps=4),
    "no_motion": every(updates, weights_changed=0.0),
    "too_coarse": both(settings(dtype="bfloat16"), every(updates, weights_changed=0.03)),
    "gradient_zero": every(updates, grad_norm=0.0),
    "clip_idle": settings(epsilon=20.0),
    "penalty_untrained": settings(repetition_penalty=1.2),
    "clipped_always": every(updates, grad_norm=500.0, step_norm=1.0),
    "gradient_unexplained": every(updates, gradient_cosine=0.7),
    "step_differs": every(updates, motions=[motion("head", change=0.0, off=0.01)]),
    "moved_between": every(updates, motions=[motion("head", outside=0.009)]),
    "rate_differs": every(updates, learning_rate=1e-3),
    "prompt_space": every(samples, prompt=lambda s: f"{s['prompt']} "),
    "betas_exchanged": settings(adam_beta1=0.999, adam_beta2=0.9),
    "best_by_loss": settings(load_best_model_at_end=True),
    "penalty_pays": every(samples, rewards=lambda s: {**s["rewards"], "penalty": s["rewards"]["right"] / 10}),
}


def test_a_sound_record_has_no_findings(tmp_path: Path) -> None:
    record = read_record(written(derived(sound()), tmp_path / "run.jsonl"))
    report = apply(CHECKS, record)
    assert [str(f) for f in report.findings] == []
    assert not report.unjudged and report.judged == len(CHECKS)


@pytest.mark.parametrize("name", sorted(MISTAKES))
def test_a_mistake_is_named_first(name: str, tmp_path: Path) -> None:
    lines = copy.deepcopy(sound())
    MISTAKES[name](lines)
    assert found(lines, tmp_path / "run.jsonl")[:1] == [name]


@pytest.mark.parametrize(
    ("prompts", "ended", "said"),
    [
        (1, 0, ["16 of 16 completions of one prompt reach the limit of 3 tokens"]),
        (1, 2, []),  # 14 of 16 are 7 of 8, give or take one
        (2, 0, []),  # 8 of 8 may be three of four
        (16, 0, ["16 of 16 completions reach the limit of 3 tokens"]),
        (16, 2, []),
    ],
)
def test_few_prompts_say_less_of_how_often_completions_end(
    prompts: int, ended: int, said: list[str], tmp_path: Path
) -> None:
    lines = sound()
    settings(max_completion_length=3)(lines)
    for n, sample in enumerate(samples(lines)):
        sample["prompt"] = f"prompt {n % prompts}"
        sample["ids"] = [33] * (len(sample["ids"]) - 1) + [EOS if n < ended else 33]
    checks = [check for check in CHECKS if check.name == "never_ends"]
    report = apply(checks, read_record(written(lines, tmp_path / "run.jsonl")))
    assert [f.sentence.partition(";")[0] for f in report.findings] == said


def of_verl(lines: Lines, **settings: Any) -> Lines:
    """The record as verl's, whose rewards are those of its functions."""
    lines[0] |= {"framework": "verl", "settings": settings}
    for sample in samples(lines):
        sample["reward"] = sample["rewards"]["right"]
    return lines


@pytest.mark.parametrize(("settings", "names"), [({}, ["sampler_differs"]), ({"use_vllm": True}, [])])
def test_a_difference_that_a_run_corrects_for_may_be_larger(
    settings: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    lines = sound()
    lines[0]["settings"] |= {"vllm_importance_sampling_correction": True, "use_vllm": False, **settings}
    for sample in samples(lines):
        sample["sampler_logprobs"] = [p - 0.05 for p in sample["sampler_logprobs"]]
    assert found(lines, tmp_path / "run.jsonl") == names


def test_a_penalty_for_long_completions_is_no_dependence_on_the_batch(tmp_path: Path) -> None:
    """As DAPO's, which the trainer adds to what the function gives."""
    lines = sound()
    for sample in samples(lines):
        sample["alone"] = {"right": sample["rewards"]["right"] + 0.1 * max(0, len(sample["ids"]) - 4)}
    assert found(lines, tmp_path / "run.jsonl") == []


def test_a_sampler_with_old_weights_is_no_matter_of_precision(tmp_path: Path) -> None:
    lines = sound()
    third = copy.deepcopy(lines[4:7])
    for line in third:
        line["step"] += 2
        line.update({"number": 2} if line["kind"] == "rollout" else {})
        for row in line.get("rows", ()):
            row["rollout"] = 2
    lines[7:7] = third
    for n, by in ((1, 0.1), (2, 0.08)):
        for sample in rollouts(lines)[n]["completions"]:
            sample["sampler_logprobs"] = [p + by for p in sample["sampler_logprobs"]]
    assert found(lines, tmp_path / "run.jsonl") == ["sampler_behind"]
    for sample in rollouts(lines)[0]["completions"]:
        sample["sampler_logprobs"] = [p + 0.05 for p in sample["sampler_logprobs"]]
    report = apply(CHECKS, read_record(written(lines, tmp_path / "run.jsonl")))
    assert [f.id for f in report.findings] == ["sampler_differs"]
    assert "from the first rollout on" in report.findings[0].sentence


def test_a_score_at_every_token_is_another_reward(tmp_path: Path) -> None:
    lines = of_verl(sound(), **{"algorithm.adv_estimator": "grpo"})
    assert "reward_differs" not in found(lines, tmp_path / "run.jsonl")
    for sample in samples(lines):
        sample["reward"] *= len(sample["ids"])
    assert "reward_differs" in found(lines, tmp_path / "run.jsonl")


@pytest.mark.parametrize(("sign", "names"), [(-1, []), (1, ["kl_sign"])])
def test_a_kl_in_the_reward_is_subtracted(sign: int, names: list[str], tmp_path: Path) -> None:
    kl = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.1}
    lines = of_verl(sound(), **{"algorithm.adv_estimator": "reinforce_plus_plus"}, **kl)
    for number, rollout in enumerate(rollouts(lines)):
        for sample in rollout["completions"]:
            # The reference of the second rollout is .02 nats below the policy at each token.
            sample["reward"] += sign * 0.1 * 0.02 * number * len(sample["ids"])
    assert [name for name in found(lines, tmp_path / "run.jsonl") if name == "kl_sign"] == names


@pytest.mark.parametrize("page", ["audit.md", "coverage.md"])
def test_pages_count_the_checks(page: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    assert set(re.findall(r"(\d+) checks (?:apply|of masks)", text)) == {str(len(CHECKS))}


def test_every_check_has_its_words_a_condition_and_a_remedy() -> None:
    names = {check.name for check in CHECKS}
    assert names == set(PREDICATES)
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    for check in CHECKS:
        assert f"| `{check.name}` ({check.words.severity}) | {check.condition} |" in page
        assert set(check.words.silences) <= names, check.name
        assert check.words.any, check.name


def test_copies_that_fill_up_a_batch_may_be_masked(tmp_path: Path) -> None:
    lines = sound()
    settings(num_generations=4)(lines)
    padded(lines)
    every(updates, loss=None)(lines)  # TRL's mean over rows would count the copies
    for row in rows(lines):
        if row["completion"] >= 8:
            row |= {"mask": [0] * len(row["mask"]), "advantage": 0.0}
    assert found(lines, tmp_path / "run.jsonl") == []


def test_a_judge_may_have_a_little_noise(tmp_path: Path) -> None:
    lines = sound()
    for n, sample in enumerate(samples(lines)):
        sample["alone"] = {"right": sample["rewards"]["right"] + 0.02 * (-1) ** n}
    assert found(lines, tmp_path / "run.jsonl") == []


def test_rewards_are_asked_for_a_list_of_short_answers() -> None:
    def anywhere(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(a in c) for c, a in zip(completions, answer, strict=True)]

    columns = {"completions": ["4", "5"], "answer": ["4", "9"]}
    assert [asked["listed"] for asked in probe({"f": anywhere}, columns, ["2+2", "4+5"], {})] == [
        {"f": 1.0}
    ] * 2
    columns["answer"] = ["4", "a proof " * 20]
    assert all("listed" not in asked for asked in probe({"f": anywhere}, columns, ["2+2", "4+5"], {}))


def test_a_completion_that_is_scored_and_not_trained_counts_in_its_groups_statistics(tmp_path: Path) -> None:
    lines = sound()
    for sample in samples(lines):
        sample["advantage"] = None
    for update in updates(lines):
        update |= {"loss": None, "rows": [row for row in update["rows"] if row["completion"] != 3]}
    assert found(lines, tmp_path / "run.jsonl") == []


def at_times(completion: str) -> float | None:
    return None if len(completion) % 3 == 0 else (sum(map(ord, completion)) % 10) / 10


OF_OWN = {
    "plain": {},
    "rloo": {"algorithm": "rloo"},
    "left out, though measured": {
        "rewards": (at_times, {"math_answer": {"rule": "last_number", "weight": 0, "verdict": True}})
    },
}


@pytest.mark.parametrize("settings", OF_OWN.values(), ids=OF_OWN)
def test_coveys_own_runs_are_sound(settings: Settings, tmp_path: Path) -> None:
    start(tmp_path / "run", **settings, train={"steps": 2})
    report = apply(CHECKS, open_run(tmp_path / "run"))
    assert [str(f) for f in report.findings] == []
    assert "advantages_differ" not in str(report.unjudged)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    lines = sound()
    for row in rows(lines):
        del row["logprobs"]
    report = apply(CHECKS, read_record(written(lines, tmp_path / "run.jsonl")))
    assert report.findings == []
    assert "old_stale" in report.unjudged["logprobs"]


def test_the_evidence_says_where_and_the_remedy_is_in_the_frameworks_words(tmp_path: Path) -> None:
    lines = sound()
    MISTAKES["end_untrained"](lines)
    (finding, *_) = apply(CHECKS, read_record(written(lines, tmp_path / "run.jsonl"))).findings
    assert finding.severity == "severe" and "EOS" in finding.remedy
    assert finding.evidence == {"step": 1, "group": 0, "completion": 0, "token": 2}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", ": the file is empty"),
        ("\n", ":1: not JSON"),
        ('{"format": "covey', ":1: the header is not complete"),
        ('{"prompt": "a"}\n', ":1: not a record of a run"),
        ('{"format": "covey-audit", "version": 1}\n', ":1: version 1 of the format; this covey reads 2"),
        ('{"format": "covey-audit", "version": 2, "setting": {}}\n', ":1: setting: Extra inputs"),
        (HEAD + "[1]\n", ":2: list where an object is expected"),
        (HEAD + '{"step": 0}\n', ":2: Unable to extract tag"),
        (HEAD + '{"kind": "update"}\n', ":2: step: Field required"),
        (
            HEAD + ROLLOUT % '{"ids": [NaN]}',
            ":2: completions.0.ids.0: Input should be a valid integer, not nan",
        ),
        (
            HEAD + ROLLOUT % '{"ids": [1, 2], "sampler_logprobs": [0.0]}',
            ":2: completions.0.sampler_logprobs: 1 values for 2 ids",
        ),
        (
            HEAD
            + ROLLOUT % ""
            + '{"kind": "update", "step": 0, "rows": [{"rollout": 0, "completion": 3}]}\n',
            ":3: rows.0.completion: 3, but rollout 0 has 0 completions",
        ),
    ],
)
def test_a_bad_file_is_named_with_its_line(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    with pytest.raises(DataError) as error:
        read_record(path)
    assert f"{path}{says}" in str(error.value)


def test_a_half_written_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    path = written(sound(), tmp_path / "run.jsonl")
    with path.open("a") as file:
        file.write('{"kind": "update", "st')
    record = read_record(path)
    assert len(record.updates) == 4
    last = len(sound()) + 1
    assert record.notes == [f"{path}:{last}: the last line is incomplete and was left out"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(sound(), tmp_path / "run.jsonl")
    assert main(["audit", str(path)]) == 0
    assert "no mistake found" in capsys.readouterr().out
    lines = sound()
    MISTAKES["mask_shifted"](lines)
    written(lines, path)
    assert main(["audit", str(path)]) == 1
    assert "(group 0, completion 0, token 0)" in capsys.readouterr().out
    assert main(["audit", str(path), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["findings"][0]["id"] == "mask_shifted" and said["updates"] == 4
    assert main(["audit", str(tmp_path / "nothing.jsonl")]) == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_writers_are_imported_without_torch_or_a_trainer() -> None:
    writers = "covey.audit.writers.trl, covey.audit.writers.verl, covey.audit.writers.openrlhf"
    code = f"import sys, {writers}\nassert not {{'torch', 'trl', 'transformers', 'ray'}} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_history_of_trl_is_read_without_a_writer(tmp_path: Path) -> None:
    history = [
        {"step": n + 1, "loss": 0.0, "grad_norm": 0.0, "learning_rate": 1e-6, "frac_reward_zero_std": 1.0}
        for n in range(10)
    ]
    state = tmp_path / "out" / "checkpoint-10"
    state.mkdir(parents=True)
    (state / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    report = apply(CHECKS, open_run(tmp_path / "out"))
    assert [f.id for f in report.findings] == ["dead_groups", "gradient_zero"]
    (state / "trainer_state.json").write_text("{}")
    with pytest.raises(DataError, match="log_history is missing"):
        open_run(tmp_path / "out")


def test_dumps_of_verl_are_read_as_they_are(tmp_path: Path) -> None:
    rows = [
        {"input": f"question {n // 4}", "output": f"text {n}", "gts": "7", "score": 0.0, "step": 1}
        for n in range(32)
    ]
    for step in (1, 2):
        lines = [json.dumps(row | {"output": f"text {n} of {step}"}) for n, row in enumerate(rows)]
        (tmp_path / f"{step}.jsonl").write_text("\n".join(lines) + "\n")
    record: AuditRecord = open_run(tmp_path)
    assert len(record.samples) == 64 and record.header.framework == "verl"
    assert [f.id for f in apply(CHECKS, record).findings] == ["rewards_constant"]
    (tmp_path / "2.jsonl").write_text('{"input": "a", "output": "b"}\n')
    with pytest.raises(DataError, match=r"2\.jsonl:1: not a row of a verl dump"):
        open_run(tmp_path)


def test_a_recorder_that_fails_leaves_the_trainer_alone(capsys) -> None:
    recorder = object.__new__(_TrlRecorder)
    recorder.file = object.__new__(Recorder)
    recorder.file.failed = False
    recorder.file.path = "run.jsonl"

    def broken(result: int, _: int) -> int:
        raise KeyError("advantages")

    assert [recorder.around(broken, lambda x: x + 1, 1) for _ in range(2)] == [2, 2]
    said = capsys.readouterr().out
    assert said == "run.jsonl: the record ends here (KeyError: 'advantages'); training continues\n"


def test_the_course_of_a_run_of_trl_is_told_in_its_words(tmp_path: Path, capsys) -> None:
    step = {"loss": 0.1, "reward": 0.2, "reward_std": 0.3, "completions/clipped_ratio": 0.8, "kl": 0.001}
    history = [{**step, "step": n, "rewards/right/mean": 0.2} for n in range(1, 31)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert main(["audit", str(tmp_path)]) == 0, "how it went is no mistake of the trainer"
    told = capsys.readouterr().out
    assert "80 % of the completions are truncated at max_completion_length" in told
    assert "Try: max_completion_length=1024" in told
    assert "rollout." not in told
    # A setting's name that is a word stays a word.
    assert (
        named(TRL_NAMES, "the model forgets: rollout.max_tokens")
        == "the model forgets: max_completion_length"
    )
    # What TRL calls kl is that of a token, and nothing is concluded from its course.
    assert FRAMEWORKS["trl"].metric("kl") == "kl/token_k3"
    record = open_run(tmp_path)
    other = replace(record, header=record.header.model_copy(update={"framework": "mine"}))
    assert findings_from_metrics(other) == []
