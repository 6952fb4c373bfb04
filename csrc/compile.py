"""Compiles csrc/<op>/<op>_<backend>* into mdapo/_native/mdapo_<backend>.so, one library a backend, what changed only.

    python csrc/compile.py                          what this machine can build
    MDAPO_BUILD=cuda python csrc/compile.py         cpu and cuda, an error when that cannot be
    MDAPO_CUDA_ARCHS="90a" MDAPO_BUILD=cuda ...     for these GPUs only (default 80 90a 100, and PTX for others)
    python csrc/compile.py objects cuda             its object files only: a check, also under a torch without CUDA

``MDAPO_BUILD``: ``auto`` (the default: cpu with a compiler and torch, cuda with nvcc and a CUDA build of torch, npu
with ``ASCEND_HOME_PATH``, ``SOC_VERSION``, bisheng and torch_npu), ``none``, ``cpu``, ``cuda``, ``npu``. setup.py goes
through here too.
Standard library only; torch's files are looked up, not imported; nothing is run to find hardware, nothing downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib import util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC, OBJECTS, NATIVE = ROOT / "csrc", ROOT / "build" / "csrc", ROOT / "mdapo" / "_native"
MODES = ("auto", "none", "cpu", "cuda", "npu")
# Not contracted: where x * t - m is one rounding and m = x * t another, the largest logit is not its own maximum.
CXX_FLAGS = ["-O3", "-ffp-contract=off", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wextra"]
# torch's stable ABI as of 2.10: one library serves every later torch.
STABLE_FLAGS = ["-std=c++17", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
# torch_npu's headers take in those of torch that the stable ABI forbids: its library is for one torch and torch_npu.
ASCEND_FLAGS = ["-std=c++20"]
NVCC_FLAGS = ["-O3", "-fmad=false", "-std=c++17", "--expt-relaxed-constexpr"]
NVCC_FLAGS += ["-Xcompiler", "-fPIC,-Wall,-Wextra", "-Xptxas", "-v"]
CUDA_ARCHS = "80 90a 100"
BISHENG_FLAGS = ["-x", "asc", "-O3", "-std=c++17", "-fPIC"]
# SOC_VERSION begins with -> its architecture: Atlas A2 and A3 are one.
NPU_ARCHS = {"Ascend910B": "dav-2201", "Ascend910_93": "dav-2201"}
SOURCES = {
    "cpu": ["*_cpu.cpp"],
    "cuda": ["*_cuda.cu", "*_cuda_bind.cpp"],
    "npu": ["*_ascend_host.cpp", "*_ascend_kernel.cpp"],
}


class BuildError(Exception):
    """Why a library cannot be had: for people, without a traceback. ``gist``: the one line of it."""

    @property
    def gist(self) -> str:
        lines = str(self).splitlines() or [""]
        return next((line.strip() for line in lines if "error" in line.lower()), lines[0])[:300]


@dataclass(frozen=True)
class Tools:
    """Where compilers and torch are; empty or None what this machine has not."""

    cxx: str
    nvcc: str
    torch: Path | None
    torch_version: str
    torch_cuda: bool
    ascend: Path | None
    soc: str
    bisheng: str = ""
    torch_npu: Path | None = None


def find_tools(environ: Mapping[str, str] = os.environ) -> Tools:
    torch = _package("torch")
    text = (torch / "version.py").read_text() if torch and (torch / "version.py").exists() else ""
    version = re.search(r"^__version__ = '(.+)'", text, re.M)
    home = environ.get("CUDA_HOME", "/usr/local/cuda")
    ascend = environ.get("ASCEND_HOME_PATH")
    return Tools(
        cxx=_named("CXX", environ) or _which("g++", "c++", "clang++"),
        nvcc=_named("NVCC", environ) or _which(f"{home}/bin/nvcc", "nvcc"),
        torch=torch,
        torch_version=version[1] if version else "",
        torch_cuda=re.search(r"^cuda[^=]*= '", text, re.M) is not None,
        ascend=Path(ascend) if ascend else None,
        soc=environ.get("SOC_VERSION", ""),
        bisheng=_which("bisheng", f"{ascend}/bin/bisheng", f"{ascend}/compiler/ccec_compiler/bin/bisheng"),
        torch_npu=_package("torch_npu"),
    )


def _named(variable: str, environ: Mapping[str, str]) -> str:
    """The program that a variable names, "" where it is not set. ``BuildError``: there is none of that name."""
    name = environ.get(variable, "")
    if name and not _which(name):
        raise BuildError(f"{variable}={name}: no such program")
    return _which(name)


def _package(name: str) -> Path | None:
    """Where an installed package lies; it is not imported."""
    spec = util.find_spec(name)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def choose(mode: str, tools: Tools) -> list[str]:
    """The backends to build. Raises ``BuildError`` where ``mode`` asks for what cannot be had."""
    if mode not in MODES:
        raise BuildError(f"MDAPO_BUILD={mode}: use one of {', '.join(MODES)}")
    if mode == "none":
        return []
    wanted = ["cpu", "cuda", "npu"] if mode == "auto" else list(dict.fromkeys(["cpu", mode]))
    lacking = {backend: _lacking(backend, tools) for backend in wanted}
    if mode != "auto" and (missing := next(filter(None, lacking.values()), "")):
        raise BuildError(f"MDAPO_BUILD={mode}: {missing}")
    if lacking["cpu"]:
        raise BuildError(lacking["cpu"])
    return [backend for backend in wanted if not lacking[backend]]


def sources(backend: str) -> list[Path]:
    """A new op is found by its folder."""
    return sorted(path for pattern in SOURCES[backend] for path in CSRC.glob(f"*/{pattern}"))


def build(backend: str, tools: Tools, *, target: Path | None = None, objects: Path = OBJECTS) -> bool:
    """Make the backend's library; False when it was up to date. Raises ``BuildError`` with the compiler's words."""
    target = target or NATIVE / f"mdapo_{backend}.so"
    if not sources(backend):
        target.unlink(missing_ok=True)
        return False
    try:
        made = compile_objects(backend, tools, objects=objects)
    except BuildError:
        target.unlink(missing_ok=True)  # rather none than one of other sources
        raise
    files = [str(path) for path in made]
    linker = tools.bisheng if backend == "npu" else tools.cxx
    command = [linker, "-shared", "-o", str(target), *files, *_libraries(backend, tools)]
    record = objects / backend / "link.cmd"
    known = target.exists() and record.exists() and record.read_text() == _text(command, tools) + _digest(target)
    if known and not any(made.values()):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    _replace(target, lambda path: _call([path if c == str(target) else c for c in command]))
    record.write_text(_text(command, tools) + _digest(target))
    return True


def _digest(library: Path) -> str:
    """Of what was linked: one that was cut short or overwritten is made again."""
    return f"{sha256(library.read_bytes()).hexdigest()}\n"


def compile_objects(backend: str, tools: Tools, *, objects: Path = OBJECTS) -> dict[Path, bool]:
    """Object file -> whether it was made now. Raises ``BuildError`` with the compiler's words."""
    folder = objects / backend
    folder.mkdir(parents=True, exist_ok=True)
    files = sources(backend)
    with ThreadPoolExecutor(_jobs()) as pool:
        made = list(pool.map(partial(_compile, folder=folder, tools=tools), files))
    return dict(zip((_object(folder, f) for f in files), made, strict=True))


def _jobs() -> int:
    text = os.environ.get("MAX_JOBS", str(min(4, os.cpu_count() or 1)))
    if not text.isdecimal() or int(text) < 1:
        raise BuildError(f"MAX_JOBS={text}: must be a whole number from 1 on")
    return int(text)


def compile_command(source: Path, output: str, tools: Tools) -> list[str]:
    if source.suffix == ".cu":
        return [tools.nvcc, *NVCC_FLAGS, *arch_flags(), f"-I{CSRC}", "-c", str(source), "-o", output]
    if source.stem.endswith("_ascend_kernel"):
        flags = [*BISHENG_FLAGS, f"--npu-arch={npu_arch(tools.soc)}", f"-I{CSRC}"]
        return [tools.bisheng, *flags, "-c", str(source), "-o", output]
    assert tools.torch is not None
    includes = [f"-I{CSRC}", "-isystem", str(tools.torch / "include")]
    if "_cuda" in source.stem:
        includes += ["-DUSE_CUDA", "-isystem", str(_cuda_home(tools) / "include")]
    if "_ascend" in source.stem:
        includes += ["-isystem", f"{tools.torch_npu}/include", "-isystem", f"{tools.ascend}/include"]
    dialect = ASCEND_FLAGS if "_ascend" in source.stem else STABLE_FLAGS
    extra = os.environ.get("CXXFLAGS", "").split()
    return [tools.cxx, *CXX_FLAGS, *dialect, *extra, *includes, "-c", str(source), "-o", output]


def arch_flags() -> list[str]:
    """Machine code for each named architecture, and PTX of the oldest for those that come later."""
    archs = os.environ.get("MDAPO_CUDA_ARCHS", CUDA_ARCHS).split()
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    return [*flags, f"-gencode=arch=compute_{archs[0]},code=compute_{archs[0]}"]


def npu_arch(soc: str) -> str:
    """The architecture of a ``SOC_VERSION`` such as Ascend910B3, empty where no kernel is for it."""
    return next((arch for name, arch in NPU_ARCHS.items() if soc.lower().startswith(name.lower())), "")


def _lacking(backend: str, tools: Tools) -> str:
    """Why the backend cannot be built here, empty when it can."""
    if not tools.cxx:
        return "no C++ compiler (g++, c++ or clang++, or CXX)"
    if tools.torch is None:
        return "no torch to build against (with pip: --no-build-isolation)"
    if backend == "cuda" and not tools.nvcc:
        return "no nvcc (CUDA_HOME, or on PATH)"
    if backend == "cuda" and not tools.torch_cuda:
        return f"torch {tools.torch_version} is no CUDA build"
    if backend == "npu" and not (tools.ascend and tools.soc):
        return "ASCEND_HOME_PATH and SOC_VERSION are not both set"
    if backend == "npu" and not (tools.bisheng and tools.torch_npu):
        return "no bisheng (on PATH, or in ASCEND_HOME_PATH)" if not tools.bisheng else "no torch_npu"
    if backend == "npu" and not npu_arch(tools.soc):
        return f"SOC_VERSION={tools.soc}: kernels are for {' and '.join(NPU_ARCHS)}"
    return ""


def _compile(source: Path, *, folder: Path, tools: Tools) -> bool:
    """One object file; False when neither source, headers, flags nor torch have changed."""
    target = _object(folder, source)
    depends, record = target.with_suffix(".d"), target.with_suffix(".cmd")
    text = _text(compile_command(source, str(target), tools), tools)
    if record.exists() and record.read_text() == text and _newer(target, depends):
        return False
    record.unlink(missing_ok=True)

    def compile_to(path: str) -> None:
        log = _call([*compile_command(source, path, tools), "-MMD", "-MF", str(depends)])
        target.with_suffix(".log").write_text(log)

    _replace(target, compile_to)
    record.write_text(text)
    return True


def _newer(target: Path, depends: Path) -> bool:
    """The object is newer than all it was made from, as its dependency file lists it."""
    if not (target.exists() and depends.exists()):
        return False
    names = re.split(r"(?<!\\)\s+", depends.read_text().replace("\\\n", " ").partition(":")[2].strip())
    paths, made = [Path(name.replace("\\ ", " ")) for name in names], target.stat().st_mtime_ns
    return all(path.exists() and path.stat().st_mtime_ns <= made for path in paths)


def _replace(target: Path, make: Callable[[str], object]) -> None:
    """In one piece: another process may be loading or making the same file."""
    partial_path = target.with_name(f".{os.getpid()}.{target.name}")
    try:
        make(str(partial_path))
        partial_path.replace(target)
    finally:
        partial_path.unlink(missing_ok=True)


def _call(command: Sequence[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stdout[-6000:]}")
    if "warning:" in done.stdout:
        print(done.stdout, file=sys.stderr)
    return done.stdout


def _libraries(backend: str, tools: Tools) -> list[str]:
    """torch's own libraries by name: the process has them loaded, so no search path is written into ours."""
    found = [f"-L{tools.torch}/lib", "-ltorch_cpu", "-fopenmp"]
    if backend == "cuda":
        found += ["-ltorch_cuda", f"-L{_cuda_home(tools)}/lib64", "-lcudart"]
    if backend == "npu":
        found += [f"--npu-arch={npu_arch(tools.soc)}", f"-L{tools.torch_npu}/lib", "-ltorch_npu"]
        found += [f"-L{tools.ascend}/lib64", "-lascendcl"]
    return found


def _object(folder: Path, source: Path) -> Path:
    return folder / f"{source.name}.o"


def _cuda_home(tools: Tools) -> Path:
    return Path(tools.nvcc).resolve().parent.parent


def _text(command: Sequence[str], tools: Tools) -> str:
    return f"torch {tools.torch_version}\n{' '.join(command)}\n"


def _which(*names: str) -> str:
    return next((found for name in names if name and (found := shutil.which(name))), "")


def build_all(mode: str, *, native: Path = NATIVE) -> list[str]:
    """The backends whose libraries are there now; those that were not asked for are not left from earlier builds.

    In ``auto`` mode what fails is said in one line, not raised.
    """
    built = []
    try:
        tools = find_tools()
        chosen = choose(mode, tools)
    except BuildError as error:
        if mode != "auto":
            raise
        print(f"mdapo: no native ops, the plain-torch references serve: {error.gist}")
        return []
    if mode == "none":
        for backend in SOURCES:
            (native / f"mdapo_{backend}.so").unlink(missing_ok=True)
    for backend in chosen:
        target = native / f"mdapo_{backend}.so"
        try:
            if build(backend, tools, target=target):
                print(f"mdapo: built {target}")
        except (BuildError, OSError) as error:
            if mode != "auto":
                raise BuildError(str(error)) from error
            gist = error.gist if isinstance(error, BuildError) else str(error)
            print(f"mdapo: no native ops for {backend}, the plain-torch references serve: {gist}")
            continue
        built.append(backend)
    return built


def main(arguments: Sequence[str]) -> None:
    if not arguments:
        build_all(os.environ.get("MDAPO_BUILD", "auto"))
    elif len(arguments) == 2 and arguments[0] == "objects" and arguments[1] in SOURCES:
        compile_objects(arguments[1], find_tools())
    else:
        raise BuildError(f"csrc/compile.py takes no arguments, or: objects {'|'.join(SOURCES)}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BuildError as error:
        print(f"mdapo: {error}", file=sys.stderr)
        sys.exit(2)
