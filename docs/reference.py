"""The generated pages of the site: every setting, every function of an algorithm, the Python API.

Settings are the rows that `covey explain` prints; the API is signatures and
docstrings. `docs/website.py` writes them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from types import ModuleType, NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import covey.trl
from covey.cli.settings import loss_rows
from covey.config.algorithm import algorithm_rows
from covey.config.methods import ALL_METHODS, METHODS, MODEL_METHODS
from covey.config.rows import SettingRow, fact_of, schema_fields, schema_rows
from covey.objective.algorithms import PRESETS
from covey.objective.axes import AXES
from covey.objective.axis_function import AxisFunction
from covey.trl.meanings import MEANINGS

LINE = 100
"""Longest signature that stays on one line, characters."""
SHOWN_PRESETS = 8
"""Presets named at a function; more are counted."""
API: Mapping[str, Sequence[str]] = {
    "python.md": ("covey",),
    "verifiers.md": ("covey_verify",),
    "trl.md": ("covey.trl",),
    "audit.md": ("covey.audit.writers.trl", "covey.audit.writers.recorder"),
}
"""Page of the API -> the modules whose public names it has."""
INTRODUCTION: Mapping[str, str] = {
    "settings.md": """
# Settings

Every setting of a config, with its default. Write it in YAML (`train: {lr: 1.0e-6}`), on the command
line (`--train.lr 1e-6`) or in Python (`train={"lr": 1e-6}`). `covey explain train.lr` prints its entry.
The settings of `algorithm` and `loss` are on [their own page](algorithm.md).

*On resume* says whether `covey resume RUN` may change a setting. *Safe*: yes. *Breaks exactness*: yes,
but the run does not give the numbers that it would have given. *Refused*: no.

## The run
""",
    "algorithm.md": """
# Algorithm and loss

The axes of `algorithm`, the functions that each may name, and their settings; then the settings of `loss`.
[Algorithms](../algorithms/README.md) shows how to choose.

## `algorithm` { #algorithm }
""",
    "python.md": """
# covey

`import covey`: train, evaluate and sample from a script or a notebook.
""",
    "verifiers.md": """
# covey_verify

The verifiers. In a config each is a reward, and its keywords are settings:
`rewards: [{math_answer: {percent: hundredths}}]`. [Rewards](../rewards.md) shows how to choose one, and
[covey-verify](../../packages/verify/README.md) how to use them without covey.
""",
    "trl.md": """
# covey.trl

TRL's trainers and configs, by TRL's names. [Coming from TRL](../algorithms/trl.md) shows how to use them.
""",
    "audit.md": """
# covey.audit

Recorders for other trainers. [Audit](../audit.md) shows how to use them.
""",
}
"""Page -> its beginning."""
TRL_FIELDS = """
## Fields

Every field of TRL's configs: it is a setting of covey with the same meaning, it is read by the trainer,
it has no effect, or it is refused.

| field | configs | | in covey |
|---|---|---|---|
"""


def pages() -> dict[str, str]:
    """Return file name -> text of all generated pages."""
    api = {file: api_page(modules) for file, modules in API.items()}
    made = {"settings.md": settings_page(), "algorithm.md": algorithm_page(), **api}
    made["trl.md"] += trl_fields()
    return {file: f"{INTRODUCTION[file].strip()}\n\n{text}" for file, text in made.items()}


# --- settings ---------------------------------------------------------------------------------------


def settings_page() -> str:
    """Return the page of the settings of a config, a heading for each."""
    parts = list[str]()
    section = ""
    for row in sorted(schema_rows(), key=lambda row: "." in row.key):  # settings outside of sections first
        own = row.key.rpartition(".")[0]
        if own != section:
            section = own
            about = prose(schema_fields()[own].annotation.__doc__)
            parts.append(f"## `{own}` {{ #{own} }}\n\n{about}")
        parts.append(setting(row, row.key, facts_of_key(row.key)))
    return "\n".join(parts)


def algorithm_page() -> str:
    """Return the page of the axes, their functions, and the settings of functions and losses."""
    rows = [*algorithm_rows(), *loss_rows()]
    parts = [setting(row, row.key) for row in rows if not row.owner]
    for axis, functions in AXES.items():
        parts.append(f"## Functions of `{axis}` {{ #functions-{axis} }}\n")
        for function in functions:
            users = [name for name, preset in PRESETS.items() if function in functions_of(preset)]
            parts.append(f"### `{axis}: {function.__name__}` {{ #{axis}-{function.__name__} }}\n")
            parts.append(f"{prose(function.__doc__)}\n\n{used_by(users)}")
            key = f"algorithm.{axis}"
            own = [row for row in rows if row.key.startswith(key) and row.owner == function.__name__]
            parts += [setting(row, f"{row.key} of {row.owner}") for row in own]
    for record in ("kl", "entropy", "critic"):
        parts.append(f"## `{record}` {{ #record-{record} }}\n")
        parts += [setting(row, row.key) for row in rows if row.owner == record]
    parts.append("## `loss`\n\nThe loss of a [method](../stages.md) other than `rl`.\n")
    parts += [setting(row, f"{row.key} of {row.owner}") for row in rows if row.owner in METHODS]
    return "\n".join(parts)


def setting(row: SettingRow, title: str, more: Sequence[str] = ()) -> str:
    """Return the entry of a setting: heading, effect, facts."""
    known = row.setting
    key, _, owner = title.partition(" of ")
    values = row.values if row.values.startswith("one of") else f"{kind_text(row.type)} {row.values}".strip()
    facts = [f"Default: {code(row.default)}", f"Values: {values}" if values else ""]
    facts += [
        f"Usual: {known.usual}" if known.usual else "",
        f"Source: {known.source}" if known.source else "",
    ]
    facts += [f"In TRL: {', '.join(map(code, known.trl_names))}" if known.trl_names else "", *more]
    anchor = f"{key}.{owner}" if owner else key
    heading = f"{'####' if owner else '###'} `{key}`{f' of `{owner}`' if owner else ''} {{ #{anchor} }}"
    listed = "\n".join(f"- {escaped(fact)}" for fact in facts if fact)
    return f"{heading}\n\n{escaped(known.effect)}\n\n{listed}\n"


def facts_of_key(key: str) -> list[str]:
    """Return which methods read a setting, and the effect of a change on resume."""
    readers = tuple(fact_of(key, "read_by") or ())
    others = [name for name in ALL_METHODS if name not in readers]
    if set(readers) == set(ALL_METHODS):
        said = "every method"
    elif not readers or set(readers) == set(MODEL_METHODS):
        said = "every method with a model"
    elif len(readers) > len(others):
        said = f"every method but {', '.join(map(code, others))}"
    else:
        said = ", ".join(map(code, readers))
    return [f"Read by: {said}", f"On resume: {fact_of(key, 'resume') or 'breaks exactness'}"]


def functions_of(preset: Any) -> set[object]:
    """Return the functions on all axes of a preset."""
    bound = [*vars(preset).values(), *preset.policy_weights, preset.kl and preset.kl.estimator]
    bound += [b for several in vars(preset).values() if isinstance(several, tuple) for b in several]
    return {b.function for b in bound if isinstance(b, AxisFunction)}


def used_by(presets: Sequence[str]) -> str:
    """Return a line with the presets that use a function."""
    if not presets:
        return ""
    more = f" and {len(presets) - SHOWN_PRESETS} more" if len(presets) > SHOWN_PRESETS else ""
    return f"Used by {', '.join(map(code, presets[:SHOWN_PRESETS]))}{more}.\n"


def kind_text(kind: Any) -> str:
    """Return a type as a reader of YAML names it.

    >>> kind_text(int | None), kind_text(dict[str, str]), kind_text(tuple[str, ...])
    ('int or null', 'mapping', 'list')
    """
    if get_origin(kind) is Annotated:
        return kind_text(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    if get_origin(kind) in (tuple, list, dict):
        return "mapping" if get_origin(kind) is dict else "list"
    words = {NoneType: "null", str: "text", bool: "true or false"}
    if get_args(kind):
        return " or ".join(dict.fromkeys(kind_text(part) for part in get_args(kind)))
    name = getattr(kind, "__name__", "")
    return words.get(kind, {"Path": "path"}.get(name, "object" if name.endswith("Object") else name))


# --- the API ----------------------------------------------------------------------------------------


def api_page(modules: Sequence[str]) -> str:
    """Return the public names of modules, then the classes of covey that they are derived from."""
    loaded = [importlib.import_module(module) for module in modules]
    named = {f"{m.__name__}.{name}": getattr(m, name) for m in loaded for name in public_names(m)}
    for thing in list(named.values()):
        for base in getattr(thing, "__mro__", ())[1:]:
            if base.__module__.startswith("covey") and base not in named.values():
                named[f"{base.__module__}.{base.__name__}"] = base
    return "\n".join(entry(name, thing) for name, thing in named.items())


def public_names(module: ModuleType) -> list[str]:
    """Return the names in a module's `__all__`, or else those that it defines, without `_` before them."""
    defined = {
        name: thing
        for name, thing in vars(module).items()
        if inspect.isroutine(thing) or inspect.isclass(thing)
    }
    own = [name for name, thing in defined.items() if thing.__module__ == module.__name__]
    return [name for name in getattr(module, "__all__", own) if not name.startswith("_")]


def entry(name: str, thing: Any) -> str:
    """Return a function or a class with its fields, properties and methods."""
    parts = [f"## `{name}` {{ #{name} }}\n", signature(thing), prose(inspect.getdoc(thing))]
    if inspect.isclass(thing):
        parts += attributes(thing)
        for member, function in vars(thing).items():
            own = getattr(function, "__func__", function)  # of a classmethod
            if not member.startswith("_") and inspect.isfunction(own):
                parts.append(f"### `{member}` {{ #{name}.{member} }}\n")
                parts += [signature(own), prose(inspect.getdoc(own))]
    return "\n".join(parts)


def signature(thing: Any) -> str:
    """Return a signature as a block of Python, a parameter a line if it is long."""
    if is_trl_config(thing) or (inspect.isclass(thing) and issubclass(thing, Exception)):
        return ""
    found = inspect.signature(thing)
    words, keywords = list[str](), False
    for p in found.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not keywords:
            words.append("*")
        keywords = keywords or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        if p.name != "self":
            words.append(
                str(p.replace(annotation=Bare(p.annotation)) if isinstance(p.annotation, str) else p)
            )
    back = "" if found.return_annotation in ("None", None, found.empty) else f" -> {found.return_annotation}"
    head = f"{'class ' * inspect.isclass(thing)}{thing.__name__}("
    text = f"{head}{', '.join(words)}){back}"
    if len(text) > LINE:
        text = f"{head}\n" + "".join(f"    {word},\n" for word in words) + f"){back}"
    return f"```python\n{text}\n```\n"


class Bare(str):
    """An annotation that is written without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def is_trl_config(thing: object) -> bool:
    """Whether this is one of TRL's configs, whose fields are in a table of their own."""
    return getattr(thing, "__name__", "") in (*MEANINGS, "ModelConfig", "ScriptArguments")


def attributes(cls: type) -> Iterator[str]:
    """Yield a line for each public field and property of a class that has a description."""
    if is_trl_config(cls):
        return
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    for node, after in zip(body, [*body[1:], None], strict=True):
        name, about = "", ""
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            described = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            about = str(after.value.value) if described else ""
        if isinstance(node, ast.FunctionDef) and isinstance(getattr(cls, node.name, None), property):
            name, about = node.name, ast.get_docstring(node) or ""
        if about and not name.startswith("_"):  # the others are in the signature
            yield f"- {code(name)}: {prose(about).strip()}".replace("\n", "\n  ")
    yield ""


def trl_fields() -> str:
    """Return the table of TRL's fields: a row for each meaning, with the configs that have it."""
    rows = dict[tuple[str, str, str], list[str]]()
    for config, meanings in MEANINGS.items():
        for field in fields(getattr(covey.trl, config)):
            meaning = meanings[field.name]
            here = code(meaning.text) if meaning.kind == "setting" else escaped(meaning.text)
            rows.setdefault((field.name, meaning.kind, here), []).append(config.removesuffix("Config"))
    lines = list[str]()
    for (name, kind, here), configs in sorted(rows.items()):
        which = "all" if len(configs) == len(MEANINGS) else ", ".join(configs)
        lines.append(f"| {code(name)} | {which} | {kind} | {here} |")
    return "\n".join([TRL_FIELDS.strip(), *lines, ""])


# --- text -------------------------------------------------------------------------------------------


def prose(docstring: str | None) -> str:
    """Return a docstring as Markdown: its examples become blocks of code."""
    parts = []
    for part in re.split(r"\n\s*\n", inspect.cleandoc(docstring or "")):
        lead, mark, example = part.partition(">>>")
        parts += [lead if lead.startswith("    ") else escaped(lead)] if lead.strip() else []
        parts += [f"```pycon\n{textwrap.dedent(mark + example)}\n```"] if mark else []
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """Return a text in which only backticks are markup."""
    parts = re.split(r"(`+[^`]+`+)", text)
    parts[::2] = (re.sub(r"([*_\[\]{}])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2])
    return "".join(parts)


def code(value: object) -> str:
    """Return a value as code, as YAML writes it.

    >>> code(None), code(True), code(("a", 1)), code("")
    ('`null`', '`true`', '`[a, 1]`', "`''`")
    """
    words: dict[object, str] = {None: "null", True: "true", False: "false", "": "''"}
    if isinstance(value, tuple | list):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{words[value] if isinstance(value, bool | NoneType) or value == '' else value}`"
