"""The process that measures the quality of dialogues: JSON lines in, JSON lines out, at a low priority.

Line 1 in: one object with the arguments of `open_embedder` and ``cache``; out: ``{"ready": true}`` or
``{"problems": [...]}``. Then for each batch one line in, ``{"talks": [[messages, opening], ...]}``, and one out:
``{"qualities": [[coherence, relevance], ...]}``, or ``{"error": why}``.
"""

from __future__ import annotations

import json
import os
from typing import Any

from mdapo.errors import UserError
from mdapo.rewards.calibration import Scale, calibrate
from mdapo.rewards.coherence import judge_all
from mdapo.rewards.embeddings import Cached, EmbeddingError, open_embedder
from mdapo.rewards.worker import die_with_parent, private_pipes, say
from mdapo.types import Message

NICENESS = 5  # generation goes first


def main() -> None:
    die_with_parent()
    requests, answers = private_pipes()
    os.nice(NICENESS)
    (settings,) = json.loads(requests.readline())
    try:
        embedder = Cached(
            open_embedder(**{name: value for name, value in settings.items() if name != "cache"}),
            size=settings["cache"],
        )
        scale = calibrate(embedder)
    except UserError as error:
        say(answers, {"problems": error.problems})
        return
    except EmbeddingError as error:
        say(answers, {"problems": [f"quality.embeddings: {error}"]})
        return
    say(answers, {"ready": True})
    for line in requests:
        say(answers, _answer(json.loads(line), embedder, scale))


def _answer(request: dict[str, Any], embedder: Cached, scale: Scale) -> dict[str, Any]:
    talks = [
        (tuple(Message(role, content) for role, content in messages), opening) for messages, opening in request["talks"]
    ]
    try:
        found = judge_all(talks, embedder, scale)
    except EmbeddingError as error:
        return {"error": str(error)[:500]}
    return {"qualities": [[quality.coherence, quality.relevance] for quality in found]}


if __name__ == "__main__":
    main()
