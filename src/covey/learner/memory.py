"""The memory forecast of a run, by component, and the sizes of micro-batches and sampling that fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from covey.config.methods import SAMPLING_METHODS
from covey.config.schema import Config
from covey.models.logprobs import CHUNK_LOGITS, chunk_logits, rows_at_once
from covey.sampling.cache import KEPT_FRACTION, PREFILL_TOKENS, cache_length
from covey.system.allocator import give_back_freed_memory
from covey.system.device import device_memory, present_bytes
from covey.system.processes import world_size

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from covey.models.policy import Policy

USABLE_FRACTION = 0.9
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
    """Query heads."""
    keys: int
    """Key/value heads."""
    head: int
    """Width of a head."""
    inner: int
    """Width of the feed-forward layers."""
    bytes_each: int
    """Bytes of a weight and of an activation."""
    compiled: bool
    """Whether the compiled operations do the work."""
    state_numbers: int = 0
    """Numbers that a layer without attention keeps for a completion of any length."""
    chunk_logits: int = CHUNK_LOGITS
    """Logits that torch's head has in memory at once."""
    float32_numbers: int = 0
    """Numbers that a layer of a bfloat16 model keeps of a token in float32, besides those in bfloat16."""
    largest_kept_cache: int = 0
    """Most bytes of a cache that stays between rollouts, on a GPU."""
    packed_bytes: int = 0
    """Bytes of the copies of weights that the compiled operations sample from."""


def shape_of(policy: Policy) -> Shape:
    """Return the shape of a policy's model; if layers differ, each size is the largest one."""
    config = policy.model.config.get_text_config()
    parameters = list(policy.model.parameters())
    widest = partial(_widest, config)
    compiled = policy.decoder is not None and policy.decoder.ops.compiled
    queries = widest("num_attention_heads")  # state spaces have none
    inner = widest("intermediate_size") or 4 * config.hidden_size
    bytes_each = parameters[0].element_size()
    on_gpu = policy.device.type == "cuda"
    wide_numbers = count_float32_numbers(
        config.hidden_size, inner, bytes_each, policy.adapters_apart, compiled=compiled
    )
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
        bytes_each=bytes_each,
        compiled=compiled,
        state_numbers=0 if queries else inner * (widest("state_size") + widest("conv_kernel")),
        chunk_logits=chunk_logits(policy.device),
        float32_numbers=wide_numbers,
        largest_kept_cache=int(KEPT_FRACTION * device_memory(policy.device)) if on_gpu else 0,
        packed_bytes=policy.packed_bytes,
    )


def _widest(config: PretrainedConfig, name: str) -> int:
    """Return the largest size of this name in the layers of a model; 0 without any."""
    sizes = list[int]()
    # Some models give each layer a config of its own.
    for layer in getattr(config, "per_layer_config", (config,)):
        size = getattr(layer, name, None) or 0
        # A config may list the sizes of its layers.
        sizes += size if isinstance(size, list | tuple) else [size]
    return max(sizes, default=0)


def count_float32_numbers(
    width: int, inner: int, bytes_each: int, adapters_apart: bool, compiled: bool = False
) -> int:
    """Return how many numbers a layer of a bfloat16 model keeps of a token in float32.

    Plain torch keeps the residual stream twice, 2 D. peft converts the inputs of seven adapters: 6 D + F.
    """
    if bytes_each == 4:  # all of it is float32 anyway
        return 0
    stream = 0 if compiled else 2 * width
    inputs = 6 * width + inner if adapters_apart else 0
    return stream + inputs


def token_bytes(shape: Shape, recompute: bool) -> int:
    """Return the bytes that all layers keep of a packed token for the backward pass.

    A layer keeps the residual stream twice and both norms, the heads before and after their rotation, the
    attention's output, gate, up and their product: 4 D + 2 (H + 2 K) E + H E + 3 F numbers. With
    ``recompute`` it keeps its input, 2 D. D is ``width``, H ``queries``, K ``keys``, E ``head``, F ``inner``.
    A bfloat16 model keeps ``float32_numbers`` more, of 4 bytes each.
    """
    if recompute:
        return shape.layers * shape.bytes_each * 2 * shape.width
    return shape.layers * (shape.bytes_each * _layer_numbers(shape) + 4 * shape.float32_numbers)


def _layer_numbers(s: Shape) -> int:
    return 4 * s.width + 2 * (s.queries + 2 * s.keys) * s.head + s.queries * s.head + 3 * s.inner


def update_bytes(shape: Shape, tokens: int, recompute: bool) -> int:
    """Return an update's bytes besides weights, gradient and optimizer, for a micro-batch of ``tokens``.

    These are the layers' ``token_bytes``; the temporaries of one layer, forward and back, about 4 F + 6 D +
    4 (H + 2 K) E numbers a token as measured (with ``recompute`` also the layer's own, computed again); and
    the logits of a chunk, of which torch's head holds four copies.
    """
    temporaries = 4 * shape.inner + 6 * shape.width + 4 * (shape.queries + 2 * shape.keys) * shape.head
    if recompute:
        temporaries += _layer_numbers(shape)
    if shape.compiled:
        logits = rows_at_once(tokens, shape.vocabulary) * shape.vocabulary
    else:
        logits = 4 * min(tokens * shape.vocabulary, shape.chunk_logits)
    bytes_per_token = token_bytes(shape, recompute) + temporaries * shape.bytes_each
    return tokens * bytes_per_token + 4 * logits


class Load(NamedTuple):
    """The completions of a step, or of an evaluation."""

    requests: int
    """Number of prompts."""
    completions: int


def sampling_bytes(shape: Shape, load: Load, running: int, prompt: int, completion: int) -> int:
    """Return the bytes that sampling takes with at most ``running`` completions at once.

    Those are the cache of keys and values, or states; with compiled operations, which share a prompt's keys
    among its completions, also packed weights; the keys and values of the prompts that go through the model
    at once, with one layer's temporaries; and three copies of the logits.
    """
    slots = min(running, load.completions)
    pages = min(slots, load.requests) + 1
    number_bytes = 4 if shape.compiled else shape.bytes_each  # the compiled operations keep them in float32
    bytes_per_token = 2 * shape.keys * shape.head * shape.layers * number_bytes
    cache_bytes = shape.layers * slots * shape.state_numbers * number_bytes
    if shape.compiled:
        positions = pages * cache_length(prompt) + slots * cache_length(completion)
        cache_bytes += bytes_per_token * positions + shape.packed_bytes
    else:
        cache_bytes += bytes_per_token * slots * cache_length(prompt + completion)
    prefilled = min(PREFILL_TOKENS, (pages - 1) * prompt)
    temporaries = 3 * shape.inner + 2 * shape.width + 2 * (shape.queries + 2 * shape.keys) * shape.head
    prefill_bytes = prefilled * (bytes_per_token + temporaries * shape.bytes_each)
    logits_bytes = 3 * 4 * slots * shape.vocabulary
    return cache_bytes + prefill_bytes + logits_bytes


class RunParts(NamedTuple):
    """The parts of a run besides its policy that take memory."""

    program: int = 0
    """Bytes of program and libraries."""
    reference: bool = False
    """Whether the reference has weights of its own."""
    critic: int = 0
    """Parameters of a value network, all of them trained."""
    reward_models: int = 0
    """Bytes of the reward models."""


POLICY_ALONE = RunParts()


class LargestStep(NamedTuple):
    """Tokens of the largest optimizer step of a run, and what is sampled."""

    prompt: int
    """Tokens of the longest prompt."""
    step: int
    """Tokens of the largest optimizer step, each prompt once."""
    piece: int
    """Tokens of the largest part that goes through the model whole: a completion with its prompt, a pair."""
    loads: tuple[Load, ...] = ()
    """The sampling of a step, and the sampling of an evaluation."""

    def at_once(self, tokens: int) -> int:
        """Return the tokens in the model at once if micro-batches have ``tokens``."""
        return max(min(tokens, self.step), self.piece)


def largest_step(
    config: Config,
    prompts: Sequence[int],
    examples: Sequence[int],
    whole_groups: bool = False,
    held_out: int = 0,
) -> LargestStep:
    """Compute ``LargestStep`` from the lengths of prompts, and of given examples (prompt and all answers).

    ``whole_groups``: the loss needs all completions of a group, so that a group is not split. ``held_out``:
    number of problems to evaluate on.
    """
    longest = max(prompts, default=0)
    rollout = config.rollout
    evaluated = min(config.eval.problems, held_out)
    loads = [Load(evaluated, evaluated * (config.eval.samples + 1))] if evaluated else []
    if examples and config.method not in SAMPLING_METHODS:
        # The worst case: the longest examples all in one batch.
        largest = sorted(examples)[-config.train.batch_size :]
        return LargestStep(longest, sum(largest), largest[-1], tuple(loads))
    loads.append(Load(rollout.prompts_per_step, rollout.completions_per_step))
    group_tokens = longest + rollout.group_size * rollout.max_tokens
    # Groups are dealt out to the optimizer steps.
    groups = -(-rollout.prompts_per_step // config.train.updates_per_batch)
    piece = group_tokens if whole_groups else longest + rollout.max_tokens
    return LargestStep(longest, groups * group_tokens, piece, tuple(loads))


def forecast(
    shape: Shape,
    config: Config,
    largest: LargestStep,
    tokens: int,
    running: int,
    parts: RunParts = POLICY_ALONE,
) -> dict[str, int]:
    """Forecast the bytes of a run by component, at its peak: while it samples, updates, or merges adapters.

    Each of these phases gives its memory back before the next one, so that the largest of them counts and the
    others are 0; but a small cache stays on a GPU. ``tokens``: size of the micro-batch; ``running``:
    completions sampled at once.
    """
    prefetches = _prefetches(config)
    # Float32 copies of low-precision weights; split weights are float32 themselves, besides a whole copy.
    masters = 4 if shape.bytes_each < 4 and world_size() == 1 else 0
    # Bytes per trained weight: two moments, in float32 or in 8 bits.
    moments = {"adamw": 8, "adamw_8bit": 2}[config.train.optimizer]
    # Split over processes: this one's float32 part besides a whole copy.
    part_bytes = 4 // world_size() if world_size() > 1 else 0
    return {
        "program": parts.program,
        "weights": shape.parameters * (shape.bytes_each + part_bytes),
        "reference": shape.parameters * shape.bytes_each if parts.reference else 0,
        "snapshot": shape.trained * shape.bytes_each if prefetches else 0,
        "critic": parts.critic * (shape.bytes_each + 4 + moments + masters),
        "reward models": parts.reward_models,
        "optimizer": shape.trained * ((moments if _learns(config) else 0) + masters) // world_size(),
        **_largest_phase(shape, config, largest, tokens, running),
    }


def _prefetches(config: Config) -> bool:
    """Whether sampling runs ahead of the updates; the sampler then has a snapshot of the weights."""
    return config.method == "rl" and config.rollout.staleness > 0


def _learns(config: Config) -> bool:
    """Whether there are a gradient, an optimizer and updates; methods that only sample have none."""
    return config.method == "rl" or config.method not in SAMPLING_METHODS


def _largest_phase(
    shape: Shape, config: Config, largest: LargestStep, tokens: int, running: int
) -> dict[str, int]:
    """Forecast the bytes of sampling, of an update and of merging; the largest counts, the others are 0."""
    prefetches = _prefetches(config)
    # An unfinished completion continues as a prompt then, so a sequence may have twice the tokens.
    longest = config.rollout.max_tokens * (2 if prefetches else 1)
    loads = [sampling_bytes(shape, load, running, largest.prompt, longest) for load in largest.loads]
    sampling = max(loads, default=0)
    keeps_cache = prefetches or sampling <= shape.largest_kept_cache
    update = _update_phase(shape, config, largest, tokens) if _learns(config) else {}
    merge = {} if config.lora is None else {"merged": shape.parameters * shape.bytes_each}
    phases = [{"sampling": sampling}, {**update, "sampling": sampling if keeps_cache else 0}, merge]
    peak = max(phases, key=lambda phase: sum(phase.values()))
    return {name: peak.get(name, 0) for name in ("gradient", "sampling", "update", "merged")}


def _update_phase(shape: Shape, config: Config, largest: LargestStep, tokens: int) -> dict[str, int]:
    """Forecast the bytes of the gradient and of the activations in an update."""
    tokens_at_once = largest.at_once(tokens)
    update = update_bytes(shape, tokens_at_once, config.train.recompute_layers)
    gradient = shape.trained * 4 // world_size()
    if largest.step <= tokens_at_once:
        # With one micro-batch the gradient grows as the activations shrink. Only the head's
        # gradient is there before.
        head_gradient = 4 * shape.vocabulary * shape.width
        update = max(0, update - max(0, gradient - head_gradient))
    return {"gradient": gradient, "update": update}


Expectation = Callable[[int, int], dict[str, int]]
"""Returns ``forecast`` for a micro-batch in tokens and a number of completions at once."""


def fitting_sizes(
    expect: Expectation, config: Config, largest: LargestStep, available: int
) -> tuple[int, int]:
    """Return the micro-batch and completions at once that fit into ``available`` bytes, halving both.

    Micro-batches below the longest prompt save nothing: it goes through whole. Sizes below a completion of
    full length do, because most completions end earlier; the forecast says whether a full one fits.
    """
    tokens = config.train.tokens_per_micro_batch
    running = config.rollout.max_running

    def fits(tokens: int, running: int) -> bool:
        return sum(expect(tokens, running).values()) <= USABLE_FRACTION * available

    # Each is halved while the other is as small as it can be, so that only its own phase decides.
    smallest = max(1, largest.prompt)
    while running > 1 and not fits(smallest, running):
        running //= 2
    while tokens > smallest and not fits(tokens, 1):
        tokens //= 2
    return tokens, running


def program_bytes(device: torch.device, tensors: int) -> int:
    """Return the bytes of program and libraries, measured once a process; ``tensors`` bytes do not count.

    Memory that loading a model has used and freed does not count either.
    """
    if device.type not in _PROGRAM:
        give_back_freed_memory()
        _PROGRAM[device.type] = max(0, present_bytes(device) - tensors)
    return _PROGRAM[device.type]
