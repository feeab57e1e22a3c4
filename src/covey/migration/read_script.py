"""The settings of a Python script for TRL: read from its text, which is never run.

Arguments of calls such as `GRPOConfig(learning_rate=1e-5)` become `GRPOConfig.learning_rate`. A value is read
if it is written in the script: a literal, a sum, a variable that is set once, `dict(...)`, or a path of
`os.path.join`. Anything else stays the text of its expression.
"""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

TRAINERS = ("GRPO", "RLOO", "SFT", "DPO", "KTO", "Reward")
CALLS: Mapping[str, tuple[str, ...]] = {
    **{f"{name}Config": ("output_dir",) for name in TRAINERS},
    **{f"{name}Trainer": ("model",) for name in TRAINERS},
    "GRPOTrainer": ("model", "reward_funcs"),
    "RLOOTrainer": ("model", "reward_funcs"),
    "LoraConfig": ("task_type",),
    "load_dataset": ("path", "name"),
}
"""Functions of scripts whose arguments are settings -> the names of their first positions."""
OPERATIONS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
DEEPEST = 20
"""Largest depth of a value, variables included."""
MAX_PARTS = 100_000
"""Largest number of parts that are read: lists of lists of one variable grow without end."""


class Expression(NamedTuple):
    """A value that only the running script knows."""

    text: str


class Function(NamedTuple):
    """A function that the script defines."""

    name: str


def read_script(text: str) -> dict[str, object]:
    """Return the arguments of a script's calls: `function.argument` -> value; {} if it is not Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    reader = _Reader(tree)
    settings = dict[str, object]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in CALLS:
            for name, value in reader.arguments(node):
                settings.setdefault(f"{_name(node.func)}.{name}", value)
    return settings


def _name(function: ast.expr) -> str:
    """Return the last part of a function's name."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _variables_set(tree: ast.Module) -> Iterator[str]:
    """Yield the variable of each place that sets one: assignments, loops, parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


class _Reader:
    """Reads expressions of a script."""

    def __init__(self, tree: ast.Module) -> None:
        self.left = MAX_PARTS
        self.assigned = dict[str, ast.expr]()
        self.functions = set[str]()
        # Only the running script knows which value holds of a variable that it sets in several places.
        places = Counter(_variables_set(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target = node.targets[0]
                if isinstance(target, ast.Name) and places[target.id] == 1:
                    self.assigned[target.id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                if places[node.target.id] == 1:
                    self.assigned[node.target.id] = node.value
            elif isinstance(node, ast.FunctionDef):
                self.functions.add(node.name)

    def arguments(self, call: ast.Call) -> Iterator[tuple[str, object]]:
        """Yield the names and values of a call's arguments."""
        for name, node in zip(CALLS[_name(call.func)], call.args, strict=False):
            yield name, self.value(node)
        for keyword in call.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                yield keyword.arg, value
            elif isinstance(value, dict):
                yield from value.items()
            else:
                yield f"**{ast.unparse(keyword.value)}", value

    def value(self, node: ast.expr, depth: int = 0) -> object:
        """Return the value of an expression, or an Expression."""
        self.left -= 1
        if depth > DEEPEST or self.left < 0:
            return Expression(ast.unparse(node))
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in self.functions:
            return Function(node.id)
        if isinstance(node, ast.Name) and node.id in self.assigned:
            return self.value(self.assigned[node.id], depth + 1)
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(item, depth + 1) for item in node.elts]
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            return dict(zip(keys, (self.value(item, depth + 1) for item in node.values), strict=True))
        if isinstance(node, ast.Call):
            return self._call(node, depth + 1)
        return self._number(node, depth + 1)

    def _call(self, node: ast.Call, depth: int) -> object:
        if _name(node.func) == "dict" and not node.args and all(k.arg for k in node.keywords):
            return {str(k.arg): self.value(k.value, depth) for k in node.keywords}
        parts = [self.value(item, depth) for item in node.args]
        if ast.unparse(node.func) in ("os.path.join", "Path", "str") and parts and not node.keywords:
            texts = [part for part in parts if isinstance(part, str)]
            if len(texts) == len(parts):
                return "/".join(texts)
        return Expression(ast.unparse(node))

    def _number(self, node: ast.expr, depth: int) -> object:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.value(node.operand, depth)
            if isinstance(value, int | float):
                return -value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            left, right = self.value(node.left, depth), self.value(node.right, depth)
            if isinstance(left, int | float) and isinstance(right, int | float):
                try:
                    return OPERATIONS[type(node.op)](left, right)
                except (ArithmeticError, ValueError):
                    pass
        return Expression(ast.unparse(node))
