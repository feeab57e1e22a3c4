"""Runs for the shadow trainer to repeat: a small model, varied rewards, every setting that matters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from covey.models.policy import Policy, save_policy
from covey.models.tiny import build_tokenizer
from covey.objective.algorithms import PRESETS
from covey.proof.agreement import Agreement
from covey.proof.replay import replay
from covey_verify.types import Score, StepRewards
from tests.conftest import SMALL
from tests.training.runs import start

TRAINABLE = sorted(PRESETS)
STEPS = 5


SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"name": "ppo", "critic": {"trunk": "policy", "lr": 1e-4, "pull": 0.3}},
    "vapo": {"name": "vapo", "critic": {"trunk": "own", "lr": 5e-6, "warmup": 2}},
    "vine_ppo": {
        "name": "vine_ppo",
        "advantage": {"split_by": "tokens", "most": 3, "continuations": 2},
    },
}
"""A critic of each kind that moves as much as the policy does; cuts where there are no lines."""


@dataclass(frozen=True)
class Case:
    """One run."""

    preset: str
    temperature: float
    top_p: float
    updates: int
    dtype: str
    mask_truncated: bool
    micro_tokens: int

    @property
    def lr(self) -> float:
        """So small that float32's rounding, which Adam makes larger, stays below 1e-6 in five steps.

        kl_cov's gradient has the sign of log-ratios, so there the policy has to move visibly.
        """
        return 1e-4 if self.preset == "kl_cov" else 5e-6

    def __str__(self) -> str:
        masked = "-masked" if self.mask_truncated else ""
        sampled = f"T{self.temperature}-p{self.top_p}"
        return f"{self.preset}-{sampled}-u{self.updates}-{self.dtype}{masked}-{self.micro_tokens}"


def every_case() -> Iterator[Case]:
    """The whole product of those that are allowed."""
    for preset, *settings in product(
        TRAINABLE, (0.5, 1.0), (1.0, 0.9), (1, 4), ("float32", "bfloat16"), (False, True), (8192, 40)
    ):
        case = Case(preset, *settings)
        if allowed(case) == case:
            yield case


def allowed(case: Case) -> Case:
    """The case, or its nearest that makes sense.

    Presets without a ratio make one update a batch, and those that act on nothing else several. The
    gradient of kl_cov's |log ratio| has the sign of the log-ratio, which is bfloat16's rounding where the
    policy has hardly moved; real reads log-ratios too, and its course is at the edge of that rounding; GSPO
    clips at 3e-4, which is finer.
    """
    updates = {"kl_cov": 4, "fipo": 4, "dro": 4}.get(case.preset, case.updates)
    updates = 1 if PRESETS[case.preset].ratio.name == "on_policy" else updates
    finer = case.preset in ("kl_cov", "real", "gspo", "gspo_token")
    return replace(case, updates=updates, dtype="float32" if finer else case.dtype)


def covering_cases() -> list[Case]:
    """Each preset once or more, each pair of settings several times: rows of an orthogonal array."""
    rows = [  # strength 2 over six settings of two values
        (0, 0, 0, 0, 0, 0), (1, 0, 1, 0, 1, 0), (0, 1, 1, 0, 0, 1), (1, 1, 0, 0, 1, 1),
        (0, 0, 0, 1, 1, 1), (1, 0, 1, 1, 0, 1), (0, 1, 1, 1, 1, 0), (1, 1, 0, 1, 0, 0),
    ]  # fmt: skip
    values = ((0.5, 1.0), (1.0, 0.9), (4, 1), ("float32", "bfloat16"), (False, True), (8192, 40))
    cases = []
    for i, preset in enumerate(TRAINABLE):
        settings: list[Any] = [v[row] for v, row in zip(values, rows[i * 3 % 8], strict=True)]
        cases.append(allowed(Case(preset, *settings)))
    # In its first step each group has one trained completion, whose advantage and gradient are 0.
    cases.append(Case("opo", 0.5, 1.0, 1, "float32", True, 40))
    return cases


def mixed(completion: str) -> float:
    """A reward that differs between completions and ties now and then."""
    return (sum(map(ord, completion)) % 7) / 3


def by_step(completion: str, token_ends: list[int]) -> StepRewards:
    """Rewards in the middle and at the end."""
    last = len(token_ends) - 1
    if last == 0:
        return StepRewards([1.0], [0])
    return StepRewards([len(completion) % 3, last % 2], [last // 2, last] if last > 1 else [0, 1])


def sparse(completion: str, token_ends: list[int]) -> Score:
    """Steps for some completions, judgement of others not at all."""
    if len(completion) % 3 == 0:
        return Score(None)
    return Score(1.0, steps=[(0, 1, 1.0 + len(completion) % 2)] if len(completion) % 3 == 1 else [])


PROCESS: tuple[Any, ...] = (
    by_step,
    {mixed: {"verdict": True, "weight": 0.5}},
    {sparse: {"weight": 2.0, "gated_by": "mixed:correct"}},
)


@dataclass(frozen=True)
class Model:
    """A model on disk and what the shadow is given of it."""

    folder: Path
    weights: dict[str, torch.Tensor]
    shape: dict[str, Any]


def make_model(folder: Path) -> Model:
    """A two-layer Qwen3 of 64 tokens whose distributions are far from uniform."""
    torch.manual_seed(0)
    config = Qwen3Config(**{**SMALL, "vocab_size": 64}, head_dim=32)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1) if "norm" in name else parameter.mul_(2.0)
    texts = ["1+2=3 <think>4+5</think> 67890"] * 3
    save_policy(Policy(model, build_tokenizer(texts, vocab_size=64)), folder)
    weights = {n: p.detach().double() for n, p in model.named_parameters()}
    return Model(folder, weights, json.loads((folder / "config.json").read_text()))


def repeat(case: Case, output: Path, model: Model, twin: bool = False) -> list[Agreement]:
    """Train a case five steps, then repeat them from the record."""
    return trained_and_repeated(
        output,
        model,
        STEPS,
        twin,
        algorithm=SETTINGS.get(case.preset, case.preset),
        rewards=PROCESS if case.preset == "grpo_process" else (mixed, {"answer_format": 0.1}),
        dtype=case.dtype,
        rollout={
            "temperature": case.temperature,
            "top_p": case.top_p,
            "mask_truncated": case.mask_truncated,
        },
        train={
            "lr": case.lr,
            "updates_per_batch": case.updates,
            "tokens_per_micro_batch": case.micro_tokens,
        },
    )


def trained_and_repeated(
    output: Path, model: Model, steps: int, twin: bool = False, **settings: Any
) -> list[Agreement]:
    """Train some steps under settings, then repeat them from the record."""
    rollout = {"max_tokens": 10, "stop": ("1", "7"), **settings.pop("rollout", {})}
    train = {
        "steps": steps + 1,  # so that the last one repeated leaves a checkpoint
        "save_every": steps,
        "warmup_steps": 2,
        "schedule": {"cosine": 0.1},
        "weight_decay": 0.01,
        **settings.pop("train", {}),
    }
    settings = {"rewards": (mixed,), "eval": {"problems": 2, "samples": 1}, **settings}
    start(output, model=str(model.folder), rollout=rollout, train=train, **settings)
    # A bfloat16 model is trained from its rounded weights.
    rounded = settings.get("dtype") == "bfloat16"
    begin = {n: (w.bfloat16().double() if rounded else w.clone()) for n, w in model.weights.items()}
    return list(replay(output, {n: w.requires_grad_() for n, w in begin.items()}, model.shape, steps, twin))
