"""GGUF files as models: a file's weights are dequantized once, into a folder that all other code reads."""

from __future__ import annotations

import contextlib
import hashlib
import io
import shutil
import sys
import tempfile
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from covey.errors import out_of_memory
from covey.system.cache import cache_folder
from covey_verify.errors import ConfigError

if TYPE_CHECKING:
    from gguf import GGUFReader

MAGIC = b"GGUF"
GPT_2 = {"default", "gpt-2", "jais", "mpt", "olmo", "phi-2"}
"""Ways to split a text before merging bytes (`tokenizer.ggml.pre`) that are GPT-2's."""
DIGITS_APART = {"codeshell", "command-r", "refact", "smollm", "starcoder"}
"""Further ones that differ from GPT-2's in that each digit is split off."""
NEEDS = "a GGUF file as a model needs the package gguf: pip install 'covey[gguf]'"


def folder_of_gguf(file: Path) -> Path:
    """Return the Hugging Face folder of a GGUF file's model, in covey's cache; it is made at the first use.

    The weights are dequantized to float32. Any architecture works whose GGUF files transformers reads.
    Raises ConfigError if the file is damaged or not supported, or if the folder cannot be written.
    """
    try:
        state = file.stat()
        return _folder_of(file.resolve(), (state.st_size, state.st_mtime_ns))
    except OSError as error:
        raise ConfigError(f"model: {file}: {error.strerror or error}") from None


@cache
def _folder_of(file: Path, _state: tuple[int, int]) -> Path:
    """Do the work of ``folder_of_gguf``, once in a process for a file of this size and time."""
    if find_spec("gguf") is None:
        raise ConfigError(f"model: {file}: {NEEDS}")
    with file.open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise ConfigError(f"model: {file} is not a GGUF file: it does not begin with {MAGIC.decode()}")
        stream.seek(0)
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    models = cache_folder() / "models"
    models.mkdir(exist_ok=True, mode=0o700)
    target = models / f"{file.stem}-{digest[:16]}"
    if target.is_dir():
        return target
    print(f"note: dequantizing {file.name} once, into {target}", file=sys.stderr, flush=True)
    # Whole or not at all: another process, or the next one, never sees half a model.
    unfinished = Path(tempfile.mkdtemp(prefix=".half-", dir=models))
    try:
        model, tokenizer = _read_model(file)
        _refuse_full_disk(model, file, unfinished)
        _write(model, tokenizer, unfinished)
        if not target.is_dir():  # another process may have been faster
            unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _read_model(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model of a GGUF file in float32, and its tokenizer. Raises ConfigError."""
    from gguf import GGUFReader

    folder = str(file.parent)
    options = {"gguf_file": file.name}
    try:
        with _bars_for_people():
            reader = GGUFReader(file)
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            config = AutoConfig.from_pretrained(folder, **options)
            _set_head_size(config, reader)
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=torch.float32, output_loading_info=True, **options
            )
    except Exception as error:  # a damaged file makes the libraries fail in any way
        if out_of_memory(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"model: {file}: it could not be read: {reason[:300]}\n"
            "If the file is whole, transformers cannot read its architecture: take the model's folder"
        ) from None
    # transformers replaces weights that do not fit by random ones and only logs it.
    unusable = [*report["missing_keys"], *(str(name) for name, *_ in report["mismatched_keys"])]
    if unusable:
        raise ConfigError(
            f"model: {file}: {len(unusable)} weights are missing or of another shape, for example "
            f"{unusable[0]}: transformers reads this kind of file incompletely; take the model's Hugging "
            "Face folder"
        )
    _set_splits(tokenizer, reader, file.name)
    # transformers drops it if the file lies in a model folder, as an export writes it.
    tokenizer.chat_template = _field(reader, "tokenizer.chat_template")
    return model, tokenizer


def _refuse_full_disk(model: PreTrainedModel, file: Path, folder: Path) -> None:
    """Raise ConfigError if the weights do not fit on the disk of ``folder``."""
    # `parameters` yields tied weights once.
    needed = sum(w.nbytes for w in model.parameters())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"model: {file}: as float32 its weights need {needed / 1e9:.1f} GB in {folder.parent}, where "
            f"{free / 1e9:.1f} GB are free; make room, or set XDG_CACHE_HOME to a folder on another disk"
        )


def _write(loaded: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model and its tokenizer as a Hugging Face folder."""
    # transformers does not save a model that it has loaded through a quantizer, so the weights move into one
    # that it has not; on "meta" that one takes no memory of its own.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.name_or_path = ""
    with torch.device("meta"):
        model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    with _bars_for_people():
        model.save_pretrained(folder)
    # The class of its architecture would put its own splits back when the folder is loaded.
    special = {f"{name}_token": getattr(tokenizer, f"{name}_token") for name in ("bos", "eos", "pad", "unk")}
    saved_tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **special)
    saved_tokenizer.chat_template = tokenizer.chat_template
    saved_tokenizer.save_pretrained(folder)


def _bars_for_people() -> contextlib.AbstractContextManager[object]:
    """Show the libraries' progress bars on a terminal only; in a log they would be a hundred lines."""
    return contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())


def _set_head_size(config: PretrainedConfig, reader: GGUFReader) -> None:
    """Take the size of a head from the file; transformers leaves it at its default."""
    architecture = _field(reader, "general.architecture")
    size = _field(reader, f"{architecture}.attention.key_length")
    if size is not None and hasattr(config, "head_dim"):
        config.head_dim = int(size)


def _set_splits(tokenizer: PreTrainedTokenizerBase, reader: GGUFReader, name: str) -> None:
    """Split texts before merging bytes as the file says, whatever class transformers chose for it.

    Warn where the way is not known: some texts may then get other ids than in llama.cpp.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if _field(reader, "tokenizer.ggml.model") != "gpt2":
        # Only byte-level BPE (gpt2) splits texts by a pattern.
        return
    scheme = _field(reader, "tokenizer.ggml.pre") or "default"
    if scheme in GGUF_PRE_TOKENIZER_SPLITS:
        pattern = Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[scheme]), behavior="isolated")
        splits: PreTokenizer = Sequence([pattern, ByteLevel(add_prefix_space=False, use_regex=False)])
    elif scheme in DIGITS_APART:
        splits = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    elif scheme in GPT_2:
        splits = ByteLevel(add_prefix_space=False)
    else:
        # What transformers has chosen for the architecture is the better guess.
        warnings.warn(
            f"{name}: how it splits texts ({scheme}) is not known, so some may get other tokens than in "
            "llama.cpp; where that matters, take the model's Hugging Face folder",
            stacklevel=2,
        )
        return
    tokenizer.backend_tokenizer.pre_tokenizer = splits


def gguf_license(file: Path) -> dict[str, str]:
    """Return the license that a GGUF file names, as a card's metadata; {} if it names none."""
    if find_spec("gguf") is None:
        return {}
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except (OSError, ValueError, IndexError):  # damaged since the run began: a card with fewer fields
        return {}
    fields = {
        name: f"general.{name.replace('_', '.')}" for name in ("license", "license_name", "license_link")
    }
    named = {name: _field(reader, field) for name, field in fields.items()}
    return {name: str(value) for name, value in named.items() if value}


def _field(reader: GGUFReader, name: str) -> Any:
    """Return the value of a field, None if the file has none."""
    field = reader.get_field(name)
    return None if field is None else field.contents()
