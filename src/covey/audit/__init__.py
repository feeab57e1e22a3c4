"""Audit: find the mistakes in a run of any framework from what its trainer wrote down.

`record.py` is the format: rollouts and updates, a line each. `trl_writer.py`, `verl_writer.py` and
`openrlhf_writer.py` write it. `sources.py` reads it, covey's own run folders and the files of other programs:
`logs.py` reads their metrics, `prime_rl.py` a whole run. `frameworks.yaml` has the frameworks' words. A check
is a named predicate of a record, in the file of its family, such as `tokens` or `logprobs`. `checks.yaml`
says what each check needs and which line to change. `table.py` applies all checks and prints the findings;
`views.py` shows and compares runs.
"""
