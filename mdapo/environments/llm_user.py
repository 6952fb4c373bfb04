"""A simulated user behind an OpenAI-compatible endpoint, such as a second SGLang server.

The row's messages open the conversation, the last of them the user's first words; its columns ``persona`` and ``goal``
say who the user is and wants. The model plays the user: to it, the policy's turns are ``user`` messages and the user's
own are ``assistant`` ones. System and tool messages of the policy are not shown to it. It ends the talk with a marker.

A reply that cannot be had is infrastructure: the episode ends with ``error`` and is masked, never scored 0.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mdapo.environments.base import Observation
from mdapo.environments.chat_api import ChatApi, key_in
from mdapo.environments.resuming import after_opening
from mdapo.types import Message, Prompt

INSTRUCTIONS = """You play a person who talks to an assistant. Stay in this role; you are not the assistant.
Who you are: {persona}
What you want: {goal}
Write only this person's next message, one to three short sentences. Do not give away all at once.
When you have got what you want, or see that you will not get it, write {marker} and nothing else."""
BEGIN = "Hello, how can I help?"  # before the user's first words: many templates want a user message first
_PERSONA, _GOAL = "an ordinary customer", "what your first message says"
_THOUGHTS = "</think>"


@dataclass(frozen=True)
class Talk:
    """How the user is asked, in all conversations of a run."""

    api: ChatApi
    instructions: str
    marker: str
    temperature: float
    max_tokens: int
    max_replies: int
    max_chars: int


class LlmUser:
    """One conversation's user; ``seed`` is that of its sampling."""

    def __init__(self, prompt: Prompt, *, seed: int, talk: Talk) -> None:
        if prompt.messages[-1].role != "user":
            raise ValueError(f"{prompt.uid}: the last message must be the user's first words")
        texts = {}
        for name, default in (("persona", _PERSONA), ("goal", _GOAL)):
            texts[name] = prompt.extra.get(name) or default
            if not isinstance(texts[name], str):
                raise ValueError(f"{prompt.uid}: {name}: must be text")
        self._prompt, self._talk, self._seed, self._replies = prompt, talk, seed, 0
        self._system = _filled(talk.instructions, marker=talk.marker, **texts)

    @classmethod
    def for_run(
        cls,
        *,
        base_url: str,
        model: str,
        api_key_env: str | None = None,
        api_key_file: str | None = None,
        instructions: str = INSTRUCTIONS,
        marker: str = "[END]",
        temperature: float = 0.7,
        max_tokens: int = 200,
        max_replies: int = 16,
        max_chars: int = 2000,
        timeout_s: float = 60.0,
        retries: int = 3,
    ) -> LlmUsers:
        """``configs/README.md`` describes each. ``ValueError``: one cannot be used; no key is in its text."""
        for name, text in (
            ("base_url", base_url),
            ("model", model),
            ("instructions", instructions),
            ("marker", marker),
        ):
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{name} must be a text that is not empty, not {text!r:.60}")
        bounds = (
            ("temperature", temperature, 0.0, 100.0),
            ("timeout_s", timeout_s, 0.001, 86400.0),
            ("max_tokens", max_tokens, 1, 1_000_000),
            ("max_replies", max_replies, 1, 1_000_000),
            ("max_chars", max_chars, 1, 1_000_000),
            ("retries", retries, 0, 100),
        )
        for name, value, least, most in bounds:
            kinds = int | float if isinstance(least, float) else int
            if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
                raise ValueError(f"{name} must be a number from {least:g} to {most:g}, not {value!r:.60}")
        key = _key_of(api_key_env, api_key_file)
        api = ChatApi(base_url, model, key, timeout_s=float(timeout_s), retries=retries)
        return LlmUsers(Talk(api, instructions, marker, float(temperature), max_tokens, max_replies, max_chars))

    def opening(self) -> tuple[Message, ...]:
        return self._prompt.messages

    def resume(self, messages: Sequence[Message]) -> None:
        """The user has said one message a reply: the next has its own number, and with it its own seed."""
        later = after_opening(messages, self.opening())
        self._replies = sum(message.role == "user" for message in later)

    async def observe(self, messages: Sequence[Message]) -> Observation:
        talk = self._talk
        if self._replies == talk.max_replies:
            return Observation(end="gave_up")
        seed = (self._seed * 1_000_003 + self._replies) & 0x7FFFFFFF
        self._replies += 1
        reply = await talk.api.complete(
            as_seen_by_user(self._system, messages),
            temperature=talk.temperature,
            max_tokens=talk.max_tokens,
            seed=seed,
        )
        said, marker, _ = _readable(reply).partition(talk.marker)
        text = said.strip()[: talk.max_chars]
        if marker:
            return Observation((Message("user", text),) if text else (), end="done")
        if not text:
            raise ValueError("the user's model said nothing")
        return Observation((Message("user", text),))


@dataclass(frozen=True)
class LlmUsers:
    """Makes the users of a run's conversations; they wait for a network."""

    talk: Talk
    waits = True

    def __call__(self, prompt: Prompt, *, seed: int) -> LlmUser:
        return LlmUser(prompt, seed=seed, talk=self.talk)


def as_seen_by_user(system: str, messages: Sequence[Message]) -> list[dict[str, str]]:
    """The conversation with roles swapped, alternating: neighbours of one role become one message."""
    seen = [("system", system), ("user", BEGIN)]
    for message in messages:
        if message.role not in ("user", "assistant"):
            continue
        role = "assistant" if message.role == "user" else "user"
        content = _readable(message.content).strip()
        if seen[-1][0] == role:
            seen[-1] = (role, f"{seen[-1][1]}\n\n{content}")
        else:
            seen.append((role, content))
    return [{"role": role, "content": content} for role, content in seen]


def _filled(instructions: str, **texts: str) -> str:
    """Only these names are replaced: braces in a persona, or others in the instructions, are text."""
    return re.sub(r"\{(\w+)\}", lambda hit: texts.get(hit[1], hit[0]), instructions)


def _readable(text: str) -> str:
    """Without a reasoning model's thoughts, and encodable: JSON may hold half of a surrogate pair."""
    said = text.rpartition(_THOUGHTS)[2]
    return said.encode("utf-8", "replace").decode().replace("\x00", "\ufffd")


def _key_of(variable: str | None, file: str | None) -> str | None:
    """The API key. ``ValueError`` names the variable or file that has none."""
    if variable is not None and file is not None:
        raise ValueError("api_key_env and api_key_file are two places for one key; give one")
    if variable is not None:
        if not isinstance(variable, str) or not variable.isidentifier():
            raise ValueError("api_key_env must be the name of an environment variable (the key itself is never given)")
        if not (key := os.environ.get(variable, "").strip()):
            raise ValueError(f"api_key_env: the environment variable {variable} is not set")
        return key
    if file is None:
        return None
    return key_in(file, name="api_key_file")
