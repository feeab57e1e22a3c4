"""Evaluation and sampling of a model without training."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from covey.config.load import ResolvedConfig
from covey.models.load import load_policy, speed_notes
from covey.models.model_objects import restore_model_object
from covey.models.policy import Policy
from covey.rewards.reward_checks import check_columns, check_references
from covey.rng import key
from covey.rollouts.groups import sampling_params
from covey.rollouts.learned import rewards_of
from covey.runs.arithmetic import arithmetic_notes, compute_as_run, source_run
from covey.runs.estimates import Evaluation
from covey.runs.reader import retry_with_newest
from covey.sampling.base import SamplerMonitor, SamplingParams
from covey.sampling.local import LocalSampler
from covey.sampling.notes import unseen_by_model
from covey.sampling.prompts import EncodedProblem, dropped_rows, encode, texts_of
from covey.sampling.tools.reader import reader_by
from covey.sampling.tools.use import toolbox_of, unexplained_tools, with_schemas, with_tools
from covey.system.console import RunConsole
from covey.system.device import pick_device
from covey.system.text import Say
from covey.tasks.files import check_characters
from covey.tasks.source import Source, load_test_source
from covey.training.evaluation import evaluate_by
from covey.types import Completion, Problem
from covey_verify.errors import ConfigError, DataError
from covey_verify.types import Messages


@contextmanager
def model_of(resolved: ResolvedConfig, say: Say, texts: Iterable[str] = ()) -> Iterator[Policy]:
    """Yield a config's model. The model of a run computes as in that run, or a note says that it cannot."""
    run = source_run(resolved)
    read = list(texts) if resolved.config.model == "tiny" else ()  # perhaps more than once
    with (
        restore_model_object(resolved.config.model),
        compute_as_run(run, pick_device(resolved.config.device)),
    ):
        policy = retry_with_newest(resolved, lambda newest: load_policy(newest, read), say)
        for note in arithmetic_notes(policy, resolved.config, run):
            say(note)
        yield policy


def evaluate_once(resolved: ResolvedConfig, console: RunConsole) -> Evaluation:
    """Measure a config's model on its held-out problems."""
    config = resolved.config
    toolbox = toolbox_of(resolved)
    source = with_schemas(load_test_source(resolved), toolbox, console.say)
    if not source.test:
        raise DataError("data.test: there are no held-out problems to evaluate")
    rewards = rewards_of(resolved, config.rewards or source.rewards)
    console.say(rewards.criterion)
    check_columns(source.test, rewards)

    def warn(note: str) -> None:
        console.say(note, "yellow")

    # The problems of a run's own evaluations, so that both measure the same.
    usable, skipped = check_references(source.test, rewards, config.scoring.max_bad_references)
    source = replace(source, test=usable)
    for row, why in skipped.items():
        warn(f"skipping {row}: {why}")
    with model_of(resolved, warn, texts_of(source, config)) as policy:
        encoded = encode(policy, source.test, config)
        problems = encoded[: config.eval.problems]
        dropped = dropped_rows(source.test, encoded)
        unseen = unseen_by_model(policy, source.test, config)
        for note in (
            *speed_notes(policy, config),
            *unseen,
            *unexplained_tools(policy, source, toolbox),
            *dropped,
        ):
            warn(note)
        rewards = replace(rewards, reader=reader_by(policy))
        sampler = LocalSampler(policy, config.rollout.max_running, monitor=ConsoleMonitor(console))
        console.begin("evaluating", 1)
        try:
            speaker = with_tools(sampler, policy, toolbox)
            return evaluate_by(resolved, problems, speaker, rewards, console.show_sampling)
        finally:
            console.end()


@dataclass(frozen=True)
class ConsoleMonitor(SamplerMonitor):
    """Reports on the console that sampling ran out of memory."""

    console: RunConsole

    def fewer_running(self, running: int) -> None:
        """Report how many completions are sampled at once from now on."""
        self.console.fewer_running(running)


def one_answer_each(
    resolved: ResolvedConfig, problems: Sequence[Problem], say: Say, greedily: bool
) -> list[list[str]]:
    """Return a completion of each problem by a config's model, as the texts of its tokens.

    A sampled one is drawn at the config's temperature; it is the same each time.
    """
    with model_of(resolved, say) as policy:
        encoded = encode(policy, problems, resolved.config)
        requests = [p.request([key(resolved.config.seed, "one answer", p.problem.id)]) for p in encoded]
        params = sampling_params(resolved.config.rollout)
        if greedily:
            params = replace(params, temperature=0.0)
        completions = {s.request: s.completion for s in LocalSampler(policy).sample(requests, params)}
    texts = [
        [policy.decode([token]) for token in completions[i].tokens.tolist()] for i in range(len(problems))
    ]
    return [[text for text in tokens if text] for tokens in texts]  # special tokens have none


def sample_once(
    resolved: ResolvedConfig,
    prompts: Sequence[str],
    n: int,
    max_tokens: int,
    temperature: float,
    chat: bool,
    system: str,
    chat_template_kwargs: Mapping[str, object] | None,
    say: Say,
) -> list[list[str]]:
    """Return ``n`` completions of each prompt by a config's model; arguments as in ``covey.sample``."""
    if not chat and (system or chat_template_kwargs):
        raise ConfigError("system and chat_template_kwargs need the chat template: set chat too")
    _check_request(prompts, system, n, max_tokens, temperature)
    template = chat_template_kwargs or {}
    problems = [Problem(text, _chat(text, system) if chat else text, {}, template) for text in prompts]
    toolbox = toolbox_of(resolved)
    with model_of(resolved, say) as policy:
        problems = with_schemas(Source(problems, []), toolbox).train
        prompted = [EncodedProblem(p, _encode(policy, p, max_tokens)) for p in problems]
        requests = [p.request(_streams(resolved.config.seed, p.problem, n)) for p in prompted]
        if not chat and policy.tokenizer.chat_template and source_run(resolved) is None:
            say(
                "this model has a chat template: with chat (--chat) it answers instead of continuing the text"
            )
        sampler = with_tools(LocalSampler(policy), policy, toolbox)
        params = SamplingParams(max_tokens, temperature)
        completions = {(s.request, s.sample): s.completion for s in sampler.sample(requests, params)}
    _note_truncated(completions.values(), max_tokens, say)
    return [[completions[row, number].text for number in range(n)] for row in range(len(prompts))]


def _note_truncated(completions: Collection[Completion], max_tokens: int, say: Say) -> None:
    truncated = sum(completion.finish == "length" for completion in completions)
    if truncated:
        say(
            f"{truncated} of {len(completions)} completions are truncated at {max_tokens} tokens (max_tokens)"
        )


def _streams(seed: int, problem: Problem, n: int) -> list[int]:
    # Keyed by sample number and prompt: another order of prompts gives the same texts.
    return [key(seed, "sample", number, problem.id) for number in range(n)]


def _chat(text: str, system: str) -> Messages:
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": text}]


def _check_request(prompts: Sequence[str], system: str, n: int, max_tokens: int, temperature: float) -> None:
    if n < 1 or max_tokens < 1 or not 0 <= temperature <= 100:
        raise ConfigError(
            f"n {n}, max_tokens {max_tokens}, temperature {temperature:g}: n and max_tokens must be at "
            "least 1, temperature 0 to 100"
        )
    if isinstance(prompts, str):
        raise ConfigError("prompts must be a list of texts, not one text")
    if not prompts:
        raise ConfigError("prompts is empty; give at least one")
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise ConfigError(
                f"prompts: {str(prompt)[:60]!r} is a {type(prompt).__name__}, not a text. Of a chat, give "
                "the user's message with chat=True, and the system message as system"
            )
    check_characters([*prompts, system], "prompts")


def _encode(policy: Policy, problem: Problem, max_tokens: int) -> np.ndarray:
    """Return a prompt's ids. (P,) int64. Raises ConfigError if they leave no room for ``max_tokens``."""
    tokens = np.array(policy.encode(problem.prompt, problem.template), dtype=np.int64)
    if not len(tokens):
        raise ConfigError("a prompt is empty, so there is nothing to continue")
    if len(tokens) + max_tokens > policy.context:
        raise ConfigError(
            f"max_tokens {max_tokens} and the prompt's {len(tokens)} tokens exceed the model's "
            f"context of {policy.context} tokens"
        )
    return tokens


def transcripts(by_prompt: Mapping[str, Sequence[str]], chat: bool, system: str = "") -> Iterator[str]:
    """Yield prompts and completions for people: texts that continue, or turns under the names of roles."""
    if system:
        yield f"system: {system}"
    for prompt, texts in by_prompt.items():
        if chat:
            yield f"user: {prompt}"
        for number, text in enumerate(texts, start=1):
            which = f" {number} of {len(texts)}" if len(texts) > 1 else ""
            yield f"assistant{which}: {text.strip()}\n" if chat else f"{prompt}{text}"
