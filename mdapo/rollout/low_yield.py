"""A yield that stays low, and its likely cause in words: nobody should find out from the bill."""

from __future__ import annotations

from collections import Counter, deque

from mdapo.algorithms.filters import ALL_SOLVED, INVALID, NO_SPREAD, NONE_SOLVED, Verdict
from mdapo.types import Group

LOW = 0.05
LEAST = 40  # groups, before a yield is called low
ROUNDS = 2  # for which it stays low
SHOWN, WIDTH = 3, 60  # prompts, and characters of each
CAUSES = {
    ALL_SOLVED: "the prompts are too easy for this policy: give harder data, or skip what is solved "
    "(algorithm.filter_groups.skip_prompts)",
    NONE_SOLVED: "the prompts are too hard for this policy, or the grader is broken: read the conversations in "
    "episodes/; prompts: {prompts}",
    NO_SPREAD: "the metric gives all conversations of a prompt the same value, neither 0 nor 1: a reward that says "
    "little, or replies that are all alike; prompts: {prompts}",
    INVALID: "conversations fail or cannot be scored; see the failures that are told with each step",
}


class LowYield:
    """Sees every judged group; ``wave``: prompts of a round."""

    def __init__(self, wave: int) -> None:
        size = max(LEAST, ROUNDS * wave)
        self._seen: deque[tuple[str, str]] = deque(maxlen=size)  # reason, or nothing when kept; the prompt's last words
        self._told = False

    def open_step(self) -> None:
        self._told = False

    def saw(self, group: Group, verdict: Verdict) -> None:
        last = group.prompt.messages[-1].content if group.prompt.messages else group.prompt.uid
        self._seen.append((verdict.reason if not verdict.kept else "", f"{group.prompt.uid} {last[:WIDTH]!r}"))

    def warning(self) -> str | None:
        """Once a step, while fewer than ``LOW`` of the last ``ROUNDS`` rounds' groups were kept."""
        kept = sum(not reason for reason, _ in self._seen)
        if self._told or len(self._seen) < (self._seen.maxlen or 0) or kept >= LOW * len(self._seen):
            return None
        self._told = True
        (cause, count), *_ = Counter(reason for reason, _ in self._seen if reason).most_common(1)
        prompts = list(dict.fromkeys(prompt for reason, prompt in self._seen if reason == cause))[:SHOWN]
        why = CAUSES.get(cause, "thresholds that few groups pass: lower them; prompts: {prompts}")
        return (
            f"warning: {kept} of the last {len(self._seen)} groups teach anything; {count} of them: {cause}. "
            f"Likely {why.format(prompts=', '.join(prompts))}"
        )
