"""What operators meet: environments that hang, storage that cannot be written, odd locales and variables."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tiny_run import Command, Material, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize("where", ["opening", "observe"])
def test_a_signal_ends_a_run_whose_environment_hangs(material: Material, tmp_path: Path, where: str) -> None:
    plugin = {"name": f"{Path(__file__).with_name('plugin.py')}:Hangs", "args": {"where": where}}
    noticed = tmp_path / "noticed"
    command = ("train", str(material.config), f"run.dir={tmp_path}", f"environment={json.dumps(plugin)}")
    running = Command(*command, SLOW=str(noticed))
    wait_for(noticed.exists)
    running.process.send_signal(signal.SIGTERM)
    done = running.wait(deadline_s=60.0)
    assert done.code == 75 and "stopped on a signal; the same command resumes" in done.err, (done.out, done.err)
    assert "Traceback" not in done.err
