"""Preference learning: from pairs or from answers judged alone, with a reference or without one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from covey.errors import CheckpointError
from covey.learner.batching import Batch, MicroBatch, given_batch
from covey.learner.learner import Learner, Objective, Requirements
from covey.models.load import own_reference
from covey.models.logprobs import TokenOutputs
from covey.models.policy import Policy
from covey.objective.axis_function import AnyAxisFunction
from covey.objective.preference import PreferenceData
from covey.runs.atomic import write_file
from covey.runs.folder import INEXACT
from covey.runs.references import REFERENCE, packed_sums, read_sums
from covey.sampling.prompts import EncodedProblem, GivenAnswer
from covey.system.processes import on_rank_zero, run_on_all
from covey.training.examples_loop import MetricParts, StepBuilder
from covey.training.run import Run

PROMPT = -1.0
"""Marks, in place of an advantage, a token of the prompt, which counts in the NLL alone."""
EXAMPLES_AT_ONCE = 256
"""Examples between two writes of the file of reference log-probs."""


def preferences(run: Run) -> StepBuilder:
    """Return the step builder of a method that learns from preferences."""
    loss = run.resolved.loss
    assert loss is not None, "the method has one"
    examples = [*run.train_set, *run.held_out]
    if "nll" in loss.needs:
        examples = [with_prompt_trained(e) for e in examples]
    needs = set(loss.needs)
    # For KTO alone: answers to other prompts, numbered after the examples themselves.
    mismatched = mismatch_answers(examples, run.learner.network.context) if "reference_point" in needs else []
    if mismatched and run.options.trains:
        for note in unpaired_notes(run.train_set, loss.all_settings):
            run.journal.say(note, "yellow")
    all_examples = [*examples, *mismatched]
    sums = reference_sums(run, all_examples) if {"ref_chosen", "log_ratio"} & needs else []

    def reference_point(rows: Sequence[int]) -> float:
        # Before the update and over the whole step, so that all micro-batches compare with one number.
        mismatched_rows = [len(examples) + i for i in rows]
        batch = given_batch([all_examples[i] for i in mismatched_rows])
        mismatched_sums = torch.cat([sums[i] for i in mismatched_rows])
        return float((answer_log_probs(run.learner, batch) - mismatched_sums).mean())

    def build_step(rows: Sequence[int]) -> tuple[Batch, Objective[MetricParts]]:
        point = reference_point(rows) if mismatched else 0.0
        batch = given_batch([all_examples[i] for i in rows])
        reference = torch.cat([sums[i] for i in rows]) if sums else None
        tokens = float(batch.mask[0::2].sum()) / len(rows)
        return batch, PreferenceObjective(loss, reference, point, tokens)

    return build_step


def answer_log_probs(learner: Learner[Policy], batch: Batch) -> Tensor:
    """Return the log-probs of whole answers under the current policy: (N,)."""
    return (learner.token_outputs(batch, 1.0).logprobs * batch.mask).sum(-1)


@dataclass(frozen=True)
class PreferenceObjective:
    """The mean of a preference loss over the pairs, or the judged answers, of an optimizer step."""

    loss: AnyAxisFunction
    reference: Tensor | None = None
    """(N,): log-prob of each whole answer of the step under the reference; None without one."""
    reference_point: float = 0.0
    """Mean KL of prompts with answers to other prompts, which KTO compares with."""
    tokens: float = 1.0
    """Mean trained tokens of the first answers of the step."""
    requires = Requirements(whole_groups=True)  # a pair is not split

    def __call__(self, micro: MicroBatch, outputs: TokenOutputs) -> tuple[Tensor, MetricParts]:
        """Return a micro-batch's part of the loss and of the metrics."""
        batch = micro.rows
        count = micro.totals.prompts
        logprobs = micro.packed.unpack(outputs.logprobs)
        answered = (batch.mask & (batch.advantages != PROMPT)).to(logprobs.device)
        sums = (logprobs * answered).sum(-1)
        lengths = answered.sum(-1).to(logprobs)
        nll = -(logprobs * batch.mask.to(logprobs.device)).sum(-1) / self.tokens
        labels = batch.rewards.to(sums.device) > 0.5
        # Without a reference an answer's implicit reward is its mean log-prob.
        reference = None if self.reference is None else self.reference[list(micro.numbers)].to(sums)
        reward = sums / lengths if reference is None else sums - reference
        losses = self.loss(self._data(sums, reference, lengths, labels, reward, nll))
        assert isinstance(losses, Tensor)
        loss = losses.sum() / count
        return loss, {"loss": float(loss.detach()), **self._metrics(reward.detach(), labels, count)}

    def _data(
        self,
        sums: Tensor,
        reference: Tensor | None,
        lengths: Tensor,
        labels: Tensor,
        reward: Tensor,
        nll: Tensor,
    ) -> PreferenceData:
        if "desirable" in self.loss.needs:
            return PreferenceData(
                log_ratio=reward, desirable=labels, reference_point=sums.new_tensor(self.reference_point)
            )
        assert bool(labels[0::2].all()) and not bool(labels[1::2].any()), "chosen and rejected take turns"
        return PreferenceData(
            chosen=sums[0::2],
            rejected=sums[1::2],
            ref_chosen=None if reference is None else reference[0::2],
            ref_rejected=None if reference is None else reference[1::2],
            chosen_lengths=lengths[0::2],
            rejected_lengths=lengths[1::2],
            # One number under two names: prompts are trained only if the loss asks for ``nll``.
            nll=nll[0::2],
            chosen_nll=nll[0::2],
        )

    def _metrics(self, reward: Tensor, labels: Tensor, count: int) -> MetricParts:
        if "desirable" in self.loss.needs:
            # The loss compares with the same bound.
            agrees = ((reward > max(self.reference_point, 0.0)) == labels).float()
            return {
                "preference/accuracy": float(agrees.sum()) / count,
                "preference/log_ratio": float(reward.sum()) / count,
                "preference/reference_point": self.reference_point * len(labels) / count,
            }
        chosen = reward[0::2]
        rejected = reward[1::2]
        sums = {
            "preference/margin": chosen - rejected,
            "preference/accuracy": (chosen > rejected).float(),
            "preference/chosen": chosen,
            "preference/rejected": rejected,
        }
        return {name: float(values.sum()) / count for name, values in sums.items()}


def with_prompt_trained(example: EncodedProblem) -> EncodedProblem:
    """Return a pair whose chosen answer is trained with its prompt, except the prompt's first token."""
    first = example.tokens[:1]
    rest = example.tokens[1:]
    answers = []
    for chosen, answer in zip((True, False), example.answers, strict=True):
        trained = np.concatenate([np.full(len(rest), chosen), answer.trained])
        marks = np.concatenate([np.full(len(rest), PROMPT), answer.trained]).astype(np.float32)
        answers.append(GivenAnswer(np.concatenate([rest, answer.tokens]), trained, judgements=marks))
    return replace(example, tokens=first, answers=tuple(answers))


MAX_UNEVENNESS = 4 / 3
"""Largest ratio of the total weights of good and bad answers that KTO's authors call balanced."""


def unpaired_notes(examples: Sequence[EncodedProblem], settings: Mapping[str, object]) -> list[str]:
    """Return warnings for judged answers: one label outweighs the other, or there is only one prompt."""
    good = sum(label for e in examples for label in e.labels)
    bad = sum(1 - label for e in examples for label in e.labels)
    for_good, for_bad = (float(str(settings[f"{name}_weight"])) for name in ("desirable", "undesirable"))
    notes = []
    if not for_bad * bad <= for_good * good <= MAX_UNEVENNESS * for_bad * bad:
        least = for_bad * bad / good
        notes.append(
            f"{good:.0f} good answers of weight {for_good:g} and {bad:.0f} bad ones of weight {for_bad:g}: "
            "in all the good ones should weigh 1 to 1.33 times as much as the bad ones. Try: "
            f"loss.desirable_weight: {least * (1 + MAX_UNEVENNESS) / 2:.2g}"
        )
    if len({e.tokens.tobytes() for e in examples}) == 1:
        notes.append(
            "all answers are to one prompt, so KTO's reference point, the mean KL of answers to other "
            "prompts, is that of answers to this one. Add rows with other prompts, or use pairs with "
            "method: dpo"
        )
    return notes


def mismatch_answers(examples: Sequence[EncodedProblem], context: int) -> list[EncodedProblem]:
    """Return each prompt with the answer to the one before it in the file; the first gets the last answer.

    Answers that would not fit into the context are truncated.
    """
    mismatched = []
    for n, example in enumerate(examples):
        earlier = (examples[n - k] for k in range(1, len(examples)))
        # The answers of the nearest earlier example with another prompt; if there is none, of the previous
        # example.
        other = next((e for e in earlier if not np.array_equal(e.tokens, example.tokens)), examples[n - 1])
        room = max(1, context - len(example.tokens))
        answers = tuple(GivenAnswer(a.tokens[:room], a.trained[:room]) for a in other.answers)
        mismatched.append(replace(example, answers=answers))
    return mismatched


def reference_sums(run: Run, examples: Sequence[EncodedProblem]) -> list[Tensor]:
    """Return the log-prob of each answer under the reference, (answers,) each.

    The reference is the model that the run began with, unless the run was given another.

    The log-probs are computed before the first step, while the policy is that model, and kept in a file; an
    interrupted computation continues from it. If the file is damaged or gone later, they are computed again
    from the model that the run began with. Raises CheckpointError if that model has changed.
    """
    path = run.journal.folder.path / REFERENCE
    digest = _digest_of(examples)
    sums = on_rank_zero(lambda: _stored_sums(path.parent, digest))
    counts = [len(e.answers) for e in examples]
    # The number of whole examples whose log-probs are there already.
    finished = int(np.searchsorted(np.cumsum(counts), len(sums), side="right")) if len(sums) else 0
    learner = run.learner
    own_model = own_reference(run.resolved)
    if own_model is not None:
        learner = Learner(own_model, run.resolved.config.train)
    # The policy has moved, so the first model is loaded once more.
    elif finished < len(examples) and run.state.step:
        learner = _first_learner(run, path)
    run.journal.console.show_work("computing the reference's log-probs")
    while finished < len(examples):
        run_on_all(run.monitor.safe_point)
        batch = given_batch(examples[finished : finished + EXAMPLES_AT_ONCE])
        sums = np.concatenate([sums, answer_log_probs(learner, batch).numpy()])
        finished = min(finished + EXAMPLES_AT_ONCE, len(examples))
        on_rank_zero(partial(write_file, path, packed_sums(sums, digest)))
    return list(torch.from_numpy(sums).split(counts))


def _digest_of(examples: Sequence[EncodedProblem]) -> str:
    """Return the sha256 of the tokens of some examples and of the mask that says which are trained."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(example.tokens.tobytes())
        for answer in example.answers:
            # The mask decides which log-probs are summed, so it is part of the identity.
            digest.update(answer.tokens.tobytes() + answer.trained.tobytes())
    return digest.hexdigest()


def _first_learner(run: Run, path: Path) -> Learner[Policy]:
    """Return a learner with the model that the run began with. Raises CheckpointError if it has changed."""
    problem = f"{path}: the reference log-probs are missing, damaged, or belong to other examples"
    changed = on_rank_zero(lambda: _changed_start(run))
    if changed or run.first_policy is None:
        why = f"{changed[0]} since the run began" if changed else "the run was given its model as an object"
        raise CheckpointError(
            f"{problem}, and cannot be recomputed: {why}. Restore the file, or remove {path.parent} to start "
            "over"
        )
    run.journal.say(f"{problem}; recomputing them with {run.resolved.config.model}", "yellow")
    run.journal.log_event(run.state.step, "reference computed anew", because=problem)
    return Learner(run.first_policy(), run.resolved.config.train)


def _changed_start(run: Run) -> list[str]:
    """Return the changes that resumes have recorded for the model's files since the run began."""
    events = (e for e in run.journal.folder.read("events.jsonl") if e["event"] == INEXACT)
    causes = [str(cause) for event in events for cause in _texts(event.get("because"))]
    return [cause.partition(" since")[0] for cause in causes if cause.startswith("model/")]


def _texts(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()


def _stored_sums(folder: Path, digest: str) -> np.ndarray:
    """Return the log-probs that an interrupted computation has stored for these examples, (answers,).

    Empty if the file is gone, damaged, or of other examples. Raises OSError, with the file's name, if it
    cannot be read.
    """
    try:
        sums, examples = read_sums(folder)
    except (FileNotFoundError, CheckpointError, ValueError):
        return np.zeros(0, np.float32)
    return sums if examples == digest else np.zeros(0, np.float32)
