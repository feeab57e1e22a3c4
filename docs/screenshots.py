"""The pictures of the pages, light and dark: `python docs/screenshots.py [RUNS [RUN]]`, about 20 seconds.

RUN is a run below the folder RUNS, by default runs/demo and 2-rl. Needs playwright and Chromium.
Look at every picture before it is committed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from playwright.sync_api import Page, sync_playwright

from covey.runs.rollouts import recorded_steps

IMAGES = Path(__file__).parent / "images"
SIZE = {"width": 1200, "height": 960}
EARLY = 4
"""A step early in a run has groups of all kinds."""
READY = {"ui-run": ".chart canvas", "ui-token": ".tokens .tok", "lab": ".card .gain .num"}
"""Name of a picture -> what is there once its page is drawn."""


def views(run: str, step: int, group: int) -> dict[str, str]:
    """Name of a picture -> the page's address below the site."""
    page = f"#/run/{run.replace('/', '%2F')}"
    return {"ui-run": page, "ui-token": f"{page}/step/{step}/group/{group}/token/0", "lab": "#/lab"}


def take(page: Page, url: str, run: str, step: int, theme: str) -> None:
    """All pictures in one theme."""
    page.goto(url)
    (token,) = parse_qs(urlsplit(url).query)["token"]
    query = f"api/step?run={run}&step={step}&token={token}"
    group = page.evaluate("q => fetch(q).then(r => r.json()).then(s => s.groups[0].group)", query)
    for name, fragment in views(run, step, group).items():
        page.evaluate("f => { location.hash = f; }", fragment)
        page.wait_for_selector(READY[name])
        page.wait_for_timeout(1000)
        if name == "ui-token":
            page.check("input[value=entropy]", force=True)
        page.screenshot(path=IMAGES / f"{name}-{theme}.png")


def main(runs: Path, run: str) -> None:
    """Start the pages, take the pictures, end the pages."""
    steps = recorded_steps(runs / run)
    if not steps:
        raise SystemExit(f"{runs / run}: no run with completions; `make demo` makes one")
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser")
    command = [sys.executable, "-m", "covey", "ui", str(runs), "--no-open", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as pages, sync_playwright() as play:
        assert pages.stdout is not None
        try:
            url = json.loads(pages.stdout.readline())["url"]
            browser = play.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
            for theme in ("light", "dark"):
                context = browser.new_context(viewport=SIZE, color_scheme=theme)
                take(context.new_page(), url, run, min(steps, key=lambda s: abs(s - EARLY)), theme)
            browser.close()
        finally:
            pages.terminate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="?", default=Path("runs/demo"))
    parser.add_argument("run", nargs="?", default="2-rl")
    given = parser.parse_args()
    main(given.runs, given.run)
