"""A completion token by token: its text, and each token's log-prob, advantage and update values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch.nn.utils.rnn import pad_sequence

from covey.insight.pages.steps import page_row, rollout_settings
from covey.insight.pages.thinning import Record
from covey.objective.credit import prefix_values
from covey.objective.penalties import k3
from covey.runs.folder import latest_checkpoint
from covey.runs.reader import load_settings
from covey.runs.rollouts import RolloutLog, read_rollouts
from covey.runs.trust import is_own
from covey.system.opening import read_below
from covey_verify.errors import ConfigError, CoveyError

QUANTITIES = {
    "applied": "gradient coefficient: weight of this token in the step's updates, the reduction included",
    "advantage": "advantage of the token",
    "logprob": "log-prob under the sampler, nats",
    "ratio": "importance ratio in the last update that saw the token",
    "kl": "KL to the reference by k3, nats",
    "entropy": "entropy of the policy at this token, nats",
    "value": "mean reward of the completions that share the text up to here",
    "critic": "what the critic expected before this token",
}
"""Quantities by which tokens can be coloured, with their descriptions."""
TOKENIZER_BYTES = 256 << 20


def token_page(folder: Path, step: int, group: int, sample: int) -> Record:
    """Return the page of one completion of the rollout log."""
    log = read_rollouts(folder, step)
    if not 0 <= sample < len(log.groups.get(group, [])):
        raise ConfigError(f"{folder}: step {step} has no completion {sample} of group {group}")
    return logged_completion(folder, log, group, sample)


def logged_completion(folder: Path, log: RolloutLog, group: int, sample: int) -> Record:
    """Return the page of one completion of a log that was read."""
    places = log.groups[group]
    row = log.rows[places[sample]]
    arrays = log.of_completion(places[sample])
    tokenizer = tokenizer_of(folder)
    ids = arrays["tokens"].tolist()
    drawn = arrays.get("sampled", np.ones(len(ids), bool))
    values = {
        "applied": arrays.get("applied"),
        "advantage": _none_if_missing(arrays["advantages"]),
        "logprob": _none_if_missing(arrays["logprobs"]),
        "ratio": arrays.get("ratios"),
        "kl": None
        if "ref_log_ratios" not in arrays
        else k3(torch.from_numpy(arrays["ref_log_ratios"])).numpy(),
        "entropy": arrays.get("entropies"),
        "value": _values_of_prefixes(log, places, sample),
        "critic": arrays.get("values"),
    }
    return {
        "row": page_row(row, rollout_settings(folder)),
        "prompt": row["prompt"],
        "siblings": len(places),
        "ids": ids,
        "pieces": None if tokenizer is None else token_pieces(tokenizer, ids),
        "quantities": {k: QUANTITIES[k] for k, v in values.items() if v is not None},
        "values": {k: np.where(drawn, v, np.nan) for k, v in values.items() if v is not None},
        "inserted": np.flatnonzero(~drawn).tolist(),
    }


def _none_if_missing(values: np.ndarray) -> np.ndarray | None:
    """Return values; None if all are NaN because another trainer did not record them."""
    return None if np.isnan(values).all() else values


def token_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; empty for a token that only begins a character.

    The last token has what is left of a character that does not end.
    """
    stream = DecodeStream(skip_special_tokens=False)
    pieces = [stream.step(tokenizer, i) or "" for i in ids]
    # The stream waits for the rest of a character, which never comes if the tokens end within it.
    shown = "".join(pieces)
    text = tokenizer.decode(list(ids), skip_special_tokens=False)
    if pieces and text.startswith(shown):
        pieces[-1] += text.removeprefix(shown)
    return pieces


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a run's model, or of its base model if that is on this machine; else None."""
    model = model_folder(folder)
    try:
        file = model / "tokenizer.json" if model else _of_base(folder)
        if file is None:
            return None
        # In the run's folder no part of the path may be a link; elsewhere only the file itself is checked.
        root = folder if file.is_relative_to(folder) else file.parent
        return _read_tokenizer(root, str(file.relative_to(root)), file.stat().st_mtime)
    except (OSError, ValueError, CoveyError):
        return None


def _of_base(folder: Path) -> Path | None:
    """Return the tokenizer file of a run's base model; in a hub's cache it is a link, which is followed."""
    if not is_own(folder):  # a stranger's record must not decide which files are opened here
        return None
    resolved = load_settings(folder)
    model = str(resolved.config.model)
    for origin in (resolved.folder / model, Path(model)):
        if (origin / "tokenizer.json").is_file():
            return (origin / "tokenizer.json").resolve()
    cached = None if model == "tiny" else try_to_load_from_cache(model, "tokenizer.json")
    return Path(cached).resolve() if isinstance(cached, str) else None


@lru_cache(maxsize=8)
def _read_tokenizer(folder: Path, name: str, _changed: float) -> Tokenizer:
    content = read_below(folder, name, TOKENIZER_BYTES)
    try:
        return Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{folder / name}: cannot be read: {error}") from None


def _values_of_prefixes(log: RolloutLog, places: Sequence[int], sample: int) -> np.ndarray | None:
    """Return (T,) values before each token of a completion: the mean reward of siblings with that prefix."""
    scored = [i for i in places if log.rows[i]["reward"] is not None]
    if places[sample] not in scored:
        return None
    rewards = torch.tensor([log.rows[i]["reward"] for i in scored], dtype=torch.float64)
    ids = [torch.from_numpy(log.of_completion(i)["tokens"]) for i in scored]
    values = prefix_values(rewards, pad_sequence(ids, batch_first=True, padding_value=-1))
    row = scored.index(places[sample])
    return values[row, : len(ids[row])].numpy()


def model_folder(folder: Path) -> Path | None:
    """Return the folder with a run's newest model, if that has a tokenizer."""
    model = folder / "final" if (folder / "final").is_dir() else latest_checkpoint(folder)[0]
    return model if model is not None and (model / "tokenizer.json").is_file() else None
