"""A DPO step beside TRL's DPOTrainer on the same pairs, a PPO step beside a GRPO step: CPU seconds.

    python benchmarks/preferences.py    # the rows of results/preferences.md

Steps are whole ones (forward, backward, AdamW; of PPO and GRPO also sampling and rewards) and take turns, so
that what else the machine does strikes all alike; a ratio is the median over the rounds of the ratio within a
round. TRL's step is timed with its reference computed in the step, its default, and with the reference's
log-probs known before, as they always are here; here they cost one forward pass over the data, once.
"""

from __future__ import annotations

import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import torch
import trl
from trl.trainer.dpo_trainer import DataCollatorForPreference

from covey.config.contradictions import updates_of
from covey.config.load import load_config
from covey.config.schema import Train
from covey.learner.batching import given_batch
from covey.learner.learner import Learner
from covey.learner.old_logprobs import old_logprob_source
from covey.models.policy import Policy
from covey.models.tiny import build_model, build_tokenizer
from covey.objective.bound import bind
from covey.objective.preference import dpo
from covey.rollouts.batch import Position
from covey.rollouts.loop import Rollouts
from covey.sampling.prompts import GivenAnswer, Prompted
from covey.system.console import RunConsole
from covey.system.signals import StopSignal
from covey.training import rl
from covey.training.preference import PreferenceObjective, summed
from covey.training.setup import set_up
from covey.types import Problem

PAIRS, ROUNDS = 8, 7
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


def in_turns(steps: Mapping[str, Callable[[], object]], rounds: int) -> list[dict[str, float]]:
    """CPU seconds of each step in each round, after one to warm up. Other processes do not count."""
    found = []
    for number in range(rounds + 1):
        times = {}
        for name, step in steps.items():
            began = time.process_time()
            step()
            times[name] = time.process_time() - began
        found += [times] if number else []
    return found


def ratio(rounds: Sequence[Mapping[str, float]], above: str, below: str) -> str:
    """How many times as long one takes as another: the median over rounds, and the range."""
    found = sorted(times[above] / times[below] for times in rounds)
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def ours(policy: Policy, pairs: list[Prompted]) -> Callable[[], object]:
    """A step of covey's."""
    learner = Learner(policy, Train(lr=1e-6))
    batch = given_batch(pairs)
    objective = PreferenceObjective(bind(dpo), summed(learner, batch))

    def step() -> None:
        learner.forward_backward(batch, objective)
        learner.step(1e-6)

    return step


def theirs(policy: Policy, pairs: list[Prompted], known: bool) -> Callable[[], object]:
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

    return step


def online(folder: Path, name: str, algorithm: Mapping[str, object]) -> Callable[[], object]:
    """A whole step of reinforcement: 128 completions, four updates."""
    values = {
        "model": "tiny", "output": folder / name, "threads": 1, "algorithm": algorithm,
        "data": {"task": "last_digit"}, "train": {"lr": 1e-5, "updates_per_batch": 4},
        "rollout": {"group_size": 8, "prompts_per_step": 16, "max_tokens": 24},
        "rewards": [lambda completion: len(completion) + sum(map(ord, completion)) % 7],
    }  # fmt: skip
    loaded = load_config(values=values)
    run = set_up(loaded, RunConsole(quiet=True), StopSignal())
    config, algo = loaded.config, loaded.algorithm
    source = Rollouts(run.train_set, run.sampler, run.rewards, config.rollout, algo, config.seed)
    rollouts = source.after(0, Position(), lambda *_: None)
    old = old_logprob_source(algo, run.sampler, updates_of(config))

    def step() -> None:
        groups, now = next(rollouts).groups, run.state.coefficients
        rl.update(run, rl.prepare(groups, run.learner, algo, config, old, now, run.critic), old, 0)

    return step


def compare_online(folder: Path) -> None:
    """PPO with either critic beside GRPO, all with a KL to a reference."""
    steps = {
        "grpo": online(folder, "grpo", {"name": "grpo"}),
        "head": online(folder, "head", {"name": "ppo", "critic": {"trunk": "policy"}}),
        "network": online(folder, "network", {"name": "ppo"}),
    }
    rounds = in_turns(steps, ROUNDS)
    middle = {name: statistics.median(times[name] for times in rounds) for name in steps}
    print(
        "| GRPO | PPO, head | PPO, network | head, times GRPO | network, times GRPO |\n|---|---|---|---|---|"
    )
    cells = [f"{middle[name]:.2f} s" for name in steps]
    print(f"| {' | '.join([*cells, *(ratio(rounds, name, 'grpo') for name in ('head', 'network'))])} |")


def main() -> None:
    """Time all of them."""
    torch.set_num_threads(1)
    tokenizer = build_tokenizer(["1+2=3"] * 3)
    size = SimpleNamespace(hidden=128, layers=4)
    print(f"{os.cpu_count()} cores, one thread, {PAIRS} pairs, width {size.hidden}, {size.layers} layers")
    print(
        "| lengths | covey | TRL | TRL, reference known | TRL, times covey | reference known, times covey |"
    )
    print("|---|---|---|---|---|---|")
    for name, (prompts, answers) in SHAPES.items():
        model = build_model(tokenizer, 0, hidden=size.hidden, layers=size.layers)
        pairs = made(prompts, answers, len(tokenizer))
        policy = Policy(model, tokenizer)
        steps = {
            "covey": ours(policy, pairs),
            "trl": theirs(policy, pairs, False),
            "known": theirs(policy, pairs, True),
        }
        rounds = in_turns(steps, ROUNDS)
        cells = [f"{statistics.median(times[own] for times in rounds):.2f} s" for own in steps]
        cells += [ratio(rounds, own, "covey") for own in ("trl", "known")]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        compare_online(Path(folder))


if __name__ == "__main__":
    main()
