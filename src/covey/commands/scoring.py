"""`covey score`: apply rewards to a file of existing completions; also loads rewards for other commands."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from covey.config.load import ResolvedConfig, load_config
from covey.config.schema import Data
from covey.errors import START_FILE
from covey.insight.rescore import tools_shown
from covey.models.wording import MEANING, NO_WORDING, ModelTexts, model_texts_of
from covey.rewards.loading import load_rewards
from covey.rewards.reading import ReplyReader
from covey.rewards.reward_checks import check_columns
from covey.rewards.scorer import Rewards, Scorer
from covey.rollouts.learned import LEARNED, rewards_of
from covey.runs.reader import last_stage, load_for_reading, with_own_model
from covey.runs.trust import is_own, refuse_others_code
from covey.system.text import Say
from covey.tasks.files import MISSING, prompt_of, read_problems, rows, value_at, with_our_columns
from covey.tasks.sampled import SAMPLED
from covey.tasks.source import Source, load_problems
from covey.types import Group, Problem
from covey_verify.errors import ConfigError, DataError
from covey_verify.scoring import mean, record

if TYPE_CHECKING:
    from covey.sampling.tools.running import Toolbox

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message that may hold thoughts, apart from its content."""
NO_MODEL = "no model is named, so no chat template is known"


def score_file(
    file: Path, words: Sequence[str], trust: bool = False, say: Say = lambda _: None
) -> tuple[list[dict[str, object]], dict[str, float]]:
    """Return each row with its rewards, statuses and extracted answers, and the mean of each reward.

    ``say`` is called with notes on unknown properties of the model. Raises DataError, RewardError.
    """
    functions, data, wording, stage = _find_rewards(words, trust)
    with_tools = tools_shown(stage, functions) if stage is not None else _same_problem
    functions = replace(functions, reader=ReplyReader(wording.decode))
    if wording.note:
        say(wording.note)
    scorer = Scorer(functions)
    pending = []
    for line, columns in rows(file):
        row = with_our_columns(columns, data)
        completion = _completion_of(row, f"{file}:{line}")
        problem = with_tools(_problem(file, line, row, data, wording))
        check_columns([problem], functions)
        turns = () if isinstance(completion, str) else completion
        if any(turn.get(name) for turn in turns for name in THOUGHTS):
            # The thoughts are apart, so the content begins after them.
            problem = replace(problem, thoughts=problem.thoughts._replace(begun=False))
        # Submitted here, awaited after the loop: rewards of all rows run in parallel.
        pending.append((row, scorer.begin_text(problem, completion)))
    if not pending:
        raise DataError(f"{file}: the file has no rows")
    scored = [_score_record(row, group.result()) for row, group in pending]
    names = [f.name for f in functions]
    means = {name: mean([r["rewards"][name] for r in scored]) for name in names}
    return scored, means | {"reward": mean([r["reward"] for r in scored])}


def _same_problem(problem: Problem) -> Problem:
    return problem


def _completion_of(row: Mapping[str, object], where: str) -> Any:
    """Return a row's completion: a text, or the messages of a reply. Raises DataError."""
    if "completion" not in row:
        raise DataError(f"{where}: there is no column 'completion'; the row has {', '.join(map(repr, row))}")
    completion = row["completion"]
    if not (isinstance(completion, str) or _is_reply(completion)):
        raise DataError(f"{where}: 'completion' must be a text, or messages of an assistant and its tools")
    return completion


def _is_reply(completion: object) -> bool:
    turns = completion if isinstance(completion, list) else ()
    roles = [turn.get("role") if isinstance(turn, Mapping) else None for turn in turns]
    return "assistant" in roles and set(roles) <= {"assistant", "tool"}


def _problem(file: Path, line: int, row: Mapping[str, object], data: Data, wording: ModelTexts) -> Problem:
    """Return a row as a problem for its rewards, as a run would: its prompt, and thoughts that this opens."""
    where = f"{file}:{line}"
    names = data if data.prompt in row else Data()
    prompt = row.get(names.prompt, "")
    problem = Problem(f"{file.name}:{line}", "", _columns(where, row, data))
    if not prompt:
        return problem if wording.tokenizer is None else wording.with_thoughts(problem)
    content, template = prompt_of(where, row, names)
    return wording.with_thoughts(
        replace(problem, prompt=content, template=template, asked_in_text=isinstance(prompt, str))
    )


def _columns(where: str, row: Mapping[str, object], data: Data) -> dict[str, object]:
    """Return a row's columns, with copies under the names that the config maps for rewards."""
    # What remains are columns that rewards may ask for by name.
    columns = {k: v for k, v in row.items() if k not in ("completion", "prompt", data.prompt, SAMPLED)}
    copied = {**data.columns, **({} if data.answer is None else {"answer": data.answer})}
    for name, source in copied.items():
        value = value_at(row, source)
        if value is not MISSING:
            columns[name] = value
        elif name not in columns:
            raise DataError(f"{where}: there is no column {source!r}, which the config copies to {name!r}")
    return columns


def named_rewards(words: Sequence[str], trust: bool) -> Rewards:
    """Load rewards as the command line names them: built-in names, module.py:function, or a whole file.

    A config or a run's folder also brings weights, gates, `scoring` and `sandbox`; its settings may follow as
    --section.key value. Raises ConfigError, without ``trust`` also if somebody else's run names code.
    """
    return _find_rewards(words, trust).rewards


class NamedRewards(NamedTuple):
    """Rewards as the command line names them."""

    rewards: Rewards
    data: Data
    """The data section of the config with the rewards."""
    wording: ModelTexts
    """The marks that the config's model writes around prompts and thoughts."""
    stage: ResolvedConfig | None = None
    """The stage of the config with the rewards; None without a config."""


def _find_rewards(words: Sequence[str], trust: bool) -> NamedRewards:
    named, settings = _split_words(words)
    configs = [Path(w) for w in named if w.endswith((".yaml", ".yml")) or Path(w).is_dir()]
    if configs and len(named) > 1:
        raise ConfigError(
            f"{configs[0]} already names the rewards; leave out {', '.join(set(named) - {str(configs[0])})}"
        )
    if settings and not configs:
        raise ConfigError(f"{' '.join(settings)}: these settings need a config; name its file before them")
    if not configs:
        specs = [s for word in named for s in (_functions_in(word) if word.endswith(".py") else [word])]
        unknown = ModelTexts(
            note=f"{NO_MODEL}: {MEANING}. Name a config or a run's folder instead of rewards: it has both"
        )
        return NamedRewards(load_rewards(specs, Path.cwd(), learned=LEARNED), Data(), unknown)
    config = configs[0]
    if (config.parent / START_FILE).is_file():  # a run's own record, whose paths are from another folder
        config = config.parent
    if config.is_dir():
        run = last_stage(config)
        resolved = load_for_reading(run, settings)
        refuse_others_code(resolved, run, trust or is_own(run), algorithm=False)
        resolved = with_own_model(resolved, run)
    else:
        resolved = load_config(config, settings)
    stage = _rewards_stage(resolved)
    rewards = rewards_of(stage, stage.config.rewards or load_problems(stage).rewards)
    return NamedRewards(rewards, stage.config.data, model_texts_of(resolved), stage)


def _split_words(words: Sequence[str]) -> tuple[list[str], Sequence[str]]:
    """Split words into names and the settings after them."""
    first = next((i for i, w in enumerate(words) if w.startswith("--")), len(words))
    return list(words[:first]), words[first:]


def _rewards_stage(resolved: ResolvedConfig) -> ResolvedConfig:
    """Return the stage of a config that uses rewards: the first RL stage."""
    return next((s for s in resolved.stages() if s.config.method == "rl"), resolved)


def _functions_in(file: str) -> list[str]:
    """Return all functions of a file that look like rewards: public ones with a completion argument.

    The file is only parsed here; it is imported when its rewards are loaded.
    """
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from None
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    specs = [
        f"{file}:{f.name}"
        for f in functions
        if not f.name.startswith("_")
        and {"completion", "completions"} & {a.arg for a in (*f.args.args, *f.args.kwonlyargs)}
    ]
    if not specs:
        raise ConfigError(f"{file}: the file has no function of `completion` or `completions`")
    return specs


def _score_record(row: Mapping[str, object], group: Group) -> dict[str, Any]:
    scores = {name: component.scores[0] for name, component in group.components.items()}
    total = float(group.rewards[0])
    return record(row, scores) | {"reward": None if np.isnan(total) else total}


def load_for_stress(
    file: Path, words: Sequence[str], trust: bool
) -> tuple[list[Problem], Rewards, Toolbox | None, ModelTexts]:
    """Load problems, rewards, tools and wording from a config, or from a data file and named rewards.

    Rewards are named as for ``named_rewards``. A config's settings may follow.
    """
    stage: ResolvedConfig | None
    if file.suffix in (".yaml", ".yml"):
        names, settings = _split_words(words)
        whole = load_config(file, settings)
        stage = _rewards_stage(whole)
        source = load_problems(stage)
        rewards = rewards_of(stage, names or stage.config.rewards or source.rewards)
        wording = model_texts_of(whole)
    else:
        rewards, data, wording, stage = _find_rewards(words, trust)
        wording = wording if stage else NO_WORDING
        source = Source(read_problems(file, data, answered=True), [])
    problems, toolbox = _with_tools(source, stage)
    check_columns(problems, rewards)
    return problems, rewards, toolbox, wording


def _with_tools(source: Source, resolved: ResolvedConfig | None) -> tuple[list[Problem], Toolbox | None]:
    """Return problems with the schemas of a config's tools, and the tools; None without any."""
    if resolved is None or resolved.config.rollout.tools is None:
        return source.train, None
    from covey.sampling.tools.use import toolbox_of, with_schemas  # which load torch

    toolbox = toolbox_of(resolved)
    return with_schemas(source, toolbox).train, toolbox
