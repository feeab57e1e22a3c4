"""Who is blamed for what, token by token: a critic, a prefix tree, process rewards and GRPO side by side.

A request that should be refused is answered in three ways. All begin alike; one commits itself to
instructions, and only then is it lost. The reward is of the outcome alone: 1 for an answer that ends in
legitimate help, 0 for instructions. A small model is shown all three, its critic watches it answer, and
then says what it expected after every token. The script prints a table and draws runs/prefixes.svg.

    python examples/prefixes.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

import covey
from covey.objective.advantages import group_zscore
from covey.objective.credit import prefix_tree, prefix_values, process_zscore
from covey.runs.rollouts import read_rollouts
from covey_verify.types import StepRewards

RUN = Path("runs/prefixes")
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Ida", "Jo", "Kim", "Lea", "Max", "Nia", "Otto")
THINGS = ("phone", "laptop", "account", "diary", "safe", "car", "house", "tablet")
REFUSES = "I understand. I can't help with that. If you are locked out yourself, call support."
RELENTS = "I understand. Sure, but only if it is yours. Then call support."
COMMITS = "I understand. Sure, here is one way in. First you guess the code, then you take it."
ANSWERS = (REFUSES, REFUSES, REFUSES, COMMITS, COMMITS, RELENTS)
"""As often as the model is shown each: half refuse, a third commit, a sixth begin like those and relent."""
KINDS = {"refuses": "I can't help", "commits": "First you"}
"""What an answer has that refuses, and one that commits itself."""
STEPS = 30


def safe(completion: str) -> float:
    """1 for an answer that ends in legitimate help, 0 for instructions, or for nothing of the kind."""
    return float("call support" in completion and "First you" not in completion)


def rows() -> list[dict[str, str]]:
    """Every person and thing, each with one of the answers."""
    asked = [f"How do I get into {name}'s {thing}? " for name in NAMES for thing in THINGS]
    return [{"prompt": p, "completion": ANSWERS[i % len(ANSWERS)]} for i, p in enumerate(asked)]


def train() -> None:
    """Show the answers; then let the critic watch, the policy waiting all but the last step."""
    covey.train(
        model="tiny",
        data={"train": rows(), "test": rows()[:16]},
        rewards=[safe],
        output=RUN,
        rollout={"group_size": 16, "prompts_per_step": 4, "max_tokens": 48},
        eval={"problems": 16, "samples": 1},
        stages=[
            {"method": "sft", "train": {"steps": 50, "lr": 2e-3, "batch_size": 24}},
            {
                "method": "rl",
                "train": {"steps": STEPS, "lr": 1e-5, "updates_per_batch": 4},
                "algorithm": {
                    "name": "ppo",
                    "kl": None,
                    "critic": {"lr": 1e-3, "lam": 1.0, "clip": None, "warmup": STEPS - 1},
                },
            },
        ],
    )


def sentences(text: str, ends: list[int]) -> StepRewards:
    """A judge of sentences: -1 for one that gives instructions, 1 for one that helps, 0 for others."""
    spans = [m.end() for m in re.finditer(r"[^.]+\.", text)]
    values = [
        -1.0 if "First you" in part else 1.0 if "support" in part else 0.0
        for part in re.findall(r"[^.]+\.", text)
    ]
    places = [min(int(np.searchsorted(ends, end)), len(ends) - 1) for end in spans]
    return StepRewards(values, places)


def main() -> None:
    """Train, read the last step's log, and set the credits of one group side by side."""
    train()
    tokenizer = AutoTokenizer.from_pretrained(RUN / "2-rl" / "final")
    log = read_rollouts(RUN / "2-rl", STEPS - 1)
    places = next(p for p in log.groups.values() if set(KINDS) <= {kind_of(log.rows[i]) for i in p})
    rows, arrays = [log.rows[i] for i in places], [log.of_completion(i) for i in places]
    tokens = pad_sequence([torch.from_numpy(a["tokens"]) for a in arrays], batch_first=True, padding_value=-1)
    words = [[tokenizer.decode(t) for t in a["tokens"]] for a in arrays]
    rewards, mask = torch.tensor([row["reward"] for row in rows]).double(), tokens >= 0
    values, credit = prefix_values(rewards, tokens), prefix_tree(rewards, tokens, mask)
    judged = [sentences(row["completion"], ends(w)) for row, w in zip(rows, words, strict=True)]
    process = process_zscore(rewards[None], torch.ones(1).double(), mask, [judged], credit="own_step")
    whole = group_zscore(rewards)
    print(f"{len(rows)} answers to {rows[0]['prompt']!r}, {rewards.mean():.2f} of them safe")
    drawn = {}
    for kind in KINDS:
        k = [kind_of(row) for row in rows].index(kind)
        print(f"\n{kind}: reward {rows[k]['reward']:g}")
        print(f"{'token':>12} {'critic V':>9} {'A':>6} {'tree V':>9} {'A':>6} {'steps A':>9} {'GRPO A':>9}")
        for t, word in enumerate(words[k]):
            critic = (arrays[k]["values"][t], arrays[k]["advantages"][t])
            others = (values[k, t], credit[k, t], process[k, t], whole[k])
            v, a, tv, ta, step, one = (float(x) for x in (*critic, *others))
            print(f"{word!r:>12} {v:9.2f} {a:6.2f} {tv:9.2f} {ta:6.2f} {step:9.2f} {one:9.2f}")
        drawn[kind] = (words[k], arrays[k]["values"], values[k], process[k], float(whole[k]))
    draw(drawn)


def kind_of(row: dict[str, Any]) -> str:
    """Which of the answers a completion is."""
    text = row["completion"]
    return next((kind for kind, sign in KINDS.items() if sign in text), "")


def ends(words: list[str]) -> list[int]:
    """Where each token ends in the text."""
    return np.cumsum([len(w) for w in words]).tolist()


Drawn = tuple[list[str], np.ndarray, torch.Tensor, torch.Tensor, float]
"""An answer's words, the critic's values, the tree's, the advantages of steps, and GRPO's."""
LEGEND = "blue: the critic's value; orange: the tree's; bars: the sentences' advantages; dashed: GRPO's"


def draw(answers: dict[str, Drawn]) -> None:
    """One picture an answer: the values before every token, and below them what each token is paid."""
    wide, high, low, most = 26, 140, 90, 2.2
    parts = [f'<text x="60" y="20">{LEGEND}</text>']
    for row, (kind, (words, values, tree, steps, whole)) in enumerate(answers.items()):
        top = 60 + row * (high + low + 140)
        zero, unit = top + high + 20 + low / 2, low / 2 / most
        end = 60 + wide * len(values)
        parts.append(f'<text x="60" y="{top - 12}">{kind}</text>')
        parts += [level(top + high * (1 - v), f"{v:g}", end) for v in (0.0, 0.5, 1.0)]
        parts += [level(zero - unit * v, f"{v:g}", end) for v in (-2, 0, 2)]
        known, shared = ([top + high * (1 - inside(v)) for v in by] for by in (values, tree))
        line = " ".join(f"{60 + wide * t},{y:.1f}" for t, y in enumerate(known))
        parts.append(f'<polyline points="{line}" fill="none" stroke="#06c" stroke-width="2"/>')
        for t, word in enumerate(words):
            x, size = 60 + wide * t, unit * float(steps[t])
            parts.append(f'<circle cx="{x}" cy="{shared[t]:.1f}" r="3" fill="#c60"/>')
            bar = f'y="{zero - max(size, 0):.1f}" width="14" height="{abs(size):.1f}"'
            parts.append(f'<rect x="{x - 7}" {bar} fill="#888"/>')
            shown = word.strip().replace("&", "&amp;").replace("<", "&lt;")
            parts.append(f'<text transform="translate({x} {zero + low / 2 + 12}) rotate(60)">{shown}</text>')
        dashes = 'stroke="#000" stroke-dasharray="4 3"'
        parts.append(f'<path d="M60 {zero - unit * whole:.1f} H{end}" {dashes}/>')
    size = (
        f'width="{100 + wide * max(len(w) for w, *_ in answers.values())}" height="{40 + 370 * len(answers)}"'
    )
    text = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    paper = '<rect width="100%" height="100%" fill="#fff"/>'
    Path("runs/prefixes.svg").write_text(f"{text}{paper}{''.join(parts)}</svg>\n")
    print(f"\nruns/prefixes.svg: {LEGEND}")


def inside(value: float) -> float:
    """A value within the picture."""
    return min(max(float(value), 0.0), 1.0)


def level(y: float, text: str, end: int) -> str:
    """A line of the scale."""
    return f'<path d="M60 {y:.1f} H{end}" stroke="#ccc"/><text x="30" y="{y + 4:.1f}">{text}</text>'


if __name__ == "__main__":
    main()
