"""The words that formulas are made of: functions, letters, and runs of letters that are words."""

from __future__ import annotations

CIRCULAR = ("sin", "cos", "tan", "cot", "sec", "csc")
HYPERBOLIC = ("sinh", "cosh", "tanh", "coth", "sech", "csch")
# Names for the power -1: \sin^{-1} x is arcsin x.
INVERSE = {n: "arc" + n for n in CIRCULAR} | {n: "ar" + n for n in HYPERBOLIC}
SYNONYMS = {
    "tg": "tan", "ctg": "cot", "cotg": "cot", "cosec": "csc", "arctg": "arctan", "arcctg": "arccot",
    "sh": "sinh", "ch": "cosh", "th": "tanh", "cth": "coth", "asin": "arcsin", "acos": "arccos",
    "atan": "arctan", "arccosec": "arccsc", **{f"arc{n}": f"ar{n}" for n in HYPERBOLIC},
}  # fmt: skip
SEVERAL = frozenset({"max", "min", "gcd", "lcm"})
"""Functions of any number of arguments."""
FUNCTIONS = frozenset((*INVERSE, *INVERSE.values(), *SYNONYMS, *SEVERAL, "ln", "log", "lg", "exp"))
PLAIN = FUNCTIONS - {"sh", "ch", "th", "tg", "cth"}
"""Functions that people write without a backslash, too."""
INFINITE = frozenset({"inf", "infty", "Inf", "oo", "infinity", "Infinity"})
KNOWN = PLAIN | INFINITE | {"pi", "sqrt", "abs", "mod"}
"""Runs of letters that are neither words nor products."""
LETTER_NAMES = """
    alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma
    tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar
    aleph partial nabla star
"""
LETTERS = frozenset(LETTER_NAMES.split())
PREFIXES = frozenset({"angle", "triangle", "measuredangle", "odot"})
ACCENT_NAMES = """
    vec hat widehat bar overline tilde widetilde dot ddot overrightarrow overleftarrow mathcal mathscr
    mathfrak mathbb overarc
"""
ACCENTS = PREFIXES | frozenset(ACCENT_NAMES.split())
"""Commands that make a name of the letters after them."""
DOMAINS = {"R": "ℝ", "Q": "ℚ", "Z": "ℤ", "N": "ℕ", "C": "ℂ"}
FRACTIONS = frozenset({"frac", "dfrac", "tfrac", "cfrac"})
BINOMIALS = frozenset({"binom", "dbinom", "tbinom"})
NO_FACTORS = frozenset(
    {"bmod", "mod", "pmod", "choose", "over", "to", "rightarrow", "rfloor", "rceil", "notin"}
)
"""Commands that come between or after factors."""
BIG = frozenset({"sum", "prod", "int", "lim"})
APPLIED = frozenset("fghFGH")
"""Names of unknown functions, whose parentheses contain their argument."""
SHORT = """
    no on is us am an at to of up so ok he we me it if go do my by as in or be hi oh try fly dry sky why
    shy cry spy gym
"""
SHORT_WORDS = frozenset(SHORT.split())
"""Words that look like products of their letters."""


def is_product(run: str) -> bool:
    """Return whether a run of letters may be the product of its letters: `abc`, but not `dog` or `Rome`."""
    cased = run.islower() or (len(run) == 2 and not run.isupper()) or run[0].islower()
    return 1 < len(run) <= 4 and run.isascii() and cased and run.casefold() not in SHORT_WORDS


def is_letters(run: str) -> bool:
    """Return whether a run is surely a product, and no unknown word: `ab`, `abc`, `xyz`."""
    plain = len(run) == 2 or not set(run.casefold()) & set("aeiou") or run in "abcdefgh"
    return is_product(run) and plain
