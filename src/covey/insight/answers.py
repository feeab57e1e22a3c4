"""The form of the answers that the rewards of a run will meet, in samples of its own model.

A verdict that pays none of them may still pay the same answers in another form (``answer_forms``), which
tells a verdict that cannot read from a model that cannot solve.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from covey.rewards.reading import ReplyReader
from covey.system.text import percent
from covey.types import Completion, Group
from covey_verify.calls.turn import read_turn
from covey_verify.extract import EXTRACTORS, FENCE, FORMS, Thoughts, code_block

SOME = 0.1
"""Fraction of the completions that must share a habit before there is advice on it."""
MANY = 0.5
"""Fraction of the completions above which most have a habit."""
MIN_COMPLETIONS = 2
"""Least number of completions whose answer another form makes readable before there is advice on it."""
QUOTED_BEGINNING = 110
"""Characters quoted from the beginning of a completion."""
QUOTED_END = 70
"""Characters quoted from the end of a completion."""
LABEL = re.compile(r"^([A-Z]\w*(?: \w+)?:)", re.MULTILINE)
"""The beginning of a line that names what follows, for example `Question:`."""
LOCATIONS: Mapping[str, str] = {
    "thoughts": "behind thoughts",
    "code_block": "inside a code fence",
    "object": "as a JSON object with text around it",
    "boxed": "in \\boxed{}",
    "answer_tag": "in <answer> tags",
    "hash4": "after ####",
    "last_number": "as the last number of a text",
    "choice": "as the last option of a text",
    "first_line": "in the first line",
    "last_line": "in the last line",
    "whole": "as the whole text",
}
"""The location of an answer in a completion -> the same in words."""
RULES = ("boxed", "answer_tag", "hash4", "last_number", "choice")
WITH_RULE = ("whole", *RULES)
"""Locations from which a rule of the same name reads."""


@dataclass(frozen=True)
class Advice:
    """A recommended change before the run."""

    finding: str
    remedy: str
    sample: str = ""
    """A completion that shows it, shortened to a line."""

    def __str__(self) -> str:
        return f"{self.finding}. Try: {self.remedy}"


class PromptForm(NamedTuple):
    """The form in which the model gets its prompts."""

    chat: bool
    """Whether they go through a chat template."""
    template: bool
    """Whether the model has one."""
    marks: Thoughts
    """The marks of thoughts, and whether prompts have opened them."""
    unopened: str = ""
    """The template's argument, as JSON, with which prompts open no thoughts; empty if it has none."""
    specials: Sequence[str] = ()
    """Special tokens that do not end a completion."""
    from_file: bool = True
    """Whether the prompts come from a file, so that the settings of `data` can change them."""
    reader: ReplyReader = ReplyReader()
    """The reader of the model's completions."""


class AnswerVariant(NamedTuple):
    """A text made of a completion, with the same answer in another form."""

    location: str
    """The location of the answer in the completion: a key of ``LOCATIONS``."""
    form: str
    """The rule in whose form the text gives the answer; empty if the text is the answer alone."""
    text: str


class Readings(NamedTuple):
    """The completions that the verdict rejects and whose answer it pays in another form."""

    tried: int
    """Number of completions that were tried."""
    accepted: Sequence[tuple[str, AnswerVariant]]
    """Each such completion, and the variant of it that the verdict pays."""
    by_chance: int
    """Number of completions that have a variant which the verdict pays even for another problem."""
    verdict: str
    has_rule: bool
    """Whether the verdict is a built-in reward with the setting `rule`."""


def answer_forms(text: str, marks: Thoughts) -> Iterator[AnswerVariant]:
    r"""Yield the answer of a completion in other forms: alone, then as rewards ask for it.

    >>> variants = list(answer_forms("That makes 51.", Thoughts()))
    >>> variants[0]
    AnswerVariant(location='last_number', form='', text='51')
    >>> [variant.text for variant in variants if variant.form == "answer_tag"]
    ['<answer>That makes 51.</answer>', '<answer>51</answer>']
    """
    answer = read_turn(text, marks).answer
    if answer is None:
        return
    parts = dict(_parts(text, answer.strip()))
    for location, part in parts.items():
        if location != "whole":  # the completion itself, which was rejected
            yield AnswerVariant(location, "", part)
    for location in WITH_RULE:
        if location not in parts:
            continue
        for form in RULES:
            if form != location:
                yield AnswerVariant(location, form, FORMS[form].format(parts[location]))


def _parts(text: str, answer: str) -> Iterator[tuple[str, str]]:
    """Yield (location, text) for each part of a completion that may be its answer, the most certain first."""
    if answer != text.strip():
        yield "thoughts", answer
    fence = FENCE.search(answer)
    if fence:
        yield "code_block", (code_block(answer, fence[2].casefold()) or "").strip()
    for rule in RULES:
        extracted = (EXTRACTORS[rule](answer) or "").strip()
        if rule == "last_number":
            # A user's function may read bare numbers only: no currency, no separators of thousands.
            extracted = re.sub("[$€£,]", "", extracted)
        if extracted and extracted != answer:
            yield rule, extracted
    first = answer.find("{")
    last = answer.rfind("}")
    if 0 <= first < last and (first, last) != (0, len(answer) - 1):
        yield "object", answer[first : last + 1]
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    if len(lines) > 1:
        yield "first_line", lines[0]
        yield "last_line", lines[-1]
    if answer:
        yield "whole", answer


def habits(
    groups: Sequence[Group], readings: Readings | None, wording: PromptForm | None, awaited: bool
) -> list[Advice]:
    """Return advice on the form of the answers; the advice that explains most rewards comes first.

    ``awaited``: completions were allowed all their tokens, so where they end means something.
    """
    if wording is None:
        return []
    completions = [c for g in groups for c in g.completions]
    rate = float(np.mean([g.pass_rate for g in groups]))
    candidates = (
        _form(readings),
        _thoughts(groups, wording) if awaited else None,
        _special(completions, wording),
        _next_turn(groups, wording),
        _plain(completions, wording, rate) if awaited else None,
    )
    return [advice for advice in candidates if advice]


def _form(readings: Readings | None) -> Advice | None:
    """Advise if the verdict pays the answers of many rejected completions in another form."""
    if readings is None:
        return None
    count = len(readings.accepted)
    if count - readings.by_chance < max(MIN_COMPLETIONS, SOME / 2 * readings.tried):
        return None
    # The most frequent location and form, and the first completion that was accepted with them.
    kinds = Counter((variant.location, variant.form) for _, variant in readings.accepted)
    location, form = kinds.most_common(1)[0][0]
    completion, accepted = next(
        (text, variant)
        for text, variant in readings.accepted
        if (variant.location, variant.form) == (location, form)
    )
    finding = (
        f"{count} of {readings.tried} completions that {readings.verdict} rejects have the correct answer in "
        f"another form, mostly {LOCATIONS[location]}: it accepts {_line(accepted.text, 60)!r}"
    )
    asked_form = f"the form {FORMS[form].format('...')!r}" if form else "the answer alone"
    prompt = f"a data.system or data.template that asks for {asked_form}"
    if location in WITH_RULE and readings.has_rule:
        reward = f"rewards: [{{{readings.verdict}: {{rule: {location}}}}}]"
    elif location in WITH_RULE:
        reader = f"covey_verify.extract.extract(completion, {location!r})"
        reward = f"a reward that reads it there, with {reader}"
    elif location == "code_block":
        reward = "a reward that reads it there, with covey_verify.extract.code_block"
    else:
        reward = "a reward that reads it there"
    return Advice(finding, f"{reward}, or {prompt}", quote_completion(completion))


def _thoughts(groups: Sequence[Group], wording: PromptForm) -> Advice | None:
    """Advise if many completions end within their thoughts."""
    marks = wording.marks
    completions = [(g.problem, c) for g in groups for c in g.completions]
    unclosed = [c for problem, c in completions if wording.reader.read(problem, c).answer is None]
    if len(unclosed) <= SOME * len(completions):
        return None
    opener = "the chat template opens thoughts in the prompt" if marks.begun else "the model opens thoughts"
    finding = (
        f"{opener} ({marks.open}), and {len(unclosed)} of {len(completions)} completions end before "
        f"{marks.close}"
    )
    truncated = sum(c.finish == "length" for c in unclosed)
    remedy = (
        "a larger rollout.max_tokens" if truncated > MANY * len(unclosed) else "a cold start that closes them"
    )
    alternative = f", or data.chat_template_kwargs: {wording.unopened}" if wording.unopened else ""
    return Advice(finding, remedy + alternative, quote_completion(unclosed[0].text))


def _special(completions: Sequence[Completion], wording: PromptForm) -> Advice | None:
    """Advise if many truncated completions have written a special token that ends no completion."""
    truncated = [c for c in completions if c.finish == "length"]
    counts = Counter(name for c in truncated for name in wording.specials if name in c.text)
    name, count = counts.most_common(1)[0] if counts else ("", 0)
    if count <= SOME * len(completions):
        return None
    finding = f"{count} of {len(truncated)} truncated completions contain {name}, which does not end them"
    example = next(c.text for c in truncated if name in c.text)
    return Advice(
        finding, f"rollout.stop: [{name!r}], or a tokenizer with it as eos_token", quote_completion(example)
    )


def _next_turn(groups: Sequence[Group], wording: PromptForm) -> Advice | None:
    """Advise if many truncated completions answer and then continue with a prompt of their own."""
    if wording.chat:
        return None
    pairs = [(str(g.problem.prompt), c) for g in groups for c in g.completions]
    counts = Counter[str]()
    examples = dict[str, str]()
    for prompt, completion in pairs:
        if completion.finish != "length":
            continue
        for label in set(LABEL.findall(prompt)):
            if f"\n{label}" in completion.text:
                counts[label] += 1
                examples.setdefault(label, completion.text)
    label, count = counts.most_common(1)[0] if counts else ("", 0)
    if count <= SOME * len(pairs):
        return None
    finding = (
        f"{count} of {len(pairs)} completions continue with another {label!r}, like the one in the prompt"
    )
    return Advice(finding, f'rollout.stop: ["\\n{label}"]', quote_completion(examples[label]))


def _plain(completions: Sequence[Completion], wording: PromptForm, rate: float) -> Advice | None:
    """Advise if prompts are plain texts, and completions show that the model only continues them."""
    truncated = [c for c in completions if c.finish == "length"]
    mostly_endless = len(truncated) > MANY * len(completions)
    if wording.chat or rate > MANY:
        return None
    ends = f"{len(truncated)} of {len(completions)} completions do not end"
    sample = quote_completion((truncated or completions)[0].text)
    if wording.template and wording.from_file and (mostly_endless or rate < SOME):
        finding = "the model has a chat template, but the prompts do not use it"
        finding += f": {ends}, {percent(rate)} are correct"
        return Advice(finding, "data.chat: true", sample)
    if not wording.template and mostly_endless:
        return Advice(
            f"{ends}, and the model has no chat template: it continues a text like a base model",
            "rollout.stop with the text that follows an answer, a data.template that shows an answer and its "
            "end, or a cold start (a stage with method: sft)",
            sample,
        )
    return None


def quote_completion(text: str) -> str:
    """Return a completion as a line, without its middle if it is long."""
    line = _line(text)
    if len(line) > QUOTED_BEGINNING + QUOTED_END:
        line = f"{line[:QUOTED_BEGINNING]} ... {line[-QUOTED_END:]}"
    return f'"{line}"'


def _line(text: str, longest: int = 10_000) -> str:
    line = text.strip().replace("\n", "⏎")
    return line if len(line) <= longest else f"{line[:longest]}..."
