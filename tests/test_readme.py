"""What the README promises in code and tables is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from mdapo import errors, plugins
from mdapo.config.schema import RewardCfg
from mdapo.types import Message, Prompt

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return found


def test_the_custom_reward_loads_and_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_reward.py").write_text(block("python"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    reward = RewardCfg.model_validate(yaml.safe_load(block("yaml"))["reward"])
    (part,) = reward.functions
    polite = plugins.load(part.name, builtin={}, required=("messages", "prompt", "end"), args=part.args)
    prompt = Prompt(uid="p", row=0, messages=(Message("user", "Where is my parcel?"),))
    answers = {"I apologise for that.": 0.98, "No idea.": -0.02}
    for text, score in answers.items():
        found = polite(messages=(*prompt.messages, Message("assistant", text)), prompt=prompt, end="done", **part.args)
        assert found["score"] == pytest.approx(score)


def test_the_exit_codes_are_those_of_the_code() -> None:
    table = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    assert table == {0, *(value for name, value in vars(errors).items() if name.startswith("EXIT_"))}


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_files_that_documents_name_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = re.findall(r"`((?:scripts|configs|mdapo|tests|benchmarks|\.ci)/[\w./-]*)`", text)
    named += re.findall(r"\]\(([\w./-]+)\)", text)
    missing = sorted({name for name in named if not (ROOT / name).exists()})
    assert not missing, f"{document} names {missing}"
