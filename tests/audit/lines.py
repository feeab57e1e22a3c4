"""A record of a sound run as lines of JSON, and the findings of such lines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from covey.audit.checks.check import Report, apply
from covey.audit.readers.record_file import read_record
from covey.audit.readers.sources import open_run
from covey.audit.table import CHECKS

EOS, BOS = 2, 1
Lines = list[dict[str, Any]]
WORDS = ("loss_type", "beta")
"""Settings of TRL that say which algorithm it is."""


def sound() -> Lines:
    """A record of four updates on two rollouts: two groups of four, lengths of 3 to 6, one reward."""
    settings = {
        "temperature": 0.5,
        "max_completion_length": 8,
        "beta": 0.04,
        "epsilon": 0.2,
        "max_grad_norm": 1.0,
        "loss_type": "grpo",
        "gradient_accumulation_steps": 2,
        "dtype": "float32",
        "repetition_penalty": 1.0,
        "reward_weights": [1.0],
        "warmup_steps": 0,
        "max_steps": 4,
        "max_prompt_length": 16,
        "reward_bounds": [-10.0, 10.0],
        "learning_rate": 1e-5,
    }
    tokens = {"bos": BOS, "eos": [EOS], "pad": 0, "names": {"8": "<tool_response>", "9": "</tool_response>"}}
    tokens |= {"opening": [91], "opening_logprob": -3.0}
    data = {"rows": 20, "distinct": 20, "eval_rows": 10, "eval_in_train": 0}
    header = {
        "format": "covey-audit",
        "version": 2,
        "framework": "trl",
        "settings": settings,
        "tokens": tokens,
    }
    lines: Lines = [{**header, "data": data}]
    step = 0
    for number in range(2):
        samples = [_sample(number, place) for place in range(8)]
        lines.append({"kind": "rollout", "number": number, "step": step, "completions": samples})
        for update in range(2):
            lines.append(_update(step, number, samples, update))
            step += 1
    call = {"mask": [1, 1], "logprobs": [-1.0, -1.0], "old_logprobs": [-1.0, -1.0], "advantage": [1.0, 1.0]}
    for n in range(4):
        loss = {"kind": "loss", "step": n, "name": "vanilla", "rows": [dict(call)], "loss": -1.0}
        lines.append(loss | {"moved": n > 0})
        factors = {"policy": 0.5, "kl": 0.02, "entropy": -0.005}
        lines += [{"kind": "term", "call": n, "name": name, "factor": f} for name, f in factors.items()]
    return lines


def _sample(number: int, place: int) -> dict[str, Any]:
    group, n = divmod(place, 4)
    # Two of four are paid: advantages are +- .5 over a sample std of .577.
    reward = float(n % 2)
    advantage = (reward - 0.5) / (math.sqrt(1 / 3) + 1e-4)
    length = 3 + (place + number) % 4
    ids = [10 + (place * 7 + t * 3 + number) % 50 for t in range(length - 1)] + [EOS]
    plain = [-0.5 - 0.1 * ((place + 3 * t) % 5) for t in range(length)]
    answer = str(100 + 10 * number + group)
    return {
        "prompt": f"prompt {number} {group}",
        "prompt_ids": [BOS, 70 + group, 80 + number],
        "text": f"text {place}",
        "ids": ids,
        "group": group,
        "row": {"answer": answer},
        "rewards": {"right": reward},
        "advantage": advantage,
        "sampler_logprobs": plain,
        "inserted": [0] * length,
        "model_logprobs": plain,
        "model_logprobs_at_1": [0.6 * p - 0.2 for p in plain],
        "alone": {"right": reward},
        "elsewhere": {"right": 0.0},
        "empty": {"right": 0.0},
        "listed": {"right": 0.0},
        "kl_ids": [99, EOS],
    }


def _update(step: int, number: int, samples: list[dict[str, Any]], again: int) -> dict[str, Any]:
    rows = []
    loss = 0.0
    for place, sample in enumerate(samples):
        # The second update on a rollout finds log-probs moved by the first, in the direction of advantages.
        by = 0.01 * again * (1 if sample["advantage"] > 0 else -1)
        now = [p + by for p in sample["model_logprobs"]]
        before = sample["model_logprobs"]
        reference = [p - 0.02 * number for p in before]
        rows.append(
            {
                "rollout": number,
                "completion": place,
                "mask": [1] * len(now),
                "logprobs": now,
                "old_logprobs": before,
                "ref_logprobs": reference,
                "entropies": [-value for value in now],
                "advantage": sample["advantage"],
                "prompt_trained": 0,
                "token_scores": [*[0.0] * (len(now) - 1), sample["rewards"]["right"]],
                "token_rewards": [*[0.0] * (len(now) - 1), sample["rewards"]["right"]],
                "kl": [0.02 * number] * len(now),
                "values": [0.0] * len(now),
                "returns": [sample["rewards"]["right"]] * len(now),
                "corrections": [1.0] * len(now),
                "after_logprobs": [p + (0.01 if sample["advantage"] > 0 else -0.01) for p in now],
            }
        )
        ratio = math.exp(by)
        off = -0.02 * number - by
        kl = math.exp(off) - off - 1
        loss += (-min(ratio, max(0.8, min(1.2, ratio))) * sample["advantage"] + 0.04 * kl) / len(samples)
    return {
        "kind": "update",
        "step": step,
        "rows": rows,
        "loss": loss,
        "grad_norm": 0.7,
        "learning_rate": 1e-5,
        "weights_changed": 0.9,
        "motions": [motion("embedding"), motion("head")],
        "step_norm": 0.7,
        "gradient_cosine": 1.0,
        "adapter_frozen": 0.0,
    }


def motion(name: str, **values: float) -> dict[str, Any]:
    """A tensor that moves as its optimizer's formula moves it."""
    norms = {"gradient": 0.1, "change": 0.01, "due": 0.01, "off": 0.0, "fresh": 0.02, "outside": 0.0}
    return {"name": name, **norms, **values}


def derived(lines: Lines, beta: float = 0.04) -> Lines:
    """The record with the derivative of its losses by the log-probs, and another coefficient of the KL."""
    lines[0]["settings"]["beta"] = beta
    for update in updates(lines):
        for row in update["rows"]:
            names = ("logprobs", "old_logprobs", "ref_logprobs")
            pairs = list(zip(*(row[name] for name in names), strict=True))
            parts = len(pairs) * len(update["rows"])
            slopes = [
                -row["advantage"] * math.exp(now - old) + beta * (1 - math.exp(ref - now))
                for now, old, ref in pairs
            ]
            row["gradients"] = [slope / parts for slope in slopes]
            kl = sum(math.exp(ref - now) - (ref - now) - 1 for now, _, ref in pairs)
            update["loss"] += (beta - 0.04) * kl / parts
    return lines


def written(lines: Lines, path: Path) -> Path:
    """Write lines as a record."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def found(lines: Lines, path: Path) -> list[str]:
    """Names of the findings of a record, in their order."""
    return [f.id for f in apply(CHECKS, read_record(written(lines, path))).findings]


def rollouts(lines: Lines) -> Lines:
    return [line for line in lines if line.get("kind") == "rollout"]


def samples(lines: Lines) -> Lines:
    return [sample for line in rollouts(lines) for sample in line["completions"]]


def calls(lines: Lines) -> Lines:
    return [line for line in lines if line.get("kind") == "loss"]


def terms(lines: Lines, *names: str) -> Lines:
    return [line for line in lines if line.get("kind") == "term" and line["name"] in names]


def updates(lines: Lines) -> Lines:
    return [line for line in lines if line.get("kind") == "update"]


def rows(lines: Lines) -> Lines:
    return [row for line in updates(lines) for row in line["rows"]]


def own(lines: Lines, *words: str, **settings: Any) -> Lines:
    """Return the record as that of a loop of one's own. ``words``: settings of TRL's that it keeps."""
    lines[0]["framework"] = "mine"
    kept = {n: v for n, v in lines[0]["settings"].items() if n not in WORDS or n in words}
    lines[0]["settings"] = kept | settings
    return [line for line in lines if line.get("kind") not in ("loss", "term")]


def retrain(lines: Lines, give: Callable[[int, list[float]], list[float]]) -> None:
    """Give each rollout's completions other advantages, in its updates too; their losses are unknown."""
    for line in rollouts(lines):
        new = give(line["number"], [s["advantage"] for s in line["completions"]])
        for sample, value in zip(line["completions"], new, strict=True):
            sample["advantage"] = value
        for row in rows(lines):
            if row["rollout"] == line["number"]:
                row["advantage"] = new[row["completion"]]
                row.pop("after_logprobs", None)
    for update in updates(lines):
        update["loss"] = None


def report_of(lines: Lines, folder: Path) -> Report:
    """What the audit says of these lines as a file in a folder."""
    return apply(CHECKS, open_run(written(lines, folder / "run.jsonl")))
