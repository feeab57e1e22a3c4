"""The reward for proofs: the row states the theorem, and the completion is its proof and nothing else.

Each file of a check (``provers``) is compiled in a sandbox of its own, and only compiled files are passed on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal

from annotated_types import Gt, Le

from covey_verify.contract import reward
from covey_verify.errors import ConfigError, SandboxUnavailable
from covey_verify.extract import TextOrMessages, text_of
from covey_verify.machine import available_cpus
from covey_verify.once import Once
from covey_verify.programs.code import Form, program, score_of
from covey_verify.programs.provers import AXIOM, PROVERS, Prover, coqchk_beyond
from covey_verify.sandbox.base import Outcome, SandboxBackend
from covey_verify.sandbox.confine import Limits
from covey_verify.sandbox.process import ProcessSandbox
from covey_verify.types import Score

MAX_PROOF_SECONDS = 120.0
"""Longest time in seconds of each of the four steps of a check, together below the reward's limit."""
MAX_TRIED = 16
"""Number of headers, and of theorems, that are compiled before a run begins."""
MALFORMED = "column 'theorem' has to be a proposition, 'header' and 'prover' texts, 'axioms' a list of names"
"""The fault of a row without a question for a prover."""
TRIVIAL = "True"
"""The theorem that is stated to try a header alone."""
Build = tuple[Outcome, bytes]
"""(how the build ended, the compiled file)."""
Question = tuple[str, str, tuple[str, ...], str]
"""(prover, header, permitted axioms, theorem)."""
STATEMENTS = Once[Build](256, lambda build: build[0].kind in ("ok", "error"))
"""Compiled statements: all completions of a group have the same one."""
ANSWERS = Once[Outcome](4096, lambda outcome: outcome.kind in ("ok", "error"))
"""Outcomes of proofs: each is checked once, however many completions give it."""
CONTEXT = r"^(?:open|universe|variable|set_option)\b.*$"
"""Lines of a Lean header that hold for their file only, so they are repeated in the proof's file."""


def _bad_theorems(
    rows: Sequence[Mapping[str, object]],
    sandbox: SandboxBackend | None = None,
    prover: str = "coq",
    axioms: Sequence[str] = (),
    memory_mb: int = 2048,
    **_: object,
) -> list[str | None]:
    """Return the fault of each row: it states nothing, or the prover refuses its header or its theorem.

    Only the first MAX_TRIED headers and theorems are compiled.
    """
    defaults = {"prover": prover, "axioms": axioms, "header": ""}
    questions = [_question({**defaults, **row}) for row in rows]
    # One trial per distinct (prover, header, axioms), because most rows share a few headers.
    headers = dict.fromkeys((*question[:3], TRIVIAL) for question in questions if question)
    theorems = [question for question in questions[:MAX_TRIED] if question]
    trials = [*islice(headers, MAX_TRIED), *theorems]

    def refusal(question: Question) -> str | None:
        return _refusal(_compile_statement(sandbox, question, memory_mb)[0], question)

    with ThreadPoolExecutor(available_cpus()) as pool:
        refusals = dict(zip(trials, pool.map(refusal, trials), strict=True))
    complaints = list[str | None]()
    for question in questions:
        if question is None:
            complaints.append(MALFORMED)
        else:
            # The header's fault comes first. Questions that were not tried are not in ``refusals``.
            of_header = refusals.get((*question[:3], TRIVIAL))
            complaints.append(of_header or refusals.get(question))
    return complaints


def _question(row: Mapping[str, Any]) -> Question | None:
    """Return what a row asks to prove, or None if it is malformed."""
    texts = (row.get("theorem"), row["header"], row["prover"])
    if not all(isinstance(text, str) for text in texts) or not row["theorem"].strip():
        return None
    axioms = row["axioms"]
    if not isinstance(axioms, list | tuple) or not all(isinstance(axiom, str) for axiom in axioms):
        return None
    return row["prover"], row["header"], tuple(axioms), row["theorem"]


def _proof(
    row: Mapping[str, object], prover: object = "coq", form: Form = "block", **_: object
) -> str | None:
    """Return the row's own proof, if it has a proof, as a completion."""
    proof = row.get("proof")
    if not isinstance(proof, str) or form == "continue":
        return proof if isinstance(proof, str) else None
    return f"```{row.get('prover', prover)}\n{proof}\n```"


@reward(
    concurrent=True,
    verdict=True,
    timeout=600.0,
    check_references=_bad_theorems,
    example=_proof,
    counterexample=lambda row, **settings: _proof({**row, "proof": "admit."}, **settings),
)
def proves(
    completion: TextOrMessages,
    theorem: str,
    *,
    sandbox: SandboxBackend,
    header: str = "",
    prover: Literal["coq", "lean"] = "coq",
    axioms: Sequence[str] = (),
    form: Form = "block",
    seconds: Annotated[float, Gt(0), Le(MAX_PROOF_SECONDS)] = 20.0,
    memory_mb: Annotated[int, Gt(0)] = 2048,
) -> Score:
    """Return 1 if the last code block proves ``theorem`` with tactics of Coq or Lean 4, 0 otherwise.

    ``header`` precedes the theorem: imports, definitions, notations. ``axioms`` names the axioms that a
    proof may use; axioms in the theorem itself, and the axioms of Lean's logic, need no permission.
    """
    kind = _kind(prover, axioms)
    backend = _backend(sandbox)
    proof = text_of(completion) if form == "continue" else program(completion, prover)
    if proof is None or not proof.strip():
        return Score(0.0, "no_answer")
    try:
        tactics = kind.tactics(proof)
    except ValueError as error:
        return Score(0.0, "unparsable", proof[:2000], detail=f"not a proof: {error}")
    question = (prover, header, tuple(axioms), theorem)
    result, statement = _compile_statement(backend, question, memory_mb)
    refusal = _refusal(result, question)
    if refusal:
        return Score(None, "bad_reference", detail=refusal)
    if result.kind == "ok":
        limits = Limits(seconds, int(seconds) + 1, memory_mb << 20)

        def check_proof() -> Outcome:
            text = _fill_template(kind.answer, header, proof=tactics)
            return _judge(backend, kind, axioms, limits, statement, text)

        result = ANSWERS.get((backend.name, *question, tactics, limits), check_proof)
    return score_of(result, float(result.kind == "ok"), proof, {})


def _kind(prover: str, axioms: Sequence[str]) -> Prover:
    """Return an installed prover. Raises ConfigError, which check_references meets before the run."""
    named = isinstance(axioms, Sequence) and not isinstance(axioms, str)
    if prover not in PROVERS or not named or not all(AXIOM.fullmatch(str(a)) for a in axioms):
        raise ConfigError(f"proves: prover is coq or lean and axioms a list of names: {prover!r}, {axioms!r}")
    PROVERS[prover].tools()
    return PROVERS[prover]


def _backend(sandbox: SandboxBackend | None) -> ProcessSandbox:
    if not isinstance(sandbox, ProcessSandbox):
        raise SandboxUnavailable("checking proofs needs a bwrap or landlock sandbox")
    return sandbox


def _compile_statement(sandbox: SandboxBackend | None, question: Question, memory_mb: int) -> Build:
    """Return a row's statement, compiled."""
    prover, header, axioms, theorem = question
    kind = _kind(prover, axioms)
    backend = _backend(sandbox)
    permitted = " ".join(f"let _ := @{axiom} in" for axiom in axioms)
    text = _fill_template(kind.statement, header, theorem=theorem.strip().removesuffix("."), axioms=permitted)
    limits = Limits(MAX_PROOF_SECONDS, int(MAX_PROOF_SECONDS), memory_mb << 20)
    compiled = partial(_compile, backend, kind, "Statement", text, limits)
    return STATEMENTS.get((backend.name, *question), compiled)


def _refusal(result: Outcome, question: Question) -> str | None:
    """Return why a statement was not accepted, or None."""
    if result.kind in ("ok", "lost"):
        return None
    part = "header" if question[3] == TRIVIAL else f"theorem {question[3][:80]!r}"
    return f"{question[0]} does not accept the {part}: {result.text[:400]}"


def _fill_template(template: str, header: str, **texts: str) -> str:
    context = "\n".join(re.findall(CONTEXT, header, re.MULTILINE))
    words = {"header": header, "context": context, **texts}
    # Not str.format: the texts of Coq and Lean are full of braces.
    return re.sub(r"{(\w+)}", lambda name: words[name[1]], template)


def _compile(
    sandbox: ProcessSandbox, kind: Prover, name: str, text: str, limits: Limits, **compiled: bytes
) -> Build:
    tools = kind.tools()
    product = f"{name}{kind.compiled}"
    files = {f"{other}{kind.compiled}": content for other, content in compiled.items()}
    files[f"{name}{kind.source}"] = text.encode("utf-8", "replace")
    argv = [part.format(name) for part in tools.compiler]
    result, content = sandbox.build(argv, files, limits, product, tools.readable, tools.environment)
    return _as_refusal(result), content


def _judge(
    sandbox: ProcessSandbox, kind: Prover, axioms: Sequence[str], limits: Limits, statement: bytes, text: str
) -> Outcome:
    """Return whether an answer proves the statement, decided by files that contain no model text."""
    # Three steps: the answer compiles; the verdict accepts it as a proof of the statement and lists its
    # axioms; for Coq a second kernel (coqchk) checks the compiled files.
    result, answer = _compile(sandbox, kind, "Answer", text, limits, Statement=statement)
    beyond = list[str]()
    tools = kind.tools()
    built = {"Statement": statement, "Answer": answer}
    if result.kind == "ok":
        result, verdict = _compile(sandbox, kind, "Verdict", kind.verdict, limits, **built)
        beyond = kind.beyond(str(result.value), axioms) if result.kind == "ok" else []
        built["Verdict"] = verdict
    if result.kind == "ok" and not beyond and tools.checker:
        files = {f"{name}{kind.compiled}": content for name, content in built.items()}
        result, _ = sandbox.build(tools.checker, files, limits, "", tools.readable, tools.environment)
        beyond = coqchk_beyond(str(result.value)) if result.kind == "ok" else []
    if beyond:
        return Outcome("error", text=f"it uses {', '.join(beyond)}"[:500])
    return _as_refusal(result)


def _as_refusal(result: Outcome) -> Outcome:
    """Return an exit code as a refusal; a prover that a signal has ended has refused nothing."""
    if result.kind != "crashed" or result.text.startswith("killed by"):
        return result
    return Outcome("error", text=str(result.value)[:500].strip() or result.text)
