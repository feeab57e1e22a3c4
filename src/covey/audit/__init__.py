"""Audit: what is wrong in a run of any framework, from what its trainer wrote down.

`record.py` is the format: rollouts and updates, a line each. `trl_writer.py`, `verl_writer.py` and
`openrlhf_writer.py` write it. `sources.py` reads it, covey's own run folders and other programs' files, of
which `logs.py` has the metrics and `prime_rl.py` a whole run; `frameworks.yaml` has the frameworks' words. A
check is a named predicate of a record, in the file of its family: `tokens`, `logprobs`, `advantages`,
`rewards`, `updates`. `checks.yaml` says what each needs and which line to change; `table.py` puts them
together and prints, `views.py` shows and compares runs.
"""
