"""Tiny random models, written as Hugging Face folders by transformers itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))  # the simulated engine and clock

SIZE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def _save_tiny(folder: Path, *, family: str = "llama", tied: bool = True, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    sizes = dict(SIZE)
    if family == "qwen3":
        sizes["head_dim"] = 16  # heads * head_dim need not be the hidden size
    config = CONFIGS[family](
        **sizes, tie_word_embeddings=tied, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}
    )
    model = AutoModelForCausalLM.from_config(config).float()
    for name, parameter in model.named_parameters():  # norms of 1 and biases of 0 would hide mistakes
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def save_tiny() -> Callable[..., Path]:
    """``save_tiny(folder, family="llama", tied=True, seed=0)`` writes a tiny random model and returns its folder."""
    return _save_tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save_tiny(tmp_path_factory.mktemp("models") / "llama")
