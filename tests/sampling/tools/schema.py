"""The schema of a tool that looks something up."""

from __future__ import annotations

SCHEMA = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "The meaning of a word.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string"},
                "most": {"type": "integer"},
                "all": {"type": "boolean"},
            },
        },
    },
}
