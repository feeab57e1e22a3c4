"""Pages as one HTML file that sends no requests: static files inlined, the server's answers stored."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files

from covey.system.text import escape_controls

SHARED = ("dom", "plot", "site")
"""Modules of every document."""


def document(
    title: str,
    modules: Sequence[str],
    answers: Mapping[str, object],
    refusal: str,
    plots: bool = False,
) -> str:
    """Return a page whose content security policy forbids every request.

    ``modules`` are names in `static`; the last one starts the page. ``answers`` has the answer to each
    question that the page can ask, by its ``address``; any other question gets ``refusal``. ``plots`` says
    whether the page draws curves.
    """
    library, sheet = (_static(f"vendor/uPlot.min.{kind}") if plots else "" for kind in ("js", "css"))
    texts = (_static(f"{name}.js") for name in (*SHARED, *modules))
    script = "\n".join(map(_without_modules, texts))
    style = sheet + _static("style.css")
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"script-src {_digest(library)} {_digest(script)}; style-src {_digest(style)}"
    )
    # A folder's name need not be text.
    escaped_title = html.escape(escape_controls(title)).encode("ascii", "xmlcharrefreplace").decode()
    # ASCII only, and "<" is escaped: no text in it can end its element, begin a comment or turn a line.
    stored = json.dumps(answers, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escaped_title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header id="bar"></header>
<noscript>This page needs JavaScript.</noscript>
<main id="main" tabindex="-1"></main>
<script type="application/json" id="answers" data-refusal="{html.escape(refusal)}">{stored}</script>
<script>{library}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def address(path: str, query: Mapping[str, object]) -> str:
    """Return the key of a stored answer: the same as `keyOf` in `dom.js`."""
    return f"{path}?" + "&".join(sorted(f"{name}={value}" for name, value in query.items()))


def _static(name: str) -> str:
    return (files("covey") / "insight" / "pages" / "static" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _without_modules(text: str) -> str:
    """Return a module's text without imports and exports, for one scope with the other modules.

    Their top-level names are all different.
    """
    text = re.sub(r"^import [^;]*;\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^export ", "", text, flags=re.MULTILINE)
