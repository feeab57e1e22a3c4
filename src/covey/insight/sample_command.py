"""The command that samples a model with a prompt of its run, sent as in training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from covey.system.text import shell_word
from covey.types import Problem
from covey_verify.extract import content_text
from covey_verify.types import Messages

SHORT_PROMPT = 200
LOOKED_AT = 256
"""Number of problems among which a simple example is searched."""


def example_of(problems: Sequence[Problem]) -> Problem:
    """Return the first problem whose prompt fits in one short line of a command, else the shortest."""
    candidates = problems[:LOOKED_AT]
    return next((p for p in candidates if _simple(p)), min(candidates, key=lambda p: len(str(p.prompt))))


def sample_command(
    model: Path, prompt: str | Messages, template: Mapping[str, object], tools: Sequence[str] = ()
) -> str:
    """Return the `covey sample` command for a prompt, safe to paste into bash or zsh."""
    if tools:
        # --tools gives the template their schemas already.
        template = {name: value for name, value in template.items() if name != "tools"}
    system, text = last_turn(prompt)
    words = ["covey sample", shell_word(str(model))]
    if not isinstance(prompt, str):
        words.append("--chat")
        if system:
            words.append(f"--system={shell_word(system)}")
        if template:
            arguments = json.dumps(template, ensure_ascii=False)
            words.append(f"--chat-template-kwargs={shell_word(arguments)}")
    words += [f"--tools={shell_word(','.join(tools))}"] if tools else []
    # The command takes what begins with a hyphen for an option, unless it comes after `--`.
    separator = ["--"] if text.startswith("-") else []
    quoted = shell_word(text)
    return " ".join([*words, *separator, f"'{text}'" if quoted == text else quoted])


def last_turn(prompt: str | Messages) -> tuple[str, str]:
    """Return (system message or "", last user message) of a chat, and ("", text) for a plain prompt."""
    if isinstance(prompt, str):
        return "", prompt
    system = [content_text(m["content"]) for m in prompt[:1] if m["role"] == "system"]
    user = [content_text(m["content"]) for m in prompt if m["role"] == "user"]
    # A chat without a message of the user ends with the text to answer.
    text = user[-1] if user else content_text(prompt[-1]["content"])
    return "".join(system), text


def _simple(problem: Problem) -> bool:
    prompt = problem.prompt
    system, text = last_turn(prompt)
    is_single = isinstance(prompt, str) or len(prompt) == 1 + bool(system)
    return is_single and (system + text).isprintable() and 0 < len(text) <= SHORT_PROMPT
