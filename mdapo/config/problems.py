"""A problem with the configuration, before it is put into words for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mdapo.errors import UserError


@dataclass(frozen=True)
class Problem:
    """``key`` is where to look first; ``others`` are the keys whose values also took part."""

    key: str
    text: str
    others: tuple[str, ...] = ()


def either(values: Iterable[object]) -> str:
    """``1, 2 or 4``."""
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last


def require_none(problems: Iterable[Problem]) -> None:
    """Raises ``UserError`` with every problem there is."""
    if told := lines(problems, {}):
        raise UserError(told)


def lines(problems: Iterable[Problem], places: Mapping[str, str]) -> list[str]:
    """One line a problem: ``key: what is wrong (file:line)``; the place of a default is left out."""
    result = []
    for problem in problems:
        place = next((p for k in (problem.key, *problem.others) if (p := places.get(k)) is not None), None)
        key = problem.key if not re.search(r"\s", problem.key) else repr(problem.key)
        result.append(f"{key}: {problem.text}" + (f" ({place})" if place else ""))
    return result
