"""Which tests judge real time: what `test_tree.py` forbids outside the mark `slow`.

A test judges time if it, or a function of tests that it uses, compares a reading of a clock of the module `time`, or
what was computed from one, by <, <=, > or >=. A hang guard is no such comparison: an elapsed time below 60 s or more,
or a deadline that lies as far ahead.

Not seen: a sleep before an assertion; a time limit that is given to a call (`wait_for`, `timeout=`, `join`); clocks of
objects (`clock.monotonic()`, `loop.time()`), of other modules and of other processes; times that pass through an
attribute, a container's item, a parameter or a function of another module.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "thread_time", "process_time", "time"}
GUARD_S = 60.0
MARKS = {"slow"}
ORDERS = ast.Lt | ast.LtE | ast.Gt | ast.GtE

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """A module of tests."""

    def __init__(self, path: Path, name: str) -> None:
        self.name, self.path = name, path
        self.tree = ast.parse(path.read_text())
        nodes = list(ast.walk(self.tree))
        self.functions = [node for node in nodes if isinstance(node, Function)]
        self._reads_clocks = any(isinstance(node, ast.Call) and is_clock(node) for node in nodes)
        self._constants = {
            node.targets[0].id: node.value.value
            for node in self.tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        self.imported = {
            (alias.asname or alias.name): (self._source(node), alias.name)
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        self._returning: set[str] = set()

    def _source(self, node: ast.ImportFrom) -> str:
        package = self.name.split(".")[: -node.level] if node.level else []
        return ".".join([*package, *filter(None, [node.module])])

    @cached_property
    def judging(self) -> set[str]:
        """The functions that compare times, by name."""
        found: set[str] = set()
        while self._reads_clocks:
            before = len(self._returning)
            for function in self.functions:
                timed = self._timed(function)
                if any(self._judges(each, timed) for each in ast.walk(function) if isinstance(each, ast.Compare)):
                    found.add(function.name)
                returned = [each.value for each in ast.walk(function) if isinstance(each, ast.Return) and each.value]
                if any(self._is_time(each, timed) for each in returned):
                    self._returning.add(function.name)
            if len(self._returning) == before:
                break
        return found

    def _timed(self, function: Function) -> set[str]:
        """The names in it that hold a time."""
        timed: set[str] = set()
        before = -1
        while len(timed) > before:
            before = len(timed)
            for name, value in assigned(function):
                if self._is_time(value, timed) and not self._is_far(value):
                    timed.add(name)
        return timed

    def _is_time(self, node: ast.expr, timed: set[str]) -> bool:
        match node:
            case ast.Name():
                return node.id in timed
            case ast.Call(func=ast.Name(id=called)) if called.islower():
                return called in self._returning or any(self._is_time(each, timed) for each in node.args)
            case ast.Call():
                return is_clock(node)
            case ast.BinOp() | ast.UnaryOp() | ast.IfExp() | ast.List() | ast.Tuple() | ast.Subscript() | ast.Await():
                return any(
                    self._is_time(each, timed) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)
                )
            case ast.GeneratorExp() | ast.ListComp():
                return self._is_time(node.elt, timed)
        return False

    def _is_far(self, node: ast.expr) -> bool:
        """Whether it is a time and a hang guard's seconds."""
        return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and self._is_guard(node.right)

    def _is_guard(self, node: ast.expr) -> bool:
        """Whether it is so many seconds, or what a caller or another module says."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Add):
            return self._is_guard(node.left) or self._is_guard(node.right)
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(node, ast.Name):
            value = self._constants.get(node.id, GUARD_S)
        return isinstance(value, int | float) and value >= GUARD_S

    def _judges(self, node: ast.Compare, timed: set[str]) -> bool:
        sides = [node.left, *node.comparators]
        if not all(isinstance(each, ORDERS) for each in node.ops) or not any(
            self._is_time(each, timed) for each in sides
        ):
            return False
        if len(sides) > 2:
            return True
        least, most = sides if isinstance(node.ops[0], ast.Lt | ast.LtE) else sides[::-1]
        clocks = [isinstance(each, ast.Call) and is_clock(each) for each in (least, most)]
        if any(clocks):  # now < deadline, deadline < now
            return self._is_time(most if clocks[0] else least, timed)
        return not self._is_guard(most)


def assigned(function: Function) -> Iterator[tuple[str, ast.expr]]:
    """Names of a function, each with what it is given."""
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if len(names) == len(values):
                yield from (
                    (name.id, value) for name, value in zip(names, values, strict=True) if isinstance(name, ast.Name)
                )
            case ast.Assign(targets=[ast.Tuple(elts=names)]):
                yield from ((name.id, node.value) for name in names if isinstance(name, ast.Name))
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AugAssign(target=ast.Name(id=name)):
                yield name, node.value
            case ast.NamedExpr(target=ast.Name(id=name)):
                yield name, node.value
            case ast.Call(func=ast.Attribute(attr="append", value=ast.Name(id=name)), args=[value]):
                yield name, value


def is_clock(node: ast.Call) -> bool:
    """Whether it reads a clock of the module `time`."""
    match node.func:
        case ast.Attribute(value=ast.Name(id="time"), attr=attr):
            return attr in CLOCKS
    return False


def names(node: ast.AST) -> set[str]:
    """The names and attributes that it uses."""
    used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return used | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def marks(nodes: Iterable[ast.AST]) -> set[str]:
    """The names of pytest's marks in these."""
    return {
        each.attr
        for node in nodes
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Attribute) and each.value.attr == "mark"
    }


def module_at(path: Path, root: Path) -> Module:
    """A module of tests below `root`."""
    return Module(path, ".".join(path.relative_to(root.parent).with_suffix("").parts))


def judging_tests(root: Path) -> set[str]:
    """The tests below a directory that judge real time and are not marked so, each as `path::name`."""
    texts = {path: path.read_text() for path in root.rglob("*.py")}
    reading = {path for path, text in texts.items() if any(f"time.{clock}(" in text for clock in CLOCKS)}
    modules = [module_at(path, root) for path in reading]
    helpers = {(module.name, name) for module in modules for name in module.judging}
    names_of_helpers = {name for _, name in helpers}
    users = [path for path, text in texts.items() if any(name in text for name in names_of_helpers)]
    modules += [module_at(path, root) for path in users if path not in reading]
    found = set()
    for module in modules:
        judging = module.judging | {name for name, source in module.imported.items() if source in helpers}
        if not judging:
            continue
        used = {each.name: names(each) for each in module.functions}
        while more := {name for name in used if judging & used[name]} - judging:
            judging |= more
        of_module = marks(node for node in module.tree.body if isinstance(node, ast.Assign))
        for each in module.functions:
            is_marked = MARKS & (of_module | marks(each.decorator_list))
            if each.name.startswith("test_") and each.name in judging and not is_marked:
                found.add(f"{module.path.relative_to(root.parent)}::{each.name}")
    return found
