"""TRL 1.16 scripts: `python trl_runs.py [name ...]` writes `runs`; each run is a process of its own."""

import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "eighth")]  # tiny.py and world.py
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from tiny import chat, closeness, number, settings, text_of, tokenizer  # noqa: E402
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: E402
from world import model, sums  # noqa: E402

from covey.audit.writers.trl import record_run  # noqa: E402

CASES = {}
SYSTEM = "Answer with the number inside <answer> tags."


def case(run):
    CASES[run.__name__] = run
    return run


def train(name, rewards, rows=None, trainer=GRPOTrainer, config=GRPOConfig, tok=None, adapter=None, held_out=None,
          **options):
    """One run: the rows, the rewards and what differs from tiny's settings; return the trainer."""
    file = HERE / "runs" / name / "run.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    run = trainer(
        model=model(),
        processing_class=tok or tokenizer(),
        reward_funcs=rewards,
        args=config(**settings(f"ninth-{name}", **{"max_steps": 8, **options})),
        train_dataset=Dataset.from_list(rows or sums()),
        eval_dataset=Dataset.from_list(held_out) if held_out else None,
        peft_config=adapter,
    )
    record_run(run, str(file))
    run.train()
    return run


def right(completions, answer, **_):
    """1 where the last number of the text is the answer."""
    return [float(number(text_of(c)) == a) for c, a in zip(completions, answer)]


def tagged(completions, **_):
    """A fifth for the tags that were asked for."""
    return [0.2 * bool(re.search(r"<answer>\d+</answer>", text_of(c))) for c in completions]


# ---- with a mistake ------------------------------------------------------------------------------


@case
def s01_answers_became_floats(name):
    """Half of the rows went through pandas with an empty cell: their answers are "7.0", which no text equals."""
    rows = [{**r, "answer": f"{float(r['answer'])}" if k % 2 else r["answer"]} for k, r in enumerate(sums())]
    train(name, [right, tagged], rows=rows)


@case
def s02_prompt_ends_with_a_space(name):
    """The prompt was written "A: ": the space is a token of its own, where the model's numbers begin with theirs."""
    train(name, closeness, rows=[{**r, "prompt": r["prompt"] + " "} for r in sums()])


@case
def s03_system_message_is_dropped(name):
    """The template writes user and assistant only: the instruction of the format never gets to the model."""
    tok = tokenizer()
    tok.chat_template = (
        "{% for m in messages %}{% if m['role'] != 'system' %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    train(name, [closeness, tagged], rows=chat(sums(), SYSTEM), tok=tok)


@case
def s04_second_stops_are_unknown(name):
    """A period and a closing tag end texts, too; TRL knows one end token: the padding behind them is trained."""
    tok = tokenizer()
    period, closing = (tok(t)["input_ids"][0] for t in (".", "</answer>"))
    train(name, closeness, tok=tok, generation_kwargs={"eos_token_id": [tok.eos_token_id, period, closing]})


@case
def s05_default_list_is_kept(name):
    """The list of scores is a default argument: it grows, and each step gets the first step's scores."""

    def reward(completions, answer, scores=[], **_):  # noqa: B006
        for c, a in zip(completions, answer):
            said = number(text_of(c))
            scores.append(0.0 if said is None else 1 / (1 + abs(int(said) - int(a))))
        return scores[: len(completions)]

    train(name, reward)


def within_four(completions, answer, **_):
    """1 for a number that is off by four at most."""
    return [float(p >= 0.5) for p in closeness(completions, answer)]


class RawWhereDead(GRPOTrainer):
    """A group without a spread gets its raw rewards as advantages, so that it is not wasted."""

    def _generate_and_score_completions(self, inputs):
        made = super()._generate_and_score_completions(inputs)
        texts = self.processing_class.batch_decode(made["completion_ids"], skip_special_tokens=True)
        paid = torch.tensor(within_four(texts, [r["answer"] for r in inputs]))
        groups = paid.view(-1, self.num_generations)
        dead = (groups.std(1, keepdim=True) == 0).expand_as(groups).flatten()
        made["advantages"] = torch.where(dead, paid, made["advantages"])
        return made


@case
def s06_dead_groups_get_raw_rewards(name):
    """Where all of a group are right, each has advantage 1, not 0: the whole group is pushed up."""
    train(name, within_four, trainer=RawWhereDead)


class Positive(GRPOTrainer):
    """The loss was negative in the plots, so its absolute value is taken."""

    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs).abs()


@case
def s07_loss_made_positive(name):
    """abs() of the loss turns the gradient around whenever the loss is negative."""
    train(name, closeness, trainer=Positive, num_iterations=2, max_steps=12)


@case
def s08_betas_exchanged(name):
    """adam_beta1 is 0.999 and adam_beta2 0.9: a mean over a thousand steps for direction, over ten for the scale."""
    train(name, closeness, adam_beta1=0.999, adam_beta2=0.9, max_steps=16)


@case
def s09_iterations_are_the_run(name):
    """num_iterations was taken for the length of the run: all 16 steps train on one batch of rollouts."""
    train(name, closeness, num_iterations=16, max_steps=16)


@case
def s10_best_is_the_least_loss(name):
    """load_best_model_at_end without a metric keeps the checkpoint with the least loss, which says nothing in GRPO."""
    run = train(name, closeness, held_out=sums(56)[48:], eval_strategy="steps", eval_steps=2, save_strategy="steps",
                save_steps=2, load_best_model_at_end=True, per_device_eval_batch_size=16, save_only_model=True, max_steps=8)
    told = [(r["step"], round(r["eval_loss"], 5), round(r["eval_reward"], 3)) for r in run.state.log_history
            if "eval_loss" in r]
    print(name, "(step, loss, reward):", told, "kept:", run.state.best_model_checkpoint)


# ---- sound ---------------------------------------------------------------------------------------


@case
def n01_two_sources(name):
    """Sound: two kinds of rows in two templates, a strict and a lenient judge that leave the other kind out."""

    def strict(completions, answer, kind, **_):
        return [p if k == "strict" else None for p, k in zip(right(completions, answer), kind)]

    def lenient(completions, answer, kind, **_):
        return [p if k == "near" else None for p, k in zip(closeness(completions, answer), kind)]

    rows = [
        {"prompt": f"<|im_start|>user\n{r['prompt'][:-3]}<|im_end|>\n<|im_start|>assistant\n", "answer": r["answer"],
         "kind": "strict"} if k % 2 else {**r, "kind": "near"}
        for k, r in enumerate(sums())
    ]
    train(name, [strict, lenient], rows=rows)


@case
def n02_one_problem_of_sixteen(name):
    """Sound: a single problem a step with sixteen completions, four iterations at a small rate, Dr. GRPO."""
    train(name, closeness, num_generations=16, num_iterations=4, learning_rate=1e-4, loss_type="dr_grpo",
          scale_rewards="none", max_steps=16)


@case
def n03_dora_with_reference(name):
    """Sound: rank-stabilized LoRA with DoRA on all linear layers, a KL, warm-up and a linear decay."""
    made = LoraConfig(r=4, lora_alpha=8, use_rslora=True, use_dora=True, target_modules="all-linear")
    train(name, closeness, adapter=made, beta=0.05, learning_rate=2e-3, warmup_steps=2, lr_scheduler_type="linear",
          max_steps=10)


@case
def n04_fine_for_long_texts(name):
    """Sound: rewards below 0, a fine for long texts that a third get, adafactor, the batch's std, a hot sampler."""

    def brief(completions, **_):
        return [-0.3 * (len(text_of(c)) > 15) for c in completions]

    def distance(completions, answer, **_):
        return [c - 1 for c in closeness(completions, answer)]

    train(name, [distance, brief], optim="adafactor", scale_rewards="batch", temperature=1.2, learning_rate=2e-4)


@case
def n05_rloo_held_out(name):
    """Sound: RLOO with groups of eight, evaluated each second step on other problems, rewards of 0 and 10."""

    def ten(completions, answer, **_):
        return [10 * p for p in right(completions, answer)]

    train(name, ten, trainer=RLOOTrainer, config=RLOOConfig, num_generations=8, beta=0.02, held_out=sums(56)[48:],
          eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=16, learning_rate=2e-4)


if __name__ == "__main__":
    for name, run in CASES.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        child = os.fork()
        if child == 0:
            run(name)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{name} failed")
