"""Training a reward model: from pairs, from answers judged good or bad, or from labelled steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from covey.config.load import ResolvedConfig
from covey.config.python_objects import ModelObject
from covey.learner.batching import Batch, MicroBatch, given_batch
from covey.learner.learner import Objective, Requirements
from covey.models.load import load_policy, source_of, with_precision
from covey.models.logprobs import TokenOutputs
from covey.models.model_objects import adapter_of, checked_model, is_classifier
from covey.models.policy import Policy
from covey.models.pretrained import load_pretrained, pretrained_tokenizer
from covey.models.reward_model import (
    CLASSES,
    SEPARATOR,
    RewardModelKind,
    TrainedRewardModel,
    conversation_ids,
    is_reward_model,
    with_head,
    worked_ids,
)
from covey.objective.axis_function import AnyAxisFunction
from covey.objective.preference import PreferenceData, log_sigmoid
from covey.sampling.prompts import EncodedProblem, GivenAnswer, call_for, check_vocabulary, prompt_ids
from covey.system.device import pick_device
from covey.tasks.examples import Example
from covey.training.examples_loop import MetricParts, StepBuilder
from covey.training.run import Run
from covey_verify.errors import ConfigError, DataError

NEVER_READ = 0
"""Placeholder token after an answer: the value is read where it would be predicted."""


def judgements(run: Run) -> StepBuilder:
    """Return the step builder of `method: reward_model`."""
    loss = run.resolved.loss
    examples = [*run.train_set, *run.held_out]
    assert loss is not None, "the method has one"
    paired = len(examples[0].answers) == 2

    def build_step(rows: Sequence[int]) -> tuple[Batch, Objective[MetricParts]]:
        return given_batch([examples[i] for i in rows]), RewardObjective(loss if paired else None)

    return build_step


@dataclass(frozen=True)
class RewardObjective:
    """The loss of pairs, or the cross-entropy of labelled answers and steps."""

    of_pairs: AnyAxisFunction | None
    requires = Requirements(whole_groups=True)  # a pair is not split

    def __call__(self, micro: MicroBatch, outputs: TokenOutputs) -> tuple[Tensor, MetricParts]:
        """Return a micro-batch's part of the loss and of the metrics."""
        # ``logprobs`` holds the head's values here, one wherever a token is trained.
        has_value = micro.rows.mask.to(outputs.logprobs.device)
        values = micro.packed.unpack(outputs.logprobs)[has_value]
        if self.of_pairs is None:
            labels = micro.rows.advantages.to(values.device)[has_value]
            return self._answer_loss(values, labels, micro.totals.tokens)
        # An example is a group of two, chosen first, and groups stay whole in a micro-batch.
        chosen = values[0::2]
        rejected = values[1::2]
        count = micro.totals.prompts
        losses = self.of_pairs(PreferenceData(chosen_scores=chosen, rejected_scores=rejected))
        assert isinstance(losses, Tensor)
        metrics = {
            "reward_model/accuracy": (chosen > rejected).float(),
            "reward_model/margin": chosen - rejected,
            "reward_model/chosen": chosen,
            "reward_model/rejected": rejected,
        }
        return self._with_means(losses.sum() / count, metrics, count)

    def _answer_loss(self, values: Tensor, labels: Tensor, count: int) -> tuple[Tensor, MetricParts]:
        good = labels > 0
        # Cross-entropy: -log sig(v) of good ones, -log sig(-v) of bad ones.
        losses = -log_sigmoid(torch.where(good, values, -values))
        statistics = {
            "reward_model/accuracy": ((values > 0) == good).float(),
            "reward_model/mean": values,
            "reward_model/good": good.float(),
        }
        return self._with_means(losses.sum() / count, statistics, count)

    def _with_means(
        self, loss: Tensor, statistics: dict[str, Tensor], count: int
    ) -> tuple[Tensor, MetricParts]:
        means = {name: float(v.detach().sum()) / count for name, v in statistics.items()}
        return loss, {"loss": float(loss.detach()), **means}


def load_reward_model(
    resolved: ResolvedConfig, texts: Iterable[str], kind: RewardModelKind
) -> TrainedRewardModel:
    """Load the reward model that a config begins with: a trained one, or a language model with a new head."""
    config = resolved.config
    if isinstance(config.model, ModelObject) and is_classifier(checked_model(config.model)[0]):
        return _wrap_object(config.model, kind, resolved)
    if isinstance(config.model, str) and config.model != "tiny":
        source = source_of(config.model, resolved.folder)
        if is_reward_model(Path(source)):
            return _load_trained(source, kind, resolved)
    model = with_head(load_policy(resolved, texts), kind)
    if config.train.recompute_layers and model.decoder is not None:
        model.decoder.recompute = True
    return model


def _wrap_object(
    policy_object: ModelObject, kind: RewardModelKind, resolved: ResolvedConfig
) -> TrainedRewardModel:
    model, tokenizer = checked_model(policy_object)
    if model.config.num_labels not in CLASSES[kind].outputs or kind != "reward_model":
        raise ConfigError(
            f"model: {policy_object.name} returns {model.config.num_labels} numbers, which is not a {kind}"
        )
    model.to(pick_device(resolved.config.device))
    reward_model = TrainedRewardModel(model, tokenizer, kind, adapter_of(policy_object), reads_tokens=True)
    return with_precision(reward_model, resolved.config)


def _load_trained(source: str, kind: RewardModelKind, resolved: ResolvedConfig) -> TrainedRewardModel:
    model = load_pretrained(CLASSES[kind].loader, source, dtype=torch.float32)
    if model.config.num_labels not in CLASSES[kind].outputs:
        raise ConfigError(f"model: {source} returns {model.config.num_labels} numbers, which is not a {kind}")
    model.to(pick_device(resolved.config.device))
    return with_precision(TrainedRewardModel(model, pretrained_tokenizer(source), kind), resolved.config)


def kind_of(examples: Sequence[Example]) -> RewardModelKind:
    """Return the kind of reward model that the examples train."""
    return "process_reward_model" if examples[0].kind == "steps" else "reward_model"


def encode_judged(policy: Policy, examples: Sequence[Example]) -> list[EncodedProblem]:
    """Encode examples for a reward model; the tokens where a value is read are trained, with labels.

    Raises DataError for examples that do not fit, or whose answers look the same to the model.
    """
    encoded = [(_steps if e.kind == "steps" else _answers)(policy, e) for e in examples]
    check_vocabulary(policy, encoded)
    for p in encoded:
        # Without the placeholder, which the model never reads.
        size = len(p.tokens) + max(len(a.tokens) for a in p.answers) - 1
        if size > policy.context:
            raise DataError(
                f"{p.problem.id}: {size} tokens exceed the model's context of {policy.context}; shorten the "
                "row"
            )
    return encoded


def _answers(policy: Policy, example: Example) -> EncodedProblem:
    """Encode answers: their common beginning is the prompt, computed once; the value is read at the end."""
    problem = example.problem
    read = partial(conversation_ids, policy.tokenizer, problem.prompt, template=problem.template)
    # Tokens that a policy sampled are another vocabulary's, or split as no text is that will be judged.
    if problem.sampled_tokens is not None and isinstance(policy, TrainedRewardModel) and policy.reads_tokens:
        ids = [[*prompt_ids(policy, problem), *answer.ids] for answer in example.sampled_tokens]
    else:
        ids = call_for(problem, lambda: [read(answer) for answer in example.answers])
    if not all(ids):
        raise DataError(f"{problem.id}: the prompt is empty")
    if len(ids) == 2 and ids[0] == ids[1]:
        raise DataError(f"{problem.id}: chosen and rejected have the same tokens; remove this row")
    # At each place, whether all answers have the same token; up to the end of the shortest.
    alike = [len(set(tokens)) == 1 for tokens in zip(*ids, strict=False)]
    # Never empty: a packed sequence begins with a prompt.
    shared = max(1, alike.index(False) if False in alike else len(alike))
    answers = tuple(
        answer_with_values([*tokens[shared:], NEVER_READ], [len(tokens) - shared], [label])
        for tokens, label in zip(ids, example.labels, strict=True)
    )
    return EncodedProblem(problem, np.array(ids[0][:shared], dtype=np.int64), answers, example.labels)


def _steps(policy: Policy, example: Example) -> EncodedProblem:
    """Encode one answer whose value is read at the end of each step."""
    problem = example.problem
    steps = [str(step) for step in example.answers]
    read = partial(
        worked_ids, policy.tokenizer, problem.prompt, separator=SEPARATOR, template=problem.template
    )
    (ids, ends), (first, _) = call_for(problem, lambda: (read(steps), read([])))
    if not first:
        raise DataError(f"{problem.id}: the prompt is empty")
    if len(set(ends)) < len(ends):
        raise DataError(f"{problem.id}: a step has no token of its own to score; join it to another")
    # ``ends`` are last tokens; the value after one is read where the next would be predicted.
    places = [end + 1 - len(first) for end in ends]
    answer = answer_with_values([*ids[len(first) :], NEVER_READ], places, example.labels)
    return EncodedProblem(problem, np.array(first, dtype=np.int64), (answer,), (1.0,))


def answer_with_values(tokens: Sequence[int], places: Sequence[int], labels: Sequence[float]) -> GivenAnswer:
    """Return an answer whose values are read where the tokens at ``places`` would be predicted."""
    trained = np.zeros(len(tokens), dtype=bool)
    values = np.zeros(len(tokens), dtype=np.float32)
    trained[list(places)] = True
    values[list(places)] = np.where(np.array(labels) > 0.5, 1.0, -1.0)
    return GivenAnswer(np.array(tokens, dtype=np.int64), trained, values)
