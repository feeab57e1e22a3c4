"""Probes of a server: whether it has the weights, and whether it draws from their distribution.

Log-probs show the weights. They do not show a penalty, a min_p or a bias, since servers report the model's
log-probs before these are applied. The tokens that are drawn do: the likeliest ones, and their frequencies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from covey.models.packing import Packed, pack
from covey.models.policy import Policy
from covey.sampling.base import Request, SamplingParams
from covey.sampling.dialects import ServerOutput

AskFor = Callable[[Request, SamplingParams], Sequence[ServerOutput]]
"""Asks the probed server for the completions of a request."""
PROBE_TOKENS = 32
"""Most tokens of a probe."""
DRAWS = 512
"""Number of first tokens that are drawn for each prompt to compare their frequencies."""
MIN_P_VALUE = 1e-6
"""P-value below which frequencies are taken not to be the policy's."""
MIN_EXPECTED_DRAWS = 5.0
"""Fewest expected draws in a class, so that the chi-square distribution holds."""
MIN_RECORDED_NATS = 1e-9
"""Smallest difference in nats that is recorded for a server without the policy's own bits."""
TIE_NATS = 0.01
"""Nats within which a token ties with the likeliest; ten times the rounding where that is more."""
ALTERED = (
    "it alters the distribution before it draws: a penalty, min_p, top_k, a bias, a temperature of its own. "
    "Check its command line and any proxy in between; for vLLM add --generation-config vllm"
)


@dataclass(frozen=True)
class Probe:
    """A completion that a server was asked for."""

    prompt: np.ndarray
    """(P,) int64."""
    tokens: np.ndarray
    """(T,) int64."""
    logprobs: Sequence[float]
    """(T,) nats, as the server reports."""


def sample_probes(
    ask: AskFor, prompts: Sequence[np.ndarray], temperature: float, stream: Callable[..., int]
) -> list[Probe]:
    """Ask for a completion of each prompt. ``stream`` makes the key of a draw."""
    params = SamplingParams(PROBE_TOKENS, temperature)
    return [_probe(ask, Request(prompt, [stream("probe", i)]), params) for i, prompt in enumerate(prompts)]


def _probe(ask: AskFor, request: Request, params: SamplingParams) -> Probe:
    (output,) = ask(request, params)
    return Probe(request.prompt, np.array(output.tokens, dtype=np.int64), output.logprobs)


def alters_draws(
    policy: Policy,
    ask: AskFor,
    probes: Sequence[Probe],
    temperature: float,
    rounding: float,
    stream: Callable[..., int],
    compared: bool,
) -> str:
    """Return how a server's draws differ from the distribution that it reports; empty if they do not.

    ``rounding`` in nats. A server whose frequencies were ``compared`` since it started is asked for one
    greedy completion only: its command line alters draws, and new weights do not change that.
    """
    greedy = SamplingParams(PROBE_TOKENS, temperature=0.0)
    for probe in probes[:1] if compared else probes:
        deficit = greedy_deficit(policy, _probe(ask, Request(probe.prompt, [0]), greedy))
        if deficit > max(TIE_NATS, 10 * rounding):
            return f"at temperature 0 it takes a token {deficit:.2g} nats behind the likeliest: {ALTERED}"
    if compared or not temperature:
        return ""
    prompts = informative_positions(policy, probes, temperature)
    probabilities = first_probabilities(policy, prompts, temperature)
    counts = np.zeros_like(probabilities)
    for i, prompt in enumerate(prompts):
        streams = [stream("frequencies", i, n) for n in range(DRAWS)]
        outputs = ask(Request(prompt, streams), SamplingParams(1, temperature))
        # add.at, because ``counts[i][ids] += 1`` would count a repeated id once.
        np.add.at(counts[i], [output.tokens[0] for output in outputs], 1.0)
    chance = p_value(probabilities, counts)
    if chance >= MIN_P_VALUE:
        return ""
    return (
        f"of {DRAWS} tokens after each of {len(prompts)} prompts some came too often and others too rarely "
        f"(chance: {chance:.0e}), though its log-probs are correct: {ALTERED}"
    )


def mean_difference(policy: Policy, probes: Sequence[Probe], temperature: float) -> float:
    """Return the mean absolute difference between a server's log-probs and the policy's, nats."""
    with torch.no_grad():
        policy_logprobs = policy.token_outputs(_pack_probes(policy, probes), temperature).logprobs.cpu()
    server_logprobs = torch.tensor([x for p in probes for x in p.logprobs], dtype=torch.float64)
    return float((policy_logprobs.double() - server_logprobs).abs().mean())


def closest_policy(
    policy: Policy, probes: Sequence[Probe], temperature: float, finest: float
) -> tuple[Policy, float]:
    """Return the policy, or its unrounded weights if these are nearer to the server's log-probs.

    The policy's own rounding would hide a small change of weights. The second value is how far the returned
    one's log-probs are from the server's. ``finest``: nats below which the two are taken to be equal.
    """
    difference = mean_difference(policy, probes, temperature)
    if difference <= finest or not policy.rounds:
        return policy, difference
    unrounded = policy.without_rounding()
    unrounded_difference = max(mean_difference(unrounded, probes, temperature), MIN_RECORDED_NATS)
    if unrounded_difference < difference:
        return unrounded, unrounded_difference
    return policy, difference


def informative_positions(policy: Policy, probes: Sequence[Probe], temperature: float) -> list[np.ndarray]:
    """Return each probe's prompt and completion up to the most informative position: (P + t,) each.

    That is where log-probs vary the most, because there another temperature moves the most probability.
    Where the policy is certain or uniform, it moves none.
    """
    logprobs = (_logits(policy, probes) / temperature).log_softmax(-1)
    # Var(log p) under p is the derivative of the entropy with respect to log T.
    mean = (logprobs.exp() * logprobs).sum(-1, keepdim=True)
    variance = (logprobs.exp() * (logprobs - mean) ** 2).sum(-1)
    positions = _pack_probes(policy, probes).unpack(variance).argmax(-1).tolist()
    return [np.concatenate([p.prompt, p.tokens[:t]]) for p, t in zip(probes, positions, strict=True)]


def greedy_deficit(policy: Policy, probe: Probe) -> float:
    """Return the most nats by which a token of a greedy completion is less likely than the likeliest one."""
    logits = _logits(policy, [probe])
    token_logits = logits.gather(1, torch.from_numpy(probe.tokens).to(logits.device)[:, None])[:, 0]
    return float((logits.amax(-1) - token_logits).max())


def first_probabilities(policy: Policy, prompts: Sequence[np.ndarray], temperature: float) -> np.ndarray:
    """Return the probabilities of the first token after each of N prompts: (N, V) float64."""
    # ``_logits`` returns the logits of a probe's tokens, so each prompt needs a token; it may be any token.
    any_token = np.zeros(1, np.int64)
    logits = _logits(policy, [Probe(prompt, any_token, ()) for prompt in prompts])
    return (logits.double() / temperature).softmax(-1).cpu().numpy()


def p_value(probabilities: np.ndarray, counts: np.ndarray) -> float:
    """Return the p-value of (N, V) counts under (N, V) probabilities.

    It is the smallest of three tests over all N. Chi-square of single tokens shows a bias. The number of
    unlikely ones shows a truncated tail or a token from nowhere. The mean log-prob shows another temperature.
    """
    pairs = list(zip(probabilities, counts, strict=True))
    # Chi-squares of independent prompts add up, and so do their degrees of freedom and Poisson numbers.
    by_prompt = torch.tensor([_by_token(*pair) for pair in pairs]).double()
    statistic, freedom, expected, observed = by_prompt.sum(0)
    p_values = [
        # The regularized upper gamma function is the tail of chi-square, and the CDF of a Poisson number.
        torch.special.gammaincc(freedom / 2, statistic / 2) if freedom else 1.0,
        torch.special.gammaincc(observed + 1, expected),  # a Poisson number as small as this, or smaller
        torch.special.gammainc(observed, expected) if observed else 1.0,  # as large as this, or larger
        _by_logprob(pairs),
    ]
    return min(map(float, p_values))


def _by_token(probabilities: np.ndarray, counts: np.ndarray) -> tuple[float, float, float, float]:
    """Return chi-square over classes of tokens, its degrees of freedom, and two numbers of unlikely tokens.

    A likely token is a class of its own; unlikely ones are pooled with others of about the same probability.
    The two numbers are the expected and the observed draws of unlikely tokens.
    """
    # From the likeliest on, so that neighbours in the order are about as likely.
    order = np.argsort(-probabilities, kind="stable")
    expected = probabilities[order] * counts.sum()
    observed = counts[order]
    unlikely = expected < MIN_EXPECTED_DRAWS
    unlikely_draws = float(expected[unlikely].sum()), float(observed[unlikely].sum())
    # Tokens belong to one class while their expected draws begin within the same multiple of the minimum.
    classes = ((np.cumsum(expected) - expected) / MIN_EXPECTED_DRAWS).astype(np.int64)
    expected = np.bincount(classes, expected)
    observed = np.bincount(classes, observed)
    # A class that is still too small is merged with the one before it.
    classes_merged = np.maximum(np.cumsum(expected >= MIN_EXPECTED_DRAWS) - 1, 0)
    expected = np.bincount(classes_merged, expected)
    observed = np.bincount(classes_merged, observed)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return statistic, len(expected) - 1, *unlikely_draws


def _by_logprob(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """Return Bernstein's bound on the p-value of the mean log-prob of the tokens drawn.

    Log-probs are clipped at three standard deviations from their mean, since the bound needs bounded values.
    """
    deviation = 0.0
    variance = 0.0
    widest = 0.0
    for probabilities, counts in pairs:
        values = np.log(np.maximum(probabilities, np.finfo(probabilities.dtype).tiny))
        mean = float(probabilities @ values)
        width = 3 * float(probabilities @ (values - mean) ** 2) ** 0.5
        values = np.clip(values - mean, -width, width)
        # Clipping moved the mean; the sum that is bounded has to have mean 0.
        values -= probabilities @ values
        deviation += float(counts @ values)
        variance += float(counts.sum() * (probabilities @ values**2))
        widest = max(widest, 2 * width)
    if not variance:
        return 1.0
    exponent = -(deviation**2) / 2 / (variance + widest * abs(deviation) / 3)
    return min(1.0, 2 * float(np.exp(exponent)))


def _pack_probes(policy: Policy, probes: Sequence[Probe]) -> Packed:
    return pack([p.prompt for p in probes], [[p.tokens] for p in probes]).to(policy.device)


def _logits(policy: Policy, probes: Sequence[Probe]) -> Tensor:
    """Return the logits (M, V) float32 from which the probes' tokens were drawn."""
    with torch.no_grad():
        return policy.head(policy.hidden_states(_pack_probes(policy, probes))).float()
