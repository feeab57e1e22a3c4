"""Fixtures and helpers of all tests: tiny models of every architecture, prompts, sandboxes."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers import (
    AutoModelForCausalLM,
    CwmConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    HeliumConfig,
    InternLM3Config,
    IQuestCoderConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    VaultGemmaConfig,
)

from covey.learner.process import restore_process_settings
from covey.models.kernels.calls import follow
from covey.models.policy import Policy
from covey.models.tiny import build_tokenizer
from covey_verify.errors import SandboxUnavailable
from covey_verify.sandbox.choice import choose
from covey_verify.sandbox.process import ProcessSandbox
from tests.ids import id_of
from tests.untested import lines

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WIDE = {**SMALL, "hidden_size": 128}
# The window is shorter than the sequences of the tests, so that it takes effect.
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
BIASES = {"attention_bias": True, "mlp_bias": True}
IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# The compiled operations need heads of width 32 or more; narrower heads are computed by torch.
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL, head_dim=32, attention_bias=True, mlp_bias=True),
    "llama3_rope": LlamaConfig(
        **SMALL,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=32),
    "gpt2": GPT2Config(
        vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=2, eos_token_id=2
    ),
    "mistral_window": MistralConfig(**SMALL, head_dim=32, sliding_window=8),
    "phi3": Phi3Config(**WIDE, sliding_window=None),
    "phi4_mini": Phi3Config(
        **SMALL,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "granite": GraniteConfig(
        **WIDE,
        embedding_multiplier=2.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        logits_scaling=1.5,
    ),
    "smollm3": SmolLM3Config(**WIDE, no_rope_layers=[1, 0]),
    "gemma": GemmaConfig(**SMALL, head_dim=32),
    # The caps are so low that they change most scores and logits.
    "gemma2": Gemma2Config(
        **SMALL,
        head_dim=32,
        sliding_window=8,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=1.0,
        final_logit_softcapping=1.5,
    ),
    "gemma3": Gemma3TextConfig(
        **SMALL,
        head_dim=32,
        sliding_window=8,
        query_pre_attn_scalar=20,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "glm": GlmConfig(**SMALL, head_dim=32, attention_bias=True),
    "glm4": Glm4Config(**SMALL, head_dim=32),
    "gemma3_images": Gemma3Config(
        text_config={**SMALL, "head_dim": 32, **WINDOWS}, vision_config=IMAGES, mm_tokens_per_image=4
    ),
    "vaultgemma": VaultGemmaConfig(
        **SMALL,
        **WINDOWS,
        head_dim=32,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=1.0,
        final_logit_softcapping=1.5,
    ),
    "ministral": MinistralConfig(**SMALL, **WINDOWS, head_dim=32, rope_parameters={**DEFAULT_ROPE}),
    "cwm": CwmConfig(
        **{**SMALL, "bos_token_id": 1}, **WINDOWS, head_dim=32, rope_parameters={**DEFAULT_ROPE}
    ),
    "seed_oss": SeedOssConfig(**SMALL, **BIASES, head_dim=32, attention_out_bias=True),
    "internlm3": InternLM3Config(**SMALL, **BIASES, head_dim=32),
    "iquestcoder": IQuestCoderConfig(**SMALL, head_dim=32),
    "ernie4_5": Ernie4_5Config(**SMALL, head_dim=32, use_bias=True),
    "helium": HeliumConfig(**WIDE, head_dim=32),
    "exaone4": Exaone4Config(**WIDE, **WINDOWS),
    "exaone4_full": Exaone4Config(**WIDE, sliding_window=None, layer_types=["full_attention"] * 2),
    "olmo2": Olmo2Config(**WIDE),
    "olmo3": Olmo3Config(**WIDE, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "qwen3_moe": Qwen3MoeConfig(
        **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "gpt_oss": GptOssConfig(
        **SMALL,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
OTHERS = ("gpt2", "qwen3_moe", "gpt_oss")
OURS = tuple(name for name in CONFIGS if name not in OTHERS)
EXACT = (
    "llama",
    "qwen3",
    "mistral_window",
    "phi3",
    "granite",
    "smollm3",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_images",
    "vaultgemma",
    "ministral",
    "cwm",
    "seed_oss",
    "internlm3",
    "iquestcoder",
    "exaone4",
    "exaone4_full",
    "olmo2",
    "olmo3",
)
"""Architectures here whose widths the compiled operations support."""

# On a busy machine, generating examples is slow, which must not fail a test.
settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def sharpened(config: PretrainedConfig) -> torch.nn.Module:
    """Return a random model whose distributions are far from uniform, so that mistakes show."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(7.0)
    return model


def policy_of(name: str) -> Policy:
    """Return a tiny policy of an architecture in ``CONFIGS``."""
    return Policy(sharpened(CONFIGS[name]), full_tokenizer())


def full_tokenizer(size: int = 300) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a word for every id of a model, since ids without a word are never drawn."""
    tokenizer = build_tokenizer(["1+2=3"] * 3, vocab_size=size)
    tokenizer.add_tokens([f"<unused{n}>" for n in range(size - len(tokenizer))])
    return tokenizer


def random_prompts(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    """Return prompts of random ids."""
    rng = np.random.default_rng(seed)
    return [rng.integers(5, 300, size=n) for n in lengths]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which tests could not run on this machine, and what they need."""
    stats = terminalreporter.stats
    skipped = [str(report.longrepr[2]) for report in stats.get("skipped", ())]
    marks = [[mark.name for mark in item.iter_markers()] for item in stats.get("deselected", ())]
    if said := lines(skipped, marks):
        terminalreporter.section("not tested here")
        terminalreporter.write("".join(f"{line}\n" for line in said))


def pytest_make_parametrize_id(val: object) -> str | None:
    """Return a short, readable id of a parameter, instead of a whole sentence or an index."""
    return id_of(val)


def pytest_configure() -> None:
    """Make fsync do nothing: only `benchmarks/reliability/power.py` tests a power loss."""
    pytest.MonkeyPatch().setattr(os, "fsync", lambda _: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests half an hour, because on a busy machine they take ten times as long."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(1800))


def pytest_collection_finish() -> None:
    """Exclude the imported modules, half a million objects, from all garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_process() -> Iterator[None]:
    """Restore threads, seed and determinism of the process, so that no test depends on an earlier one.

    So that none depends on the processor, `precision: auto` means float32 in tests.
    """
    torch.set_num_threads(1)
    follow(None, rounding=False)
    with restore_process_settings():
        yield


@pytest.fixture(scope="session")
def policy() -> Policy:
    """Return a policy that computes with our own forward pass."""
    return policy_of("qwen3")


@pytest.fixture(params=["bwrap", "landlock"])
def sandbox(request: pytest.FixtureRequest) -> ProcessSandbox:
    """Return a sandbox of each backend that works on this machine."""
    try:
        chosen = choose(request.param).sandbox
    except SandboxUnavailable as error:
        pytest.skip(str(error).splitlines()[1].strip())
    assert isinstance(chosen, ProcessSandbox)
    return chosen
