"""Every attack of the list on every backend that works here. One JSON line a backend, then a table.

python benchmarks/verifiers/sandbox_attacks.py [backend ...]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packages/verify/tests/sandbox"))

from attacks import ATTACKS, assault, laid_out

from covey_verify.errors import SandboxUnavailable
from covey_verify.sandbox.choice import choose


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
        "user": "root" if os.geteuid() == 0 else "ordinary",
        "kernel": platform.release(),
        "attacks": len(rows),
        "succeeded": [r for r in rows if r["problems"]],
        "ends": {r["attack"]: f"{r['end']} {r['seconds']:.2f} s" for r in rows},
        "seconds": round(time.monotonic() - began, 1),
    }


def table(found: list[dict[str, object]]) -> str:
    """attack | how it ended on each backend."""
    names = [str(f["backend"]) for f in found]
    lines = [f"| attack | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for attack in ATTACKS:
        ends = [str(f["ends"][attack.name]) for f in found]  # type: ignore[index]
        lines.append(f"| {attack.name} | {' | '.join(ends)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backends", nargs="*", default=["bwrap", "landlock", "wasm"])
    campaigns = []
    for name in parser.parse_args().backends:
        campaigns.append(campaign(name))
        print(json.dumps(campaigns[-1]), flush=True)
    print(table([c for c in campaigns if "ends" in c]))
