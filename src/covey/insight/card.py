"""The model card: what the model is, what it measured, how to use it. Real numbers only."""

from __future__ import annotations

from collections.abc import Mapping

from covey.config.load import Loaded
from covey.evaluate import Evaluation
from covey.insight.verdict import Verdict

CARD = """---
library_name: transformers
tags: [covey, reinforcement-learning, {algorithm}]
---

# {name}

Trained from `{base}` with covey: {method}, {steps} steps, seed {seed}.

{verdict}

{table}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({path!r})
model = AutoModelForCausalLM.from_pretrained({path!r})
inputs = tokenizer({prompt!r}, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens={max_tokens})[0]))
```

`config.yaml` beside this folder holds every setting, `metrics.jsonl` every step.
"""


def model_card(
    loaded: Loaded, steps: int, verdict: Verdict | None, evaluations: Mapping[str, Evaluation], prompt: str
) -> str:
    """Markdown for `final/README.md`. ``evaluations`` are columns, by name."""
    config = loaded.config
    algorithm = (
        config.algorithm if isinstance(config.algorithm, str) else config.algorithm.get("name", "dapo")
    )
    return CARD.format(
        name=config.output.name,
        base=config.model,
        method=algorithm if config.method == "rl" else "supervised fine-tuning",
        algorithm=algorithm,
        steps=steps,
        seed=config.seed,
        verdict=verdict.sentence if verdict else "There were no held-out problems to measure it on.",
        table=_table(evaluations),
        path=str(config.output / "final"),
        prompt=prompt,
        max_tokens=config.rollout.max_tokens,
    )


def _table(evaluations: Mapping[str, Evaluation]) -> str:
    if not evaluations:
        return ""
    summaries = {name: e.summary() for name, e in evaluations.items()}
    measures = list(next(iter(summaries.values())))
    lines = [f"| held-out | {' | '.join(summaries)} |", "|---" * (len(summaries) + 1) + "|"]
    lines += [f"| {m} | {' | '.join(str(s[m]) for s in summaries.values())} |" for m in measures]
    return "\n".join(lines)
