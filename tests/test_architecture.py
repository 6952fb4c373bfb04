"""Sizes and directions that keep the code readable, held by reading the source. Each failure names file and line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mdapo"
MODULE_LINES, FUNCTION_LINES, STEP_LINES, RUN_LINES = 400, 80, 45, 60
DOCUMENT_LINES = {"README.md": 150, "CONTRIBUTING.md": 150, "scripts/slurm.sbatch": 60}

# Bottom to top; nothing imports upwards.
LEVELS = (
    ("errors",),
    ("types",),
    ("device", "config"),
    ("ops", "algorithms", "environments", "rewards", "tracking", "plugins"),
    ("data", "megatron"),
    ("rollout",),
    ("sync",),
    ("trainer",),
    ("check", "doctor"),
    ("cli",),
)
LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts}
STRANGERS = {("megatron", "rollout"), ("rollout", "megatron")}
CONFIG_MAY_NOT_IMPORT = {"torch", "megatron", "transformers"}
# What turns bytes into a program when they are read. The names of calls are those that pickle whatever they are given.
PICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
PICKLING_CALLS = {
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "ForkingPickler", "MultiprocessingSerializer", "Unpickler", "rpc_sync"),
}
UNPICKLING_LOADS = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
HTTP_CLIENTS = {"aiohttp", "httpx", "requests", "urllib3"}
HTTP_IMPORTERS = ("mdapo.rollout", "mdapo.environments.chat_api")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str | None:
    """The part of mdapo a module belongs to; None for mdapo itself and for other packages."""
    names = module.split(".")
    return names[1] if names[0] == "mdapo" and len(names) > 1 else None


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def imports(path: Path, *, only_at_import: bool = False) -> Iterator[tuple[str, int]]:
    """Module and line of each import that runs; with ``only_at_import`` those in functions are left out."""
    yield from _imports(parse(path), only_at_import=only_at_import)


def _imports(node: ast.AST, *, only_at_import: bool) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if only_at_import and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: imports are absolute"
            assert child.module is not None
            yield child.module, child.lineno
            yield from ((f"{child.module}.{alias.name}", child.lineno) for alias in child.names)
        else:
            yield from _imports(child, only_at_import=only_at_import)


def in_package(path: Path, *, only_at_import: bool = False) -> set[str]:
    known = {module_name(p) for p in sources("mdapo")}
    found = {module for module, _ in imports(path, only_at_import=only_at_import)}
    return (found & known) - {module_name(path)}


def problems_listed(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


def test_modules_are_short() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources("mdapo")}
    problems_listed([f"{where(p, n)}: {n} lines, at most {MODULE_LINES}" for p, n in lines.items() if n > MODULE_LINES])


def test_functions_are_short() -> None:
    found = [(path, f) for path in sources("mdapo", "scripts", "benchmarks") for f in functions(parse(path))]
    problems_listed(
        [
            f"{where(path, f.lineno)}: {f.name} has {length(f)} lines, at most {FUNCTION_LINES}"
            for path, f in found
            if length(f) > FUNCTION_LINES
        ]
    )


@pytest.mark.parametrize(
    ("file", "name", "limit"), [("trainer/step.py", "step", STEP_LINES), ("trainer/run.py", "run", RUN_LINES)]
)
def test_the_step_and_the_run_fit_on_a_screen(file: str, name: str, limit: int) -> None:
    (function,) = (f for f in functions(parse(PACKAGE / file)) if f.name == name)
    assert length(function) <= limit, f"{where(PACKAGE / file, function.lineno)}: {length(function)} lines"


def test_every_part_has_its_level() -> None:
    parts = {part_of(module_name(path)) for path in sources("mdapo")} - {None}
    assert parts <= LEVEL_OF.keys(), f"no level for {sorted(map(str, parts - LEVEL_OF.keys()))}: add it to LEVELS"


def test_imports_go_downwards_only() -> None:
    problems = []
    for path in sources("mdapo"):
        own = part_of(module_name(path))
        for module, line in imports(path):
            other = part_of(module)
            if own is None or other is None or other == own or other not in LEVEL_OF:
                continue
            if LEVEL_OF[other] > LEVEL_OF[own] or (own, other) in STRANGERS:
                problems.append(f"{where(path, line)}: {own} imports {module}")
    problems_listed(problems)


def test_parts_that_the_rules_name_exist() -> None:
    """In LEVELS, STRANGERS and HTTP_IMPORTERS here, and in import-linter's layers."""
    linted = re.findall(r"mdapo\.(\w+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    parts = {*LEVEL_OF, *(part for pair in STRANGERS for part in pair), *linted}
    named = {f"mdapo.{part}" for part in parts} | set(HTTP_IMPORTERS)
    known = {module_name(path) for path in sources("mdapo")}
    known |= {name.rpartition(".")[0] for name in known}
    assert named <= known, f"named but not there: {sorted(named - known)}"


def test_only_the_actor_imports_megatron() -> None:
    """By name, wherever the import stands; the tests of other parts need no megatron either."""
    problems_listed(
        [
            f"{where(path, line)}: imports {module}"
            for path in sources("mdapo")
            if part_of(module_name(path)) != "megatron"
            for module, line in imports(path)
            if module.split(".")[0] == "megatron"
        ]
    )


def test_json_is_strict() -> None:
    """NaN and Infinity are no JSON: what is written for others to read never holds them."""
    own = {"data/wire.py", "rewards/processes.py"}  # read by mdapo alone, where a NaN of the user's data must survive
    own |= {"trainer/flow.py", "megatron/layout.py"}  # from rank to rank, where a loss may be NaN
    own |= {"trainer/launch.py"}  # codes and texts
    problems_listed(
        [
            f"{where(path, call.lineno)}: json without allow_nan=False"
            for path in sources("mdapo")
            if str(path.relative_to(PACKAGE)) not in own
            for call in ast.walk(parse(path))
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr in ("dump", "dumps")
            and isinstance(call.func.value, ast.Name)
            and call.func.value.id == "json"
            and not any(k.arg == "allow_nan" for k in call.keywords)
        ]
    )


def test_configuration_is_read_without_torch() -> None:
    """No module that ``mdapo.config`` reaches at import, however far, imports torch, megatron or transformers."""
    by_name = {module_name(path): path for path in sources("mdapo")}
    todo = [name for name in by_name if part_of(name) == "config"]
    seen: dict[str, str] = dict.fromkeys(todo, "")
    problems = []
    while todo:
        name = todo.pop()
        for module, line in imports(by_name[name], only_at_import=True):
            if module.split(".")[0] in CONFIG_MAY_NOT_IMPORT:
                problems.append(f"{where(by_name[name], line)}: imports {module}{seen[name]}")
        for other in in_package(by_name[name], only_at_import=True) - seen.keys():
            seen[other] = f" (reached from {name})"
            todo.append(other)
    problems_listed(problems)


def test_only_engines_speak_http() -> None:
    problems_listed(
        [
            f"{where(path, line)}: imports {module}"
            for path in sources("mdapo")
            if not module_name(path).startswith(HTTP_IMPORTERS)
            for module, line in imports(path)
            if module.split(".")[0] in HTTP_CLIENTS
        ]
    )


def test_nothing_is_pickled() -> None:
    """Neither onto a socket nor into a file, in what mdapo and its scripts run."""
    problems = []
    for path in sources("mdapo", "scripts"):
        tree = parse(path)
        problems += [
            f"{where(path, line)}: imports {module}"
            for module, line in imports(path)
            if module.split(".")[0] in PICKLERS or module.startswith(("multiprocessing", "torch.multiprocessing"))
        ]
        problems += [f"{where(path, line)}: {what}" for line, what in pickling(tree)]
    problems_listed(problems)


def pickling(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and reason of each call that pickles, or may unpickle."""
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in PICKLING_CALLS and isinstance(node, ast.Attribute | ast.Name):
            yield node.lineno, f"{name} pickles"
        if isinstance(node, ast.Call) and (rule := UNPICKLING_LOADS.get(ast.unparse(node.func))):
            key, wanted = rule
            if not any(
                k.arg == key and isinstance(k.value, ast.Constant) and k.value.value is wanted for k in node.keywords
            ):
                yield node.lineno, f"{ast.unparse(node.func)} without {key}={wanted}"


@pytest.mark.parametrize(
    "code",
    ["torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f, allow_pickle=True)", "dist.gather_object(x)"],
)
def test_pickling_is_found(code: str) -> None:
    assert list(pickling(ast.parse(code)))
    assert not list(pickling(ast.parse("torch.load(f, weights_only=True); np.load(f, allow_pickle=False)")))


def test_no_import_cycles() -> None:
    graph = {module_name(path): in_package(path, only_at_import=True) for path in sources("mdapo")}
    problems_listed([" -> ".join(cycle) for cycle in cycles(graph)])


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Each cycle that a depth-first walk closes, as the modules along it."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            found.append([*trail[trail.index(name) :], name])
        elif name not in done:
            for other in sorted(graph[name]):
                visit(other, [*trail, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return found


def test_cycles_are_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c", "b"]]
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_drawer_for_everything() -> None:
    names = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    problems_listed([where(path, 1) for path in sources("mdapo") if path.name in names])


def test_every_module_says_what_it_is() -> None:
    without = [p for p in sources("mdapo") if p.read_text(encoding="utf-8").strip() and not ast.get_docstring(parse(p))]
    problems_listed([f"{where(path, 1)}: no docstring" for path in without])


@pytest.mark.parametrize(("name", "limit"), DOCUMENT_LINES.items())
def test_documents_keep_to_their_length(name: str, limit: int) -> None:
    lines = len((ROOT / name).read_text(encoding="utf-8").splitlines())
    assert lines <= limit, f"{name}: {lines} lines, at most {limit}"
