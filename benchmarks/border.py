"""The border of tokens and text in made-up worlds, for as long as one likes (`tests/border` has the claims).

python benchmarks/border.py --minutes 60             # from a seed that the day gives
python benchmarks/border.py --first 123 --minutes 0  # one world again
"""

from __future__ import annotations

import argparse
import datetime as dt
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.border.claims import tried


def main() -> int:
    """Try worlds until the time is up; 1 where one fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=dt.datetime.now(tz=dt.UTC).toordinal() * 1_000_000)
    options = parser.parse_args()
    ends, failures, became, seed = time.monotonic() + 60 * options.minutes, 0, Counter[str](), options.first
    with tempfile.TemporaryDirectory() as folder:
        while True:
            try:
                became.update(f"{claim}: {what}" for claim, what in tried(seed, Path(folder)).items())
            except AssertionError as error:
                failures += 1
                print(str(error)[:600], flush=True)
            seed += 1
            if (seed - options.first) % 500 == 0:
                print(f"{seed - options.first:,} worlds, {failures} failed", flush=True)
            if time.monotonic() >= ends:
                break
    print(f"{seed - options.first:,} worlds from {options.first}, {failures} failed")
    for what, count in sorted(became.items()):
        print(f"  {what}: {count:,}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
