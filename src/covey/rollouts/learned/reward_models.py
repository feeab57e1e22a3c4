"""Reward models as rewards: one value for a completion, or one for each of its steps.

Other rewards must not load torch, so `rewards/loading.py` imports this file only if a config names one of its
functions. They run in the trainer's process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from covey.errors import out_of_memory
from covey.models.controls import ControlWords, turn_words
from covey.models.hashes import weights_hash
from covey.models.load import source_of
from covey.models.pretrained import LOADING, load_pretrained, pretrained_tokenizer, unreachable
from covey.models.reward_model import CLASSES, SEPARATOR, RewardModelKind, conversation_ids, worked_ids
from covey.rewards.loading import ModelCache
from covey.system.device import pick_device
from covey_verify.contract import reward
from covey_verify.errors import ConfigError
from covey_verify.extract import MAX_CHARACTERS, TextOrMessages, text_of
from covey_verify.mathematics.steps import Span, SplitRule, Total, score_steps, split
from covey_verify.types import Messages, Score

AT_ONCE = 8
"""Number of texts in the model at once."""


class RewardModel:
    """A model with a head for values, and its tokenizer."""

    def __init__(self, kind: RewardModelKind, name: str, folder: Path, device: str) -> None:
        source = source_of(name, folder)
        torch_device = pick_device(device)
        loader, outputs = CLASSES[kind]
        local_only = {"local_files_only": unreachable(source)}
        try:
            self.tokenizer = pretrained_tokenizer(source, **local_only)
            dtype = torch.float32 if torch_device.type == "cpu" else "auto"
            model = load_pretrained(loader, source, dtype=dtype, **local_only)
        except Exception as error:  # a damaged folder makes the libraries fail in any way
            if out_of_memory(error):
                raise
            raise ConfigError(f"{kind}: {name!r} could not be loaded: {str(error).strip()[:500]}") from None
        if model.config.num_labels not in outputs:
            raise ConfigError(
                f"{kind}: {name!r} gives {model.config.num_labels} numbers where "
                f"{' or '.join(map(str, outputs))} is expected"
            )
        if self.tokenizer.pad_token_id is None:
            raise ConfigError(f"{kind}: the tokenizer of {name!r} has no pad_token; set one in its folder")
        model.config.pad_token_id = self.tokenizer.pad_token_id  # where sequence heads look for the end
        self.model = model.eval().to(torch_device)
        # Without a limit in the config, the tokenizer's holds.
        positions = getattr(model.config, "max_position_embeddings", 1 << 30)
        self.words = ControlWords([*turn_words(self.tokenizer)])
        """Control words to remove: a completion could close its message and speak as the user."""
        self.context = min(int(positions), int(self.tokenizer.model_max_length))

    @cached_property
    def identity(self) -> str:
        """A hash of the weights, independent of the folder."""
        return weights_hash(self.model.state_dict())

    @torch.no_grad()
    def outputs(self, texts: Sequence[list[int]]) -> list[Tensor | None]:
        """Return the logits of each text, float32 on the CPU; None for one that does not fit the context."""
        outputs: list[Tensor | None] = [None] * len(texts)
        fitting = [n for n, ids in enumerate(texts) if 0 < len(ids) <= self.context]
        for start in range(0, len(fitting), AT_ONCE):
            chosen = fitting[start : start + AT_ONCE]
            ids = [torch.tensor(texts[n], device=self.model.device) for n in chosen]
            padded = pad_sequence(ids, batch_first=True, padding_value=self.tokenizer.pad_token_id)
            real = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
            logits = self.model(input_ids=padded, attention_mask=real).logits
            for n, row in zip(chosen, logits.float().cpu(), strict=True):
                outputs[n] = row
        return outputs


def load_shared(cache: ModelCache, kind: RewardModelKind, name: str, device: str) -> RewardModel:
    """Return a reward model, loaded once for all threads."""
    # Under the lock, two threads do not load a model twice.
    with LOADING:
        model = cache.models.get((kind, name, device))
        if not isinstance(model, RewardModel):
            model = RewardModel(kind, name, cache.folder, device)
            cache.models[kind, name, device] = model
        return model


def model_of_settings(kind: str, settings: Mapping[str, Any]) -> RewardModel:
    """Return the model that a reward's settings name."""
    cache, name, device = settings["model_cache"], settings.get("model"), settings.get("device")
    return load_shared(cache, cast("RewardModelKind", kind), str(name), str(device or "auto"))


@reward(timeout=1800.0, format_only=True)
def reward_model(
    prompts: Sequence[str | Messages],
    completions: Sequence[TextOrMessages],
    turns: Sequence[Messages],
    template_arguments: Sequence[Mapping[str, object]],
    model_cache: ModelCache,
    *,
    model: str,
    device: str = "auto",
) -> list[Score]:
    """The logit that a sequence classifier with one output gives to prompt and completion.

    ``model``: a folder or hub id. In a chat it reads the results of tools too, as in training on pairs. Texts
    longer than its context are not judged.
    """
    classifier = load_shared(model_cache, "reward_model", model, device)
    answers = (
        classifier.words.remove_from(text_of(completion))
        if isinstance(prompt, str)
        else _conversation(classifier, own)
        for prompt, completion, own in zip(prompts, completions, turns, strict=True)
    )
    read = zip(prompts, answers, template_arguments, strict=True)
    texts = [conversation_ids(classifier.tokenizer, *of_one) for of_one in read]
    scores = list[Score]()
    for ids, row in zip(texts, classifier.outputs(texts), strict=True):
        if row is None:
            scores.append(score_of_overlong(classifier, ids))
        else:
            scores.append(Score(float(row)) if row.isfinite() else score_of_nonfinite(row))
    return scores


@reward(timeout=1800.0, format_only=True)
def process_reward_model(
    prompts: Sequence[str | Messages],
    completions: Sequence[TextOrMessages],
    turns: Sequence[Messages],
    token_ends: Sequence[Sequence[int]],
    template_arguments: Sequence[Mapping[str, object]],
    model_cache: ModelCache,
    *,
    model: str,
    split_by: SplitRule = "paragraphs",
    separator: str = SEPARATOR,
    total: Total = "min",
    device: str = "auto",
) -> list[Score]:
    """The probability that each step is correct, by a token classifier; see ``score_steps``.

    The model reads the prompt and the steps, each followed by ``separator``, with the result of a tool on a
    line of its own after the call. The value is read at the last token of each separator: the softmax's
    second of two outputs, or the sigmoid of one.
    """
    classifier = load_shared(model_cache, "process_reward_model", model, device)
    texts = [text_of(c)[:MAX_CHARACTERS] for c in completions]
    spans = [split(text, split_by) for text in texts]
    # The tokens that the model reads, and the last token of each step's separator.
    read = [
        worked_ids(
            classifier.tokenizer,
            prompt,
            [classifier.words.remove_from(step) for step in _steps_with_results(text, cuts, messages)],
            separator,
            shown,
        )
        for prompt, text, cuts, messages, shown in zip(
            prompts, texts, spans, turns, template_arguments, strict=True
        )
    ]
    scores = []
    for (ids, places), row, cuts, ends in zip(
        read, classifier.outputs([ids for ids, _ in read]), spans, token_ends, strict=True
    ):
        if row is None:
            scores.append(score_of_overlong(classifier, ids))
            continue
        # (steps, outputs): at the last token of each step's separator.
        logits = row[places]
        correct = logits.sigmoid()[:, 0] if logits.shape[1] == 1 else logits.softmax(1)[:, 1]
        finite = bool(correct.isfinite().all())
        scores.append(
            score_steps(cuts, correct.tolist(), ends, total) if finite else score_of_nonfinite(logits)
        )
    return scores


def _steps_with_results(text: str, spans: Sequence[Span], turns: Messages) -> list[str]:
    """Return the texts of a completion's steps, with each result of a tool after its call."""
    results = list[tuple[int, str]]()
    position = 0
    for turn in turns:
        if turn["role"] == "tool":
            results.append((position, str(turn["content"])))
        else:
            position += len(str(turn["content"]))
    steps = [text[a:b] for a, b in spans]
    # From the last to the first, so that the positions before a result stay.
    for position, result in reversed(results if steps else []):
        number = next((n for n, (_, end) in enumerate(spans) if position <= end), len(spans) - 1)
        offset = max(0, position - spans[number][0])
        before = steps[number][:offset]
        after = steps[number][offset:].removeprefix("\n")
        steps[number] = f"{before}\n{result}\n{after}"
    return steps


def _conversation(classifier: RewardModel, turns: Messages) -> Messages:
    """Return the turns of a completion as messages, without words that could close one.

    A content has the calls as the model wrote them: a template would write ``tool_calls`` once more.
    """
    messages = list[Mapping[str, object]]()
    for turn in turns:
        content = classifier.words.remove_from(str(turn["content"]))
        calls = {} if content or "tool_calls" not in turn else {"tool_calls": turn["tool_calls"]}
        messages.append({"role": turn["role"], "content": content, **calls})
    return messages


def score_of_overlong(classifier: RewardModel, ids: Sequence[int]) -> Score:
    """Return the score of a text that does not fit the context."""
    return Score(None, "not_applicable", detail=f"{len(ids)} tokens; the model reads {classifier.context}")


def score_of_nonfinite(logits: Tensor) -> Score:
    """Return the score of a model's output that is not finite."""
    return Score(None, "infra_error", detail=f"the reward model returned {logits.flatten().tolist()[:4]}")
