"""The commands to learn with: algorithms, lab."""

from __future__ import annotations

from pathlib import Path

from covey.cli.groups import LEARN
from covey.cli.options import (
    Json,
    OpenBrowser,
    app,
    print_remarks,
    print_result,
)


@app.command(name="algorithms", group=LEARN)
def command_algorithms(name: str | None = None, *, dialect: str | None = None, as_json: Json = False) -> int:
    """List the algorithms axis by axis, or show the formulas and YAML of one, also in a --dialect.

    :param name: An algorithm such as dapo; without it all are listed.
    :param dialect: The framework whose conventions the algorithm takes, such as trl-1.16.
    """
    from covey.cli.algorithms import print_algorithm, print_presets

    return print_algorithm(name or "grpo", as_json, dialect) if name or dialect else print_presets(as_json)


@app.command(name="lab", group=LEARN)
def command_lab(
    runs: Path = Path("runs"),
    *,
    port: int = 0,
    open_browser: OpenBrowser = True,
    static: Path | None = None,
    as_json: Json = False,
) -> int:
    """Open an interactive page on GRPO: enter rewards and see advantages, by the library's own functions.

    :param runs: Runs whose groups can be opened, as for `covey ui`.
    :param port: Port on 127.0.0.1; 0 takes any free one.
    :param static: Write a copy with the worked examples into this folder instead; it needs no server.
    """
    if static is not None:
        from covey.insight.pages.copy import write_copy

        page = write_copy(static)
        print_result(as_json, {"page": str(page)}, [str(page)])
        return 0
    print_remarks(as_json, ["the lab: loading ..."])
    from covey.insight.pages.server import serve_pages

    serve_pages(runs if runs.is_dir() else None, port, open_browser, "#/lab", as_json)
    return 0
