"""TRL 1.16 scripts: `python trl_runs.py [name ...]` writes `runs`; each run is a process of its own."""

import os
import random
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from tokenizers.processors import TemplateProcessing  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from tiny import chat, closeness, number, sample, settings, text_of, tokenizer  # noqa: E402
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: E402
from world import model, sums, told  # noqa: E402

from covey.audit.writers.trl import record_run  # noqa: E402

CASES = {}


def case(run):
    CASES[run.__name__] = run
    return run


def record(name):
    folder = HERE / "runs" / name
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run.jsonl"
    file.unlink(missing_ok=True)
    return str(file)


def train(name, rewards, rows=None, trainer=GRPOTrainer, config=GRPOConfig, net=None, tok=None, callbacks=(),
          optimizer=None, adapter=None, rollout=None, **options):
    """One run: the rows, the rewards and what differs from tiny's settings."""
    extra = {"rollout_func": rollout} if rollout else {}
    tok = tok or tokenizer()
    run = trainer(
        model=net if net is not None else model(),
        processing_class=tok,
        reward_funcs=rewards,
        args=config(**settings(f"eighth-{name}", **{"max_steps": 8, **options})),
        train_dataset=Dataset.from_list(rows or sums()),
        callbacks=list(callbacks),
        optimizers=(optimizer, None),
        peft_config=adapter,
        **extra,
    )
    record_run(run, record(name))
    run.train()


def right(completions, answer, **_):
    """1 where the last number of the text is the answer."""
    return [float(number(text_of(c)) == a) for c, a in zip(completions, answer)]


def adapter(**options):
    return LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], **options)


def calculator(prompts, trainer):
    """Two turns: the model speaks, a calculator's line is added, the model speaks again; and whose token is whose."""
    tok = trainer.processing_class
    net = trainer.accelerator.unwrap_model(trainer.model)
    asked = [tok(p)["input_ids"] for p in prompts]
    first, early = sample(net, tok, asked, 8)
    lines = [tok(told(*map(int, re.findall(r"\d+", p)[:2])))["input_ids"] for p in prompts]
    second, late = sample(net, tok, [x + y + z for x, y, z in zip(asked, first, lines)], 10)
    return {
        "prompt_ids": asked,
        "completion_ids": [x + y + z for x, y, z in zip(first, lines, second)],
        "logprobs": [x + [0.0] * len(y) + z for x, y, z in zip(early, lines, late)],
        "env_mask": [[1] * len(x) + [0] * len(y) + [1] * len(z) for x, y, z in zip(first, lines, second)],
    }


# ---- with a mistake ------------------------------------------------------------------------------


@case
def s01_first_completion_for_all(name):
    """The reward reads `completions[0]`, as the demo does for printing, so all of a group earn the same."""

    def reward(completions, answer, **_):
        response = completions[0][0]["content"]
        return [float(number(response) == a) for a in answer]

    train(name, reward, rows=chat(sums()))


@case
def s02_no_generation_prompt(name):
    """Prompts are rendered without add_generation_prompt, so the model is asked to go on after the user's turn."""
    tok = tokenizer()
    rows = [{**r, "prompt": tok.apply_chat_template(r["prompt"], tokenize=False)} for r in chat(sums())]
    train(name, closeness, rows=rows)


@case
def s03_f_of_the_string_forgotten(name):
    """The prompt's template lacks the f of an f-string, so every row asks the literal `{a}+{b}`."""
    rows = []
    for row in sums():
        a, b = re.findall(r"\d+", row["prompt"])
        rows.append({"prompt": "Q: {a}+{b}=?\nA:", "answer": str(int(a) + int(b))})
    train(name, closeness, rows=rows)


@case
def s04_column_has_another_name(name):
    """The reward's argument `solution=None` is not the column `answer`, so every text is compared with None."""

    def reward(completions, solution=None, **_):
        golds = solution or [None] * len(completions)
        return [1.0 if gold is not None and number(text_of(c)) == gold else 0.0 for c, gold in zip(completions, golds)]

    train(name, reward)


@case
def s05_none_for_wrong(name):
    """The reward returns None for a wrong answer, so TRL leaves it out and only right ones are compared."""

    def reward(completions, answer, **_):
        return [1.0 if number(text_of(c)) == a else None for c, a in zip(completions, answer)]

    train(name, reward)


@case
def s06_seen_texts_never_cleared(name):
    """A set against repetition is never emptied, so a right text earns nothing once it was said in an earlier step."""
    seen = set()

    def reward(completions, answer, **_):
        paid = []
        for c, a in zip(completions, answer):
            text = text_of(c).strip()
            paid.append(float(number(text) == a and text not in seen))
            seen.add(text)
        return paid

    train(name, reward, max_steps=12)


@case
def s07_noise_breaks_ties(name):
    """Noise of a thousandth is added so that no group is dead, and dividing by the std makes it a full advantage."""
    rng = random.Random(0)

    def reward(completions, answer, **_):
        return [float(number(text_of(c)) == a) + rng.uniform(0, 1e-3) for c, a in zip(completions, answer)]

    train(name, reward)


@case
def s08_repetition_penalty(name):
    """A repetition penalty of 1.5 shapes what is sampled, and the trainer's log-probs know nothing of it."""
    train(name, closeness, repetition_penalty=1.5)


@case
def s09_temperature_annealed(name):
    """A callback cools the sampler from 1 to 0.4, and the trainer goes on to divide its logits by 1."""

    class Anneal(TrainerCallback):
        trainer = None

        def on_step_begin(self, args, state, control, **_):
            part = state.global_step / state.max_steps
            self.trainer.generation_config.temperature = 1.0 - 0.6 * part

    class Trainer(GRPOTrainer):
        def train(self, *args, **kwargs):
            Anneal.trainer = self
            return super().train(*args, **kwargs)

    train(name, closeness, trainer=Trainer, callbacks=[Anneal()], max_steps=12)


def beginning(tok, net):
    """Give a tokenizer and a model a token for the beginning of a text, which the tokenizer adds."""
    tok.add_special_tokens({"bos_token": "<|begin|>"})
    begin = ("<|begin|>", tok.bos_token_id)
    tok.backend_tokenizer.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
    tok.chat_template = "{{ bos_token }}" + tok.chat_template
    net.resize_token_embeddings(len(tok))
    net.config.bos_token_id = net.generation_config.bos_token_id = tok.bos_token_id


@case
def s10_begin_twice(name):
    """Prompts are rendered with the template, which writes the BOS, and tokenized as text, which adds another."""
    tok = tokenizer()
    net = model()
    beginning(tok, net)
    rows = [
        {**r, "prompt": tok.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=True)}
        for r in chat(sums())
    ]
    train(name, closeness, rows=rows, tok=tok, net=net)


@case
def s11_truncated_are_masked_and_all_are(name):
    """The limit is two tokens and truncated completions are masked, so nothing is left to train."""
    train(name, closeness, max_completion_length=2, mask_truncated_completions=True)


@case
def s12_delta_is_an_epsilon(name):
    """`delta`, the upper bound of the ratio, is set like an epsilon to 0.2: good completions have no gradient."""
    train(name, closeness, delta=0.2, num_iterations=2)


@case
def s13_optimizer_maximizes(name):
    """The optimizer has maximize=True because rewards are to be maximized, so the loss climbs."""
    net = model()
    train(name, closeness, net=net, optimizer=torch.optim.AdamW(net.parameters(), lr=1e-3, maximize=True))


@case
def s14_mask_of_tools_inverted(name):
    """env_mask has 1 for the calculator's tokens and 0 for the model's, the convention of another framework."""

    def inverted(prompts, trainer):
        made = calculator(prompts, trainer)
        return {**made, "env_mask": [[1 - m for m in mask] for mask in made["env_mask"]]}

    train(name, closeness, rollout=inverted, max_completion_length=48)


@case
def s15_adapter_starts_random(name):
    """LoRA has init_lora_weights=False, so the policy starts away from the model that it is held to."""
    train(name, closeness, adapter=adapter(init_lora_weights=False), beta=0.05, learning_rate=1e-3)


@case
def s16_half_precision_weights(name):
    """The weights are float16 and so is Adam's memory: small squares underflow to 0, and single weights leap."""
    train(name, closeness, net=model(dtype=torch.float16), learning_rate=1e-4)


# ---- without a mistake ---------------------------------------------------------------------------


@case
def n01_curriculum_warm_up_decay(name):
    """Sound: problems from easy to hard, each twice, not shuffled, with warm-up, cosine and weight decay."""
    easy = sorted(sums(24), key=lambda row: int(row["answer"]))
    rows = [row for row in easy for _ in range(2)]
    train(name, closeness, rows=rows, shuffle_dataset=False, warmup_steps=4, lr_scheduler_type="cosine",
          weight_decay=0.1)


@case
def n02_adapter_reference(name):
    """Sound: a fresh LoRA, the reference is the model without it, two iterations, a high rate."""
    train(name, closeness, adapter=adapter(), beta=0.1, num_iterations=2, learning_rate=2e-3, loss_type="bnpo")


@case
def n03_async_rewards_none_and_weights(name):
    """Sound: an asynchronous judge that abstains for odd answers, a check of the format, weights 1 and 0.3."""

    async def judge(completions, answer, **_):
        return [None if int(a) % 2 else float(number(text_of(c)) == a) for c, a in zip(completions, answer)]

    def tagged(completions, **_):
        return [float("answer" in text_of(c)) for c in completions]

    train(name, [judge, tagged], reward_weights=[1.0, 0.3], rows=chat(sums(), system="Add."))


@case
def n04_normalized_then_summed(name):
    """Sound: GDPO, each reward is normalized in its group before they are added."""

    def short(completions, **_):
        return [-len(text_of(c)) / 20 for c in completions]

    train(name, [closeness, short], multi_objective_aggregation="normalize_then_sum", reward_weights=[1.0, 0.2])


@case
def n05_two_turns(name):
    """Sound: two turns with a calculator whose words are masked, and a KL."""
    train(name, closeness, rollout=calculator, max_completion_length=48, beta=0.02)


@case
def n06_dropout_pairs_unscaled(name):
    """Sound: a model with dropout, which disable_dropout takes out; groups of two, no std, temperature 0.9."""
    train(name, closeness, net=model(attention_dropout=0.2), disable_dropout=True, num_generations=2,
          scale_rewards="none", temperature=0.9, loss_type="dr_grpo")


@case
def n07_two_sided_accumulated(name):
    """Sound: DAPO's token mean, accumulation of four, two updates a rollout, two-sided clip at 4, clip-higher."""
    train(name, closeness, per_device_train_batch_size=4, gradient_accumulation_steps=4, steps_per_generation=8,
          delta=4.0, epsilon_high=0.28, num_iterations=2, num_generations=8, learning_rate=2e-4)


@case
def n08_vespo(name):
    """Sound: VESPO's weights of whole sequences, two iterations."""
    train(name, closeness, loss_type="vespo", num_iterations=2, learning_rate=2e-4)


@case
def n09_adaptive_entropy(name):
    """Sound: a bonus for entropy whose coefficient is adapted, a BOS that is written once."""
    tok = tokenizer()
    net = model()
    beginning(tok, net)
    train(name, closeness, tok=tok, net=net, rows=chat(sums()), use_adaptive_entropy=True, entropy_coef=0.001,
          entropy_target=0.5)


@case
def n10_rloo_leave_one_out(name):
    """Sound: RLOO with a KL in the reward, groups of two, two iterations, SGD."""
    train(name, closeness, trainer=RLOOTrainer, config=RLOOConfig, num_generations=2, beta=0.05, num_iterations=2,
          optim="sgd", learning_rate=0.01)


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
