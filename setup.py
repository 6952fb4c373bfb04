"""Packaging. Native ops are compiled where a compiler and torch are there (csrc/compile.py); else it is pure Python.

Probes no hardware, downloads nothing. pip's isolated build sees no torch: ``pip install --no-build-isolation -e .``.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))
import compile as csrc  # noqa: E402  csrc/compile.py

# What mdapo imports itself; requirements.lock pins these and everything below them.
REQUIRES = [
    "torch>=2.10",
    "megatron-core==0.16.1",
    "transformers>=5.12,<6",
    "tokenizers>=0.22",
    "safetensors>=0.5",
    "numpy>=2.0",
    "omegaconf==2.4.0",
    "pydantic>=2.10,<3",
    "PyYAML>=6",
    "typer>=0.15",
    "rich>=13",
    "pyarrow>=15",
    "aiohttp>=3.10",
    "tenacity>=9",
    "psutil>=5.9",
    "tensorboard>=2.15",
]
EXTRAS = {
    "gguf": ["gguf>=0.19"],  # scripts/fetch_model.py
    "dev": ["pytest>=8", "hypothesis>=6", "pytest-timeout>=2", "ruff", "pyrefly", "import-linter", "clang-format"],
}
MODE = os.environ.get("MDAPO_BUILD", "auto")


def backends() -> list[str]:
    """What will be built, said in one line when it is nothing, once a build."""
    try:
        return csrc.choose(MODE, csrc.find_tools())
    except csrc.BuildError as error:
        if MODE != "auto":
            sys.exit(f"mdapo: {error}")
        if {"build_ext", "bdist_wheel", "editable_wheel"} & set(sys.argv):
            print(f"mdapo: no native ops, the plain-torch references serve: {error}", file=sys.stderr)
        return []


class BuildNative(build_ext):
    """One library a backend, not a Python module: mdapo/ops/registry.py loads it."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def run(self) -> None:
        """Straight to where the libraries belong: beside the sources, or into the wheel."""
        inplace = self.inplace or getattr(self, "editable_mode", False)
        csrc.build_all(MODE, native=(ROOT if inplace else Path(self.build_lib)) / "mdapo" / "_native")


setup(
    name="mdapo",
    version="0.1.0",
    description="Post-trains dialogue language models with DAPO: Megatron-core, multi-turn rollout, dynamic batch",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["mdapo", "mdapo.*"]),
    package_data={"mdapo": ["py.typed"], "mdapo.environments": ["scenarios/*.jsonl", "scenarios/*.md"]},
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    ext_modules=[Extension(f"mdapo._native.mdapo_{backend}", []) for backend in backends()],
    cmdclass={"build_ext": BuildNative},
    entry_points={"console_scripts": ["mdapo = mdapo.cli:main"]},
)
