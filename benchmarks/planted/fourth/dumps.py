"""verl's dumps of texts and scores, and exports of logs, simulated; the first look was at dumps of GSM8K's problems."""
import csv, json, math, random, re
from pathlib import Path
HERE = Path(__file__).parent

def problem(r):
    who, thing = r.choice(["Mia", "Omar", "Lena", "Tom", "Ada", "Raj"]), r.choice(["apples", "books", "coins", "stamps", "shells"])
    a, b, c, d = r.randrange(3, 60), r.randrange(2, 30), r.randrange(2, 9), r.randrange(2, 20)
    steps = [(f"{who} has {a} {thing}.", f"{who} starts with {a} {thing}."), (f"{who} finds {b} more on the way home.", f"{a} + {b} = {a + b} after the walk."),
             (f"Each week for {c} weeks, {d} more arrive in a parcel from an aunt.", f"{c} x {d} = {c * d} arrive, which makes {a + b + c * d}."),
             (f"Then {who} gives {b} of them to a friend who collects {thing} too.", f"{a + b + c * d} - {b} = {a + c * d} are left.")][: r.choice([1, 2, 3, 4, 4])]
    total = [a, a + b, a + b + c * d, a + c * d][len(steps) - 1]
    return {"question": " ".join(s for s, _ in steps) + f" How many {thing} does {who} have now?", "answer": "\n".join(s for _, s in steps) + f"\n#### {total}"}

GSM = [problem(random.Random(n)) for n in range(7000)]
OPEN = ["", "Let's think step by step. ", "First, ", "We need to find the answer. ", "Okay, so ", "To solve this, ", "Step 1: "]
CLOSE = ["", " Let me double check.", " That makes sense.", " Therefore we are done.", " I am confident in this."]
ASK = " Let's think step by step and output the final answer after \"####\"."

def solve(r, row, p, length=1.0):
    gold = row["answer"].split("#### ")[1].replace(",", "")
    body = re.sub(r"<<.*?>>", "", row["answer"].split("####")[0]).strip().split("\n")
    if r.random() < .4 and len(body) > 1: body.pop(r.randrange(len(body)))
    right = r.random() < p
    said = gold if right else str(int(float(gold)) + r.choice([-10, -2, -1, 1, 2, 5, 12, 30]))
    extra = "".join(r.choice(CLOSE) for _ in range(int(length * r.randrange(1, 6))))
    words = r.choice(OPEN) + " ".join(body)
    words = " ".join(w if r.random() > .06 else r.choice(["then", "so", "thus", w + ",", w]) for w in words.split())
    return words + extra + f"\n#### {said}", float(right), gold

def prompt(q, system="You are a helpful assistant."):
    return f"system\n{system}\nuser\n{q}{ASK}\nassistant\n"

def dump(name, steps=8, B=16, G=8, length=1.0, slope=.03, p0=.35, make=None, curriculum=False, after=None):
    d = HERE / "runs" / name; d.mkdir(parents=True, exist_ok=True); r = random.Random(name)
    pool = sorted(GSM, key=lambda x: len(x["question"])) if curriculum else GSM[:]
    for s in range(1, steps + 1):
        rows = pool[(s - 1) * 500:(s - 1) * 500 + B] if curriculum else r.sample(pool, B)
        out = []
        for row in rows:
            hard = min(.95, max(.02, p0 + slope * s + r.gauss(0, .2)))
            g = []
            for _ in range(G):
                o, score, gold = solve(r, row, hard, length(s) if callable(length) else length)
                g.append({"input": prompt(row["question"]), "output": o, "gts": gold, "score": score, "step": s, "acc": bool(score)})
            out += after(r, g, s, row) if after else g
        (d / f"{s}.jsonl").write_text("".join(json.dumps(x, ensure_ascii=False) + "\n" for x in out))

def ranks(r, g, s, row):  # two engines with one seed: each draws half of the group, the halves are equal
    return g[:4] + [dict(x) for x in g[:4]]

def twice(r, g, s, row):
    for x in g: x["input"] = prompt("system\nYou are a helpful assistant.\nuser\n" + row["question"] + ASK + "\nassistant\n")
    return g

def wrong_side(r, g, s, row):  # max_prompt_length keeps the left part
    n = 210
    for x in g: x["input"] = x["input"][:n]
    if len(prompt(row["question"])) > n:
        for x in g:
            x["score"] = float(r.random() < .05); x["acc"] = bool(x["score"])
            if not x["score"]: x["output"] = x["output"].rsplit("####", 1)[0] + "#### " + str(r.randrange(200))
    return g

def length_sign(r, g, s, row):
    for x in g:
        x["accuracy_reward"] = x["score"]
        x["length_penalty"] = round(0.001 * len(x["output"]), 4)
        x["score"] = x["accuracy_reward"] + x["length_penalty"]
    return g

def greedy(r, g, s, row): return [dict(g[0]) for _ in g]

def overlong(r, g, s, row):  # sound: DAPO's penalty, at most 0
    for x in g:
        x["overlong_reward"] = min(0.0, (500 - len(x["output"])) / 200); x["score"] = 2 * x["score"] - 1 + x["overlong_reward"]
    return g if max(x["score"] for x in g) > min(x["score"] for x in g) else []

def wandb(name, columns, n, step=1):
    d = HERE / "runs"; rows = []
    with open(d / f"{name}.csv", "w", newline="") as f:
        w = csv.writer(f); w.writerow(["_step", "_runtime", "_timestamp", *columns])
        for i in range(n): w.writerow([i * step, 31.0 * i, 1.76e9 + 31 * i, *[c(i) for c in columns.values()]])

def trl_columns(r, lr, up=lambda i: .3 + .4 * (1 - math.exp(-i / 60))):
    return {"train/global_step": lambda i: i + 1, "train/epoch": lambda i: round(i / 200, 4), "train/loss": lambda i: r.gauss(0, .01), "train/grad_norm": lambda i: abs(r.gauss(.4, .1)),
            "train/learning_rate": lr, "train/reward": lambda i: min(.99, max(.01, up(i) + r.gauss(0, .04))), "train/reward_std": lambda i: abs(r.gauss(.35, .03)),
            "train/frac_reward_zero_std": lambda i: max(0, r.gauss(.25, .05)), "train/completions/mean_length": lambda i: 210 + r.gauss(0, 9), "train/completions/clipped_ratio": lambda i: max(0, r.gauss(.03, .01)),
            "train/kl": lambda i: .0004 * i + abs(r.gauss(0, .0005)), "train/entropy": lambda i: .5 - .001 * i + r.gauss(0, .01), "train/num_tokens": lambda i: (i + 1) * 20000, "train/clip_ratio/region_mean": lambda i: 0.0}

def verl_columns(r, val):
    return {"training/global_step": lambda i: i, "critic/score/mean": lambda i: "" if i == 0 else .62 + .2 * (1 - math.exp(-i / 40)) + r.gauss(0, .02), "critic/rewards/mean": lambda i: "" if i == 0 else .62 + .2 * (1 - math.exp(-i / 40)),
            "actor/lr": lambda i: "" if i == 0 else 1e-6, "actor/grad_norm": lambda i: "" if i == 0 else abs(r.gauss(.2, .04)), "actor/entropy": lambda i: "" if i == 0 else .32 + r.gauss(0, .01), "actor/pg_loss": lambda i: "" if i == 0 else r.gauss(0, .005),
            "actor/ppo_kl": lambda i: "" if i == 0 else r.gauss(0, 1e-4), "actor/pg_clipfrac": lambda i: "" if i == 0 else .001, "response_length/mean": lambda i: "" if i == 0 else 260 + r.gauss(0, 5), "response_length/clip_ratio": lambda i: "" if i == 0 else .01, "val-core/openai/gsm8k/reward/mean@1": val}

if __name__ == "__main__":
    (HERE / "runs").mkdir(exist_ok=True)
    dump("s14v_equal_ranks", after=ranks)
    dump("s15v_template_twice", after=twice)
    dump("s16v_truncated_side", after=wrong_side)
    dump("s17v_length_sign", after=length_sign, length=lambda s: 1 + .6 * s)
    dump("s18v_greedy", after=greedy)
    dump("n15v_curriculum", curriculum=True, steps=12)
    dump("n16v_dapo", after=overlong)
    dump("n17v_easy", p0=.97, slope=0)
    r = random.Random(4)
    wandb("s20c_lr_restarted", trl_columns(r, lambda i: 1e-6 * (1 - (i % 50) / 200), up=lambda i: .3 + .3 * (1 - math.exp(-i / 60)) - (.15 * math.exp(-(i % 50) / 8) if i >= 50 else 0)), 200)
    wandb("s21c_eval_no_system", verl_columns(r, lambda i: round(.04 + r.gauss(0, .006), 4) if i % 10 == 0 else ""), 120)
    wandb("n18c_cosine", trl_columns(r, lambda i: 1e-6 * min(1, (i + 1) / 10) * .5 * (1 + math.cos(math.pi * i / 200))), 200)
    few = trl_columns(r, lambda i: 1e-6)
    wandb("n19c_few", {k: few[k] for k in ("train/reward", "train/loss", "train/grad_norm")}, 60)
    wandb("n20c_verl", verl_columns(r, lambda i: round(.55 + .15 * (1 - math.exp(-i / 40)) + r.gauss(0, .01), 4) if i % 10 == 0 else ""), 120)
