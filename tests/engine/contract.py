"""Looks in the sources of a vLLM, without importing it, for everything that hotspan's engine/ takes from there."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hotspan.engine.connector import HotspanConnector
from hotspan.engine.contract import METHODS, Method, overrides
from hotspan.engine.cuda import CudaWorker, asked_of_region
from hotspan.engine.manager import HotspanManager
from hotspan.engine.spec import HotspanSpec
from hotspan.engine.worker import HostWorker

from .vllm_attributes import ATTRIBUTES, Attributes

CLASSES = (HotspanConnector, HotspanManager, HotspanSpec, HostWorker, CudaWorker)
ENGINE = Path(__file__).parents[2] / "src/hotspan/engine"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Release = tuple[int, int]


class Found(NamedTuple):
    """A definition, and the module that it stands in."""

    module: str
    node: ast.stmt


class Sources:
    """The modules of a vLLM.

    root:    the directory that holds vllm/. changed: texts of files in it, to be read instead.
    """

    def __init__(self, root: Path, changed: Mapping[str, str] | None = None) -> None:
        self._root = root
        self._changed = {root / name: text for name, text in (changed or {}).items()}
        self._modules: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        """A module's syntax; None if there is no such module."""
        if name not in self._modules:
            path = self._path(name)
            self._modules[name] = None if path is None else ast.parse(self._text(path))
        return self._modules[name]

    def find(self, module: str, name: str) -> Found | None:
        """What a module means by a name, wherever it was imported from; it may be a submodule."""
        tree = self.module(module)
        if tree is None:
            return None
        for node in reversed(list(_statements(tree.body))):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(self._absolute(module, node), alias.name)
            elif name in _defined(node):
                return Found(module, node)
        if self.module(f"{module}.{name}") is not None:
            return Found(f"{module}.{name}", ast.Pass())
        return self._found_lazily(module, tree, name)

    def members(self, found: Found) -> "Members":
        """What a class has, of its own and of its bases."""
        members = Members()
        if isinstance(found.node, ast.ClassDef):
            for base in found.node.bases:
                name = base.value if isinstance(base, ast.Subscript) else base
                above = self.find(found.module, name.id) if isinstance(name, ast.Name) else None
                if above is not None and above.node is not found.node:
                    members.add_all(self.members(above))
            members.add(found.node)
        return members

    def _text(self, path: Path) -> str:
        return self._changed[path] if path in self._changed else path.read_text()

    def _path(self, name: str) -> Path | None:
        path = self._root.joinpath(*name.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = self._path(module)
        parts = module.split(".")
        package = parts if path is not None and path.name == "__init__.py" else parts[:-1]
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, node.module] if node.module else package)

    def _found_lazily(self, module: str, tree: ast.Module, name: str) -> Found | None:
        """As vllm/__init__.py has it: {"LLM": ".entrypoints.llm:LLM"}."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Constant):
                        where, _, attribute = str(value.value).partition(":")
                        return self.find(module + where if where.startswith(".") else where, attribute or name)
        return None


class Members:
    """A class: its methods by name, its attributes, and its fields in order."""

    def __init__(self) -> None:
        self.methods: dict[str, Function] = {}
        self.attributes: set[str] = set()
        self.fields: list[str] = []

    def add(self, node: ast.ClassDef) -> None:
        """Add what a class itself defines."""
        for statement in _statements(node.body):
            self.attributes |= _defined(statement)
            if isinstance(statement, Function):
                self.methods[statement.name] = statement
                self.attributes |= set(_set_on_self(statement))
            elif isinstance(statement, ast.AnnAssign):
                self.fields += [name for name in _defined(statement) if name not in self.fields]

    def add_all(self, base: "Members") -> None:
        """Add what a base has."""
        self.methods |= base.methods
        self.attributes |= base.attributes
        self.fields += [field for field in base.fields if field not in self.fields]


class Import(NamedTuple):
    """A name that a file of engine/ imports from vLLM."""

    file: str
    module: str
    name: str


def missing(sources: Sources, release: Release, engine: Path = ENGINE) -> list[str]:
    """What hotspan would not find in these sources, taken for this release; a sentence each."""
    found = [
        f"{each.file} imports {each.name} from {each.module}, where it is not"
        for each in imports(engine, release)
        if (sources.module(each.module) if each.name == "*" else sources.find(each.module, each.name)) is None
    ]
    methods = [*METHODS, *(method for ours in CLASSES for method in overrides(ours))]
    found += [line for method in methods if method.is_in(release) for line in _missing_method(sources, method)]
    return found + [line for each in ATTRIBUTES if each.is_in(release) for line in _missing_attributes(sources, each)]


def imports(engine: Path, release: Release) -> list[Import]:
    """What the files of engine/ import from vLLM in a release, functions' own imports too."""
    return [
        Import(path.name, node.module or "", alias.name)
        for path in sorted(engine.glob("*.py"))
        for node in _in_release(ast.parse(path.read_text()).body, release)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    ]


def read_of_region(sources: Sources) -> set[str]:
    """What vLLM's CUDA worker reads of the region that it is given."""
    tree = sources.module("vllm.v1.kv_offload.cpu.gpu_worker")
    assert tree is not None
    return asked_of_region(tree)


def _missing_method(sources: Sources, method: Method) -> Iterator[str]:
    owner, _, name = method.name.rpartition(".")
    found = sources.find(method.module, owner or name)
    node = None if found is None else found.node
    if found is not None and owner:
        node = sources.members(found).methods.get(name)
    if not isinstance(node, Function):
        yield f"{method.module} has no {method.name}"
        return
    arguments = node.args
    have = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    if [each for each in have if each in method.parameters] != list(method.parameters):
        yield f"{method.module}: {method.name} takes {have}, and not {list(method.parameters)}"


def _missing_attributes(sources: Sources, wanted: Attributes) -> Iterator[str]:
    found = sources.find(wanted.module, wanted.name)
    if found is None:
        yield f"{wanted.module} has no {wanted.name}"
        return
    members = sources.members(found)
    if absent := [name for name in wanted.attributes if name not in members.attributes]:
        yield f"{wanted.module}: {wanted.name} has no {absent}"
    if tuple(members.fields[: len(wanted.first)]) != wanted.first:
        yield f"{wanted.module}: {wanted.name} begins with {members.fields}, and not with {wanted.first}"


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """A body's statements, those of all branches included, but of no function and no class."""
    for node in body:
        if isinstance(node, ast.If | ast.For | ast.While):
            yield from _statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            handled = [each for handler in node.handlers for each in handler.body]
            yield from _statements([*node.body, *handled, *node.orelse, *node.finalbody])
        elif isinstance(node, ast.With):
            yield from _statements(node.body)
        else:
            yield node


def _defined(node: ast.stmt) -> set[str]:
    """The names that one statement gives a meaning, imports aside."""
    if isinstance(node, Function | ast.ClassDef):
        return {node.name}
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}


def _set_on_self(function: Function) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def _in_release(body: list[ast.stmt], release: Release) -> Iterator[ast.stmt]:
    """All statements of a body that are reached in a release, where it asks for that: `if ENGINE >= (0, 29):`."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and (holds := _holds(node.test, release)) is not None:
            yield from _in_release(node.body if holds else node.orelse, release)
            continue
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                yield from _in_release(inner, release)


def _holds(test: ast.expr, release: Release) -> bool | None:
    if not (isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "ENGINE"):
        return None
    if not isinstance(test.ops[0], ast.GtE | ast.Lt):
        return None  # whether the release is of a set, which says nothing of what there is in it
    bound = ast.literal_eval(test.comparators[0])
    return bool(release >= bound if isinstance(test.ops[0], ast.GtE) else release < bound)
