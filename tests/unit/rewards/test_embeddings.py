"""Vectors of texts: from a folder as it says, whoever else is in the batch; words alone; a cache that has a bound."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mdapo.config.embedding_folder import read_embedding_folder
from mdapo.errors import UserError
from mdapo.rewards.embeddings import MAX_CHARS, Cached, EmbeddingError, Encoder, Lexical, open_embedder

from .tiny_encoder import minilm, save_tiny_encoder

TEXTS = [
    "hello there.",
    "a",
    "what is the number of your order?",
    "x" * 300,
    "the end, is near!",
    "?",
    "ünïcödé 漢字 🙂",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("encoder"))


def encoder_of(folder: Path) -> Encoder:
    facts, problems = read_embedding_folder(folder)
    assert facts is not None and not problems
    return Encoder(facts)


def plain(folder: Path, text: str, *, pooling: str, normalize: bool, max_tokens: int = 40) -> np.ndarray:
    """One text at a time, by transformers and the definition of the pooling."""
    from tokenizers import Tokenizer
    from transformers import BertModel

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    ids = torch.tensor([tokenizer.encode(text).ids])
    model = BertModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        hidden = model(input_ids=ids).last_hidden_state[0]
    pooled = {
        "mean_tokens": lambda: hidden.mean(0),
        "cls_token": lambda: hidden[0],
        "lasttoken": lambda: hidden[-1],
        "max_tokens": lambda: hidden.amax(0),
        "mean_sqrt_len_tokens": lambda: hidden.sum(0) / len(hidden) ** 0.5,
    }[pooling]()
    return (pooled / pooled.norm() if normalize else pooled).numpy()


@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token", "max_tokens", "mean_sqrt_len_tokens", "lasttoken"])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_folder_is_pooled_cut_and_normalised_as_it_says(tmp_path: Path, pooling: str, normalize: bool) -> None:
    folder = save_tiny_encoder(tmp_path / "e", pooling=pooling, normalize=normalize)
    found = encoder_of(folder).embed(TEXTS)
    wanted = np.stack([plain(folder, text, pooling=pooling, normalize=normalize) for text in TEXTS])
    np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_a_default_prompt_stands_before_each_text(tmp_path: Path) -> None:
    st = {"prompts": {"q": "ask: "}, "default_prompt_name": "q"}
    with_prompt = encoder_of(save_tiny_encoder(tmp_path / "p", st=st))
    without = encoder_of(save_tiny_encoder(tmp_path / "n"))
    np.testing.assert_array_equal(with_prompt.embed(["how"]), without.embed(["ask: how"]))


def test_a_texts_vector_does_not_depend_on_its_neighbours(folder: Path) -> None:
    """Float noise is all that is promised (1e-6); with batches of one shape, not even that is there."""
    embedder, draw = encoder_of(folder), random.Random(0)
    texts = [*TEXTS, *("".join(draw.choices("abcde ", k=draw.randrange(1, 120))) for _ in range(40))]
    together = embedder.embed(texts)
    order = draw.sample(range(len(texts)), len(texts))
    shuffled = embedder.embed([texts[i] for i in order])
    alone = np.concatenate([embedder.embed([text]) for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-6)
    np.testing.assert_array_equal(together[order], shuffled)
    np.testing.assert_array_equal(together, alone)


@pytest.mark.model
def test_all_minilm_gives_the_vectors_of_plain_transformers() -> None:
    folder = minilm()
    texts = ["My kettle arrived broken.", "I am sorry that your kettle is broken.", "The Pacific is an ocean."]
    found = encoder_of(folder).embed(texts)
    wanted = [plain(folder, text, pooling="mean_tokens", normalize=True, max_tokens=256) for text in texts]
    np.testing.assert_allclose(found, np.stack(wanted), atol=2e-6)
    assert found[0] @ found[1] > 0.6 > 0.2 > found[0] @ found[2]


DENSE = [{"type": "a.Transformer", "path": ""}, {"type": "b.Dense", "path": "x"}]
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "other modules": ({"modules": DENSE}, "its modules are Transformer, Dense"),
    "no list": ({"modules": {}}, "modules.json holds no list"),
    "no pooling": ({"pooling": "weighted"}, "its pooling is pooling_mode_weighted; known is one of"),
    "odd length": ({"bert": {"max_seq_length": "many"}}, "max_seq_length is no whole number"),
    "odd prompt": ({"st": {"default_prompt_name": "q"}}, "names the prompt 'q' and has no such text"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_folder_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    options, why = BROKEN[name]
    with pytest.raises(UserError, match=r"quality\.embeddings: ") as caught:
        open_embedder(str(save_tiny_encoder(tmp_path / "e", **options)))
    assert why in str(caught.value)


def test_paths_that_lead_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    modules = [{"type": "x.Transformer", "path": ".."}, {"type": "x.Pooling", "path": "1_Pooling"}]
    with pytest.raises(UserError, match="a path outside of the folder"):
        open_embedder(str(save_tiny_encoder(tmp_path / "e", modules=modules)))


@pytest.mark.parametrize("file", ["modules.json", "config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("how", ["gone", "rubbish"])
def test_missing_and_damaged_files_are_named(tmp_path: Path, file: str, how: str) -> None:
    folder = save_tiny_encoder(tmp_path / "e")
    (folder / file).unlink() if how == "gone" else (folder / file).write_bytes(b"{\xff")
    with pytest.raises(UserError, match=r"quality\.embeddings") as caught:
        open_embedder(str(folder))
    assert str(folder) in str(caught.value)


def test_lexical_knows_words_and_their_forms() -> None:
    a, b, c, d = Cached(Lexical(), size=9).embed(
        ["My parcel is late.", "Your parcels were late", "The sun shines", "is the of and"]
    )
    assert a @ b > 0.5 > 0.15 > abs(float(a @ c))
    assert abs(float(a @ d)) < 0.2  # what they have in common is common to all


class Counting:
    description = "counts"

    def __init__(self, dimension: int = 3) -> None:
        self.asked: list[str] = []
        self.dimension = dimension

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        self.asked += texts
        return np.array([[len(text), *range(1, self.dimension)] for text in texts], np.float32)


def test_each_text_is_embedded_once_and_the_cache_has_a_bound() -> None:
    embedder = Counting()
    cached = Cached(embedder, size=3)
    first = cached.embed(["a", "b", "a", "c"])
    assert embedder.asked == ["a", "b", "c"] and len(cached) == 3
    np.testing.assert_array_equal(first[0], first[2])
    cached.embed(["a", "dd"])  # "b" is the one used longest ago
    cached.embed(["a", "c", "dd"])
    assert embedder.asked == ["a", "b", "c", "dd"] and len(cached) == 3
    cached.embed([str(i) for i in range(50)])  # more than it holds
    assert len(cached) == 3
    np.testing.assert_array_equal(cached.embed(["a"]), first[:1])


def test_without_a_cache_nothing_is_kept() -> None:
    cached = Cached(Counting(), size=0)
    assert cached.embed(["a", "b"]).shape == (2, 3) and len(cached) == 0


def test_nothing_said_is_like_nothing_and_is_not_sent() -> None:
    embedder = Counting()
    found = Cached(embedder, size=9).embed(["", " \n", "a"])
    assert embedder.asked == ["a"] and not found[:2].any()
    assert Cached(embedder, size=9).embed(["", ""]).shape == (2, 1)
    assert Cached(embedder, size=9).embed([]).shape[0] == 0


def test_half_characters_and_endless_texts_are_bounded() -> None:
    embedder = Counting()
    Cached(embedder, size=9).embed(["a\ud800b", "y" * (MAX_CHARS + 5)])
    assert embedder.asked[0] == "a?b" and len(embedder.asked[1]) == MAX_CHARS


class Rubbish:
    description = "rubbish"

    def __init__(self, value: Any) -> None:
        self.value = value

    def embed(self, texts: Sequence[str]) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (np.ones((1, 4)), "2 texts gave an array of shape (1, 4)"),
        (np.ones(2), "shape (2,)"),
        (np.ones((2, 0)), "shape (2, 0)"),
        (np.array([[1.0, np.nan], [1.0, 1.0]]), "not finite"),
        (np.array([[1.0, np.inf], [1.0, 1.0]]), "not finite"),
        (np.array([[0.0, 0.0], [1.0, 1.0]]), "a vector is zero"),
    ],
)
def test_what_is_no_vector_is_an_error_and_is_not_kept(value: Any, why: str) -> None:
    cached = Cached(Rubbish(value), size=9)
    with pytest.raises(EmbeddingError) as caught:
        cached.embed(["a", "b"])
    assert why in str(caught.value) and len(cached) == 0


def test_vectors_that_change_their_length_are_an_error() -> None:
    embedder = Counting(3)
    cached = Cached(embedder, size=9)
    cached.embed(["a"])
    embedder.dimension = 4
    with pytest.raises(EmbeddingError, match="vectors have 4 numbers, earlier ones had 3"):
        cached.embed(["b"])


def test_huge_and_tiny_vectors_get_length_one() -> None:
    found = Cached(Rubbish(np.array([[3e38, 3e38], [1e-300, 0.0]])), size=9).embed(["a", "b"])
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, rtol=1e-6)
