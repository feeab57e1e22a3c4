"""`covey recommend`: choose a training method by the data that a user has, and show each one's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal, NamedTuple, TypedDict

import yaml

from covey.system.plot import align_columns
from covey_verify.errors import ConfigError

KEPT = ("weights", "gradient", "optimizer", "reference", "critic", "reward_models")
"""Parts that stay in memory between steps, whatever the batch."""
FLOAT32 = 4
FEW = 500
"""Number of pairs or judged answers below which little is learned that generalizes."""
SHARE = 0.8
"""Fraction of a device's memory that these parts may take; activations and sampling need the rest."""


@dataclass(frozen=True)
class Resources:
    """The data and tools that a user has. Counts are rows of a file."""

    worked: int = 0
    """Number of worked answers to imitate."""
    pairs: int = 0
    """Number of pairs of answers, one preferred."""
    judged: int = 0
    """Number of answers judged good or bad, each alone."""
    verifier: bool = False
    """Whether a program can say if an answer is correct."""
    steps: bool = False
    """Whether there are labels, or a program, for single steps of an answer."""
    budget: Literal["tight", "ample"] = "tight"

    def has(self, thing: str) -> bool:
        """Whether the user has a thing that a method's `when` names."""
        combined = {"feedback": bool(self.pairs or self.judged), "ample": self.budget == "ample"}
        return combined[thing] if thing in combined else bool(getattr(self, thing))


class Route(NamedTuple):
    """A training method of `routes.yaml`."""

    name: str
    needs: str
    when: list[str]
    memory: str
    because: str
    config: str


class RouteRow(TypedDict):
    """A row of the table: a method, and whether the user's data and device are enough for it."""

    route: str
    needs: str
    have: bool
    memory: dict[str, float]
    times_weights: float
    gigabytes: float | None
    fits: bool | None


@cache
def routes() -> list[Route]:
    """Return all methods, in order of preference: the first that a user can take is recommended."""
    text = (files("covey") / "insight" / "routes.yaml").read_text(encoding="utf-8")
    return [Route(**entry) for entry in yaml.safe_load(text)]


@cache
def measured_memory() -> Mapping[str, Mapping[str, float]]:
    """Return method -> part -> measured multiples of the float32 policy weights."""
    return yaml.safe_load((files("covey") / "insight" / "memory_of_models.yaml").read_text(encoding="utf-8"))


def kept_multiple(route: str) -> float:
    """Return the memory kept between steps, in multiples of the policy's weights."""
    return sum(measured_memory()[route][role] for role in KEPT)


def recommend(resources: Resources, parameters: float, memory: float) -> tuple[dict[str, object], list[str]]:
    """Recommend a method, and list all with their memory: as JSON, and as lines for people.

    ``parameters`` of the model in billions, ``memory`` of the device in GB; 0 means unknown. Raises
    ConfigError for impossible numbers, and if there is nothing to learn from.
    """
    for name, value in {**vars(resources), "parameters": parameters, "memory": memory}.items():
        if not isinstance(value, str) and not 0 <= value <= 1e12:
            raise ConfigError(f"--{name} {value}: a number from 0 to 1e12")
    # routes.yaml is in order of preference: the first method whose needs are met.
    possible = (route for route in routes() if all(map(resources.has, route.when)))
    route = next(possible, None)
    if route is None:
        raise ConfigError(
            "nothing to learn from. Describe data: --verifier, --pairs N, --judged N, --steps, --worked N"
        )
    rows = [_row(candidate, resources, parameters, memory) for candidate in routes()]
    advice = [*_advice(resources, route), *_on_memory(rows[routes().index(route)], parameters, memory)]
    record: dict[str, object] = {
        "recommended": route.name,
        "because": route.because,
        "advice": advice,
        "config": route.config,
        "routes": rows,
    }
    return record, list(_lines(route, advice, rows))


def _row(route: Route, resources: Resources, parameters: float, memory: float) -> RouteRow:
    multiple = kept_multiple(route.memory)
    # Billions of parameters times bytes each are gigabytes.
    gigabytes = multiple * FLOAT32 * parameters
    return {
        "route": route.name,
        "needs": route.needs,
        "have": all(map(resources.has, route.when)),
        "memory": {role: measured_memory()[route.memory][role] for role in KEPT},
        "times_weights": round(multiple, 2),
        "gigabytes": round(gigabytes, 2) if parameters else None,
        "fits": gigabytes <= SHARE * memory if parameters and memory else None,
    }


def _advice(resources: Resources, route: Route) -> Iterator[str]:
    if resources.worked and route.when != ["worked"]:
        yield (
            "begin with your worked answers, in a stage with method: sft: what is never sampled is never "
            "reinforced"
        )
    if resources.verifier and resources.pairs:
        yield "your pairs first: SFT, then a stage with method: dpo, then the reinforcement"
    if resources.verifier and resources.budget == "tight":
        yield (
            "cheaper: rejection sampling, which samples once; `covey preview` says beforehand what a step "
            "costs"
        )
    for name, count in {"pairs": resources.pairs, "judged answers": resources.judged}.items():
        if 0 < count < FEW and not resources.verifier:
            yield f"{count} {name} are few: below {FEW} little is learned that holds elsewhere"
    if route.when == ["pairs"]:
        yield "with --budget ample: a reward model and PPO, which explore beyond the pairs"


def _on_memory(row: RouteRow, parameters: float, memory: float) -> Iterator[str]:
    if row["fits"] is not False:
        return
    # The one remedy for memory that keeps the method: only adapters have gradients and moments.
    lora = kept_multiple("lora") * FLOAT32 * parameters
    fits = "fits" if lora <= SHARE * memory else "does not fit either: take a smaller model"
    yield (
        f"{row['gigabytes']} GB do not fit into {memory:g} GB with room to work; adapters "
        f"(lora: {{rank: 16}}) take about {lora:.1f} GB, which {fits}"
    )


def _lines(route: Route, advice: list[str], rows: list[RouteRow]) -> Iterator[str]:
    yield f"{route.name}: {route.because}"
    yield from (f"- {line}" for line in advice)
    yield ""
    yield from (f"    {line}" for line in route.config.splitlines())
    yield ""
    roles = [role.replace("_", " ") for role in KEPT]
    has_sizes = rows[0]["gigabytes"] is not None
    head = ["route", "needs", "you have it", *roles, "together", *(["GB"] if has_sizes else [])]
    yield from align_columns([head, *map(_cells, rows)])
    yield (
        "memory in multiples of the policy's weights in float32, measured (docs/methods.md); activations and "
        "sampling come on top"
    )


def _cells(row: RouteRow) -> list[str]:
    """Return a row of the table; with a last column if the size of the model is known."""
    memory = [f"{row['memory'][role]:g}" for role in KEPT]
    cells = [row["route"], row["needs"], "yes" if row["have"] else "no", *memory, f"{row['times_weights']:g}"]
    if row["gigabytes"] is not None:
        cells.append(f"{row['gigabytes']}{' (too much)' if row['fits'] is False else ''}")
    return cells
