"""Findings: what goes wrong in a run, in words, with the evidence and a config line that mends it.

A rule is a record with a named predicate (`rule.py`), in one file for each family. Rules read the records of
a run (`view.py`) and nothing else. `table.py` has them in their order and applies them to a recorded run,
`watch.py` to a run that is still training. A finding is reported once, in `findings.jsonl`,
and a resume truncates it with the other logs, so a resumed run finds what an uninterrupted one finds.
"""
