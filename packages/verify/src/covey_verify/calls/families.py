"""Call forms of single model families, where calls are not JSON between tags.

<|tool_call>call:look_up{word:<|"|>covey<|"|>}<tool_call|>                                 Gemma 4
<|tool_call_start|>[look_up(word='covey')]<|tool_call_end|>                                LFM2
 to=functions.look_up<|channel|>commentary json<|message|>{"word": "covey"}                gpt-oss
<｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up ... {"word": "covey"} ... <｜tool▁call▁end｜>   DeepSeek

Each reader begins at the mark of a call and says where the call ends, so that no mark within a text of its
arguments ends it.
"""

from __future__ import annotations

import ast
import json
import re

from covey_verify.calls.call import ToolCall, Types, call_of, no_json
from covey_verify.isolated import after_blanks, strict_json, strict_json_at

MAX_CHARACTERS = 50_000
"""Most characters of one call in Python."""
GEMMA = re.compile(r"<\|tool_call>call:([\w.-]+)(?=\{)")
GEMMA_QUOTE = '<|"|>'
GEMMA_PART = re.compile(r'<\|"\|>.*?<\|"\|>|[{}\[\]]|<\|tool_call>', re.DOTALL)
"""A string as a whole, a bracket, or the beginning of another call."""
GEMMA_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)(\s*:)")
GEMMA_OPEN = "<|tool_call>"
GEMMA_CLOSE = "<tool_call|>"
LFM2 = "<|tool_call_start|>"
LFM2_CLOSE = "<|tool_call_end|>"
LFM2_BODY = re.compile(
    r"""(?:"(?:\\.|[^"\\])*+"|'(?:\\.|[^'\\])*+'|[^"'<]|<(?!\|tool_call_end\|>))*+""", re.DOTALL
)
"""Python up to the closing mark, with its strings as a whole."""
CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's constants, which models write among Python's own."""
NO_LIST = "this is no list of calls as [name(argument=value)]"
OUTSIDE = r"(?:(?!<\|message\|>|<\|start\|>|<\|end\|>|to=).)*?"
HARMONY = re.compile(
    rf"(?:\A|<\|start\|>assistant){OUTSIDE}to=functions\.([\w.-]+){OUTSIDE}<\|message\|>", re.DOTALL
)
"""The header of a message that is addressed to a function."""
HARMONY_CLOSE = "<|call|>"
DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([\w.-]+)\s*```json\n|([\w.-]+)<｜tool▁sep｜>)"
)
DEEPSEEK_CLOSE = re.compile(r"\s*(?:```\s*)?<｜tool▁call▁end｜>")


def gemma_calls(text: str, start: int, _: Types) -> tuple[list[ToolCall], int]:
    """Read Gemma 4's call: JSON with bare keys, and with Gemma's own mark around strings."""
    named = GEMMA.match(text, start)
    if named is None:
        return [call_of(None)], start + 1
    depth = 0
    for part in GEMMA_PART.finditer(text, named.end()):
        if part[0] == GEMMA_OPEN:
            return [call_of(None)], part.start()
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(part[0], 0)
        if depth == 0:
            closed = text.startswith(GEMMA_CLOSE, part.end())
            written = _gemma_json(text[named.end() : part.end()])
            return [_json_call(named[1], written) if closed else call_of(None)], part.end()
    return [call_of(None)], named.end()


def _gemma_json(written: str) -> str:
    parts = written.split(GEMMA_QUOTE)
    # A part between two marks is a string; in the others a key is what precedes a colon.
    parts[::2] = [re.sub(r"\bNone\b", "null", GEMMA_KEY.sub(r'\1"\2"\3', part)) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return "".join(parts)


def python_calls(text: str, start: int, _: Types) -> tuple[list[ToolCall], int]:
    """Read LFM2's calls: a list of calls in Python. Nothing of it is evaluated."""
    body = LFM2_BODY.match(text, start + len(LFM2))
    assert body is not None, "it matches the empty text"
    if not text.startswith(LFM2_CLOSE, body.end()) or len(body[0]) > MAX_CHARACTERS:
        # A string in it does not end, so the first closing mark ends the call, wherever it is.
        closed = text.find(LFM2_CLOSE, body.end())
        return [ToolCall("", {}, NO_LIST)] if closed >= 0 else [], max(closed, body.end())
    try:
        listed = ast.parse(body[0].strip(), mode="eval").body
        calls = listed.elts if isinstance(listed, ast.List) else [listed]
        return [_python_call(call) for call in calls], body.end()
    # Python's parser raises each of these for some text; MemoryError for a text that is nested too deeply.
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return [ToolCall("", {}, NO_LIST)], body.end()


def _python_call(call: ast.expr) -> ToolCall:
    """Return one call. Raises ValueError if it is not a call, or if an argument is not written out."""
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise ValueError("no call by name")
    pairs = [(str(k.arg), _literal(k.value)) for k in call.keywords]
    # By way of JSON, because no schema allows what JSON lacks: sets, bytes, complex and infinite numbers.
    arguments = strict_json(json.dumps(_unique(pairs), allow_nan=False))
    assert isinstance(arguments, dict)
    return ToolCall(ast.unparse(call.func), arguments)


def _literal(node: ast.expr) -> object:
    """Return a value that is written out; nothing is evaluated. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]  # JSON's words for Python's
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return _unique([(str(_literal(key)), _literal(value)) for key, value in pairs if key is not None])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _literal(node.operand)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number
    raise ValueError("no value")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key is repeated")
    return values


def harmony_calls(text: str, start: int, _: Types) -> tuple[list[ToolCall], int]:
    """Read gpt-oss's call: the last message, addressed to a function."""
    header = HARMONY.match(text, start)
    assert header is not None, "the mark of this form is its header"
    call, end = _call_at(header[1], text, header.end())
    rest = text[end:].strip()
    return [call] if call.wrong or rest in ("", HARMONY_CLOSE) else [], end


def deepseek_calls(text: str, start: int, _: Types) -> tuple[list[ToolCall], int]:
    """Read DeepSeek's call: V3 and R1 put a fence around the arguments, V3.1 does not."""
    named = DEEPSEEK.match(text, start)
    if named is None:
        return [call_of(None)], start + 1
    call, end = _call_at(named[1] or named[2], text, named.end())
    closed = DEEPSEEK_CLOSE.match(text, end)
    return [call if closed or call.wrong else call_of(None)], closed.end() if closed else end


def _call_at(name: str, text: str, position: int) -> tuple[ToolCall, int]:
    """Read a call's arguments as JSON. Return the call, and where they end."""
    position = after_blanks(text, position)
    try:
        arguments, end = strict_json_at(text, position)
    except ValueError as error:
        return no_json(error), position
    return call_of({"name": name, "arguments": arguments}), end


def _json_call(name: str, written: str) -> ToolCall:
    return call_of({"name": name, "arguments": written})
