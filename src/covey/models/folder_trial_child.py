"""Code of the children that try the texts of a model's folder: its tokenizer and its chat templates.

The libraries have no limits of their own: a template has no timeout, and a tokenizer's pattern may never end,
or panic. So the first use happens in a child with limits on time and memory. It has few imports, neither
covey nor torch, as the fork server preloads it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NoReturn

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

TEXTS = (
    "2+2=4",
    "Who are you?\n\n I'm a model; 1,234.5!",
    "1" * 200 + "x" + " " * 50,
    "\u00e9\u4e2d\U0001f600" * 9,
)
USER = {"role": "user", "content": "2+2?"}
ASSISTANT = {"role": "assistant", "content": "4"}
CHATS = ([USER], [USER, ASSISTANT, USER], [{"role": "system", "content": "Be brief."}, USER])
WITH_TEMPLATES = ("tokenizer_config.json", "chat_template.json")
"""Files that may have chat templates besides other things."""
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""A tag that transformers adds to jinja; it writes nothing, so it is removed here."""


def templates(path: Path) -> list[str]:
    """The chat templates in a file."""
    if path.suffix == ".jinja":
        return [path.read_text(encoding="utf-8")]
    record = json.loads(path.read_bytes())
    value = record.get("chat_template") if isinstance(record, dict) else None
    # One template, or a list of {"name", "template"}.
    texts = [t.get("template") for t in value if isinstance(t, dict)] if isinstance(value, list) else [value]
    return [text for text in texts if isinstance(text, str)]


def render(template: str) -> None:
    """Render a template for a few chats, as transformers does; refusals are reported where it is used."""
    options = {"trim_blocks": True, "lstrip_blocks": True, "extensions": [loopcontrols]}
    environment = ImmutableSandboxedEnvironment(**options)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value)

    def refuse(message: object) -> NoReturn:
        raise ValueError(message)

    environment.globals |= {"raise_exception": refuse, "strftime_now": str}
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    compiled = environment.from_string(GENERATION.sub("", template))
    for chat in CHATS:
        for begin in (True, False):
            compiled.render(messages=chat, add_generation_prompt=begin, **special)


def use(file: str) -> None:
    """Try a tokenizer, or the templates in a file."""
    path = Path(file)
    if path.name == "tokenizer.json":
        try:
            tokenizer = Tokenizer.from_file(file)
            for text in TEXTS:
                tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
        except MemoryError:
            raise
        except Exception:  # the library raises nothing narrower; reported where it is used
            return
    else:
        for template in templates(path):
            try:
                render(template)
            except (MemoryError, RecursionError):
                raise
            except Exception:  # noqa: S112 - of any kind, and reported where the template is used
                continue
