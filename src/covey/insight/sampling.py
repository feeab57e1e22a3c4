"""Rules that name causes in how completions are sampled: temperature, tools, the end of a text."""

from __future__ import annotations

from covey.estimates import gain
from covey.insight.causes import NO_SIGNAL, OUTCOMES, STILL, percent
from covey.insight.findings import FindingRule, Seen, collector
from covey.insight.remedies import WIDER, dead, last_token, scaled, to, was_truncated

SAMPLING: list[FindingRule] = []
_rule = collector(SAMPLING)


@_rule("temperature", *WIDER, explains=(*OUTCOMES, "sure_from_start", "inconsistent"), shows=dead)
def _(seen: Seen) -> str | None:
    """More than half of the groups are dead and of the completions copies, with a temperature below .7,
    top_p below .5 or top_k up to 4, unless 95 % are correct. Because published runs sample at .6 to 1;
    where half of what is sampled is a copy, sampling is what makes siblings the same.
    """
    known = [(key, seen.setting(key)) for key in ("rollout.temperature", "rollout.top_p")]
    bounds = {"rollout.temperature": 0.7, "rollout.top_p": 0.5}
    causes = [f"{key} {own:g}" for key, own in known if isinstance(own, float) and own < bounds[key]]
    if isinstance(top_k := seen.setting("rollout.top_k"), int) and 0 < top_k <= 4:
        causes.append(f"rollout.top_k {top_k}")
    copies, tied = seen.late("text/duplicates"), seen.late("groups/dead")
    if not (causes and copies > 0.5 and tied > 0.5 and seen.late("accuracy") < 0.95):
        return None
    why = f"{' and '.join(causes)} {'leave' if len(causes) > 1 else 'leaves'} little to choose"
    return f"{percent(tied)} of the groups are dead because their texts are the same (collapse): {why}"


@_rule(
    "too_hot",
    to("rollout.temperature", 1.0),
    explains=(*OUTCOMES, "truncated", "unparsable", "repetition", "end_token", "leaps"),
)
def _(seen: Seen) -> str | None:
    """With a temperature above 1.2, the newest evaluation gets more than twice as much right greedily as by
    sampling, its interval apart from 0; without one, less than a tenth is correct and a token has more than
    2 nats. Because published runs sample at .6 to 1.2, and what is sampled is what is trained: noise that
    hides what the model knows.
    """
    own, nats = seen.setting("rollout.temperature"), seen.late("entropy/sampled")
    if not (isinstance(own, int | float) and own > 1.2):
        return None
    if not seen.evals:
        noise = seen.late("accuracy") < 0.1 and nats > 2
        said = f"at rollout.temperature {own:g} a token has {nats:.2g} nats and nearly nothing is correct"
        return f"{said}: what is sampled is noise" if noise else None
    greedy, sampled = seen.evals[-1].greedy, seen.evals[-1].pass_rate
    if not (greedy.mean() > 2 * sampled.mean() and gain(sampled, greedy).low > 0):
        return None
    said = (
        f"{percent(greedy.mean())} of the held-out problems are solved greedily, {percent(sampled.mean())} as"
    )
    return f"{said} they are sampled, at rollout.temperature {own:g}: noise hides what the model knows"


@_rule(
    "tools_fail",
    scaled("rollout.tools.max_calls", 2, 2),
    scaled("rollout.tools.timeout", 3, 3),
    advice="the answers in `covey ui`: what do they say is wrong?",
    explains=(*NO_SIGNAL, *STILL),
)
def _(seen: Seen) -> str | None:
    """More than half of what tools answer reports an error, and a twentieth of the completions call any.
    Because a model that is refused more often than served learns to do without.
    """
    failed, used = seen.late("tools/failed"), seen.late("tools/used")
    return (
        f"{percent(failed)} of what the tools answer reports an error"
        if failed > 0.5 and used > 0.05
        else None
    )


@_rule(
    "tools_unused",
    scaled("rollout.temperature", 1.3, 1.3, most=2.0),
    advice="a stage with method: sft on worked answers that call, or a prompt that says how",
    explains=NO_SIGNAL,
)
def _(seen: Seen) -> str | None:
    """From the third step, fewer than one in a hundred completions call a tool. Because what is never sampled
    is never paid: the model cannot find out what a call would bring.
    """
    used = seen.late("tools/used")
    return f"{percent(used)} of the completions call a tool" if seen.after(3) and used < 0.01 else None


@_rule(
    "sure_from_start",
    scaled("rollout.temperature", 1.3, 1.3, most=2.0),
    advice="a cold start that ends earlier (train.stop_at)",
    explains=(*NO_SIGNAL, *STILL, "entropy_collapse", "duplicates"),
    shows=dead,
)
def _(seen: Seen) -> str | None:
    """From the fifth step, more than half of the groups are one text in three quarters of their completions
    and not all correct, as they were in the first steps, and half of the completions end. Because such a
    prompt gives the same again, however often; of what is truncated nobody knows how it goes on.
    """
    collapsed = seen.late("groups/collapsed")
    cut = seen.late("length/truncated") > 0.5
    if not (seen.after(5) and collapsed > 0.5 and seen.early("groups/collapsed") > 0.5) or cut:
        return None
    said = f"{percent(collapsed)} of the groups are dead because their texts are the same (collapse)"
    return f"{said}: the model is sure from the start, though not correct"


@_rule(
    "end_token",
    to("rollout.stop", ["</answer>"], bool),
    to("data.chat", True),
    severity="severe",
    advice="a cold start whose answers end",
    explains=("truncated", "unparsable", "repetition", "length_bias", *NO_SIGNAL),
    shows=was_truncated,
    token=last_token,
)
def _(seen: Seen) -> str | None:
    """From the third step, 99 % of the completions reach the limit, and half of these have answered already
    or half of the text repeats itself. Because a model that needs more room has not answered yet; this one
    cannot end.
    """
    answered, repeats = seen.late("length/truncated_done"), seen.late("text/repetition")
    if not (seen.after(3) and seen.late("length/truncated") >= 0.99 and (answered > 0.5 or repeats > 0.5)):
        return None
    said = f"no completion ends by itself, though {percent(answered)} of them have answered"
    return f"{said}: the model does not produce its end token"
