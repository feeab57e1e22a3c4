"""The reward of the tests' runs, alone in its folder because a run hashes all modules beside a reward."""


def varied(completion: str) -> float:
    """Return what differs between completions, whatever they say, so that every run learns."""
    return len(completion) + sum(map(ord, completion)) % 7
