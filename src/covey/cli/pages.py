"""The commands `covey ui` and `covey lab`, which show pages in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from covey.cli.commands import Json, _print, app
from covey.cli.groups import LEARN, RUNS

Open = Annotated[
    bool, Parameter(name="--open", negative="--no-open", help="Open a browser, where there is one.")
]


@app.command(name="ui", group=RUNS)
def command_ui(
    runs: Path = Path("runs"), *, port: int = 0, open_browser: Open = True, as_json: Json = False
) -> int:
    """Look at runs in a browser: curves while they write, groups, completions token by token.

    :param runs: The folder of a run, or one with runs in it.
    :param port: On 127.0.0.1; 0 takes any that is free.
    """
    from covey.insight.pages.server import serve_pages

    serve_pages(runs, port, open_browser, "#/", as_json)
    return 0


@app.command(name="lab", group=LEARN)
def command_lab(
    runs: Path = Path("runs"),
    *,
    port: int = 0,
    open_browser: Open = True,
    static: Path | None = None,
    as_json: Json = False,
) -> int:
    """Understand GRPO by trying it: rewards in, advantages out, with the library's own functions.

    :param runs: Runs whose groups can be opened, as for `covey ui`.
    :param port: On 127.0.0.1; 0 takes any that is free.
    :param static: Write a copy with the worked examples into this folder instead; it needs no server.
    """
    if static is not None:
        from covey.insight.pages.copy import write_copy

        page = write_copy(static)
        _print(as_json, {"page": str(page)}, [str(page)])
        return 0
    from covey.insight.pages.server import serve_pages

    serve_pages(runs if runs.is_dir() else None, port, open_browser, "#/lab", as_json)
    return 0
