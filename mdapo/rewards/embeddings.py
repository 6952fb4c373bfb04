"""Texts as unit vectors: from a sentence-transformers folder, from an OpenAI-compatible endpoint, or from words alone.

Which of them is said by ``quality.embeddings``; none stands in for another. `Cached` is what the measures are given.
"""

from __future__ import annotations

import hashlib
import math
import re
import zlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mdapo.config.embedding_folder import EmbeddingFolder, read_embedding_folder
from mdapo.config.problems import lines
from mdapo.errors import UserError, shortened

if TYPE_CHECKING:
    import torch

MAX_CHARS = 20_000  # of a text that are looked at
ROWS, TOKENS = 8, 8  # a batch has so many texts and a multiple of so many tokens, filled up where there are fewer
LEXICAL_DIMENSION = 2048
_WORD = re.compile(r"\w+")
# Words that any two texts have in common.
_WORDS_COMMON = """
    a an and are as at be but by can do does for from had has have he her his how i if in is it its me my no not
    of on or our she so that the their them then there they this to us was we were what when which who will with
    would you your
"""
_COMMON = frozenset(_WORDS_COMMON.split())
_COMMON_WEIGHT = 0.1
_TRIGRAM_WEIGHT = 0.35


class EmbeddingError(RuntimeError):
    """No usable vectors; the text says why, without the texts."""


class Embedder(Protocol):
    """``embed`` gives float32 [N, D], a row a text, not yet of length 1. No text is empty."""

    description: str

    def embed(self, texts: Sequence[str]) -> np.ndarray: ...


class Encoder:
    """A Hugging Face encoder with the pooling and normalisation that its folder tells, in float32 on the CPU.

    Texts are sorted by length and cut into batches of one shape a length: always `ROWS` texts, always a multiple of
    `TOKENS` tokens. So a text meets the same kernels with the same shapes whoever its neighbours are, and on the CPUs
    tried its vector does not depend on them in any bit (a test holds that); float noise is all that may be relied on.
    """

    def __init__(self, facts: EmbeddingFolder, *, threads: int = 1) -> None:
        """Raises ``UserError`` when the folder's files cannot be loaded. Sets torch's threads for this process."""
        import torch
        from transformers import AutoModel, PreTrainedTokenizerFast

        torch.set_num_threads(threads)
        self.facts, self.description = facts, f"{facts.encoder}, {facts.dimension} numbers a text"
        try:
            self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(facts.encoder / "tokenizer.json"))
            self._model = AutoModel.from_pretrained(
                facts.encoder, dtype=torch.float32, local_files_only=True, use_safetensors=True
            ).eval()
        except Exception as error:  # transformers, tokenizers and safetensors raise many kinds, plain Exception too
            told = shortened(str(error))
            raise UserError(f"quality.embeddings: {facts.encoder} cannot be loaded: {told}") from error

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        import torch

        ids = self._token_ids(texts)
        found = np.empty((len(texts), self.facts.dimension), np.float32)
        batches: dict[int, list[int]] = {}
        for index in sorted(range(len(ids)), key=lambda i: len(ids[i])):
            batches.setdefault(-(-len(ids[index]) // TOKENS) * TOKENS, []).append(index)
        with torch.inference_mode():
            for width, indices in batches.items():
                for start in range(0, len(indices), ROWS):
                    part = indices[start : start + ROWS]
                    vectors = self._forward([ids[i] for i in part], width)
                    found[part] = vectors[: len(part)].numpy()
        return found

    def _token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        prefix = self.facts.prefix
        encoded = self._tokenizer([prefix + text for text in texts], truncation=True, max_length=self.facts.max_tokens)
        return [list(ids) or [0] for ids in encoded["input_ids"]]

    def _forward(self, rows: Sequence[Sequence[int]], width: int) -> torch.Tensor:
        """[ROWS, D]; the last rows are fillers."""
        import torch

        ids = torch.zeros(ROWS, width, dtype=torch.int64)
        mask = torch.zeros(ROWS, width, dtype=torch.int64)
        mask[:, 0] = 1
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        pooled = _pool(hidden, mask, self.facts.pooling)
        return torch.nn.functional.normalize(pooled, dim=1) if self.facts.normalize else pooled


def _pool(hidden: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """[B, L, D] and [B, L] -> [B, D]."""
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last":
        return hidden[range(len(hidden)), mask.sum(1) - 1]
    weights = mask[..., None].to(hidden.dtype)
    if pooling == "max":
        return hidden.masked_fill(weights == 0, -math.inf).amax(1)
    count = weights.sum(1)
    return (hidden * weights).sum(1) / (count if pooling == "mean" else count.sqrt())


class Lexical:
    """Words and their letter trigrams, hashed to `LEXICAL_DIMENSION` signed counts: knows no meaning, costs nothing.

    Must be asked for by name (``quality.embeddings: lexical``).
    """

    description = f"words and letters alone, {LEXICAL_DIMENSION} numbers a text"

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        return np.stack([_lexical(text) for text in texts]) if texts else np.zeros((0, LEXICAL_DIMENSION), np.float32)


def _lexical(text: str) -> np.ndarray:
    vector = np.zeros(LEXICAL_DIMENSION, np.float64)
    for word, count in Counter(_WORD.findall(text.lower())).items():
        weight = math.sqrt(count) * (_COMMON_WEIGHT if word in _COMMON else 1.0)
        _add(vector, word, weight)
        padded = f"^{word}$"
        for start in range(len(padded) - 2):
            _add(vector, padded[start : start + 3], weight * _TRIGRAM_WEIGHT)
    if not vector.any():  # punctuation alone
        _add(vector, text.strip(), 1.0)
    return vector.astype(np.float32)


def _add(vector: np.ndarray, feature: str, weight: float) -> None:
    code = zlib.crc32(feature.encode("utf-8", "replace"))
    vector[code % LEXICAL_DIMENSION] += weight if code >> 31 else -weight


class Cached:
    """Vectors of length 1, each text embedded once: the last ``size`` of them are kept, by a digest of the text.

    An empty text (white space alone) is the zero vector, which is like nothing; it is sent to no embedder. Half
    characters become question marks, and what is past `MAX_CHARS` is not looked at.
    """

    def __init__(self, embedder: Embedder, *, size: int) -> None:
        self.embedder, self.size = embedder, size
        self.asked = self.found = 0  # texts asked for, and those of them that were known
        self._known: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._dimension: int | None = None

    def __len__(self) -> int:
        return len(self._known)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [N, D]. Raises ``EmbeddingError``: the embedder failed, or gave what is no vector for each text."""
        seen = [text[:MAX_CHARS].encode("utf-8", "replace") for text in texts]
        keys = [hashlib.blake2b(text, digest_size=16).digest() for text in seen]
        wanted: dict[bytes, np.ndarray] = {}
        missing: dict[bytes, str] = {}
        for key, text in zip(keys, seen, strict=True):
            if key in self._known:
                self._known.move_to_end(key)
                wanted[key] = self._known[key]
            elif text.strip():
                missing[key] = text.decode("utf-8")
        self.asked += len(texts)
        self.found += sum(key in wanted for key in keys)
        if missing:
            vectors = self._checked(self.embedder.embed(list(missing.values())), len(missing))
            wanted |= zip(missing, vectors, strict=True)
            self._keep(missing, wanted)
        nothing = np.zeros(self._dimension or 1, np.float32)
        return (
            np.stack([wanted.get(key, nothing) for key in keys]) if texts else np.zeros((0, len(nothing)), np.float32)
        )

    def _keep(self, keys: Any, wanted: dict[bytes, np.ndarray]) -> None:
        for key in keys:
            self._known[key] = wanted[key].copy()  # not a view that keeps the whole batch alive
        while len(self._known) > self.size:
            self._known.popitem(last=False)

    def _checked(self, vectors: Any, count: int) -> np.ndarray:
        vectors = np.asarray(vectors)
        if vectors.ndim != 2 or len(vectors) != count or vectors.shape[1] == 0:
            raise EmbeddingError(f"{count} texts gave an array of shape {vectors.shape}")
        if self._dimension not in (None, vectors.shape[1]):
            raise EmbeddingError(f"vectors have {vectors.shape[1]} numbers, earlier ones had {self._dimension}")
        vectors = vectors.astype(np.float64)
        if not np.isfinite(vectors).all():
            raise EmbeddingError("a vector has numbers that are not finite")
        largest = np.abs(vectors).max(axis=1, keepdims=True)
        if not largest.all():
            raise EmbeddingError("a vector is zero")
        vectors /= largest  # before squares, which could overflow
        self._dimension = vectors.shape[1]
        return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def open_embedder(
    embeddings: str,
    *,
    model: str | None = None,
    key_file: str | None = None,
    timeout_s: float = 60.0,
    retries: int = 3,
    threads: int = 1,
) -> Embedder:
    """What ``quality.embeddings`` names: ``lexical``, an ``http(s)://`` URL, or a folder. Raises ``UserError``."""
    if embeddings == "lexical":
        return Lexical()
    if embeddings.startswith(("http://", "https://")):
        from mdapo.rewards.embeddings_endpoint import Endpoint

        return Endpoint.open(embeddings, model=model, key_file=key_file, timeout_s=timeout_s, retries=retries)
    facts, problems = read_embedding_folder(Path(embeddings))
    if facts is None:
        raise UserError(lines(problems, {}))
    return Encoder(facts, threads=threads)
