"""A run's memory by component: forecast before the first step, then measured in its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from covey.learner.memory import (
    Expectation,
    LargestStep,
    RunParts,
    fitting_sizes,
    forecast,
    largest_step,
    shape_of,
)
from covey.models.live_memory import alive_bytes
from covey.rollouts.learned import reward_model_bytes
from covey.runs.journal import Journal
from covey.runs.reader import read_environment
from covey.sampling.local import LocalSampler
from covey.sampling.tools.turns import innermost
from covey.system.device import device_memory
from covey.system.processes import gather, on_this_machine
from covey.training.run import Run

TRAINED = ("weights", "gradient", "optimizer")
"""The components that a model under training keeps between its steps."""


def plan_memory(run: Run, program: int) -> dict[str, int]:
    """Report the memory forecast; pick the micro-batches and the number of completions at once that fit.

    ``program``: bytes of program and libraries. Returns bytes per component.

    Micro-batch size affects rounding, so a resumed run keeps the size it started with.
    """
    config = run.resolved.config
    learner = run.learner
    device = learner.network.device
    # Processes on one machine share its memory equally.
    available = device_memory(device) // on_this_machine(device.type)
    largest = _largest_step(run)
    expect = _expectation(run, largest, program)
    configured = config.train.tokens_per_micro_batch
    recorded = (read_environment(config.output) or {}).get("micro_tokens", {})
    # A changed setting makes a new plan; else the run's first plan holds.
    keeps_size = recorded.get("configured") == configured
    fitting, running = fitting_sizes(expect, config, largest, available)
    tokens = recorded["planned"] if keeps_size else fitting
    # All processes use the size that fits into the smallest one.
    tokens = min(gather(tokens))
    learner.micro_tokens = tokens
    if run.critic is not None:
        run.critic.micro_tokens = tokens
    sampler = innermost(run.sampler)
    if isinstance(sampler, LocalSampler):
        sampler.max_running = running = min(gather(running))
    components = expect(tokens, running)
    _say_estimate(run.journal, components, available)
    if tokens < configured:
        why = "had no room when the run began" if keeps_size else "does not fit in memory"
        run.journal.say(f"train.tokens_per_micro_batch {configured} {why}; using {tokens}", "yellow")
    if running < config.rollout.max_running:
        most = config.rollout.max_running
        run.journal.say(f"rollout.max_running {most} does not fit in memory; using {running}", "yellow")
    return components


def _say_estimate(journal: Journal, components: Mapping[str, int], available: int) -> None:
    """Print the bytes of each component, in yellow if they exceed the available bytes."""
    total = sum(components.values())
    journal.say(
        f"estimated memory: {total / 1e6:,.0f} of {available / 1e6:,.0f} MB ({in_megabytes(components)})",
        "" if total <= available else "yellow",
    )


def _largest_step(run: Run) -> LargestStep:
    """Return the tokens of the run's largest step, from its prompts and examples."""
    examples = [e for e in (*run.train_set, *run.held_out) if e.answers]
    return largest_step(
        run.resolved.config,
        [len(p.tokens) for p in run.train_set],
        [len(e.tokens) + sum(len(a.tokens) for a in e.answers) for e in examples],
        run.resolved.algorithm.whole_groups,
        len(run.test_set),
    )


def critic_parameters(run: Run) -> int:
    """Return the number of parameters of the critic's network; 0 without one."""
    return sum(p.numel() for p in run.critic.network.parameters) if run.critic else 0


def _expectation(run: Run, largest: LargestStep, program: int) -> Expectation:
    """Return the forecast as a function of the micro-batch and of the number of completions at once."""
    learner = run.learner
    shape = shape_of(learner.network.unsharded)
    own_weights = learner.reference is not None and learner.reference.has_weights
    return partial(
        forecast,
        shape,
        run.resolved.config,
        largest,
        parts=RunParts(program, own_weights, critic_parameters(run), reward_model_bytes(run.rewards)),
    )


def in_megabytes(components: Mapping[str, int]) -> str:
    """Format bytes by component, leaving out those that round to 0 MB.

    >>> in_megabytes({"weights": 3_200_000, "critic": 0})
    'weights 3'
    """
    return ", ".join(f"{name} {size / 1e6:,.0f}" for name, size in components.items() if size >= 5e5)


def memory_measured(run: Run) -> dict[str, int]:
    """Measure the bytes of the run's tensors by component; for temporary ones the most so far.

    ``activations`` is what a forward pass leaves for its backward pass, of the policy or of its critic.
    """
    parts = run.learner.memory_bytes()
    reference = run.learner.reference
    sampler = innermost(run.sampler)
    critic = run.critic.memory_bytes() if run.critic is not None else dict.fromkeys(parts, 0)
    return {
        **{name: parts[name] for name in TRAINED},
        "reference": alive_bytes(reference.state().values()) if reference is not None else 0,
        "critic": sum(critic[name] for name in TRAINED),
        "reward models": reward_model_bytes(run.rewards),
        "activations": max(parts["activations"], critic["activations"]),
        "sampling": sampler.most_memory if isinstance(sampler, LocalSampler) else 0,
    }
