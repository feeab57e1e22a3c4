"""Checks of prompts: their template, their ends, and what the data's completions repeat of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from covey.audit.checks.check import Fault, MissingField
from covey.audit.checks.preferences import learns_from_data
from covey.audit.checks.tokens import MIN_COMPLETIONS
from covey.audit.record import AuditRecord

MIN_CHARACTERS = 4
"""Fewest characters of a common beginning or end that is not chance."""
MIN_COMMON_START = 8
"""Fewest characters that all prompts of a template begin with."""
MIN_COMMON_ENDING = 20
"""Fewest characters that they all end with, so that a missing end shows."""
MIN_LENGTH_RATIO = 0.8
"""Smallest ratio of the characters of two prompts with the same number of tokens."""
TUNED = -0.25
"""Nats per token above which a model was trained on what opens an answer."""


def prompts_are_cut(record: AuditRecord) -> Fault | MissingField | None:
    """More than a quarter of the prompts, and at least four, are exactly as long as the limit, and none is
    longer, although the settings truncate prompts. Or more than a tenth of the prompts, the longest ones,
    lack an ending of at least 20 characters that all others share, and share no ending of their own,
    although all prompts begin alike.
    """
    limit = record.number("max_prompt_length", 0)
    if not limit:
        return _ends_are_cut(record)
    prompts = {tuple(s.prompt_ids): (step, n) for step, n, s in record.samples if s.prompt_ids}
    full = [ids for ids in prompts if len(ids) == limit]
    too_few = len(full) < MIN_COMPLETIONS or len(full) <= 0.25 * len(prompts)
    if too_few or any(len(ids) > limit for ids in prompts) or record.setting("prompt_truncation") == "error":
        return None
    step, n = prompts[full[0]]
    sentence = f"{len(full)} of {len(prompts)} prompts have exactly {limit:.0f} tokens, the limit"
    return Fault(f"{sentence}: longer ones are truncated", step, {"completion": n})


def _ends_are_cut(record: AuditRecord) -> Fault | MissingField | None:
    texts = {s.prompt: (step, n) for step, n, s in record.samples if isinstance(s.prompt, str)}
    prompts = sorted(texts, key=len)
    if not prompts:
        return MissingField("settings.max_prompt_length")
    if len(prompts) < MIN_COMPLETIONS or len(common_start(prompts)) < MIN_COMMON_START:
        return None
    backwards = [prompt[::-1] for prompt in prompts]
    # From the shortest prompt on, all share their end up to the first truncated one.
    whole = next(
        (n for n in range(2, len(prompts)) if len(common_start(backwards[: n + 1])) < MIN_COMMON_ENDING),
        len(prompts),
    )
    end = common_start(backwards[:whole])
    lacking = [back for back in backwards if not back.startswith(end)]
    if len(end) < MIN_COMMON_ENDING or len(lacking) <= 0.1 * len(prompts):
        return None
    longest = max(len(back) for back in backwards if back.startswith(end))
    # Prompts of another kind would share an end of their own; truncated prompts share none.
    if len(common_start(lacking)) >= MIN_CHARACTERS or len(lacking[0]) < MIN_LENGTH_RATIO * longest:
        return None
    step, n = texts[lacking[0][::-1]]
    sentence = f"{len(lacking)} of {len(prompts)} prompts, the longest, lack the end of the others,"
    return Fault(
        f"{sentence} {end[::-1][-MIN_COMMON_ENDING:]!r}: they are truncated", step, {"completion": n}
    )


def common_start(texts: Sequence[str]) -> str:
    """Return the common beginning of all texts."""
    first, last = min(texts), max(texts)
    return first[: next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]


def begin_is_doubled(record: AuditRecord) -> Fault | None:
    """A prompt begins with two begin-of-sequence tokens. Or more than half of the completions of the data
    begin with one, behind their prompt.
    """
    bos = record.header.tokens.bos
    completions = [(step, n, s) for step, n, s in record.samples if s.ids and s.prompt_ids]
    doubled = [(step, n) for step, n, s in completions if (s.ids or [])[0] == bos]
    if (
        learns_from_data(record)
        and bos is not None
        and len(doubled) > max(0.5 * len(completions), MIN_COMPLETIONS)
    ):
        sentence = f"{len(doubled)} of {len(completions)} completions begin with a begin-of-sequence token"
        return Fault(sentence, doubled[0][0], {"completion": doubled[0][1], "token": 0})
    for step, n, sample in record.samples:
        if bos is not None and sample.prompt_ids and sample.prompt_ids[:2] == [bos, bos]:
            return Fault("prompts begin with two begin-of-sequence tokens", step, {"completion": n})
    return None


def prompts_are_ended(record: AuditRecord) -> Fault | None:
    """All prompts, at least four, end with an end token, or with one that only white space follows."""
    ends = record.header.tokens.eos
    names = record.header.tokens.names
    texts = tuple(names[str(token)] for token in ends if str(token) in names)
    prompts = [(step, n, s.prompt_ids, s.prompt) for step, n, s in record.samples if s.prompt_ids]
    ended = [
        ids[-1] in ends or (isinstance(prompt, str) and prompt.rstrip().endswith(texts))
        for _, _, ids, prompt in prompts
    ]
    if len(prompts) < MIN_COMPLETIONS or not all(ended):
        return None
    step, n, ids, _ = prompts[0]
    evidence = {"completion": n, "token": len(ids) - 1}
    return Fault("every prompt ends with the end token, and the answer comes after it", step, evidence)


def prompts_end_with_a_space(record: AuditRecord) -> Fault | None:
    """All prompts, at least four, end with a space. Tokenizers join a space to the word that follows it, so a
    model has hardly ever seen a word behind a separate space.
    """
    prompts = {s.prompt: (step, n) for step, n, s in record.samples if isinstance(s.prompt, str)}
    if len(prompts) < MIN_COMPLETIONS or not all(prompt.endswith(" ") for prompt in prompts):
        return None
    step, n = next(iter(prompts.values()))
    return Fault(f"all {len(prompts)} prompts end with a space", step, {"completion": n})


def template_is_applied_twice(record: AuditRecord) -> Fault | None:
    """A message of a prompt contains the text of the end token, which a template writes between messages. Or
    all prompts, at least four, begin with the same text of eight or more characters, twice in a row. Or more
    than nine in ten completions of the data contain their prompt once more, behind a special token.
    """
    names = record.header.tokens.names
    ends = [names[str(token)] for token in record.header.tokens.eos if str(token) in names]
    texts = {s.prompt for _, _, s in record.samples if isinstance(s.prompt, str)}
    start = common_start(sorted(texts)) if len(texts) >= MIN_COMPLETIONS else ""
    twice = [n for n in range(MIN_COMMON_START, len(start) // 2 + 1) if start[:n] == start[n : 2 * n]]
    if twice and len(set(start[: twice[0]])) > MIN_CHARACTERS:
        return Fault(f"every prompt begins twice with {start[: twice[0]]!r}: the template was applied twice")
    again = _repeated_prompts(record) if learns_from_data(record) else None
    if again is not None:
        return again
    for step, n, sample in record.samples:
        messages = sample.prompt if isinstance(sample.prompt, list) else ()
        shown = [
            end for end in ends for m in messages if m.get("role") == "user" and end in str(m.get("content"))
        ]
        if shown:
            return Fault(
                f"a user's message contains {shown[0]}: it already is a templated prompt",
                step,
                {"completion": n},
            )
    return None


def template_is_missing(record: AuditRecord) -> Fault | None:
    """No prompt, of at least four, contains what opens an answer in the chat template, although the model
    expects this behind a prompt in the template, with a log-prob above -.25 nats per token.
    """
    tokens = record.header.tokens
    prompts = {tuple(s.prompt_ids) for _, _, s in record.samples if s.prompt_ids}
    size = len(tokens.opening)
    if len(prompts) < MIN_COMPLETIONS or not size or (tokens.opening_logprob or -math.inf) < TUNED:
        return None
    opening = tuple(tokens.opening)
    if any(opening == ids[n : n + size] for ids in prompts for n in range(len(ids) - size + 1)):
        return None
    sentence = "no prompt has the chat template, although the model was tuned on it: it expects what opens an"
    return Fault(
        f"{sentence} answer there, at {tokens.opening_logprob:.2g} nats per token", record.samples[0][0]
    )


def _repeated_prompts(record: AuditRecord) -> Fault | None:
    names = [*record.header.tokens.names.values()]
    completions = [
        (step, n, s.prompt, s.text) for step, n, s in record.samples if isinstance(s.prompt, str) and s.text
    ]
    shown = []
    for step, n, prompt, text in completions:
        before, repeat, _ = (text or "").partition(prompt.strip() or "\0")
        if repeat and any(name in before for name in names):
            shown.append((step, n))
    if len(shown) < MIN_COMPLETIONS or len(shown) <= 0.9 * len(completions):
        return None
    sentence = f"{len(shown)} of {len(completions)} completions contain their prompt once more, in a template"
    return Fault(sentence, shown[0][0], {"completion": shown[0][1]})


CHECKS = {
    "prompt_cut": prompts_are_cut,
    "bos_doubled": begin_is_doubled,
    "prompt_ended": prompts_are_ended,
    "prompt_space": prompts_end_with_a_space,
    "template_twice": template_is_applied_twice,
    "template_missing": template_is_missing,
}
