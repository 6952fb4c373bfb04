"""What needs coherence and relevance, and whether they can be measured."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mdapo.config.embedding_folder import read_embedding_folder
from mdapo.config.paths import why_no_file
from mdapo.config.problems import Problem
from mdapo.config.schema import Config

MEASURES = ("coherence", "relevance")  # names of rewards too
METRICS = frozenset({*MEASURES, "combined"})
_URL = re.compile(r"https?://")


def quality_rules(config: Config) -> Iterator[Problem]:
    """Contradictions between ``quality`` and those who need it; one problem, however many need it."""
    quality, users = config.quality, _users(config)
    if quality.embeddings is None and users:
        yield Problem(
            "quality.embeddings",
            f"must be set with {users[0][1]}: a sentence-transformers folder, the URL of an embeddings endpoint "
            "(http://host:port/v1), or lexical (words alone)",
            tuple(key for key, _ in users),
        )
    remote = quality.embeddings is not None and _URL.match(quality.embeddings) is not None
    if remote and not quality.model:
        yield Problem("quality.model", "must be set when quality.embeddings is a URL", ("quality.embeddings",))
    for key in ("model", "key_file"):
        if not remote and getattr(quality, key) is not None:
            text = "is for an endpoint, but quality.embeddings is no URL"
            yield Problem(f"quality.{key}", text, ("quality.embeddings",))
    filters = config.algorithm.filter_groups
    shares = filters.metric == "acc" or filters.metric in METRICS
    if filters.enable and shares and filters.reward_threshold is not None and filters.reward_threshold > 1.0:
        key = "algorithm.filter_groups.reward_threshold"
        text = f"{filters.reward_threshold:g} is more than any group's mean of {filters.metric}, which is at most 1"
        yield Problem(key, text, ("algorithm.filter_groups.metric",))


def _users(config: Config) -> list[tuple[str, str]]:
    """(key, key=value) of what cannot do without."""
    filters, found = config.algorithm.filter_groups, []
    if filters.enable and filters.metric in METRICS:
        found.append(("algorithm.filter_groups.metric", f"algorithm.filter_groups.metric={filters.metric}"))
    if filters.enable and filters.min_coherence_score is not None:
        key = "algorithm.filter_groups.min_coherence_score"
        found.append((key, f"{key}={filters.min_coherence_score:g}"))
    named = [part.name for part in config.reward.functions if part.name in MEASURES]
    if named:
        found.append(("reward.functions", f"the reward {named[0]}"))
    return found


def quality_files(config: Config) -> list[Problem]:
    """The folder and the key file that are named, and cannot be used."""
    quality = config.quality
    problems: list[Problem] = []
    if quality.embeddings is not None and quality.embeddings != "lexical" and not _URL.match(quality.embeddings):
        problems += read_embedding_folder(quality.embeddings)[1]
    if quality.key_file is not None and (why := why_no_file(quality.key_file)):
        problems.append(Problem("quality.key_file", f"{why}: {quality.key_file}"))
    return problems
