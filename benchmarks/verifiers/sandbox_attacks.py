"""Every attack of the list on every backend that works here. One JSON line a backend.

python benchmarks/verifiers/sandbox_attacks.py [backend ...]
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.sandbox.attacks import ATTACKS, assault, laid_out

from covey.sandbox.base import SandboxUnavailable
from covey.sandbox.choice import choose


def campaign(backend: str) -> dict[str, object]:
    """All attacks on one backend."""
    try:
        sandbox = choose(backend).sandbox
    except SandboxUnavailable as error:
        return {"backend": backend, "unavailable": str(error).splitlines()[1].strip()}
    began = time.monotonic()
    rows = []
    for attack in ATTACKS:
        with laid_out() as bait:
            rows.append(assault(sandbox, attack, bait))
    return {
        "backend": backend,
        "layers": sandbox.layers,
        "user": "root" if __import__("os").geteuid() == 0 else "ordinary",
        "kernel": platform.release(),
        "attacks": len(rows),
        "succeeded": [r for r in rows if r["problems"]],
        "ends": {r["attack"]: f"{r['end']} {r['seconds']:.2f} s" for r in rows},
        "seconds": round(time.monotonic() - began, 1),
    }


if __name__ == "__main__":
    for name in sys.argv[1:] or ("bwrap", "landlock", "wasm"):
        print(json.dumps(campaign(name)), flush=True)
