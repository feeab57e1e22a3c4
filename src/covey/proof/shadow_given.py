"""The naive trainer for given examples: imitation and preferences, one example at a time, in float64.

It imports nothing of covey. The run's seed determines the examples of each optimizer step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from covey.proof import losses
from covey.proof.decoder import NamedWeights, logits
from covey.proof.descent import ShadowConfig, ShadowTrainer, gradient_step
from covey.proof.formulas import AxisSettings
from covey.proof.losses import AnswerLogprob
from covey.proof.shadow import computed_weights
from covey.proof.streams import stream_key

IMITATION = "sft"
JUDGED_METHODS = ("kto", "apo_zero_unpaired")
"""Methods that learn from answers with a label each."""
WITHOUT_REFERENCE = ("orpo", "simpo")
StepMetrics = defaultdict[str, float]
"""The loss and the metrics of a step, by their names in the record."""


@dataclass(frozen=True)
class ShadowAnswer:
    """An answer as tokens."""

    tokens: Sequence[int]
    trained: Sequence[int]
    """Indices of the trained tokens."""


@dataclass(frozen=True)
class ShadowExample:
    """A prompt with an answer, or with a chosen and a rejected one."""

    prompt: Sequence[int]
    answers: Sequence[ShadowAnswer]
    good: bool = True
    """The label of an answer that is judged, not paired."""


@dataclass(frozen=True)
class GivenExamples:
    """The examples of a run, its method and its loss."""

    method: str
    loss: AxisSettings
    examples: Sequence[ShadowExample]
    measured: Sequence[ShadowExample]
    """Held-out examples. They are not trained on, but their answers may be paired with other prompts."""
    context: int
    """Number of tokens that the model can read."""


def given_step(
    trainer: ShadowTrainer, setting: ShadowConfig, dataset: GivenExamples, number: int
) -> tuple[float, StepMetrics]:
    """Repeat training step ``number`` with ``trainer``; return the gradient's norm and the metrics."""
    size = setting.train["batch_size"]
    metrics = StepMetrics(float)
    rows = rows_of_step(len(dataset.examples), size, number, setting.seed)
    # Number of the optimizer step, for the learning rate.
    optimizer_step = number * setting.train["inner_epochs"] * setting.train["updates_per_batch"]
    (norm,) = gradient_step(
        [trainer], setting, step_losses(trainer, setting, dataset, rows, metrics), optimizer_step
    )
    return norm, metrics


def rows_of_step(count: int, size: int, number: int, seed: int) -> list[int]:
    """Return the rows of a step: epochs in keyed orders of their own, joined and split into batches."""
    first = number * size
    end = (number + 1) * size
    orders: list[int] = []
    for epoch in range(-(-end // count)):
        keyed = np.random.Generator(np.random.PCG64(stream_key(seed, "order", epoch)))
        # The epochs form one sequence, so a batch may span two of them.
        orders += keyed.permutation(count).tolist()
    return orders[first:end]


def step_losses(
    trainer: ShadowTrainer,
    setting: ShadowConfig,
    dataset: GivenExamples,
    rows: Sequence[int],
    metrics: StepMetrics,
) -> Iterator[Tensor]:
    """Yield each example's part of a step's loss; its metrics are added to ``metrics``."""
    batch = [dataset.examples[row] for row in rows]
    if dataset.method == IMITATION:
        parts = imitation_losses(trainer, setting, batch)
    elif dataset.method in JUDGED_METHODS:
        parts = judged_losses(trainer, setting, dataset, rows, metrics)
    else:
        parts = pair_losses(trainer, setting, dataset, batch, metrics)
    for part in parts:
        metrics["loss"] += float(part.detach())
        yield part


def imitation_losses(
    trainer: ShadowTrainer, setting: ShadowConfig, batch: Sequence[ShadowExample]
) -> Iterator[Tensor]:
    """Yield the mean of -log pi over all answer tokens of a step."""
    count = sum(len(answer.trained) for example in batch for answer in example.answers)
    for example in batch:
        for answer in example.answers:
            yield -logprobs(trainer.weights, setting, example, answer).sum() / count


def pair_losses(
    trainer: ShadowTrainer,
    setting: ShadowConfig,
    dataset: GivenExamples,
    batch: Sequence[ShadowExample],
    metrics: StepMetrics,
) -> Iterator[Tensor]:
    """Yield the mean loss of pairs.

    ORPO also imitates the chosen answers, by token and with their prompts; MPO imitates them without prompts.
    """
    answer_tokens = sum(len(e.answers[0].trained) for e in batch)
    tokens = sum(len(e.prompt) - 1 for e in batch) + answer_tokens
    for example in batch:
        good, bad = (answer_logprob(trainer, setting, dataset, example, answer) for answer in example.answers)
        loss = losses.pair_loss(dataset.method, good, bad, dataset.loss) / len(batch)
        if dataset.method == "orpo":
            whole = logprobs(trainer.weights, setting, example, example.answers[0], with_prompt=True)
            loss = loss - whole.sum() / tokens
        if dataset.method == "mpo":
            loss = loss - dataset.loss["generation_weight"] * good.total / answer_tokens
        up, down = (float(implicit_reward(dataset, answer)) for answer in (good, bad))
        for name, value in {"margin": up - down, "chosen": up, "rejected": down}.items():
            metrics[f"preference/{name}"] += value / len(batch)
        yield loss


def implicit_reward(dataset: GivenExamples, answer: AnswerLogprob) -> Tensor:
    """Return the implicit reward of an answer: its gain, or without a reference its mean log-prob."""
    return (answer.mean if dataset.method in WITHOUT_REFERENCE else answer.gain).detach()


def judged_losses(
    trainer: ShadowTrainer,
    setting: ShadowConfig,
    dataset: GivenExamples,
    rows: Sequence[int],
    metrics: StepMetrics,
) -> Iterator[Tensor]:
    """Yield the mean loss of single answers; KTO's against the KL estimate of mismatched answers."""
    point = 0.0
    if dataset.method == "kto":
        with torch.no_grad():
            others = [mismatched_example(dataset, row) for row in rows]
            gaps = [
                answer_logprob(trainer, setting, dataset, other, other.answers[0]).gain for other in others
            ]
        point = float(sum(gaps)) / len(gaps)
    metrics["preference/reference_point"] = point
    for row in rows:
        example = dataset.examples[row]
        answer = answer_logprob(trainer, setting, dataset, example, example.answers[0])
        metrics["preference/log_ratio"] += float(implicit_reward(dataset, answer)) / len(rows)
        yield losses.judged_loss(dataset.method, answer, example.good, point, dataset.loss) / len(rows)


def mismatched_example(dataset: GivenExamples, row: int) -> ShadowExample:
    """Return a prompt with the answer to the nearest different prompt before it, cyclically.

    The answer is truncated to the context.
    """
    examples = [*dataset.examples, *dataset.measured]
    prompt = examples[row].prompt
    # Negative indices wrap around to the end of the list.
    before = [examples[row - back] for back in range(1, len(examples))]
    other = next((e for e in before if list(e.prompt) != list(prompt)), examples[row - 1]).answers[0]
    room = max(1, dataset.context - len(prompt))
    truncated = ShadowAnswer(other.tokens[:room], [index for index in other.trained if index < room])
    return ShadowExample(prompt, [truncated])


def answer_logprob(
    trainer: ShadowTrainer,
    setting: ShadowConfig,
    dataset: GivenExamples,
    example: ShadowExample,
    answer: ShadowAnswer,
) -> AnswerLogprob:
    """Return the log-prob of an answer under the policy and under the model at the start."""
    reference = 0.0
    if dataset.method not in WITHOUT_REFERENCE:
        with torch.no_grad():
            reference = float(logprobs(trainer.reference, setting, example, answer).sum())
    total = logprobs(trainer.weights, setting, example, answer).sum()
    return AnswerLogprob(total, reference, len(answer.trained))


def logprobs(
    weights: NamedWeights,
    setting: ShadowConfig,
    example: ShadowExample,
    answer: ShadowAnswer,
    with_prompt: bool = False,
) -> Tensor:
    """Return the log-probs of an answer's trained tokens; ``with_prompt``: also of the prompt's tokens.

    The first token of a prompt has none.
    """
    whole = [*example.prompt, *answer.tokens]
    first = len(example.prompt)
    predicted = list(range(1, first)) if with_prompt else []
    predicted += [first + index for index in answer.trained]
    # The logits at position t predict token t + 1, hence `t - 1` below.
    all_logits = logits(computed_weights(weights, setting), setting.model, whole[:-1], setting.product)
    log_pi = all_logits[:, : setting.vocabulary].log_softmax(-1)
    return log_pi[[t - 1 for t in predicted], [whole[t] for t in predicted]]
