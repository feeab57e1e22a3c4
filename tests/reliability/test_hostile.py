"""What a stranger's model folder may hold, and what of the user's must never be written."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.conftest import policy_of
from transformers import AutoModelForCausalLM

from covey.cli import main
from covey.models.policy import save_policy
from covey.models.pretrained import load_pretrained, pretrained_tokenizer


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text("def varied(completion):\n    return len(completion)\n")
    config = {
        "model": "stranger",
        "output": str(tmp_path / "run"),
        "data": {"task": "last_digit", "train_size": 16, "test_size": 2},
        "rewards": ["rewards.py:varied"],
        "rollout": {"group_size": 2, "prompts_per_step": 2, "max_tokens": 4},
        "train": {"steps": 1},
        "eval": {"problems": 2, "samples": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    save_policy(policy_of("qwen3"), tmp_path / "stranger")
    return tmp_path


class Bomb:
    """Unpickled, it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.trace,)


def test_pickled_weights_are_refused_unread(project: Path, capsys) -> None:
    model = project / "stranger"
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(project / "trace")))
    assert main(["train", str(project / "run.yaml")]) == 2
    assert "safetensors" in capsys.readouterr().err
    assert not (project / "trace").exists()


def test_code_of_a_model_folder_is_not_run(project: Path, capsys) -> None:
    model, trace = project / "stranger", project / "trace"
    (model / "modeling.py").write_text(
        f"import pathlib\npathlib.Path({str(trace)!r}).touch()\nConfig = Model = 1\n"
    )
    config = json.loads((model / "config.json").read_text())
    config["model_type"] = "stranger"
    config["auto_map"] = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    (model / "config.json").write_text(json.dumps(config))
    assert main(["train", str(project / "run.yaml")]) == 2
    assert "could not be loaded" in capsys.readouterr().err
    assert not trace.exists()


def named(shard: str) -> Callable[[Path], None]:
    """Weights in an index that names one shard, which is there: a pickle, or a file elsewhere."""

    def change(model: Path) -> None:
        weights = load_file(model / "model.safetensors")
        (model / "model.safetensors").rename(model.parent / "outside.safetensors")
        torch.save(weights, model / "weights.bin")
        torch.save(weights, model / "weights.bin.safetensors.pt")
        (model / "inside").mkdir()
        torch.save(weights, model / "inside" / "weights.bin")
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, shard)}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def configured(**settings: object) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        named("model.safetensors")(model)
        (model / "model.safetensors.index.json").unlink()
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, **settings}))

    return change


def linked(name: str, target: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).rename(model.parent / f"outside-{name}")
        (model / name).symlink_to(target)

    return change


def adapted(model: Path) -> None:
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "../other", "peft_type": "LORA"}')
    (model / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(model.parent / "trace")))


def piped(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    os.mkfifo(model / "tokenizer.json")


STRANGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pickle as a shard": (named("weights.bin"), "'weights.bin' is not a safetensors file"),
    "in a folder": (named("inside/weights.bin"), "'inside/weights.bin' is not"),
    "outside": (named("../outside.safetensors"), "'../outside.safetensors' is not"),
    "absolute": (named("/etc/passwd"), "'/etc/passwd' is not"),
    "a name that only holds the ending": (named("weights.bin.safetensors.pt"), "is not a safetensors file"),
    "no shard": (named("none.safetensors"), "none.safetensors is missing"),
    "weights by config": (configured(transformers_weights="../outside.safetensors"), "transformers_weights"),
    "a pickle by config": (configured(transformers_weights="adapter_model.bin"), "transformers_weights"),
    "code for attention": (configured(attn_implementation="evil/kernel:run"), "is code from a hub"),
    "a link to weights": (linked("model.safetensors", "../outside-model.safetensors"), "is a link to"),
    "a link to any file": (linked("tokenizer.json", "/etc/passwd"), "is a link to /etc/passwd"),
    "adapters": (adapted, "covey does not load adapters"),
    "a pipe": (piped, "is neither a file nor a folder"),
}
TRACED = """
import json, sys
opened, told = [], {}
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
from transformers import AutoModelForCausalLM
from covey.models.pretrained import load_pretrained, pretrained_tokenizer
for source in sys.argv[1:]:
    opened.clear()
    for load in (pretrained_tokenizer, lambda s: load_pretrained(AutoModelForCausalLM, s)):
        try:
            load(source)
            said = "loaded"
        except (OSError, ValueError) as error:
            said = str(error)
        told.setdefault(source, []).append(said)
    names = [path.rpartition("/")[2] for path in opened]
    told[source].append([n for n in names if n.endswith((".bin", ".pt", "passwd")) or "outside" in n])
print(json.dumps(told))
"""


def test_what_a_model_folder_names_is_not_opened(tmp_path: Path) -> None:
    """Opened files are traced: neither pickles nor files elsewhere, by whatever name they are given."""
    policy = policy_of("qwen3")
    for name, (change, _) in STRANGE.items():
        save_policy(policy, tmp_path / name / "model")
        change(tmp_path / name / "model")
    folders = {name: str(tmp_path / name / "model") for name in STRANGE}
    done = subprocess.run([sys.executable, "-c", TRACED, *folders.values()], capture_output=True, text=True)
    told = json.loads(done.stdout)
    for name, (_, says) in STRANGE.items():
        tokenizer, model, opened = told[folders[name]]
        assert says in tokenizer, name
        assert says in model, name
        assert opened == [], name
        assert not (tmp_path / name / "trace").exists()


def test_ordinary_layouts_are_read(tmp_path: Path) -> None:
    """Shards by an index; a hub's cache, whose snapshots are links to blobs; a link to the whole folder."""
    policy = policy_of("qwen3")
    sharded = tmp_path / "sharded"
    save_policy(policy, sharded)
    (sharded / "model.safetensors").unlink()
    policy.model.save_pretrained(sharded, max_shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    repository = tmp_path / "hub" / "models--someone--model"
    snapshot = repository / "snapshots" / "0123abc"
    for folder in (snapshot, repository / "blobs"):
        folder.mkdir(parents=True)
    for number, path in enumerate(sharded.iterdir()):
        (repository / "blobs" / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "link").symlink_to(sharded)
    for folder in (sharded, snapshot, tmp_path / "link"):
        model = load_pretrained(AutoModelForCausalLM, folder)
        assert torch.equal(model.lm_head.weight, policy.model.lm_head.weight)
        assert pretrained_tokenizer(folder).eos_token


def test_secrets_of_the_environment_are_nowhere_in_a_run(project: Path, capsys, monkeypatch) -> None:
    canaries = {
        name: f"canary-{name.lower()}" for name in ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY")
    }
    for name, value in canaries.items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(project / "run.yaml"), "--inject", "step.sigterm@1"]) == 75
    assert main(["resume", str(project / "run")]) in (0, 1)
    out, err = capsys.readouterr()
    written = b"".join(p.read_bytes() for p in (project / "run").rglob("*") if p.is_file())
    for value in canaries.values():
        assert value not in out + err
        assert value.encode() not in written


@pytest.mark.parametrize("count", [10**9, 2**63 - 1])
def test_a_header_that_promises_too_much_is_an_error_of_one_line(project: Path, capsys, count: int) -> None:
    header = json.dumps(
        {"lm_head.weight": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}
    )
    length = len(header).to_bytes(8, "little")
    (project / "stranger" / "model.safetensors").write_bytes(length + header.encode() + bytes(1 << 20))
    assert main(["train", str(project / "run.yaml")]) == 2
    assert "model.safetensors is damaged or incomplete" in capsys.readouterr().err


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
UNUSABLE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a template without an end": ("chat_template.jinja", lambda p: p.write_text(LOOP), "more than 1 s of"),
    "a template of 8 GB": (
        "chat_template.jinja",
        lambda p: p.write_text("{{ 'a' * 8000000000 }}"),
        "MemoryError",
    ),
    "a macro that calls itself": (
        "chat_template.jinja",
        lambda p: p.write_text("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
        "RecursionError",
    ),
    "a config nested for ever": ("config.json", lambda p: p.write_text("[" * 10**5), "nested too deeply"),
    "a large config": (
        "config.json",
        lambda p: p.write_text(json.dumps({"a": "x" * (1 << 25)})),
        "at most 16,777,216 are read",
    ),
    "a million ends": (
        "config.json",
        lambda p: p.write_text(json.dumps({"eos_token_id": list(range(10**6))})),
        "eos_token_id has 1,000,000 tokens",
    ),
    "a pattern that panics": ("tokenizer.json", lambda p: split_by(p, "(?:(?:1|1)+)+$"), "PanicException"),
    "a token of 20 MB": (
        "tokenizer.json",
        lambda p: p.write_text(p.read_text().replace('"', '"' + "x" * (20 << 20) + '" "', 1)),
        "of more than 65,536 bytes",
    ),
}


def split_by(tokenizer: Path, pattern: str) -> None:
    values = json.loads(tokenizer.read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    tokenizer.write_text(json.dumps({**values, "pre_tokenizer": split}))


@pytest.mark.parametrize("what", UNUSABLE)
def test_a_model_folder_that_would_take_all_time_or_memory_is_refused(
    project: Path, monkeypatch, what: str
) -> None:
    file, change, said = UNUSABLE[what]
    model = project / "stranger"
    (model / "manifest.json").unlink(missing_ok=True)
    change(model / file)
    monkeypatch.setattr("covey.models.folder_trial.TRIAL_CPU_SECONDS", 1)
    with pytest.raises(ValueError, match=said) as caught:
        pretrained_tokenizer(model)
    assert str(model / file) in str(caught.value)


def test_a_batch_system_with_lower_limits_of_its_own_tries_a_model_under_these(project: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from covey.models.folder_trial import try_texts
resource.setrlimit(resource.RLIMIT_CPU, (9, 9))
try_texts(Path(sys.argv[1]))
"""
    done = subprocess.run([sys.executable, "-c", code, project / "stranger"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_weights_that_belong_to_a_much_larger_model_are_named_unread(project: Path, capsys) -> None:
    os.truncate(project / "stranger" / "model.safetensors", 60 << 30)
    assert main(["train", str(project / "run.yaml")]) == 2
    said = capsys.readouterr().err
    assert "model.safetensors has 64,424,509,440 bytes" in said
    assert "belong to different models" in said
