"""The supervised loop: imitate the completions of a data file or of a task's worked solutions."""

from __future__ import annotations

import math

import numpy as np

from covey.batching import Batch, micro_batches, supervised_batch
from covey.rng import key, permutation
from covey.rollout import Prompted
from covey.training.guards import fitting, update
from covey.training.optimizer import learning_rate
from covey.training.run import Run


def train(run: Run) -> None:
    """Do the steps that are left: minimise the mean negative log-likelihood of answer tokens."""
    config = run.loaded.config
    for step in range(run.state.step, config.train.steps):
        run.stop.check()
        run.faults.at_step()
        rows = batch_rows(len(run.train_set), config.train.batch_size, step, config.seed)
        run.console.doing("updating")
        chosen = [run.train_set[i] for i in rows]
        answers = [answer_tokens(run, prompted) for prompted in chosen]
        batch = supervised_batch([p.tokens for p in chosen], answers)
        with run.clock("update"):
            losses = fitting(run, gradient, batch)
            norm = update(run, step, batch, losses)
        total = math.fsum(losses)
        run.advance(step + 1)
        run.clock.count("update", int(batch.mask.sum()))
        metrics = {
            "loss": total,
            "optimizer/grad_norm": norm,
            "optimizer/skipped": float(not math.isfinite(norm)),
            "optimizer/lr": learning_rate(step, config.train),
        }
        times = run.log(step, metrics)
        rate = f"{times.get('tokens_per_second/update', 0.0):,.0f}"
        run.console.step(step + 1, -total, {"loss": f"{total:.3f}", "tokens/s": rate})
        if run.housekeeping():
            break


def gradient(run: Run, batch: Batch) -> list[float]:
    """Accumulate the gradient of a step; the losses of its micro-batches."""
    losses = []
    for micro in micro_batches(batch, run.micro_tokens, 1):
        run.on_micro_batch()
        scores = run.policy.score(micro.packed.to(run.policy.device), temperature=1.0)
        loss = -scores.logprobs.sum() / micro.totals.tokens
        loss.backward()
        run.optimizer.accumulate()
        losses.append(float(loss.detach()))
    return losses


def answer_tokens(run: Run, prompted: Prompted) -> np.ndarray:
    """The worked answer of a row as the model should write it, end of sequence included. (L,)."""
    text = str(prompted.problem.columns[run.loaded.config.data.completion])
    tokens = run.policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    return np.array([*tokens, run.policy.tokenizer.eos_token_id], dtype=np.int64)


def batch_rows(count: int, size: int, step: int, seed: int) -> list[int]:
    """Row numbers of a step's batch: epochs of permutations, read on without a gap."""
    rows: list[int] = []
    for position in range(step * size, (step + 1) * size):
        epoch, place = divmod(position, count)
        if not rows or place == 0:
            order = permutation(key(seed, "order", epoch), count)
        rows.append(int(order[place]))
    return rows
