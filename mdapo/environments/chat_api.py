"""One chat completion from an OpenAI-compatible endpoint: a deadline, capped retries, a checked reply, no redirects.

What comes back is others' words, and perhaps hostile: its size is bounded while it is read, its shape is checked, and
the key, which a server may echo, is in no message.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from mdapo.errors import shortened

MAX_BODY = 1 << 20  # bytes of one reply
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0
WAIT = (408, 429)  # too slow, too many calls: what a busy endpoint answers
_KEY = re.compile(r"[\x21-\x7e]+")


class ApiError(RuntimeError):
    """No usable reply; the text says why, without the key."""


class _Passing(Exception):
    """What another try may mend: no connection, a reset, 5xx, too many calls. ``after_s``: not before."""

    def __init__(self, text: str, *, after_s: float = 0.0) -> None:
        super().__init__(text)
        self.after_s = after_s


@dataclass(frozen=True)
class ChatApi:
    """``retries``: how often a call is made again after 5xx, a lost connection, or 408 and 429 (not before the
    endpoint's ``Retry-After``). ``timeout_s``: of a call, retries and pauses included."""

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

    async def complete(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
        """The first choice's text. ``options`` go into the request (temperature, max_tokens, seed, ...).

        ``ApiError``: another 4xx or a redirect (at once), what may pass (after ``retries``), no reply in ``timeout_s``,
        or one that is not what the API promises.
        """
        body = {"model": self.model, "messages": list(messages), "stream": False, **options}
        last, after_s = "nothing was heard", 0.0
        try:
            async with asyncio.timeout(self.timeout_s), self._session() as session:
                for attempt in range(self.retries + 1):
                    if attempt:
                        pause_s = min(FIRST_PAUSE_S * 2 ** (attempt - 1), LONGEST_PAUSE_S)
                        await asyncio.sleep(max(pause_s, after_s))
                    try:
                        return self._text_of(await self._post(session, body))
                    except _Passing as error:
                        last, after_s = self._safe(str(error)), error.after_s
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
            timeout=aiohttp.ClientTimeout(total=None),  # the one deadline is `complete`'s
        )

    async def _post(self, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> bytes:
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        data = json.dumps(body, allow_nan=False).encode()
        try:
            async with session.post(url, data=data, allow_redirects=False) as reply:
                found = await _bounded(reply)
        except aiohttp.InvalidURL as error:
            raise ApiError("the URL cannot be used") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Passing(f"{type(error).__name__}: {shortened(self._safe(str(error)))}") from error
        if reply.status >= 500 or reply.status in WAIT:
            said = f"status {reply.status}: {self._shown(found)}"
            raise _Passing(said, after_s=_seconds(reply.headers.get("Retry-After", "")))
        if reply.status != 200:
            what = "a redirect, which is not followed" if 300 <= reply.status < 400 else self._shown(found)
            raise ApiError(f"status {reply.status}: {what}")
        return found

    def _safe(self, text: str) -> str:
        return text if self.key is None else text.replace(self.key, "<key>")

    def _shown(self, body: bytes) -> str:
        """Of a reply, for people. The key goes before it is cut: half of one is none to a search."""
        text = self._safe(body.decode("utf-8", "replace"))
        return shortened(ascii(text[:400].strip()), limit=200) if body else "an empty reply"

    def _text_of(self, body: bytes) -> str:
        """``choices[0].message.content`` of a chat completion."""
        try:
            reply = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(f"a reply that is not JSON: {self._shown(body)}") from error
        value: Any = reply
        for step in ("choices", 0, "message", "content"):
            fits = (
                isinstance(value, list) and len(value) > 0 if step == 0 else isinstance(value, dict) and step in value
            )
            if not fits:
                raise ApiError(f"a reply without choices[0].message.content: {self._shown(body)}")
            value = value[step]
        if not isinstance(value, str):
            raise ApiError(f"a reply whose content is no text: {self._shown(body)}")
        return self._safe(value)


async def _bounded(reply: aiohttp.ClientResponse) -> bytes:
    found = bytearray()
    async for part in reply.content.iter_any():
        found += part
        if len(found) > MAX_BODY:
            raise ApiError(f"a reply of more than {MAX_BODY} bytes")
    return bytes(found)


def _seconds(text: str) -> float:
    """Of a ``Retry-After`` header; 0 for a date, or what is none."""
    return float(text) if re.fullmatch(r"\d{1,6}", text.strip()) else 0.0
