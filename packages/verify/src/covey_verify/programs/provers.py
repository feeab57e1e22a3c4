"""Coq and Lean as judges of proofs: their commands, their input files and the parsers of their output.

A check has three files. `Statement` holds the row's header and theorem, `Answer` the proof. `Verdict` is
ours alone: it loads both, lets the kernel check the answer against the statement, which was compiled before
there was a proof, and lists the axioms. Nothing that a proof can declare (notations, axioms, options,
commands) affects that. A second line of defence restricts the proof's text to tactics, without comments and
strings.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import which
from textwrap import dedent, indent

from covey_verify import children
from covey_verify.errors import ConfigError
from covey_verify.sandbox.process import PROCESSES


@dataclass(frozen=True)
class Tools:
    """An installed prover: the command that compiles a file, and the paths that it has to read."""

    compiler: Sequence[str]
    """The command; `{}` is the name of the file."""
    checker: Sequence[str]
    """The command of a second kernel for the compiled files; empty for Lean, whose `Verdict` replays them."""
    readable: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Prover:
    """The differences between provers: the three files, and the parsers of their output."""

    tools: Callable[[], Tools]
    tactics: Callable[[str], str]
    """Returns the tactics of a proof. Raises ValueError at anything else."""
    beyond: Callable[[str, Sequence[str]], list[str]]
    """(output of `Verdict`, permitted axioms) -> the axioms that the proof uses without permission."""
    source: str
    compiled: str
    statement: str
    answer: str
    verdict: str


def _find_program(program: str, install: str) -> str:
    path = which(program)
    if path is None:
        raise ConfigError(f"rewards: proves needs {program}, which is not on the PATH: {install}")
    return path


def _output_of(*command: str) -> str:
    """Return what an installed program prints about itself. Raises ConfigError."""
    try:
        result = children.run(command, 60)
        result.check_returncode()
        return result.stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"rewards: proves: `{' '.join(command)}` does not work: {error}") from None


@cache
def coq() -> Tools:
    """Return the installed Coq, with the libraries of COQPATH."""
    install = "apt-get install coq, or opam install coq"
    coqc, coqchk = (_find_program(name, install) for name in ("coqc", "coqchk"))
    library = re.search(r"^COQLIB=(.+)$", _output_of(coqc, "-config"), re.MULTILINE)
    if library is None:
        raise ConfigError(f"rewards: proves: `{coqc} -config` names no COQLIB")
    coq_path = os.environ.get("COQPATH", "")
    paths = (Path(coqc).resolve().parent, Path(library[1]).resolve().parent, "/etc/ocamlfind.conf")
    return Tools(
        [coqc, "-q", "-noglob", "-w", "none", "-Q", ".", "Covey", "{}.v"],
        [coqchk, "-silent", "-o", "-Q", ".", "Covey", "-norec", "Covey.Answer", "-norec", "Covey.Verdict"],
        _existing_paths(*paths, *coq_path.split(os.pathsep)),
        {"COQPATH": coq_path} if coq_path else {},
    )


@cache
def lean() -> Tools:
    """Return the installed Lean 4, with the libraries of LEAN_PATH (`lake env` sets it)."""
    program = _find_program("lean", "install Lean 4 with elan, https://lean-lang.org/install")
    root = _output_of(program, "--print-prefix").strip()
    lean_path = os.environ.get("LEAN_PATH", "")
    path = os.pathsep.join([".", *filter(None, [lean_path])])
    readable = (*_existing_paths(root, *lean_path.split(os.pathsep)), PROCESSES)
    return Tools([f"{root}/bin/lean", "-o", "{}.olean", "{}.lean"], (), readable, {"LEAN_PATH": path})


def _existing_paths(*paths: str | Path) -> tuple[str, ...]:
    resolved = (str(Path(path).resolve()) for path in paths if str(path) and Path(path).exists())
    return tuple(dict.fromkeys(resolved))


def without_comments(text: str, opening: str, closing: str, line: str = "") -> str:
    """Return a proof's text without comments, which may be nested. Raises ValueError for a string in it.

    >>> without_comments("auto. (* (* a *) b *) lia.", "(*", "*)")
    'auto.   lia.'
    """
    # A string could contain a comment mark, and so hide text from this reader or from the prover.
    if '"' in text:
        raise ValueError("a quotation mark; a proof may not have strings")
    marks = f"({re.escape(opening)}|{re.escape(closing)}{f'|{line}[^{chr(10)}]*' if line else ''})"
    depth = 0
    parts = []
    # The pattern has a group, so the marks themselves are parts too.
    for part in re.split(marks, text):
        depth += (part == opening) - (part == closing)
        if depth < 0:
            raise ValueError("a comment ends that was not opened")
        is_comment = depth or part == closing or (line and part.startswith(line))
        if not is_comment:
            parts.append(part)
        elif not depth:
            parts.append(" ")  # in place of a whole comment
    if depth:
        raise ValueError("a comment that does not end")
    return "".join(parts)


AXIOM = re.compile(r"[^\W\d][\w']*(?:\.[^\W\d][\w']*)*")
BEFORE_TACTIC = re.compile(r"(?:[\s{}+*-]|(?:all|par|!|\d[\d\s,-]*|\[\s*[^\W\d][\w']*\s*\])\s*:)*")
"""The text before the tactic of a sentence: bullets, braces, selected goals."""


def coq_tactics(proof: str) -> str:
    """Return the tactics of a Coq proof. Raises ValueError at a command, which begins with a capital.

    >>> coq_tactics("Proof. intros n. - lia. Qed.")
    ' intros n. - lia. '
    """
    # A sentence ends with a period before white space; `Nat.add` has none.
    *sentences, rest = re.split(r"\.(?=\s|$)", without_comments(proof, "(*", "*)"))
    if sentences and sentences[0].strip() == "Proof":
        del sentences[0]
    end = re.fullmatch(r"([\s}]*)(?:Qed|Defined)", sentences[-1]) if sentences else None
    if end and not rest.strip():
        sentences = sentences[:-1]
        rest = end[1]
    for sentence in (*sentences, rest):
        words = BEFORE_TACTIC.sub("", sentence, count=1)
        if words and not re.match(r"[a-z_(\[]", words):
            raise ValueError(f"{' '.join(words.split())[:40]!r}; a proof consists of tactics only")
    return "".join(f"{sentence}." for sentence in sentences) + rest


NO_TACTIC = re.compile(
    r"#[a-z]|@\[|\b(?:abbrev|add_decl_doc|admit|alias|attribute|axiom|axioms|builtin_initialize|by_elab|class"
    r"|declare_\w+|def|deriving|dsimproc|elab|elab_rules|end|example|export|extern|implemented_by"
    r"|import|include_str|inductive|infix[lr]?|init_quot|initialize|instance|irreducible_def|lemma|local"
    r"|macro|macro_rules|mutual|namespace|native_decide|noncomputable|notation3?|opaque|open|partial|postfix"
    r"|prefix|prelude|private|protected|register_\w+|run_\w+|scoped|section|set_option|simproc|sorry|sorryAx"
    r"|stop|structure|syntax|theorem|universe|unsafe|unseal|variable)\b"
)
"""Words that begin a command of Lean, turn a tactic into one, or give the goal up."""


def lean_tactics(proof: str) -> str:
    """Return the tactics of a Lean proof, indented. Raises ValueError at a word that no tactic has."""
    plain = re.sub(r"^\s*(?::=\s*)?by\b", "", without_comments(proof, "/-", "-/", "--"))
    match = NO_TACTIC.search(plain)
    if match is not None:
        raise ValueError(f"{match[0]!r}; a proof consists of tactics only")
    return indent(dedent(plain.strip("\n")), "  ")


def coq_beyond(output: str, _: Sequence[str]) -> list[str]:
    """Return the axioms that `Print Assumptions` lists for the proof but not for statement and permission.

    Coq gives no two axioms the same name in one file. Output that cannot be parsed is not permitted.
    """
    blocks: list[set[str]] = []
    for line in output.split("\n"):
        # Each of the two `Print Assumptions` of the verdict begins a block with one of these lines.
        if line in ("Axioms:", "Closed under the global context"):
            blocks.append(set())
        elif line and not line.startswith(" "):
            if not blocks:
                return [line]
            blocks[-1].add(line.partition(" :")[0])
    return sorted(blocks[1] - blocks[0]) if len(blocks) == 2 else ["a list of axioms that cannot be read"]


def coqchk_beyond(output: str) -> list[str]:
    """Return the axioms and unchecked definitions that coqchk lists for a proof but not for its header."""
    lines = {line.strip() for line in output.split("\n")}
    if "* Theory: Set is predicative" not in lines:
        return ["a summary of coqchk that cannot be read"]
    names = re.findall(r"Covey\.(?:Answer|Verdict)\.(\S+)", output)
    return sorted(name for name in names if f"Covey.Statement.{name}" not in lines)


def lean_beyond(output: str, axioms: Sequence[str]) -> list[str]:
    """Return the axioms that `Verdict.lean` lists and that are neither of Lean's logic nor permitted."""
    match = re.fullmatch(r"axioms \[(.*)\]\s*", output)
    if match is None:
        return ["a list of axioms that cannot be read"]
    return sorted({*match[1].split(", ")} - {"", "propext", "Classical.choice", "Quot.sound", *axioms})


COQ_STATEMENT = """{header}
Definition covey_goal : Prop := (
{theorem}
).
Definition covey_permitted : True := let _ := covey_goal in {axioms} I.
"""
COQ_ANSWER = """{header}
Require Import Covey.Statement.
Theorem covey_answer : covey_goal.
Proof.
cbv delta [covey_goal].
{proof}
Qed.
"""
COQ_VERDICT = """Require Covey.Statement.
Definition covey_goal : Prop := Covey.Statement.covey_goal.
Definition covey_permitted : True := Covey.Statement.covey_permitted.
Require Covey.Answer.
Definition covey_checked : covey_goal := Covey.Answer.covey_answer.
Print Assumptions covey_permitted.
Print Assumptions covey_checked.
"""
"""The statement's names are resolved before the answer is loaded, and the answer is never imported."""
LEAN_STATEMENT = """{header}
def _root_.Covey.goal : Prop :=
  {theorem}
"""
LEAN_ANSWER = """import Statement
{context}
theorem _root_.Covey.answer : Covey.goal := by
  delta Covey.goal
{proof}
"""
LEAN_VERDICT = """import Lean
import Lean.Replay
import Statement
open Lean
#eval show CoreM Unit from do
  let (answer, _) ← readModuleData "Answer.olean"
  let levels := (← getConstInfo `Covey.goal).levelParams
  let same (name : Name) := mkConst name (levels.map mkLevelParam)
  let mut constants : Std.HashMap Name ConstantInfo := {}
  for name in answer.constNames, constant in answer.constants do
    if constant.isUnsafe || constant.isPartial then
      throwError "{name} is unsafe or partial"
    constants := constants.insert name constant
  constants := constants.insert `Covey.checked (.thmInfo { name := `Covey.checked,
    levelParams := levels, type := same `Covey.goal, value := same `Covey.answer })
  let environment ← (← getEnv).replay constants
  let axioms ← withEnv environment (collectAxioms `Covey.checked)
  IO.println s!"axioms {axioms.toList}"
"""
"""The answer is not imported, because its macros would be in force here: its constants are read as data, and
the kernel checks each of them again."""
PROVERS: Mapping[str, Prover] = {
    "coq": Prover(coq, coq_tactics, coq_beyond, ".v", ".vo", COQ_STATEMENT, COQ_ANSWER, COQ_VERDICT),
    "lean": Prover(
        lean, lean_tactics, lean_beyond, ".lean", ".olean", LEAN_STATEMENT, LEAN_ANSWER, LEAN_VERDICT
    ),
}
