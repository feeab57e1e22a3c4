"""Texts that must not pass for a proof in Coq: of `forall n : nat, n = S n`, which is false.

Each ends or leaves the proof that it is put into and arranges something. `proves` refuses them twice: as text
that holds more than tactics, and, with that wall taken down, by what the kernel says in a file of its own.
"""

FALSE = "forall n : nat, n = S n"
NEXT = "Theorem covey_other : True. Proof. exact I."
"""So that the `Qed` which follows the text ends something."""
TEXTS = r"""
admitted
Admitted. NEXT

aborted, then an axiom of its name
Abort. Axiom covey_answer : FALSE. NEXT

aborted, then a parameter
Abort. Parameter covey_answer : FALSE. NEXT

aborted, then a conjecture
Abort. Conjecture covey_answer : FALSE. NEXT

aborted, then another theorem of its name
Abort. Theorem covey_answer : True. Proof. exact I.

an axiom beside it
Abort. Axiom cheat : False. Theorem covey_answer : FALSE. Proof. destruct cheat.

an axiom in a module
Abort. Module M. Axiom cheat : False. End M. Theorem covey_answer : FALSE. Proof. destruct M.cheat.

an axiom through a module type
Abort. Module Type T. Parameter cheat : False. End T. Declare Module M : T. Theorem covey_answer :
FALSE. Proof. destruct M.cheat.

an axiom through a functor
Abort. Module Type T. Parameter cheat : False. End T. Module F (X : T). Theorem covey_answer :
FALSE. Proof. destruct X.cheat. Qed. End F. Declare Module M : T. Module N := F M. Definition
covey_answer := N.covey_answer. NEXT

an axiom with a permitted name
Abort. Axiom classic : False. Theorem covey_answer : FALSE. Proof. destruct classic.

an axiom with a permitted name in a module of its name
Abort. Module Classical_Prop. Axiom classic : False. End Classical_Prop. Theorem covey_answer :
FALSE. Proof. destruct Classical_Prop.classic.

numbers read anew
Abort. Notation "n = 'S' m" := (n = m) (at level 70). Theorem covey_answer : FALSE. Proof.
reflexivity.

equality read anew
Abort. Notation "a = b" := (a = a) : type_scope. Theorem covey_answer : FALSE. Proof. reflexivity.

a successor of its own
Abort. Definition S (n : nat) := n. Theorem covey_answer : FALSE. Proof. reflexivity.

a nat of its own
Abort. Inductive nat := O. Definition S (n : nat) := O. Theorem covey_answer : FALSE. Proof.
destruct n; reflexivity.

a statement of its own
Abort. Module Covey. Module Statement. Definition covey_goal := True. Definition covey_permitted :=
I. End Statement. End Covey. Theorem covey_answer : True. Proof. exact I.

a statement of its own, imported
Abort. Module Export Covey. Module Export Statement. Definition covey_goal := True. End Statement.
End Covey. Theorem covey_answer : covey_goal. Proof. exact I.

a coercion to it
Abort. Axiom cheat : False. Definition to (_ : True) : covey_goal := match cheat with end. Coercion
to : True >-> covey_goal. Theorem covey_answer : True. Proof. exact I.

guard off
Abort. #[global] Unset Guard Checking. Fixpoint cheat (n : Datatypes.nat) : False := cheat n.
Theorem covey_answer : FALSE. Proof. destruct (cheat 0).

guard bypassed
Abort. #[bypass_check(guard)] Fixpoint cheat (n : Datatypes.nat) : False := cheat n. Theorem
covey_answer : FALSE. Proof. destruct (cheat 0).

positivity off
Abort. Unset Positivity Checking. Inductive B := b : (B -> False) -> B. Definition no (x : B) :
False := match x with b f => f x end. Theorem covey_answer : FALSE. Proof. destruct (no (b no)).

universes off
Abort. Require Import Coq.Logic.Hurkens. #[global] Unset Universe Checking. Definition U := Type.
Definition cheat : False := TypeNeqSmallType.paradox U eq_refl. Theorem covey_answer : FALSE. Proof.
destruct cheat.

axioms printed in a column of one
Abort. #[global] Set Printing Width 1. #[global] Set Printing Depth 1. Axiom cheat : False. Theorem
covey_answer : FALSE. Proof. destruct cheat.

silence
Abort. #[global] Set Silent. #[global] Set Warnings "none". Axiom cheat : False. Theorem
covey_answer : FALSE. Proof. destruct cheat.

a section variable
Abort. Section A. Variable cheat : False. Theorem covey_answer : FALSE. Proof. destruct cheat. Qed.
End A. NEXT

a section left open
Abort. Section A. Variable cheat : False. Theorem covey_answer : FALSE. Proof. destruct cheat.

a context
Abort. Context (cheat : False). Theorem covey_answer : FALSE. Proof. destruct cheat.

obligations admitted
Abort. Program Definition covey_answer : FALSE := fun n => _. Admit Obligations. NEXT

a primitive
Abort. Require Import Coq.Floats.PrimFloat. Theorem covey_answer : FALSE. Proof. Admitted. NEXT

an inconsistent library
Abort. Require Import Coq.Logic.ClassicalEpsilon. Axiom cheat : False. Theorem covey_answer : FALSE.
Proof. destruct cheat.

quit
Quit.

drop
Drop.

back
Back 2. Theorem covey_answer : True. Proof. exact I.

reset
Reset Initial. Definition covey_goal := True. Theorem covey_answer : True. Proof. exact I.

the rest is a comment
Admitted. (*

the rest is a string
Admitted. Comments "

no more than the rest
Fail idtac.

the statement's file overwritten
Abort. Redirect "Statement.vo" Print nat. Cd "..". Redirect "Statement" Print nat. NEXT

a program extracted
Abort. Require Extraction. Extraction "Verdict.v" Nat.add. Axiom covey_answer : FALSE. NEXT

a file read
Load "/etc/passwd". NEXT

a plugin
Abort. Declare ML Module "covey_cheat". NEXT

given up
intros n. give_up.

admit
admit.

a cast that is not checked
exact_no_check I.

a cast for the virtual machine
vm_cast_no_check I.

a cast for native code
native_cast_no_check I.

a circular fix
fix cheat 1. exact cheat.

a circular cofix
cofix cheat. exact cheat.

a side effect
intros n. transparent_abstract admit.
"""
HACKS = {
    name: text.replace("NEXT", NEXT).replace("FALSE", FALSE)
    for name, _, text in (block.strip().partition("\n") for block in TEXTS.split("\n\n"))
}
