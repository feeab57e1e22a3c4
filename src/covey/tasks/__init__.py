"""Tasks: streams of problems, made by a program or read from a file. No torch here."""

from collections.abc import Mapping

from covey.tasks.countdown import COUNTDOWN
from covey.tasks.generated import Task
from covey.tasks.ordering import ORDERING
from covey.tasks.products import PRODUCTS
from covey.tasks.sums import LAST_DIGIT, MIXED_DIGITS, MODULO_7, SUMS

TASKS: Mapping[str, Task] = {
    t.name: t for t in (LAST_DIGIT, MODULO_7, MIXED_DIGITS, SUMS, ORDERING, COUNTDOWN, PRODUCTS)
}
"""The built-in tasks by name."""
