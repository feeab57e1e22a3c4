"""The table of methods: the examples that each learns from, its loss, its loop and its results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator

from covey.objective.axis_function import data_names
from covey.objective.preference import PREFERENCES, bradley_terry

ExampleKind: TypeAlias = Literal["answer", "pair", "judged", "steps"]
"""Kinds of example: an answer to imitate, a preferred and another one, one with a label, labelled steps."""
Loop: TypeAlias = Literal["reinforcement", "imitation", "preference", "reward_model", "example_sampling"]
"""The loops of ``training``; ``training/pipeline.py:LOOPS`` has their functions."""


@dataclass(frozen=True)
class Method:
    """A way to train a model, or to make examples for a later stage."""

    loop: Loop | None
    """The training loop; None: no model is loaded."""
    learns_from: tuple[ExampleKind, ...] = ()
    """Kinds of example that it learns from; the first kind that a row has is used."""
    loss: Callable[..., object] | None = None
    """The loss, whose settings are the config's `loss`."""
    makes: tuple[ExampleKind, ...] = ()
    """Kinds of example that it makes instead of a model."""
    title: str = ""
    """Title in a model card, if the method's name is not clear enough."""

    @property
    def samples(self) -> bool:
        """Whether its steps sample completions."""
        return self.loop in ("reinforcement", "example_sampling")


def _preference(loss: Callable[..., object]) -> Method:
    """Return the row of a preference loss; its data tell whether it learns from pairs or labelled answers."""
    alone = "desirable" in data_names(loss)
    return Method("preference", learns_from=("judged", "pair") if alone else ("pair",), loss=loss)


METHODS: Mapping[str, Method] = {
    "rl": Method("reinforcement"),
    "sft": Method("imitation", learns_from=("answer",), title="supervised fine-tuning"),
    **{name: _preference(loss) for name, loss in PREFERENCES.items()},
    "reward_model": Method(
        "reward_model",
        learns_from=("pair", "steps", "judged"),
        loss=bradley_terry,
        title="training as a reward model",
    ),
    "pairs": Method("example_sampling", makes=("pair",)),
    "rejection_sampling": Method("example_sampling", makes=("answer",)),
    "filter": Method(None, makes=("answer", "pair", "judged", "steps")),
}


def _methods(which: Callable[[Method], object]) -> tuple[str, ...]:
    return tuple(name for name, method in METHODS.items() if which(method))


# Groups of methods that settings, messages and stages distinguish.
RL = ("rl",)
SAMPLING_METHODS = _methods(lambda m: m.samples)
EXAMPLE_SAMPLERS = _methods(lambda m: m.samples and m.makes)
"""Methods that make examples of the completions that they sample."""
EXAMPLE_METHODS = _methods(lambda m: m.makes)
TRAINING_METHODS = _methods(lambda m: not m.makes)
POLICY_METHODS = tuple(name for name in TRAINING_METHODS if name != "reward_model")
"""Methods whose result is a language model."""
LEARNING_METHODS = _methods(lambda m: m.learns_from)
"""Methods that learn from given examples."""
COMPARING_METHODS = _methods(lambda m: m.loss)
"""Methods that learn which of several answers is better."""
MODEL_METHODS = _methods(lambda m: m.loop)
ALL_METHODS: Collection[str] = tuple(METHODS)


def _checked_name(name: object) -> object:
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}")
    return name


MethodName = Annotated[str, BeforeValidator(_checked_name)]
