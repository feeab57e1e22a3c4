"""The supervised loop: imitate the completions of a data file or of a task's worked solutions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from covey.batching import MicroBatch, supervised_batch
from covey.learner.schedule import learning_rate
from covey.models.logprobs import TokenScores
from covey.models.policy import Policy
from covey.prompts import Prompted
from covey.rng import key, permutation
from covey.training.run import Run


def train(run: Run) -> None:
    """Do the steps that are left: minimise the mean negative log-likelihood of answer tokens."""
    config, learner, journal = run.loaded.config, run.learner, run.journal
    for step in range(run.state.step, config.train.steps):
        run.stop.check()
        run.begin_step()
        rows = batch_rows(len(run.train_set), config.train.batch_size, step, config.seed)
        journal.console.doing("updating")
        chosen = [run.train_set[i] for i in rows]
        answers = [answer_tokens(learner.policy, prompted, config.data.completion) for prompted in chosen]
        batch = supervised_batch([p.tokens for p in chosen], answers)
        with journal.clock("update"):
            losses = learner.forward_backward(batch, NegativeLogLikelihood())
            norm = run.update(learner, step, batch, losses)
        run.sampler.sync(learner)
        total = math.fsum(losses)
        run.advance(step + 1)
        journal.clock.count("update", int(batch.mask.sum()))
        metrics = {
            "loss": total,
            "optimizer/grad_norm": norm,
            "optimizer/skipped": float(not math.isfinite(norm)),
            "optimizer/lr": learning_rate(step, config.train),
        }
        times = journal.log(step, metrics)
        rate = f"{times.get('tokens_per_second/update', 0.0):,.0f}"
        journal.console.step(step + 1, total, {"loss": f"{total:.3f}", "tokens/s": rate})
        if run.evaluate_and_save():
            break


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """-mean log pi of the answer tokens of an optimizer step."""

    temperature: float = 1.0
    max_tokens: int = 1
    skips_idle: bool = False
    needs_reference: bool = False

    def __call__(self, micro: MicroBatch, scores: TokenScores) -> tuple[Tensor, float]:
        """A micro-batch's share of the loss, and its value."""
        loss = -scores.logprobs.sum() / micro.totals.tokens
        return loss, float(loss.detach())


def answer_tokens(policy: Policy, prompted: Prompted, column: str) -> np.ndarray:
    """The worked answer of a row as the model should write it, end of sequence included. (L,)."""
    text = str(prompted.problem.columns[column])
    tokens = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    return np.array([*tokens, policy.tokenizer.eos_token_id], dtype=np.int64)


def batch_rows(count: int, size: int, step: int, seed: int) -> list[int]:
    """Row numbers of a step's batch: epochs of permutations, read on without a gap."""
    rows: list[int] = []
    for position in range(step * size, (step + 1) * size):
        epoch, place = divmod(position, count)
        if not rows or place == 0:
            order = permutation(key(seed, "order", epoch), count)
        rows.append(int(order[place]))
    return rows
