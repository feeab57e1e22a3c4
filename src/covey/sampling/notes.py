"""Notes on data that the model does not read, or not as meant, because of its chat template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from covey.config.schema import Config
from covey.models.chat import chat_text, leaves_out, unused_arguments, without_seams
from covey.models.policy import Policy
from covey.models.template import template_facts
from covey.tasks.examples import UNTRAINED, Example
from covey.tasks.files import TEMPLATE_COLUMNS
from covey.types import Problem
from covey_verify.extract import message_texts
from covey_verify.types import Messages

TEXTS_TRIED = 1000
"""Number of texts that are encoded and decoded again; each takes less than a thousandth of a second."""


def unseen_by_model(
    policy: Policy, problems: Sequence[Problem], config: Config, examples: Sequence[Example] = ()
) -> list[str]:
    """Return notes on data that the model does not read, or not as meant; a sentence each."""
    problems = [p for p in problems if p.sampled_tokens is None]
    # Examples that an earlier stage sampled are tokens: a template has rendered them already.
    examples = [e for e in examples if e.problem.sampled_tokens is None]
    chats = _chats(problems, examples)
    notes = [*_unread_roles(policy, chats), *_unread_keys(policy, chats)]
    notes += _unread_by_texts(problems, config)
    notes += _note_forged_words(policy, problems)
    notes += _changed_by_template(policy, problems)
    notes += _changed_by_tokenizer(policy, problems, examples)
    notes += _begun_turns(problems)
    return [*notes, *_ignored_arguments(policy, problems)]


def _chats(
    problems: Sequence[Problem], examples: Sequence[Example]
) -> list[tuple[Problem, Sequence[Mapping[str, object]]]]:
    """Return each chat with its messages; an example's with its first answer in messages, if it has one."""
    chats = list[tuple[Problem, Sequence[Mapping[str, object]]]]()
    for example in examples:
        in_messages = [answer for answer in example.answers if not isinstance(answer, str)]
        answer = in_messages[0] if in_messages else ()
        if not isinstance(example.problem.prompt, str):
            chats.append((example.problem, [*example.problem.prompt, *answer]))
    chats += [(problem, problem.prompt) for problem in problems if not isinstance(problem.prompt, str)]
    return chats


def _unread_by_texts(problems: Sequence[Problem], config: Config) -> list[str]:
    """Return notes on what plain-text prompts lose, as they go to the tokenizer without a template."""
    notes = []
    texts = [p for p in problems if isinstance(p.prompt, str)]
    if texts and config.data.chat_template_kwargs:
        notes.append("data.chat_template_kwargs: text prompts go without a template; set data.chat: true")
    tools = [p for p in texts if p.columns.get("tools")]
    if tools:
        notes.append(
            f"{tools[0].id}: column tools does not reach the model: its prompt is plain text without a chat "
            "template; set data.chat: true"
        )
    return notes


def _changed_by_template(policy: Policy, problems: Sequence[Problem]) -> list[str]:
    """Return notes on a template that leaves the answer's header to the model, or changes a question."""
    chats = [(problem, problem.prompt) for problem in problems if not isinstance(problem.prompt, str)]
    if not chats:
        return []
    unbegun = template_facts(policy.tokenizer, chats[0][0].template).unbegun
    notes = []
    if unbegun:
        notes.append(
            f"the chat template ignores add_generation_prompt: the model has to write {unbegun!r}, and "
            "rewards read that. Let chat_template.jinja in the model's folder begin that turn"
        )
    for problem, messages in chats[:TEXTS_TRIED]:
        text = without_seams(chat_text(policy.tokenizer, messages, problem.template))
        rendered = "".join(text.split())
        questions = [str(m["content"]) for m in messages if m["role"] == "user"]
        absent = [text for text in questions if "".join(text.split()) not in rendered]
        if absent:
            notes.append(f"{problem.id}: the chat template changes a message of the user, {absent[0][:60]!r}")
            break
    return notes


def _changed_by_tokenizer(
    policy: Policy, problems: Sequence[Problem], examples: Sequence[Example]
) -> list[str]:
    """Return a note on the first text that its tokens do not give back, as where all is lower-cased."""
    for problem, part, text in islice(_texts(problems, examples), TEXTS_TRIED):
        # Many tokenizers put a space before a text, so both are compared without.
        original = text.strip()
        decoded = policy.decode.text_with_specials(policy.decode.encode(text)).strip()
        if decoded == original:
            continue
        pairs = enumerate(zip(decoded, original, strict=False))
        first_difference = next((n for n, (a, b) in pairs if a != b), 0)
        start = max(0, first_difference - 10)
        excerpt = slice(start, start + 30)
        note = (
            f"{problem.id}: the tokenizer changes the {part}: {original[excerpt]!r} is {decoded[excerpt]!r} "
            "for the model, which cannot write the former. Take a model whose tokenizer knows these "
            "characters"
        )
        return [note]
    return []


def _texts(problems: Iterable[Problem], examples: Iterable[Example]) -> Iterator[tuple[Problem, str, str]]:
    for example in examples:
        for answer in example.answers:
            yield from ((example.problem, "answer", text) for text in message_texts(answer))
    for problem in (*problems, *(e.problem for e in examples)):
        yield from ((problem, "prompt", text) for text in message_texts(problem.prompt))


def _begun_turns(problems: Sequence[Problem]) -> list[str]:
    """Return a note on the first chat that ends with words of the assistant."""
    begun = [p for p in problems if not isinstance(p.prompt, str) and p.prompt[-1]["role"] == "assistant"]
    if not begun:
        return []
    others = "" if len(begun) == 1 else f", as do {len(begun) - 1:,} others"
    note = (
        f"{begun[0].id}: the prompt ends with a message of the assistant{others}, and the chat template "
        "closes its turn: the model reads it and begins another one. If it is the answer, remove it from the "
        "prompt, or call the column messages and leave out data.prompt. If the model should continue it, "
        "write the prompt as a text with the template's words in it"
    )
    return [note]


def _remedy(name: str) -> str:
    return f". Write what it has to know of its {name} into data.system" if name in TEMPLATE_COLUMNS else ""


def _ignored_arguments(policy: Policy, problems: Sequence[Problem]) -> list[str]:
    """Return a note per variable of the template, such as tools, that changes nothing in the rendering."""
    notes = list[str]()
    checked: set[str] = set()
    for problem in problems:
        # Once per name: a template treats all rows in the same way, and rendering them all twice takes long.
        if isinstance(problem.prompt, str) or set(problem.template) <= checked:
            continue
        notes += [
            f"{problem.id}: the model's chat template ignores {name}, so the model reads nothing of it"
            + _remedy(name)
            for name in unused_arguments(policy.tokenizer, problem.prompt, problem.template)
            if name not in checked
        ]
        checked |= set(problem.template)
    return notes


def _note_forged_words(policy: Policy, problems: Sequence[Problem]) -> list[str]:
    """Return a note on the first row whose content has a control word of the template, or a result's mark."""
    for problem in problems:
        if isinstance(problem.prompt, str):
            continue
        facts = template_facts(policy.tokenizer, problem.template)
        for message in problem.prompt:
            content = str(message["content"])
            word = next((word for word in (*facts.controls, *facts.result_marks) if word in content), None)
            if word is None:
                continue
            effect = (
                "a control token of the chat template; it is encoded as plain text, so that it cannot forge "
                "a turn"
                if word in facts.controls
                else "which the chat template writes around results of tools: the model reads one there"
            )
            return [f"{problem.id}: a message of {message['role']} contains {word}, {effect}"]
    return []


def _unread_roles(policy: Policy, chats: Iterable[tuple[Problem, Messages]]) -> list[str]:
    """Return a note per role whose messages the template omits, as most do with roles they do not know."""
    notes = list[str]()
    checked = {"assistant"}
    for problem, messages in chats:
        for index, message in enumerate(messages):
            role = str(message["role"])
            if role in checked or not message["content"]:
                continue
            checked.add(role)
            # If other words in this message change nothing in the rendering, the template does not show it.
            if _ignores_message(policy, problem, messages, index, {**message, "content": "Other words."}):
                notes.append(
                    f"{problem.id}: the chat template omits messages of role {role!r}, so the model does not "
                    "read them; most templates know system, user, assistant and tool"
                )
    return notes


def _unread_keys(policy: Policy, chats: Iterable[tuple[Problem, Messages]]) -> list[str]:
    """Return a note per key of messages, such as a name or a date, that the template does not show."""
    notes = list[str]()
    checked = {"role", "content", "tool_call_id", UNTRAINED}
    for problem, messages in chats:
        for index, message in enumerate(messages):
            for name in [key for key in message if key not in checked]:
                checked.add(name)
                without_key = {key: value for key, value in message.items() if key != name}
                if _ignores_message(policy, problem, messages, index, without_key):
                    notes.append(
                        f"{problem.id}: the chat template omits the key {name!r} of a message, so the model "
                        "does not read it"
                    )
    return notes


def _ignores_message(
    policy: Policy, problem: Problem, messages: Messages, index: int, replacement: Mapping[str, object]
) -> bool:
    """Return whether the template renders the same text with another message in place of one."""
    variant = [*messages[:index], replacement, *messages[index + 1 :]]
    return leaves_out(policy.tokenizer, messages, problem.template, variant)
