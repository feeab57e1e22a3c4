"""Call formats of single model families, where calls are not JSON between tags.

<|tool_call>call:look_up{word:<|"|>covey<|"|>}<tool_call|>                                 Gemma 4
<|tool_call_start|>[look_up(word='covey')]<|tool_call_end|>                                LFM2
 to=functions.look_up<|channel|>commentary json<|message|>{"word": "covey"}                gpt-oss
<｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up ... {"word": "covey"} ... <｜tool▁call▁end｜>   DeepSeek
<atem:invoke name="look_up"><atem:parameter name="word">covey</atem:parameter>...          Muse
"""

from __future__ import annotations

import ast
import json
import re

from covey.sampling.tools.calls import ToolCall, call_of
from covey_verify.isolated import strict_json

LONGEST = 50_000
"""Most characters of a turn, from its end, that are searched for calls."""
GEMMA = re.compile(r"<\|tool_call>call:([\w.-]+)(\{.*?\})<tool_call\|>", re.DOTALL)
GEMMA_END = re.compile(r"<tool_call\|>\s*(?:<\|tool_response>\s*)?$")
GEMMA_QUOTE = '<|"|>'
GEMMA_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)(\s*:)")
LFM2 = re.compile(r"<\|tool_call_start\|>(.*?)<\|tool_call_end\|>", re.DOTALL)
CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's constants, which models write among Python's own."""
HARMONY = re.compile(r"to=functions\.([\w.-]+)([^{]*?)<\|message\|>(.*)", re.DOTALL)
HARMONY_MESSAGE = "<|start|>assistant"
DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([\w.-]+)\s*```json\n(.*?)\n```|([\w.-]+)<｜tool▁sep｜>(.*?))"
    r"\s*<｜tool▁call▁end｜>",
    re.DOTALL,
)
DEEPSEEK_END = re.compile(r"<｜tool▁calls?▁end｜>\s*$")
MUSE = re.compile(r'<atem:invoke name="([\w.-]+)">(.*?)</atem:invoke>', re.DOTALL)
MUSE_PARAMETER = re.compile(r'<atem:parameter name="([\w.-]+)">(.*?)</atem:parameter>', re.DOTALL)
MUSE_END = re.compile(r"</atem:function_calls>\s*(?:<\|eom\|>\s*)?$")


def gemma_calls(turn: str) -> list[ToolCall]:
    """Return Gemma 4's calls: JSON with bare keys, and a mark of its own around strings."""
    if not GEMMA_END.search(turn):
        return []
    return [_json_call(name, _gemma_json(written)) for name, written in GEMMA.findall(turn[-LONGEST:])]


def _gemma_json(written: str) -> str:
    parts = written.split(GEMMA_QUOTE)
    # A part between two marks is a string; in the others what precedes a colon is a key.
    parts[::2] = [re.sub(r"\bNone\b", "null", GEMMA_KEY.sub(r'\1"\2"\3', part)) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return "".join(parts)


def python_calls(turn: str) -> list[ToolCall]:
    """Return LFM2's calls: a list of calls in Python, with text after it. Nothing of it is evaluated."""
    result: list[ToolCall] = []
    for block in LFM2.findall(turn[-LONGEST:]):
        try:
            listed = ast.parse(block.strip(), mode="eval").body
            calls = listed.elts if isinstance(listed, ast.List) else [listed]
            result += [_python_call(call) for call in calls]
        # Python's parser raises each of these for some text; MemoryError for one that is nested too deeply.
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            result.append(ToolCall("", {}, "this is no list of calls as [name(argument=value)]"))
    return result


def _python_call(call: ast.expr) -> ToolCall:
    """Return one call. Raises ValueError if it is none, or an argument is not written out."""
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise ValueError("no call by name")
    return ToolCall(ast.unparse(call.func), {str(k.arg): _value_of(k.value) for k in call.keywords})


def _value_of(node: ast.expr) -> object:
    # What JSON does not have no schema allows: sets, bytes, complex and infinite numbers.
    return strict_json(json.dumps(_literal(node), allow_nan=False))


def _literal(node: ast.expr) -> object:
    """Return a value that is written out; nothing is evaluated. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]  # JSON's words for Python's
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_literal(key)): _literal(value) for key, value in pairs if key is not None}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _literal(node.operand)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number
    raise ValueError("no value")


def harmony_calls(turn: str) -> list[ToolCall]:
    """Return gpt-oss's call: a last message that is addressed to a function."""
    last = turn.rpartition(HARMONY_MESSAGE)[2].removesuffix("<|call|>")
    found = HARMONY.search(last)
    return [_json_call(found[1], found[3])] if found else []


def deepseek_calls(turn: str) -> list[ToolCall]:
    """Return DeepSeek's calls: of V3 and R1 with a fence around the arguments, of V3.1 without."""
    if not DEEPSEEK_END.search(turn):
        return []
    found = DEEPSEEK.findall(turn[-LONGEST:])
    # The pattern has two alternatives with two groups each: the one that did not match leaves empty strings.
    return [_json_call(name or other, written or bare) for name, written, other, bare in found]


def muse_calls(turn: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return Muse's calls: name, and pairs of an argument and its text."""
    if not MUSE_END.search(turn):
        return []
    return [(name, MUSE_PARAMETER.findall(inside)) for name, inside in MUSE.findall(turn[-LONGEST:])]


def _json_call(name: str, written: str) -> ToolCall:
    return call_of({"name": name, "arguments": written})
