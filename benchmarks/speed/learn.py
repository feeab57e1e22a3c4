"""CPU seconds from the same cold start to 90 % of held-out problems, sampled: covey beside TRL.

    python benchmarks/speed/learn.py [--seeds 3] [--cap 6] [--rates 1e-4 2e-4 4e-4] [--jobs 1]
        [--width 128] [--write]

The cold start is the demo's first stage, of the demo's model or of one as deep and of another width. Both
sides use one thread and the demo's second stage: 256 completions a step, four updates per batch, DAPO's loss,
the KL to a reference that is renewed. covey's advantage is the demo's, MaxRL's, which TRL does not have: its
is divided by the standard deviation. Where `precision: auto` rounds products, TRL runs under autocast.
Everything that a process does is counted, its start and its evaluations too (covey's are greedy as well as
sampled). TRL's GRPOTrainer runs at each of the learning rates; the best is what counts. A side that is not
there after `--cap` times covey's seconds is given up. `--write` keeps the table in benchmarks/results.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from covey.models.tiny import build_model, build_tokenizer
from covey.tasks import TASKS
from covey.tasks.generated import generate_problems

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks/results/learn.md"
DEMO = yaml.safe_load((ROOT / "src/covey/config/recipes/demo.yaml").read_text())
STAGE = DEMO["stages"][1]
KL = STAGE["algorithm"]["kl"]
DEMO_WIDTH = 128
BAR = 0.9
EVERY = 10


def run(command: list[Any]) -> tuple[str, float]:
    """Standard output and CPU seconds of a child process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen([str(c) for c in command], stdout=out, stderr=err, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        for file in (out, err):
            file.seek(0)
        if os.waitstatus_to_exitcode(status) not in (0, 1):
            raise SystemExit(f"{' '.join(map(str, command))} failed: {err.read()[-800:]}")
        return out.read(), usage.ru_utime + usage.ru_stime


def covey(config: dict[str, Any], file: Path) -> float:
    """Train as a config says; CPU seconds of the process."""
    file.write_text(yaml.safe_dump({**config, "threads": 1}))
    return run([sys.executable, "-m", "covey", "train", file, "--json"])[1]


def common(folder: Path, seed: int) -> dict[str, Any]:
    """The demo without its stages."""
    return {**{k: v for k, v in DEMO.items() if k != "stages"}, "seed": seed, "output": str(folder)}


def untrained(folder: Path, seed: int, width: int) -> Path:
    """A model like the demo's of another width."""
    examples = generate_problems(TASKS[DEMO["data"]["task"]], "train", 2000)
    tokenizer = build_tokenizer(f"{p.prompt}{p.columns['completion']}" for p in examples)
    build_model(tokenizer, seed, hidden=width).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def cold_start(folder: Path, seed: int, width: int) -> Path:
    """The demo's first stage; its model."""
    config = common(folder / "cold", seed) | DEMO["stages"][0]
    if width != DEMO_WIDTH:
        config["model"] = str(untrained(folder / "untrained", seed, width))
    covey(config, folder / "cold.yaml")
    return folder / "cold/final"


def ours(folder: Path, seed: int, model: Path) -> tuple[float, int, float]:
    """The demo's second stage until the bar or its last step: CPU seconds, steps and accuracy."""
    config = common(folder / "ours", seed) | STAGE | {"model": str(model)}
    config["train"] = {**config["train"], "stop_at": BAR, "save_every": 1000}
    config["eval"] = {"every": EVERY, "problems": 256, "samples": 1}
    seconds = covey(config, folder / "ours.yaml")
    last = json.loads((folder / "ours/evals.jsonl").read_text().splitlines()[-1])
    return seconds, last["step"], last["pass@1"]


def trl_worker(model: str, seed: int, rate: float, cap: float) -> None:
    """Train with TRL until the bar or the cap; prints steps and accuracy as JSON."""
    import datasets
    import peer
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    from covey.models.kernels.calls import rounding_pays
    from covey.models.policy import Policy
    from covey.rng import key
    from covey.sampling.base import Request, SamplingParams
    from covey.sampling.local import LocalSampler
    from covey_verify.mathematics.answers import math_answer
    from covey_verify.texts.formats import answer_format

    torch.set_num_threads(1)
    task = TASKS[DEMO["data"]["task"]]
    tokenizer = AutoTokenizer.from_pretrained(model)
    train, held_out = generate_problems(task, "train", 2000), generate_problems(task, "test", 256)
    rows = [{"prompt": p.prompt, "answer": p.columns["answer"]} for p in train]

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        right = [math_answer(c, a, rule="answer_tag").value for c, a in zip(completions, answer, strict=True)]
        return [r + 0.1 * answer_format(c) for r, c in zip(right, completions, strict=True)]

    class Stop(TrainerCallback):
        accuracy, steps = 0.0, 0

        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            self.steps = state.global_step // 4
            if state.global_step % (4 * EVERY) == 0:
                policy = Policy(trainer.model, tokenizer)
                asked = [Request(policy.encode(p.prompt), [key(0, i)]) for i, p in enumerate(held_out)]
                done = LocalSampler(policy).sample(asked, SamplingParams(DEMO["rollout"]["max_tokens"]))
                right = [
                    math_answer(
                        s.completion.text, held_out[s.request].columns["answer"], rule="answer_tag"
                    ).value
                    for s in done
                ]
                trainer.model.train()
                self.accuracy = sum(right) / len(right)
                control.should_training_stop = self.accuracy >= BAR or time.process_time() > cap

    stop = Stop()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=peer.settings(
            per_device_train_batch_size=64,
            steps_per_generation=4,
            num_generations=8,
            beta=KL["coef"],
            sync_ref_model=True,
            ref_model_sync_steps=KL["refresh_every"],
            ref_model_mixup_alpha=1.0,
            max_completion_length=DEMO["rollout"]["max_tokens"],
            max_steps=4000,
            learning_rate=rate,
            bf16=rounding_pays(),
            lr_scheduler_type="constant",
            epsilon_high=0.28,
            loss_type="dapo",
            logging_steps=1000,
            seed=seed,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        reward_funcs=reward,
        callbacks=[stop],
    )
    trainer.train()
    print(json.dumps({"accuracy": stop.accuracy, "steps": stop.steps}))


def compare(seed: int, rates: Sequence[float], cap: float, width: int) -> list[str]:
    """Both sides from the cold start of a seed, ours first: lines of the table."""
    with tempfile.TemporaryDirectory() as name:
        model = cold_start(Path(name), seed, width)
        seconds, steps, accuracy = ours(Path(name), seed, model)
        lines = [f"| {seed} | covey | {seconds:.0f} | {steps} | 1 |"]
        if accuracy < BAR:
            lines = [f"| {seed} | covey | not reached | {steps} | > 1, at {100 * accuracy:.1f} % |"]
        for rate in rates:
            worker = [sys.executable, __file__, "--worker", model, seed, rate, cap * seconds]
            said, took = run(worker)
            found = json.loads(said.splitlines()[-1])
            end, times = "not reached", f"> {cap:g}, at {100 * found['accuracy']:.1f} %"
            if found["accuracy"] >= BAR:
                end, times = f"{took:.0f}", f"{took / seconds:.1f}"
            lines.append(f"| {seed} | TRL, lr {rate:g} | {end} | {found['steps']} | {times} |")
    print(*lines, sep="\n", flush=True)
    return lines


def main() -> None:
    """All seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-4, 2e-4, 4e-4])
    parser.add_argument("--cap", type=float, default=6.0)
    parser.add_argument("--jobs", type=int, default=1, help="seeds at once")
    parser.add_argument("--width", type=int, default=DEMO_WIDTH)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        model, seed, rate, cap = chosen.worker
        return trl_worker(model, int(seed), float(rate), float(cap))
    with ThreadPoolExecutor(chosen.jobs) as pool:
        one = partial(compare, rates=chosen.rates, cap=chosen.cap, width=chosen.width)
        tables = list(pool.map(one, range(chosen.seeds)))
    heads = ["| seed | side | CPU seconds to 90 % | steps | times covey's |", "|---|---|---|---|---|"]
    lines = [*heads, *(line for table in tables for line in table)]
    text = (
        f"# CPU seconds to 90 %\n\n{dt.date.today()}, one thread each. `python benchmarks/speed/learn.py "
        f"{' '.join(sys.argv[1:])}`. What is counted stands in the script.\n\n" + "\n".join(lines) + "\n"
    )
    if chosen.write:
        RESULT.write_text(text)
    return None


if __name__ == "__main__":
    main()
