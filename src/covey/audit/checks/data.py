"""Checks of data: which rows a run learns from, their answers and their prompts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from covey.audit.checks.check import Fault
from covey.audit.checks.groups import groups_of
from covey.audit.checks.prompts import common_start
from covey.audit.checks.rescored import best_of, sum_of
from covey.audit.probes import ANSWERS
from covey.audit.record import AuditRecord, Sample

MIN_ROWS = 8
"""Fewest rows of which "most" is said."""
NEXT = 4
"""Characters next to an answer that show whether it is always at the same place in its prompt."""
MIN_GROUPS = 4
"""Fewest groups in which repeated prompts are counted."""
MIN_ROLLOUTS = 3
"""Fewest rollouts whose prompts are compared."""


def rows_lack_their_answer(record: AuditRecord) -> Fault | None:
    """Some rows have an answer and others have an empty one. The answer is a column with such a name, or a
    column whose empty values, and no others, earn even an empty text the highest reward.
    """
    best = best_of(record)
    for column in dict.fromkeys(name for _, _, s in record.samples for name in s.row):
        with_column = [(step, n, s) for step, n, s in record.samples if column in s.row]
        blank = [(step, n, s) for step, n, s in with_column if _is_blank(s.row[column])]
        if not blank or len(blank) == len(with_column):
            continue
        free = [s for _, _, s in with_column if s.empty and sum_of(record, s.empty) >= best]
        probed = [s for _, _, s in blank if s.empty]
        decides = bool(probed) and len(free) == len(probed) and all(_is_blank(s.row[column]) for s in free)
        if column in ANSWERS or decides:
            step, n, _ = blank[0]
            sentence = f"{column} is empty in the rows of {len(blank)} of {len(with_column)} completions"
            return Fault(sentence, step, {"completion": n})
    return None


def _is_blank(value: object) -> bool:
    return value is None or not str(value).strip()


def siblings_have_different_answers(record: AuditRecord) -> Fault | None:
    """Completions of one prompt in one group have rows with different answers. Or more than a tenth of the
    completions, and at least four, come with an answer that no row of the data has for their prompt. Or more
    than half of the completions have a prompt that at least four rows with different answers share, and no
    tool answers.
    """
    shared = _prompt_of_several_rows(record)
    if shared is not None:
        return shared
    foreign = [(step, n) for step, n, sample in record.samples if sample.foreign]
    if len(foreign) >= MIN_GROUPS and len(foreign) > 0.1 * len(record.samples):
        step, n = foreign[0]
        sentence = f"{len(foreign)} of {len(record.samples)} completions come with an answer that no row has"
        return Fault(f"{sentence} for their prompt", step, {"completion": n})
    for rollout in record.rollouts:
        answers: dict[tuple[int, str], dict[str, object]] = {}
        groups = groups_of(rollout.completions)
        for n, (sample, group) in enumerate(zip(rollout.completions, groups, strict=True)):
            columns = {name: sample.row[name] for name in ANSWERS if name in sample.row}
            first = answers.setdefault((group, sample.prompt_text), columns)
            differing = next((name for name in columns if first.get(name) != columns[name]), None)
            if differing is not None:
                sentence = f"completions of one prompt are judged by different values of {differing}"
                examples = f"{first.get(differing)!s:.30} and {columns[differing]!s:.30}"
                return Fault(f"{sentence}: {examples}", rollout.step, {"group": group, "completion": n})
    return None


def _prompt_of_several_rows(record: AuditRecord) -> Fault | None:
    if any(any(sample.inserted or ()) for _, _, sample in record.samples):
        return None  # an environment or a tool may tell what differs
    answers: dict[str, set[str]] = {}
    prompts = [
        (s.prompt_text, str(s.row[name])) for _, _, s in record.samples for name in ANSWERS if name in s.row
    ]
    for prompt, answer in prompts:
        answers.setdefault(prompt, set()).add(answer)
    shared = {prompt: len(of_prompt) for prompt, of_prompt in answers.items() if len(of_prompt) >= MIN_GROUPS}
    if 2 * sum(prompt in shared for prompt, _ in prompts) <= len(prompts) or not prompts:
        return None
    prompt, count = max(shared.items(), key=lambda item: item[1])
    return Fault(f"rows with {count} different answers have one and the same prompt: {prompt!s:.60}")


def rows_are_duplicated(record: AuditRecord) -> Fault | None:
    """More than a tenth of the rows have the prompt of another row."""
    rows, distinct = record.header.data.rows, record.header.data.distinct
    if rows and distinct and rows - distinct > 0.1 * rows:
        return Fault(f"{rows - distinct} of {rows} rows have the prompt of another row")
    return None


def evaluated_on_training_rows(record: AuditRecord) -> Fault | None:
    """More than a tenth of the evaluation's prompts are training prompts."""
    shared, rows = record.header.data.eval_in_train, record.header.data.eval_rows
    if not shared or not rows or shared <= 0.1 * rows:
        return None
    return Fault(f"{shared} of {rows} prompts of the evaluation are trained on")


def answer_is_in_the_prompt(record: AuditRecord) -> Fault | None:
    """A column that is named like an answer is in more than nine of ten prompts, next to the same characters
    in as many, and another row's answer is in fewer than half as many. (A prompt that offers a choice may
    contain the answer anywhere.) Or more than nine of ten prompts contain their own last words, with which
    no other prompt ends, once before, followed by the answer.
    """
    rows = list({str(s.prompt): s for _, _, s in record.samples if s.prompt is not None and s.row}.values())
    for column in ANSWERS if len(rows) >= MIN_ROWS else ():
        answers = [str(s.row.get(column, "")).strip() for s in rows]
        told = _told(rows, answers)
        chance = _told(rows, [_next_other(answers, n) for n in range(len(rows))])
        if _told(rows, answers, chooses=False) > 0.9 * len(rows) and chance < 0.5 * told:
            return Fault(f"the {column} is in {told} of {len(rows)} prompts")
        solved = _solved(rows, answers)
        others = _solved(rows, [_next_other(answers, n) for n in range(len(rows))])
        if solved > 0.9 * len(rows) and others < 0.5 * solved:
            return Fault(
                f"{solved} of {len(rows)} prompts have their own question and {column} as an example"
            )
    return None


def _solved(rows: Sequence[Sample], answers: Sequence[str]) -> int:
    """Return how many prompts contain their own ending, which no other prompt has, followed by the answer."""
    texts = [text_of_prompt(row) for row in rows]
    backwards = [text[::-1] for text in texts]
    count = 0
    for n, (text, answer) in enumerate(zip(texts, answers, strict=True)):
        others = [*backwards[:n], *backwards[n + 1 :]]
        question = text[-max(len(common_start([backwards[n], other])) for other in others) - 1 :]
        example = rf"{re.escape(question)}\W*{re.escape(answer)}(?!\w)"
        count += bool(answer) and re.search(example, text) is not None
    return count


def text_of_prompt(row: Sample) -> str:
    """Return a prompt as one text; for messages, their contents."""
    if isinstance(row.prompt, list):
        return "\n".join(str(message.get("content")) for message in row.prompt)
    return str(row.prompt)


def _next_other(answers: Sequence[str], n: int) -> str:
    """Return the answer of the next row that has a different one, to estimate chance; '' if there is none."""
    following = [*answers[n:], *answers[:n]]
    return next((answer for answer in following if answer and answer != answers[n]), "")


def _told(rows: Sequence[Sample], answers: Sequence[str], chooses: bool = True) -> int:
    """Return how many prompts contain the answer as a word of its own.

    ``chooses``: anywhere; otherwise only next to the characters that surround it in most prompts.
    """
    pairs = [(str(sample.prompt), answer) for sample, answer in zip(rows, answers, strict=True) if answer]
    places = [(text, list(re.finditer(rf"(?<!\w){re.escape(answer)}(?!\w)", text))) for text, answer in pairs]
    if chooses:
        return sum(bool(matches) for _, matches in places)
    left = Counter(side for text, matches in places for side in {text[: m.start()][-NEXT:] for m in matches})
    right = Counter(side for text, matches in places for side in {text[m.end() :][:NEXT] for m in matches})
    return max([*left.values(), *right.values()], default=0)


def one_prompt_is_sampled_twice(record: AuditRecord) -> Fault | None:
    """More than a tenth of a rollout's groups repeat the prompt and the row of another group."""
    for rollout in record.rollouts:
        prompts = dict[int, str]()
        for sample, group in zip(rollout.completions, groups_of(rollout.completions), strict=True):
            prompts.setdefault(group, f"{sample.prompt} {sample.prompt_ids}")
        repeated = len(prompts) - len(set(prompts.values()))
        rows = record.header.data.rows or 0
        if len(prompts) >= MIN_GROUPS and repeated > 0.1 * len(prompts) and rows > len(prompts):
            sentence = f"{repeated} of {len(prompts)} groups of a rollout have the prompt of another one"
            return Fault(sentence, rollout.step)
    return None


def few_prompts_are_sampled(record: AuditRecord) -> Fault | None:
    """Over at least three rollouts, a run has sampled at most half as many different prompts as random draws
    from its rows would give.
    """
    rows = record.header.data.distinct or 0
    of_rollouts = [{s.prompt_text for s in rollout.completions} for rollout in record.rollouts]
    draws = sum(map(len, of_rollouts))
    if len(of_rollouts) < MIN_ROLLOUTS or rows <= max(map(len, of_rollouts)):
        return None
    expected = rows * (1 - (1 - 1 / rows) ** draws)
    different = len(set.union(*of_rollouts))
    if different > 0.5 * expected:
        return None
    sentence = f"{len(of_rollouts)} rollouts have sampled only {different} of {rows} prompts"
    return Fault(f"{sentence}, where about {expected:.0f} are expected", record.rollouts[1].step)


CHECKS = {
    "answers_differ": siblings_have_different_answers,
    "answer_empty": rows_lack_their_answer,
    "rows_duplicated": rows_are_duplicated,
    "prompt_twice": one_prompt_is_sampled_twice,
    "prompts_again": few_prompts_are_sampled,
    "eval_is_train": evaluated_on_training_rows,
    "answer_told": answer_is_in_the_prompt,
}
