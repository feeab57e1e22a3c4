"""`covey check MODEL`: describe what a model's chat template does, without loading its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerBase

from covey.models.pretrained import pretrained_tokenizer
from covey.models.template import TemplateFacts, template_facts
from covey.sampling.tools.readable import WrittenCall, written_call
from covey_verify.errors import ConfigError

LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "The meaning of a word.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "description": "Which one."},
                "most": {"type": "integer", "description": "How many."},
            },
            "required": ["word"],
        },
    },
}
"""A tool for a made-up call."""


@dataclass
class Speech:
    """A tokenizer with the end tokens of completions that are known without weights."""

    tokenizer: PreTrainedTokenizerBase
    end_ids: list[int]


@dataclass(frozen=True)
class TemplateReport:
    """The facts about a model's template."""

    facts: TemplateFacts
    call: WrittenCall
    end: str
    """The token that ends an answer."""

    def record(self) -> dict[str, object]:
        """Return the report as JSON."""
        return {**asdict(self.facts), "turn_end": self.end, "call": self.call._asdict()}

    def lines(self) -> Iterator[str]:
        """Yield the report in words."""
        facts = self.facts
        if facts.refusal:
            yield f"refused    {facts.refusal}"
            return
        yield f"prompt     ends with {facts.answer_header!r}"
        if self.end:
            yield f"end        {self.end!r}"
        else:
            yield "end        no token: the tokenizer's own end is put there"
        if facts.end_count > 1:
            yield f"           {facts.end_count} end tokens follow the last answer; only the first is trained"
        yield from self._thoughts()
        yield f"calls      {self._calls()}"
        for role, fate in facts.roles.items():
            yield f"{role:<10} {fate}"
        yield f"date       {'printed: in a run, its first day' if facts.dated else 'not printed'}"
        yield f"controls   {' '.join(facts.controls)}: encoded as letters where a message has them"

    def _thoughts(self) -> Iterator[str]:
        facts = self.facts
        marks = self.facts.thoughts
        if marks is None:
            yield "thoughts   no marks of its own; <think> and </think> are read as such"
            return
        state = "the prompt opens them" if marks.begun else "the model opens them"
        if facts.switch:
            state = f"the prompt closes an empty pair; the model thinks under {facts.switch}"
        yield f"thoughts   {marks.open} ... {marks.close}: {state}"
        if marks.begun:
            closing = "is refused in training" if facts.unthinking is None else f"begins {facts.unthinking!r}"
            yield f"           an answer without thoughts {closing}"
        if facts.forgets:
            yield "           left out of earlier answers"

    def _calls(self) -> str:
        if not self.call.text:
            return "not shown by the template"
        outcome = "read back" if self.call.is_readable else "NOT read back: tools are refused"
        return f"{self.call.text!r}, {outcome}"


def check_template(folder: Path) -> TemplateReport:
    """Render made-up conversations with the tokenizer of a model folder. Raises ConfigError."""
    try:
        tokenizer = pretrained_tokenizer(str(folder), local_files_only=True)
    except Exception as error:  # a damaged folder makes the libraries fail in any way
        raise ConfigError(f"{folder}: its tokenizer cannot be read: {str(error)[:300]}") from None
    facts = template_facts(tokenizer)
    end = facts.turn_end
    ids = [n for n in (end, tokenizer.eos_token_id, *_configured_ends(folder)) if n is not None]
    shown = WrittenCall("look_up", "", is_readable=False)
    if not facts.refusal:
        shown = written_call(Speech(tokenizer, ids), {"tools": [LOOK_UP]}, [LOOK_UP])
    return TemplateReport(facts, shown, "" if end is None else tokenizer.decode([end]))


def _configured_ends(folder: Path) -> list[int]:
    """Return the end tokens in a folder's generation_config.json."""
    if not (folder / "generation_config.json").is_file():
        return []
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    if ends is None:
        return []
    return ends if isinstance(ends, list) else [ends]
