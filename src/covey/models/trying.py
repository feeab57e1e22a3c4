"""A child of covey that tries the texts of a model's folder: its tokenizer and its chat templates.

    python -I trying.py FOLDER SECONDS BYTES

Run as a file, with neither covey nor torch. Neither library can be bounded from inside: a template has no
clock, a pattern of a tokenizer may not end, or panic. So the first use happens here, where time and memory
are. What it is about to try is printed before; an end other than 0 means that this did not go well.
"""

from __future__ import annotations

import json
import re
import resource
import sys
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
USER, ASSISTANT = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
CHATS = ([USER], [USER, ASSISTANT, USER], [{"role": "system", "content": "Be brief."}, USER])
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""A tag that Transformers adds to jinja; it writes nothing."""


def templates(folder: Path) -> dict[str, str]:
    """The chat templates of a folder, by the file that holds them."""
    files = [folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))]
    found = {path.name: path.read_text(encoding="utf-8") for path in files if path.is_file()}
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = folder / name
        record = json.loads(path.read_bytes()) if path.is_file() else {}
        said = record.get("chat_template") if isinstance(record, dict) else None
        texts = [t.get("template") for t in said if isinstance(t, dict)] if isinstance(said, list) else [said]
        found |= {f"{name} ({n})" if n else name: t for n, t in enumerate(texts) if isinstance(t, str)}
    return found


def render(template: str) -> None:
    """Once for each of a few chats, as Transformers does. Its refusals are told where it is used."""
    options = {"trim_blocks": True, "lstrip_blocks": True, "extensions": [loopcontrols]}
    environment = ImmutableSandboxedEnvironment(**options)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value)

    def refuse(message: object) -> NoReturn:
        raise ValueError(message)

    environment.globals |= {"raise_exception": refuse, "strftime_now": str}
    known = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    compiled = environment.from_string(GENERATION.sub("", template))
    for chat in CHATS:
        for begin in (True, False):
            compiled.render(messages=chat, add_generation_prompt=begin, **known)


def main(folder: Path, seconds: int, memory: int) -> None:
    """Try everything."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    if (path := folder / "tokenizer.json").is_file():
        print(path.name, flush=True)
        try:
            tokenizer = Tokenizer.from_file(str(path))
            for text in TEXTS:
                tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
        except Exception as refusal:  # the library raises nothing narrower; it is told where it is used
            if isinstance(refusal, MemoryError):
                raise
    for name, template in templates(folder).items():
        print(name, flush=True)
        try:
            render(template)
        except (MemoryError, RecursionError):
            raise
        except Exception:  # noqa: S112 - of any kind, and told where the template is used
            continue


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
