"""Answers that people write in words or in a form of their own: numbers, dates, times of day."""

from __future__ import annotations

import re

SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october",
    "november", "december",
)  # fmt: skip
MONTH = "(" + "|".join(f"{name[:3]}(?:{name[3:]})?" for name in MONTHS) + r")\.?"
DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
# Without spaces: March 14, 1879 and 14 March.
DATES = (re.compile(rf"{MONTH}{DAY}(?:,?(\d{{4}}))?"), re.compile(rf"{DAY}(?:of)?{MONTH}(?:,?(\d{{4}}))?"))
CLOCK = re.compile(r"(\d{1,2})(?::(\d\d))?(?::(\d\d))?([ap])\.?m\.?")


def value_of_word(text: str) -> int | None:
    """Return the value of a number below a hundred in digits or English words, or None.

    >>> value_of_word("twelve"), value_of_word("twenty-one"), value_of_word("16"), value_of_word("one more")
    (12, 21, 16, None)
    """
    if text.isdecimal():
        return int(text)
    if text in SMALL:
        return SMALL.index(text)
    tens, _, ones = text.replace("-", " ").partition(" ")
    if tens not in TENS or (ones and ones not in SMALL[1:10]):
        return None
    return 10 * (TENS.index(tens) + 2) + (SMALL.index(ones) if ones else 0)


def moment(plain: str) -> str:
    """Return a date or a time of day, written without spaces, in one form; "" if it is neither.

    >>> moment("july4,1776"), moment("4july1776"), moment("3:30p.m."), moment("12am"), moment("may")
    ('date 1776-7-4', 'date 1776-7-4', 'clock 15:30:00', 'clock 0:00:00', '')
    """
    for pattern in DATES:
        if date := pattern.fullmatch(plain):
            first, second, year = date.groups()
            month, day = (first, second) if first.isalpha() else (second, first)
            number = next(n for n, name in enumerate(MONTHS, start=1) if name[:3] == month[:3])
            return f"date {year or ''}-{number}-{int(day)}"
    time = CLOCK.fullmatch(plain)
    if time is None or not 1 <= int(time[1]) <= 12:
        return ""
    hour = int(time[1]) % 12 + 12 * (time[4] == "p")
    return f"clock {hour}:{time[2] or '00'}:{time[3] or '00'}"
