"""What csrc/compile.py builds where, and that it builds again what has changed and nothing else."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def building() -> ModuleType:
    spec = importlib.util.spec_from_file_location("csrc_compile", ROOT / "csrc" / "compile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def everything(building: ModuleType) -> object:
    return building.Tools(
        cxx="g++",
        nvcc="nvcc",
        torch=Path("torch"),
        torch_version="2.11",
        torch_cuda=True,
        ascend=Path("cann"),
        soc="Ascend910B3",
        bisheng="bisheng",
        torch_npu=Path("torch_npu"),
    )


@pytest.mark.parametrize(("mode", "lacks", "expected"), [
    ("auto", {}, ["cpu", "cuda", "npu"]),
    ("auto", {"nvcc": "", "soc": ""}, ["cpu"]),
    ("auto", {"torch_cuda": False, "ascend": None}, ["cpu"]),
    ("none", {"cxx": ""}, []),
    ("cpu", {}, ["cpu"]),
    ("cuda", {}, ["cpu", "cuda"]),
    ("npu", {"nvcc": ""}, ["cpu", "npu"]),
])  # fmt: skip
def test_what_can_be_built_is_built(
    building: ModuleType, everything: object, mode: str, lacks: dict[str, object], expected: list[str]
) -> None:
    assert building.choose(mode, replace(everything, **lacks)) == expected  # type: ignore[type-var]


@pytest.mark.parametrize(("mode", "lacks", "why"), [
    ("cuda", {"torch_cuda": False}, "torch 2.11 is no CUDA build"),
    ("cuda", {"nvcc": ""}, "no nvcc"),
    ("npu", {"soc": ""}, "SOC_VERSION"),
    ("npu", {"soc": "Ascend310P3"}, "SOC_VERSION=Ascend310P3: kernels are for Ascend910B and Ascend910_93"),
    ("npu", {"bisheng": ""}, "no bisheng"),
    ("npu", {"torch_npu": None}, "no torch_npu"),
    ("cpu", {"torch": None}, "no torch"),
    ("auto", {"cxx": ""}, "no C[+][+] compiler"),
    ("gpu", {}, "use one of auto, none, cpu, cuda, npu"),
])  # fmt: skip
def test_what_was_asked_for_and_cannot_be_had_is_said(
    building: ModuleType, everything: object, mode: str, lacks: dict[str, object], why: str
) -> None:
    with pytest.raises(building.BuildError, match=why):
        building.choose(mode, replace(everything, **lacks))  # type: ignore[type-var]


def test_without_a_compiler_one_line_is_said(
    building: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert building.build_all("auto", native=tmp_path) == []
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "no native ops" in said[0] and "no C++ compiler" in said[0]


def test_no_native_ops_are_wanted_and_none_are_left(building: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "mdapo_cpu.so").write_bytes(b"of an earlier build")
    assert building.build_all("none", native=tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error", [OSError(30, "Read-only file system"), "g++ -c a.cpp\na.cpp:1: error: no C++\n 1 |\n"]
)
def test_what_fails_is_said_in_one_line_unless_it_was_asked_for(
    building: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    error: OSError | str,
) -> None:
    def fail(*_: object, **__: object) -> bool:
        raise building.BuildError(error) if isinstance(error, str) else error

    monkeypatch.setattr(building, "choose", lambda mode, tools: ["cpu"])
    monkeypatch.setattr(building, "build", fail)
    assert building.build_all("auto", native=tmp_path) == []
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and ("a.cpp:1: error: no C++" in said[0] or "Read-only" in said[0])
    with pytest.raises(building.BuildError):
        building.build_all("cpu", native=tmp_path)


@pytest.mark.parametrize(("variable", "value"), [("CXX", "no-such-compiler"), ("NVCC", "/no/nvcc"), ("MAX_JOBS", "0")])
def test_a_variable_that_means_nothing_is_named(
    building: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(building.BuildError, match=f"{variable}={value}"):
        building.find_tools()
        building._jobs()


def test_only_what_changed_is_compiled_again(
    building: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Found by its folder, again after its header changed, and gone after a source that does not compile."""
    tools = building.find_tools()
    if not tools.cxx or tools.torch is None:
        pytest.skip("no compiler or no torch")
    monkeypatch.setattr(building, "CSRC", tmp_path / "csrc")
    op = tmp_path / "csrc" / "demo"
    op.mkdir(parents=True)
    (op / "demo.h").write_text("inline int one() { return 1; }\n")
    (op / "demo_cpu.cpp").write_text('#include "demo/demo.h"\nint demo() { return one(); }\n')
    (op / "other_cpu.cpp").write_text("int other() { return 2; }\n")
    target, objects = tmp_path / "mdapo_cpu.so", tmp_path / "objects"
    assert building.build("cpu", tools, target=target, objects=objects)
    assert not building.build("cpu", tools, target=target, objects=objects)
    whole = target.read_bytes()
    target.write_bytes(whole[:1000])
    assert building.build("cpu", tools, target=target, objects=objects), "a damaged library is made again"
    assert target.read_bytes() == whole
    (op / "demo.h").write_text("inline int one() { return 3; }\n")
    made = building.compile_objects("cpu", tools, objects=objects)
    assert {path.name: new for path, new in made.items()} == {"demo_cpu.cpp.o": True, "other_cpu.cpp.o": False}
    (op / "demo.h").write_text("no C++\n")
    with pytest.raises(building.BuildError, match=r"demo\.h"):
        building.build("cpu", tools, target=target, objects=objects)
    assert not target.exists()


def test_ascend_kernels_go_to_their_own_compiler(building: ModuleType, everything: object) -> None:
    kernel, host = (building.CSRC / "pack" / f"pack_ascend_{part}.cpp" for part in ("kernel", "host"))
    assert set(building.sources("npu")) >= {kernel, host}
    command = building.compile_command(kernel, "kernel.o", everything)
    assert command[:3] == ["bisheng", "-x", "asc"] and "--npu-arch=dav-2201" in command
    command = building.compile_command(host, "host.o", everything)
    assert command[0] == "g++" and {"torch_npu/include", "cann/include"} <= set(command)
