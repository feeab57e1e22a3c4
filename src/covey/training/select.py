"""The stage `filter`: selects rows of a corpus that resemble a few labelled lines. It needs no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from covey.config.load import ResolvedConfig, resolved_yaml
from covey.config.schema import Data
from covey.runs.atomic import make_folder, write_file
from covey.runs.examples import ExampleRow, as_jsonl
from covey.runs.trust import write_own
from covey.system.console import RunConsole
from covey.tasks.classifier import TextClassifier
from covey.tasks.examples import label_of
from covey.tasks.files import rows
from covey.tasks.source import EXAMPLES_FILE, data_files
from covey.types import Problem
from covey_verify.errors import DataError

FOLDS = 5
"""Folds of the labelled lines; each is judged by a classifier that has not seen it."""


def select(resolved: ResolvedConfig, console: RunConsole) -> Problem:
    """Write the rows of `data.train` that a classifier trained on `data.examples` selects.

    Returns the first of them as an example. Raises DataError if the labelled lines teach nothing or no row
    is selected.
    """
    config = resolved.config
    corpus, labelled = _corpus_and_labelled(resolved)
    texts, labels = _labelled_texts(labelled, config.data)
    agreements = list(_cross_validate(texts, labels))
    count = sum(agreements)
    chance = "" if 2 * count > len(agreements) else ", which is chance; label more lines"
    console.say(
        f"cross-validation on the labelled lines: {count} of {len(agreements)} classified correctly{chance}"
    )
    classifier = TextClassifier(texts, labels)
    scores = [classifier.probability(text_of_row(row, config.data, "data.train")) for row in corpus]
    scored = zip(corpus, scores, strict=True)
    least = config.keep.score
    selected: list[ExampleRow] = [{**row, "score": round(p, 6)} for row, p in scored if p > least]
    if not selected:
        raise DataError(
            f"{config.data.train}: no row has a probability above {least:g} (keep.score); the highest is "
            f"{max(scores):.2f}. Label more lines, or lower keep.score"
        )
    make_folder(config.output)
    write_own(config.output, "config.yaml", resolved_yaml(resolved))
    write_file(config.output / EXAMPLES_FILE, as_jsonl(selected))
    console.say(f"selected {len(selected)} of {len(corpus)} rows: {config.output / EXAMPLES_FILE}")
    return Problem("filter", text_of_row(selected[0], config.data, ""))


def _corpus_and_labelled(resolved: ResolvedConfig) -> tuple[list[ExampleRow], list[ExampleRow]]:
    """Return the rows to select from and the labelled ones. Raises DataError if there are none of either."""
    data = resolved.config.data
    if not isinstance(data.train, Path) or not data.examples:
        raise DataError(
            "filter: set data.train to the corpus to select from, and data.examples to a file of a few "
            "labelled lines, each with a text and a label"
        )
    # The first file is the corpus, the others are labelled; the test file takes no part.
    corpus, *labelled = [[row for _, row in rows(file)] for file in data_files(resolved) if file != data.test]
    if not corpus:
        raise DataError(f"{data.train}: the file has no rows; write one JSON object per line")
    return corpus, [row for part in labelled for row in part]


def _labelled_texts(rows: Sequence[ExampleRow], data: Data) -> tuple[list[str], list[float]]:
    """Return the texts of the labelled lines and their labels. Raises DataError if they teach nothing."""
    texts = [text_of_row(row, data, "data.examples") for row in rows]
    labels = [_label(row) for row in rows]
    if len(set(labels)) < 2:
        raise DataError(
            f"data.examples: all {len(labels)} labelled lines have the same label; give some to keep (label "
            "true) and some to leave out"
        )
    kept_texts = {text for text, label in zip(texts, labels, strict=True) if label}
    both = kept_texts & {text for text, label in zip(texts, labels, strict=True) if not label}
    if both:
        raise DataError(
            f"data.examples: {min(both)[:60]!r} is labelled both true and false; keep one of them"
        )
    return texts, labels


def text_of_row(row: ExampleRow, data: Data, where: str) -> str:
    """Return the text of a row, or its prompt and answer."""
    parts = [row[name] for name in ("text", data.prompt, data.completion) if isinstance(row.get(name), str)]
    if not parts:
        raise DataError(
            f"{where}: the row has no text (its columns are {', '.join(map(repr, row))}); name the column "
            "`text`"
        )
    return " ".join(map(str, parts))


def _label(row: ExampleRow) -> float:
    value = label_of(row.get("label"))
    if value is None:
        raise DataError(
            f"data.examples: a label must be true or false, not {str(row.get('label')).lower()[:40]!r}"
        )
    return value


def _cross_validate(texts: Sequence[str], labels: Sequence[float]) -> Iterator[bool]:
    """Yield for each labelled line whether a classifier trained on the other folds agrees with its label."""
    folds = min(FOLDS, len(texts))
    for fold in range(folds):
        training_rows = [n for n in range(len(texts)) if n % folds != fold]
        # A classifier needs rows of both labels, so a fold without them is skipped.
        if len({labels[n] for n in training_rows}) < 2:
            continue
        classifier = TextClassifier([texts[n] for n in training_rows], [labels[n] for n in training_rows])
        for n in range(fold, len(texts), folds):
            yield (classifier.probability(texts[n]) > 0.5) == (labels[n] > 0.5)
