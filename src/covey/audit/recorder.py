"""The base of writers of records, for `trl_writer.py` and for writers of your own.

torch is imported late: a writer can be imported without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from covey.audit.record import FORMAT, VERSION

if TYPE_CHECKING:
    from torch import Tensor, nn

LOOKED_AT = 4096
"""Most weights of each of a model's tensors that are compared before and after an update."""


class Recorder:
    """A record that is being written: the header, then a line whenever something happens.

    An earlier record of this name is replaced.
    """

    def __init__(self, path: Path, **header: object) -> None:
        self.path = path
        self._before: list[Tensor] = []
        path.write_text("")
        self.write(format=FORMAT, version=VERSION, **header)

    def write(self, **line: object) -> None:
        """Append a line."""
        with self.path.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")

    def weights_changed(self, parameters: Iterable[Tensor]) -> float | None:
        """Return the fraction of the trained weights that have changed since the last call; at first None."""
        trained = [p.detach() for p in parameters if p.requires_grad]
        now = [p.flatten()[:LOOKED_AT].clone() for p in trained[:: max(1, len(trained) // 32)]]
        before = self._before
        self._before = now
        if not before:
            return None
        changed = sum(int((a != b).sum()) for a, b in zip(before, now, strict=True))
        return changed / max(1, sum(len(a) for a in now))


def plain_logprobs(
    model: nn.Module,
    prompt_ids: Sequence[int],
    ids: Sequence[int],
    temperatures: Sequence[float],
    context: AbstractContextManager[object],
) -> list[list[float]]:
    """Return the log-probs of one completion at each temperature, without padding and dropout.

    ``context`` is entered for the forward pass: the trainer's autocast.
    """
    import torch

    was_training = model.training
    given = torch.tensor([[*prompt_ids, *ids]], device=next(model.parameters()).device)
    with torch.no_grad(), context:
        # The logits at a token are those of the next one.
        logits = model.eval()(input_ids=given).logits[0, len(prompt_ids) - 1 : -1].float()
    model.train(was_training)
    chosen = given[0, len(prompt_ids) :, None]
    return [numbers((logits / t).log_softmax(-1).gather(-1, chosen)[:, 0]) for t in temperatures]


def numbers(values: Tensor) -> list[float]:
    """Return a tensor of one dimension as numbers of seven digits, which is float32's precision."""
    return [float(f"{value:.7g}") for value in values.tolist()]


def facts_of(prompts: Sequence[object], eval_prompts: Sequence[object]) -> Mapping[str, int]:
    """Return the header's `data`: counts of rows and of prompts that occur twice, or in both lists."""
    train, held_out = (
        [json.dumps(p, sort_keys=True, default=str) for p in part] for part in (prompts, eval_prompts)
    )
    known = set(train)
    facts = {"rows": len(train), "distinct": len(known)}
    if held_out:
        facts |= {"eval_rows": len(held_out), "eval_in_train": sum(p in known for p in held_out)}
    return facts
