"""The store of completions that are drawn ahead of their step: they outlive the process that drew them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from covey.sampling.base import Request, SampledCompletion, Sampler, SamplingParams
from covey.types import Completion


class CompletionStore(Protocol):
    """A store in which finished completions outlive the process."""

    def find(self, ticket: int, request: Request, sample: int, params: SamplingParams) -> Completion | None:
        """Return the completion that an earlier process has drawn for this request, if there is one."""

    def add(self, ticket: int, request: Request, params: SamplingParams, sampled: SampledCompletion) -> None:
        """Keep a completion until it has been trained on and a checkpoint says so."""
        ...

    def begin_step(self, step: int, cursor: int) -> None:
        """Note that a step begins and that earlier steps took the tickets below ``cursor``."""
        ...


def stored_or_sampled(
    sampler: Sampler,
    store: CompletionStore,
    tickets: Sequence[int],
    requests: Sequence[Request],
    params: SamplingParams,
) -> Iterator[SampledCompletion]:
    """Yield as ``sampler.sample``, but take completions of an earlier process from the store."""
    # (number of a request, its samples that are still to be drawn).
    incomplete: list[tuple[int, list[int]]] = []
    for number, (ticket, request) in enumerate(zip(tickets, requests, strict=True)):
        missing = []
        for sample in range(len(request.streams)):
            stored = store.find(ticket, request, sample, params)
            if stored is None:
                missing.append(sample)
            else:
                yield SampledCompletion(number, sample, stored)
        if missing:
            incomplete.append((number, missing))
    remaining = [
        replace(requests[n], streams=[requests[n].streams[s] for s in missing]) for n, missing in incomplete
    ]
    for answer in sampler.sample(remaining, params):
        number, missing = incomplete[answer.request]
        # Back from the numbering of what was left to that of the requests.
        renumbered = answer._replace(request=number, sample=missing[answer.sample])
        store.add(tickets[number], requests[number], params, renumbered)
        yield renumbered
