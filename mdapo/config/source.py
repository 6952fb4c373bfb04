"""YAML files and dotted overrides as plain data, with the place each key came from.

The loader is YAML's safe subset with YAML 1.2's plain scalars: ``1e-6`` is a number, ``yes`` and ``12:30`` are text. It
refuses duplicate keys, tags, anchors and keys that are not names.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mdapo.config.paths import why_no_file
from mdapo.errors import UserError

COMMAND_LINE = "command line"
MAX_BASES = 50  # files one on top of the other
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NULL = re.compile(r"~|null|Null|NULL|")
_NUMBER_STARTS = list("-+.0123456789")


class _Loader(yaml.SafeLoader):
    """Composes nodes only; `_Reader` makes values of them."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            what = "anchors and aliases are not used here; write ${section.key}"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=event.start_mark)
        if getattr(event, "tag", None) not in (None, "!"):
            raise yaml.MarkedYAMLError(
                problem=f"tags such as {event.tag} are not used here", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)


class Dumper(yaml.SafeDumper):
    """Quotes whatever either kind of YAML would read as something else than text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """In double quotes where single ones would lose an unusual line break."""
        unusual = any(c in data for c in "\x85\u2028\u2029")
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if unusual else None)


Dumper.add_representer(str, Dumper.represent_str)


_Loader.yaml_implicit_resolvers = {}  # those below only, not YAML 1.1's
for _kind in (_Loader, Dumper):
    for _tag, _pattern, _starts in (
        ("bool", _BOOL, list("tTfF")),
        ("int", _INT, _NUMBER_STARTS),
        ("float", _FLOAT, _NUMBER_STARTS),
        ("null", _NULL, ["~", "n", "N", ""]),
    ):
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern.pattern})\\Z"), _starts)


@dataclass
class Tree:
    """Nested plain data, and ``file:line`` (or ``command line``) of every key in it, by dotted path."""

    data: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)


def close(word: str, words: Collection[str], *, cutoff: float = 0.6) -> str | None:
    """The nearest of ``words``, if one is near."""
    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)), None)


def read_file(path: Path, *, sections: Collection[str]) -> Tree:
    """A file over its ``base`` files; ``sections`` are the keys that hold keys. ``UserError``: bad syntax."""
    return _Files(sections).read(path, ())


class _Files:
    """The files of one configuration: each is read once, however many name it as their base."""

    def __init__(self, sections: Collection[str]) -> None:
        self.sections = sections
        self._read: dict[str, Tree | UserError] = {}

    def read(self, path: Path, trail: tuple[Path, ...]) -> Tree:
        if why := why_no_file(path):
            raise UserError(f"{path}: {why}{_near_file(path) if why == 'no such file' else ''}")
        if any(os.path.samefile(path, p) for p in trail):
            raise UserError("base: a cycle: " + " -> ".join(str(p) for p in (*trail, path)))
        if len(trail) >= MAX_BASES:
            raise UserError(f"base: more than {MAX_BASES} files, one on top of the other, from {trail[0]} on")
        name = os.path.join(os.path.realpath(path.parent), path.name)  # a link's own bases lie beside the link
        if name not in self._read:
            try:
                self._read[name] = _over_bases(path, self, trail)
            except UserError as error:
                self._read[name] = error
        found = self._read[name]
        if isinstance(found, UserError):
            raise found
        return found


def _over_bases(path: Path, files: _Files, trail: tuple[Path, ...]) -> Tree:
    sections = files.sections
    own, places = _parse(_text(path), where=str(path))
    own = {} if own is None else own
    if not isinstance(own, dict):
        raise UserError(f"{path}: must hold sections with keys, not {type(own).__name__}")
    bases = own.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    place = places.get("base", str(path))
    if not isinstance(bases, list) or not all(isinstance(b, str) and b for b in bases):
        raise UserError(f"base: must be a file or a list of files ({place})")
    merged, problems = Tree(), []
    for base in bases:
        file = path.parent / base
        if why := why_no_file(file):
            near = _near_file(file) if why == "no such file" else ""
            problems.append(f"base: {why}: {file}{near} ({place})")
            continue
        try:
            parent = files.read(file, (*trail, path))
        except UserError as error:
            problems += [p for p in error.problems if p not in problems]
            continue
        merge(merged, parent, sections=sections)
    if problems:
        raise UserError(problems)
    merge(merged, Tree(own, {k: v for k, v in places.items() if k.split(".")[0] != "base"}), sections=sections)
    return merged


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _near_file(path: Path) -> str:
    stems = {p.stem: p for p in sorted(path.parent.glob("*.y*ml"))}
    near = close(path.stem, stems)
    return f", did you mean {stems[near]}?" if near else ""


def _parse(text: str, *, where: str, path: str = "") -> tuple[Any, dict[str, str]]:
    """Value and places of a YAML text; an empty text is an empty mapping."""
    loader = _Loader("")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        reader = _Reader(where)
        value = {} if node is None else reader.value(node, path)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{where}{line}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise UserError(f"{where}: nested too deeply") from error
    finally:
        loader.dispose()
    if reader.problems:
        raise UserError(reader.problems)
    return value, reader.places


class _Reader:
    """Nodes to values; collects places and problems."""

    def __init__(self, where: str) -> None:
        self.where, self.places, self.problems = where, {}, []

    def place(self, node: yaml.Node) -> str:
        return self.where if self.where == COMMAND_LINE else f"{self.where}:{node.start_mark.line + 1}"

    def value(self, node: yaml.Node, path: str) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            result = []
            for i, child in enumerate(node.value):
                key = f"{path}.{i}"
                self.places[key] = self.place(child)
                result.append(self.value(child, key))
            return result
        return self.scalar(node, path)

    def mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            name = key_node.value
            full = f"{path}.{name}" if path else str(name)
            if (kind := _no_name(key_node)) is not None:
                self.problems.append(
                    f"{path or 'top level'}: a key must be a name, not {kind} ({self.place(key_node)})"
                )
            elif "." in name:
                inside = name.replace(".", ": {") + ": ..." + "}" * name.count(".")
                self.problems.append(f"{full}: no dots in a file's keys; write {inside} ({self.place(key_node)})")
            elif name in result:
                self.problems.append(f"{full}: set twice, first in line {lines[name]} ({self.place(key_node)})")
            else:
                lines[name] = key_node.start_mark.line + 1
                self.places[full] = self.place(key_node)
                result[name] = self.value(value_node, full)
        return result

    def scalar(self, node: yaml.Node, path: str) -> Any:
        text, kind = node.value, node.tag.rsplit(":", 1)[-1]
        if "\0" in text:  # no path and no text of ours can hold one
            self.problems.append(f"{path}: a NUL character ({self.place(node)})")
            return ""
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "int" and len(text) > 40:  # Python refuses to parse very long integers; no key needs one
            self.problems.append(f"{path}: a number of {len(text)} digits ({self.place(node)})")
            return 0
        if kind == "int":
            return int(text, 16) if text.startswith("0x") else int(text.replace("_", ""))
        return float(text.replace("_", "")) if kind == "float" else text


def _no_name(key: yaml.Node) -> str | None:
    """What a key is that is no name; None for one that is."""
    kind = key.tag.rsplit(":", 1)[-1]
    if not isinstance(key, yaml.ScalarNode):
        return "a list" if isinstance(key, yaml.SequenceNode) else "a mapping"
    if kind == "str":
        text = key.value
        if not text:
            return "an empty text"
        return None if text.isprintable() and all(text.split(".")) else f"text {text!r}"
    return "nothing (null)" if kind == "null" else key.value.lower() if kind == "bool" else f"the number {key.value}"


def merge(into: Tree, over: Tree, *, sections: Collection[str]) -> None:
    """Lay ``over`` on ``into``: mappings key by key, all else (lists too) replaced. Empty sections change nothing."""
    into.data = _merged(into.data, over.data, into.places, sections=sections, path="")
    into.places |= over.places


def _merged(below: Any, above: Any, places: dict[str, str], *, sections: Collection[str], path: str) -> Any:
    if above is None and path in sections:
        return below if isinstance(below, dict) else {}
    if isinstance(below, dict) and isinstance(above, dict):
        result = dict(below)
        for key, value in above.items():
            full = f"{path}.{key}" if path else key
            result[key] = _merged(below.get(key), value, places, sections=sections, path=full)
        return result
    for stale in [k for k in places if k.startswith(path + ".")]:
        del places[stale]
    if isinstance(above, dict):
        return {
            k: _merged(None, v, places, sections=sections, path=f"{path}.{k}" if path else k) for k, v in above.items()
        }
    return above


def apply_overrides(tree: Tree, overrides: Sequence[str], *, sections: Collection[str]) -> None:
    """Lay ``a.b.c=value`` on the tree, in order; ``UserError`` names every one that cannot be read."""
    problems: list[str] = []
    for override in overrides:
        try:
            _apply(tree, override, sections=sections)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)


def _apply(tree: Tree, override: str, *, sections: Collection[str]) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or not all(re.fullmatch(r"\w[\w\-]*", p) for p in parts):
        raise UserError(f"{override!r}: an override is written section.key=value ({COMMAND_LINE})")
    if parts[0] == "base":
        raise UserError(f"base: can be set in a file only ({COMMAND_LINE})")
    if not text.strip():
        raise UserError(f"{key}: no value; write {key}=null, or {key}=\"''\" for an empty text ({COMMAND_LINE})")
    try:
        value, places = _parse(text, where=COMMAND_LINE, path=key)
    except UserError as error:
        quoted = f"quote text that holds special characters: {key}=\"'...'\""
        raise UserError([f"{key}: {p} ({quoted})" for p in error.problems]) from error
    for i in range(len(parts), 0, -1):
        value = {parts[i - 1]: value}
        prefix = ".".join(parts[:i])
        places[prefix] = COMMAND_LINE if i == len(parts) else tree.places.get(prefix, COMMAND_LINE)
    merge(tree, Tree(value, places), sections=sections)
