"""A model folder is loaded whole or refused, before anything large is built."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2ForCausalLM

from covey.config.load import load_config
from covey.models.load import load_policy
from covey.models.policy import save_policy
from covey.runs.atomic import committed_folder
from covey_verify.errors import ConfigError
from tests.conftest import policy_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_policy(policy_of("qwen2"), tmp_path / "model")
    return tmp_path / "model"


def loaded(folder: Path) -> Any:
    return load_policy(load_config(values={"model": str(folder), "device": "cpu"}))


def weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def settings(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.pop(UP), f"the weights lack {UP}"),
        (lambda w: w.update({UP: w[UP][:7].clone()}), rf"{UP} has shape \(7, 32\)"),
        (lambda w: w[UP].view(-1)[3:4].fill_(torch.nan), f"{UP} has values that are not finite"),
        (lambda w: w[UP].view(-1)[3:4].fill_(torch.inf), f"{UP} has values that are not finite"),
        (
            lambda w: w.update({k.replace("s.1.", "s.2."): v.clone() for k, v in w.items() if "s.1." in k}),
            r"no place for model.layers.2.* and \d+ more .*more layers",
        ),
    ],
    ids=["missing", "mismatched", "nan", "inf", "surplus layer"],
)
def test_weights_that_do_not_fit_are_refused(folder: Path, change: Any, says: str) -> None:
    weights(folder, change)
    with pytest.raises(ConfigError, match=says):
        loaded(folder)


def test_tied_heads_and_weights_of_other_tasks_are_no_fault(folder: Path) -> None:
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    weights(folder, lambda w: w.update({"value_head.weight": torch.zeros(3)}))
    assert loaded(folder).parameters


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 10**9},
        {"vocab_size": 301},
        {"vocab_size": 0},
        {"hidden_size": -1},
        {"hidden_size": 10**6},
        {"hidden_size": 64},
        {"hidden_size": "large"},
        {"num_attention_heads": 0},
        {"num_attention_heads": 3},
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": -2},
        {"intermediate_size": 10**12},
        {"model_type": "nothing"},
        {"model_type": 7},
        {"rope_parameters": []},
    ],
)
def test_a_config_that_does_not_fit_is_refused_with_the_folder(folder: Path, changes: dict) -> None:
    settings(folder, **changes)
    with pytest.raises(ConfigError, match=str(folder)):
        loaded(folder)


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{}", b"\0\xff\xfe" * 9, b'{"a": '], ids=repr)
def test_every_damaged_file_is_answered(folder: Path, file: str, content: bytes) -> None:
    (folder / file).write_bytes(content)
    try:
        loaded(folder)
    except ConfigError as error:
        assert folder.name in str(error)
    else:  # settings of a tokenizer have defaults
        assert (file, content) == ("tokenizer_config.json", b"{}")


def test_a_truncated_file_of_weights_is_named(folder: Path) -> None:
    """safetensors says `incomplete metadata, file not fully covered`, of one of perhaps thirty files."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        ConfigError, match=r"model: .*/model.safetensors is damaged or incomplete \(.*copy it"
    ):
        loaded(folder)


def test_a_folder_that_covey_wrote_is_loaded_as_it_was_written(folder: Path, tmp_path: Path) -> None:
    final = tmp_path / "final"
    with committed_folder(final) as place:
        save_policy(policy_of("qwen2"), place)
        (place / "README.md").write_text("a card")
    (final / "README.md").write_text("a better card")
    assert loaded(final).parameters
    weights(final, lambda w: w[UP].view(-1)[3:4].add_(0.5))
    with pytest.raises(ConfigError, match=r"model.safetensors is not as it was written.*manifest.json"):
        loaded(final)
    (final / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"manifest.json is missing or damaged"):
        loaded(final)


def test_a_kind_that_transformers_has_no_writer_of_is_said_in_a_sentence(folder: Path) -> None:
    """Not by the list of all that it has."""
    settings(folder, model_type="siglip", architectures=["SiglipModel"])
    with pytest.raises(
        ConfigError, match="is a SiglipModel, for which transformers has no model ForCausalLM"
    ):
        loaded(folder)


def test_weights_that_stay_quantized_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that transformers makes whole while it loads (FP8, MXFP4 without a GPU) are trained."""
    monkeypatch.setattr(Qwen2ForCausalLM, "is_quantized", True, raising=False)
    with pytest.raises(ConfigError, match="its weights are quantized"):
        loaded(folder)
