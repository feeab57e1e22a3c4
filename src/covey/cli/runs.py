"""The commands that look at runs: show, explain, diff, diagnose, audit, verify, pairs, report, ui."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from covey.cli.groups import RUNS
from covey.cli.options import (
    Json,
    OpenBrowser,
    Trust,
    app,
    print_remarks,
    print_result,
)
from covey_verify.errors import ConfigError


@app.command(name="show", group=RUNS)
def command_show(
    run: Path, step: int | None = None, group: int | None = None, *, as_json: Json = False
) -> int:
    """Show a run in the terminal: its course, the groups of a STEP, or all completions of a GROUP.

    :param run: The run's folder; of several stages, the last one is shown. Or whatever `covey audit` reads.
    :param step: Number of the step, counted from 1 as on the lines of progress.
    :param group: Number of the group in the step, counted from 0.
    """
    from covey.audit.readers.sources import is_foreign
    from covey.insight import show

    if is_foreign(run):
        from covey.audit.views import show_record

        print_result(as_json, *show_record(run, step, group))
    elif step is None:
        print_result(as_json, *show.show_run(run))
    elif group is None:
        print_result(as_json, *show.show_step(run, step))
    else:
        print_result(as_json, *show.show_group(run, step, group))
    return 0


@app.command(name="explain", group=RUNS)
def command_explain(what: str = "", *, as_json: Json = False) -> int:
    """Find what went wrong in a run and the setting that helps, or explain a setting, metric or finding.

    :param what: The folder of a run, or a file that `covey audit` reads; or a setting or section such
        as train.lr, a metric such as kl/start, a function of the algorithm, a finding, or a TRL name;
        without it every setting is listed.
    """
    from covey.audit.readers.sources import is_foreign

    path = Path(what)
    # A word without a suffix, such as `train`, is a setting even where a file has that name.
    if what and (path.is_dir() or path.suffix) and is_foreign(path):
        from covey.audit.table import audit, audit_as_json, audit_lines

        record, report = audit(path)
        print_result(as_json, audit_as_json(record, report), audit_lines(path, record, report))
        return 0
    if what and path.is_dir():
        from covey.insight.findings.watch import explain_run
        from covey.insight.show import what_stands_out
        from covey.runs.reader import recorded_method
        from covey.system.text import shell_word

        stage, conclusion, findings = explain_run(path)
        output: object = {"conclusion": conclusion, "findings": [f.record() for f in findings]}
        remarks = what_stands_out(stage, findings)
        if findings and recorded_method(stage) == "rl":
            remarks.append(f"to try what would help: covey diagnose {shell_word(what)}")
        lines: Iterable[str] = [conclusion, *remarks] if conclusion else remarks
    else:
        from covey.cli.algorithms import print_algorithm
        from covey.cli.settings import entry_lines, find_entries

        entries = find_entries(what)
        presets = [str(entry["setting"]) for entry in entries if entry["of"] == "algorithm"]
        if presets and not as_json:  # formulas and YAML instead of a line
            print_result(False, None, entry_lines([entry for entry in entries if entry["of"] != "algorithm"]))
            return print_algorithm(presets[0], as_json=False)
        output = entries
        lines = entry_lines(entries)
    print_result(as_json, output, lines)
    return 0


@app.command(name="diff", group=RUNS)
def command_diff(a: Path, b: Path, *, as_json: Json = False) -> int:
    """Compare two runs: settings, curves, and the problems that both have seen, with intervals.

    :param a: Folder of a run, or whatever `covey audit` reads.
    :param b: The other run; differences are B minus A.
    """
    from covey.audit.readers.sources import is_foreign

    if is_foreign(a) or is_foreign(b):
        from covey.audit.views import difference_of_records as difference
    else:
        from covey.insight.difference import difference
    print_result(as_json, *difference(a, b))
    return 0


@app.command(name="diagnose", group=RUNS)
def command_diagnose(
    run: Path,
    *,
    change: Annotated[list[str] | None, Parameter(negative=())] = None,
    start: int | None = None,
    steps: int = 0,
    trust: Trust = False,
    as_json: Json = False,
) -> int:
    """Find the cause by experiment: continue a run under several changes, with the same draws, and compare.

    The run itself is not changed. After Ctrl-C the same command continues. Exit code 1 if no
    change clearly helps.

    :param run: Folder of the run; of several stages the last one counts.
    :param change: A setting to try, such as train.lr=1e-6; may be repeated. By default the remedies of the
        run's findings and some settings whose effects metrics cannot separate.
    :param start: Step of the checkpoint where the trials begin, or 0 for the first model; by default the last
        checkpoint before the first severe finding.
    :param steps: Steps of each trial; by default as many as lead to that finding, and at least 10.
    """
    if steps < 0:
        raise ConfigError(f"--steps {steps} must be at least 1")
    from covey.commands.diagnose import answers_of_others, diagnose, outlook, plan_trials
    from covey.insight.trials import helpful_trials, lines_of_trials, record_of_trials
    from covey.system.console import RunConsole
    from covey.system.signals import StopSignal

    plan = plan_trials(run, change or (), start, steps, trust)
    print_remarks(as_json, [outlook(plan)])
    trials, unchanged = diagnose(plan, RunConsole(quiet=as_json), StopSignal())
    answers = answers_of_others(plan)
    record = {**record_of_trials(trials, unchanged), "answers": answers or None}
    print_result(as_json, record, [*lines_of_trials(trials, unchanged), *([answers] if answers else [])])
    return int(not helpful_trials(trials))


@app.command(name="audit", group=RUNS)
def command_audit(run: Path, *, as_json: Json = False) -> int:
    """Find mistakes in a run of any framework: in masks, log-probs, advantages, rewards or the loss.

    covey recomputes all of them from the trainer's record. Exit code 1 if it finds a severe mistake.

    :param run: A record (JSONL; `covey.audit.writers.trl.record_run` writes one for TRL), an output
        folder of TRL, prime-rl or covey, `trainer_state.json`, verl's rollout dumps, or a log: an export of
        Weights & Biases (CSV, JSON), an event file of TensorBoard, trackio's database.
    """
    from covey.audit.table import audit, audit_as_json, audit_lines

    record, report = audit(run)
    print_result(as_json, audit_as_json(record, report), audit_lines(run, record, report))
    return int(any(f.severity == "severe" for f in report.findings))


@app.command(name="verify", group=RUNS)
def command_verify(run: Path, *, as_json: Json = False) -> int:
    """Check that every file of a run is intact. Exit code 4 if one is damaged or missing.

    :param run: Folder of a run or a pipeline.
    """
    from covey.runs.verify import verify_run

    files = verify_run(run)
    # An unsealed file has no checksum yet, which is no damage.
    whole = all(v.state in ("whole", "unsealed") for v in files)
    print_result(as_json, {"whole": whole, "files": [vars(v) for v in files]}, map(str, files))
    return 0 if whole else 4


@app.command(name="pairs", group=RUNS)
def command_pairs(
    run: Path,
    *,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    margin: float = 0.0,
    per_problem: int = 1,
    as_json: Json = False,
) -> int:
    """Write preference pairs from a run's completions: the best of each group against the worst.

    :param run: The folder of a run, or of a pipeline, whose stages are read in their order.
    :param output: The file to write, one pair per line, as `method: dpo` and TRL read it; by default
        `pairs.jsonl` in the run's folder.
    :param margin: Smallest difference of the two rewards.
    :param per_problem: Largest number of pairs per group: first the best against the worst, then the next.
    """
    from covey.runs.examples import write_pairs

    target = output or run / "pairs.jsonl"
    counts = write_pairs(run, target, margin, per_problem)
    print_result(as_json, counts, (f"{counts['pairs']} pairs of {counts['groups']} groups in {target}",))
    return 0


@app.command(name="report", group=RUNS)
def command_report(
    run: Path,
    output: Annotated[Path, Parameter(name=("--output", "-o"))] = Path("report.html"),
    *,
    as_json: Json = False,
) -> int:
    """Write a run as one self-contained HTML file: conclusion, curves, findings, completions, settings.

    :param run: Folder of a run or a pipeline, or whatever `covey audit` reads.
    :param output: The file to write.
    """
    from covey.audit.run_folder import readable
    from covey.insight.pages.report import write_report

    with readable(run) as folder:
        write_report(folder, output)
    print_result(as_json, {"report": str(output)}, [f"report  {output}"])
    return 0


@app.command(name="ui", group=RUNS)
def command_ui(
    runs: Path = Path("runs"),
    *,
    port: int = 0,
    open_browser: OpenBrowser = True,
    read_only: bool = False,
    as_json: Json = False,
) -> int:
    """Look at runs in a browser: live curves, groups, completions token by token.

    :param runs: The folder of a run, or one with runs in it; or whatever `covey audit` reads, and a folder of
        its records, even while they are being written.
    :param port: Port on 127.0.0.1; 0 takes any free one.
    :param read_only: Do not let the pages tag or delete runs.
    """
    print_remarks(as_json, [f"pages of {runs}: loading ..."])
    from covey.audit.run_folder import readable
    from covey.insight.pages.server import serve_pages

    with readable(runs, follow=True) as folder:
        # The record of another framework is shown from a temporary copy, so changing it would be lost.
        source = runs if folder != runs else None
        serve_pages(folder, port, open_browser, "#/", as_json, read_only or source is not None, source)
    return 0
