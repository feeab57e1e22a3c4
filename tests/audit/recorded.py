"""Runs of the stand-in trainers with a recorder, and the mistakes that an audit has to find in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.audit.checks.check import Report, apply
from covey.audit.readers.record_file import read_record
from covey.audit.record import AuditRecord
from covey.audit.table import CHECKS
from covey.audit.writers import openrlhf as openrlhf_writer
from covey.audit.writers import verl as verl_writer
from tests.audit.stand_ins import PROMPT, OpenRlhfTrainer, Policy, VerlTrainer

Trainer = VerlTrainer | OpenRlhfTrainer
RECORD: dict[type, Callable[..., None]] = {
    VerlTrainer: verl_writer.record_run,
    OpenRlhfTrainer: openrlhf_writer.record_run,
}


def run(trainer: Trainer, path: Path, **options: Any) -> tuple[AuditRecord, Report]:
    """Record four batches and audit them."""
    RECORD[type(trainer)](trainer, path / "run.jsonl", **options)
    trainer.fit()
    record = read_record(path / "run.jsonl")
    return record, apply(CHECKS, record)


def part(trainer: Trainer) -> Any:
    """Where a trainer makes its batches."""
    return trainer if isinstance(trainer, VerlTrainer) else trainer.experience_maker


def shifted(trainer: Trainer) -> None:
    if isinstance(trainer, VerlTrainer):
        trainer.mask = lambda present: present.roll(1, 1) * (torch.arange(present.shape[1]) > 0)
    else:
        trainer.experience_maker.mask = lambda response: response[:, :-1].long()


def end_left_out(trainer: Trainer) -> None:
    mask = part(trainer).mask

    def without_the_last(present: Tensor) -> Tensor:
        full = mask(present)
        last = full.cumsum(1) == full.sum(1, keepdim=True)
        return full * ~last

    part(trainer).mask = without_the_last


def std_of_the_batch(trainer: Trainer) -> None:
    def advantages(rewards: Tensor, *_: Any) -> Tensor:
        return (rewards - rewards.view(-1, 4).mean(1).repeat_interleave(4)) / (rewards.std() + 1e-6)

    part(trainer).advantages = advantages


def no_std(trainer: Trainer) -> None:
    part(trainer).advantages = lambda rewards, *_: rewards - rewards.view(-1, 4).mean(1).repeat_interleave(4)


def negated(trainer: Trainer) -> None:
    advantages = part(trainer).advantages
    part(trainer).advantages = lambda *given: -advantages(*given)


def old_of_the_first_policy(trainer: Trainer) -> None:
    first = Policy()
    if isinstance(trainer, VerlTrainer):
        trainer.old = lambda batch: first.logprobs(batch.batch["input_ids"]).detach()[:, PROMPT - 1 :]
    else:
        trainer.experience_maker.old = lambda e: first.logprobs(e.sequences).detach()


def rewards_in_another_order(trainer: Trainer) -> None:
    part(trainer).rewards = lambda scores: scores.view(-1, 4).flip(1).flatten()


def loss_negated(trainer: Trainer) -> None:
    policy = trainer.policy
    for group in policy.optimizer.param_groups:
        group["maximize"] = True


def groups_across_prompts(trainer: Trainer) -> None:
    if isinstance(trainer, VerlTrainer):
        trainer.advantages = shuffled
    else:
        make = trainer.experience_maker.make_experience_batch

        def other(samples: tuple[Tensor, Tensor]) -> Any:
            order = torch.arange(len(samples[0])).view(-1, 4).T.flatten()
            return make(tuple(part[order] for part in samples))

        trainer.experience_maker.make_experience_batch = other


def shuffled(rewards: Tensor, uids: list[str]) -> Tensor:
    """Take the same number for completions of other prompts."""
    uids[:] = [f"{n % 6}" for n in range(len(uids))]
    grouped = rewards.view(4, 6)
    return ((grouped - grouped.mean(0)) / (grouped.std(0) + 1e-6)).flatten()


def sampler_with_first_weights(trainer: Trainer) -> None:
    first = Policy()
    if isinstance(trainer, VerlTrainer):
        trainer.sampler = first
    else:
        make = trainer.experience_maker.make_experience_batch

        def other(samples: tuple[Tensor, Tensor]) -> Any:
            made = make(samples)
            made[0].rollout_log_probs = first.logprobs(samples[0]).detach()
            return made

        trainer.experience_maker.make_experience_batch = other


MISTAKES: dict[str, Callable[[Trainer], None]] = {
    "mask_shifted": shifted,
    "end_untrained": end_left_out,
    "std_over_batch": std_of_the_batch,
    "std_missing": no_std,
    "advantages_negated": negated,
    "old_stale": old_of_the_first_policy,
    "rewards_order": rewards_in_another_order,
    "wrong_way": loss_negated,
    "group_mixed": groups_across_prompts,
    "sampler_behind": sampler_with_first_weights,
}
