"""From a YAML file and overrides to a checked configuration, or to every problem there is, at once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from mdapo.config.megatron_options import check_options
from mdapo.config.presets import resolve_algorithm
from mdapo.config.problems import Problem, lines
from mdapo.config.rules import check_rules
from mdapo.config.schema import Config
from mdapo.config.source import Dumper, Tree, apply_overrides, close, read_file
from mdapo.config.words import keys_of, problems_of, section_of, spoilt_by
from mdapo.errors import UserError

SECTIONS = frozenset(key for key, field in keys_of() if section_of(field.annotation) is field.annotation)
MAPPINGS = tuple(key for key, field in keys_of() if get_origin(field.annotation) is dict)
_PLAIN_REFERENCE = re.compile(r"\$\{[A-Za-z_][\w\-]*(?:\.[\w\-]+)*\}")
_SECRET = re.compile(r"(?:^|[_\-.])(?:api_?)?(?:key|token|password|passwd|secret|credentials?)$", re.IGNORECASE)
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")
REDACTED = "<redacted>"
_FREE = frozenset(key.rsplit(".", 1)[-1] for key in MAPPINGS)  # "args" too, of rewards as of environments


@dataclass(frozen=True)
class Loaded:
    """A valid configuration, every preset resolved, and ``sources``: key -> ``file:line`` or ``command line``."""

    config: Config
    sources: Mapping[str, str]

    def resolved_yaml(self) -> str:
        """The whole configuration, defaults included, loadable again; passwords and keys are not in it."""
        data = _redacted(self.config.model_dump(), free=False)
        return yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read ``path`` over its ``base`` files, lay ``overrides`` (``a.b.c=value``) on it, resolve ``${a.b}``, check all.

    Raises ``UserError`` with all problems, each with its key, its place and, where one is near, what was meant.
    """
    _require_current_folder()
    tree = read_file(Path(path), sections=SECTIONS)
    apply_overrides(tree, overrides, sections=SECTIONS)
    _empty_mappings(tree.data)
    problems = _interpolate(tree)
    config, found = _validate(tree.data, skip={p.key for p in problems})
    problems += found
    if config is not None:
        spoilt = tuple(p.key for p in problems)
        problems += [p for p in check_rules(config) if not any(_touches(k, spoilt) for k in (p.key, *p.others))]
        problems += check_options(config)
    if problems:
        raise UserError(lines(problems, tree.places))
    assert config is not None
    return Loaded(config, tree.places)


def _require_current_folder() -> None:
    """Each process of a run starts in it, whatever the paths are."""
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(f"the current folder cannot be used: {error.strerror}; cd to one that exists") from error


def _empty_mappings(data: dict[str, Any]) -> None:
    """``engine_args: null`` takes away what a base file put there."""
    for path in MAPPINGS:
        *parents, last = path.split(".")
        node: Any = data
        for part in parents:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and last in node and node[last] is None:
            node[last] = {}


def _touches(key: str, spoilt: Iterable[str]) -> bool:
    """Whether a key, what holds it or what it holds is already known to be wrong."""
    return any(key == s or key.startswith(f"{s}.") or s.startswith(f"{key}.") for s in spoilt)


def _validate(data: dict[str, Any], *, skip: set[str]) -> tuple[Config | None, list[Problem]]:
    """The configuration and its schema problems. With problems, what is left when the spoilt keys are taken out, so
    that rules between keys can still be checked; None when that is not possible. ``skip``: keys already reported."""
    try:
        return _resolved(Config.model_validate(_without(data, skip))), []
    except ValidationError as error:
        problems = [p for p in problems_of(error) if p.key not in skip]
        spoilt = skip | spoilt_by(error)
    stand_in = {"model": {"path": "?"}, "data": {"train_files": ["?"]}}
    try:
        return _resolved(Config.model_validate(_filled(_without(data, spoilt), stand_in))), problems
    except ValidationError:
        return None, problems


def _resolved(config: Config) -> Config:
    return config.model_copy(update={"algorithm": resolve_algorithm(config.algorithm)})


def _without(data: Any, spoilt: Iterable[str], path: str = "") -> Any:
    """A copy without the entries whose dotted paths are ``spoilt``."""
    spoilt = set(spoilt)
    if isinstance(data, dict):
        pairs = ((k, v, f"{path}.{k}" if path else k) for k, v in data.items())
        return {k: _without(v, spoilt, full) for k, v, full in pairs if full not in spoilt}
    if isinstance(data, list):
        return [_without(v, spoilt, f"{path}.{i}") for i, v in enumerate(data) if f"{path}.{i}" not in spoilt]
    return data


def _filled(data: dict[str, Any], below: dict[str, Any]) -> dict[str, Any]:
    """``data`` over ``below``."""
    result = below | data
    for key in data.keys() & below.keys():
        if isinstance(data[key], dict) and isinstance(below[key], dict):
            result[key] = _filled(data[key], below[key])
    return result


def _interpolate(tree: Tree) -> list[Problem]:
    """Replace ``${a.b}`` by the value of ``a.b``, a default included: plain references, no functions."""
    places = list(_references(tree.data))
    if not places:
        return []
    # Imported here: it takes longer than everything else in this package, and few configurations need it.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    problems = []
    for keys in places:
        text = _at(tree.data, keys)
        if "${" in _PLAIN_REFERENCE.sub("", text):
            what = f"only references such as ${{data.train_prompt_bsz}} can be used, not {text!r}"
            problems.append(Problem(_dotted(keys), what))
    unusable = {p.key for p in problems}
    values = OmegaConf.create(_filled(_without(tree.data, unusable), _defaults(Config)))
    for keys in places:
        text = _at(tree.data, keys)
        if _dotted(keys) in unusable:
            continue
        try:
            value = _at(values, keys)
            plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except (OmegaConfBaseException, RecursionError):
            problems.append(Problem(_dotted(keys), _why_not(text, values)))
            continue
        _at(tree.data, keys[:-1])[keys[-1]] = plain
    return problems


def _dotted(keys: Sequence[str | int]) -> str:
    return ".".join(str(k) for k in keys)


def _why_not(text: str, values: Any) -> str:
    """What is wrong with a reference that could not be followed."""
    for reference in _PLAIN_REFERENCE.findall(text):
        try:
            _at(values, reference[2:-1].split("."))
        except (LookupError, TypeError, AttributeError):
            near = close(reference[2:-1], [key for key, _ in keys_of()])
            return f"{reference}: no such key" + (f", did you mean ${{{near}}}?" if near else "")
        except ValueError:
            continue
    return f"{text!r} leads in a circle back to itself"


def _references(data: Any, keys: tuple[str | int, ...] = ()) -> Iterable[tuple[str | int, ...]]:
    if isinstance(data, str) and "${" in data:
        yield keys
    elif isinstance(data, (dict, list)):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _references(value, (*keys, key))


def _at(data: Any, keys: Sequence[str | int]) -> Any:
    for key in keys:
        data = data[key]
    return data


def _defaults(section: type[BaseModel]) -> dict[str, Any]:
    """The schema's defaults, nested; required keys are left out."""
    result: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.default, BaseModel):
            result[name] = field.default.model_dump()
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            result[name] = _defaults(field.annotation)
        elif not field.is_required():
            result[name] = field.default
    return result


def _redacted(data: Any, *, free: bool) -> Any:
    """Secrets live only where keys are free (arguments of plug-ins and engines) and in URLs."""
    if isinstance(data, dict):
        return {
            k: REDACTED if free and isinstance(v, str) and _SECRET.search(k) else _redacted(v, free=free or k in _FREE)
            for k, v in data.items()
        }
    if isinstance(data, (list, tuple)):
        return [_redacted(v, free=free) for v in data]
    # A text that holds "${" is no reference any more: all of those are resolved.
    return _USER_INFO.sub(f"{REDACTED}@", data).replace("${", "\\${") if isinstance(data, str) else data
