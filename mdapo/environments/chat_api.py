"""Calls of an OpenAI-compatible endpoint: a deadline, capped retries, a checked reply, no redirects.

What comes back is others' words, and perhaps hostile: its size is bounded while it is read, its shape is checked, and
the key, which a server may echo, is in no message.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from mdapo.config.paths import why_no_file
from mdapo.errors import shortened

MAX_KEY = 4096  # bytes of a key file
MAX_BODY = 1 << 20  # bytes of one reply
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0
_KEY = re.compile(r"[\x21-\x7e]+")
T = TypeVar("T")


class ApiError(RuntimeError):
    """No usable reply; the text says why, without the key."""


class _Passing(Exception):
    """What another try may mend: no connection, a reset, 5xx."""


@dataclass(frozen=True)
class Api:
    """``retries``: how often a call is made again after 5xx or a lost connection. ``timeout_s``: of a call, retries and
    pauses included."""

    base_url: str
    model: str
    key: str | None = field(default=None, repr=False)
    timeout_s: float = 60.0
    retries: int = 3

    def __post_init__(self) -> None:
        """``ValueError``: no such URL, or a key that no header can hold (it is not shown)."""
        try:
            url = urlsplit(self.base_url)
            port_ok = url.port is None or url.port > 0
        except ValueError as error:
            raise ValueError(f"base_url: {error}") from error
        if url.scheme not in ("http", "https") or not url.hostname or not port_ok or url.query or url.fragment:
            raise ValueError(f"base_url must look like http://host:port/v1, not {self.base_url!r:.80}")
        if "@" in url.netloc:
            raise ValueError("base_url must not hold a user name or password; a key goes into api_key_env")
        if self.key is not None and not _KEY.fullmatch(self.key):
            raise ValueError("the API key must be printable ASCII without spaces")

    async def ask(
        self, path: str, body: Mapping[str, Any], read: Callable[[bytes], T], *, max_body: int = MAX_BODY
    ) -> T:
        """What ``read`` makes of the reply to ``body``; it raises ``ApiError`` for a reply that is not as promised.

        ``ApiError``: 4xx or a redirect (at once), 5xx or no connection (after ``retries``), no reply in ``timeout_s``,
        one of more than ``max_body`` bytes, or one that cannot be read.
        """
        last = "nothing was heard"
        try:
            async with asyncio.timeout(self.timeout_s), self._session() as session:
                for attempt in range(self.retries + 1):
                    if attempt:
                        await asyncio.sleep(min(FIRST_PAUSE_S * 2 ** (attempt - 1), LONGEST_PAUSE_S))
                    try:
                        return read(await self._post(session, path, body, max_body))
                    except _Passing as error:
                        last = self._safe(str(error))
        except TimeoutError as error:
            raise ApiError(f"{self.base_url}: no reply in {self.timeout_s:g} s ({last})") from error
        except ApiError as error:
            raise ApiError(f"{self.base_url}: {self._safe(str(error))}") from None
        raise ApiError(f"{self.base_url}: no reply in {self.retries + 1} tries, the last: {last}")

    def _session(self) -> aiohttp.ClientSession:
        """For one call: no proxies or passwords of the process's environment, no cookies kept, and nothing unpacked: a
        compressed reply could be small on the wire and endless in memory."""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        return aiohttp.ClientSession(
            headers=headers,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),  # the one deadline is `ask`'s
        )

    async def _post(self, session: aiohttp.ClientSession, path: str, body: Mapping[str, Any], max_body: int) -> bytes:
        url = f"{self.base_url.rstrip('/')}/{path}"
        data = json.dumps(body, allow_nan=False).encode()
        try:
            async with session.post(url, data=data, allow_redirects=False) as reply:
                found = await _bounded(reply, max_body)
        except aiohttp.InvalidURL as error:
            raise ApiError("the URL cannot be used") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Passing(f"{type(error).__name__}: {shortened(str(error))}") from error
        if reply.status >= 500:
            raise _Passing(f"status {reply.status}: {shown(found)}")
        if reply.status != 200:
            what = "a redirect, which is not followed" if 300 <= reply.status < 400 else shown(found)
            raise ApiError(f"status {reply.status}: {what}")
        return found

    def _safe(self, text: str) -> str:
        return text if self.key is None else text.replace(self.key, "<key>")


class ChatApi(Api):
    """Chat completions."""

    async def complete(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
        """The first choice's text. ``options`` go into the request (temperature, max_tokens, seed, ...). ``ApiError``
        as ``ask``."""
        body = {"model": self.model, "messages": list(messages), "stream": False, **options}
        return await self.ask("chat/completions", body, _text_of)


def key_in(file: str, *, name: str) -> str:
    """The API key that a file holds. ``ValueError`` with ``name``, the option that gave the file: it holds none."""
    if why := why_no_file(file):
        raise ValueError(f"{name}: {why}: {file}")
    with Path(file).open("rb") as content:
        key = content.read(MAX_KEY).decode("ascii", "replace").strip()
    if not key:
        raise ValueError(f"{name}: {file} is empty")
    return key


def read_json(body: bytes) -> Any:
    """``ApiError`` when it is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"a reply that is not JSON: {shown(body)}") from error


async def _bounded(reply: aiohttp.ClientResponse, limit: int) -> bytes:
    found = bytearray()
    async for part in reply.content.iter_any():
        found += part
        if len(found) > limit:
            raise ApiError(f"a reply of more than {limit} bytes")
    return bytes(found)


def _text_of(body: bytes) -> str:
    """``choices[0].message.content`` of a chat completion."""
    value = read_json(body)
    for step in ("choices", 0, "message", "content"):
        fits = isinstance(value, list) and len(value) > 0 if step == 0 else isinstance(value, dict) and step in value
        if not fits:
            raise ApiError(f"a reply without choices[0].message.content: {shown(body)}")
        value = value[step]
    if not isinstance(value, str):
        raise ApiError(f"a reply whose content is no text: {shown(body)}")
    return value


def shown(body: bytes) -> str:
    """A reply's beginning, in messages."""
    return shortened(ascii(body[:400].decode("utf-8", "replace").strip()), limit=200) if body else "an empty reply"
