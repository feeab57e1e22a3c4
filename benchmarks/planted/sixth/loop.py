"""A plain RL loop in PyTorch on tiny models, written before the audit's rules were read.

A run is a subclass of `Loop` that overrides settings or a method. Its class attributes say what an honest user would
write into the header; the record has what the loop really used.
"""

import copy
import random
import re
import zlib
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config

from covey.audit.writers.recorder import Recorder, plain_logprobs

PAD, BOS, EOS = 0, 1, 2
CHARS = "0123456789+-*=<>[]abcdefghijklmnopqrstuvwxyz :.,#\n"
CODE = {char: number + 3 for number, char in enumerate(CHARS)}
TEXT = {number: char for char, number in CODE.items()}
SIZE = {"vocab_size": len(CHARS) + 3, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
WIDE = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "llama": LlamaConfig(**SIZE, **WIDE, num_key_value_heads=2),
    "qwen": Qwen2Config(**SIZE, **WIDE, num_key_value_heads=2, tie_word_embeddings=True),
    "gpt2": GPT2Config(**SIZE, n_embd=48, n_layer=2, n_head=4, n_positions=128),
    "gpt2_dropout": GPT2Config(**SIZE, n_embd=48, n_layer=2, n_head=4, n_positions=128, attn_pdrop=0.3),
    "moe": MixtralConfig(**SIZE, **WIDE, num_key_value_heads=2, num_local_experts=4),
}
for name in ("gpt2", "gpt2_dropout"):
    for field in ("embd_pdrop", "resid_pdrop", *(["attn_pdrop"] if name == "gpt2" else [])):
        setattr(CONFIGS[name], field, 0.0)
CACHE: dict = {}


def encode(text):
    return [CODE[char] for char in text]


def decode(ids):
    return "".join(TEXT.get(number, "") for number in ids)


def sums(rng, row):
    a, b = rng.randrange(50), rng.randrange(50)
    return {"prompt": f"{a}+{b}=", "answer": str(a + b), "id": row}


def pretrained(name, lead, tools):
    """A model that has seen sums, so that it answers with numbers and stops."""
    key = (name, lead, tools)
    if key not in CACHE:
        torch.manual_seed(zlib.crc32(repr(key).encode()))
        model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager")
        adam = torch.optim.AdamW(model.parameters(), lr=5e-3)
        rng = random.Random(3)
        for _ in range(120):
            texts = []
            for _ in range(32):
                row = sums(rng, 0)
                call = row["prompt"][:-1]
                texts.append(
                    lead + row["prompt"] + (f"<{call}>[{row['answer']}]" if tools else "") + row["answer"]
                )
            ids = [[BOS, *encode(text), EOS] for text in texts]
            length = max(map(len, ids))
            batch = torch.tensor([[*row, *[PAD] * (length - len(row))] for row in ids])
            logits = model(batch).logits[:, :-1]
            loss = functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], ignore_index=PAD)
            adam.zero_grad()
            loss.backward()
            adam.step()
        CACHE[key] = model.eval()
    return copy.deepcopy(CACHE[key])


class Loop:
    model_name = "llama"
    lead = ""  # before each prompt
    seed = 1
    iterations = 4
    prompts = 4
    group = 4
    max_tokens = 6
    temperature = 1.0
    epochs = 1
    minibatches = 1
    micros = 1
    lr = 1e-3
    beta = 0.0
    epsilon = 0.2
    epsilon_high = 0.2
    scale = "group"  # group, batch, none
    loss_type = "grpo"  # grpo, bnpo, dr_grpo
    level = "token"
    weights = None
    tools = False
    critic = False
    max_grad_norm = 1.0
    sync_every = 1  # the sampler gets the weights after so many iterations
    left = False
    header = {}  # more of the header's settings
    leave_out: tuple = ()  # fields that this user does not write
    rows = 24

    def settings(self):
        return {
            "temperature": self.temperature, "num_generations": self.group, "beta": self.beta,
            "epsilon": self.epsilon, "epsilon_high": self.epsilon_high, "loss_type": self.loss_type,
            "scale_rewards": self.scale, "num_iterations": self.epochs, "learning_rate": self.lr,
            "max_completion_length": self.max_tokens, "importance_sampling_level": self.level,
            "max_grad_norm": self.max_grad_norm, "gradient_accumulation_steps": self.micros,
            **({"reward_weights": self.weights} if self.weights else {}), **self.header,
        }  # fmt: skip

    def __init__(self, path: Path):
        random.seed(self.seed)
        self.rng = random.Random(self.seed)
        self.model = pretrained(self.model_name, self.lead, self.tools)
        torch.manual_seed(self.seed)
        self.setup()
        self.reference = self.make_reference()
        self.sampler = copy.deepcopy(self.model).eval()
        self.value = torch.nn.Linear(48, 1)
        self.adam = self.optimizer()
        self.schedule = self.scheduler()
        self.data = self.dataset()
        self.step = self.number = 0
        self.file = Recorder(
            path, framework="own", settings=self.settings(), tokens={"eos": [EOS], "bos": BOS, "pad": PAD}
        )

    def setup(self):
        """Change the model before anything is built on it."""

    def make_reference(self):
        return copy.deepcopy(self.model).eval()

    def optimizer(self):
        return torch.optim.AdamW(
            [*self.model.parameters(), *self.value.parameters()], lr=self.lr, weight_decay=0
        )

    def scheduler(self):
        return torch.optim.lr_scheduler.LambdaLR(self.adam, lambda step: 1.0)

    def dataset(self):
        return [sums(self.rng, row) for row in range(self.rows)]

    # --- rollout -------------------------------------------------------------------------------------------------

    def problems(self, iteration):
        start = iteration * self.prompts
        return [self.data[(start + place) % len(self.data)] for place in range(self.prompts)]

    def probabilities(self, logits):
        return functional.softmax(logits, -1)

    @torch.no_grad()
    def draw(self, context, stops, limit):
        ids, logprobs = [], []
        for _ in range(limit):
            logits = self.sampler(torch.tensor([[*context, *ids]])).logits[0, -1].float() / self.temperature
            probabilities = self.probabilities(logits)
            token = int(torch.multinomial(probabilities, 1))
            ids.append(token)
            logprobs.append(float(probabilities[token].log()))
            if token in stops:
                break
        return ids, logprobs

    def complete(self, problem, group):
        prompt_ids = [BOS, *encode(self.lead + problem["prompt"])]
        ids, logprobs, inserted = [], [], []
        if self.tools:
            ids, logprobs = self.draw(prompt_ids, (EOS, CODE[">"]), 8)
            inserted = [0] * len(ids)
            if ids[-1] == CODE[">"]:
                answer = encode(f"[{self.tool(decode(ids))}]")
                ids, logprobs = ids + answer, [*logprobs, *[None] * len(answer)]
                inserted += [1] * len(answer)
        if not ids or ids[-1] != EOS:
            more, their = self.draw([*prompt_ids, *ids], (EOS,), self.max_tokens)
            ids, logprobs, inserted = ids + more, logprobs + their, inserted + [0] * len(more)
        return {
            "prompt": self.lead + problem["prompt"], "prompt_ids": prompt_ids, "ids": ids, "text": decode(ids),
            "group": group, "row": problem, "sampler_logprobs": logprobs, "inserted": inserted,
            "truncated": ids[-1] != EOS, "mask": [1 - number for number in inserted],
        }  # fmt: skip

    def tool(self, text):
        call = re.search(r"<(\d+)\+(\d+)>", text)
        return str(int(call[1]) + int(call[2])) if call else "error"

    def rollout(self, iteration):
        return [
            self.complete(problem, iteration * self.prompts + place)
            for place, problem in enumerate(self.problems(iteration))
            for _ in range(self.group)
        ]

    def answer_of(self, text):
        return re.sub(r"<.*?>|\[.*?\]", "", text)

    def rewards(self, completion):
        answer, gold = self.answer_of(completion["text"]), completion["row"]["answer"]
        close = answer.isdigit() and abs(int(answer) - int(gold)) < 10
        return {"right": float(answer == gold) + 0.3 * close}

    def score(self, completions):
        for completion in completions:
            completion["rewards"] = self.rewards(completion)
        self.total(completions)

    def total(self, completions):
        for completion in completions:
            values = list(completion["rewards"].values())
            completion["reward"] = sum(
                w * v for w, v in zip(self.weights or [1] * len(values), values, strict=True)
            )

    def advantages(self, completions):
        """(N,) from rewards; completions of a group lie beside each other."""
        rewards = torch.tensor([completion["reward"] for completion in completions]).view(-1, self.group)
        centred = rewards - rewards.mean(1, keepdim=True)
        if self.scale == "group":
            centred = centred / (rewards.std(1, keepdim=True) + 1e-4)
        if self.scale == "batch":
            centred = centred / (rewards.std() + 1e-4)
        return centred.flatten()

    # --- log-probs -----------------------------------------------------------------------------------------------

    def tokens(self, completions):
        """(N, P + C): prompts and completions, padded; and where each completion begins."""
        rows = [[*completion["prompt_ids"], *completion["ids"]] for completion in completions]
        length = max(map(len, rows))
        pads = [[PAD] * (length - len(row)) for row in rows]
        ids = torch.tensor(
            [pad + row if self.left else row + pad for row, pad in zip(rows, pads, strict=True)]
        )
        starts = [
            len(completion["prompt_ids"]) + (len(pad) if self.left else 0)
            for completion, pad in zip(completions, pads, strict=True)
        ]
        return ids, starts

    def forward(self, model, ids):
        seen = (ids != PAD).long()
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        return model(ids, attention_mask=seen, position_ids=positions, output_hidden_states=self.critic)

    def logits(self, model, ids):
        return self.forward(model, ids).logits.float() / self.temperature

    def logprobs(self, model, completions):
        """(N, C), 0 behind the end."""
        ids, starts = self.tokens(completions)
        table = self.logits(model, ids)[:, :-1].log_softmax(-1)
        picked = table.gather(2, ids[:, 1:, None])[..., 0]
        return self.cut(picked, starts, completions, -1)

    def cut(self, table, starts, completions, shift):
        parts = [
            table[row, starts[row] + shift : starts[row] + shift + len(completions[row]["ids"])]
            for row in range(len(completions))
        ]
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)

    def reference_logprobs(self, completions):
        return self.logprobs(self.reference, completions)

    def values(self, completions):
        ids, starts = self.tokens(completions)
        hidden = self.forward(self.model, ids).hidden_states[-1].detach()
        return self.cut(self.value(hidden)[..., 0], starts, completions, -1)

    def pad(self, lists):
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float) for row in lists], True)

    # --- loss ----------------------------------------------------------------------------------------------------

    def ratio(self, batch):
        difference = batch["logprobs"] - batch["old"]
        if self.level == "sequence":
            mean = (difference * batch["mask"]).sum(1, keepdim=True) / batch["mask"].sum(1, keepdim=True)
            return (
                (batch["logprobs"] - batch["logprobs"].detach() + mean.detach()).exp()
                if self.gspo_token
                else mean.exp()
            )
        return difference.exp()

    gspo_token = False

    def policy(self, batch):
        ratio = self.ratio(batch)
        advantage = batch["advantage"]
        clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon_high)
        loss = -torch.min(ratio * advantage, clipped * advantage)
        loss = loss.expand_as(batch["mask"])
        return loss * batch["corrections"] if "corrections" in batch else loss

    def kl(self, batch):
        difference = batch["ref"] - batch["logprobs"]
        return difference.exp() - difference - 1

    def reduce(self, loss, mask, batch):
        if self.loss_type == "grpo":
            return ((loss * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
        if self.loss_type == "dr_grpo":
            return (loss * mask).sum() / (len(mask) * self.max_tokens)
        return (loss * mask).sum() / mask.sum().clamp(min=1)

    def loss(self, batch):
        loss = self.policy(batch)
        if self.beta and "ref" in batch:
            loss = loss + self.beta * self.kl(batch)
        return self.reduce(loss, batch["mask"], batch)

    # --- update --------------------------------------------------------------------------------------------------

    def order(self, count):
        return torch.randperm(count).tolist() if self.minibatches > 1 else list(range(count))

    def prepare(self, completions):
        """What stays the same over the updates of a rollout: (N, C) each."""
        with torch.no_grad():
            batch = {
                "mask": self.pad([completion["mask"] for completion in completions]),
                "old": self.old_logprobs(completions),
                "advantage": torch.tensor([float(c["advantage"]) for c in completions])[:, None],
            }
            if self.beta:
                batch["ref"] = self.reference_logprobs(completions)
        if self.critic:
            self.token_advantages(batch, completions)
        return batch

    def old_logprobs(self, completions):
        return self.logprobs(self.model, completions)

    gamma, lam = 1.0, 0.95

    def token_advantages(self, batch, completions):
        values, mask = self.values(completions).detach(), batch["mask"]
        rewards = torch.zeros_like(values)
        for row, completion in enumerate(completions):
            rewards[row, len(completion["ids"]) - 1] = completion["reward"]
        advantages = self.gae(rewards, values * mask, mask)
        batch |= {"values": values, "returns": (advantages + values) * mask, "token_rewards": rewards}
        batch["advantage"] = self.whiten(advantages, mask)

    def gae(self, rewards, values, mask):
        advantages, last = torch.zeros_like(values), 0.0
        for place in reversed(range(values.shape[1])):
            later = values[:, place + 1] if place + 1 < values.shape[1] else 0.0
            delta = rewards[:, place] + self.gamma * later - values[:, place]
            last = delta + self.gamma * self.lam * last
            advantages[:, place] = last
        return advantages * mask

    def whiten(self, values, mask):
        chosen = values[mask > 0]
        return (values - chosen.mean()) / (chosen.std() + 1e-8) * mask

    def backward(self, batch, completions):
        """Add gradients of all micro-batches; return the loss of the whole update."""
        total = 0.0
        size = len(completions) // self.micros
        for start in range(0, len(completions), size):
            part = {key: value[start : start + size] for key, value in batch.items()}
            part["logprobs"] = self.trained_logprobs(completions[start : start + size], batch)
            length = part["logprobs"].shape[1]
            short = {key: value[:, :length] if value.shape[1] > 1 else value for key, value in part.items()}
            batch["logprobs"][start : start + size, :length] = part["logprobs"].detach()
            loss = self.loss(short) / self.micros
            if self.critic:
                target, guess = short["returns"], self.values(completions[start : start + size])
                (0.5 * ((guess - target) ** 2 * short["mask"]).sum() / short["mask"].sum()).backward()
            loss.backward()
            total += float(loss)
        return total

    def trained_logprobs(self, completions, batch):
        return self.logprobs(self.model, completions)

    def update(self, batch, completions, places):
        batch["logprobs"] = torch.zeros_like(batch["old"])
        self.adam.zero_grad()
        loss = self.backward(batch, completions)
        norm = self.clip()
        self.adam.step()
        rate = self.schedule.get_last_lr()[0]
        self.schedule.step()
        self.write_update(batch, completions, places, loss, norm, rate)
        self.step += 1

    def clip(self):
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm))

    def train(self, completions):
        batch = self.prepare(completions)
        for _ in range(self.epochs):
            order = self.order(len(completions))
            size = len(order) // self.minibatches
            for start in range(0, len(order), size):
                places = order[start : start + size]
                chosen = [completions[place] for place in places]
                self.update({key: value[places] for key, value in batch.items()}, chosen, places)

    def run(self):
        for iteration in range(self.iterations):
            self.model.eval()
            completions = self.filter(self.rollout(iteration))
            self.score(completions)
            for completion, advantage in zip(completions, self.advantages(completions), strict=True):
                completion["advantage"] = float(advantage)
            self.write_rollout(completions)
            self.train(completions)
            self.number += 1
            if (iteration + 1) % self.sync_every == 0:
                self.sync()

    def filter(self, completions):
        return completions

    def sync(self):
        self.sampler.load_state_dict(self.model.state_dict())

    # --- record --------------------------------------------------------------------------------------------------

    def plain(self, completion, *temperatures):
        from contextlib import nullcontext

        training = self.model.training
        self.model.eval()
        tables = plain_logprobs(
            self.model, completion["prompt_ids"], completion["ids"], temperatures, nullcontext()
        )
        self.model.train(training)
        return tables

    def write(self, line):
        self.file.write(**line)

    def write_rollout(self, completions):
        lines = []
        for completion in completions:
            keys = (
                "prompt",
                "prompt_ids",
                "ids",
                "text",
                "group",
                "row",
                "rewards",
                "reward",
                "sampler_logprobs",
            )
            line = {
                key: completion[key] for key in (*keys, "advantage", *(["inserted"] if self.tools else []))
            }
            line["model_logprobs"], line["model_logprobs_at_1"] = self.plain(
                completion, self.temperature, 1.0
            )
            lines.append({key: value for key, value in line.items() if key not in self.leave_out})
        self.write({"kind": "rollout", "number": self.number, "step": self.step, "completions": lines})

    def write_update(self, batch, completions, places, loss, norm, rate):
        rows = []
        for row, (completion, place) in enumerate(zip(completions, places, strict=True)):
            length = len(completion["ids"])
            line = {"rollout": self.number, "completion": place}
            names = {"mask": "mask", "logprobs": "logprobs", "old": "old_logprobs", "ref": "ref_logprobs",
                     "values": "values", "returns": "returns", "token_rewards": "token_rewards",
                     "corrections": "corrections"}  # fmt: skip
            for key, name in names.items():
                if key in batch:
                    line[name] = batch[key][row][:length].tolist()
            advantage = batch["advantage"][row].tolist()
            line["advantage"] = advantage[0] if len(advantage) == 1 else advantage[:length]
            line["after_logprobs"] = self.plain(completion, self.temperature)[0]
            if self.beta and "ref" in batch:
                line["kl"] = self.kl(batch)[row][:length].tolist()
            rows.append({key: value for key, value in line.items() if key not in self.leave_out})
        line = {
            "kind": "update", "step": self.step, "rows": rows, "loss": loss, "grad_norm": norm, "learning_rate": rate,
            "weights_changed": self.file.weights_changed(self.model.parameters()),
        }  # fmt: skip
        self.write({key: value for key, value in line.items() if key not in self.leave_out})
