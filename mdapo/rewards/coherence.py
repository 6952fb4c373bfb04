"""Coherence and relevance of a dialogue, each in [0, 1]: does every reply follow from what was said, and answer it?

Judged are the agent's *replies*: what its turns say beside thoughts and calls of tools, of the turns after the opening.
A turn that only calls tools is no reply; one that says nothing is, and is worth 0. Without any reply both are 0.
With ``~`` the similarity of two texts on the embedder's `Scale` (0: unrelated, 1: as like as a message and a good reply
to it), for reply a_k to the user's last message u_k, with the tools' answers since:

* ``relevance_k = (0.7 max(a_k ~ u_k, a_k ~ u_k + a_k-1) + 0.3 a_k ~ topic) (1 - echo_k)``, where ``x + y`` is the sum
  of vectors, the topic is the scenario: the system message and the user's first one, and the echo is how much of a
  reply the user's messages had said already.
* ``follows_k = 0.6 max(a_k ~ a_k-1, a_k ~ u_k + a_k-1) + 0.4 a_k ~ topic``: adjacent turns, and turn and topic.
* ``order = 0.5 + ORDER mean_k (a_k . u_k - mean_j a_k . u_j) / gap``, cut to [0, 1]; j are the other user messages
  that are near, the gap is the scale's. Replies in a wrong order fit other messages better than their own. Where there
  is no other message, it is how much more than an unrelated text the reply fits.
* ``sound_k = (1 - w1 breaks off) (1 - w2 repeats itself) (1 - w3 repeats earlier replies) (1 - w4 contradicts)``, with
  the weights `FAULTS` and the shares of `dialogue_faults.py`.

``relevance = low(relevance_k)`` and ``coherence = low(FOLLOWS follows_k + (1 - FOLLOWS) order) low(sound_k)``, where
``low`` is half the mean and half the mean of the lowest quarter: one bad reply among many still counts.
The numbers were chosen on one half of the dialogues of ``benchmarks/bench_quality.py``, which reports on the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mdapo.environments.tool_calls import calls_in, spoken
from mdapo.rewards import dialogue_faults as faults
from mdapo.rewards.calibration import Scale
from mdapo.rewards.embeddings import MAX_CHARS, Cached
from mdapo.types import Message

FAULTS = {"breaks_off": 0.6, "repeats_itself": 0.8, "repeats_earlier": 0.9, "contradicts": 0.9}
ORDER = 2.0  # how much of a scale's gap the order counts
FOLLOWS = 0.4  # share of what follows, and 1 - it of the order
NEAR = 16  # user messages before and after, with which the order is told
TAIL = 0.25  # share of the replies that are the lowest


@dataclass(frozen=True)
class Quality:
    """Both in [0, 1]."""

    coherence: float
    relevance: float


@dataclass(frozen=True)
class _Reply:
    """Indices of messages. ``answers``: the user's message; ``tools``: their answers since; ``after``: the reply
    before, if any."""

    at: int
    answers: int | None
    tools: tuple[int, ...]
    after: int | None


def texts_of(messages: Sequence[Message]) -> list[str]:
    """What is embedded of each message, and last the topic. A call of a tool alone is no text."""
    said = [spoken(m.content[:MAX_CHARS]) if m.role == "assistant" else m.content for m in messages]
    return [*said, _topic(messages)]


def judge(messages: Sequence[Message], vectors: np.ndarray, scale: Scale, *, opening: int) -> Quality:
    """``vectors``: float32 [M + 1, D] of ``texts_of(messages)``. ``opening``: messages before the policy's first turn;
    agent turns among them are not judged."""
    replies = _replies(messages)
    judged = [k for k, reply in enumerate(replies) if reply.at >= opening]
    if not judged:
        return Quality(0.0, 0.0)
    unit = vectors.astype(np.float64)
    topic = unit[-1]
    said = unit[[replies[k].at for k in judged]]
    here = np.stack([_here(replies[k], unit) for k in judged])
    before = np.stack([_before(replies[k], unit, topic) for k in judged])
    to_topic, to_wide = scale(said @ topic), scale(_dots(said, _units(here + before)))
    relevance = 0.7 * np.maximum(scale(_dots(said, here)), to_wide) + 0.3 * to_topic
    follows = 0.6 * np.maximum(scale(_dots(said, before)), to_wide) + 0.4 * to_topic
    order = _order(said, here, [replies[k].answers for k in judged], scale)
    texts = [spoken(messages[reply.at].content[:MAX_CHARS]) for reply in replies]
    heard = [[m.content for m in messages[: replies[k].at] if m.role == "user"] for k in judged]
    echoes = np.array([faults.repeats_earlier(texts[k], words) for k, words in zip(judged, heard, strict=True)])
    sound = np.array([_sound(texts[k], texts[:k]) for k in judged])
    empty = np.array([not texts[k].strip() for k in judged])
    relevance, follows = np.where(empty, 0.0, relevance * (1.0 - echoes)), np.where(empty, 0.0, follows)
    coherence = _low(FOLLOWS * follows + (1.0 - FOLLOWS) * order * ~empty) * _low(sound)
    return Quality(_unit(coherence), _unit(_low(relevance)))


def _topic(messages: Sequence[Message]) -> str:
    first = next((m.content for m in messages if m.role == "user"), "")
    system = [m.content for m in messages[:1] if m.role == "system"]
    return " ".join([*system, first])


def _replies(messages: Sequence[Message]) -> list[_Reply]:
    found: list[_Reply] = []
    user, tools = None, []
    for i, message in enumerate(messages):
        if message.role == "user":
            user, tools = i, []
        elif message.role == "tool":
            tools.append(i)
        elif message.role == "assistant" and (spoken(message.content) or not calls_in(message.content)):
            found.append(_Reply(i, user, tuple(tools), found[-1].at if found else None))
    return found


def _here(reply: _Reply, unit: np.ndarray) -> np.ndarray:
    """[D]: what is answered; the topic where no user has spoken."""
    asked = unit[-1] if reply.answers is None else unit[reply.answers]
    return _units(asked + unit[list(reply.tools)].sum(0))


def _before(reply: _Reply, unit: np.ndarray, topic: np.ndarray) -> np.ndarray:
    """[D]: the reply before; for the first one, the topic."""
    return topic if reply.after is None else unit[reply.after]


def _order(said: np.ndarray, here: np.ndarray, answers: Sequence[int | None], scale: Scale) -> float:
    fits, own = said @ here.T, np.array([-1 if a is None else a for a in answers])
    place = np.arange(len(own))
    others = (own[:, None] != own[None, :]) & (np.abs(place[:, None] - place[None, :]) <= NEAR)
    counts = others.sum(1)
    elsewhere = np.where(counts > 0, (fits * others).sum(1) / np.maximum(counts, 1), scale.unrelated)
    return _unit(0.5 + ORDER * float((fits.diagonal() - elsewhere).mean()) / scale.gap)


def _sound(text: str, earlier: Sequence[str]) -> float:
    found = {
        "breaks_off": faults.breaks_off(text),
        "repeats_itself": faults.repeats_itself(text),
        "repeats_earlier": faults.repeats_earlier(text, earlier),
        "contradicts": faults.contradicts(text, earlier),
    }
    return float(np.prod([1.0 - FAULTS[name] * share for name, share in found.items()]))


def _low(values: np.ndarray) -> float:
    """Half the mean, half the mean of the lowest quarter."""
    lowest = np.sort(values)[: math.ceil(len(values) * TAIL)]
    return float((values.mean() + lowest.mean()) / 2.0)


def _dots(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(-1)


def _units(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)


def _unit(value: float) -> float:
    return min(max(float(value), 0.0), 1.0)


def judge_all(talks: Sequence[tuple[Sequence[Message], int]], embedder: Cached, scale: Scale) -> list[Quality]:
    """(messages, opening) of each dialogue; the texts of all of them are embedded at once. Raises
    ``EmbeddingError``."""
    texts = [texts_of(messages) for messages, _ in talks]
    vectors = embedder.embed([text for own in texts for text in own])
    ends = np.cumsum([len(own) for own in texts])
    return [
        judge(messages, vectors[end - len(own) : end], scale, opening=opening)
        for (messages, opening), own, end in zip(talks, texts, ends, strict=True)
    ]
