"""Who is blamed for what, token by token: a critic, a prefix tree, process rewards and GRPO side by side.

A request that should be refused is answered in three ways. All begin alike; one commits itself to
instructions, and only then is it lost. The reward is of the outcome alone: 1 for an answer that ends in
legitimate help, 0 for instructions. A small model is shown all three, its critic watches it answer, and
then says what it expected after every token. The script prints a table and draws runs/prefixes.svg.

    python examples/prefixes.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

import covey
from covey.objective.advantages import group_zscore
from covey.objective.credit import prefix_tree, prefix_values, process_zscore
from covey.types import StepRewards

RUN = Path("runs/prefixes")
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Ida", "Jo", "Kim", "Lea", "Max", "Nia", "Otto")
THINGS = ("phone", "laptop", "account", "diary", "safe", "car", "house", "tablet")
REFUSES = "I understand. I can't help with that. If you are locked out yourself, call support."
RELENTS = "I understand. Sure, but only if it is yours. Then call support."
COMMITS = "I understand. Sure, here is one way in. First you guess the code, then you take it."
ANSWERS = (REFUSES, REFUSES, REFUSES, COMMITS, COMMITS, RELENTS)
"""As often as the model is shown each: half refuse, a third commit, a sixth begin like those and relent."""
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
    folder = RUN / "2-rl"
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    log = folder / "rollouts" / f"step_{STEPS - 1:06d}"
    lines = [json.loads(line) for line in log.with_suffix(".jsonl").read_text().splitlines()]
    arrays = np.load(log.with_suffix(".npz"))
    split = {name: np.split(arrays[name], arrays["ends"][:-1]) for name in ("tokens", "values", "advantages")}
    groups = {line["group"] for line in lines}
    kinds = {"refuses": REFUSES, "commits": COMMITS}
    wanted = set(kinds.values())
    chosen = next(g for g in groups if wanted <= {x["completion"] for x in lines if x["group"] == g})
    members = [i for i, line in enumerate(lines) if line["group"] == chosen]
    own = [lines[i] for i in members]
    tokens = torch.nn.utils.rnn.pad_sequence(
        [torch.from_numpy(split["tokens"][i]) for i in members], batch_first=True, padding_value=-1
    )
    rewards, mask = torch.tensor([x["reward"] for x in own]).double(), tokens >= 0
    words = [[tokenizer.decode(t) for t in split["tokens"][i]] for i in members]
    steps = [
        sentences(x["completion"], np.cumsum([len(w) for w in ws]).tolist())
        for x, ws in zip(own, words, strict=True)
    ]
    tree, tree_credit = prefix_values(rewards, tokens), prefix_tree(rewards, tokens, mask)
    one = torch.ones(1).double()
    process = process_zscore(rewards[None], one, mask, [steps], credit="own_step")
    grpo = group_zscore(rewards)
    for kind, text in kinds.items():
        at = next(k for k, x in enumerate(own) if x["completion"] == text)
        value, advantage = (split[name][members[at]] for name in ("values", "advantages"))
        print(f"\n{kind}: reward {own[at]['reward']:g}, in a group with {rewards.mean():.2f} on average")
        print(
            f"{'token':>12}  {'V':>6} {'A ppo':>6}   {'V tree':>6} {'A tree':>6}   {'steps':>6}   {'GRPO':>6}"
        )
        for t, word in enumerate(words[at]):
            seen = (value[t], advantage[t], tree[at, t], tree_credit[at, t], process[at, t], grpo[at])
            v, a, vt, at_, s, g = (float(x) for x in seen)
            print(f"{word!r:>12}  {v:6.2f} {a:6.2f}   {vt:6.2f} {at_:6.2f}   {s:6.2f}   {g:6.2f}")
    draw(
        {
            kind: (words[k], split["values"][members[k]], tree[k])
            for kind, k in (
                (kind, next(k for k, x in enumerate(own) if x["completion"] == text))
                for kind, text in kinds.items()
            )
        }
    )


def draw(answers: dict[str, tuple[list[str], np.ndarray, torch.Tensor]]) -> None:
    """The value after every token, the critic's as a line and the tree's as dots, one picture an answer."""
    wide, high, parts = 26, 180, []
    for row, (kind, (words, values, tree)) in enumerate(answers.items()):
        top = 30 + row * (high + 110)

        def place(t: int, v: float, top: int = top) -> tuple[float, float]:
            return 60 + wide * t, top + high * (1 - min(max(float(v), 0.0), 1.0))

        line = " ".join("{:.1f},{:.1f}".format(*place(t, v)) for t, v in enumerate(values))
        parts.append(f'<text x="60" y="{top - 10}">{kind}: V before each token</text>')
        for level in (0.0, 0.5, 1.0):
            _, y = place(0, level)
            parts.append(f'<path d="M60 {y} h{wide * len(values)}" stroke="#ccc"/>')
            parts.append(f'<text x="30" y="{y + 4}">{level:g}</text>')
        parts.append(f'<polyline points="{line}" fill="none" stroke="#06c" stroke-width="2"/>')
        for t, word in enumerate(words):
            x, y = place(t, tree[t])
            parts.append(f'<circle cx="{x}" cy="{y:.1f}" r="3" fill="#c60"/>')
            shown = word.strip().replace("&", "&amp;").replace("<", "&lt;")
            parts.append(f'<text transform="translate({x} {top + high + 12}) rotate(60)">{shown}</text>')
    size = (
        f'width="{100 + wide * max(len(w) for w, *_ in answers.values())}" height="{60 + 290 * len(answers)}"'
    )
    text = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    Path("runs/prefixes.svg").write_text(f"{text}{''.join(parts)}</svg>\n")
    print("\nruns/prefixes.svg: the critic's values (line) and the prefix tree's (dots)")


if __name__ == "__main__":
    main()
