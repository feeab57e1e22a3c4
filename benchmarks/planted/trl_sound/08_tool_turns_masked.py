# SOUND: a rollout_func with a calculator's turn in the middle whose tokens are 0 in env_mask, EOS inside the completion included. EXPECT: no mistake.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


def with_calculator(prompts, trainer):
    """Two turns: the model speaks, the environment appends a calculator's line, the model speaks again."""
    tok, net = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    asked = [tok(p)["input_ids"] for p in prompts]
    first, lp1 = sample(net, tok, asked, 8)
    said = []
    for p in prompts:
        a, b = re.findall(r"\d+", p)[:2]
        said.append(tok(f"\n[calculator] {a}+{b} = {int(a) + int(b)}\nA:")["input_ids"])
    second, lp2 = sample(net, tok, [x + y + z for x, y, z in zip(asked, first, said)], 10)
    ids = [x + y + z for x, y, z in zip(first, said, second)]
    logps = [x + [0.0] * len(y) + z for x, y, z in zip(lp1, said, lp2)]
    mask = [[1] * len(x) + [0] * len(y) + [1] * len(z) for x, y, z in zip(first, said, second)]
    return {"prompt_ids": asked, "completion_ids": ids, "logprobs": logps, "env_mask": mask}


trainer = GRPOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=GRPOConfig(**settings("08_tool_turns_masked", max_completion_length=48)),
    train_dataset=Dataset.from_list(sums()),
    rollout_func=with_calculator,
)
record_run(trainer, out(__file__))
trainer.train()
