"""The record of a run that any trainer can write: JSONL, a header, then a line for each rollout and update.

All fields but a line's `kind` and `step` are optional. `docs/audit-record.md` describes each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from covey.audit.frameworks import words_of

if TYPE_CHECKING:
    from covey.objective.algorithms import Algorithm

FORMAT: Final = "covey-audit"
VERSION: Final = 2
MIN_CHANGED_WEIGHTS = 0.01
"""Fraction of changed weights above which an update counts as having moved the policy."""
MIN_LOGPROB_CHANGE = 1e-4
"""Mean change of the log-probs above which an update counts as having moved the policy, in nats per token."""

Bit = Annotated[bool, BeforeValidator(lambda value: bool(value) if value in (0, 1) else value)]
"""1 or true; 0 or false."""
MaskValue = Annotated[bool, BeforeValidator(lambda value: value != 0)]
"""Whether a loss counts a token: a trainer may pass other numbers as a mask, by mistake."""
Numbers = list[float | None]
"""A number for each token of a completion; null where it is unknown."""
Scores = dict[str, float | None]
"""A value for each reward function; null where it gave none."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SpecialTokens(_Part):
    """The special tokens of a tokenizer, by their ids."""

    bos: int | None = None
    eos: list[int] = []
    pad: int | None = None
    names: dict[str, str] = {}
    """Text of each added token, by its id."""
    frozen: list[int] = []
    """Tokens that the checkpoint lacks, and whose embeddings are not trained."""
    opening: list[int] = []
    """With what the template opens an answer."""
    opening_logprob: float | None = None
    """Of these tokens behind a prompt of the data in the template, in nats per token."""


class DataFacts(_Part):
    """Counts of the rows that a run learns from."""

    rows: int | None = None
    distinct: int | None = None
    """Rows with different prompts."""
    eval_rows: int | None = None
    eval_in_train: int | None = None
    """Rows of the evaluation whose prompt is a training prompt too."""


class Header(_Part):
    """The first line: the framework and its settings, in its own words."""

    format: Literal["covey-audit"]
    version: Literal[2]
    framework: str = ""
    framework_version: str = ""
    settings: dict[str, object] = {}
    tokens: SpecialTokens = SpecialTokens()
    data: DataFacts = DataFacts()


class Sample(_Part):
    """One completion as it was sampled and scored. T is the number of ``ids``."""

    prompt: str | list[dict[str, object]] | None = None
    prompt_ids: list[int] | None = None
    text: str | None = None
    ids: list[int] | None = None
    group: int | None = None
    """Number of the group within which the trainer compares the completion."""
    row: dict[str, object] = {}
    """The columns of its data row besides the prompt."""
    foreign: Bit = False
    """Whether no row of the data has this prompt with this answer."""
    rewards: Scores = {}
    reward: float | None = None
    """The weighted sum."""
    advantage: float | None = None
    sampler_logprobs: Numbers | None = None
    """(T,) the log-probs that the sampler reported."""
    inserted: list[Bit] | None = None
    """(T,) true for tokens that a tool or an environment wrote."""
    model_logprobs: Numbers | None = None
    """(T,) log-probs computed again with the model before its next update, at the sampling temperature, by a
    plain forward pass over this completion alone."""
    model_logprobs_at_1: Numbers | None = None
    """(T,) ``model_logprobs`` at temperature 1."""
    alone: Scores = {}
    """Rewards of this completion, scored again in a call of its own."""
    elsewhere: Scores = {}
    """Rewards of this completion with another problem's row."""
    empty: Scores = {}
    """Rewards of an empty text for this row."""
    listed: Scores = {}
    """Rewards for this row of a text that lists the answers of all rows."""
    kl_ids: list[int] | None = None
    """In KTO: the completion, of another prompt, from which the KL is estimated."""

    @property
    def prompt_text(self) -> str:
        """A key, the prompt or its ids: completions of one prompt have the same key."""
        return str(self.prompt if self.prompt is not None else self.prompt_ids)


class Row(_Part):
    """One completion as an update trains on it."""

    rollout: int
    """``number`` in the line of its rollout."""
    completion: int
    """Index of the completion in that line, from 0."""
    ids: list[int] | None = None
    """Only if they differ from the sample's ids."""
    mask: list[Bit] | None = None
    """(T,), or longer if padding is trained: true for tokens in the loss."""
    logprobs: Numbers | None = None
    """(T,) log-probs of the trained policy, as they enter the loss."""
    old_logprobs: Numbers | None = None
    ref_logprobs: Numbers | None = None
    advantage: float | Numbers | None = None
    after_logprobs: Numbers | None = None
    """(T,) log-probs after the update, computed like ``model_logprobs``."""
    prompt_trained: int | None = None
    """Number of tokens of the prompt in the loss."""
    token_rewards: Numbers | None = None
    """(T,) or longer: the rewards from which advantages are computed, including any KL."""
    token_scores: Numbers | None = None
    """(T,) or longer: ``token_rewards`` without the KL."""
    kl: Numbers | None = None
    """(T,) the KL to the reference that is charged, without its coefficient."""
    values: Numbers | None = None
    """(T,) the critic's values."""
    returns: Numbers | None = None
    """(T,) sums of the rewards from each token on, or the targets of the critic."""
    corrections: Numbers | None = None
    """(T,) importance weights in the loss that correct for the sampler's log-probs."""
    entropies: Numbers | None = None
    """(T,) of the trained policy's distribution at each token, in nats."""
    gradients: Numbers | None = None
    """(T,) or longer: the derivative of the loss by ``logprobs``, times any number for the whole update."""


class Rollout(_Part):
    """A line: completions that were sampled and scored together."""

    kind: Literal["rollout"]
    number: int
    step: int
    """Number of the update that comes next."""
    completions: list[Sample]


class Motion(_Part):
    """The motion of some weights of a tensor by a step: norms over these weights."""

    name: str
    gradient: float | None = None
    """As the step got it."""
    change: float | None = None
    """By the step; None if the optimizer took no step."""
    due: float | None = None
    """The change that the optimizer's formula gives for its gradients so far."""
    off: float | None = None
    """Distance of the change from that, beyond rounding."""
    fresh: float | None = None
    """Distance of the change from the first step of a new optimizer, beyond rounding."""
    outside: float | None = None
    """Change since the end of the step before."""


class Update(_Part):
    """A line: one optimizer step."""

    kind: Literal["update"]
    step: int
    rows: list[Row] = []
    loss: float | None = None
    grad_norm: float | None = None
    """The norm before clipping."""
    learning_rate: float | None = None
    weights_changed: float | None = None
    """Fraction of a sample of the weights that the update changed."""
    motions: list[Motion] = []
    """Of some tensors."""
    step_norm: float | None = None
    """Norm of the gradient as the optimizer's step gets it."""
    gradient_cosine: float | None = None
    """Cosine between the gradient of weights and that of the loss, computed once more."""
    adapter_frozen: float | None = None
    """Fraction of an adapter's tensors that are not trained."""
    metrics: dict[str, float | None] = {}

    @property
    def moved(self) -> bool:
        """Whether the update is known to have changed the policy, by its weights or by its log-probs."""
        if self.weights_changed is not None:
            return self.weights_changed > MIN_CHANGED_WEIGHTS
        pairs = (zip(row.logprobs or (), row.after_logprobs or (), strict=False) for row in self.rows)
        changes = [abs(a - b) for row in pairs for a, b in row if a is not None and b is not None]
        return sum(changes) > MIN_LOGPROB_CHANGE * len(changes)


class LossRow(_Part):
    """A completion as a loss function gets it. All values are (T,), including those with mask 0."""

    mask: list[MaskValue]
    logprobs: Numbers
    old_logprobs: Numbers
    advantage: Numbers
    sampler_logprobs: Numbers | None = None
    corrections: Numbers | None = None


class LossCall(_Part):
    """A line: a call of the trainer's loss function, for a micro-batch, and what it returned."""

    kind: Literal["loss"]
    step: int
    """Number of the call, from 0."""
    name: str
    """The function's name."""
    rows: list[LossRow]
    loss: float
    tokens: float | None = None
    """Number of tokens by which it divides, if its caller gives one; otherwise it counts the mask."""
    completions: float | None = None
    """Number of completions by which it divides, if its caller gives one."""
    moved: bool | None = None
    """Whether an observed weight has changed since the previous call."""


class Term(_Part):
    """A line: a term of the loss in the call with this `step`, with the gradient that came back to it."""

    kind: Literal["term"]
    call: int
    name: Literal["policy", "kl", "entropy"]
    factor: float
    """The gradient, which is the factor of the term in the whole loss."""
    exchanged: bool | None = None
    """Whether a KL got the log-probs of the reference and of the policy exchanged."""
    gradient_kept: bool | None = None
    """Whether the observed weight already had a gradient."""
    gradient_scaled: float | None = None
    """The number by which the gradient of earlier calls has been multiplied since; None if that is unknown,
    or if the gradient is no longer a multiple of its old value.
    """


Line = Annotated[Rollout | Update | LossCall | Term, Field(discriminator="kind")]
READ_LINE: TypeAdapter[Rollout | Update | LossCall | Term] = TypeAdapter(Line)


@dataclass(frozen=True)
class Use:
    """A completion in an update, with its sample."""

    update: Update
    row: Row
    sample: Sample
    first: bool
    """Whether no update came between its sampling and this one."""
    moved: bool
    """Whether updates between them are known to have changed the weights."""
    changed_before: bool
    """Whether any update before this one is known to have changed the weights."""


@dataclass(frozen=True, eq=False)
class AuditRecord:
    """A run as its trainer wrote it down."""

    header: Header
    lines: tuple[Rollout | Update, ...]
    """In the order in which they happened."""
    calls: tuple[LossCall, ...] = ()
    """Calls of the loss function."""
    terms: tuple[Term, ...] = ()
    """Terms of the losses in these calls."""
    algorithm: Algorithm | None = None
    """The algorithm of the run, if the reader of its files knows it."""
    notes: list[str] = field(default_factory=list)
    """Remarks of the reader of its files."""

    @cached_property
    def rollouts(self) -> tuple[Rollout, ...]:
        """The lines of rollouts, in order."""
        return tuple(line for line in self.lines if isinstance(line, Rollout))

    @cached_property
    def updates(self) -> tuple[Update, ...]:
        """The lines of updates, in order."""
        return tuple(line for line in self.lines if isinstance(line, Update))

    @cached_property
    def samples(self) -> tuple[tuple[int, int, Sample], ...]:
        """(step, place, completion) of all rollouts."""
        return tuple((r.step, index, s) for r in self.rollouts for index, s in enumerate(r.completions))

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """All completions in all updates; rows without a recorded sample are left out."""
        return tuple(self._uses())

    def _uses(self) -> Iterator[Use]:
        rollouts: dict[int, Rollout] = {}
        # The number of updates, and of updates that changed the weights, before each rollout.
        updates_at: dict[int, tuple[int, int]] = {}
        updates = changes = 0
        for line in self.lines:
            if isinstance(line, Rollout):
                rollouts[line.number] = line
                updates_at[line.number] = (updates, changes)
                continue
            for row in line.rows:
                rollout = rollouts.get(row.rollout)
                if rollout is not None and 0 <= row.completion < len(rollout.completions):
                    earlier_updates, earlier_changes = updates_at[row.rollout]
                    yield Use(
                        line,
                        row,
                        rollout.completions[row.completion],
                        first=earlier_updates == updates,
                        moved=earlier_changes < changes,
                        changed_before=changes > 0,
                    )
            updates += 1
            changes += line.moved

    def uses_of(self, update: Update) -> list[Use]:
        """Return the completions in one update."""
        return [use for use in self.uses if use.update is update]

    @cached_property
    def functions(self) -> tuple[str, ...]:
        """Names of the reward functions."""
        return tuple(dict.fromkeys(name for _, _, sample in self.samples for name in sample.rewards))

    def own_name(self, name: str) -> str:
        """Return the framework's name of a setting, given the name that checks use."""
        translation = words_of(self.header.framework).settings.get(name, name)
        return translation if self.header.settings.get(translation) is not None else name

    def setting(self, name: str, default: object = None) -> object:
        """Return the value of a setting, by the name that checks use or the framework's own."""
        value = self.header.settings.get(self.own_name(name))
        return default if value is None else value

    def number(self, name: str, default: float) -> float:
        """Return the value of a setting if it is a number, or else the default."""
        value = self.setting(name)
        return float(value) if isinstance(value, int | float) else default

    @cached_property
    def fields(self) -> frozenset[str]:
        """The names of all fields that occur in the record."""
        fields = {f"settings.{name}" for name, value in self.header.settings.items() if value is not None}
        names = words_of(self.header.framework).settings
        fields |= {f"settings.{name}" for name in names if self.setting(name) is not None}
        fields |= {f"data.{name}" for name in self.header.data.model_fields_set}
        fields |= {f"tokens.{name}" for name in self.header.tokens.model_fields_set}
        for update in self.updates:
            fields |= _present_fields(update)
            fields |= {f"metrics.{name}" for name in update.metrics}
            for row in update.rows:
                fields |= _present_fields(row)
        for _, _, sample in self.samples:
            fields |= _present_fields(sample)
        streams = {"losses": self.calls, "terms": self.terms}
        return frozenset(fields | {name for name, lines in streams.items() if lines})


def _present_fields(part: _Part) -> set[str]:
    return {name for name in part.model_fields_set if getattr(part, name) not in (None, {}, [])}
