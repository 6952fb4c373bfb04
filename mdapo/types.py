"""The plain data that flows between the parts (design: one record a stage, frozen, no behaviour beyond views).

prompt -> group (n episodes of one prompt) -> episode (one conversation) -> turn -> token.

Token convention, everywhere: ``response_mask[t] == 1`` means the policy wrote token ``t``; a log-prob at ``t`` is that
of token ``t`` given the tokens before it. The ids are the engine's own, never detokenised and tokenised again.
Shape suffixes: ``_T`` packed tokens, ``_R`` response (loss) tokens, ``_N`` samples, ``_L`` tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

if TYPE_CHECKING:
    import torch

Role = Literal["system", "user", "assistant", "tool"]
# Why an episode ended. The first two are regular ends; "*_limit" are truncations; "error" is infrastructure, never
# scored.
EndReason = Literal["done", "gave_up", "turn_limit", "token_limit", "context_limit", "aborted", "error"]
TRUNCATED: frozenset[str] = frozenset({"token_limit", "context_limit", "aborted"})
UNFINISHED: Literal["unfinished"] = "unfinished"  # not an end: the conversation goes on in a later step


@dataclass(frozen=True)
class Message:
    """One chat message as text (what templates render and environments read)."""

    role: Role
    content: str


@dataclass(frozen=True)
class Prompt:
    """One row of the data set. ``uid`` is stable over epochs; ``row`` its index in the data; ``extra`` is JSON data."""

    uid: str
    row: int
    messages: tuple[Message, ...]
    data_source: str = "default"
    ground_truth: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """A run of tokens appended to a conversation: one generation of the policy, or what the environment answered.

    ``ids`` int32 [L]; ``mask`` bool [L], True where the policy wrote (a closing token added by us after a cut turn is
    False); ``logps`` float32 [L], the engine's log-probs, NaN where ``mask`` is False; ``version`` is the weight
    version that generated the turn, -1 for observations; ``finish`` is the engine's finish reason ("stop", "length",
    "abort"). A turn that was cut and went on under newer weights has ``pieces``, (version, tokens) of each in order;
    ``version`` is then the last one's.
    """

    role: Role
    ids: np.ndarray
    mask: np.ndarray
    logps: np.ndarray
    version: int = -1
    finish: str = ""
    pieces: tuple[tuple[int, int], ...] = ()

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(version, tokens), end to end all L of them."""
        return (*self.pieces, (self.version, len(self.ids) - sum(tokens for _, tokens in self.pieces)))


@dataclass(frozen=True)
class Score:
    """Outcome of the reward parts of one episode.

    ``value`` is the shaped total that trains; ``outcome`` the raw outcome (accuracy or success in [0, 1]) that filters
    look at; ``parts`` the breakdown by name, before weights; ``valid`` False when no reward could be had (error): the
    episode is masked. ``before``, where turns get credit of their own: the value as it stood before each agent turn.
    """

    value: float
    outcome: float
    parts: Mapping[str, float] = field(default_factory=dict)
    valid: bool = True
    before: tuple[float, ...] = ()


@dataclass(frozen=True)
class Episode:
    """One conversation: its prompt ids, its turns, its text, its end and its score.

    ``end`` is ``unfinished`` while it waits to go on (``rollout.mode`` partial or async); it has no score then. Its
    last turn may be cut (``finish == "abort"``, its text not among ``messages`` yet); without any ids it has not begun.
    """

    prompt: Prompt
    index: int  # 0 .. n_resp_per_prompt - 1
    prompt_ids: np.ndarray  # int32 [P]
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]  # all messages, prompt included
    end: EndReason | Literal["unfinished"]
    score: Score | None = None

    @property
    def ids(self) -> np.ndarray:
        """int32 [L]: prompt and turns."""
        return np.concatenate([self.prompt_ids, *(t.ids for t in self.turns)]).astype(np.int32)

    @property
    def response_mask(self) -> np.ndarray:
        """bool [L]: True on tokens the policy wrote."""
        return np.concatenate([np.zeros(len(self.prompt_ids), bool), *(t.mask for t in self.turns)]).astype(bool)

    @property
    def rollout_logps(self) -> np.ndarray:
        """float32 [L]: the engine's log-probs, 0 outside the response mask."""
        logps = np.concatenate([np.zeros(len(self.prompt_ids), np.float32), *(t.logps for t in self.turns)])
        return np.where(self.response_mask, logps, 0.0).astype(np.float32)

    @property
    def versions(self) -> np.ndarray:
        """int32 [L]: the weight version that wrote each token, -1 outside the response mask."""
        parts = [np.full(tokens, version, np.int32) for t in self.turns for version, tokens in t.runs]
        versions = np.concatenate([np.full(len(self.prompt_ids), -1, np.int32), *parts])
        return np.where(self.response_mask, versions, -1).astype(np.int32)

    @property
    def num_model_tokens(self) -> int:
        return int(sum(int(t.mask.sum()) for t in self.turns))

    @property
    def num_agent_turns(self) -> int:
        return sum(t.role == "assistant" for t in self.turns)

    @property
    def truncated(self) -> bool:
        return self.end in TRUNCATED


@dataclass(frozen=True)
class Group:
    """The n episodes of one prompt. ``version`` is the weight version it was begun with, ``length_scale`` the scale of
    its budgets, which it keeps (``rollout.adaptive_lengths``)."""

    prompt: Prompt
    episodes: tuple[Episode, ...]
    version: int
    length_scale: float = 1.0


@dataclass(frozen=True)
class Sample:
    """One trainable sequence with its credit. All arrays have length L; ``advantages`` is 0 outside the mask."""

    uid: str  # f"{prompt.uid}/{episode index}"
    group: int  # index of its group in the step's batch
    ids: np.ndarray  # int32
    response_mask: np.ndarray  # bool
    rollout_logps: np.ndarray  # float32
    versions: np.ndarray  # int32
    advantages: np.ndarray  # float32
    loss_weights: np.ndarray  # float32: per token; holds the *global* denominator (see algorithms/losses.py)


TOKEN_FIELDS: Mapping[str, type[np.generic]] = {
    "ids": np.int32,
    "response_mask": np.bool_,
    "rollout_logps": np.float32,
    "versions": np.int32,
    "advantages": np.float32,
    "loss_weights": np.float32,
}


@dataclass(frozen=True, eq=False)
class Samples(Sequence[Sample]):
    """A step's N samples. Their tokens are end to end: a step may have a hundred thousand samples, and arrays for each
    would cost more than all that is done with them.

    ``fields``: those of `Sample`, name -> [P]; ``lengths_N`` and ``group_N`` int64. ``samples[i]`` is a view.
    """

    uids: Sequence[str]
    group_N: np.ndarray
    lengths_N: np.ndarray
    fields: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Samples:
        """Copies the samples' arrays end to end."""
        parts = {name: [getattr(sample, name) for sample in samples] for name in TOKEN_FIELDS}
        return cls(
            [sample.uid for sample in samples],
            np.array([sample.group for sample in samples], np.int64),
            np.array([len(sample.ids) for sample in samples], np.int64),
            {name: end_to_end(parts[name], dtype) for name, dtype in TOKEN_FIELDS.items()},
        )

    @cached_property
    def starts_N(self) -> np.ndarray:
        """int64: where each sample begins in P."""
        return self.lengths_N.cumsum() - self.lengths_N

    @cached_property
    def model_tokens_N(self) -> np.ndarray:
        """int64: tokens of each sample that the policy wrote."""
        upto_P1 = np.append(0, self.fields["response_mask"].cumsum())
        return upto_P1[self.starts_N + self.lengths_N] - upto_P1[self.starts_N]

    def __len__(self) -> int:
        return len(self.uids)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Samples: ...
    def __getitem__(self, index: int | slice) -> Sample | Samples:
        if isinstance(index, slice):
            return Samples.of([self[i] for i in range(len(self))[index]])
        i = range(len(self))[index]
        start, end = int(self.starts_N[i]), int(self.starts_N[i] + self.lengths_N[i])
        arrays = {name: field[start:end] for name, field in self.fields.items()}
        return Sample(self.uids[i], int(self.group_N[i]), **arrays)


def end_to_end(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    """[P] of ``dtype``: the arrays one after the other, of which there may be none."""
    return np.concatenate(arrays, dtype=dtype, casting="no") if arrays else np.zeros(0, dtype)


NO_SAMPLES = Samples.of(())


@dataclass(frozen=True)
class MicroBatch:
    """One packed forward: N sequences end to end in T tokens, R of which are scored (those whose *next* token the
    policy wrote).

    With ``parents`` the segments are nodes of a prefix tree: segment i continues segment ``parents[i]`` (-1: none) and
    sees all its ancestors. A vocabulary projection is needed only at ``loss_index_R``. A zero-weight filler (a rank
    with fewer samples) has the same fields with ``loss_weights_R == 0`` and still runs forward and backward. The last
    segment may be a dummy that pads T.
    """

    ids_T: torch.Tensor  # int64 [T]
    positions_T: torch.Tensor  # int64 [T], in the sequence: from 0 in each segment that has no parent
    cu_seqlens: tuple[int, ...]  # host ints, N + 1 entries, from 0 to T
    loss_index_R: torch.Tensor  # int64 [R], positions in T whose next token is scored
    targets_R: torch.Tensor  # int64 [R]
    segment_R: torch.Tensor  # int64 [R], ascending: which sequence (0 .. N - 1) each scored token belongs to
    advantages_R: torch.Tensor  # float32 [R]
    loss_weights_R: torch.Tensor  # float32 [R]
    rollout_logps_R: torch.Tensor  # float32 [R]
    # float32 [R], of the policy at the step's start; None for the first update of a step, where logp.detach() is the
    # same. Neither says how old the policy was that wrote the tokens: rollout_logps_R and `tis_weights` do.
    old_logps_R: torch.Tensor | None = None
    ref_logps_R: torch.Tensor | None = None  # float32 [R]; only with a KL term
    parents: tuple[int, ...] = ()  # N host ints when prefixes are shared, a parent before its children

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens[-1]

    @property
    def num_segments(self) -> int:
        return len(self.cu_seqlens) - 1
