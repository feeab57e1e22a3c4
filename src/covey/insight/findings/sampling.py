"""Rules about how completions are sampled: temperature, tools, the end of a text."""

from __future__ import annotations

from covey.insight.findings.completions import first_of_dead, last_token, was_truncated
from covey.insight.findings.remedies import HOTTER, WIDER_SAMPLING, ChangeTo, ScaleBy, stop_after_answer
from covey.insight.findings.rule import NO_SIGNAL, OUTCOMES, STILL, Rule
from covey.insight.findings.view import RunView
from covey.runs.estimates import gain
from covey.system.text import percent


def sampling_is_narrow(run: RunView) -> str | None:
    """More than half of the groups are dead and more than half of the completions are copies, with a
    temperature below .7, top_p below .5 or top_k of at most 4, and less than 95 % are correct.
    """
    causes = []
    for key, bound in {"rollout.temperature": 0.7, "rollout.top_p": 0.5}.items():
        value = run.setting(key)
        if isinstance(value, float) and value < bound:
            causes.append(f"{key} {value:g}")
    top_k = run.setting("rollout.top_k")
    if isinstance(top_k, int) and 0 < top_k <= 4:
        causes.append(f"rollout.top_k {top_k}")
    copies = run.late("text/duplicates")
    tied = run.late("groups/dead")
    if not (causes and copies > 0.5 and tied > 0.5 and run.late("accuracy") < 0.95):
        return None
    effect = f"{' and '.join(causes)} {'leave' if len(causes) > 1 else 'leaves'} little choice"
    return f"{percent(tied)} of the groups are dead because their texts are the same (collapse): {effect}"


def sampling_is_noise(run: RunView) -> str | None:
    """With a temperature above 1.2, the latest evaluation solves more than twice as many problems greedily as
    by sampling, beyond chance; without evaluations, less than a tenth of the completions are correct and the
    entropy is above 2 nats per token.
    """
    temperature = run.setting("rollout.temperature")
    entropy = run.late("entropy/sampled")
    if not (isinstance(temperature, int | float) and temperature > 1.2):
        return None
    if not run.evals:
        if not (run.late("accuracy") < 0.1 and entropy > 2):
            return None
        return (
            f"at rollout.temperature {temperature:g} the entropy is {entropy:.2g} nats per token and almost "
            "nothing is correct: the samples are noise"
        )
    greedy = run.evals[-1].greedy
    sampled = run.evals[-1].pass_rate
    if not (greedy.mean() > 2 * sampled.mean() and gain(sampled, greedy).low > 0):
        return None
    return (
        f"{percent(greedy.mean())} of the held-out problems are solved greedily, {percent(sampled.mean())} "
        f"by sampling at rollout.temperature {temperature:g}: noise hides what the model knows"
    )


def tool_calls_fail(run: RunView) -> str | None:
    """More than half of the tools' answers report an error, and more than a twentieth of the completions call
    a tool.
    """
    failed = run.late("tools/failed")
    used = run.late("tools/used")
    if not (failed > 0.5 and used > 0.05):
        return None
    return f"{percent(failed)} of the tools' answers report an error"


def tools_are_not_called(run: RunView) -> str | None:
    """Fewer than one completion in a hundred calls a tool."""
    used = run.late("tools/used")
    return f"{percent(used)} of the completions call a tool" if used < 0.01 else None


def groups_are_one_text_from_the_start(run: RunView) -> str | None:
    """In more than half of the groups, three quarters of the completions are the same text and not all are
    correct, now and in the first steps, and at least half of the completions end.
    """
    collapsed = run.late("groups/collapsed")
    # Truncated texts may be equal so far and differ later.
    truncated = run.late("length/truncated") > 0.5
    if not (collapsed > 0.5 and run.early("groups/collapsed") > 0.5) or truncated:
        return None
    return (
        f"{percent(collapsed)} of the groups are dead because their texts are the same (collapse): the model "
        "is sure from the start, though not correct"
    )


def no_completion_ends(run: RunView) -> str | None:
    """99 % of the completions reach the limit, and more than half of them have already answered or more than
    half of the text repeats itself.
    """
    answered = run.late("length/truncated_done")
    repeats = run.late("text/repetition")
    if not (run.late("length/truncated") >= 0.99 and (answered > 0.5 or repeats > 0.5)):
        return None
    return (
        f"no completion ends by itself, though {percent(answered)} of them have answered: the model does not "
        "produce its end token"
    )


RULES = (
    Rule(
        "temperature",
        sampling_is_narrow,
        reason="Published runs sample at .6 to 1. If half of the samples are copies, it is sampling that "
        "makes siblings the same.",
        remedies=WIDER_SAMPLING,
        silences=(*OUTCOMES, "sure_from_start", "inconsistent"),
        shown_by=first_of_dead,
    ),
    Rule(
        "too_hot",
        sampling_is_noise,
        reason="Published runs sample at .6 to 1.2. A run trains on its samples: noise hides what the model "
        "knows.",
        remedies=(ChangeTo("rollout.temperature", 1.0),),
        silences=(*OUTCOMES, "truncated", "unparsable", "repetition", "end_token", "leaps"),
    ),
    Rule(
        "tools_fail",
        tool_calls_fail,
        reason="A model whose calls fail more often than they succeed learns to do without tools.",
        remedies=(ScaleBy("rollout.tools.max_calls", 2, 2), ScaleBy("rollout.tools.timeout", 3, 3)),
        advice="the errors among the tools' answers, in `covey ui`",
        silences=(*NO_SIGNAL, *STILL),
    ),
    Rule(
        "tools_unused",
        tools_are_not_called,
        after=3,
        reason="A call that is never sampled is never rewarded: the model cannot find out what it is good "
        "for.",
        remedies=(HOTTER,),
        advice="a stage with method: sft on worked answers that call, or a prompt that says how",
        silences=NO_SIGNAL,
    ),
    Rule(
        "sure_from_start",
        groups_are_one_text_from_the_start,
        after=5,
        reason="Such a prompt gives the same text again, however often it is sampled. Truncated texts might "
        "still differ later.",
        remedies=(HOTTER,),
        advice="a cold start that ends earlier (train.stop_at)",
        silences=(*NO_SIGNAL, *STILL, "entropy_collapse", "duplicates"),
        shown_by=first_of_dead,
    ),
    Rule(
        "end_token",
        no_completion_ends,
        after=3,
        severity="severe",
        reason="A model that needs more room has not answered yet; this one cannot end.",
        remedies=(stop_after_answer,),
        advice="rollout.stop with the text that follows an answer, `data.chat: true` for a model with a chat "
        "template, or a cold start whose answers end",
        silences=("truncated", "unparsable", "repetition", "length_bias", *NO_SIGNAL),
        shown_by=was_truncated,
        token=last_token,
    ),
)
