"""The simulated user on a real SGLang server: what OpenAI's API promises, as SGLang keeps it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mdapo.config.schema import EnvironmentCfg
from mdapo.environments.base import Observation
from mdapo.environments.calling import Environments, load_environment
from mdapo.environments.chat_api import ApiError
from mdapo.rollout.sglang_server import Server
from mdapo.types import Message, Prompt

pytestmark = [pytest.mark.sglang, pytest.mark.model, pytest.mark.timeout(1200)]
PROMPT = Prompt(
    "p", 0, (Message("user", "My order has not come."),), extra={"persona": "Ann", "goal": "get the order's date"}
)
DIALOGUES = 4


@pytest.fixture
def key_file(server: Server, tmp_path: Path) -> Path:
    (tmp_path / "key").write_text(server.key)
    (tmp_path / "key").chmod(0o600)
    return tmp_path / "key"


def users(url: str, **args: Any) -> Environments:
    given = {"base_url": f"{url}/v1", "model": "default", "timeout_s": 300.0, "max_tokens": 12, **args}
    return load_environment(EnvironmentCfg(name="llm_user", args=given, timeout_s=300.0))


def test_users_of_many_dialogues_talk_at_the_same_time(server: Server, key_file: Path) -> None:
    made = users(server.url, api_key_file=str(key_file), temperature=0.0)

    async def main() -> list[list[Observation]]:
        calls = made.calls(EnvironmentCfg(timeout_s=300.0))

        async def talk(number: int) -> list[Observation]:
            env = made(PROMPT, seed=number)
            messages, heard = list(env.opening()), []
            for said in ("What is your order number?", "It comes on Monday."):
                messages.append(Message("assistant", said))
                shown = tuple(messages)
                answer: Any = await calls.call(lambda env=env, shown=shown: env.observe(shown))
                heard.append(answer)
                messages += answer.messages
            return heard

        found = await asyncio.gather(*(talk(i) for i in range(DIALOGUES)))
        calls.close()
        return found

    talks = asyncio.run(main())
    assert len(talks) == DIALOGUES
    for heard in talks:
        assert all(m.role == "user" and m.content for o in heard for m in o.messages)
        assert all(o.messages or o.end == "done" for o in heard)


def test_a_wrong_key_is_told_without_it(server: Server, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("sk-wrong-key")
    (tmp_path / "wrong").chmod(0o600)
    made = users(server.url, api_key_file=str(tmp_path / "wrong"), retries=5)
    env: Any = made(PROMPT, seed=0)
    with pytest.raises(ApiError, match="status 401") as caught:
        asyncio.run(env.observe((*env.opening(), Message("assistant", "Hello."))))
    assert "sk-wrong-key" not in str(caught.value)
