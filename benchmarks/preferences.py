"""A DPO step beside TRL's DPOTrainer on the same pairs: CPU seconds, equal and ragged lengths.

    python benchmarks/preferences.py    # the rows of results/preferences.md

Both take a whole step: forward, backward, AdamW. TRL's is timed with its reference computed in the step, its
default, and with the reference's log-probs known before, as they always are here.
"""

from __future__ import annotations

import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace

import datasets
import numpy as np
import torch
import trl
from trl.trainer.dpo_trainer import DataCollatorForPreference

from covey.batching import given_batch
from covey.config.schema import Train
from covey.learner.learner import Learner
from covey.models.policy import Policy
from covey.models.tiny import build_model, build_tokenizer
from covey.objective.bound import bind
from covey.objective.preference import dpo
from covey.prompts import GivenAnswer, Prompted
from covey.training.preference import PreferenceObjective, summed
from covey.types import Problem

PAIRS, REPEATS = 8, 3
SHAPES = {"equal": ((64, 65), (64, 65)), "ragged": ((16, 129), (8, 129))}
"""Name -> range of prompt lengths, of answer lengths."""


def made(prompts: tuple[int, int], answers: tuple[int, int], vocabulary: int) -> list[Prompted]:
    """Random pairs."""
    rng = np.random.default_rng(0)

    def answer() -> GivenAnswer:
        length = int(rng.integers(*answers))
        return GivenAnswer(rng.integers(5, vocabulary, length), np.ones(length, dtype=bool))

    return [
        Prompted(
            Problem(str(n), ""),
            rng.integers(5, vocabulary, int(rng.integers(*prompts))),
            (answer(), answer()),
            (1.0, 0.0),
        )
        for n in range(PAIRS)
    ]


def seconds(step: Callable[[], object]) -> float:
    """Median CPU seconds of a step, after one to warm up. Other processes do not count."""
    step()
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        step()
        times.append(time.process_time() - began)
    return statistics.median(times)


def ours(policy: Policy, pairs: list[Prompted]) -> float:
    """A step of covey's."""
    learner = Learner(policy, Train(lr=1e-6))
    batch = given_batch(pairs)
    batch = type(batch)(**{**vars(batch), "ref_sums": summed(learner, batch)})

    def step() -> None:
        learner.forward_backward(batch, PreferenceObjective(bind(dpo)))
        learner.step(1e-6)

    return seconds(step)


def theirs(policy: Policy, pairs: list[Prompted], known: bool) -> float:
    """A step of TRL's; ``known``: with the reference's log-probs given."""
    rows = datasets.Dataset.from_list([{"prompt": "1+2=", "chosen": "3", "rejected": "4"}] * 2)
    args = trl.DPOConfig(
        output_dir=tempfile.mkdtemp(), report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False
    )
    model = copy.deepcopy(policy.model)
    trainer = trl.DPOTrainer(
        model=model,
        ref_model=copy.deepcopy(policy.model),
        args=args,
        train_dataset=rows,
        processing_class=policy.tokenizer,
    )
    trainer.precompute_ref_logps = known
    inputs = DataCollatorForPreference(pad_token_id=0)(
        [
            {
                "prompt_ids": p.tokens.tolist(),
                "chosen_ids": a.tokens.tolist(),
                "rejected_ids": b.tokens.tolist(),
            }
            for p in pairs
            for a, b in (p.answers,)
        ]
    )
    if known:
        inputs |= {f"ref_{who}_logps": torch.zeros(len(pairs)) for who in ("chosen", "rejected")}
    adam = torch.optim.AdamW(trainer.model.parameters(), lr=1e-6, fused=True)
    trainer.model.train()

    def step() -> None:
        loss = trainer._compute_loss(trainer.model, inputs, return_outputs=False)  # noqa: SLF001  as in a step
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()

    return seconds(step)


def main() -> None:
    """Time both."""
    torch.set_num_threads(1)
    tokenizer = build_tokenizer(["1+2=3"] * 3)
    size = SimpleNamespace(hidden=128, layers=4)
    print(f"{os.cpu_count()} cores, one thread, {PAIRS} pairs, width {size.hidden}, {size.layers} layers")
    print("| lengths | covey | TRL | TRL, reference known | times faster |\n|---|---|---|---|---|")
    for name, (prompts, answers) in SHAPES.items():
        model = build_model(tokenizer, 0, hidden=size.hidden, layers=size.layers)
        pairs = made(prompts, answers, len(tokenizer))
        policy = Policy(model, tokenizer)
        own, default, known = ours(policy, pairs), theirs(policy, pairs, False), theirs(policy, pairs, True)
        faster = f"{default / own:.1f}, {known / own:.1f}"
        print(f"| {name} | {own:.2f} s | {default:.2f} s | {known:.2f} s | {faster} |", flush=True)


if __name__ == "__main__":
    main()
