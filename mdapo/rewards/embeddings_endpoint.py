"""Embeddings from an OpenAI-compatible endpoint: ``POST BASE_URL/embeddings``, in requests of `TEXTS` texts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import numpy as np

from mdapo.environments.chat_api import Api, ApiError, key_in, read_json, shown
from mdapo.errors import UserError
from mdapo.rewards.embeddings import EmbeddingError

TEXTS = 64  # of one request
MAX_DIMENSION = 16_384
MAX_SIZE = 1e38  # of a number
MAX_BODY = TEXTS * MAX_DIMENSION * 32  # bytes of a reply


class Endpoint:
    """``timeout_s`` and ``retries`` are those of one request."""

    def __init__(self, api: Api) -> None:
        self.api, self.description = api, f"{api.model} at {api.base_url}"

    @classmethod
    def open(cls, base_url: str, *, model: str | None, key_file: str | None, timeout_s: float, retries: int) -> Self:
        """Nothing is asked yet. Raises ``UserError``: such a URL or key cannot be used; no key is in its text."""
        if not model:
            raise UserError("quality.model: must be set when quality.embeddings is a URL: the model's name there")
        try:
            key = None if key_file is None else key_in(key_file, name="quality.key_file")
            return cls(Api(base_url, model, key, timeout_s=timeout_s, retries=retries))
        except ValueError as error:
            raise UserError(f"quality: {error}") from error

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [N, D]. Raises ``EmbeddingError``; a request that fails is one too many, the rest is not asked."""
        parts = [texts[start : start + TEXTS] for start in range(0, len(texts), TEXTS)]
        try:
            rows = [row for part in parts for row in asyncio.run(self._ask(part))]
        except ApiError as error:
            raise EmbeddingError(str(error)) from error
        if len({len(row) for row in rows}) != 1:
            raise EmbeddingError(f"{self.api.base_url}: vectors of different lengths")
        return np.array(rows, np.float32)

    async def _ask(self, texts: Sequence[str]) -> list[list[float]]:
        body = {"model": self.api.model, "input": list(texts), "encoding_format": "float"}
        return await self.api.ask("embeddings", body, partial(_vectors, count=len(texts)), max_body=MAX_BODY)


def _vectors(body: bytes, *, count: int) -> list[list[float]]:
    """``data[i].embedding`` in the order of ``data[i].index``."""
    reply = read_json(body)
    data = reply.get("data") if isinstance(reply, dict) else None
    if not isinstance(data, list) or len(data) != count or not all(isinstance(entry, dict) for entry in data):
        raise ApiError(f"a reply without data of {count} embeddings: {shown(body)}")
    by_index = {entry.get("index", place): entry.get("embedding") for place, entry in enumerate(data)}
    if by_index.keys() != set(range(count)):
        raise ApiError(f"a reply whose indices are not 0 to {count - 1}: {shown(body)}")
    rows = [by_index[place] for place in range(count)]
    if not all(isinstance(row, list) and 0 < len(row) <= MAX_DIMENSION and all(map(_is_number, row)) for row in rows):
        raise ApiError(f"a reply whose embeddings are no lists of finite numbers: {shown(body)}")
    return rows


def _is_number(value: Any) -> bool:
    """One that float32 holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_SIZE
