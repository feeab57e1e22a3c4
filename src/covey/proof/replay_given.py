"""The repetition of a run over given examples in the naive trainer, compared with the record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from covey.config.load import ResolvedConfig
from covey.models.policy import Policy
from covey.proof.agreement import Agreement, read_saved_weights, weights_apart, with_twin
from covey.proof.decoder import NamedWeights, copy_weights
from covey.proof.descent import ShadowTrainer
from covey.proof.formulas import AxisSettings
from covey.proof.replay import read_setting
from covey.proof.shadow_given import GivenExamples, ShadowAnswer, ShadowExample, given_step
from covey.runs.arithmetic import compute_as_run
from covey.runs.folder import read_numbers
from covey.runs.reader import read_environment
from covey.sampling.prompts import EncodedProblem, GivenAnswer, encode_examples
from covey.sampling.tools.use import toolbox_of, with_schemas
from covey.system.integrity import digest_of
from covey.tasks.source import data_files, load_source
from covey_verify.errors import ConfigError


def replay_given(
    folder: Path,
    model: NamedWeights,
    architecture: AxisSettings,
    dataset: GivenExamples,
    steps: int,
    twin: bool = False,
) -> Iterator[Agreement]:
    """Repeat a stage that learns from given examples; ``covey.proof.replay.replay`` does it for RL."""
    setting = read_setting(folder, architecture)
    start = copy_weights(model)
    trainers = [ShadowTrainer(w, copy_weights(w)) for w in with_twin(model, setting.rounded, twin)]
    for number, record in enumerate(read_numbers(folder, "metrics.jsonl")[:steps]):
        norm, values = given_step(trainers[0], setting, dataset, number)
        weights = trainers[0].weights
        recorded = read_saved_weights(folder, number, setting.train["steps"], weights)
        comparison = _compare_step(number, norm, record["optimizer/grad_norm"], values, record)
        gap, course = weights_apart(weights, recorded, start)
        apart = None
        for other in trainers[1:]:
            its_norm, its_values = given_step(other, setting, dataset, number)
            nearby = _compare_step(number, norm, its_norm, values, its_values)
            apart = replace(nearby, course=weights_apart(weights, other.weights, start)[1])
        yield replace(comparison, weights=gap, course=course, apart=apart)


def _compare_step(
    number: int, norm: float, other: float, metrics: Mapping[str, float], others: Mapping[str, float]
) -> Agreement:
    gaps = [abs(value - others[name]) / max(abs(value), 1.0) for name, value in metrics.items()]
    return Agreement(number + 1, abs(norm - other) / max(norm, 1e-9), metrics=max(gaps))


def given_examples_of(resolved: ResolvedConfig, policy: Policy) -> GivenExamples:
    """Return the examples of a recorded stage. Raises ConfigError if a data file has changed since."""
    config = resolved.config
    stage = resolved.recorded_run
    source = with_schemas(load_source(resolved), toolbox_of(resolved))
    environment = read_environment(stage) if stage is not None else None
    digests = (environment or {}).get("files", {}).values()
    for path in data_files(resolved):
        if digests and digest_of(path) not in digests:
            raise ConfigError(
                f"{path} has changed since {stage} read it, so its steps cannot be repeated. Restore the file"
            )
    with compute_as_run(stage, policy.device):  # a template may print the date
        learned, held_out = (
            [_example(prompted) for prompted in encode_examples(policy, examples, config)]
            for examples in (source.examples, source.held_out)
        )
    settings = resolved.loss.all_settings if resolved.loss is not None else {}
    return GivenExamples(config.method, settings, learned, held_out, policy.context)


def _example(prompted: EncodedProblem) -> ShadowExample:
    answers = [_answer(answer) for answer in prompted.answers]
    return ShadowExample(prompted.tokens.tolist(), answers, prompted.labels[0] > 0.5)


def _answer(answer: GivenAnswer) -> ShadowAnswer:
    return ShadowAnswer(answer.tokens.tolist(), answer.trained.nonzero()[0].tolist())
