"""Tasks for a real model of 135M parameters: `python tasks.py` writes their rows.

SVAMP (https://github.com/arkilpatel/SVAMP, MIT licence) is read from data/svamp_train.jsonl and
data/svamp_test.jsonl with the columns prompt and answer, if they are there.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from pathlib import Path

DATA = Path(__file__).parent / "data"
Row = dict[str, object]

# --- word sums ------------------------------------------------------------------------------------

NAMES = ("Tom", "Mia", "Leo", "Ada", "Max", "Eva", "Ben", "Zoe", "Sam", "Ida")
THINGS = ("apples", "books", "coins", "stamps", "shells", "pens", "cards", "stones", "beads", "eggs")
STORIES = (
    ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", "+"),
    ("There are {a} {things} in one box and {b} in another. How many {things} are there?", "+"),
    ("{name} had {a} {things} and gave away {b}. How many {things} are left?", "-"),
    ("{name} has {a} {things}, {b} more than Kim. How many {things} does Kim have?", "-"),
    ("{b} bags hold {a} {things} each. How many {things} does {name} carry in them?", "*"),
    ("{name} buys {a} {things} for {b} dollars each. How many dollars is that?", "*"),
)


def word_sum(rng: random.Random) -> Row:
    """Return a calculation with two numbers, told as a story, and a worked answer of one line."""
    story, sign = rng.choice(STORIES)
    a, b = rng.randint(10, 49), rng.randint(2, 9)
    text = story.format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b)
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    return {"prompt": chat(text), "answer": str(result), "completion": f"{a} {sign} {b} = {result}"}


# --- strict instructions --------------------------------------------------------------------------

TOPICS = (
    "the sea", "winter", "a kitchen", "music", "a garden", "the city", "horses", "the moon", "bread",
    "a river", "summer", "a school", "dancing", "a forest", "trains", "birds", "the sun", "coffee",
    "the rain", "friends", "a market", "painting", "a farm", "ships", "cats", "the stars", "cheese",
)  # fmt: skip


def instruction(rng: random.Random) -> Row:
    """Return a request for words that has to be followed to the letter, and its three demands."""
    words = rng.randint(2, 5)
    upper = rng.random() < 0.5
    mark = rng.choice(".!?")
    case = "capital letters" if upper else "small letters"
    text = (
        f"Write exactly {words} words about {rng.choice(TOPICS)}, all in {case}, separated by spaces, "
        f'and put "{mark}" at the end. Write nothing else.'
    )
    return {"prompt": chat(text), "words": words, "upper": upper, "mark": mark}


def follows(completion: list[dict[str, str]], words: int, upper: bool, mark: str) -> float:
    """Return 1 if all three demands are met, and .1 for each one that is met otherwise."""
    text = completion[-1]["content"].strip()
    body = text.removesuffix(mark)
    met = [
        text.endswith(mark),
        len(set(body.split())) == len(body.split()) == words and all(map(str.isalpha, body.split())),
        body.isupper() if upper else body.islower(),
    ]
    return 1.0 if all(met) else 0.1 * sum(met)


# --- products with a calculator -------------------------------------------------------------------

CALLS = """Answer each question. For arithmetic call the calculator and then write its result.

Question: What is 31 * 27?
Answer: <tool_call>{"name": "calculate", "arguments": {"expression": "31 * 27"}}</tool_call>
<tool_response>
837
</tool_response>
<answer>837</answer>

Question: """


def product(rng: random.Random) -> Row:
    """Return a product of two numbers, asked in words after a call of a calculator, and a worked answer.

    Half of the answers guess, so a model that imitates them has to find out what is rewarded.
    """
    a, b = rng.randint(11, 99), rng.randint(11, 99)
    asked = rng.choice(
        (
            f"A hall has {a} rows of {b} seats. How many seats are there?",
            f"What do {a} tickets at {b} dollars cost together?",
            f"{a} boxes hold {b} pens each. How many pens is that?",
        )
    )
    call = json.dumps({"name": "calculate", "arguments": {"expression": f"{a} * {b}"}})
    reply = f"<tool_response>\n{a * b}\n</tool_response>"
    called = f" <tool_call>{call}</tool_call>\n{reply}\n<answer>{a * b}</answer>"
    guessed = f" <answer>{rng.randint(121, 9801)}</answer>"
    return {
        "prompt": f"{CALLS}{asked}\nAnswer:",
        "answer": str(a * b),
        "completion": called if rng.random() < 0.5 else guessed,
    }


# --- SVAMP ----------------------------------------------------------------------------------------


def svamp(rows: list[Row]) -> list[Row]:
    """Return SVAMP's rows as chats, to learn from by reward."""
    return [{"prompt": chat(str(row["prompt"])), "answer": row["answer"]} for row in rows]


def svamp_calculations(rows: list[Row]) -> list[Row]:
    """Return those with one calculation of two numbers of the story that gives the answer, to imitate it."""
    examples = []
    for row in rows:
        story = str(row["prompt"])
        lines = calculations(story, float(str(row["answer"])))
        if len(lines) == 1:
            examples.append({"prompt": chat(story), "completion": lines[0]})
    return examples


def calculations(story: str, answer: float) -> list[str]:
    """Return the calculations of two of a story's numbers that give the answer, as `6 * 12 = 72`."""
    numbers = list(dict.fromkeys(re.findall(r"\d+(?:\.\d+)?", story)))
    lines = []
    for a, b in itertools.permutations(numbers, 2):
        x, y = float(a), float(b)
        results = {"-": x - y, "/": x / y if y else math.nan}
        if numbers.index(a) < numbers.index(b):  # the others give the same in both orders
            results |= {"+": x + y, "*": x * y}
        lines += [f"{a} {sign} {b} = {answer:g}" for sign, result in results.items() if result == answer]
    return lines


def with_variants(rows: list[Row], tested: list[Row], rng: random.Random) -> list[Row]:
    """Return rows and up to ten variants of each with other numbers, shuffled; none has a tested prompt."""
    variants = [with_other_numbers(row, rng) for row in rows for _ in range(10)]
    distinct = {row["prompt"]: row for row in variants if row is not None}
    prompts = {row["prompt"] for row in tested}
    together = [*rows, *(row for prompt, row in distinct.items() if prompt not in prompts)]
    rng.shuffle(together)
    return together


def with_other_numbers(row: Row, rng: random.Random) -> Row | None:
    """Return a problem with other numbers; None if it is not known how its answer follows from them."""
    story = str(row["prompt"])
    lines = calculations(story, float(str(row["answer"])))
    if len(lines) != 1:
        return None
    a, sign, b = lines[0].partition(" = ")[0].split()
    if "." in a + b or any(len(re.findall(whole_number(n), story)) != 1 for n in (a, b)):
        return None
    for _ in range(40):
        x, y = other_number(rng, int(a)), other_number(rng, int(b))
        if sign == "-" and x <= y:
            continue
        if sign == "/":
            x = y * rng.randint(2, 12)
        answer = {"+": x + y, "-": x - y, "*": x * y, "/": x // y}[sign]
        # One pass, so that a new number is not replaced once more.
        new = {a: str(x), b: str(y)}
        text = re.sub(f"{whole_number(a)}|{whole_number(b)}", lambda match, new=new: new[match[0]], story)
        if len(calculations(text, float(answer))) == 1:
            return {"prompt": text, "answer": answer}
    return None


def other_number(rng: random.Random, number: int) -> int:
    """Return a number of a similar size."""
    return rng.randint(2, 3 * number if number >= 100 else max(12, 3 * number))


def whole_number(digits: str) -> str:
    """Return a pattern that matches a number, and not a part of a longer one."""
    return rf"(?<![\d.]){digits}(?![\d.])"


# --- writing --------------------------------------------------------------------------------------


def chat(question: str) -> list[dict[str, str]]:
    """Return a conversation of one question."""
    return [{"role": "user", "content": question}]


def write(name: str, rows: list[Row]) -> None:
    """Write one file of rows."""
    file = DATA / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"{file}: {len(rows)} rows")


def main() -> None:
    """Write training and test rows of each task; no question is in both."""
    DATA.mkdir(exist_ok=True)
    for name, draw in (("word_sums", word_sum), ("instructions", instruction), ("products", product)):
        rng = random.Random(name)
        distinct = {str(row["prompt"]): row for row in (draw(rng) for _ in range(3000))}
        rows = list(distinct.values())
        tested = min(200, len(rows) // 4)
        write(f"{name}_test", rows[:tested])
        write(f"{name}_train", rows[tested : tested + 1500])
    sources = [DATA / f"svamp_{part}.jsonl" for part in ("train", "test")]
    if not all(source.is_file() for source in sources):
        print(f"{sources[0]} or {sources[1].name} is not there: no rows of SVAMP")
        return
    train, test = ([json.loads(line) for line in source.open()] for source in sources)
    write("svamp_test_chats", svamp(test))
    write("svamp_train_chats", svamp(train))
    write("svamp_calculations", svamp_calculations(train))
    more = with_variants(train, test, random.Random(0))
    write("svamp_variants_chats", svamp(more))
    write("svamp_variants_calculations", svamp_calculations(more))


if __name__ == "__main__":
    main()
