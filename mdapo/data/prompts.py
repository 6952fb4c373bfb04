"""Prompts: loaded from files with all problems at once, and dealt out by a stream that a restart continues exactly."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mdapo.config.schema import Data
from mdapo.data.rows import Problems, RowError, make_prompt, read_rows
from mdapo.errors import UserError
from mdapo.types import Prompt

SCENARIOS = Path(__file__).resolve().parent.parent / "environments" / "scenarios"
_PACKAGE = "package:"
Kind = Literal["training", "validation"]


def load_prompts(files: Sequence[str], cfg: Data) -> list[Prompt]:
    """All rows of ``files`` (.jsonl or .parquet; ``package:NAME`` is a file that mdapo ships), in order.

    Raises ``UserError`` with every malformed row as ``file:line: field: what`` (the first 20, and how many more), for
    missing files, a file named twice, and an empty data set.
    """
    problems = Problems()
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}  # uid -> where
    prefixes = _uid_prefixes(files)
    for file, prefix in zip(files, prefixes, strict=True):
        path = _locate(file, problems)
        if path is None:
            continue
        for line, row in read_rows(path, problems):
            where = f"{path}:{line}"
            try:
                prompt = make_prompt(
                    row,
                    uid=f"{prefix}:{line}",
                    index=len(prompts),
                    prompt_key=cfg.prompt_key,
                    system_prompt=cfg.system_prompt,
                )
            except RowError as error:
                problems.add(f"{where}: {error}")
                continue
            if prompt.uid in seen:
                problems.add(f"{where}: uid: {prompt.uid!r:.60} is also that of {seen[prompt.uid]}")
                continue
            seen[prompt.uid] = where
            prompts.append(prompt)
    for file, times in Counter(files).items():
        if times > 1:
            problems.add(f"{file}: named {times} times")
    if not prompts and not problems.count:
        problems.add(f"{', '.join(files) or 'no files given'}: the data set is empty")
    if problems.count:
        raise UserError(problems.lines)
    return prompts


def _uid_prefixes(files: Sequence[str]) -> list[str]:
    """File names, told apart by their place in the list where two folders hold the same name."""
    names = [Path(f.removeprefix(_PACKAGE)).name for f in files]
    return [name if names.count(name) == 1 else f"{i}.{name}" for i, name in enumerate(names)]


def _locate(file: str, problems: Problems) -> Path | None:
    if not file.startswith(_PACKAGE):
        return Path(file)
    name = file.removeprefix(_PACKAGE)
    shipped = sorted(p.name for p in SCENARIOS.glob("*.jsonl"))
    if name not in shipped:  # also refuses paths that lead out of the folder
        problems.add(f"{file}: not shipped with mdapo; there are {', '.join(shipped)}")
        return None
    return SCENARIOS / name


def drop_overlong(
    prompts: Sequence[Prompt],
    length_fn: Callable[[Prompt], int],
    max_len: int,
    policy: Literal["drop", "error"],
    *,
    kind: Kind,
) -> tuple[list[Prompt], int]:
    """Prompts of at most ``max_len`` tokens, and how many were longer.

    Raises ``UserError`` when there is one (``error``) or when none is left; it names the files of this ``kind``.
    """
    lengths = [length_fn(p) for p in prompts]
    kept = [p for p, n in zip(prompts, lengths, strict=True) if n <= max_len]
    dropped = len(prompts) - len(kept)
    limit, files = f"data.max_prompt_len={max_len}", "data.train_files" if kind == "training" else "data.val_files"
    if dropped and policy == "error":
        problems = Problems()
        for p, n in zip(prompts, lengths, strict=True):
            if n > max_len:
                more = f"{n} tokens, more than {limit} (data.overlong_prompts=drop leaves it out)"
                problems.add(f"{files}: {p.uid}: {more}")
        raise UserError(problems.lines)
    if not kept:
        shortest = f"the shortest has {min(lengths, default=0)} tokens"
        raise UserError(f"{files}: all {len(prompts)} prompts are longer than {limit}; {shortest}")
    return kept, dropped


class PromptStream:
    """Deals prompts out, epoch after epoch, each epoch in an order of its own that depends on (seed, epoch) only.

    Every prompt dealt out by ``next`` is *outstanding* until ``commit`` says that it is done with (trained, or rejected
    by the filter). ``state`` remembers what is outstanding, so that after ``restore`` exactly those prompts come again,
    first: each is trained once an epoch, however the run was cut. With ``epochs`` the stream ends after so many.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool, epochs: int | None = None) -> None:
        if not prompts:
            raise UserError("data.train_files: the data set is empty")
        self._prompts = list(prompts)
        self._seed, self._shuffle, self._epochs = seed, shuffle, epochs
        self._fingerprint = _fingerprint(self._prompts)
        self._next = 0  # serial number of the next prompt never dealt out: epoch * rows + place in the epoch
        self._again: deque[int] = deque()  # serials to deal out once more
        self._outstanding: dict[str, deque[int]] = {}  # uid -> serials, oldest first; two epochs may be in flight
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        """Rows of one epoch."""
        return len(self._prompts)

    @property
    def epoch(self) -> int:
        return self._next // len(self._prompts)

    @property
    def offset(self) -> int:
        """Prompts of the current epoch that were dealt out."""
        return self._next % len(self._prompts)

    @property
    def exhausted(self) -> bool:
        """True when ``epochs`` are dealt out and nothing is to come again."""
        return not self._again and self._epochs is not None and self.epoch >= self._epochs

    def next(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts, over the edge of an epoch where needed; fewer only when the stream is exhausted."""
        dealt: list[Prompt] = []
        while len(dealt) < n and not self.exhausted:
            if self._again:
                serial = self._again.popleft()
            else:
                serial = self._next
                self._next += 1
            prompt = self._prompt(serial)
            self._outstanding.setdefault(prompt.uid, deque()).append(serial)
            dealt.append(prompt)
        return dealt

    def commit(self, uids: Iterable[str]) -> None:
        """These prompts are done with; a uid that is outstanding twice is committed once for each time it is named."""
        for uid in uids:
            self._take(uid)

    def put_back(self, uids: Iterable[str]) -> None:
        """These prompts came to nothing (engine error, aborted): deal them out again, before new ones."""
        self._again.extend(self._take(uid) for uid in uids)

    def state(self) -> dict[str, Any]:
        """Plain JSON data. What is outstanding now comes again after ``restore``."""
        waiting = [s for serials in self._outstanding.values() for s in serials]
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "data": self._fingerprint,
            "next": self._next,
            "again": sorted([*waiting, *self._again]),
        }

    def restore(self, state: Mapping[str, Any], *, held: Iterable[str] = ()) -> None:
        """Go on where ``state`` was taken. ``held``: uids whose groups the checkpoint itself carries (kept for
        a later step); they stay outstanding and do not come again.

        Raises ``UserError`` when data, seed or order changed since.
        """
        mine = {"seed": self._seed, "shuffle": self._shuffle, "data": self._fingerprint}
        keys = {"seed": "run.seed", "shuffle": "data.shuffle", "data": "data.train_files"}
        changed = [
            f"{keys[k]}: not as it was when the checkpoint was written" for k, v in mine.items() if state[k] != v
        ]
        if changed:
            raise UserError([*changed, "resume with the old value, or start a new run (run.name)"])
        self._next = int(state["next"])
        self._again = deque(int(s) for s in state["again"])
        self._outstanding = {}
        for uid in held:
            serial = next((s for s in self._again if self._prompt(s).uid == uid), None)
            assert serial is not None, f"{uid} is held but was not outstanding"
            self._again.remove(serial)
            self._outstanding.setdefault(uid, deque()).append(serial)

    def _take(self, uid: str) -> int:
        serials = self._outstanding.get(uid)
        assert serials, f"{uid} is not outstanding"
        serial = serials.popleft()
        if not serials:
            del self._outstanding[uid]
        return serial

    def _prompt(self, serial: int) -> Prompt:
        epoch, place = divmod(serial, len(self._prompts))
        if not self._shuffle:
            return self._prompts[place]
        if self._order[0] != epoch:
            self._order = (epoch, permutation(len(self._prompts), seed=self._seed, epoch=epoch))
        return self._prompts[int(self._order[1][place])]


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for p in prompts:
        digest.update(repr((p.uid, [(m.role, m.content) for m in p.messages])).encode())
    return digest.hexdigest()[:16]


def permutation(n: int, *, seed: int, epoch: int) -> np.ndarray:
    """int64 [n]: the order of one epoch. Sorted raw bits of a named generator, which no numpy release may change."""
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    return np.argsort(bits, kind="stable")
