"""Training examples from a run's completions: best-worst pairs of a group, or correct completions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from covey.config.schema import Keep
from covey.runs.atomic import make_folder, write_file
from covey.runs.reader import read_environment, stages_in
from covey.runs.rollouts import RolloutLog, read_rollouts, recorded_steps
from covey.tasks.sampled import ANSWER_COLUMNS, SAMPLED, sampled_column
from covey.types import AnswerTokens, Problem, SampledTokens
from covey_verify.errors import ConfigError, DataError

ExampleRow = dict[str, object]
LOGGED_FIELDS = (
    "step", "group", "problem", "prompt", "completion", "finish", "reward", "components", "turns",
)  # fmt: skip
"""Fields taken from a row of the log."""


class LoggedSample(NamedTuple):
    """A completion in the log of a run."""

    step: int
    group: int
    problem: str
    prompt: object
    completion: str
    finish: str
    reward: float | None
    components: Mapping[str, float | None]
    turns: Sequence[Mapping[str, object]] = ()
    tokens: AnswerTokens | None = None
    """Token ids that the text was decoded from."""
    prompt_tokens: tuple[int, ...] = ()
    tokenizer: str = ""
    """Hash of the vocabulary of these tokens."""


def sampled_groups(run: Path) -> Iterator[list[LoggedSample]]:
    """Yield the groups of a run, or of each stage of a pipeline, in the order of sampling.

    Raises CheckpointError naming a damaged file, DataError where nothing was sampled.
    """
    logged = [(folder, step) for folder in (run, *stages_in(run)) for step in recorded_steps(folder)]
    if not logged:
        raise DataError(f"{run}: the run has no completions (no rollouts/step_*.jsonl)")
    tokenizers = {folder: _tokenizer_of(folder) for folder, _ in logged}
    for folder, step in logged:
        log = read_rollouts(folder, step)
        for number, indices in log.groups.items():
            prompt = tuple(log.prompts[number].tolist())
            yield [_logged_sample(log, index, prompt, tokenizers[folder]) for index in indices]


def _logged_sample(log: RolloutLog, index: int, prompt: tuple[int, ...], tokenizer: str) -> LoggedSample:
    row = log.rows[index]
    completion = log.completion(index)
    fields = {name: row[name] for name in LOGGED_FIELDS if name in row}
    tokens = AnswerTokens(tuple(completion.tokens.tolist()), tuple(completion.drawn_mask.tolist()))
    return LoggedSample(**fields, tokens=tokens, prompt_tokens=prompt, tokenizer=tokenizer)


def _tokenizer_of(folder: Path) -> str:
    tokenizer = (read_environment(folder) or {}).get("tokenizer")
    if not isinstance(tokenizer, str):
        raise DataError(
            f"{folder}: env.json is missing or does not name the tokenizer of the completions; restore it, "
            "or sample again"
        )
    return tokenizer


def write_pairs(run: Path, output: Path, margin: float, per_problem: int) -> dict[str, object]:
    """Write the pairs of a run to a file and count them. Raises DataError where there are none."""
    if not margin >= 0 or per_problem < 1:
        raise ConfigError("--margin must be at least 0, and --per-problem at least 1")
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; name a file")
    groups = list(sampled_groups(run))
    rows = preference_pairs(groups, Keep(margin=margin, per_problem=per_problem), {})
    if not rows:
        raise DataError(
            f"{run}: none of {len(groups)} groups has whole completions whose rewards differ by more than "
            f"{margin:g}; {mostly_truncated(groups) or 'ask for less (--margin)'}"
        )
    make_folder(output.parent)
    write_file(output, as_jsonl(rows))
    return {"pairs": len(rows), "groups": len(groups), "output": str(output)}


def preference_pairs(
    groups: Iterable[Sequence[LoggedSample]], keep: Keep, columns: Mapping[str, Problem]
) -> list[ExampleRow]:
    """Pair the best with the worst completion of each group, then the second best with the second worst.

    Both must differ by more than ``keep.margin``. Truncated completions are left out: the model did not end
    them. ``columns`` are the problems by id; their columns are added to the rows.
    """
    rows: dict[str, ExampleRow] = {}
    for group in groups:
        whole = [(s.reward, s) for s in group if s.reward is not None and s.finish == "stop"]
        ranked = sorted(whole, key=lambda pair: -pair[0])
        count = min(len(ranked) // 2, keep.per_problem)
        # count is at most half of the group, so no completion is both chosen and rejected.
        for (best, chosen), (worst, rejected) in zip(ranked[:count], ranked[::-1], strict=False):
            if best - worst <= keep.margin or chosen.completion == rejected.completion:
                continue
            answers = {"chosen": chosen, "rejected": rejected}
            row = {**example_row(answers), "margin": best - worst, **_columns(chosen, columns)}
            # Groups of later steps may repeat a pair; the first one stays.
            identity = [row[name] for name in ("prompt", "chosen", "rejected")]
            rows.setdefault(json.dumps(identity, ensure_ascii=False), row)
    return list(rows.values())


def correct_examples(
    groups: Iterable[Sequence[LoggedSample]], verdict: str, keep: Keep, columns: Mapping[str, Problem]
) -> list[ExampleRow]:
    """Return correct completions that pass ``keep.least``, at most ``keep.per_problem`` texts of each."""
    least = {verdict: 0.5, **keep.least}
    examples: dict[str, dict[str, ExampleRow]] = {}
    for sampled in (s for group in groups for s in group if s.finish == "stop"):
        values = {name: sampled.components.get(name) for name in least}
        passes = all(value is not None and value >= least[name] for name, value in values.items())
        # `least` tests >=, but correct means strictly above .5.
        if not passes or (values[verdict] or 0.0) <= 0.5:
            continue
        texts = examples.setdefault(sampled.problem, {})
        if len(texts) < keep.per_problem:
            row = {**example_row({"completion": sampled}), **_columns(sampled, columns)}
            # Texts that differ in white space only count as the same.
            texts.setdefault(" ".join(sampled.completion.split()), row)
    return [row for texts in examples.values() for row in texts.values()]


def mostly_truncated(groups: Iterable[Sequence[LoggedSample]]) -> str:
    """Return what to do if at least half of the completions are truncated; empty otherwise."""
    samples = [s for group in groups for s in group]
    whole = sum(s.finish == "stop" for s in samples)
    if 2 * whole > len(samples):
        return ""
    return (
        f"{len(samples) - whole} of {len(samples)} completions are truncated, and those are left out: raise "
        "rollout.max_tokens, or train the model to end its answers first"
    )


def example_row(answers: Mapping[str, LoggedSample]) -> ExampleRow:
    """Return a row of answers to one prompt: texts for people and programs, tokens for the next stage."""
    first = next(iter(answers.values()))
    row: ExampleRow = {
        "prompt": first.prompt,
        **{name: _answer_of(sample) for name, sample in answers.items()},
    }
    ids = {name: a.tokens for name, a in answers.items() if a.tokens is not None}
    if ids:
        row[SAMPLED] = sampled_column(row, SampledTokens(first.tokenizer, first.prompt_tokens, ids))
    return row


def _answer_of(sampled: LoggedSample) -> object:
    """Return a completion in the form of its prompt. With tool answers only messages say who wrote what.

    Raises DataError where the prompt is text and a tool answered.
    """
    if not isinstance(sampled.prompt, str):
        # Their content has the calls as the model wrote them: a template would write `tool_calls` once more.
        turns = [{"role": turn["role"], "content": turn["content"]} for turn in sampled.turns]
        return turns or [{"role": "assistant", "content": sampled.completion}]
    if sampled.turns:
        raise DataError(
            f"{sampled.problem}: a tool answered in this completion, but in plain text its reply cannot be "
            "told from the model's words; set data.chat: true"
        )
    return sampled.completion


def _columns(sampled: LoggedSample, columns: Mapping[str, Problem]) -> ExampleRow:
    """Return the columns of a problem that rewards read, without those of examples."""
    problem = columns.get(sampled.problem)
    if problem is not None and not same_prompt(problem.prompt, sampled.prompt):
        raise DataError(
            f"{sampled.problem} has another prompt than the one its completions were sampled from: restore "
            "the data, or sample again with another output"
        )
    reserved = ("prompt", *ANSWER_COLUMNS, "label", "labels", "margin", "messages", SAMPLED)
    return {k: v for k, v in (problem.columns if problem else {}).items() if k not in reserved}


def same_prompt(prompt: object, logged: object) -> bool:
    """Whether a problem's prompt is the one that a log of completions names."""
    # The log holds JSON: tuples came back as lists, other objects as strings.
    return json.loads(json.dumps(prompt, default=str)) == logged


def as_jsonl(rows: Iterable[Mapping[str, object]]) -> str:
    """Return rows as JSON, one line each."""
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
