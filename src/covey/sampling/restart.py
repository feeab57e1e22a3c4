"""Restarting a sampling server by its user's own command, where it cannot take weights while it runs."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from covey_verify.children import how_ended, run
from covey_verify.web import ask


def restart(command: str, url: str, folder: Path, timeout: float) -> None:
    """Run a shell command that restarts the server at ``url`` on a model folder, and wait until it answers.

    The command reads them from COVEY_URL and COVEY_MODEL and returns once the server is starting. Command and
    start together have ``timeout`` seconds. Raises OSError.
    """
    ends = time.monotonic() + timeout
    told = {**os.environ, "COVEY_URL": url, "COVEY_MODEL": str(folder)}
    try:
        # Its output goes where ours goes, and the server that it leaves in the background is not ended.
        done = run(command, timeout, shell=True, env=told, stdout=None, stderr=None)  # noqa: S604
    except subprocess.TimeoutExpired:
        raise OSError(f"rollout.sampler.restart did not return in {timeout:g} s") from None
    if done.returncode:
        raise OSError(f"rollout.sampler.restart failed: {how_ended(done.returncode)}")
    while not _answers(url):
        if time.monotonic() > ends:
            raise OSError(f"no answer within {timeout:g} s after rollout.sampler.restart")
        time.sleep(0.5)


def _answers(url: str) -> bool:
    try:
        ask(f"{url}/health", timeout=5.0)
    except OSError:  # HTTPError, too
        return False
    except ValueError:
        pass  # something that is no JSON: it answers
    return True
