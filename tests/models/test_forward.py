"""Our forward computes what the Hugging Face model computes, packed or not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Phi3Config, PreTrainedModel, Qwen3ForCausalLM

from covey.config.load import load_config
from covey.config.schema import Config, Lora
from covey.models.forward import is_supported
from covey.models.load import load_policy, speed_notes, with_lora
from covey.models.ops import TorchOps, soft_cap
from covey.models.packing import pack
from covey.models.policy import Policy, save_policy
from covey.models.rotary import longest_stable_rotation
from covey.rng import key
from covey.sampling.base import Request, SamplingParams
from covey.sampling.local import LocalSampler
from covey_verify.errors import ConfigError
from tests.conftest import (
    CONFIGS,
    OTHERS,
    OURS,
    SMALL,
    WIDE,
    full_tokenizer,
    policy_of,
    random_prompts,
    sharpened,
)


def reference_logprobs(model: torch.nn.Module, prompt: np.ndarray, answer: np.ndarray) -> torch.Tensor:
    """Log-probs of the answer from one plain unpadded forward of the Hugging Face model."""
    tokens = torch.tensor(np.concatenate((prompt, answer)))[None]
    logits = model(tokens).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize("name", OURS)
def test_logits_equal_those_of_the_hugging_face_model(name: str) -> None:
    model = sharpened(CONFIGS[name])
    policy = Policy(model, policy_of("qwen3").tokenizer)
    assert policy.decoder is not None
    tokens = random_prompts(40)[0]
    packed = pack([tokens[:1]], [[np.append(tokens[1:], 7)]])
    with torch.no_grad():
        ours = policy.head(policy.hidden_states(packed))
        theirs = model(torch.tensor(tokens)[None]).logits[0]
    assert float(theirs.std()) > 0.5
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", OURS + OTHERS)
def test_shared_prompts_of_ragged_groups_score_like_single_sequences(name: str) -> None:
    policy = policy_of(name)
    prompts = random_prompts(3, 17, 1)
    # A completion may be without tokens; it predicts nothing, and moves no other prediction.
    answers = [[*random_prompts(9, 1, 30, seed=1), random_prompts(0)[0]], [], random_prompts(2, 11, seed=2)]
    answers[2].insert(1, random_prompts(0)[0])
    packed = pack(prompts, answers)
    logprobs = packed.unpack(policy.token_outputs(packed, temperature=1.0).logprobs)
    row = 0
    for prompt, group in zip(prompts, answers, strict=True):
        for answer in group:
            expected = reference_logprobs(policy.model, prompt, answer)
            torch.testing.assert_close(logprobs[row, : len(answer)], expected, atol=1e-5, rtol=1e-5)
            assert not logprobs[row, len(answer) :].any()
            row += 1
    assert row == len(logprobs)


@pytest.mark.parametrize("name", [*OURS, *OTHERS])
def test_gradient_is_that_of_single_sequences(name: str) -> None:
    policy = policy_of(name)
    prompts, answers = random_prompts(5, 8), [random_prompts(6, 3, seed=1), random_prompts(4, seed=2)]
    policy.token_outputs(pack(prompts, answers), temperature=1.0).logprobs.sum().backward()
    trained = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    ours = {n: p.grad.clone() for n, p in trained.items()}
    policy.model.zero_grad()
    for prompt, group in zip(prompts, answers, strict=True):
        for answer in group:
            reference_logprobs(policy.model, prompt, answer).sum().backward()
    for n, p in trained.items():
        scale = float(p.grad.abs().max())
        torch.testing.assert_close(ours[n] / scale, p.grad / scale, atol=1e-5, rtol=0, msg=n)


ORIGINAL = {"original_max_position_embeddings": 48}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    **ORIGINAL,
    "short_factor": [1.0] * 16,
    "long_factor": [float(n) for n in range(1, 17)],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
BY_LENGTH = {
    "longrope": Phi3Config(**WIDE, **ORIGINAL, sliding_window=None, rope_parameters=LONGROPE),
    "dynamic": LlamaConfig(**SMALL | {"max_position_embeddings": 48}, head_dim=32, rope_parameters=DYNAMIC),
}


@pytest.mark.parametrize("name", BY_LENGTH)
def test_what_a_place_is_turned_by_does_not_follow_other_sequences(name: str) -> None:
    policy = Policy(sharpened(BY_LENGTH[name]), policy_of("qwen3").tokenizer)
    assert policy.context == 48
    assert ("longrope: long" in policy.context_in_words) == (name == "longrope")
    (prompt, answer), longer = random_prompts(9, 6), random_prompts(31)[0]

    def scored() -> torch.Tensor:
        return policy.token_outputs(pack([prompt], [[answer]]), 1.0).logprobs.detach()

    first = scored()
    torch.testing.assert_close(first, reference_logprobs(policy.model, prompt, answer), atol=1e-5, rtol=1e-5)
    policy.token_outputs(pack([longer], [[longer[:17]]]), 1.0)  # to the last token that is turned alike
    assert torch.equal(scored(), first)
    # A cache has room for more than the context; what is drawn is still what is scored.
    request, params = (
        Request(longer, [key(0, g) for g in range(3)], max_tokens=17),
        SamplingParams(max_tokens=40),
    )
    for *_, c in LocalSampler(policy).sample([request], params):
        trained = policy.token_outputs(pack([longer], [[c.tokens]]), 1.0).logprobs.detach().numpy()
        np.testing.assert_array_equal(c.logprobs, trained)
    with pytest.raises(ConfigError, match="49 tokens, but beyond 48"):
        policy.token_outputs(pack([longer], [[longer[:19]]]), 1.0)
    with pytest.raises(ConfigError, match="beyond 48"):
        list(LocalSampler(policy).sample([Request(longer, [key(0, 0)])], params))


def test_a_run_may_turn_all_sequences_by_the_long_table(tmp_path: Path) -> None:
    """Short ones as transformers turns long ones, also where the trained model is loaded again."""
    save_policy(Policy(sharpened(BY_LENGTH["longrope"]), policy_of("qwen3").tokenizer), tmp_path / "given")
    resolved = load_config(values={"model": str(tmp_path / "given"), "longrope": "long"})
    policy = load_policy(resolved)
    assert policy.context == 128
    prompt, answer = random_prompts(9, 100)
    every = policy.token_outputs(pack([prompt], [[answer]]), 1.0).logprobs.detach()
    expected = reference_logprobs(sharpened(BY_LENGTH["longrope"]), prompt, answer)
    torch.testing.assert_close(every, expected, atol=1e-5, rtol=1e-5)
    short = policy.token_outputs(pack([prompt], [[answer[:20]]]), 1.0).logprobs.detach()
    torch.testing.assert_close(short, expected[:20], atol=1e-5, rtol=1e-5)
    request = Request(prompt, [key(0, g) for g in range(3)])
    for *_, c in LocalSampler(policy).sample([request], SamplingParams(max_tokens=60)):
        trained = policy.token_outputs(pack([prompt], [[c.tokens]]), 1.0).logprobs.detach().numpy()
        np.testing.assert_array_equal(c.logprobs, trained)
    save_policy(policy, tmp_path / "final")
    again = load_policy(load_config(values={"model": str(tmp_path / "final")}))
    assert torch.equal(again.token_outputs(pack([prompt], [[answer]]), 1.0).logprobs, every)
    with pytest.raises(ConfigError, match="longrope: long: qwen3 has no long rotary table"):
        load_policy(load_config(values={"model": "tiny", "longrope": "long"}), ["1+2=3"])


def test_tables_that_are_the_same_for_all_lengths_reach_the_whole_context() -> None:
    same = {**LONGROPE, "short_factor": LONGROPE["long_factor"]}
    config = Phi3Config(**WIDE, **ORIGINAL, sliding_window=None, rope_parameters=same)
    assert Policy(sharpened(config), policy_of("qwen3").tokenizer).context == 128
    assert longest_stable_rotation(CONFIGS["llama3_rope"]) is None
    config.rope_parameters |= {"short_mscale": 1.0, "long_mscale": 1.2}  # Phi-MoE's
    assert longest_stable_rotation(config) == 48


def test_what_reads_images_is_left_as_it_is() -> None:
    names = {n for n, p in policy_of("gemma3_images").model.named_parameters() if not p.requires_grad}
    assert names
    assert all(n.startswith(("model.vision_tower", "model.multi_modal_projector")) for n in names)


@pytest.mark.parametrize("kind", ["compiled", "torch", "modules"])
def test_the_token_that_pads_learns_where_it_is_read(kind: str) -> None:
    """Chat models that pad with the end of a message read that token in every prompt."""
    name = "qwen3_moe" if kind == "modules" else "qwen3"
    plain, config = policy_of(name), copy.deepcopy(CONFIGS[name])
    config.pad_token_id = 9
    model = sharpened(config)
    model.load_state_dict(plain.model.state_dict())
    policy = Policy(model, plain.tokenizer)
    if kind == "torch":
        policy.decoder.ops = TorchOps()
    prompt, answer = np.array([5, 9, 7]), np.array([9, 8, 6])
    policy.token_outputs(pack([prompt], [[answer]]), temperature=1.0).logprobs.sum().backward()
    reference_logprobs(plain.model, prompt, answer).sum().backward()
    ours, expected = (m.get_input_embeddings().weight.grad for m in (model, plain.model))
    assert float(expected[9].abs().max()) > 0.01
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)


def changed(name: str, **change: object) -> PreTrainedModel:
    return sharpened(type(CONFIGS[name])(**{**CONFIGS[name].to_dict(), **change}))


def test_unknown_architectures_and_activations_are_not_ours() -> None:
    assert not is_supported(sharpened(CONFIGS["gpt2"]))
    assert not is_supported(changed("gemma3", hidden_activation="relu"))
    for name in ("gemma", "gemma2", "gemma3"):
        assert not is_supported(changed(name, use_bidirectional_attention=True))


@pytest.mark.parametrize(
    ("name", "cap", "ours"),
    [
        ("gemma3", "final_logit_softcapping", True),
        ("gemma3", "attn_logit_softcapping", False),
        ("llama", "final_logit_softcapping", False),
        ("qwen3", "attn_logit_softcapping", False),
    ],
)
def test_a_cap_counts_where_the_modules_heed_it(name: str, cap: str, ours: bool) -> None:
    """And where they do not, the modules decide what the config means."""
    model = changed(name, **{cap: 0.5})
    policy = Policy(model, policy_of("qwen3").tokenizer)
    assert (policy.decoder is not None) == ours
    prompt, answer = random_prompts(9, 20)
    found = policy.token_outputs(pack([prompt], [[answer]]), temperature=1.0).logprobs
    torch.testing.assert_close(found, reference_logprobs(model, prompt, answer), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "stray"),
    [
        *((name, {"sliding_window": 4}) for name in ("llama", "granite", "gemma", "glm", "olmo2")),
        *((name, {"layer_types": ["full_attention"] * 2}) for name in ("mistral_window", "llama")),
        ("phi3", {"sliding_window": 4, "layer_types": ["full_attention"] * 2}),
        ("llama", {"hidden_activation": "gelu_pytorch_tanh"}),
        ("qwen3", {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 1.5}),
    ],
)
def test_what_a_config_says_counts_where_the_modules_read_it(name: str, stray: dict[str, object]) -> None:
    """Fine-tunes carry settings of other families; Mistral and Phi 3 know one window for all layers."""
    model = changed(name, **stray)
    policy = Policy(model, policy_of("qwen3").tokenizer)
    assert policy.decoder is not None
    prompt, answer = random_prompts(9, 20)
    found = policy.token_outputs(pack([prompt], [[answer]]), temperature=1.0).logprobs
    torch.testing.assert_close(found, reference_logprobs(model, prompt, answer), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("exact_kl", [True, False])
def test_everything_said_of_a_token_is_of_capped_logits(compiled: bool, exact_kl: bool) -> None:
    """Entropy, collision, the exact KL to a reference, and their gradient; the temperature comes after."""
    policy, reference = policy_of("gemma2"), policy_of("gemma2")
    with torch.no_grad():
        for parameter in reference.parameters:
            parameter.add_(0.1 * torch.randn_like(parameter))
    if not compiled:
        policy.decoder.ops = reference.decoder.ops = TorchOps()
    prompt, answer = random_prompts(9, 20)
    packed = pack([prompt], [[answer]])
    with torch.no_grad():
        compared = (reference.hidden_states(packed), reference.head) if exact_kl else None
    outputs = policy.token_outputs(packed, 0.7, compared)
    (outputs.entropy + 3 * outputs.full_kl + outputs.logprobs).sum().backward()
    ours = {n: p.grad.clone() for n, p in policy.model.named_parameters()}
    policy.model.zero_grad()
    tokens = torch.tensor(np.concatenate((prompt, answer)))[None]
    mine, other = ((m(tokens).logits[0, 8:-1] / 0.7).log_softmax(-1) for m in (policy.model, reference.model))
    entropy, collision = -(mine.exp() * mine).sum(-1), mine.exp().square().sum(-1)
    full_kl = (mine.exp() * (mine - other.detach())).sum(-1) * exact_kl
    logprobs = mine.gather(1, torch.tensor(answer)[:, None])[:, 0]
    expected = (logprobs, entropy, collision, full_kl)
    for found, wanted in zip(outputs[:4], expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    (entropy + 3 * full_kl + logprobs).sum().backward()
    for n, p in policy.model.named_parameters():
        scale = float(p.grad.abs().max())
        torch.testing.assert_close(ours[n] / scale, p.grad / scale, atol=2e-5, rtol=0, msg=n)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "mistral_window", "olmo3", "glm", "exaone4", *OTHERS])
def test_sampled_log_probs_are_those_of_the_hugging_face_model(name: str) -> None:
    """Decoding has its own form of windows, rotary tables and scales."""
    policy = policy_of(name)
    prompt = random_prompts(13)[0]
    (drawn,) = LocalSampler(policy).sample([Request(prompt, [1])], SamplingParams(25))
    expected = reference_logprobs(policy.model, prompt, drawn.completion.tokens)
    assert np.allclose(drawn.completion.logprobs, expected.detach().numpy(), atol=1e-5)


def test_a_capped_score_and_its_slope() -> None:
    """tanh(ln 2) = (2 - 1/2) / (2 + 1/2) = .6, and tanh' = 1 - .6^2; far beyond the cap nothing moves."""
    x = torch.tensor([0.0, 10 * np.log(2), -10 * np.log(2), 1e4], dtype=torch.float64, requires_grad=True)
    capped = soft_cap(x, 10.0)
    (slope,) = torch.autograd.grad(capped.sum(), x)
    torch.testing.assert_close(capped.tolist(), [0.0, 6.0, -6.0, 10.0])
    torch.testing.assert_close(slope.tolist(), [1.0, 0.64, 0.64, 0.0])


def replaced(policy: Policy) -> list[str]:
    """Names of the parameters whose replacement by another object leaves scores or draws as they were."""
    packed = pack(random_prompts(5), [random_prompts(7, seed=1)])
    asked = [Request(random_prompts(5)[0], [1])]

    def outputs() -> tuple[torch.Tensor, np.ndarray]:
        (drawn,) = LocalSampler(policy).sample(asked, SamplingParams(3))
        return policy.token_outputs(packed, 1.0).logprobs.detach(), drawn.completion.logprobs

    before, unseen = outputs(), []
    for name, parameter in list(policy.model.named_parameters()):
        module, _, leaf = name.rpartition(".")
        owner = policy.model.get_submodule(module)
        setattr(owner, leaf, torch.nn.Parameter(torch.randn_like(parameter)))
        scored, drawn = outputs()
        if torch.equal(scored, before[0]) or np.array_equal(drawn, before[1]):
            unseen.append(name)
        setattr(owner, leaf, parameter)
    after = outputs()
    assert torch.equal(after[0], before[0]) and np.array_equal(after[1], before[1])
    return unseen


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_weights_are_read_when_they_are_used(name: str, compiled: bool) -> None:
    policy = policy_of(name)
    if not compiled:
        policy.decoder.ops = TorchOps()
    # A key's bias shifts all scores of a query alike.
    assert [n for n in replaced(policy) if not n.endswith("k_proj.bias")] == []


def test_adapters_are_read_when_they_are_used() -> None:
    pytest.importorskip("peft")
    policy = with_lora(sharpened(CONFIGS["qwen3"]), policy_of("qwen3").tokenizer, Lora(rank=2))
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:  # zero at first, and then A has no effect
            torch.nn.init.normal_(parameter)
    assert replaced(policy) == []


@pytest.mark.parametrize("compiled", [True, False])
def test_hooks_of_a_layer_fire_in_training_and_decoding(compiled: bool) -> None:
    policy = policy_of("qwen3")
    if not compiled:
        policy.decoder.ops = TorchOps()
    seen: list[bool] = []
    for layer in policy.decoder.layers:
        layer.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    policy.token_outputs(pack(random_prompts(5), [random_prompts(7, seed=1)]), 1.0).logprobs.sum().backward()
    assert seen == [True, True]
    list(LocalSampler(policy).sample([Request(random_prompts(5)[0], [1])], SamplingParams(3)))
    assert seen[2:] == [False] * 2 * 3  # the prompt gives the first token, two steps the others


def test_a_layer_finds_all_its_parameters_and_the_model_holds_them_once() -> None:
    model = sharpened(CONFIGS["qwen3"])
    names = list(model.state_dict())
    decoder = Policy(model, policy_of("qwen3").tokenizer).decoder
    assert list(model.state_dict()) == names
    for layer, block in zip(decoder.layers, model.get_decoder().layers, strict=True):
        assert [id(p) for p in layer.parameters()] == [id(p) for p in block.parameters()]


def test_prompts_are_computed_once() -> None:
    prompt = random_prompts(50)[0]
    packed = pack([prompt], [random_prompts(4, 4, 4, 4)])
    assert len(packed.tokens) == 50 + 4 * 3


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_recomputed_layers_give_the_same_gradient_to_the_bit(name: str) -> None:
    policy = policy_of(name)
    packed = pack(random_prompts(5, 9), [random_prompts(7, 3, seed=1), random_prompts(4, seed=2)])
    gradients = []
    for recompute in (False, True):
        policy.decoder.recompute = recompute
        policy.model.zero_grad()
        policy.token_outputs(packed, 1.0).logprobs.sum().backward()
        gradients.append([p.grad.clone() for p in policy.parameters])
    assert all(torch.equal(kept, again) for kept, again in zip(*gradients, strict=True))


def expect_own_modules(model: torch.nn.Module) -> None:
    """Expect a policy to give a changed model's log-probs, by its own modules, and to say so."""
    policy = Policy(model, full_tokenizer())
    tokens = random_prompts(12)[0]
    with torch.no_grad():
        found = policy.token_outputs(pack([tokens[:1]], [[tokens[1:]]]), 1.0).logprobs
        expected = reference_logprobs(model, tokens[:1], tokens[1:])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert policy.decoder is None
    assert any("not that code" in note for note in speed_notes(policy, Config()))


class Scaled(Qwen3ForCausalLM):
    """A user's class: its logits are those of Qwen 3, three times."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 3
        return out


@pytest.mark.parametrize("change", ["class", "hook", "layer"])
def test_a_model_that_computes_otherwise_than_its_type_is_computed_by_its_modules(change: str) -> None:
    model = sharpened(CONFIGS["qwen3"])
    if change == "class":
        model.__class__ = Scaled
    elif change == "layer":
        model.model.layers[1].mlp.act_fn = torch.nn.ReLU()
    else:
        model.model.layers[0].register_forward_hook(lambda *inputs: inputs[-1].flip(-1))
    expect_own_modules(model)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
@pytest.mark.parametrize(
    ("place", "other"),
    [
        ("model.layers.1.input_layernorm", torch.nn.Identity()),
        ("model.layers.0.self_attn.q_norm", torch.nn.Identity()),
        ("model.layers.0.self_attn.k_norm", torch.nn.Tanh()),
        ("model.norm", torch.nn.RMSNorm(32, eps=1e-6)),
        ("model.norm", torch.nn.Identity()),
        ("model.layers.1.mlp", torch.nn.Identity()),
    ],
)
def test_a_model_with_a_replaced_module_is_computed_by_its_modules(
    name: str, place: str, other: torch.nn.Module
) -> None:
    model = sharpened(CONFIGS[name])
    model.set_submodule(place, other)
    expect_own_modules(model)
