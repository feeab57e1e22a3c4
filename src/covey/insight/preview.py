"""Conclude from groups measured before a run whether it can learn, and with which settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from covey.config.load import Loaded
from covey.insight import gpus
from covey.insight.forecast import Forecast, Workload, evaluations_of
from covey.insight.odds import Counts, dead_share, reward_counts, tie_chances
from covey.objective.diagnostics import sampled_entropy, score_metrics
from covey.objective.texts import answers_inside, text_metrics
from covey.rewards.scorer import ScoringStats
from covey.runs.estimates import Estimate, gain, wilson
from covey.runs.rollouts import or_null
from covey.types import Group

SIZES_TOLD = (2, 4, 8, 16, 32, 64)
BUCKETS = ("0 %", "below 25 %", "25 to 50 %", "50 to 75 %", "above 75 %", "100 %")
MOST_DEAD = 0.5
"""Fraction of dead groups above which more than half of the sampling is wasted."""
FEW_LIVE = 2.0
"""Live groups in a step below which its gradient is the accident of one problem."""
MANY_TRUNCATED = 0.1
MUCH_UNREAD = 0.2
"""Excess of completions that contain the correct answer over those that are correct, or contain another's."""
LOOP = 8
"""Tokens of the window whose repetition shows that a completion loops."""
WIDE_ENTROPY = 3.0
"""Nats per token, as an even choice among twenty: such texts are correct only by accident."""

Promise = Literal["yes", "barely", "no"]


@dataclass(frozen=True)
class Advice:
    """A recommended change before the run."""

    finding: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.finding}. Try: {self.remedy}"


@dataclass(frozen=True)
class Measured:
    """Groups that were sampled and scored, and the time that took, in seconds."""

    groups: Sequence[Group]
    seconds: float
    asked: int
    """Number of groups that were requested."""
    scoring: ScoringStats
    stopped: bool = False
    """Whether the user stopped before all groups were sampled; then nothing below is known."""
    reward_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds per completion, by reward."""
    prepare: float = 0.0
    update: float = 0.0
    update_tokens: int = 0
    """Number of tokens whose gradient ``update`` computed."""
    continued: float = 0.0
    """Tokens of continuations per completion, if the algorithm samples these."""
    continuing: float = 0.0
    """Seconds of the continuations of one completion."""


@dataclass(frozen=True)
class Preview:
    """The measurement and the conclusions from it."""

    stage: Loaded
    measured: Measured
    memory: Mapping[str, int]
    there: int
    held_out: int
    """Number of problems to evaluate on."""
    problems: int
    """Number of problems to train on."""
    others: Mapping[float, Sequence[Group]] = field(default_factory=dict)
    """Temperature -> groups of the same problems."""
    subject: gpus.Subject | None = None
    """The model and its prompts; without them there is no forecast for other devices."""

    @cached_property
    def counts(self) -> list[Counts]:
        """How often each reward occurred, by problem."""
        return [reward_counts(g) for g in self.measured.groups]

    @cached_property
    def lengths(self) -> np.ndarray:
        """(N,) tokens of every completion."""
        return np.array([len(c.tokens) for g in self.measured.groups for c in g.completions])

    @cached_property
    def truncated(self) -> np.ndarray:
        """(N,) bool: whether each completion was truncated."""
        return np.array([c.finish == "length" for g in self.measured.groups for c in g.completions])

    def dead(self, size: int) -> Estimate:
        """Return the fraction of groups of this size that would be dead."""
        return dead_share(self.counts, size)

    @property
    def now(self) -> int:
        """The config's group size."""
        return self.stage.config.rollout.group_size

    @cached_property
    def word(self) -> Promise:
        """Whether there is something to learn from."""
        if all(g.dead for g in self.measured.groups):
            return "no"
        live = 1 - self.dead(self.now).value
        enough = self.stage.config.rollout.prompts_per_step * live >= FEW_LIVE
        return "yes" if enough and live >= 1 - MOST_DEAD else "barely"

    @cached_property
    def work(self) -> Workload:
        """The work of a training step."""
        dead, length = self.dead(self.now).value, float(self.lengths.mean())
        return Workload.of(self.stage.config, self.stage.algorithm, dead, length)

    def elsewhere(self) -> list[gpus.Row]:
        """Forecast the run on other GPUs; empty if the update was not timed or all completions are empty."""
        here = self.forecast()
        if self.subject is None or here is None or not self.lengths.any():
            return []
        return gpus.on_gpus(self.subject, self.stage, self.work, here)

    def forecast(self) -> Forecast | None:
        """Forecast seconds, hours and memory; None if the update was not timed."""
        measured, config, work = self.measured, self.stage.config, self.work
        if not measured.update_tokens:
            return None
        # Seconds per sampled token, with rewards and prompts included.
        a_token = measured.seconds / max(self.lengths.sum(), 1)
        count, completions = evaluations_of(config, self.held_out)
        # Updates of a step, in units of the one that was measured.
        through = work.trained * work.length / measured.update_tokens
        again = work.completions * measured.continued
        before = self.problems * config.rollout.prepass * work.length
        return Forecast(
            rollout=work.completions * (work.length * a_token + measured.continuing),
            update=(measured.prepare + measured.update) * through,
            evaluation=completions * work.length * a_token,
            steps=config.train.steps,
            evaluations=count,
            tokens=config.train.steps * (work.completions * work.length + again) + before,
            prepass=before * a_token,
            continued=config.train.steps * again,
            memory=self.memory,
            there=self.there,
        )

    def advice(self) -> list[Advice]:
        """Return the changes to make before the run, the most serious first."""
        entropy = sampled_entropy(self.measured.groups)
        # Other advice (limits, sizes, temperatures) would not help a model that writes noise.
        if entropy > WIDE_ENTROPY and self.word == "no":
            noise = f"entropy is {entropy:.1f} nats a token: the completions are close to noise"
            remedy = "a cold start (a stage with method: sft), or a model that has learned to answer"
            return [r for r in (self._unscored(), self._unread(), Advice(noise, remedy)) if r]
        found = (
            self._unscored(),
            self._unread(),
            self._limit(),
            self._temperature(),
            self._size(),
            self._roomy(),
        )
        return [advice for advice in found if advice]

    def _unscored(self) -> Advice | None:
        rewards = np.concatenate([g.rewards for g in self.measured.groups])
        if (share := np.isnan(rewards).mean()) <= 0.05:
            return None
        details = [
            s.detail
            for g in self.measured.groups
            for component in g.components.values()
            for s in component.scores
            if s.detail
        ]
        last = f", the last with {details[-1]!r}" if details else ""
        return Advice(f"{share:.0%} of the completions could not be scored{last}", "mend the rewards first")

    def _unread(self) -> Advice | None:
        """Advise if the texts contain the correct answer and the verdict does not read it."""
        inside = answers_inside(self.measured.groups)
        rate = float(np.mean([g.pass_rate for g in self.measured.groups]))
        known = inside.get("text/reference", 0.0)
        if known < inside.get("text/reference_elsewhere", 0.0) + rate + MUCH_UNREAD:
            return None
        return Advice(
            f"the right answer stands in {known:.0%} of the completions, and {rate:.0%} are correct",
            "a verdict that reads it, as rewards: [{math_answer: {rule: last_number}}], or data.template "
            "with the form that yours reads",
        )

    def _of(self, temperature: float) -> tuple[Estimate, Estimate, str]:
        """Return pass rate, fraction of dead groups and other facts in words at another temperature."""
        groups = self.others[temperature]
        ended = np.mean([c.finish == "stop" for g in groups for c in g.completions])
        rest = f"{1 - ended:.0%} truncated, entropy {sampled_entropy(groups):.2f}"
        return _pass_rate(groups), dead_share([reward_counts(g) for g in groups], self.now), rest

    def _fewer_dead(self, temperature: float) -> Estimate:
        """Estimate the change of the probability of a tie with the temperature, paired by problem."""
        here, there = (
            {g.problem.id: reward_counts(g) for g in groups}
            for groups in (self.measured.groups, self.others[temperature])
        )
        # Sampling at a temperature may have been stopped early.
        both = [problem for problem in here if problem in there]
        before, after = (tie_chances([own[p] for p in both], self.now) for own in (here, there))
        return gain(before, after)

    def _limit(self) -> Advice | None:
        """Advise if rollout.max_tokens is too small, or if no limit would be large enough."""
        limit, share = self.stage.config.rollout.max_tokens, float(self.truncated.mean())
        ended = self.lengths[~self.truncated]
        if share > MANY_TRUNCATED:
            texts = [c for g in self.measured.groups for c in g.completions if c.finish == "length"]
            looping = float(np.mean([_loops(c.tokens) for c in texts]))
            found = f"{share:.0%} are truncated at {limit} tokens"
            if not len(ended):
                found += ", and none has ended by itself: perhaps the end token is never produced"
            else:
                found += f"; of those that ended, 90 % had at most {np.quantile(ended, 0.9):.0f}"
            if looping > MOST_DEAD:
                return Advice(
                    f"{found}; {looping:.0%} of these repeat themselves, so more tokens would not help",
                    "a cold start (a stage with method: sft), rollout.stop, or the chat template "
                    "(data.chat: true)",
                )
            return Advice(found, f"rollout.max_tokens {2 * limit}")
        return None

    def _roomy(self) -> Advice | None:
        """Advise if rollout.max_tokens is much larger than any completion needs."""
        limit, ended = self.stage.config.rollout.max_tokens, self.lengths[~self.truncated]
        if len(ended) == len(self.lengths) and 4 * (longest := np.quantile(ended, 0.99)) < limit:
            return Advice(
                f"99 % end within {longest:.0f} tokens, the limit is {limit} and memory is kept for it",
                f"rollout.max_tokens {_round_up(2 * longest)}",
            )
        return None

    def _temperature(self) -> Advice | None:
        groups, temperature = self.measured.groups, self.stage.config.rollout.temperature
        # The temperature with the fewest dead groups; advised only if the paired interval excludes chance.
        best = min(self.others, key=lambda t: self._of(t)[1].value, default=temperature)
        if best in self.others and self._fewer_dead(best).high < 0:
            found = (
                f"{self.dead(self.now)} of the groups are dead, at temperature {best:g} {self._of(best)[1]}"
            )
            return Advice(found, f"rollout.temperature {best:g}")
        entropy, copies = sampled_entropy(groups), sum(_same_text(g) for g in groups if g.dead)
        solved = float(np.mean([g.pass_rate for g in groups])) > 0.95
        if copies > MOST_DEAD * len(groups) and not solved:
            found = f"{copies} of {len(groups)} groups are one text, written again and again"
            remedy = "rollout.temperature 1" if temperature < 1 else "a larger rollout.temperature"
            return Advice(f"{found} (entropy {entropy:.2f} nats a token)", remedy)
        return None

    def _size(self) -> Advice | None:
        """Advise the smallest group size with enough live groups, or say why none has."""
        now = self.dead(self.now)
        if now.value <= MOST_DEAD:
            return None
        groups = self.measured.groups
        rate = float(np.mean([g.pass_rate for g in groups]))
        found = f"{now} of the groups of {self.now} are dead"
        # Larger groups are dead less often; the smallest of them is the cheapest.
        enough = [n for n in SIZES_TOLD if n > self.now and self.dead(n).value <= MOST_DEAD]
        if enough and self.word != "no":
            fewer = f"{found}; of groups of {enough[0]} {self.dead(enough[0])}"
            return Advice(fewer, f"rollout.group_size {enough[0]}")
        if rate > MOST_DEAD:
            return Advice(f"{found} because all answers are correct", "harder problems")
        if rate > 0 or self.word != "no":
            return Advice(
                f"{found}, and larger groups change little: problems are solved always or never",
                "easier problems for what is never solved, and rollout.curriculum: frontier",
            )
        return Advice(
            f"{found}: no answer was correct in {len(self.lengths)} completions",
            "a cold start (a stage with method: sft), easier problems, or rewards that read what it writes",
        )

    def record(self) -> dict[str, object]:
        """Return the preview as JSON."""
        groups, forecast = self.measured.groups, self.forecast()
        sizes = sorted({*SIZES_TOLD, self.now})
        texts = [c.text for g in groups for c in g.completions]
        return {
            "can_learn": self.word,
            "groups": len(groups),
            "stopped": self.measured.stopped,
            "completions": len(self.lengths),
            "pass_rates": {g.problem.id: g.pass_rate for g in groups},
            "pass@1": _ends(_pass_rate(groups)),
            "dead": {str(size): _ends(self.dead(size)) for size in sizes},
            "price_of_a_live_group": {str(size): self._price(size) for size in sizes},
            "temperatures": {
                f"{t:g}": {"pass@1": _ends(rate), "dead": _ends(dead)}
                for t in self.others
                for rate, dead, _ in [self._of(t)]
            },
            "truncated": float(self.truncated.mean()),
            "length": {"mean": float(self.lengths.mean()), **self._quantiles()},
            "duplicates": text_metrics(texts, np.zeros(len(texts), bool))["text/duplicates"],
            "entropy": or_null(sampled_entropy(groups)),
            "answers": answers_inside(groups),
            "rewards": {
                "seconds": dict(self.measured.reward_seconds),
                "waited": self.measured.scoring.waited,
                **score_metrics(groups, self.measured.scoring.logged),
            },
            "tokens_per_second": float(self.lengths.sum() / self.measured.seconds),
            "forecast": forecast.record() if forecast else None,
            "gpus": [row.record() for row in self.elsewhere()],
            "memory": dict(self.memory),
            "advice": [vars(a) for a in self.advice()],
        }

    def _quantiles(self) -> dict[str, float]:
        ended = self.lengths[~self.truncated]
        levels = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        return {k: float(np.quantile(ended, q)) for k, q in levels.items()} if len(ended) else {}

    def _price(self, size: int) -> float | None:
        """Return completions sampled per live group, resampling included; None if no group is live."""
        live = 1 - self.dead(size).value
        return size / live if live > 0.001 else None

    def lines(self) -> Iterator[str]:
        """Yield lines for people."""
        groups = self.measured.groups
        yield (
            f"{len(groups)} problems, {len(self.lengths)} completions"
            + (f", stopped before all {self.measured.asked}" if self.measured.stopped else "")
        )
        yield f"can it learn? {self.word}: {self.dead(self.now)} of the groups of {self.now} would be dead"
        yield ""
        rates = np.array([g.pass_rate for g in groups])
        yield f"pass rate {_pass_rate(groups)}, by problem:"
        yield from _histogram(rates)
        yield ""
        yield "group size   dead groups        completions for a live group"
        drawn = min(len(g.completions) for g in groups)
        for size in sorted({*SIZES_TOLD, self.now}):
            price, here = self._price(size), " <- rollout.group_size" if size == self.now else ""
            beyond = " (beyond the samples: by a fitted prior)" if size > drawn else ""
            yield f"{size:>10}   {self.dead(size)!s:<18} {f'{price:.0f}' if price else '-':>5}{here}{beyond}"
        yield ""
        for temperature in self.others:
            rate, dead, rest = self._of(temperature)
            yield f"at temperature {temperature:g}: pass rate {rate}, dead groups {dead}, {rest}"
        yield from self._of_texts()
        if forecast := self.forecast():
            yield from forecast.lines()
        if rows := self.elsewhere():
            yield from gpus.lines(rows)
        for advice in self.advice():
            yield f"- {advice}"

    def _of_texts(self) -> Iterator[str]:
        found, record = self._quantiles(), self.record()
        ended = ", ".join(f"{k} {v:.0f}" for k, v in found.items())
        yield (
            f"{self.truncated.mean():.0%} truncated; tokens of those that ended: {ended or 'none did'}; "
            f"{record['duplicates']:.0%} copies; entropy {record['entropy']:.2f} nats a token; "
            f"{record['tokens_per_second']:,.0f} tokens/s"
        )
        if inside := answers_inside(self.measured.groups):
            stands = [f"{inside[f'text/reference{where}']:.0%}" for where in ("", "_elsewhere")]
            yield f"the right answer stands in {stands[0]} of the completions, another's in {stands[1]}"
        for name in self.measured.groups[0].components:
            parts = [g.components[name] for g in self.measured.groups]
            values = np.concatenate([part.values for part in parts])
            known = values[~np.isnan(values)]
            statuses = Counter(s.status for part in parts for s in part.scores if s.status != "ok")
            other = "".join(f", {n / len(values):.0%} {status}" for status, n in statuses.most_common())
            seconds = self.measured.reward_seconds.get(name)
            took = f", {1e3 * seconds:.3g} ms a completion" if seconds is not None else ""
            mean = f"mean {known.mean():.3f}" if len(known) else "never given"
            yield f"{name}: {mean}{other}{took}"


def _histogram(rates: np.ndarray, width: int = 40) -> Iterator[str]:
    # Bucket 0 is exactly 0 %, bucket 5 exactly 100 %, and 1 to 4 are the quarters between.
    place = np.where(rates <= 0, 0, np.where(rates >= 1, 5, 1 + np.minimum((4 * rates).astype(int), 3)))
    counts = np.bincount(place, minlength=len(BUCKETS))
    for name, count in zip(BUCKETS, counts, strict=True):
        bar = "█" * round(width * count / counts.max())
        yield f"{name:>12} {bar or ('▏' if count else '')} {count or ''}".rstrip()


def _loops(tokens: np.ndarray) -> bool:
    """Whether most windows of ``LOOP`` tokens occurred before in the text: it loops."""
    windows = [tuple(tokens[i : i + LOOP].tolist()) for i in range(len(tokens) - LOOP + 1)]
    return bool(windows) and len(set(windows)) < (1 - MOST_DEAD) * len(windows)


def _same_text(group: Group) -> bool:
    return len({c.text for c in group.completions}) == 1


def _pass_rate(groups: Sequence[Group]) -> Estimate:
    """Estimate the pass rate with a Wilson interval over problems, which has a width even at 0 and 1."""
    return wilson(float(np.sum([g.pass_rate for g in groups])), len(groups))


def _round_up(tokens: float) -> int:
    return int(-(-tokens // 16) * 16)


def _ends(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}
