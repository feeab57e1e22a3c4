"""The task of the demo on real weights: write the facts of a sentence as a JSON object with exact keys."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

from covey.tasks.generated import GeneratedTask
from covey_verify.contract import reward
from covey_verify.extract import TextOrMessages, code_block, text_of
from covey_verify.types import Score

NAMES = (
    "Tina", "Omar", "Lena", "Hugo", "Mara", "Ivan", "Nora", "Paul", "Aisha", "Felix",
    "Greta", "Jonas", "Clara", "David", "Emma", "Louis", "Sofia", "Peter", "Rosa", "Yusuf",
)  # fmt: skip
CITIES = (
    "Berlin", "Madrid", "Oslo", "Rome", "Lisbon", "Vienna", "Prague", "Dublin",
    "Athens", "Warsaw", "Paris", "London", "Geneva", "Naples", "Hamburg",
)  # fmt: skip
JOBS = (
    "driver", "teacher", "nurse", "baker", "pilot", "farmer",
    "painter", "doctor", "lawyer", "cook", "singer", "plumber",
)  # fmt: skip
SENTENCES = (
    "{name} is a {age} year old {job} from {city}.",
    "In {city} there lives a {job} called {name}, aged {age}.",
    "Meet {name}, who is {age}, works as a {job} and lives in {city}.",
    "The {job} {name} moved to {city} at the age of {age} and stayed.",
    "{city} is the home of {name}, a {job} of {age} years.",
)
QUESTION = (
    'Write the name, age and city of this person as one JSON object with the keys "name", "age" and "city". '
    "Write nothing else."
)


def facts(rng: random.Random) -> dict[str, object]:
    """Return a row: a chat with a sentence on a person, and the three facts to be written."""
    person = {"name": rng.choice(NAMES), "age": rng.randint(18, 80), "city": rng.choice(CITIES)}
    sentence = rng.choice(SENTENCES).format(**person, job=rng.choice(JOBS))
    return {
        "prompt": [{"role": "user", "content": f"{sentence}\n{QUESTION}"}],
        "facts": person,
        "completion": json.dumps(person),
    }


@reward(concurrent=True, verdict=True)
def same_facts(completion: TextOrMessages, facts: Mapping[str, object]) -> Score:
    """Return 1 for a JSON object that is exactly ``facts``, and 0 for text that is no JSON object. Any other
    object gets .1, and another .1 for each correct fact.

    >>> told = {"name": "Tina", "age": 19, "city": "Berlin"}
    >>> same_facts('{"name": "Tina", "age": 19, "city": "Berlin"}', told).value
    1.0
    >>> same_facts('{"name": "Tina", "age": "19", "town": "Berlin"}', told).value
    0.2
    """
    text = text_of(completion).strip()
    # Objects are read as tuples of pairs, since a dictionary would hide a key that is written twice.
    for candidate in (text, code_block(text, "json") or ""):
        try:
            pairs = json.loads(candidate, object_pairs_hook=tuple)
        except (ValueError, RecursionError):
            continue
        if not isinstance(pairs, tuple):
            return Score(0.0, "no_answer")
        correct = sum(any(_same(pair, fact) for pair in pairs) for fact in facts.items())
        exact = candidate == text and correct == len(pairs) == len(facts)
        return Score(1.0 if exact else 0.1 + 0.1 * correct, extracted=candidate[:500])
    return Score(0.0, "no_answer")


def _same(pair: tuple[str, object], fact: tuple[str, object]) -> bool:
    """Whether a key and its value match a fact; 19 is neither 19.0 nor "19"."""
    return pair == fact and type(pair[1]) is type(fact[1])


FACTS = GeneratedTask(
    "facts",
    "write the facts of a sentence as JSON with exact keys; for chat models",
    facts,
    ({same_facts: 1.0},),
    (),
)
