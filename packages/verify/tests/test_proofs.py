"""Proofs are judged by the prover, and nothing that a proof says can reach the verdict."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from proof_hacks import FALSE, HACKS

from covey_verify.errors import ConfigError
from covey_verify.programs import proofs, provers
from covey_verify.programs.proofs import proves
from covey_verify.sandbox.choice import choose
from covey_verify.sandbox.process import ProcessSandbox
from covey_verify.types import Score

with_coq = pytest.mark.skipif(shutil.which("coqchk") is None, reason="Coq is not installed")
TRUE = "forall n : nat, n + 0 = n"
PROOF = "intros n. induction n; simpl; congruence."
COLOURS = """Inductive colour := red | green.
Axiom weight : colour -> nat.
Axiom heavy : forall c, weight c > 0.
Notation "c ^^" := (weight c) (at level 10)."""


@pytest.fixture
def judged(sandbox: ProcessSandbox) -> Callable[..., Score]:
    def judge(proof: str, theorem: str = TRUE, **settings: object) -> Score:
        return proves(f"So:\n```coq\n{proof}\n```", theorem, sandbox=sandbox, **settings)

    return judge


@with_coq
@pytest.mark.parametrize(
    "proof",
    [
        PROOF,
        f"Proof. {PROOF} Qed.",
        """Proof.
  intros n. (* by (* plain *) induction *)
  induction n as [|n IH].
  - reflexivity.
  - simpl. { rewrite IH. reflexivity. }
Defined.""",
        "intros n; symmetry. 1: apply plus_n_O.",
    ],
)
def test_a_proof_is_paid(judged: Callable[..., Score], proof: str) -> None:
    score = judged(proof)
    assert (score.value, score.status, score.detail) == (1.0, "ok", "")


@with_coq
@pytest.mark.parametrize(
    ("proof", "status", "says"),
    [
        ("reflexivity.", "ok", "Unable to unify"),
        ("intros n. admit.", "ok", "given up goals"),
        ("intros n.", "ok", "incomplete proof"),
        ("", "no_answer", ""),
        ("Theorem x : True. Proof. exact I. Qed.", "unparsable", "'Theorem x : True'"),
        ("exact I. (* ", "unparsable", "does not end"),
        ('idtac "x".', "unparsable", "quotation mark"),
        ("repeat (assert True by exact I).", "timeout", ""),
    ],
)
def test_a_text_that_is_no_proof_gets_0_and_a_reason(judged, proof: str, status: str, says: str) -> None:
    score = judged(proof, seconds=2.0)
    assert (score.value, score.status) == (0.0, status) and says in score.detail


@with_coq
def test_a_header_gives_definitions_notations_and_axioms(judged: Callable[..., Score]) -> None:
    assert judged("intros c. destruct c; auto.", "forall c : colour, c = c", header=COLOURS).value == 1.0
    refused = judged("intros c. apply heavy.", "forall c : colour, c ^^ > 0.", header=COLOURS)
    assert (refused.value, refused.detail) == (0.0, "it uses Statement.heavy")
    allowed = judged("intros c. apply heavy.", "forall c, c ^^ > 0", header=COLOURS, axioms=["heavy"])
    assert (allowed.value, allowed.detail) == (1.0, "")


ROOM = """Require Import Lia List ZArith. Import ListNotations. Open Scope Z_scope. Set Implicit Arguments.
Reserved Notation "x '-->' y" (at level 60).
Inductive step : Z -> Z -> Prop := one : forall x, x --> x + 1 where "x '-->' y" := (step x y).
Record point := mk { px : Z; py : Z }. Coercion px : point >-> Z.
Module M. Definition two := 2. Lemma two_is : two = 2. Proof. reflexivity. Qed. End M.
Local Notation "'deux'" := M.two. Local Definition secret := 5. Ltac go := intros; try lia.
#[global] Hint Constructors step : core.
Fixpoint sum (l : list Z) : Z := match l with [] => 0 | x :: t => x + sum t end.
Lemma sum_app : forall a b, sum (a ++ b) = sum a + sum b.
Proof. induction a; simpl; intros; [reflexivity | rewrite IHa; lia]. Qed."""


@with_coq
@pytest.mark.slow
@pytest.mark.parametrize(
    ("theorem", "proof"),
    [
        ("forall x, x --> x + 1", "auto."),
        ("forall p : point, p + 0 = p", "go."),
        ("deux = 2", "apply M.two_is."),
        ("secret = 5", "reflexivity."),
        ("forall a b, sum (a ++ b) = sum (b ++ a)", "intros a b. rewrite !sum_app. lia."),
    ],
)
def test_whatever_a_header_declares_is_what_the_theorem_speaks_of(theorem: str, proof: str) -> None:
    score = proves(proof, theorem, header=ROOM, sandbox=choose().sandbox, form="continue")
    assert (score.value, score.detail) == (1.0, "")


@with_coq
def test_axioms_of_libraries_need_permission(judged: Callable[..., Score]) -> None:
    asked = {"theorem": "forall P : Prop, P \\/ ~ P", "header": "Require Import Classical."}
    assert judged("exact classic.", **asked).detail == "it uses Classical_Prop.classic"
    assert judged("exact classic.", **asked, axioms=["classic"]).value == 1.0


@with_coq
def test_a_statement_that_coq_does_not_accept_is_the_rows_fault(judged: Callable[..., Score]) -> None:
    for theorem in ("forall n, n +", "nosuchthing = 1", "0", "Theorem x : True"):
        score = judged(PROOF, theorem)
        assert (score.value, score.status) == (
            None,
            "bad_reference",
        ) and "coq does not accept the theorem" in score.detail


@pytest.mark.parametrize("name", HACKS)
def test_no_hack_passes_for_tactics_but_those_that_are(name: str) -> None:
    """The second wall: what holds commands is refused before anything runs."""
    commands = HACKS[name][0].isupper() or ". Abort" in HACKS[name]
    try:
        provers.coq_tactics(HACKS[name])
    except ValueError as error:
        assert commands and ("a proof" in str(error) or "comment" in str(error))
    else:
        assert not commands


@with_coq
@pytest.mark.slow
@pytest.mark.parametrize("name", HACKS)
def test_no_hack_reaches_the_verdict(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first wall alone, against the real Coq: any text may stand where the proof does."""
    open_to_all = replace(provers.PROVERS["coq"], tactics=str)
    monkeypatch.setattr(proofs, "PROVERS", {"coq": open_to_all})
    given = {"header": "Require Import Classical.", "axioms": ["classic"], "form": "continue"}
    score = proves(HACKS[name], FALSE, sandbox=choose().sandbox, **given)
    assert (score.value, score.status) == (0.0, "ok") and score.detail


@with_coq
@pytest.mark.slow
def test_the_first_wall_lets_honest_proofs_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "PROVERS", {"coq": replace(provers.PROVERS["coq"], tactics=str)})
    text = f"Abort. Lemma help : True. Proof. exact I. Qed. Theorem covey_answer : {TRUE}. Proof. {PROOF}"
    assert proves(text, TRUE, sandbox=choose().sandbox, form="continue").value == 1.0


@with_coq
def test_a_proof_is_checked_once_and_leaves_nothing_behind(
    sandbox: ProcessSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = list[str]()
    build = ProcessSandbox.build

    def counted(self: ProcessSandbox, argv: list[str], *rest: object) -> object:
        built.append(argv[-1])
        return build(self, argv, *rest)

    monkeypatch.setattr(ProcessSandbox, "build", counted)
    for _ in range(3):
        assert (
            proves("exact (fun n => n).", "nat -> nat -> True", sandbox=sandbox, form="continue").value == 0.0
        )
        assert proves("intros; exact I.", "nat -> nat -> True", sandbox=sandbox, form="continue").value == 1.0
    assert built == ["Statement.v", "Answer.v", "Answer.v", "Verdict.v", "Covey.Verdict"]
    folders = [Path(place) for _, place in sandbox._builders.values()]
    assert folders and not [left for folder in folders for left in folder.iterdir()]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prover": "isabelle"}, "'isabelle'"),
        ({"axioms": "classic"}, "a list of names"),
        ({"axioms": ["x in I. Axiom y : False"]}, "a list of names"),
    ],
)
def test_settings_that_cannot_be(sandbox: ProcessSandbox, settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        proves("", TRUE, sandbox=sandbox, **settings)


@pytest.mark.parametrize(
    "output",
    [
        "",
        "Closed under the global context\n",
        "Axioms:\nx : y\nAxioms:\nx : y\nAxioms:\n",
        "odd\nAxioms:\nAxioms:\n",
    ],
)
def test_a_list_of_axioms_that_cannot_be_read_permits_nothing(output: str) -> None:
    assert provers.coq_beyond(output, [])
    assert provers.lean_beyond(output, [])


def test_what_coqchk_lists_has_to_be_the_headers_own() -> None:
    head = "* Theory: Set is predicative\n* Axioms:\n  Covey.Statement.f\n"
    assert provers.coqchk_beyond(f"{head}  Covey.Answer.f\n") == []
    assert provers.coqchk_beyond(f"{head}  Covey.Answer.g\n") == ["g"]
    nested = f"{head}  Covey.Answer.g\n  Covey.Answer.Covey.Statement.g\n"
    assert provers.coqchk_beyond(nested) == ["Covey.Statement.g", "g"]
    assert provers.coqchk_beyond("") == ["a summary of coqchk that cannot be read"]


LEAN_HACKS = """
sorry
simp; native_decide
exact foo; end X
rfl axiom f : False
@[simp] rfl
rfl #eval 1
rfl macro x : tactic => `(tactic| sorry)
set_option debug.skipKernelTC true in rfl
open Lean in rfl
run_tac Lean.Elab.Tactic.done
rfl /-
exact "x"
rfl -/
unsafe rfl
rfl local notation 1 => 2
rfl initialize x : Unit ← pure ()
by_elab do return .const `sorryAx []
stop rfl
rfl @[implemented_by x] def y := 1
rfl namespace X
"""


@pytest.mark.parametrize("proof", LEAN_HACKS.strip().splitlines())
def test_what_is_no_tactic_of_lean_is_refused(proof: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        provers.lean_tactics(proof)


def test_tactics_of_lean_are_indented_and_need_no_by() -> None:
    plain = "  intro n -- as the theorem says\n  /- end /- of -/ it -/ simp"
    assert provers.lean_tactics(f"by\n{plain}").splitlines() == ["  intro n  ", "    simp"]
    assert provers.lean_tactics("rfl") == "  rfl"


LEAN = """#!/usr/bin/sh
if [ "$1" = --print-prefix ]; then echo {root}; exit; fi
case "$LEAN_PATH" in .*) ;; *) echo no path; exit 1;; esac
case "$3" in
Statement.lean) grep -q '^def _root_.Covey.goal : Prop' "$3" || exit 1;;
Answer.lean) grep -q '^import Statement' "$3" && grep -q '^open Nat' "$3" || exit 1
  ! grep -q '^inductive' "$3" && test -f Statement.olean || exit 1
  ! grep -q wrong "$3" || {{ echo "error: unknown identifier"; exit 1; }};;
Verdict.lean) grep -q choice Answer.olean && echo "axioms [propext, mine]" || echo "axioms [propext]"
  ! grep -q noisy Answer.olean || echo more;;
esac
while read -r line; do echo "$line"; done < "$3" > "$2"
"""


def test_lean_is_asked_as_its_manual_says_with_a_stub_in_its_place(
    sandbox: ProcessSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin/lean"
    program.parent.mkdir()
    program.write_text(LEAN.format(root=tmp_path))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    provers.lean.cache_clear()
    header = "import Lean\nopen Nat\ninductive Colour | red"

    def judge(proof: str, **settings: object) -> tuple[object, ...]:
        given = {"header": header, "prover": "lean", "sandbox": sandbox, **settings}
        score = proves(f"```lean4\n{proof}\n```", "1 = 1", **given)
        return score.value, score.status, score.detail

    assert judge("by\n  rfl") == (1.0, "ok", "")
    assert judge("exact wrong") == (0.0, "ok", "error: unknown identifier")
    assert judge("choice") == (0.0, "ok", "it uses mine")
    assert judge("choice", axioms=["mine"]) == (1.0, "ok", "")
    assert judge("noisy")[2] == "it uses a list of axioms that cannot be read"
    assert judge("sorry") == (0.0, "unparsable", "not a proof: 'sorry'; a proof consists of tactics only")
    provers.lean.cache_clear()
