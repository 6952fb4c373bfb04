"""Packaging only: pure Python, needs no torch, probes no hardware and downloads nothing."""

from pathlib import Path

from setuptools import find_packages, setup

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
    "dev": ["pytest>=8", "hypothesis>=6", "pytest-timeout>=2", "ruff", "pyrefly", "import-linter"],
}

setup(
    name="mdapo",
    version="0.1.0",
    description="Post-trains dialogue language models with DAPO: Megatron-core, multi-turn rollout, dynamic batch",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["mdapo", "mdapo.*"]),
    package_data={"mdapo": ["py.typed"], "mdapo.environments": ["scenarios/*.jsonl", "scenarios/*.md"]},
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["mdapo = mdapo.cli:main"]},
)
