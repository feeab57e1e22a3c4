"""The reward of the dates."""


def iso_date(completion, answer):
    """Return 1 for the date, and otherwise .1 for each correct part of it."""
    written, wanted = completion.strip().split("-"), answer.split("-")
    correct = sum(part == other for part, other in zip(written, wanted))
    return 1.0 if written == wanted else 0.1 * correct
