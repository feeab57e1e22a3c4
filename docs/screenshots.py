"""The pictures of the pages, light and dark: `python docs/screenshots.py RUNS RUN`, of a run in that folder.

Needs playwright and Chromium. Look at every picture before it is committed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
SIZE = {"width": 1200, "height": 800}
STEP = 4
"""A step early in the run, with groups of all kinds."""


def views(run: str) -> dict[str, str]:
    """Name of a picture -> the page's address below the site."""
    step = f"#/run/{run.replace('/', '%2F')}/step/{STEP}"
    return {
        "ui-run": f"#/run/{run.replace('/', '%2F')}",
        "ui-token": f"{step}/group/{{group}}/token/0",
        "lab": "#/lab",
    }


def take(page: Page, url: str, run: str, theme: str) -> None:
    """All pictures in one theme."""
    page.goto(url)
    query = f"api/step?run={run}&step={STEP}"
    group = page.evaluate("q => fetch(q).then(r => r.json()).then(s => s.groups[0].group)", query)
    for name, fragment in views(run).items():
        page.evaluate("f => { location.hash = f; }", fragment.format(group=group))
        page.wait_for_timeout(1500)
        if name == "ui-token":
            page.check("input[value=entropy]", force=True)
        page.screenshot(path=IMAGES / f"{name}-{theme}.png")


def main(runs: Path, run: str) -> None:
    """Start the pages, take the pictures, end the pages."""
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser")
    command = [sys.executable, "-m", "covey", "ui", str(runs), "--no-open", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as pages, sync_playwright() as play:
        assert pages.stdout is not None
        url = json.loads(pages.stdout.readline())["url"]
        browser = play.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for theme in ("light", "dark"):
            context = browser.new_context(viewport=SIZE, color_scheme=theme)
            take(context.new_page(), url, run, theme)
        browser.close()
        pages.terminate()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
