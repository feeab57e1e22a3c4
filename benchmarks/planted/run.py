"""Audit scripts that strangers wrote: `python benchmarks/planted/run.py --verl PATH --openrlhf PATH`.

Each script of `trl/`, `verl/` and `openrlhf/` has one mistake and each of the `_sound` folders none; its
first line says what. The scripts of `fourth/` to `tenth/` make several runs each, which `cases.py` lists.
Their authors had not read the checks, but for verl's and OpenRLHF's 13 to 16. A script trains a tiny model
for some steps, and its record is audited. All need covey[bench], verl's also tensordict and omegaconf. The
paths are folders of the frameworks' sources, of which nothing is imported that wants Ray, vLLM or a GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from eighth import cases as of_the_eighth
from fifth import cases as of_the_fifth
from fourth import cases as of_the_fourth
from ninth import cases as of_the_ninth
from seventh import cases as of_the_seventh
from sixth import cases as of_the_sixth
from tenth import cases as of_the_tenth

from covey.audit.course import findings_from_metrics
from covey.audit.table import audit

HERE = Path(__file__).parent
RESULT = HERE.parent / "results" / "planted.md"
NAMES: dict[str, dict[str, set[str]]] = {
    "trl": {
        "01": {"padding_trained"},
        "02": {"mask_shifted"},
        "03": {"tool_trained"},
        "04": {"logprobs_differ", "logprobs_shifted"},
        "05": {"temperature_missing"},
        "06": {"logprobs_differ"},
        "07": {"rewards_in_batch", "pays_any_row"},
        "08": {"reward_drowned"},
        "09": {"rewards_in_batch"},
        "10": {"answer_empty", "pays_empty"},
        "11": {"rows_duplicated"},
        "12": {"template_twice"},
        "13": {"prompt_ended"},
        "14": {"group_mixed"},
        "15": {"reordered_alone", "advantages_moved"},
        "16": {"gradient_zero"},
        "17": {"clip_missing"},
        "18": {"reference_moves"},
        "19": {"no_motion"},
        "20": {"logprobs_differ", "old_stale"},
        "21": {"advantages_negated"},
        "22": {"warmup_long", "rate_zero"},
        "23": {"eval_is_train"},
        "24": {"sampler_behind"},
        "25": {"end_lost", "sampler_differs", "tokens_replaced"},
        "26": {"loss_scaled"},
        "27": {"sampler_differs"},
        "28": {"reward_idle"},
        "29": {"pays_any_row"},
        "30": {"advantages_huge", "advantages_differ"},
        "31": {"too_coarse"},
        "32": {"pays_empty"},
    },
    "verl": {
        "01": {"loss_differs"},
        "02": {"group_of_one"},
        "03": {"kl_sign"},
        "04": {"logprobs_order"},
        "05": {"rewards_order"},
        "06": {"sampler_behind"},
        "07": {"ratio_stuck"},
        "08": {"end_lost", "end_untrained"},
        "09": {"length_fined"},
        "10": {"prompt_cut"},
        "11": {"gradient_kept"},
        "12": {"correction_constant"},
        "13": {"loss_order"},
        "14": {"reference_differs"},
        "15": {"gradient_rescaled"},
        "16": {"pays_list"},
        "17": {"prompts_again"},
        "18": {"group_padded"},
        "19": {"logprobs_rounded"},
    },
    "openrlhf": {
        "01": {"pays_empty"},
        "02": {"rewards_constant"},
        "03": {"sampler_shifted"},
        "04": {"reference_differs"},
        "05": {"advantages_scaled", "advantages_normalized_twice"},
        "06": {"sampler_behind"},
        "07": {"sampler_behind", "sampler_differs"},
        "08": {"sampler_temperature"},
        "09": {"no_motion"},
        "10": {"reward_cut"},
        "11": {"never_ends"},
        "12": {"entropy_sign"},
        "13": {"old_replaced"},
        "14": {"pays_empty"},
        "15": {"micro_means"},
        "16": {"penalty_untrained"},
        "17": set(),
        "18": {"kl_drowns"},
        "19": {"rewards_in_batch"},
    },
}
"""Folder -> number of a mistake -> the findings that name it, by its author's description."""
TITLES = {
    "trl": "TRL 1.16",
    "verl": "verl 0.8.0.dev, b178a3cd",
    "openrlhf": "OpenRLHF 0.11.0, 3c3be623",
}
FIRST_SIGHT = """\
Before any check was changed, with the 60 checks of 2026-11-26, 21 of the 26 mistakes were named and 2 of
the 13 sound scripts had a finding (GSPO, and RLOO with its KL in the reward). The table is of the checks
that followed, so it is no longer blind.

The first author planted twelve mistakes each with verl's and OpenRLHF's own functions, and three sound
batches each. At first sight 6 and 6 were named; after four more checks 9 and 7. Not seen: a prompt in the
action mask, OpenRLHF's KL with its arguments swapped, gamma for lambda, a mean of the other kind, a reward
on padding, clip bounds swapped, corrections the wrong way round. At first sight one
sound batch each had a warning, that sampler and trainer differ, though its config corrects for that.

These batches were not kept. The scripts 01 to 12 of `verl/` and `openrlhf/` and the sound ones are by a
second author, who had read no check but had seen the names and gaps above. At first sight, with 69 checks, 4
and 5 of 12 were named (verl's 02, 03, 05, 08; OpenRLHF's 02, 03, 05, 06, 10); of the others 3 and 1 had a
finding that says something else. None of the 12 sound scripts had one. With 78 checks, which recompute
losses, KL and returns, it was 5 and 5. The checks of the table below were made for the rest.

The scripts 13 to 16 of both are by the author of the checks, of other kinds of mistakes, written when these
were done. **At first sight, with 89 checks, none of the eight was named.** Two had a finding beside it:
verl's 14 that its reference is another model, OpenRLHF's 14 that an empty text earns the most and, wrongly,
that its reward depends on the batch. Two checks and three words followed, so the table is not blind to them
either.

A third author, who had seen the names of the checks and of the scripts but no code, took mistakes from issues
of the three projects: TRL's 27 to 32, verl's and OpenRLHF's 17 to 19, and six sound scripts (the last two of
each folder). **At first sight, with 91 checks, 4 of the 12 were named** (TRL's 27, 31 and 32, OpenRLHF's 19),
TRL's 29 had a finding beside it (that no reward reads the row, where verdicts were cached), and 7 had none.
Three of the six sound scripts had a finding, two of them severe: RLOO with two iterations (`ratio_stuck`: its
old log-probs were not recorded), a verl batch padded with masked copies (`advantages_differ`), and a judge
with a little noise (`rewards_in_batch`). Two of the 18 scripts were repaired after the first look, before any
check was changed: TRL's 30, whose reward was never paid, and verl's sound 07, whose loss was NaN. Nine checks
followed, for these and for what earlier authors had left unseen. The label of another row (OpenRLHF's 17)
stays unseen: this model is right by another row's label as often as by its own.

Expect the first numbers for mistakes of new kinds."""


def findings(script: Path, source: Path | None, kept: bool) -> list[str]:
    """Run a script, unless its record is kept, and return the names of the findings on it."""
    if kept and script.with_suffix(".jsonl").exists():
        return [finding.id for finding in audit(script.with_suffix(".jsonl"))[1].findings]
    given = [] if source is None else ["--source", str(source)]
    done = subprocess.run([sys.executable, str(script), *given], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    _, report = audit(script.with_suffix(".jsonl"))
    return [finding.id for finding in report.findings]


def mistake(script: Path) -> str:
    """Return what a script does wrong, from its first line."""
    first = script.read_text().splitlines()[0].strip('"').removeprefix("# ").removeprefix("MISTAKE: ")
    return first.partition(" EXPECT:")[0].replace("|", "\\|")


def table(framework: str, source: Path | None, kept: bool) -> str:
    """Run the scripts of a framework and return its count and its table."""
    planted, sound = (
        {script: findings(script, source, kept) for script in sorted((HERE / folder).glob("*.py"))}
        for folder in (framework, f"{framework}_sound")
    )
    own = {script: NAMES[framework].get(script.name[:2], set()) for script in planted}
    named = sum(bool(own[script] & set(names)) for script, names in planted.items())
    first = sum(bool(own[script] & set(names[:1])) for script, names in planted.items())
    alarms = sum(bool(names) for names in sound.values())
    text = f"""**Named: {named} of {len(planted)}, {first} first.
Findings in {alarms} of {len(sound)} sound scripts.**

| script | mistake | findings |
|---|---|---|
"""
    for script, names in (planted | sound).items():
        said = ", ".join(f"`{name}`" for name in names) or "nothing"
        text += f"| `{script.parent.name}/{script.name}` | {mistake(script)} | {said} |\n"
    return text


FOURTH = """\
A fourth author, who had read the list of what others had planted and the format of a record but no check,
made 22 runs with one mistake and 20 without: loops in PyTorch that write covey's record or prime-rl's
files, TRL's own trainer, simulated dumps of verl and simulated exports of logs. **At first sight, with 100
checks, 4 of the 22 were named first and one as the third; two had a finding on a consequence, and 15
none.** Of the 20 sound runs five had an incorrect finding, three of them severe, and one that earns nothing
had a severe one. Six checks followed, and others learned to read what a dump and a loop of one's own hold,
so the last column is no longer blind. Two mistakes do not show in their files: prime-rl's do not say the
algorithm, and a log has no prompts. The dumps are of other problems than at first sight, which were
GSM8K's."""
FIFTH = """\
A fifth author, who knew how a run is recorded and the names of checks that the output lists, but no check,
made 31 runs with one mistake and 27 without: loops in PyTorch of many algorithms, two of verl's dumps, two
logs, and two scripts for TRL. **At first sight, with 106 checks, 15 of the 31 were named, 4 had a finding
that only says that the loss is another one, one had a finding beside its mistake, and 11 none.** Five of
the 27 sound runs had an incorrect finding, three of them severe. Checks read more since then, and the
last column is no longer blind. Two are not named: the sampler of `s04` is .018 nats away at the end, and
`s11` needs the gradients of micro-batches, which its file lacks.

The same author then made more loops, which were not kept. Of 67 sound ones, of other seeds and 19 new kinds,
two had an incorrect finding (a warning for RAFT, and PPO with completions of one token, severe), and none has
one now. Of 16 with a mistake, 11 were named, 10 of them first, three had `loss_differs` alone, and two none:
GAE's advantages in reverse, and truncated completions that earn 0 where all others earn less."""
SIXTH = """\
A sixth author, who had read how a run is recorded and saw the names of checks that the output lists, but no
check, made 54 runs with one mistake and 40 without: loops in PyTorch, some of them with a tool, verl's
dumps, logs, and scripts for TRL. The scripts are in the repository's history before their author read a
check. **At first sight, with 106 checks, 24 of the 54 were named, 9 had a finding that only says that
something is another one, or beside the mistake, and 21 none.** Two of the 40 sound runs had an incorrect
finding, one of them severe; of four more the finding is correct. Checks followed, others read more, and the
last column is no longer blind. Of those that are not named, six show too little: losses that are 0 either
way (`MeanOverPadding`, `MicroSum`), too few correct texts (`RewardsShifted`, `RewardCache`), no prompt that
is sampled again (`ReferenceEma`), the gradients of micro-batches (`ZeroGradAmongMicros`). Of 84 more runs
of the 28 sound loops, of three other seeds, those two with random rewards had `copies_paid`, rightly, and
no other had a finding."""
SEVENTH = """\
A seventh author, who had read the two pages for users and no check, made 52 runs with one mistake and 20
without: TRL's GRPO, RLOO, DPO and SFT, loops in PyTorch, and verl's dumps. **At first sight, with 112
checks, 20 of the 52 were named, 19 had a finding that only says that something is another one, or beside
the mistake, and 13 none.** Two of the 20 sound runs had an incorrect finding, both severe: a loss_type of
covey's and not TRL's, and pairs of DPO. Scripts whose mistake did not show in what they printed were repaired
before that. Six checks followed, so the last column is no longer blind. The
derivative of the loss by the log-probs, which TRL's writer keeps since then and which these loops write,
names what a value of 0 hides. Six more checks follow a run from its loss to its weights, and name
seven more. Not named: an optimizer made anew in a loop that does not watch it (`l09`), and answers of other
rows (`l30`)."""
EIGHTH = """\
An eighth author, who had read the format of a record and what others had planted but no check, made 29 runs
with one mistake and 17 without: TRL's GRPO and RLOO, and a trainer of packed rows with a tool, a lagging
sampler, a filter, a critic and a controller of the KL. **At first sight, with 118 checks, 12 of the 29 were
named, 10 of them first; 11 had a finding that only says that something is another one, a consequence, or
beside the mistake; one had an incorrect finding alone, and 5 none.** Two of the 17 sound runs had an
incorrect finding, both severe: the plain forward pass of a sampler that lags was held against the trainer,
and a coefficient of the KL that changes was taken for the first one. A third has a correct one, which its
author did not know: TRL's `disable_dropout` leaves the dropout of attention on. Ten checks followed, others
read more, and the last column is no longer blind. Not named: a reward that reads no column (`s04`)."""
NINTH = """\
A ninth author, who had read the format of a record and what others had planted but no check, made 20 runs
with one mistake and 12 without: TRL's GRPO and RLOO, and a trainer that whitens, picks the best, masks or
goes on with unfinished texts. **At first sight, with 134 checks, 5 of the 20 were named, 7 had a finding that
only says that something is another one, a consequence, or beside the mistake, and 8 none.** One of the 12
sound runs had an incorrect finding, severe; two more have one because their settings name GRPO where the loop
computes other advantages. Six checks followed, others read more, and the last column is no longer blind. Not
named: what a template drops (`s03`), end tokens that TRL does not know (`s04`), a fine that counts the prompt
(`s32`), the best of wrong texts (`s33`), a critic that no optimizer has (`s34`), an adapter that stays merged
(`s37`), and a curriculum that runs dry (`s38`)."""
TENTH = """\
A tenth author took the mistakes from threads: silent ones that were reported of TRL, verl, OpenRLHF,
NeMo-RL, ms-swift, axolotl, Unsloth and their users' scripts. Each script names its thread, and the cause
was written before its author read a check. There are 36 runs with one mistake and 13 without, of TRL's
GRPO, RLOO, DPO, KTO, SFT and reward models. **At first sight, with 140 checks, 12 of the 36 were named, 11
of them first; 6 had a finding on a consequence or on a part of the cause, 12 one beside the mistake, and 6
none.** Of the 14 that learn from data, none was named: the record ended at the first batch, or had losses
alone. One of the 36 had an incorrect, severe finding: the rounding of equal rewards of .1 was taken for an
advantage. Two more scripts whose mistake did not show in what they did were left out, and one (`s34`) was
repaired after its record was read. A sound one ended in an error of TRL and peft. The writer follows
trainers that learn from data since then, two checks are new, others read more, and the last column is no
longer blind. Not named: a reward that grows with the distance it should punish (`s07`), advantages in place
of a mask (`s15`), and an end token that nobody sampled (`s18`)."""
COUNT = """

**Named: {named} of {mistakes}, {first} first. Incorrect findings in {alarms} of {sound} sound runs**
(`rows_duplicated` is correct: TRL's runs have rows with equal prompts).

| run | mistake | at first sight | findings |
|---|---|---|---|
"""
TRUE = {"rows_duplicated", "rewards_constant", "pays_list"}
"""Findings that are right of the sound runs in which they are."""


def by_author(author: ModuleType, kept: bool) -> str:
    """Make an author's runs, unless they are kept, and return their count and their table."""
    folder = Path(str(author.__file__)).parent
    runs = folder / "runs"
    for script in () if kept and runs.is_dir() else author.SCRIPTS:
        subprocess.run([sys.executable, str(folder / script)], cwd=folder, check=True, capture_output=True)
    results = {}
    for name in author.CASES:
        (run,) = [path for path in runs.iterdir() if path.name.removesuffix(".csv") == name]
        record = run / "run.jsonl"
        read, report = audit(record if record.exists() else run)
        results[name] = [finding.id for finding in report.findings]
        # A log shows some mistakes in how the run went alone.
        course = [finding.id for finding in findings_from_metrics(read)]
        results[name] += [found for found in course if found in author.CASES[name].names]
    planted = {name: names for name, names in results.items() if name.startswith("s")}
    sound = {name: names for name, names in results.items() if name.startswith("n")}
    text = COUNT.format(
        named=sum(bool(author.CASES[name].names & set(names)) for name, names in planted.items()),
        first=sum(bool(author.CASES[name].names & set(names[:1])) for name, names in planted.items()),
        mistakes=len(planted),
        alarms=sum(bool({*names} - TRUE - author.CASES[name].names) for name, names in sound.items()),
        sound=len(sound),
    )
    for name, names in results.items():
        said = ", ".join(f"`{found}`" for found in names) or "nothing"
        text += f"| `{name}` | {author.CASES[name].mistake} | {author.CASES[name].first_sight} | {said} |\n"
    return text


def main() -> None:
    """Run all scripts and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verl", type=Path, help="folder of verl's source")
    parser.add_argument("--openrlhf", type=Path, help="folder of OpenRLHF's source")
    parser.add_argument("--kept", action="store_true", help="audit records that are there once more")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    args = parser.parse_args()
    if args.write and not (args.verl and args.openrlhf):
        parser.error("--write needs --verl and --openrlhf, or their tables would be lost")
    if not (HERE / "tiny").is_dir():
        subprocess.run([sys.executable, str(HERE / "tiny.py")], check=True)
    sections = ["trl", *(name for name in ("verl", "openrlhf") if getattr(args, name))]
    tables = {name: table(name, getattr(args, name, None), args.kept) for name in sections}
    text = f"""# What `covey audit` finds in scripts that strangers wrote

`python benchmarks/planted/run.py --verl PATH --openrlhf PATH --write`, on a tiny Qwen 2, on a CPU.

{FIRST_SIGHT}
"""
    for name, rows in tables.items():
        text += f"\n## {TITLES[name]}\n\n{rows}"
    text += f"\n## Loops, dumps and logs\n\n{FOURTH}{by_author(of_the_fourth, args.kept)}"
    text += f"\n## More loops, dumps and logs\n\n{FIFTH}{by_author(of_the_fifth, args.kept)}"
    text += f"\n## Loops with tools, dumps and logs\n\n{SIXTH}{by_author(of_the_sixth, args.kept)}"
    text += f"\n## TRL's trainers, loops and dumps\n\n{SEVENTH}{by_author(of_the_seventh, args.kept)}"
    text += f"\n## TRL's trainers and packed rows\n\n{EIGHTH}{by_author(of_the_eighth, args.kept)}"
    ninth = f"{NINTH}{by_author(of_the_ninth, args.kept)}"
    text += f"\n## TRL's trainers, and loops that choose what they train\n\n{ninth}"
    tenth = f"{TENTH}{by_author(of_the_tenth, args.kept)}"
    text += f"\n## What threads report of TRL and its neighbours\n\n{tenth}"
    if args.write:
        RESULT.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
