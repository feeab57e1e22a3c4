"""Write train.jsonl and test.jsonl: dates as people write them, and as ISO 8601 has them."""

import datetime as dt
import json
import random
from pathlib import Path

FORMS = ("%B %-d, %Y", "%-d %B %Y", "%a %-d %b %Y", "%b %-d %Y")
START = dt.date(2000, 1, 1)

rng = random.Random(0)
days = [START + dt.timedelta(days=n) for n in rng.sample(range(9000), 1200)]
for name, part in (("train", days[:1000]), ("test", days[1000:])):
    rows = []
    for day in part:
        written = day.strftime(rng.choice(FORMS))
        question = f"Write the date {written} as YYYY-MM-DD. Write nothing else."
        rows.append({"prompt": question, "answer": day.isoformat()})
    file = Path(__file__).with_name(f"{name}.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
