"""The memory forecast of a run, by component, and the micro-batch size that fits."""

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
"""Fraction of the memory that a run is planned to fill."""
_PROGRAM: dict[str, int] = {}
"""Kind of device -> bytes of program and libraries, measured once."""


class Shape(NamedTuple):
    """The sizes that a model's memory depends on."""

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
    """Numbers that a layer without attention keeps for a completion of any length."""


def shape_of(policy: Policy) -> Shape:
    """Return the shape of a policy's model; if layers differ, each size is the largest one."""
    config = policy.model.config.get_text_config()
    parameters = list(policy.model.parameters())
    # Some models give each layer a config of its own.
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
    """Return the bytes that all layers keep of a packed token for the backward pass.

    A layer keeps the residual stream twice and both norms, the heads before and after their rotation, the
    attention's output, gate, up and their product: 4 D + 2 (H + 2 K) E + H E + 3 F numbers. With
    ``recompute`` it keeps its input, 2 D. D is ``width``, H ``queries``, K ``keys``, E ``head``, F ``inner``.
    """
    return shape.number * shape.layers * (2 * shape.width if recompute else _layer_numbers(shape))


def _layer_numbers(s: Shape) -> int:
    return 4 * s.width + 2 * (s.queries + 2 * s.keys) * s.head + s.queries * s.head + 3 * s.inner


def update_bytes(shape: Shape, tokens: int, recompute: bool) -> int:
    """Return an update's bytes besides weights, gradient and optimizer, for a micro-batch of ``tokens``.

    These are the layers' ``token_bytes``; the temporaries of one layer, forward and back, about 4 F + 6 D +
    4 (H + 2 K) E numbers a token as measured (with ``recompute`` also the layer's own, computed again); and
    the logits of a chunk, of which torch's head holds four copies.
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
    """Return the bytes of the cache for ``slots`` completions, and of the packed weights.

    The cache holds keys and values of ``prompt`` + ``completion`` tokens, or states.
    """
    number = 4 if shape.exact else shape.number  # the compiled operations keep them in float32
    kept = 2 * (prompt + completion) * shape.keys * shape.head + shape.states
    cache = shape.layers * slots * kept * number
    # The compiled decoder packs all weights but the embedding's.
    packed = (shape.parameters - shape.vocabulary * shape.width) * shape.number if shape.exact else 0
    return cache + packed


class LargestStep(NamedTuple):
    """Tokens of the largest step of a run."""

    prompt: int
    """Tokens of the longest prompt."""
    step: int
    """Tokens of the largest step, each prompt once."""
    piece: int
    """Tokens of the largest part that goes through the model whole: a completion with its prompt, a pair."""

    def at_once(self, tokens: int) -> int:
        """Return the tokens in the model at once if micro-batches have ``tokens``."""
        return max(min(tokens, self.step), self.piece)


def largest_step(
    config: Config, prompts: Sequence[int], examples: Sequence[int], whole_groups: bool = False
) -> LargestStep:
    """Compute ``LargestStep`` from the lengths of prompts, and of given examples (prompt and all answers).

    ``whole_groups``: the loss needs all completions of a group, so that a group is not split.
    """
    longest = max(prompts, default=0)
    if examples and config.method not in SAMPLES:
        # The worst case: the longest examples all in one batch.
        largest = sorted(examples)[-config.train.batch_size :]
        return LargestStep(longest, sum(largest), largest[-1])
    rollout = config.rollout
    each = longest + rollout.group_size * rollout.max_tokens
    return LargestStep(
        longest, rollout.prompts_per_step * each, each if whole_groups else longest + rollout.max_tokens
    )


def forecast(
    shape: Shape,
    config: Config,
    largest: LargestStep,
    tokens: int,
    reference: bool,
    program: int,
    critic: int = 0,
    judges: int = 0,
) -> dict[str, int]:
    """Forecast the bytes of a run by component. They add up: allocators keep the memory of sampling.

    ``tokens``: size of the micro-batch; ``program``: bytes of program and libraries; ``critic``: parameters
    of a value network, all of them trained; ``judges``: bytes of the reward models.
    """
    rollout = config.rollout
    rows = rollout.prompts_per_step * rollout.group_size
    if config.method not in SAMPLES:
        rows = config.eval.problems * config.eval.samples
    slots = min(rollout.max_running, rows)
    # The sampler then has a snapshot of the weights, and an unfinished completion continues as a prompt.
    lags = config.method == "rl" and rollout.staleness > 0
    # Float32 copies of low-precision weights; split weights are float32 themselves, besides a whole copy.
    masters = 4 if shape.number < 4 and size() == 1 else 0
    # Bytes per trained weight: two moments, in float32 or in 8 bits.
    moments = {"adamw": 8, "adamw_8bit": 2}[config.train.optimizer]
    # Methods that only sample have no gradient, optimizer or update.
    learns = config.method == "rl" or config.method not in SAMPLES
    return {
        "program": program,
        # Split: this process' float32 part besides a whole copy.
        "weights": shape.parameters * (shape.number + (4 // size() if size() > 1 else 0)),
        "reference": shape.parameters * shape.number if reference else 0,
        "snapshot": shape.trained * shape.number if lags else 0,
        "critic": critic * (shape.number + 4 + moments + masters),
        "reward models": judges,
        "gradient": shape.trained * 4 * learns // size(),
        "optimizer": shape.trained * (moments * learns + masters) // size(),
        "sampling": sampling_bytes(shape, slots, largest.prompt, (1 + lags) * rollout.max_tokens),
        "update": update_bytes(shape, largest.at_once(tokens), config.train.recompute_layers) * learns,
    }


def planned_tokens(
    roles: Mapping[str, int], shape: Shape, config: Config, largest: LargestStep, there: int
) -> int:
    """Return the micro-batch in tokens whose update fits into ``there`` bytes, halving the configured one.

    Sizes below the longest prompt save nothing: it goes through whole. Sizes below a completion of full
    length do, because most completions end earlier; the forecast says whether a full one fits.
    """
    others = sum(roles.values()) - roles["update"]
    tokens = config.train.tokens_per_micro_batch
    recompute = config.train.recompute_layers
    while tokens > max(1, largest.prompt):
        if others + update_bytes(shape, min(tokens, largest.step), recompute) <= USABLE * there:
            break
        tokens //= 2
    return tokens


def program_bytes(device: torch.device, models: int) -> int:
    """Return the bytes of program and libraries, measured once per process; ``models`` is subtracted."""
    return _PROGRAM.setdefault(device.type, max(0, peak_bytes(device) - models))


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that this process has taken so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
