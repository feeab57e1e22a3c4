"""How a model's prompts are worded, by its tokenizer alone: for rewards over completions that exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from covey.config.given import GivenModel
from covey.config.load import Loaded
from covey.types import TAGS, Problem
from covey_verify.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MEANING = (
    "where a chat's prompt opens the thoughts, a completion that never closes them is read as if it had none"
)
"""What follows from an unknown template."""


@dataclass(frozen=True)
class Wording:
    """A model's tokenizer, where one is known; ``note`` says why it is not."""

    tokenizer: PreTrainedTokenizerBase | None = None
    note: str = ""

    @property
    def decode(self) -> Callable[[Sequence[int]], str]:
        """Token ids of a completion -> their text; nothing where no tokenizer is known."""
        if self.tokenizer is None:
            return lambda _: ""
        from covey.models.template import template_facts
        from covey.models.text import FaithfulText

        ends = (self.tokenizer.eos_token_id, template_facts(self.tokenizer).turn_end)
        return FaithfulText(self.tokenizer, [n for n in ends if n is not None])

    def with_thoughts(self, problem: Problem, prompt: Sequence[int] | None = None) -> Problem:
        """The problem with how its model marks thoughts, and whether its prompt opens them, as in a run.

        ``prompt``: its tokens, where these are known. Raises DataError where the template refuses a chat.
        """
        said = problem.prompt
        if self.tokenizer is None:
            begun = isinstance(said, str) and said.rstrip().endswith(TAGS.open)
            return replace(problem, thoughts=TAGS._replace(begun=begun))
        from covey.models.template import thoughts_of

        tokens = self._tokens(problem) if prompt is None else prompt
        return replace(problem, thoughts=thoughts_of(self.tokenizer, tokens, said, problem.template))

    def _tokens(self, problem: Problem) -> Sequence[int]:
        from covey.models.chat import chat_tokens
        from covey.models.template import template_facts

        assert self.tokenizer is not None
        if problem.sampled is not None:
            return problem.sampled.prompt
        if isinstance(problem.prompt, str):
            return list(self.tokenizer(problem.prompt, add_special_tokens=False)["input_ids"])
        if not self.tokenizer.chat_template:
            return []
        controls = template_facts(self.tokenizer, problem.template).controls
        try:
            return chat_tokens(self.tokenizer, problem.prompt, problem.template, True, controls)
        except DataError as error:
            raise DataError(f"{problem.id}: {error}") from None


def wording_of(loaded: Loaded) -> Wording:
    """That of a config's model, or of the model that its pipeline begins with. No weights are read."""
    model = loaded.stages()[0].config.model
    if model == "tiny":  # its template opens no thoughts
        return Wording()
    if isinstance(model, GivenModel):
        from covey.models.given import checked_model

        return Wording(checked_model(model)[1])
    from covey.models.load import source_of
    from covey.models.pretrained import pretrained_tokenizer, unreachable

    try:
        source = source_of(model, loaded.folder)
        return Wording(pretrained_tokenizer(source, local_files_only=unreachable(source)))
    except Exception as error:  # a damaged folder makes the libraries fail in any way
        why = (str(error).strip().splitlines() or [""])[0][:200].removeprefix("model: ")
        return Wording(note=f"the tokenizer of model {model!r} cannot be read ({why}): {MEANING}")


NO_WORDING = Wording()
"""Where nothing is known, and nothing is to be said of it."""
