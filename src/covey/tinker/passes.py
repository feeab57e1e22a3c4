"""The computations for requests: losses with their gradients, completions, log-probs of prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from covey.models.packing import pack
from covey.models.policy import Policy
from covey.rng import key
from covey.sampling.base import Request, SamplingParams
from covey.tinker.adapters import Adapter, AdapterWeights, Base
from covey.tinker.losses import DatumLoss, loss_of
from covey.tinker.wire import Datum, ForwardBackward, write_forward_backward, write_samples
from covey.types import Completion
from covey_verify.errors import DataError

TARGETS = "target_tokens"
PER_TOKEN_SETTINGS = ("clip_low_threshold", "clip_high_threshold")
"""Settings of a loss for which a datum may have an array, with a value per token."""


class _Example(NamedTuple):
    """A datum that has been checked, with the settings of the loss."""

    tokens: np.ndarray
    """(N,) int64, read by the model."""
    inputs: Mapping[str, Tensor]
    """Arrays of the datum and settings of the loss, by name."""


def forward_backward(base: Base, adapter: Adapter, call: ForwardBackward) -> bytes:
    """Compute a loss, and add its gradient to the adapter's gradient; if anything fails, add nothing.

    Raises DataError if the data do not fit the loss.
    """
    loss, settings = loss_of(call.loss_fn, call.config)
    examples = [
        _Example(d.tokens, settings | _check_datum(base.policy, f"datum {i}", d, loss))
        for i, d in enumerate(call.data)
    ]
    missing = [name for name in loss.settings if any(name not in e.inputs for e in examples)]
    if missing:
        raise DataError(f"loss_fn_config: {call.loss_fn} needs {' and '.join(missing)}")
    policy = base.mount(adapter.weights).policy
    outputs: list[dict[str, np.ndarray]] = []
    total = 0.0
    try:
        for part in _split_batches(examples, base.tokens):
            with torch.set_grad_enabled(not call.forward_only):
                logprobs = logprobs_of(policy, [(e.tokens, e.inputs[TARGETS]) for e in part])
                losses = [loss.function(x, e.inputs) for x, e in zip(logprobs, part, strict=True)]
                summed = torch.stack(losses).sum()
            total += float(summed.detach())
            if not np.isfinite(total):
                raise DataError(f"{call.loss_fn}: the loss is {total}; nothing was added to the gradient")
            if not call.forward_only:
                summed.backward()
            outputs += [{"logprobs": x.detach().cpu().numpy()} for x in logprobs]
        if not call.forward_only:
            _add_gradient(policy, adapter)
    finally:
        # The adapter has its own gradients; the policy's are only scratch space.
        for parameter in policy.parameters:
            parameter.grad = None
    return write_forward_backward(outputs, total)


def _add_gradient(policy: Policy, adapter: Adapter) -> None:
    for computed, parameter in zip(policy.parameters, adapter.parameters, strict=True):
        if computed.grad is not None:
            parameter.grad = computed.grad if parameter.grad is None else parameter.grad + computed.grad


def _check_datum(policy: Policy, where: str, datum: Datum, loss: DatumLoss) -> dict[str, Tensor]:
    """Return the arrays of a datum as tensors. Raises DataError."""
    _check_names(where, datum, loss)
    targets = datum.inputs[TARGETS]
    if targets.ndim not in (1, 2) or len(targets) != len(datum.tokens) or not targets.size:
        raise DataError(
            f"{where}: {TARGETS} has the shape {targets.shape}, which should be {len(datum.tokens)} or "
            f"{len(datum.tokens)} x K: one or K for each token of model_input, at least one"
        )
    if targets.ndim == 2 and policy.decoder is None:
        raise DataError(f"{where}: {TARGETS}: this architecture has one target for each token here")
    for name, array in datum.inputs.items():
        if array.shape != targets.shape:
            raise DataError(f"{where}: {name} has the shape {array.shape}, {TARGETS} {targets.shape}")
        if not np.isfinite(array).all():
            raise DataError(f"{where}: {name} has a value that is not finite")
    check_tokens(policy, where, datum.tokens)
    _check_ids(policy, f"{where}: {TARGETS}", targets)
    tensors = {name: torch.from_numpy(array.astype(np.float32)) for name, array in datum.inputs.items()}
    tensors[TARGETS] = torch.from_numpy(targets.astype(np.int64))
    return {name: tensor.to(policy.device) for name, tensor in tensors.items()}


def _check_names(where: str, datum: Datum, loss: DatumLoss) -> None:
    expected = (TARGETS, *loss.needs)
    optional = [name for name in PER_TOKEN_SETTINGS if name in loss.settings]
    missing = [name for name in expected if name not in datum.inputs]
    unread = [name for name in datum.inputs if name not in (*expected, *optional)]
    complaint = f"has {', '.join(unread)}, which it would not read" if unread else ""
    if missing:
        complaint = f"lacks {', '.join(missing)}"
    if complaint:
        raise DataError(f"{where}: this loss reads {', '.join(expected)}; the datum {complaint}")


def check_tokens(policy: Policy, where: str, tokens: np.ndarray) -> None:
    """Raise DataError unless the model can read these tokens."""
    if not 0 < len(tokens) <= policy.context:
        raise DataError(f"{where}: {len(tokens)} tokens; the model reads 1 to {policy.context}")
    _check_ids(policy, where, tokens)


def _check_ids(policy: Policy, where: str, ids: np.ndarray) -> None:
    if ids.min() < 0 or ids.max() >= policy.embedded:
        raise DataError(f"{where}: ids are 0 to {policy.embedded - 1}, not {ids.min()} to {ids.max()}")


def logprobs_of(policy: Policy, sequences: Sequence[tuple[np.ndarray, Tensor]]) -> list[Tensor]:
    """Return the log-probs of the targets of each sequence: (N,), or (N, K) for K targets per token."""
    # `pack` never feeds the last token of a completion to the model, so each sequence gets one more, 0.
    packed = pack(
        [tokens[:1] for tokens, _ in sequences],
        [[np.concatenate([tokens[1:], np.zeros(1, np.int64)])] for tokens, _ in sequences],
    ).to(policy.device)
    # A token with K targets is the source of K predictions.
    times = torch.cat([t.new_full((len(t),), t[0].numel()) for _, t in sequences])
    targets = torch.cat([t.flatten() for _, t in sequences])
    packed = replace(packed, sources=packed.sources.repeat_interleave(times), targets=targets)
    logprobs = policy.token_outputs(packed, 1.0).logprobs.split([t.numel() for _, t in sequences])
    return [x.view(t.shape) for x, (_, t) in zip(logprobs, sequences, strict=True)]


def _split_batches(examples: Sequence[_Example], max_tokens: int) -> Iterator[list[_Example]]:
    """Yield successive batches with at most ``max_tokens`` tokens, but at least one example each."""
    part: list[_Example] = []
    for example in examples:
        if part and sum(len(e.tokens) for e in [*part, example]) > max_tokens:
            yield part
            part = []
        part.append(example)
    if part:
        yield part


@dataclass(frozen=True, eq=False)
class DrawRequest:
    """A request for completions."""

    weights: Callable[[], AdapterWeights]
    """Returns the weights, and loads them first if necessary."""
    prompt: np.ndarray
    """(P,) int64."""
    count: int
    seed: int
    params: SamplingParams
    logprob_tokens: int | None
    """Number of tokens at the end of the prompt whose log-probs are requested; None if there are none."""

    @property
    def pass_key(self) -> tuple[object, ...]:
        """A key that is equal for requests that can be sampled together."""
        return (self.weights, replace(self.params, max_tokens=0))


def draw_completions(base: Base, draws: Sequence[DrawRequest]) -> list[bytes]:
    """Sample requests with the same ``pass_key`` together, and return the answer to each."""
    sampler = base.mount(draws[0].weights())
    # (prompt, max_tokens) -> its (request, completion) pairs, so that the sampler reads each prompt once.
    owners: dict[tuple[bytes, int], list[tuple[int, int]]] = defaultdict(list)
    for number, draw in enumerate(draws):
        pairs = [(number, i) for i in range(draw.count)]
        owners[draw.prompt.tobytes(), draw.params.max_tokens] += pairs
    requests = []
    for (prompt, max_tokens), pairs in owners.items():
        streams = [key(draws[number].seed, "tinker", i) for number, i in pairs]
        requests.append(Request(np.frombuffer(prompt, np.int64), streams, max_tokens=max_tokens))
    params = replace(draws[0].params, max_tokens=max(max_tokens for _, max_tokens in owners))
    pairs_of_request = list(owners.values())
    completions: dict[tuple[int, int], Completion] = {}
    for sampled in sampler.sample(requests, params):
        completions[pairs_of_request[sampled.request][sampled.sample]] = sampled.completion
    return [
        write_samples(
            [completions[number, i] for i in range(draw.count)], _prompt_logprobs(sampler.policy, draw)
        )
        for number, draw in enumerate(draws)
    ]


@torch.no_grad()
def _prompt_logprobs(policy: Policy, draw: DrawRequest) -> np.ndarray | None:
    """Return (P,) log-probs of the prompt's tokens; NaN for the first, and for those not requested."""
    if draw.logprob_tokens is None:
        return None
    logprobs = np.full(len(draw.prompt), np.nan, np.float32)
    if len(draw.prompt) > 1:
        targets = torch.from_numpy(draw.prompt[1:]).to(policy.device)
        logprobs[1:] = logprobs_of(policy, [(draw.prompt[:-1], targets)])[0].cpu().numpy()
        logprobs[: len(logprobs) - draw.logprob_tokens] = np.nan
    return logprobs
