"""Checks of token ids and masks: the tokens that were sampled and those that are trained."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from covey.audit.checks.check import Fault
from covey.audit.checks.preferences import learns_from_data
from covey.audit.record import AuditRecord, Sample, Use

MIN_COMPLETIONS = 4
"""Completions that a check needs before it applies."""
IMPOSSIBLE = -25.0
"""Log-prob in nats of a practically impossible event."""
TRUNCATED_FRACTION = 0.75
"""Fraction of truncated completions above which the limit is too small."""
TOOL_ANSWER_MARKS = (("<tool_response>", "</tool_response>"), ("[TOOL_RESULTS]", "[/TOOL_RESULTS]"))
"""Marks around a tool's answer in the templates of Qwen and Mistral."""


def _trained(record: AuditRecord) -> Iterator[tuple[Use, list[int], list[bool]]]:
    """Yield each completion of which an update trains a token, with its ids and its mask."""
    for use in record.uses:
        if use.row.mask is not None and use.sample.ids and any(use.row.mask):
            yield use, use.sample.ids, use.row.mask


def _most(
    record: AuditRecord,
    shows: Callable[[Use, list[int], list[bool]], int | None],
    words: str,
    fraction: float,
) -> Fault | None:
    """Return a fault if more than ``fraction`` of the trained completions show it.

    ``shows`` returns the token of the fault, -1 if there is no fault, or None if it cannot tell.
    """
    answers = [(use, shows(use, ids, mask)) for use, ids, mask in _trained(record)]
    able = [(use, token) for use, token in answers if token is not None]
    shown = [(use, token) for use, token in able if token >= 0]
    if len(able) < MIN_COMPLETIONS or len(shown) <= fraction * len(able):
        return None
    use, token = shown[0]
    return Fault(f"{words} in {len(shown)} of {len(able)} completions", use.update.step, location(use, token))


def location(use: Use, token: int | None = None) -> dict[str, int | float]:
    """Return the place of a completion, or of its token, as evidence."""
    group = {} if use.sample.group is None else {"group": use.sample.group}
    return {**group, "completion": use.row.completion, **({} if token is None else {"token": token})}


def _end(record: AuditRecord, ids: list[int]) -> int | None:
    """Return the place of the end token; None if the completion does not end with one."""
    return len(ids) - 1 if ids[-1] in record.header.tokens.eos else None


def other_tokens_are_trained(record: AuditRecord) -> Fault | None:
    """The ids in an update are not the sampled ids."""
    pairs = [(use, use.row.ids, use.sample.ids) for use in record.uses if use.row.ids and use.sample.ids]
    others = [
        (use, trained, ids) for use, trained, ids in pairs if trained[: len(ids)] != ids[: len(trained)]
    ]
    unshifted = [use for use, taught, ids in others if len(ids) > 2 and taught[1:] == ids[:-1]]
    if len(unshifted) > 0.5 * len(others):
        sentence = "each place is taught its own token, not the next one: the labels are not shifted"
        return Fault(sentence, unshifted[0].update.step, location(unshifted[0]))
    for use, trained, ids in others[:1]:
        first = next(n for n, (a, b) in enumerate(zip(trained, ids, strict=False)) if a != b)
        sentence = (
            f"token {first} of a completion was sampled as {ids[first]} and is trained as {trained[first]}"
        )
        return Fault(sentence, use.update.step, location(use, first))
    return None


def mask_is_shifted(record: AuditRecord) -> Fault | None:
    """In more than half of the completions, the mask leaves out the first token and reaches one place past
    the last one, or the reverse.
    """

    def shows(use: Use, ids: list[int], mask: list[bool]) -> int | None:
        if any(use.sample.inserted or ()) or len(ids) < 2:
            return None
        late = not mask[0] and all(mask[1 : len(ids)])
        # The mask's place past the last token may be missing if the batch is only as wide as the completion.
        is_early = all(mask[: len(ids) - 1]) and not any(mask[len(ids) - 1 :])
        # Without an end token's loss and with that of the prompt's last token, the mask begins too early.
        early = is_early and (_end(record, ids) is None or use.row.prompt_trained == 1)
        return 0 if late else len(ids) - 1 if early else -1

    return _most(record, shows, "the mask is shifted by one place", 0.5)


def end_is_untrained(record: AuditRecord) -> Fault | None:
    """In more than half of the completions that end, the end token was sampled and all tokens before it are
    trained, but the mask leaves it out.
    """

    def shows(_use: Use, ids: list[int], mask: list[bool]) -> int | None:
        end = _end(record, ids)
        if end is None or not end:
            return None
        return end if not any(mask[end:]) else -1

    return _most(record, shows, "the end token is not trained", 0.5)


def end_is_appended(record: AuditRecord) -> Fault | None:
    """In more than a tenth of the completions that end, a trained end token directly follows the token
    limit; or the trained end token has no log-prob from the sampler, while all other tokens and some other
    end tokens have one.
    """
    limit = record.number("max_completion_length", math.inf)
    ends = [s.sampler_logprobs[-1] for _, _, s in record.samples if s.sampler_logprobs and _ends(record, s)]
    some_are_sampled = any(value is not None for value in ends)

    def shows(use: Use, ids: list[int], mask: list[bool]) -> int | None:
        end = _end(record, ids)
        # A dialogue may exceed the limit of a turn, and its inserted tokens have mask 0.
        if end is None or any(use.sample.inserted or ()) or not all(mask[:end]):
            return None
        values = use.sample.sampler_logprobs or []
        unsampled = len(values) > 1 and values[-1] is None and None not in values[:-1]
        is_trained = len(mask) > end and mask[end]
        return end if is_trained and (end == limit or (some_are_sampled and unsampled)) else -1

    return _most(record, shows, "an end token that the model did not sample is trained", 0.1)


def _ends(record: AuditRecord, sample: Sample) -> bool:
    return bool(sample.ids) and _end(record, sample.ids or []) is not None


def padding_is_trained(record: AuditRecord) -> Fault | None:
    """The mask is 1 after the last token of a completion."""

    def shows(_use: Use, ids: list[int], mask: list[bool]) -> int | None:
        return next((n for n in range(len(ids), len(mask)) if mask[n]), -1)

    return _most(record, shows, "tokens behind the end are trained", 0.0)


def _inserted(use: Use) -> set[int]:
    """Return the tokens that a tool wrote: declared ones, and two in a row that the sampler did not draw."""
    sampler, trainer = use.sample.sampler_logprobs, use.row.logprobs
    strange = [
        not sampled and trained is not None and trained < -1
        for sampled, trained in zip(sampler or (), trainer or (), strict=False)
    ]
    # If the other tokens differ too, the log-probs belong to other ids and say nothing about a tool.
    both = zip(sampler or (), trainer or (), strange, strict=False)
    others = [
        abs(sampled - trained)
        for sampled, trained, odd in both
        if sampled and trained is not None and not odd
    ]
    aligned = sum(others) <= len(others)
    foreign = {n for n, pair in enumerate(pairwise(strange)) if all(pair) and aligned}
    return foreign | {n for n, wrote in enumerate(use.sample.inserted or ()) if wrote}


def mask_is_inverted(record: AuditRecord) -> Fault | None:
    """In more than half of the completions with tokens of a tool, at least half of the tool's tokens are
    trained and none of the model's.
    """

    def shows(use: Use, ids: list[int], mask: list[bool]) -> int | None:
        foreign = _inserted(use)
        if not foreign or len(foreign) == len(ids):
            return None
        trained = {n for n, on in enumerate(mask) if on}
        # Two neighbours are needed to recognize a tool's token, so the edges of its text are unknown.
        edges = {n + 1 for n in foreign} | {n - 1 for n in foreign}
        inverted = 2 * len(trained & foreign) >= len(foreign) and trained <= foreign | edges
        return min(trained) if inverted else -1

    return _most(record, shows, "the mask is inverted: only the tool's text is trained", 0.5)


def inserted_tokens_are_trained(record: AuditRecord) -> Fault | None:
    """Tokens that a tool wrote are trained. They are declared as inserted, or there are two in a row to which
    the sampler gives a log-prob of 0 or none and the trainer one below -1, although the two agree on all
    other tokens.
    """

    def shows(use: Use, _ids: list[int], mask: list[bool]) -> int | None:
        foreign = _inserted(use)
        if not foreign:
            return None
        return next((n for n in sorted(foreign) if n < len(mask) and mask[n]), -1)

    return _most(record, shows, "a tool's text is trained as if the model had written it", 0.1)


def tools_answers_are_written_by_the_model(record: AuditRecord) -> Fault | None:
    """Most completions contain a tool's answer between the marks of its template, and it is trained."""
    names = {int(i): text for i, text in record.header.tokens.names.items()}

    def shows(_use: Use, ids: list[int], mask: list[bool]) -> int | None:
        texts = [names.get(i, "") for i in ids]
        spans = [(texts.index(a), texts.index(b)) for a, b in TOOL_ANSWER_MARKS if a in texts and b in texts]
        return next(
            (n for start, end in spans for n in range(start + 1, end) if mask[n : n + 1] == [True]), -1
        )

    return _most(record, shows, "a tool's answer (recognized by its marks) is trained", 0.5)


def completions_begin_with_their_prompt(record: AuditRecord) -> Fault | None:
    """Nine in ten completions begin with the last token of their prompt, although the model gives this a
    joint probability below e^-25.
    """
    shown = []
    doubt = 0.0
    able = 0
    for use in record.uses:
        logprobs = use.sample.model_logprobs or use.row.logprobs
        if not (use.first and use.sample.prompt_ids and use.sample.ids and logprobs):
            continue
        able += 1
        if use.sample.ids[0] == use.sample.prompt_ids[-1] and logprobs[0] is not None:
            shown.append(use)
            doubt += logprobs[0]
    if able < MIN_COMPLETIONS or len(shown) < 0.9 * able or doubt > IMPOSSIBLE:
        return None
    sentence = (
        f"{len(shown)} of {able} completions begin with the last token of their prompt, at log-probs of"
    )
    return Fault(f"{sentence} {doubt / able:.2g} on average", shown[0].update.step, location(shown[0], 0))


def end_is_lost(record: AuditRecord) -> Fault | None:
    """More than half of the completions that are shorter than the limit have no end token. Or, in a run that
    learns from data without packing it, more than a tenth of the completions are truncated at max_length.
    """
    if learns_from_data(record):
        return _data_is_cut(record)
    limit = record.number("max_completion_length", 0)
    completions = [(step, n, _without_padding(record, s.ids)) for step, n, s in record.samples if s.ids]
    shorter = [(step, n, ids) for step, n, ids in completions if ids and len(ids) < limit]
    lost = [(step, n, ids) for step, n, ids in shorter if _end(record, ids) is None]
    if len(shorter) < MIN_COMPLETIONS or len(lost) <= 0.5 * len(shorter):
        return None
    sentence = f"{len(lost)} of {len(shorter)} completions stop before the limit without an end token"
    last, count = Counter(ids[-1] for _, _, ids in lost).most_common(1)[0]
    name = record.header.tokens.names.get(str(last))
    if name is not None and count > 0.9 * len(lost):
        sentence += f": they end with {name}, which the trainer does not take for an end token"
        if record.setting("mask_truncated_completions") is True:
            sentence += " and leaves out as truncated"
    return Fault(sentence, lost[0][0], {"completion": lost[0][1]})


def _without_padding(record: AuditRecord, ids: list[int]) -> list[int]:
    """Return a completion without the padding at its end, unless padding ends completions."""
    tokens = record.header.tokens
    pads = (
        0
        if tokens.pad in tokens.eos
        else next((n for n, i in enumerate(ids[::-1]) if i != tokens.pad), len(ids))
    )
    return ids[: len(ids) - pads]


def _data_is_cut(record: AuditRecord) -> Fault | None:
    limit = record.number("max_length", math.inf)
    completions = [(step, n, s) for step, n, s in record.samples if s.ids and s.prompt_ids is not None]
    lengths = [len(s.prompt_ids or ()) + len(s.ids or ()) for _, _, s in completions]
    cut = [
        (step, n)
        for (step, n, s), length in zip(completions, lengths, strict=True)
        if length == limit and _end(record, s.ids or []) is None
    ]
    is_packed = record.setting("packing") is True
    if is_packed or len(cut) < MIN_COMPLETIONS or len(cut) <= 0.1 * len(completions):
        return None
    sentence = (
        f"{len(cut)} of {len(completions)} completions of the data are truncated at max_length={limit:.0f}"
    )
    return Fault(f"{sentence} and lack their end", cut[0][0], {"completion": cut[0][1]})


def nothing_ends(record: AuditRecord) -> Fault | None:
    """More than three in four completions reach the limit without an end token, by 3.5 standard errors over
    prompts (over the completions of each prompt if there are fewer than three prompts).
    """
    limit = record.number("max_completion_length", 0)
    truncated: dict[str, list[bool]] = {}
    for _, _, sample in record.samples:
        if sample.ids:
            is_cut = len(sample.ids) >= limit and _end(record, sample.ids) is None
            truncated.setdefault(sample.prompt_text, []).append(is_cut)
    flags = [reached_limit for of_prompt in truncated.values() for reached_limit in of_prompt]
    if len(flags) < 16 or _least_fraction([*truncated.values()]) <= TRUNCATED_FRACTION:
        return None
    scope = {1: " of one prompt", 2: " of two prompts"}.get(len(truncated), "")
    return Fault(f"{sum(flags)} of {len(flags)} completions{scope} reach the limit of {limit:.0f} tokens")


def _least_fraction(by_prompt: Sequence[Sequence[bool]]) -> float:
    """Return a lower bound of the fraction of completions that show something, given prompt by prompt.

    Completions of one prompt are alike, so the prompts are the independent samples. One prompt has no spread
    among prompts, and two give a poor estimate of it; then each prompt is judged by its own completions.
    """
    if len(by_prompt) == 2:
        return min(_least_fraction([of_prompt]) for of_prompt in by_prompt)
    units = by_prompt if len(by_prompt) > 1 else [[flag] for flag in by_prompt[0]]
    total = sum(map(len, units))
    fraction = sum(map(sum, units)) / total
    squares = sum((sum(of_prompt) - fraction * len(of_prompt)) ** 2 for of_prompt in units)
    error = math.sqrt(squares * len(units) / max(len(units) - 1, 1)) / total
    # A fraction of 1 has a standard error of 0; its bound comes from the rule of three.
    return min(fraction - 3.5 * error, 1 - 3 / total)


def update_trains_no_token(record: AuditRecord) -> Fault | None:
    """All masks of an update are 0."""
    for update in record.updates:
        masks = [row.mask for row in update.rows]
        if masks and not any(any(mask) for mask in masks if mask is not None) and None not in masks:
            return Fault("an update trains no token: every mask is 0", update.step)
    return None


CHECKS = {
    "nothing_trained": update_trains_no_token,
    "tokens_replaced": other_tokens_are_trained,
    "mask_shifted": mask_is_shifted,
    "mask_inverted": mask_is_inverted,
    "end_untrained": end_is_untrained,
    "end_appended": end_is_appended,
    "padding_trained": padding_is_trained,
    "tool_trained": inserted_tokens_are_trained,
    "tool_marks_trained": tools_answers_are_written_by_the_model,
    "prompt_trained": completions_begin_with_their_prompt,
    "end_lost": end_is_lost,
    "never_ends": nothing_ends,
}
