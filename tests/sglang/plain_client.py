"""The least of an HTTP client that a weight sync needs; mdapo's own has its own tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiohttp

from mdapo.rollout.engine import EngineError


@dataclass(frozen=True)
class PlainInfo:
    version: str


class PlainClient:
    """``mdapo.sync.servers.Server`` over aiohttp."""

    def __init__(self, url: str, key: str, session: aiohttp.ClientSession) -> None:
        self.url, self._session = url, session
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def _call(self, method: str, path: str, body: Any, deadline_s: float) -> Any:
        limit = aiohttp.ClientTimeout(total=deadline_s)
        try:
            async with self._session.request(
                method, self.url + path, json=body, headers=self._headers, timeout=limit
            ) as answer:
                if answer.status != 200:
                    raise EngineError(f"{self.url}{path}: {answer.status} {(await answer.text())[:300]}")
                is_json = answer.content_type == "application/json"
                return await answer.json() if is_json else await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"{self.url}{path}: {type(error).__name__} {error}") from error

    async def post(self, path: str, body: Any, *, deadline_s: float) -> Any:
        return await self._call("POST", path, body, deadline_s)

    async def flush_cache(self, *, deadline_s: float) -> None:
        await self._call("POST", "/flush_cache", None, deadline_s)

    async def info(self, *, deadline_s: float) -> PlainInfo:
        return PlainInfo((await self._call("GET", "/model_info", None, deadline_s))["weight_version"])

    async def logprobs(self, ids: list[int], *, deadline_s: float = 60.0) -> tuple[list[float], str]:
        """Log-probs of ``ids[1:]``, each after the ids before it, and the version that the server names."""
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        meta = (await self.post("/generate", body, deadline_s=deadline_s))["meta_info"]
        return [entry[0] for entry in meta["input_token_logprobs"][1:]], meta["weight_version"]
