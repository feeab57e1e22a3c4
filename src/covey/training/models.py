"""The models of a run and its sampler: policy, critic, reference."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from covey.cluster.samplers import PlacedSamplers
from covey.config.load import ResolvedConfig
from covey.config.sampling import Servers
from covey.config.schema import Config
from covey.config.unread import reads
from covey.learner.learner import Learner, LearnerMonitor
from covey.models.load import load_policy, own_reference
from covey.models.policy import Policy
from covey.models.reference import Reference
from covey.models.value_head import ValueModel, add_value_head, load_value_model, value_model_from
from covey.sampling.base import Sampler
from covey.sampling.local import LocalSampler
from covey.sampling.prompts import EncodedProblem, encode_examples, texts_of
from covey.sampling.remote import RemoteSampler
from covey.sampling.server_client import TOKEN
from covey.sampling.servers import Transport
from covey.system.processes import is_rank_zero
from covey.tasks.examples import Example
from covey.tasks.source import Source
from covey.training.monitor import RunMonitor
from covey.training.reward_model import encode_judged, kind_of, load_reward_model
from covey_verify.web import ask


def load_trained(
    resolved: ResolvedConfig, source: Source
) -> tuple[Policy, Callable[[Sequence[Example]], list[EncodedProblem]]]:
    """Return the model that a method trains, and the function that encodes its examples."""
    config = resolved.config
    texts = texts_of(source, resolved.config)
    if config.method == "reward_model":
        reward_model = load_reward_model(resolved, texts, kind_of(source.examples))
        return reward_model, lambda examples: encode_judged(reward_model, examples)
    policy = load_policy(resolved, texts)
    return policy, lambda examples: encode_examples(policy, examples, config)


def reference_model(policy: Policy, resolved: ResolvedConfig) -> Reference | None:
    """Return the frozen reference, if the algorithm asks for one."""
    algorithm = resolved.algorithm
    needs_reference = algorithm.needs_reference and resolved.config.method == "rl"
    return Reference(policy, algorithm.moves_reference, own_reference(resolved)) if needs_reference else None


def policy_learner(
    policy: Policy, resolved: ResolvedConfig, reference: Reference | None, monitor: LearnerMonitor
) -> Learner[Policy]:
    """Return the policy with its optimizer. A value head on it learns at the critic's rate."""
    config = resolved.config
    critic = resolved.algorithm.critic
    # Relative, so that the head follows the policy's schedule.
    relative_lr = critic.lr / config.train.lr if critic and config.train.lr else 1.0
    return Learner(
        policy, config.train, reference, head=policy.value, relative_lr=relative_lr, monitor=monitor
    )


def critic_network(policy: Policy, resolved: ResolvedConfig) -> ValueModel | None:
    """Return the network of a separate critic; None if the critic is a head on the policy, or there is none.

    Raises ConfigError for a model that cannot be a critic.
    """
    config = resolved.config
    critic = resolved.algorithm.critic
    if critic is None or config.method != "rl":
        return None
    if critic.trunk == "policy":
        add_value_head(policy)
        return None
    model = (
        load_value_model(critic.model, resolved.folder, policy) if critic.model else value_model_from(policy)
    )
    if model.decoder is not None:
        model.decoder.recompute = config.train.recompute_layers
    return model


def critic_learner(
    network: ValueModel, resolved: ResolvedConfig, monitor: LearnerMonitor
) -> Learner[ValueModel]:
    """Return a separate critic with its optimizer, which has a rate of its own."""
    critic = resolved.algorithm.critic
    assert critic is not None, "it has a network"
    return Learner(network, resolved.config.train.model_copy(update={"lr": critic.lr}), monitor=monitor)


def sampler_of(
    policy: Policy, config: Config, prompts: Sequence[EncodedProblem], monitor: RunMonitor
) -> Sampler:
    """Return a sampler on servers, if the config names some or Ray places them, else in this process."""
    rollout = config.rollout
    transport: Transport = ask
    from_snapshot = rollout.staleness > 0 and reads(config.method, "rollout.staleness")
    # Sampling ahead needs weights that the training thread does not change meanwhile.
    policy = policy.snapshot() if from_snapshot else policy
    sampler = rollout.sampler or (Servers() if config.launch.samplers else None)
    if sampler is None:
        return LocalSampler(
            policy, rollout.max_running, monitor.faults, monitor=monitor, from_snapshot=from_snapshot
        )
    folder = sampler.folder or config.output / "sync"
    token = os.environ.get(TOKEN, "")
    if config.launch.samplers and is_rank_zero():  # the process that sends all requests
        placed = PlacedSamplers(policy, config, folder)
        sampler = sampler.model_copy(update={"url": (*sampler.url, *placed.urls)})
        transport = placed.ask
    return RemoteSampler(
        policy,
        sampler,
        folder,
        probes=[p.tokens for p in prompts],
        temperature=rollout.temperature,
        max_running=rollout.max_running,
        token=token,
        transport=transport,
        monitor=monitor,
        from_snapshot=from_snapshot,
    )
