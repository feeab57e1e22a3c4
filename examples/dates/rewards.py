"""The reward of the dates."""


def iso_date(completion, answer):
    """Return 1 for the date, and otherwise up to .3 for the fraction of its parts that are correct."""
    written, wanted = completion.strip().split("-"), answer.split("-")
    correct = sum(part == other for part, other in zip(written, wanted))
    # Of all parts that are written, so that writing on after a date does not pay.
    return 1.0 if written == wanted else 0.3 * correct / max(len(written), len(wanted))
