"""Adapters that make reward functions callable by TRL, verl and verifiers.

    trainer = GRPOTrainer(reward_funcs=[for_trl("math_answer", rule="boxed")], ...)        # TRL
    compute_score = for_verl("math_answer", rule="boxed")                                  # verl
    rubric = vf.Rubric(funcs=[for_rubric("math_answer", rule="boxed")], weights=[1.0])     # verifiers

Each takes a built-in name or a function, and its settings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter
from typing import Any

from covey_verify.contract import RewardFunction
from covey_verify.errors import DataError
from covey_verify.extract import TextOrMessages
from covey_verify.loading import load
from covey_verify.machine import available_cpus
from covey_verify.scoring import check, scores_of
from covey_verify.types import Row, Score

Named = str | Callable[..., object]
# Arguments that TRL provides as `completion_ids`.
IDS = ("completion_ids", "sampled_ids")


def for_trl(named: Named, **settings: object) -> Callable[..., list[float | None]]:
    r"""Return a reward function for TRL's GRPOTrainer; a completion that cannot be judged gets None.

    Columns of the data set are passed by name. A function that judges groups gets the completions of one
    prompt, which are adjacent in TRL's batch.

    >>> reward = for_trl("math_answer")
    >>> reward(prompts=["2+2="] * 2, completions=[r"\boxed{4}", r"\boxed{5}"], answer=["4", "4"])
    [1.0, 0.0]
    """
    function = load(named, settings)

    def score_completions(
        prompts: Sequence[object],
        completions: Sequence[TextOrMessages],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: object,
    ) -> list[float | None]:
        rows = _rows(prompts, columns)
        _fits(function, rows[0].columns, IDS if completion_ids is not None else ())
        # Indices of the completions of each call: one, or a group, which is a run of equal prompts.
        calls = [[i] for i in range(len(prompts))]
        if not function.per_sample:
            calls = [[i for i, _ in run] for _, run in groupby(enumerate(prompts), key=itemgetter(1))]

        def scores_of_call(indices: Sequence[int]) -> list[Score]:
            ids = None if completion_ids is None else [completion_ids[i] for i in indices]
            return scores_of(function, rows[indices[0]], [completions[i] for i in indices], ids)

        with ThreadPoolExecutor(_at_once(function)) as pool:
            return [score.value for scores in pool.map(scores_of_call, calls) for score in scores]

    score_completions.__name__ = function.name  # TRL logs it by this name
    return score_completions


def _rows(prompts: Sequence[Any], columns: Mapping[str, Any]) -> list[Row]:
    """Return the row of each completion. TRL passes more than columns, such as the trainer's state."""
    lists = {n: v for n, v in columns.items() if isinstance(v, list) and len(v) == len(prompts)}
    rows = list[Row]()
    for i, prompt in enumerate(prompts):
        values = {name: column[i] for name, column in lists.items()}
        rows.append(Row(f"completion {i}", prompt, values))
    return rows


def for_verl(named: Named, unjudged: float = 0.0, **settings: object) -> Callable[..., dict[str, float]]:
    r"""Return a `compute_score` for verl's `custom_reward_function`.

    The ground truth is the column `answer`; columns of ``extra_info`` are passed by name. verl cannot leave
    out a completion that cannot be judged: it gets ``unjudged``, and its metric `judged` is 0.

    >>> for_verl("math_answer")("gsm8k", r"\boxed{4}", "4")
    {'score': 1.0, 'judged': 1.0}
    """
    function = load(named, settings)

    def compute_score(
        data_source: str,
        solution_str: str,
        ground_truth: object,
        extra_info: Mapping[str, object] | None = None,
        **_: object,
    ) -> dict[str, float]:
        columns = {**(extra_info or {}), "answer": ground_truth}
        columns |= {"data_source": data_source, "ground_truth": ground_truth, "extra_info": extra_info or {}}
        _fits(function, columns)
        (score,) = _in_thread(lambda: scores_of(function, Row(data_source, "", columns), [solution_str]))
        value = unjudged if score.value is None else score.value
        return {"score": value, "judged": float(score.value is not None)}

    return compute_score


def for_rubric(named: Named, **settings: object) -> Callable[..., float]:
    r"""Return a function for a Rubric of verifiers; a completion that cannot be judged counts as 0.

    The columns are `answer` and the keys of ``info``.

    >>> for_rubric("math_answer")(completion=[{"role": "assistant", "content": r"\boxed{4}"}], answer="4")
    1.0
    """
    function = load(named, settings)

    def score_completion(
        completion: TextOrMessages,
        prompt: Any = "",
        answer: str = "",
        info: Mapping[str, object] | None = None,
        **_: object,
    ) -> float:
        columns = {"answer": answer, **(info or {})}
        _fits(function, columns)
        (score,) = _in_thread(lambda: scores_of(function, Row("rubric", prompt, columns), [completion]))
        return score.value or 0.0

    score_completion.__name__ = function.name
    return score_completion


def _fits(function: RewardFunction, columns: Mapping[str, object], available: Sequence[str] = ()) -> None:
    """Raise DataError if a function asks for something that is not available."""
    if complaint := check(function, list(columns), available):
        raise DataError(
            f"reward {function.name} {complaint}; the columns are {', '.join(map(repr, columns)) or 'none'}"
        )


def _at_once(function: RewardFunction) -> int:
    """Return how many calls may run at the same time: most of them wait, for a subprocess or a server."""
    if function.is_async:
        return 16
    return max(2, available_cpus()) if function.options.concurrent else 1


def _in_thread(call: Callable[[], list[Score]]) -> list[Score]:
    """Make a call in another thread if this one runs an event loop, where asyncio.run is not allowed."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()
