"""The wording of a model's prompts by its tokenizer alone, for rewards over existing completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from covey.config.load import ResolvedConfig
from covey.config.python_objects import ModelObject
from covey.types import Problem
from covey_verify.errors import DataError
from covey_verify.extract import TAGS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MEANING = (
    "where a chat's prompt opens the thoughts, a completion that never closes them is read as if it had none"
)
"""The consequence of an unknown template, for messages."""


@dataclass(frozen=True)
class ModelTexts:
    """A model's tokenizer, or a ``note`` with the reason why it is not known."""

    tokenizer: PreTrainedTokenizerBase | None = None
    note: str = ""

    @property
    def decode(self) -> Callable[[Sequence[int]], str]:
        """A function from a completion's token ids to their text; the text is empty without a tokenizer."""
        if self.tokenizer is None:
            return lambda _: ""
        from covey.models.template import template_facts
        from covey.models.text import FaithfulText

        ends = (self.tokenizer.eos_token_id, template_facts(self.tokenizer).turn_end)
        return FaithfulText(self.tokenizer, [n for n in ends if n is not None])

    def with_thoughts(self, problem: Problem, prompt: Sequence[int] | None = None) -> Problem:
        """The problem with its model's marks of thoughts, and whether its prompt opens them, as in a run.

        ``prompt`` is its token ids, if known. Raises DataError if the template refuses a chat.
        """
        messages = problem.prompt
        if self.tokenizer is None:
            return replace(problem, thoughts=TAGS.begun_by(messages if isinstance(messages, str) else ""))
        from covey.models.template import thoughts_of

        tokens = self._tokens(problem) if prompt is None else prompt
        return replace(problem, thoughts=thoughts_of(self.tokenizer, tokens, messages, problem.template))

    def _tokens(self, problem: Problem) -> Sequence[int]:
        from covey.models.chat import chat_tokens
        from covey.models.template import template_facts

        assert self.tokenizer is not None
        # From the surest source on: the ids that were sampled, then a plain text, then a rendered chat.
        if problem.sampled_tokens is not None:
            return problem.sampled_tokens.prompt
        if isinstance(problem.prompt, str):
            return list(self.tokenizer(problem.prompt, add_special_tokens=False)["input_ids"])
        if not self.tokenizer.chat_template:
            return []
        controls = template_facts(self.tokenizer, problem.template).controls
        try:
            return chat_tokens(self.tokenizer, problem.prompt, problem.template, True, controls)
        except DataError as error:
            raise DataError(f"{problem.id}: {error}") from None


def model_texts_of(resolved: ResolvedConfig) -> ModelTexts:
    """The wording of a config's model, or of the first model of its pipeline. No weights are read."""
    model = resolved.stages()[0].config.model
    # The template of `tiny` opens no thoughts.
    if model == "tiny":
        return ModelTexts()
    if isinstance(model, ModelObject):
        from covey.models.model_objects import checked_model

        return ModelTexts(checked_model(model)[1])
    from covey.models.load import source_of
    from covey.models.pretrained import pretrained_tokenizer, unreachable

    try:
        source = source_of(model, resolved.folder)
        return ModelTexts(pretrained_tokenizer(source, local_files_only=unreachable(source)))
    except Exception as error:  # a damaged folder makes the libraries fail in any way
        reason = (str(error).strip().splitlines() or [""])[0][:200].removeprefix("model: ")
        return ModelTexts(note=f"the tokenizer of model {model!r} cannot be read ({reason}): {MEANING}")


NO_WORDING = ModelTexts()
"""An unknown wording about which there is nothing to report."""
