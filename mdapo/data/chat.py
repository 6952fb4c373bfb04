"""Chat template -> token ids, turn by turn. What the engine wrote is never rendered again.

A conversation grows as ``prompt_ids(opening)``, then, per turn, the engine's own ids and ``observation_ids(answer)``:
exactly the ids that the template puts between the end of one assistant turn and the first token of the next.

Text of messages never becomes a control token. A message that spells one (``<|im_end|>`` typed by a user) has that
spelling broken by a private character before the template sees it; the rendered text is then cut at the control tokens
that the *template* wrote, the character is taken out again, and what lies between is encoded with special tokens
switched off. Tokens that a tokenizer adds without calling them special (``<think>`` of Qwen3) are text here as there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mdapo.config.paths import why_no_folder
from mdapo.environments.base import Tools
from mdapo.errors import UserError, shortened
from mdapo.types import Message

_SAY = "Words of the assistant."  # dummy assistant text; what comes after it is what the template adds
_OWN_TEMPLATE = "the tokenizer's chat template (model.chat_template replaces it)"
_TOOL_TEXT = "Words of the tool."
_TOOL_NAME = "name_of_a_function"
# What a template without an argument for tools is given in the first system message, as the Hermes and Qwen templates
# write it themselves.
_TOOLS_TEXT = """# Functions

You may call these functions, each declared by one line of JSON:
{declarations}

To call one, write its name and its arguments as JSON between these tags, and end your turn. Its answer follows.
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>"""
_DATE = "26 Jul 2024"  # templates that print today's date would change the prompts of a resumed run
_PRIVATE = [chr(c) for c in range(0xE000, 0xE100)]
_CACHED_OBSERVATIONS = 4096


@dataclass(frozen=True)
class Difference:
    """Where the template, given the whole conversation, differs from what was built up turn by turn."""

    what: str
    position: int
    built: str  # token at that position in the turn-by-turn ids
    template: str

    def __str__(self) -> str:
        return (
            f"{self.what}: first difference at token {self.position}: built {self.built!r}, template {self.template!r}"
        )


@dataclass(frozen=True)
class AppendOnlyReport:
    """``append_only``: plain conversations render to the very ids that grow turn by turn."""

    append_only: bool
    differences: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()
    stop_tokens: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self.lines)

    @property
    def lines(self) -> list[str]:
        head = "chat template: append-only" if self.append_only else "chat template: NOT append-only"
        lines = [f"{head}; a turn ends at {' or '.join(map(repr, self.stop_tokens))}"]
        lines += [str(d) for d in self.differences]
        if self.differences:
            lines.append("handled: ids of earlier turns are kept as the engine saw them, never rendered again")
        return lines + list(self.notes)


@dataclass
class ChatFormat:
    """One tokenizer with one chat template. Make it with ``from_folder``.

    ``stop_ids``: tokens that end an assistant turn, the template's own first. ``close_ids``: what the template writes
    between an assistant's text and the end of its turn, that token included; it closes a turn that was cut.
    """

    tokenizer: PreTrainedTokenizerFast
    template: str
    source: str = _OWN_TEMPLATE  # what messages call the template
    stop_ids: tuple[int, ...] = ()
    close_ids: tuple[int, ...] = ()
    tool_as_user: bool = False
    tools_as_text: bool = False  # the template has no argument for tools
    _end_of_turn: str = ""
    _observation: Callable[[tuple[Message, ...]], tuple[int, ...]] = field(init=False)
    _control: dict[str, int] = field(default_factory=dict)
    _ids_with: dict[tuple[str, ...], tuple[int, ...]] = field(default_factory=dict)
    _control_re: re.Pattern[str] = field(default_factory=lambda: re.compile("(?!)"))

    @classmethod
    def from_folder(cls, path: str, template: str | None = None) -> ChatFormat:
        """Load the tokenizer in folder ``path``; ``template`` is a file that replaces its chat template.

        Raises ``UserError``: no such folder or file, no template, or one that cannot hold a conversation.
        """
        folder = Path(path)
        if why := why_no_folder(folder):
            raise UserError(f"model.path: {why}: {path}")
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"model.path: no tokenizer could be read from {path}: {_first_line(error)}") from error
        if template is not None:
            try:
                tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"model.chat_template: cannot read {template}: {_first_line(error)}") from error
        source = f"model.chat_template={template}" if template is not None else _OWN_TEMPLATE
        return cls.from_tokenizer(tokenizer, eos_ids=_generation_eos(folder), source=source)

    @classmethod
    def from_tokenizer(
        cls, tokenizer: PreTrainedTokenizerFast, *, eos_ids: Sequence[int] = (), source: str = _OWN_TEMPLATE
    ) -> ChatFormat:
        """``eos_ids``: further stop tokens (a generation config's); the tokenizer's own eos may be wrong: unused.

        ``source``: what messages call the template.
        """
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not tokenizer.is_fast or not template:
            what = "no chat template" if tokenizer.is_fast else "a slow tokenizer; a tokenizer.json is needed"
            raise UserError(f"model.path: the tokenizer has {what} (give a template with model.chat_template)")
        tokenizer.clean_up_tokenization_spaces = False  # "tidied" text is not what the policy wrote
        chat = cls(tokenizer=tokenizer, template=template, source=source)
        chat._control = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        names = sorted(chat._control, key=len, reverse=True)
        if names:
            chat._control_re = re.compile("|".join(map(re.escape, names)))
        chat._probe(eos_ids)
        chat._observation = lru_cache(_CACHED_OBSERVATIONS)(chat._after_assistant)
        return chat

    # ---- ids ---------------------------------------------------------------------------------------------------------

    def prompt_ids(self, messages: Sequence[Message], *, tools: Tools = ()) -> list[int]:
        """Opening messages, then the header of the assistant turn. Raises ``UserError`` if the template refuses.

        ``tools``: functions that the policy may call. The template shows them, as its ``tools``; one that has no such
        argument gets them as text in the first system message (``_TOOLS_TEXT``), which is made where there is none.
        """
        if tools and self.tools_as_text:
            messages, tools = _with_text_of(tools, messages), ()
        return self._encode(*self._render(messages, generate=True, tools=tools))

    def observation_ids(self, messages: Sequence[Message], *, after_stop: bool) -> list[int]:
        """What follows an assistant turn: separator, ``messages``, header of the next assistant turn; all with mask 0.

        ``after_stop``: the turn's last id is a stop token. If not (it was cut), ``close_ids`` come first.
        Cost: about 70 us, or 1 us when the same words were said before. Raises ``UserError`` if the template refuses.
        """
        ids = self._observation(tuple(messages))
        return list(ids) if after_stop else [*self.close_ids, *ids]

    def _after_assistant(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        dummy = (Message("user", "Words of the user."), Message("assistant", _SAY))
        text, private = self._render([*dummy, *messages], generate=True)
        tail = text[text.index(_SAY) + len(_SAY) :]
        tail = tail[tail.index(self._end_of_turn) + len(self._end_of_turn) :]
        return tuple(self._encode(tail, private))

    def decode(self, ids: Sequence[int]) -> str:
        """The assistant's text for the environment: stop tokens at the end taken off; other control tokens show."""
        end = len(ids)
        while end and ids[end - 1] in self.stop_ids:
            end -= 1
        return self._text(ids[:end])

    def ids_with(self, texts: tuple[str, ...]) -> tuple[int, ...]:
        """Ids of the tokens that have one of ``texts`` in them, control tokens left out (looked up once).

        Raises ``UserError`` for a text that no single token has in it: it would never be found.
        """
        if texts and texts not in self._ids_with:
            words = [(i, self._text([i])) for i in range(len(self.tokenizer)) if i not in self._control.values()]
            for text in texts:
                if not any(text in word for _, word in words):
                    raise UserError(f"rollout.stop: no token of this tokenizer has {text!r} in it; give a shorter text")
            self._ids_with[texts] = tuple(i for i, word in words if any(text in word for text in texts))
        return self._ids_with.get(texts, ())

    # ---- template and tokenizer --------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message], *, generate: bool, tools: Tools = ()) -> tuple[str, str]:
        """Rendered text, and the private character in it that breaks control tokens spelt in messages (or "")."""
        texts = [m.content for m in messages]
        if tools:
            texts.append(json.dumps(tools, ensure_ascii=False, allow_nan=False))
        private = ""
        if any(self._control_re.search(text) for text in texts):
            private = next(c for c in _PRIVATE if not any(c in text for text in texts))

        def broken(text: str) -> str:
            return self._control_re.sub(lambda hit: hit[0][0] + private + hit[0][1:], text) if private else text

        rows = []
        for m in messages:
            role = "user" if m.role == "tool" and self.tool_as_user else m.role
            rows.append({"role": role, "content": broken(m.content)})
        try:
            text = self.tokenizer.apply_chat_template(
                rows,
                tools=_mapped(tools, broken) or None,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=generate,
                date_string=_DATE,
            )
        except Exception as error:  # a template is a program: it may raise anything, such as ZeroDivisionError
            roles = ", ".join(m.role for m in messages)
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            why = f"{kind}{_first_line(error)}"
            raise UserError(f"{self.source}: refuses a conversation of roles {roles}: {why}") from error
        return str(text), private

    def _encode(self, text: str, private: str) -> list[int]:
        if not private:
            return self._plain(text, special=True)
        ids: list[int] = []
        start = 0
        for hit in self._control_re.finditer(text):
            ids += self._plain(text[start : hit.start()].replace(private, ""), special=False)
            ids.append(self._control[hit[0]])
            start = hit.end()
        return ids + self._plain(text[start:].replace(private, ""), special=False)

    def _plain(self, text: str, *, special: bool) -> list[int]:
        """Token ids; control tokens spelt in ``text`` are themselves (``special``) or mere characters."""
        return list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=not special).input_ids)

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    # ---- start-up ----------------------------------------------------------------------------------------------------

    def _probe(self, eos_ids: Sequence[int]) -> None:
        """Find the end of a turn in what the template writes after an assistant's text; raise if it cannot converse."""
        problems: list[str] = []
        user, say = Message("user", "Words of the user."), Message("assistant", _SAY)
        text = ""
        for needed in ([Message("system", "Words of the system."), user], [user, say, user]):
            try:
                text, _ = self._render(needed, generate=False)
            except UserError as error:
                problems += error.problems
        if problems:
            raise UserError(problems)
        _, found, tail = text.partition(_SAY)
        end = self._control_re.search(tail) if found else None
        if end is None:
            what = (
                "writes no control token after an assistant's text" if found else "leaves out earlier assistant turns"
            )
            raise UserError(f"{self.source}: {what}; a turn's end cannot be told")
        self._end_of_turn = end[0]
        self.close_ids = tuple(self._plain(tail[: end.end()], special=True))
        known = range(len(self.tokenizer))
        self.stop_ids = tuple(dict.fromkeys([self._control[end[0]], *(i for i in eos_ids if i in known)]))
        self.tool_as_user = not self._shows(_TOOL_TEXT, [user, say, Message("tool", _TOOL_TEXT)])
        function = {"name": _TOOL_NAME, "description": "", "parameters": {"type": "object", "properties": {}}}
        self.tools_as_text = not self._shows(_TOOL_NAME, [user], ({"type": "function", "function": function},))

    def _shows(self, what: str, messages: Sequence[Message], tools: Tools = ()) -> bool:
        try:
            return what in self._render(messages, generate=True, tools=tools)[0]
        except UserError:
            return False

    def check(self) -> AppendOnlyReport:
        """Build short conversations turn by turn, compare with the template's rendering of the whole, and report."""
        replies = {
            "plain text": ("Good morning.", "Yes, of course."),
            "reply with a think block": ("<think>\nHm.\n</think>\n\nGood morning.", "<think>\nHm.\n</think>\n\nYes."),
            "reply with spaces around it": (" Good morning. ", "Yes.\n"),
        }
        differences = [d for what, texts in replies.items() if (d := self._first_difference(what, texts))]
        notes = []
        if self.tool_as_user:
            notes.append("the template has no tool role: tool messages are given to it as user messages")
        if self.tools_as_text:
            notes.append("the template shows no functions: they are told as text in the first system message")
        try:
            self._render([Message("user", "One."), Message("user", "Two.")], generate=True)
        except UserError:
            notes.append("the template wants user and assistant to alternate: two messages in a row are refused")
        return AppendOnlyReport(
            append_only=not any(d.what == "plain text" for d in differences),
            differences=tuple(differences),
            notes=tuple(notes),
            stop_tokens=tuple(self.tokenizer.convert_ids_to_tokens(list(self.stop_ids))),
        )

    def _first_difference(self, what: str, texts: Sequence[str]) -> Difference | None:
        messages = [Message("system", "You help."), Message("user", "Hello.")]
        built = self.prompt_ids(messages)
        for n, text in enumerate(texts):
            asked = (Message("user", f"And then, {n}?"),)
            built = [
                *built,
                *self._plain(text, special=False),
                *self.close_ids,
                *self.observation_ids(asked, after_stop=True),
            ]
            messages += [Message("assistant", text), *asked]
        whole = self._encode(*self._render(messages, generate=True))
        if built == whole:
            return None
        at = next(
            (i for i, (a, b) in enumerate(zip(built, whole, strict=False)) if a != b), min(len(built), len(whole))
        )
        return Difference(what, at, self._name(built, at), self._name(whole, at))

    def _name(self, ids: Sequence[int], at: int) -> str:
        return self._text(ids[at : at + 1]) if at < len(ids) else "(end)"


def _with_text_of(tools: Tools, messages: Sequence[Message]) -> list[Message]:
    declarations = "\n".join(json.dumps(tool["function"], ensure_ascii=False, allow_nan=False) for tool in tools)
    text = _TOOLS_TEXT.format(declarations=declarations)
    if messages and messages[0].role == "system":
        return [Message("system", f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [Message("system", text), *messages]


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """JSON data with every text in it changed; tuples as lists."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, list | tuple) else value


def _generation_eos(folder: Path) -> list[int]:
    """``eos_token_id`` of the folder's generation config: an int, a list, or none."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return []
    try:
        raw: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: {_first_line(error)}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{file}: must hold a JSON object")
    eos = raw.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise UserError(f"{file}: eos_token_id must be a whole number or a list of them, not {eos!r:.60}")
    return ids


def _first_line(error: BaseException) -> str:
    return shortened(str(error).strip().split("\n")[0])
