"""Memory of a run before its first step, by what takes it, and the micro-batch that fits into it."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from covey.config.methods import SAMPLES
from covey.config.schema import Config
from covey.models.logprobs import CACHED_LOGITS, CHUNK_LOGITS, FEWEST_ROWS
from covey.system.processes import size

if TYPE_CHECKING:
    from covey.models.policy import Policy

USABLE = 0.9
"""Share of the memory that a run is planned to fill."""


"""Methods whose steps sample completions."""
_PROGRAM: dict[str, int] = {}


class Shape(NamedTuple):
    """What a model's memory depends on."""

    parameters: int
    trained: int
    vocabulary: int
    layers: int
    width: int
    queries: int
    keys: int
    head: int
    inner: int
    number: int
    """Bytes of a weight and of an activation."""
    exact: bool
    """Whether the compiled operations do the work."""
    states: int = 0
    """Numbers that a layer without attention keeps of a completion, however long it is."""


def shape_of(policy: Policy) -> Shape:
    """The shape of a policy's model; of layers that differ, each size is the largest."""
    config, parameters = policy.model.config.get_text_config(), list(policy.model.parameters())
    each = list(getattr(config, "per_layer_config", (config,)))

    def widest(name: str) -> int:
        found = [getattr(layer, name, None) or 0 for layer in each]
        return max(max(n, default=0) if isinstance(n, list | tuple) else n for n in found)

    queries = widest("num_attention_heads")  # state spaces have none
    inner = widest("intermediate_size") or 4 * config.hidden_size
    return Shape(
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in policy.parameters),
        vocabulary=config.vocab_size,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        queries=queries,
        keys=(widest("num_key_value_heads") or queries) if queries else 0,
        head=widest("head_dim") or config.hidden_size // max(queries, 1),
        inner=inner,
        number=parameters[0].element_size(),
        exact=policy.decoder is not None and policy.decoder.ops.compiled,
        states=0 if queries else inner * (widest("state_size") + widest("conv_kernel")),
    )


def token_bytes(shape: Shape, recompute: bool) -> int:
    """What a packed token leaves behind in every layer for the backward pass: the residual stream twice and
    both norms, the heads before and after their rotation, the attention's output, gate, up and their product,
    4 D + 2 (H + 2 K) E + H E + 3 F numbers; with ``recompute`` what enters the layer, 2 D.
    """
    return shape.number * shape.layers * (2 * shape.width if recompute else _layer_numbers(shape))


def _layer_numbers(s: Shape) -> int:
    return 4 * s.width + 2 * (s.queries + 2 * s.keys) * s.head + s.queries * s.head + 3 * s.inner


def update_bytes(shape: Shape, tokens: int, recompute: bool) -> int:
    """An update's memory besides weights, gradient and optimizer, for a micro-batch of ``tokens``.

    Besides what the layers leave behind: what passes through one layer, forward and back, about 4 F + 6 D +
    4 (H + 2 K) E numbers a token as measured (with ``recompute`` also the layer's own, built anew), and the
    logits of a chunk, of which torch's head holds four copies.
    """
    passing = 4 * shape.inner + 6 * shape.width + 4 * (shape.queries + 2 * shape.keys) * shape.head
    if recompute:
        passing += _layer_numbers(shape)
    if shape.exact:
        logits = min(tokens, max(FEWEST_ROWS, CACHED_LOGITS // shape.vocabulary)) * shape.vocabulary
    else:
        logits = 4 * min(tokens * shape.vocabulary, CHUNK_LOGITS)
    return tokens * (token_bytes(shape, recompute) + passing * shape.number) + 4 * logits


def sampling_bytes(shape: Shape, slots: int, prompt: int, completion: int) -> int:
    """Keys and values, or states, of ``slots`` completions with prompts of ``prompt`` tokens, and the packed
    weights.
    """
    number = 4 if shape.exact else shape.number  # the compiled operations keep them in float32
    kept = 2 * (prompt + completion) * shape.keys * shape.head + shape.states
    cache = shape.layers * slots * kept * number
    packed = (shape.parameters - shape.vocabulary * shape.width) * shape.number if shape.exact else 0
    return cache + packed


class Asked(NamedTuple):
    """Tokens of the largest step of a run."""

    prompt: int
    """Of the longest prompt."""
    step: int
    """Of the largest step, each prompt once."""
    piece: int
    """Of the largest part of it that goes through the model whole: a completion with its prompt, a pair."""

    def at_once(self, tokens: int) -> int:
        """Of what goes through the model together where micro-batches are of ``tokens``."""
        return max(min(tokens, self.step), self.piece)


def asked_of(
    config: Config, prompts: Sequence[int], examples: Sequence[int], whole_groups: bool = False
) -> Asked:
    """From the lengths of the prompts, and of given examples, their prompt and all their answers.

    ``whole_groups``: a loss is one of all completions of a group, which is not split then.
    """
    longest = max(prompts, default=0)
    if examples and config.method not in SAMPLES:
        largest = sorted(examples)[-config.train.batch_size :]
        return Asked(longest, sum(largest), largest[-1])
    rollout = config.rollout
    each = longest + rollout.group_size * rollout.max_tokens
    return Asked(
        longest, rollout.prompts_per_step * each, each if whole_groups else longest + rollout.max_tokens
    )


def forecast(
    shape: Shape,
    config: Config,
    asked: Asked,
    tokens: int,
    reference: bool,
    program: int,
    critic: int = 0,
    judges: int = 0,
) -> dict[str, int]:
    """Bytes of a run by what takes them. They add up: allocators keep what sampling has taken.

    ``tokens``: the micro-batch, ``program``: what was there before, ``critic``: the parameters of a network
    for values, all of them trained, ``judges``: bytes of the reward models.
    """
    rollout = config.rollout
    rows = rollout.prompts_per_step * rollout.group_size
    if config.method not in SAMPLES:
        rows = config.eval.problems * config.eval.samples
    slots = min(rollout.max_running, rows)
    # Then a snapshot is sampled from, and what was begun is a prompt.
    lags = config.method == "rl" and rollout.staleness > 0
    # Float32 copies of low-precision weights; weights that are split are such, beside a whole copy.
    masters = 4 if shape.number < 4 and size() == 1 else 0
    moments = {"adamw": 8, "adamw_8bit": 2}[config.train.optimizer]
    learns = config.method == "rl" or config.method not in SAMPLES
    return {
        "program": program,
        "weights": shape.parameters * (shape.number + (4 // size() if size() > 1 else 0)),
        "reference": shape.parameters * shape.number if reference else 0,
        "snapshot": shape.trained * shape.number if lags else 0,
        "critic": critic * (shape.number + 4 + moments + masters),
        "reward models": judges,
        "gradient": shape.trained * 4 * learns // size(),
        "optimizer": shape.trained * (moments * learns + masters) // size(),
        "sampling": sampling_bytes(shape, slots, asked.prompt, (1 + lags) * rollout.max_tokens),
        "update": update_bytes(shape, asked.at_once(tokens), config.train.recompute_layers) * learns,
    }


def planned_tokens(roles: Mapping[str, int], shape: Shape, config: Config, asked: Asked, there: int) -> int:
    """The micro-batch in tokens whose update fits into ``there`` bytes: the configured one, or halved.

    Below the longest prompt nothing is gained: it goes through whole. Below a completion of full length
    there is, because most of them end earlier; whether one of those fits is what the forecast says.
    """
    others = sum(roles.values()) - roles["update"]
    tokens, recompute = config.train.tokens_per_micro_batch, config.train.recompute_layers
    while tokens > max(1, asked.prompt):
        if others + update_bytes(shape, min(tokens, asked.step), recompute) <= USABLE * there:
            break
        tokens //= 2
    return tokens


def program_bytes(device: torch.device, models: int) -> int:
    """Program and libraries: measured once for all stages of a process, less the models loaded until then."""
    return _PROGRAM.setdefault(device.type, max(0, taken(device) - models))


def taken(device: torch.device) -> int:
    """The most bytes this process has taken so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
