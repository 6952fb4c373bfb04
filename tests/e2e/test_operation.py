"""What operators meet: environments that hang, storage that cannot be written, odd locales and variables."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from tiny_run import Command, Material, mdapo, wait_for


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def mapped(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return ""


def listening(command: Command) -> set[str]:
    """The addresses at which its processes wait for others."""
    found = (connection for p in command.family for connection in p.net_connections())
    return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}


pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize("where", ["opening", "observe"])
def test_a_signal_ends_a_run_whose_environment_hangs(material: Material, tmp_path: Path, where: str) -> None:
    plugin = {"name": f"{Path(__file__).with_name('plugin.py')}:Hangs", "args": {"where": where}}
    noticed, temporary = tmp_path / "noticed", tmp_path / "temporary"
    temporary.mkdir()
    keys = (f"run.dir={tmp_path}", f"environment={json.dumps(plugin)}", "parallel.data=2")
    running = Command("train", str(material.config), *keys, SLOW=str(noticed), TMPDIR=str(temporary))
    wait_for(noticed.exists)
    assert listening(running) == {"127.0.0.1"}, "torch's store and gloo ask nobody who he is"
    running.process.send_signal(signal.SIGTERM)
    done = running.wait(deadline_s=60.0)
    assert done.code == 75 and "stopped on a signal; the same command resumes" in done.err, (done.out, done.err)
    assert "Traceback" not in done.err
    assert not list(temporary.glob("*")), "neither torchrun nor mdapo leaves anything"


@pytest.mark.parametrize("who", ["launcher", "torchrun", "rank"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_during_start_up_is_told_as_one(
    material: Material, tmp_path: Path, who: str, signum: signal.Signals
) -> None:
    """While the process imports torch, which takes seconds."""
    running = Command("train", str(material.config), f"run.dir={tmp_path}")

    def begun() -> list[psutil.Process]:
        lines = {p: command_line(p) for p in running.family}
        torchruns = [p for p, line in lines.items() if "mdapo.trainer.torchrun" in line]
        ranks = [p for p, line in lines.items() if "mdapo.trainer" in line and p not in torchruns]
        return [p for p in (ranks if who == "rank" else torchruns) if "libtorch" in mapped(p)]

    wait_for(begun)
    (running.process if who == "launcher" else begun()[-1]).send_signal(signum)
    done = running.wait(deadline_s=100.0)
    assert done.code == 75, (done.out, done.err)
    assert done.err == "mdapo: stopped on a signal; the same command resumes\n", done.err


@pytest.mark.parametrize("command", ["train", "eval"])
@pytest.mark.parametrize(
    ("run_dir", "code", "says"),
    [("/dev/null/runs", 2, "cannot be used as run folder"), ("/proc/runs", 2, "cannot be used as run folder")],
)
def test_a_run_folder_that_cannot_be_is_told_alike(
    material: Material, command: str, run_dir: str, code: int, says: str
) -> None:
    done = mdapo(command, str(material.config), f"run.dir={run_dir}")
    assert done.code == code and says in done.err and "Traceback" not in done.err, done.err


def test_letters_that_the_locale_lacks_end_nothing(material: Material, tmp_path: Path) -> None:
    """Configuration and data are UTF-8 wherever; what cannot be shown is escaped."""
    row = {"prompt": [{"role": "user", "content": "Größe é 例?"}], "uid": "größe"}
    data, config = tmp_path / "data.jsonl", tmp_path / "größe.yaml"
    data.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    config.write_text(f"# größe\nbase: {material.config}\ndata: {{val_files: ['{data}']}}\n", encoding="utf-8")
    bare = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii:strict"}
    done = mdapo("check", str(config), f"data.train_files=['{data}']", **bare)
    assert done.code == 0 and "one conversation: größe" in done.out, (done.out[-2000:], done.err)
    done = mdapo("check", str(config), 'data.val_files=["/gr\\u00f6\\u00dfe.jsonl"]', **bare)
    assert done.code == 2 and "cannot be written in this locale (ascii)" in done.out, (done.out[-2000:], done.err)
    done = mdapo("eval", str(config), f"run.dir={tmp_path}", **bare)
    assert done.code == 0, (done.out[-2000:], done.err)
    told = (tmp_path / "run" / "eval" / "episodes" / "eval_000000.txt").read_text(encoding="utf-8")
    assert "Größe é 例?" in told


def test_steps_without_a_checkpoint_are_kept_aside_and_the_run_begins_again(material: Material, tmp_path: Path) -> None:
    command = ("train", str(material.config), f"run.dir={tmp_path}", "run.eval_before=false", "run.eval_after=false")
    command = (*command, "run.total_steps=2")
    done = mdapo(*command, SABOTAGE="killed-before-commit:1")
    assert done.code == 75, done.err
    first = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    done = mdapo(*command)
    assert done.code == 0 and f"no checkpoint to go on from; it is kept as {tmp_path}/run.1" in done.out, done.out
    assert first.count(b"\n") == 1 and (tmp_path / "run.1" / "metrics.jsonl").read_bytes() == first

    whole = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*.jsonl")}
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    done = mdapo(*command, "run.total_steps=1")
    assert done.code == 0 and "(metrics.jsonl, summary.json, hf) and no checkpoint" in done.out, done.out
    assert {tmp_path / "run" / f.relative_to(tmp_path / "run.2"): f.read_bytes() for f in kept(tmp_path)} == whole

    (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "unmounted")
    done = mdapo("eval", *command[1:3])
    assert done.code == 2 and "checkpoints: is no folder" in done.err and "Traceback" not in done.err, done.err


def kept(folder: Path) -> list[Path]:
    return list((folder / "run.2").rglob("*.jsonl"))


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_number_of_threads_that_is_none_is_refused(material: Material, command: str) -> None:
    done = mdapo(command, str(material.config), OMP_NUM_THREADS="abc")
    assert (done.code, done.err.count("\n")) == (2, 1) and "OMP_NUM_THREADS=abc" in done.err, done.err
