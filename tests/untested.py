"""The summary at the end of a test run: which tests did not run, and what they need."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

REMEDIES = (
    (r"bubblewrap|bwrap", "sandbox tests need bubblewrap: apt-get install bubblewrap"),
    (r"no sandbox", "sandbox tests need bubblewrap, or Linux 5.13 with Landlock: see docs/sandbox.md"),
    (r"gcc", "compilers' tests need gcc: apt-get install gcc"),
    (r"Coq", "tests of proofs need Coq: apt-get install coq"),
    (r"strace", "tests of system calls need strace: apt-get install strace"),
    (r"kernel's headers", "the system call filter's test needs: apt-get install linux-libc-dev"),
    (r"root may", "tests of file permissions need an ordinary user: do not run as root"),
    (r"could not import '(\w+)|No module named '(\w+)|(\w+) is not installed", r"tests need the module {}"),
)
MARKERS = {
    "slow": "take minutes: make test-all",
    "gpu": "need a CUDA device: pytest -m gpu",
    "network": "need the internet: pytest -m network",
}


def remedy(reason: str) -> str:
    """Return what a skipped test needs to run; the reason itself if no pattern matches it."""
    for pattern, words in REMEDIES:
        if match := re.search(pattern, reason):
            return words.format(next(filter(None, match.groups()), ""))
    return reason.removeprefix("Skipped: ").splitlines()[0][:100]


def lines(skipped: Iterable[str], deselected: Iterable[Iterable[str]]) -> list[str]:
    """Return a line per remedy, from the reasons of skipped tests and the marks of deselected ones."""
    missing = Counter(map(remedy, skipped))
    left = Counter(mark for marks in deselected for mark in MARKERS if mark in marks)
    found = [f"{count} skipped: {what}" for what, count in missing.items()]
    return found + [f"{count} left out: they {MARKERS[mark]}" for mark, count in left.items()]
