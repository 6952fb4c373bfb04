"""A sentence-transformers folder with a tiny random BERT, and the real one where it was fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

MINILM = Path(__file__).resolve().parents[3] / "models" / "all-MiniLM-L6-v2"
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *".,?!'", *(f"##{letter}" for letter in LETTERS)]


def minilm() -> Path:
    if not MINILM.is_dir():
        pytest.skip(f"no {MINILM}; scripts/fetch_model.py makes it")
    return MINILM


def save_tiny_encoder(folder: Path, *, pooling: str = "mean_tokens", normalize: bool = True, **files: Any) -> Path:
    """``files``: what stands in ``modules``, ``bert`` (sentence_bert_config.json) or ``st`` (its prompts) instead."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=64, **sizes)  # type: ignore[arg-type]
    BertModel(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_padding(length=50)  # as all-MiniLM-L6-v2's file has it; it must not matter
    tokenizer.save(str(folder / "tokenizer.json"))
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), *([("Normalize", "2_Normalize")] if normalize else [])]
    modules = [
        {"idx": i, "path": path, "type": f"sentence_transformers.models.{k}"} for i, (k, path) in enumerate(kinds)
    ]
    (folder / "1_Pooling").mkdir()
    modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, f"pooling_mode_{pooling}": True}
    written = {
        "modules.json": files.get("modules", modules),
        "1_Pooling/config.json": {"word_embedding_dimension": 32, **modes},
        "sentence_bert_config.json": files.get("bert", {"max_seq_length": 40}),
        "config_sentence_transformers.json": files.get("st", {}),
    }
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content))
    return folder
