"""The child process that tries the texts of a model's folder: its tokenizer and its chat templates.

    python -I trying.py FOLDER SECONDS BYTES

It runs as a file, without covey or torch. The libraries have no limits of their own: a template has no
timeout, and a tokenizer's pattern may never end, or panic. So the first use happens here, with limits on time
and memory. The name of each file is printed before it is tried. An exit code other than 0 means that the last
one failed.
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
USER = {"role": "user", "content": "2+2?"}
ASSISTANT = {"role": "assistant", "content": "4"}
CHATS = ([USER], [USER, ASSISTANT, USER], [{"role": "system", "content": "Be brief."}, USER])
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""A tag that transformers adds to jinja; it writes nothing, so it is removed here."""


def templates(folder: Path) -> dict[str, str]:
    """The chat templates of a folder, by the file that holds them."""
    files = [folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))]
    texts_by_file = {path.name: path.read_text(encoding="utf-8") for path in files if path.is_file()}
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = folder / name
        record = json.loads(path.read_bytes()) if path.is_file() else {}
        value = record.get("chat_template") if isinstance(record, dict) else None
        # One template, or a list of {"name", "template"}.
        texts = (
            [t.get("template") for t in value if isinstance(t, dict)] if isinstance(value, list) else [value]
        )
        texts_by_file |= {
            f"{name} ({n})" if n else name: t for n, t in enumerate(texts) if isinstance(t, str)
        }
    return texts_by_file


def render(template: str) -> None:
    """Render a template for a few chats, as transformers does; refusals are reported where it is used."""
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
    """Try the tokenizer and all templates under limits on CPU seconds and bytes of memory."""
    # A second more than the soft limit, so that SIGXCPU comes before SIGKILL.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    path = folder / "tokenizer.json"
    if path.is_file():
        print(path.name, flush=True)
        try:
            tokenizer = Tokenizer.from_file(str(path))
            for text in TEXTS:
                tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
        except Exception as refusal:  # the library raises nothing narrower; reported where it is used
            if isinstance(refusal, MemoryError):
                raise
    for name, template in templates(folder).items():
        print(name, flush=True)
        try:
            render(template)
        except (MemoryError, RecursionError):
            raise
        except Exception:  # noqa: S112 - of any kind, and reported where the template is used
            continue


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
