"""The tools of the lab: they answer questions about groups, clips and odds with the training functions."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, cast

import torch
from pydantic import BeforeValidator, Field, ValidationError, validate_call
from torch import Tensor

from covey.config.algorithm import checked_settings
from covey.objective.advantages import centered, standard_deviation
from covey.objective.algorithms import PRESETS, Algorithm
from covey.objective.axes import AXES
from covey.objective.axis_function import AxisFunction, bind, data_names, setting_defaults
from covey.objective.credit import prefix_tree, prefix_values, process_zscore
from covey.objective.data import GroupData, KLData, LossInputs
from covey.objective.diagnostics import gradient_coefficient
from covey.objective.loss import policy_loss, token_terms
from covey.objective.reductions import Totals
from covey.objective.value import gae
from covey.rng import key, uniforms
from covey.runs.estimates import chance_of_dead
from covey_verify.errors import ConfigError
from covey_verify.types import StepRewards

ToolAnswer = dict[str, object]
AXIS = cast("Mapping[str, tuple[Callable[..., Tensor], ...]]", AXES)
REWARD_DATA = {"rewards", "components", "weights", "lengths", "greedy_reward"}
"""Data of a group that are available without a model."""
GROUP_SIZES = (2, 4, 8, 16, 32, 64)


def _split_list(text: object) -> object:
    return [part for part in text.split(",") if part.strip()] if isinstance(text, str) else text


Finite = Annotated[float, Field(ge=-1e6, le=1e6)]
RewardList = Annotated[list[Finite], Field(min_length=2, max_length=64), BeforeValidator(_split_list)]
LengthList = Annotated[
    list[Annotated[int, Field(ge=1, le=4096)]], Field(max_length=64), BeforeValidator(_split_list)
]
Chance = Annotated[float, Field(ge=0, le=1)]
Size = Annotated[int, Field(ge=2, le=1024)]


def answer_tool(tool: str, query: Mapping[str, Sequence[str]]) -> ToolAnswer:
    """Answer a question of the page. Raises ConfigError for an invalid one."""
    if tool not in TOOLS:
        raise ConfigError(f"{tool}: no such tool; there are {', '.join(TOOLS)}")
    try:
        return TOOLS[tool](**{name: values[0] for name, values in query.items()})
    except ValidationError as error:
        first_error = error.errors()[0]
        raise ConfigError(f"{'.'.join(map(str, first_error['loc']))}: {first_error['msg']}") from None


# --- a group ----------------------------------------------------------------------------------------


@validate_call
def group_tool(
    *,
    rewards: RewardList,
    lengths: LengthList = [],  # noqa: B006 - validated into a list of its own
    ddof: int = 1,
    eps: Finite = 1e-4,
    greedy: Finite | None = None,
    max_tokens: Annotated[int, Field(ge=1, le=65_536)] = 512,
) -> ToolAnswer:
    """Return a group's statistics, its advantages by every estimator, and the weight of a token."""
    lengths = lengths or [100] * len(rewards)
    if len(lengths) != len(rewards):
        raise ConfigError(f"{len(rewards)} rewards, but {len(lengths)} lengths")
    data = _group_data(torch.tensor(rewards, dtype=torch.float64), lengths, greedy)
    mean = float(data.rewards.mean())
    std = [float(standard_deviation(data.rewards, d)) for d in (0, 1)]
    return {
        "mean": mean,
        "std": std[ddof],
        "std_population": std[0],
        "std_sample": std[1],
        "dead": _is_dead(data),
        "estimators": [
            _apply_estimator(function, data, {"ddof": ddof, "eps": eps})
            for function in AXIS["advantage"]
            # Estimators that need a model's log-probs, tokens or values are left out.
            if set(data_names(function)) <= REWARD_DATA - ({"greedy_reward"} if greedy is None else set())
        ],
        "reductions": _weights(lengths, max_tokens),
    }


def _group_data(rewards: Tensor, lengths: Sequence[int], greedy: float | None) -> GroupData:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return GroupData.scored(rewards, rewards[None], torch.ones(1, dtype=torch.float64), mask, greedy)


def _is_dead(data: GroupData) -> bool:
    return not bool(centered(data.rewards).any())


def _apply_estimator(
    function: Callable[..., Tensor], data: GroupData, query: Mapping[str, float]
) -> ToolAnswer:
    """Apply an estimator to a group: its advantages, its formula, and the numbers in the formula."""
    settings = _own_settings(function, query)
    part: AxisFunction[GroupData, Tensor] = bind(function, **settings)
    formula = formula_of(function)
    count = len(data.rewards)
    return {
        "name": part.name,
        "says": first_words(function),
        "formula": formula,
        "settings": settings,
        "advantages": part(data).tolist(),
        "numbers": [_numbers(formula, data, i, part.all_settings) for i in range(count)] if formula else [],
        "sums_to_zero": abs(float(part(data).sum())) < 1e-9,
    }


def _own_settings(function: Callable[..., object], settings: Mapping[str, float]) -> dict[str, object]:
    """Return those settings that a function has, checked as in a config. Raises ConfigError."""
    accepted = {name: value for name, value in settings.items() if name in setting_defaults(function)}
    return checked_settings(function.__name__, function, accepted)


def first_words(function: Callable[..., object]) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].replace("``", "").split())


def formula_of(function: Callable[..., object]) -> str:
    """Return the right-hand side of a docstring's `A_i = ...` if its symbols are numbers; else empty."""
    match = re.match(r"A_i = (.+?)(?: = |, undivided|, 0 where|: |\. )", first_words(function))
    is_another = match is None or any(symbol in match[1] for symbol in ("_k", "s_i"))
    return "" if match is None or is_another else match[1]


def _numbers(formula: str, data: GroupData, i: int, settings: Mapping[str, float]) -> dict[str, float]:
    """Return symbol -> number for completion i, longer symbols first, since they contain shorter ones."""
    r = data.rewards
    ddof = int(settings.get("ddof", 1))
    eps = settings.get("eps", 0.0)
    others = torch.cat([r[:i], r[i + 1 :]])
    spread = float(standard_deviation(others, 1))
    numbers: dict[str, float] = {
        "(std_{j != i} r_j + eps)": spread + eps if spread else 1.0,  # undivided where it is 0
        "sum_j |y_j| r_j / sum_j |y_j|": float((data.lengths * r).sum() / data.lengths.sum()),
        "mean_{j != i} r_j": float(others.mean()),
        "r(greedy completion)": data.greedy_reward or 0.0,
        "mean(r)": float(r.mean()),
        "std(r)": float(standard_deviation(r, ddof)),
        "r_i": float(r[i]),
        "eps": eps,
    }
    return {symbol: value for symbol, value in numbers.items() if symbol in formula}


def _weights(lengths: Sequence[int], max_tokens: int) -> list[ToolAnswer]:
    """Return the weight of one token of each completion in the loss under each reduction."""
    counts = torch.tensor(lengths, dtype=torch.float64)
    totals = Totals(int(counts.sum()), len(lengths), 1, max_tokens)
    rows = torch.ones(len(lengths), max(lengths), dtype=torch.float64)
    mask = torch.arange(max(lengths)) < counts[:, None]
    inputs = LossInputs(rows, mask, rows, rows, totals, counts.sum().expand(len(lengths)))
    return [
        {"name": f.__name__, "says": first_words(f), "weights": bind(f)(inputs).expand(len(lengths)).tolist()}
        for f in AXIS["reduce"]
    ]


@validate_call
def steps_tool(*, rewards: Annotated[str, Field(max_length=400)]) -> ToolAnswer:
    """Credit rewards by reasoning step (``1,1,-1;1,1,1``) to the steps in each of three ways."""
    try:
        values = [[float(v) for v in row.split(",")] for row in rewards.split(";")]
    except ValueError:
        raise ConfigError(f"rewards: {rewards!r} is not like 1,1,-1;1,1,1") from None
    if not all(map(math.isfinite, (v for row in values for v in row))):
        raise ConfigError("rewards: numbers must be finite")
    longest = max(map(len, values))
    # Every step is one token long, so step k ends at token k.
    steps = [StepRewards(row, range(len(row))) for row in values]
    mask = torch.arange(longest) < torch.tensor([len(row) for row in values])[:, None]
    components = torch.zeros(1, len(values), dtype=torch.float64)
    weight = torch.ones(1, dtype=torch.float64)
    flat = torch.tensor([v for row in values for v in row], dtype=torch.float64)
    credited = {
        credit: process_zscore(components, weight, mask, [steps], credit=credit, ddof=0, eps=0.0).tolist()
        for credit in ("own_step", "sum_to_go", "min_form")
    }
    return {"mean": float(flat.mean()), "std": float(standard_deviation(flat, 0)), "credits": credited}


@validate_call
def prefixes_tool(*, rewards: RewardList, texts: Annotated[str, Field(max_length=2000)]) -> ToolAnswer:
    """Return the value of each prefix and credit by it, by a critic and by outcome.

    ``texts`` are completions as words, separated by |; a word is a token.
    """
    words = [text.split() for text in texts.split("|")]
    if len(words) != len(rewards) or not all(words):
        raise ConfigError(f"texts: give {len(rewards)} non-empty completions, separated by |")
    number = {word: i for i, word in enumerate(dict.fromkeys(w for row in words for w in row))}
    longest = max(map(len, words))
    ids = torch.tensor([[number[w] for w in row] + [-1] * (longest - len(row)) for row in words])
    values = torch.tensor(rewards, dtype=torch.float64)
    prefixes = prefix_values(values, ids)
    mask = ids >= 0
    last = torch.tensor([len(row) - 1 for row in words])
    # (N, T): the whole reward is paid at the last token of each completion.
    paid = torch.zeros_like(prefixes[:, 1:]).scatter(1, last[:, None], values[:, None])
    return {
        "words": words,
        "values": prefixes.tolist(),
        "critic": gae(paid, prefixes[:, :-1], mask).tolist(),
        "credit": prefix_tree(values, ids, mask).tolist(),
        "outcome": centered(values).tolist(),
    }


# --- the loss of a token ----------------------------------------------------------------------------


@validate_call
def gate_tool(
    *,
    ratio: Annotated[float, Field(gt=0, le=20)] = 1.0,
    advantage: Finite = 1.0,
    clip_low: Finite = 0.2,
    clip_high: Finite = 0.2,
    old: Annotated[float, Field(gt=0, lt=1)] = 0.1,
) -> ToolAnswer:
    """Return for every clip rule a token's objective and its gradient coefficient, over many ratios."""
    # Ratios .1 to 2.5 for the curves; the last entry is the ratio that was asked for.
    grid = [*(i / 40 for i in range(4, 101)), ratio]
    log_ratio = torch.tensor(grid, dtype=torch.float64).log()[:, None]
    old_logprobs = torch.full_like(log_ratio, old).log()
    inputs = LossInputs(
        old_logprobs + log_ratio,
        torch.ones_like(log_ratio).bool(),
        torch.full_like(log_ratio, advantage),
        old_logprobs,
        Totals(len(grid), len(grid), 1, 1),
        torch.ones(len(grid)),
        selected=torch.ones_like(log_ratio).bool(),
    )
    rules = []
    for rule in AXIS["surrogate"]:
        surrogate = bind(rule, **_own_settings(rule, {"clip_low": clip_low, "clip_high": clip_high}))
        if "group" not in surrogate.needs:  # such a rule has no gradient of a token alone
            rules.append({"name": surrogate.name, "says": first_words(rule), **_gate(surrogate, inputs)})
    return {"ratios": grid[:-1], "rules": rules}


def _gate(surrogate: AxisFunction[LossInputs, Tensor], inputs: LossInputs) -> ToolAnswer:
    """Return what a token adds to the objective, and its gradient coefficient, by ratio."""
    algorithm = Algorithm(bind(AXIS["advantage"][1]), surrogate=surrogate)
    gains = -token_terms(algorithm, inputs).value[:, 0]
    pushes = gradient_coefficient(algorithm, inputs)[:, 0]
    return {
        "gains": gains[:-1].tolist(),
        "pushes": pushes[:-1].tolist(),
        "gain": float(gains[-1]),
        "push": float(pushes[-1]),
    }


@validate_call
def kl_tool(
    *, p: Annotated[float, Field(gt=0, lt=1)] = 0.5, q: Annotated[float, Field(gt=0, lt=1)] = 0.3
) -> ToolAnswer:
    """Return the KL estimators for two tokens; the first has p under the policy, q under the reference."""
    policy, reference = (torch.tensor([x, 1 - x], dtype=torch.float64) for x in (p, q))
    distance = policy.log() - reference.log()
    grid = torch.linspace(-2, 2, 81, dtype=torch.float64)
    rows = []
    for function in AXIS["kl.estimator"]:
        if data_names(function) == ("ref_log_ratio",):
            estimator: AxisFunction[KLData, Tensor] = bind(function)
            by_token = estimator(KLData(distance))
            expected = float((policy * by_token).sum())
            values = {"by_token": by_token.tolist(), "curve": estimator(KLData(grid)).tolist()}
            rows.append(
                {"name": estimator.name, "says": first_words(function), "expected": expected, **values}
            )
    exact = float((policy * distance).sum())
    return {"exact": exact, "log_ratios": distance.tolist(), "grid": grid.tolist(), "estimators": rows}


# --- many groups ------------------------------------------------------------------------------------


@validate_call
def odds_tool(
    *, p: Chance = 0.2, size: Size = 8, prompts: Annotated[int, Field(ge=1, le=100_000)] = 64
) -> ToolAnswer:
    """Return how often a group ties if each completion is correct with probability p."""
    dead = chance_of_dead(p, size)
    rates = [i / 50 for i in range(51)]
    return {
        "dead": dead,
        "all_correct": p**size,
        "live": prompts * (1 - dead),
        "cost": math.inf if dead == 1 else 1 / (1 - dead),
        "rates": rates,
        "curve": [chance_of_dead(x, size) for x in rates],
        "by_size": [{"size": s, "dead": chance_of_dead(p, s)} for s in GROUP_SIZES],
    }


@validate_call
def toy_tool(
    *,
    estimator: Annotated[str, Field(max_length=40)] = "group_zscore",
    size: Annotated[int, Field(ge=2, le=64)] = 8,
    answers: Annotated[int, Field(ge=2, le=12)] = 5,
    start: Annotated[float, Field(gt=0, lt=1)] = 0.1,
    lr: Annotated[float, Field(gt=0, le=10)] = 0.5,
    updates: Annotated[int, Field(ge=1, le=200)] = 50,
    seed: Annotated[int, Field(ge=0, le=1000)] = 0,
) -> ToolAnswer:
    """Train a softmax policy over a few answers, of which the first is correct, on one group per step."""
    algorithm = _toy_algorithm(estimator)
    others = [(1 - start) / (answers - 1)] * (answers - 1)
    logits = torch.tensor([start, *others], dtype=torch.float64).log()
    course = [logits.softmax(0).tolist()]
    dead = []
    drawn = []
    for update in range(updates):
        draws = torch.from_numpy(uniforms(key(seed, "toy", update), size)).double()
        samples = _toy_samples(logits, draws)
        data = _group_data((samples == 0).double(), [1] * size, None)
        logits = logits - lr * _toy_gradient(algorithm, logits, samples, data)
        course.append(logits.softmax(0).tolist())
        dead.append(_is_dead(data))
        drawn.append(samples.tolist())
    entropy = [-sum(x * math.log(x) for x in row if x > 0) for row in course]
    return {"course": course, "entropy": entropy, "dead": dead, "drawn": drawn}


def _toy_algorithm(estimator: str) -> Algorithm:
    """Return an algorithm with an estimator that needs no model. Raises ConfigError for any other."""
    estimators = {f.__name__: f for f in AXIS["advantage"] if set(data_names(f)) <= {"rewards", "lengths"}}
    if estimator not in estimators:
        raise ConfigError(f"estimator: {estimator}: must be one of {', '.join(estimators)}")
    return Algorithm(bind(estimators[estimator]), reduce=PRESETS["grpo"].reduce)


def _toy_samples(logits: Tensor, draws: Tensor) -> Tensor:
    """Sample answers by the inverse of the cumulative distribution. (N,) in [0, 1) -> (N,) int64."""
    # The clamp guards against a cumulative sum that rounds below 1.
    return torch.searchsorted(logits.softmax(0).cumsum(0), draws).clamp(max=len(logits) - 1)


def _toy_gradient(algorithm: Algorithm, logits: Tensor, samples: Tensor, data: GroupData) -> Tensor:
    """Return the gradient of the loss of a group by the logits; an answer is one token."""
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(0)[samples][:, None]
    advantages = algorithm.advantage(data)[:, None]
    size = len(samples)
    totals = Totals(size, size, 1, 1)
    inputs = LossInputs(
        logprobs, data.mask, advantages, logprobs.detach(), totals, torch.full((size,), float(size))
    )
    (gradient,) = torch.autograd.grad(policy_loss(algorithm, inputs).total, logits)
    return gradient


TOOLS: dict[str, Callable[..., ToolAnswer]] = {
    "group": group_tool,
    "steps": steps_tool,
    "prefixes": prefixes_tool,
    "gate": gate_tool,
    "kl": kl_tool,
    "odds": odds_tool,
    "toy": toy_tool,
}
