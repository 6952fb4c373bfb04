"""HTTP to one SGLang server: every call has a deadline for its whole answer, a size limit, and a checked reply.

No redirect is followed, no compressed body unpacked, no proxy of the environment asked. The key travels in a header
and appears in no message.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from mdapo.errors import UserError, shortened
from mdapo.rollout.engine import Completion, SamplingParams
from mdapo.rollout.sglang_replies import (
    Asked,
    BadReply,
    NothingListens,
    Refused,
    Unavailable,
    parse_json,
    read_completion,
)

MIB = 1 << 20
MAX_BODY = 16 * MIB
COMPLETION_BODY, TOKEN_BODY = MIB, 1024  # of a completion, and of each of its tokens: id, log-prob, text
CONTROL_S = 30.0  # what is neither tokens nor weights
# Less than the 5 s after which SGLang closes an idle connection: none is used that is about to close.
KEEP_ALIVE_S = 2.0
OPTIONS = "/server_info"  # with the key among them
SECRET = 16  # characters from which on a key is not found in an answer by chance
SEED_MASK = (1 << 63) - 1  # the server keeps seeds as int64
_URL = re.compile(r"https?://[^/@?#\s]+")


def open_session() -> aiohttp.ClientSession:
    """One pool of connections for all servers, to be opened and closed in the running event loop. The clients bound
    what is open, and time."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )


@dataclass(frozen=True)
class ServerInfo:
    """What a server says of itself. ``deterministic``: it honours the seeds of requests."""

    started_from: str  # its model's folder; weights that came later do not change it
    architectures: tuple[str, ...]
    version: str  # of its weights: ours are numbers, a new server says "default"
    max_context: int  # tokens of prompt and turn that it can take whatever their shares
    deterministic: bool


class Client:
    """One server. ``url`` is ``http://host:port``, ``key`` its API key ("" for none); ``max_in_flight`` requests for
    tokens are open at a time. ``UserError``: an URL or a key that cannot be one."""

    def __init__(
        self, url: str, key: str, *, session: aiohttp.ClientSession, vocab_size: int, max_in_flight: int = 256
    ) -> None:
        self.url = url.rstrip("/")
        if not _URL.fullmatch(self.url):
            raise UserError(f"a server's URL looks like http://host:port, not {shortened(repr(url))}")
        if not key.isascii() or not key.isprintable() or " " in key:
            raise UserError(f"{self.url}: the API key has characters that no header can carry")
        self.vocab_size, self.max_in_flight = vocab_size, max_in_flight
        self._key, self._session = key, session
        self.sent: set[str] = set()  # the rids that the server may know
        self._places = asyncio.Semaphore(max_in_flight)
        self._headers = {"Accept-Encoding": "identity"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def __repr__(self) -> str:
        return f"Client({self.url})"

    # ---- tokens ----------------------------------------------------------------------------------------------------

    async def generate(
        self, ids: Sequence[int], params: SamplingParams, *, rid: str, seed: int, version: int, deadline_s: float
    ) -> Completion:
        """One turn by weights of ``version``, whole within ``deadline_s``. ``rid`` is what ``abort`` takes; none may
        begin with another. Raises ``Unavailable``, ``BadReply`` (``WrongVersion``) or ``Refused``.

        ``seed`` decides the tokens on a server with ``--enable-deterministic-inference``; others ignore it.
        """
        sampling: dict[str, Any] = {
            "max_new_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "stop_token_ids": list(params.stop_ids),
            "ignore_eos": params.ignore_eos,
            "sampling_seed": seed & SEED_MASK,
        }
        body = {"rid": rid, "input_ids": list(ids), "sampling_params": sampling, "return_logprob": True}
        limit = COMPLETION_BODY + TOKEN_BODY * params.max_new_tokens
        try:
            async with asyncio.timeout(deadline_s), self._places:  # the wait for a free place counts
                self.sent.add(rid)
                answer = await self._json("POST", "/generate", body, deadline_s=deadline_s, max_body=limit)
        except TimeoutError:
            raise Unavailable(f"{self.url}/generate: no whole answer within {deadline_s:g} s") from None
        finally:
            self.sent.discard(rid)
        with self._naming("/generate"):
            return read_completion(answer, Asked(rid, len(ids), params, version, self.vocab_size))

    async def abort(self, rid: str | None, *, deadline_s: float = CONTROL_S) -> None:
        """Ask for the end of one request, or of all (also those of others). It is known to have ended when its
        ``generate`` returns; a request that has not arrived yet is not found, and none is an error."""
        body = {"abort_all": True} if rid is None else {"rid": rid}
        await self._ok("POST", "/abort_request", body, deadline_s=deadline_s)

    async def check_logprobs(self, *, deadline_s: float = CONTROL_S) -> None:
        """``Refused`` when the server's log-probs are not those at the request's temperature: the difference between
        two tokens' must halve from temperature 1 to temperature 2."""
        at_1, at_2 = [await self._two_logprobs(t, deadline_s=deadline_s) for t in (1.0, 2.0)]
        spread_1, spread_2 = at_1[0] - at_1[1], at_2[0] - at_2[1]
        if abs(spread_1 - 2.0 * spread_2) > 0.1 * abs(spread_1) + 0.05:
            raise Refused(
                f"{self.url}: its log-probs are not those at the temperature of the request; start it without "
                "SGLANG_RETURN_ORIGINAL_LOGPROB"
            )

    async def _two_logprobs(self, temperature: float, *, deadline_s: float) -> tuple[float, float]:
        """The log-probs of ids 0 and 1 after the prompt [0]."""
        sampling = {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True}
        body = {
            "input_ids": [0],
            "sampling_params": sampling,
            "return_logprob": True,
            "token_ids_logprob": [0, 1],
        }
        answer = await self._json("POST", "/generate", body, deadline_s=deadline_s)
        try:
            first, second = answer["meta_info"]["output_token_ids_logprobs"][0]
            found = float(first[0]), float(second[0])
        except (KeyError, IndexError, TypeError, ValueError):
            raise BadReply(f"{self.url}/generate: no log-probs of given ids") from None
        if not all(map(math.isfinite, found)):
            raise BadReply(f"{self.url}/generate: a log-prob is not finite")
        return found

    # ---- control ---------------------------------------------------------------------------------------------------

    async def health(self, *, deadline_s: float = CONTROL_S) -> None:
        """The server makes a token, or is making some: the answer takes a second. Raises where it does not."""
        await self._ok("GET", "/health", None, deadline_s=deadline_s)

    async def version(self, *, deadline_s: float = CONTROL_S) -> str:
        """Of its weights. Answered at once, also by a server that makes no tokens."""
        answer = await self._json("GET", "/model_info", None, deadline_s=deadline_s)
        if not isinstance(answer, dict) or not isinstance(answer.get("weight_version"), str):
            raise BadReply(f"{self.url}/model_info: no weight_version")
        return answer["weight_version"]

    async def info(self, *, deadline_s: float = CONTROL_S) -> ServerInfo:
        model = await self._json("GET", "/model_info", None, deadline_s=deadline_s)
        server = await self._json("GET", OPTIONS, None, deadline_s=deadline_s)
        try:
            return ServerInfo(
                started_from=str(server["model_path"]),
                architectures=tuple(map(str, model["architectures"] or ())),
                version=str(model["weight_version"]),
                max_context=int(server["max_req_input_len"]),
                deterministic=bool(server["enable_deterministic_inference"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadReply(f"{self.url}: /model_info or /server_info lacks a field: {error}") from None

    async def running(self, *, deadline_s: float = CONTROL_S) -> int:
        """Requests that the server has, running or waiting, whoever sent them."""
        answer = await self._json("GET", "/v1/loads?include=core", None, deadline_s=deadline_s)
        try:
            return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in answer["loads"])
        except (KeyError, TypeError, ValueError):
            raise BadReply(f"{self.url}/v1/loads: no request counts") from None

    async def flush_cache(self, *, deadline_s: float = CONTROL_S) -> None:
        """Forget all prefixes. ``Refused`` while requests run."""
        await self._ok("POST", "/flush_cache", None, deadline_s=deadline_s)

    async def post(self, path: str, body: Any, *, deadline_s: float) -> Any:
        """POST JSON, get JSON (null for an empty body). Raises as ``generate`` does."""
        return await self._json("POST", path, body, deadline_s=deadline_s)

    # ---- one exchange ----------------------------------------------------------------------------------------------

    async def _ok(self, method: str, path: str, body: Any, *, deadline_s: float) -> None:
        await self._exchange(method, path, body, deadline_s=deadline_s, max_body=MAX_BODY)

    async def _json(self, method: str, path: str, body: Any, *, deadline_s: float, max_body: int = MAX_BODY) -> Any:
        kind, raw = await self._exchange(method, path, body, deadline_s=deadline_s, max_body=max_body)
        if not raw:
            return None
        if path != OPTIONS and len(self._key) >= SECRET and self._key.encode() in raw:  # which could get into a text
            raise BadReply(f"{self.url}{path}: an answer with the API key in it, which is not used")
        if kind != "application/json":
            raise BadReply(f"{self.url}{path}: {shortened(self._clean(kind), limit=40)!r} instead of JSON")
        with self._naming(path):
            return parse_json(raw)

    async def _exchange(
        self, method: str, path: str, body: Any, *, deadline_s: float, max_body: int
    ) -> tuple[str, bytes]:
        """Content type and body of an answer 200."""
        where = f"{self.url}{path}"
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        headers = self._headers if data is None else {**self._headers, "Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._session.request(method, where, data=data, headers=headers, allow_redirects=False) as response,
            ):
                try:
                    raw = await _read(response, max_body, where)
                except BaseException:
                    response.close()  # the rest is not waited for
                    raise
                status, kind = response.status, response.content_type
        except TimeoutError:
            raise Unavailable(f"{where}: no whole answer within {deadline_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            raise (NothingListens if refused else Unavailable)(f"{where}: {self._clean(str(error))}") from None
        except (aiohttp.ClientError, OSError) as error:
            text = f"{type(error).__name__} {error}"
            raise Unavailable(f"{where}: {shortened(self._clean(text))}") from None
        if status != 200:
            raise self._failure(where, status, raw)
        return kind, raw

    def _failure(self, where: str, status: int, raw: bytes) -> Unavailable | BadReply | Refused:
        without_key = raw.replace(self._key.encode(), b"***") if self._key else raw  # before it is cut
        said = f"{where}: {status} {shortened(self._clean(without_key[:1000].decode('utf-8', 'replace')))}"
        if status >= 500:
            return Unavailable(said)
        if status >= 400:
            return Refused(f"{said}{' (is this the key of that server?)' if status in (401, 403) else ''}")
        return Refused(f"{where}: {status}, a redirect; none is followed") if status >= 300 else BadReply(said)

    def _clean(self, text: str) -> str:
        """One printable line, without the key, whoever put it there."""
        text = text.replace(self._key, "***") if self._key else text
        return "".join(c if c.isprintable() else " " for c in text).strip()

    def _naming(self, path: str) -> _Naming:
        return _Naming(f"{self.url}{path}")


class _Naming:
    """Puts the address before what a check of its answer says."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BadReply | Refused):
            raise type(error)(f"{self.where}: {error}") from None


async def _read(response: aiohttp.ClientResponse, limit: int, where: str) -> bytes:
    """The body. ``BadReply`` as soon as it is, or says that it will be, longer than ``limit`` bytes, or is packed."""
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise BadReply(f"{where}: a packed body, which was not asked for")
    if (response.content_length or 0) > limit:
        raise BadReply(f"{where}: {response.content_length} bytes announced, at most {limit} make sense")
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > limit:
            raise BadReply(f"{where}: more than the {limit} bytes that make sense")
        parts.append(part)
    return b"".join(parts)
