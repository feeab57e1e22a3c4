"""The audit of tools' turns, filters, baselines, controllers: what an eighth and a ninth stranger planted."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.audit.lines import (
    EOS,
    WORDS,
    Lines,
    derived,
    found,
    own,
    report_of,
    retrain,
    rollouts,
    rows,
    samples,
    sound,
    updates,
)

Sample = dict[str, Any]
TOOL = [2, 3]
"""Places of a tool's tokens: the model speaks, the tool answers, the model speaks again."""


def with_a_tool(lines: Lines) -> Lines:
    """Make completions of six tokens; a tool wrote two of them, which nobody trains."""
    for n, sample in enumerate(samples(lines)):
        plain = [-0.5 - 0.1 * t for t in range(6)]
        sample |= {
            "ids": [30 + n, 12, 21, 22, 13, EOS],
            "inserted": [0, 0, 1, 1, 0, 0],
            "model_logprobs": plain,
        }
        sample |= {"model_logprobs_at_1": plain}
        sample["sampler_logprobs"] = [0.0 if t in TOOL else p for t, p in enumerate(plain)]
    for row in rows(lines):
        plain = [-0.5 - 0.1 * t for t in range(6)]
        for name in ("after_logprobs", "ref_logprobs", "entropies", "corrections", "kl", "values", "returns"):
            row.pop(name, None)
        row |= {"logprobs": plain, "old_logprobs": plain, "mask": [1, 1, 0, 0, 1, 1]}
        row |= {"token_rewards": None, "token_scores": None}
    for update in updates(lines):
        update["loss"] = None
    lines[0]["settings"]["temperature"] = 1.0
    # Only the first update on each rollout: in the second, the ratio would have moved.
    return [line for line in own(lines, "loss_type") if line.get("kind") != "update" or line["step"] % 2 == 0]


def test_a_tools_turn_is_sound(tmp_path: Path) -> None:
    assert found(with_a_tool(sound()), tmp_path / "run.jsonl") == []


def test_a_mask_that_trains_only_the_tool_is_inverted(tmp_path: Path) -> None:
    lines = with_a_tool(sound())
    for row in rows(lines):
        row["mask"] = [0, 0, 1, 1, 0, 0]
    assert found(lines, tmp_path / "run.jsonl") == ["mask_inverted"]


def test_log_probs_without_places_for_the_tool_are_shifted(tmp_path: Path) -> None:
    lines = with_a_tool(sound())
    for sample in samples(lines):
        spoken = [p for t, p in enumerate(sample["model_logprobs"]) if t not in TOOL]
        sample["sampler_logprobs"] = [*spoken, 0.0, 0.0]
    assert found(lines, tmp_path / "run.jsonl")[0] == "sampler_shifted"


def test_a_later_turn_behind_another_history_is_named(tmp_path: Path) -> None:
    lines = with_a_tool(sound())
    for sample in samples(lines):
        sample["sampler_logprobs"][4:] = [p - 0.5 for p in sample["sampler_logprobs"][4:]]
    assert found(lines, tmp_path / "run.jsonl") == ["history_differs"]


@pytest.mark.parametrize(("tokens", "names"), [(4, []), (6, ["reduction_differs"])])
def test_a_mean_over_tokens_does_not_count_the_tools(tokens: int, names: list[str], tmp_path: Path) -> None:
    lines = with_a_tool(sound())
    lines[0]["settings"]["loss_type"] = "dapo"
    for update in updates(lines):
        # Advantages differ, so that the sum is not 0.
        for row in update["rows"]:
            row["advantage"] = abs(row["advantage"])
        update["loss"] = -sum(4 * row["advantage"] for row in update["rows"]) / (tokens * len(update["rows"]))
    for sample in samples(lines):
        sample |= {"advantage": abs(sample["advantage"]), "rewards": {}}
    assert found(lines, tmp_path / "run.jsonl") == names


def lagging(lines: Lines, first: int) -> Lines:
    """Let the trainer's weights differ from those that sampled, from a rollout on."""
    lines = own(lines, "loss_type")
    lines[0]["settings"]["temperature"] = 1.0
    for sample in samples(lines):
        sample["model_logprobs_at_1"] = sample["model_logprobs"]
    for row in rows(lines):
        for name in ("after_logprobs", "ref_logprobs", "kl", "values", "returns"):
            row.pop(name, None)
        row |= {"corrections": [math.exp(0.1 * (row["rollout"] >= first))] * len(row["mask"])}
        if row["rollout"] >= first:
            row |= {name: [p + 0.1 for p in row[name]] for name in ("logprobs", "old_logprobs")}
    for update in updates(lines):
        update["loss"] = None
    return lines


@pytest.mark.parametrize(("first", "names"), [(1, []), (0, ["logprobs_differ"])])
def test_a_sampler_that_lags_is_no_faulty_forward_pass(first: int, names: list[str], tmp_path: Path) -> None:
    assert found(lagging(sound(), first), tmp_path / "run.jsonl") == names


def test_a_prompt_whose_turn_ends_before_a_line_break_is_ended(tmp_path: Path) -> None:
    lines = sound()
    lines[0]["tokens"]["names"][str(EOS)] = "<|end|>"
    for sample in samples(lines):
        sample |= {"prompt": f"{sample['prompt']}<|end|>\n", "prompt_ids": [*sample["prompt_ids"], EOS, 9]}
    assert found(lines, tmp_path / "run.jsonl") == ["prompt_ended"]


def test_rows_with_other_answers_need_prompts_of_their_own(tmp_path: Path) -> None:
    lines = sound()
    lines[0]["data"].update(distinct=1)
    for sample in samples(lines):
        sample["prompt"] = "{a} + {b} ="
    assert found(lines, tmp_path / "run.jsonl")[0] == "answers_differ"


@pytest.mark.parametrize("place", [0, -1])
def test_a_baseline_of_one_completion_is_named(place: int, tmp_path: Path) -> None:
    lines = sound()

    def of_one(_number: int, advantages: list[float]) -> list[float]:
        groups = (advantages[:4], advantages[4:])
        return [advantage - group[place] for group in groups for advantage in group]

    retrain(lines, of_one)
    assert found(lines, tmp_path / "run.jsonl") == ["baseline_of_one"]


def test_advantages_that_slide_along_a_packed_row_are_named(tmp_path: Path) -> None:
    lines = own(sound(), *WORDS)
    for row in rows(lines):
        advantages = [sample["advantage"] for sample in rollouts(lines)[row["rollout"]]["completions"]]
        following = advantages[(row["completion"] + 1) % 8]
        row["advantage"] = [*[row["advantage"]] * (len(row["mask"]) - 1), following]
        row.update(dict.fromkeys(("values", "token_rewards", "token_scores", "returns", "kl")))
    assert found(lines, tmp_path / "run.jsonl") == ["advantages_slide"]


def filtered(lines: Lines, keeps_dead: bool) -> Lines:
    """Two rollouts of four groups, in each of which half have equal rewards; only one kind is trained."""
    for line in rollouts(lines):
        live = line["completions"]
        dead = [{**s, "group": s["group"] + 2, "prompt": f"{s['prompt']}!", "advantage": 0.0} for s in live]
        for sample in dead:
            sample["rewards"] = sample["alone"] = {"right": 1.0}
        line["completions"] = [*live, *dead]
    for row in rows(lines):
        row["completion"] += 8 * keeps_dead
        row["advantage"] *= not keeps_dead
    for update in updates(lines):
        update["loss"] = None
    return lines


@pytest.mark.parametrize("keeps_dead", [True, False])
def test_a_filter_that_keeps_dead_groups_is_inverted(keeps_dead: bool, tmp_path: Path) -> None:
    named = found(filtered(sound(), keeps_dead), tmp_path / "run.jsonl")
    assert ("filter_inverted" in named) == keeps_dead


@pytest.mark.parametrize(("bonus", "names"), [(0.3, []), (0.003, ["noise_amplified"])])
def test_a_std_makes_noise_a_full_advantage(bonus: float, names: list[str], tmp_path: Path) -> None:
    lines = sound()
    for line in rollouts(lines):
        for place, sample in enumerate(line["completions"]):
            # One rollout pays the texts, the other only what should break ties.
            paid = float(place % 2) if line["number"] else bonus * (place % 2)
            sample |= {"rewards": {"right": paid}, "alone": {}, "elsewhere": {}, "empty": {}, "listed": {}}
            sample["group"] = place // 2
    retrain(lines, lambda number, _: [s * 0.5 / (w + 1e-4) for s, w in _spreads(lines, number)])
    assert [name for name in found(lines, tmp_path / "run.jsonl") if name == "noise_amplified"] == names


def _spreads(lines: Lines, number: int) -> list[tuple[float, float]]:
    """Range times sign, and std, of the pair of each completion."""
    paid = [s["rewards"]["right"] for s in rollouts(lines)[number]["completions"]]
    width = max(paid) - min(paid)
    return [(width * (1 if n % 2 else -1), width / math.sqrt(2)) for n in range(len(paid))]


def controlled(lines: Lines, sign: float) -> Lines:
    """Let the KL's coefficient follow the KL over ten updates."""
    coef = 0.1
    first = updates(lines)[0]
    for n in range(4, 10):
        lines.append({**first, "step": n, "rows": [dict(row) for row in first["rows"]]})
    for update in updates(lines):
        away = 0.1 + 0.05 * (update["step"] * 7 % 10)
        update |= {"metrics": {"kl_coef": coef}, "loss": None}
        for row in update["rows"]:
            row["ref_logprobs"] = [p - away for p in row["old_logprobs"]]
        coef *= 1 + sign * (0.1 if away > 0.3 else -0.1)
    return lines


@pytest.mark.parametrize(("sign", "names"), [(1.0, []), (-1.0, ["controller_inverted"])])
def test_a_controller_raises_its_coefficient_with_the_kl(
    sign: float, names: list[str], tmp_path: Path
) -> None:
    named = found(controlled(sound(), sign), tmp_path / "run.jsonl")
    assert [name for name in named if name == "controller_inverted"] == names


@pytest.mark.parametrize(("logged", "names"), [(0.04, []), (None, ["loss_differs"])])
def test_a_loss_has_the_coefficient_that_its_update_logged(
    logged: float | None, names: list[str], tmp_path: Path
) -> None:
    lines = own(sound(), *WORDS, beta=0.4)
    for update in updates(lines):
        update["metrics"] = {"kl_coef": logged}
    for row in rows(lines):
        # The reference is .2 nats away from the start, so that its KL is no rounding.
        row["ref_logprobs"] = [p - 0.2 for p in row["old_logprobs"]]
        row |= {"kl": None, "token_scores": None, "token_rewards": None, "values": None}
    for update in updates(lines):
        update["loss"] = sum(map(_loss_of, update["rows"])) / len(update["rows"])
    named = found(lines, tmp_path / "run.jsonl")
    assert [name for name in named if name.startswith("loss")] == names


def _loss_of(row: dict[str, Any]) -> float:
    """-A rho + .04 KL, a mean over the tokens of a completion."""
    pairs = zip(row["logprobs"], row["old_logprobs"], row["ref_logprobs"], strict=True)
    terms = [
        -row["advantage"] * math.exp(now - old) + 0.04 * (math.exp(ref - now) - (ref - now) - 1)
        for now, old, ref in pairs
    ]
    return sum(terms) / len(terms)


@pytest.mark.parametrize(("delta", "names"), [(2.0, []), (0.2, ["delta_low"])])
def test_an_upper_bound_below_1_is_named(delta: float, names: list[str], tmp_path: Path) -> None:
    lines = sound()
    lines[0]["settings"]["delta"] = delta
    named = found(lines, tmp_path / "run.jsonl")
    assert [name for name in named if name == "delta_low"] == names


@pytest.mark.parametrize(("nats", "names"), [(0.05, []), (3.0, ["policy_leaps"])])
def test_an_update_that_throws_the_policy_away_is_named(
    nats: float, names: list[str], tmp_path: Path
) -> None:
    lines = sound()
    last = updates(lines)[-1]
    lines.append({**last, "step": 4, "rows": [dict(row) for row in last["rows"]]})
    for row in updates(lines)[-1]["rows"]:
        row["after_logprobs"] = [p + math.copysign(nats, row["advantage"]) for p in row["logprobs"]]
    assert found(lines, tmp_path / "run.jsonl") == names


def minibatches(lines: Lines, of_last: int, by_group: bool) -> Lines:
    """Six rollouts of two groups of four; after the first, only so many completions of each are trained."""
    first, second = rollouts(lines)
    lines[0]["data"].update(rows=900, distinct=900)
    trained = []
    for number in range(6):
        line = first if number == 0 else {**second, "number": number} if number == 1 else None
        if line is None:
            again = [{**s, "prompt": f"{s['prompt']} {number}"} for s in second["completions"]]
            line = {**second, "number": number, "step": 4, "completions": again}
            lines.append(line)
        places = range(8) if number == 0 else range(of_last) if by_group else range(0, 8, 8 // of_last)
        trained += [
            {"rollout": number, "completion": n, "mask": [1] * len(s["ids"]), "advantage": s["advantage"]}
            for n, s in enumerate(line["completions"])
            if n in places
        ]
    last = updates(lines)[-1]
    lines[:] = [line for line in lines if line.get("kind") != "update"]
    lines.append({**last, "rows": trained, "loss": None})
    return lines


@pytest.mark.parametrize(
    ("of_last", "by_group", "names"),
    [(8, False, []), (4, True, []), (4, False, ["rollouts_cut"])],
)
def test_updates_that_stop_too_early_are_named(
    of_last: int, by_group: bool, names: list[str], tmp_path: Path
) -> None:
    named = found(minibatches(sound(), of_last, by_group), tmp_path / "run.jsonl")
    assert [name for name in named if name == "rollouts_cut"] == names


def test_dead_groups_whose_rewards_are_advantages_are_named(tmp_path: Path) -> None:
    lines = sound()
    for line in rollouts(lines):
        for sample in line["completions"][:4]:
            sample |= {"rewards": {"right": 1.0}, "alone": {}, "elsewhere": {}, "empty": {}, "listed": {}}
    retrain(lines, lambda _, advantages: [1.0] * 4 + advantages[4:])
    assert found(lines, tmp_path / "run.jsonl")[0] == "dead_groups_paid"


def kept_by(lines: Lines, order: Callable[[Sample], float]) -> Lines:
    """Six rollouts of two groups of four, of each of which two are trained, the first in an order."""
    lines[0]["data"].update(rows=900, distinct=900)
    last = updates(lines)[-1]
    first = rollouts(lines)[0]
    lines[:] = lines[:1]
    trained = []
    for number in range(6):
        samples_of = [
            {**s, "prompt": f"{s['prompt']} {number}", "text": str(n)}
            for n, s in enumerate(first["completions"])
        ]
        lines.append({**first, "number": number, "step": 0, "completions": samples_of})
        kept = [s for group in (0, 1) for s in sorted(samples_of[4 * group : 4 * group + 4], key=order)[:2]]
        trained += [
            {"rollout": number, "completion": n, "mask": [1] * len(s["ids"]), "advantage": s["advantage"]}
            for n, s in enumerate(samples_of)
            if any(s is other for other in kept)
        ]
    lines.append({**last, "rows": trained, "loss": None})
    return lines


@pytest.mark.parametrize(
    ("order", "names"),
    [
        (lambda s: len(s["ids"]), ["longer_left_out"]),
        (lambda s: s["advantage"], []),
        (lambda s: -len(s["ids"]), []),
    ],
)
def test_only_the_first_to_end_are_trained(
    order: Callable[[Sample], float], names: list[str], tmp_path: Path
) -> None:
    named = found(kept_by(sound(), order), tmp_path / "run.jsonl")
    assert [name for name in named if name == "longer_left_out"] == names


def test_copies_of_a_completion_are_told_apart_by_their_places(tmp_path: Path) -> None:
    """A copy that is trained was taken for the first one, which is left out."""
    lines = filtered(sound(), keeps_dead=True)
    for line in rollouts(lines):
        for sample in line["completions"][8:]:
            sample.update(line["completions"][8], group=sample["group"], prompt=sample["prompt"])
    for update in updates(lines):
        update["rows"] = [row for row in update["rows"] if row["completion"] in (9, 13)]
    assert "filter_inverted" in found(lines, tmp_path / "run.jsonl")


@pytest.mark.parametrize(("sign", "limit", "names"), [(-1, 8, []), (1, 8, ["good_masked"]), (1, 3, [])])
def test_a_mask_for_far_completions_leaves_out_bad_ones(
    sign: int, limit: int, names: list[str], tmp_path: Path
) -> None:
    """Truncated completions may all be good ones, so they do not count."""
    lines = sound()
    lines[0]["settings"]["max_completion_length"] = limit
    for row in rows(lines):
        if sign * row["advantage"] > 0:
            row["mask"] = [0] * len(row["mask"])
    for update in updates(lines):
        update["loss"] = None
    named = found(lines, tmp_path / "run.jsonl")
    assert [name for name in named if name == "good_masked"] == names


def test_a_positive_advantage_without_a_gradient_is_named(tmp_path: Path) -> None:
    lines = derived(sound())
    for row in rows(lines):
        if row["advantage"] > 0:
            row["gradients"] = [0.0] * len(row["gradients"])
    (finding,) = report_of(lines, tmp_path).findings
    assert finding.sentence.startswith("completions with a positive advantage have no gradient")


def test_a_rollout_of_one_group_has_no_neighbouring_group(tmp_path: Path) -> None:
    lines = own(sound(), *WORDS)
    for line in rollouts(lines):
        for n, sample in enumerate(line["completions"]):
            # Near answers are paid as well, so that rewards do not fit texts by the rule of equality.
            sample |= {
                "group": 0,
                "prompt": "1+1=",
                "row": {"answer": "2"},
                "text": "2" if n % 4 == 1 else "3",
            }
    assert "rewards_order" not in found(lines, tmp_path / "run.jsonl")
