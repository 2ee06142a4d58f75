"""Small faults in a module's source: what may be changed in it, and the source with one change.

A mutant changes one expression or statement that runs: a comparison, a logical or arithmetic operator, a number, a
condition, what a function returns, or a call whose result nobody takes. Texts for people, annotations, decorators, log
lines and what runs for type checkers alone are left as they are.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_LOGS = frozenset({"logger", "logging", "log", "warnings"})


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of a module.

    lines: the first and the last of the statement that has it, without what stands in its blocks; from 1.
    start, end: the characters that `after` replaces.
    nth: which of the function's mutants with the same texts; from 1.
    """

    path: str
    function: str
    lines: tuple[int, int]
    before: str
    after: str
    start: int
    end: int
    nth: int = 1

    @property
    def name(self) -> str:
        """What it is called in lists, whatever lines are added before it."""
        which = f" ({self.nth})" if self.nth > 1 else ""
        return f"{self.path} {self.function}: {self.before} -> {self.after}{which}"

    def applied(self, source: str) -> str:
        """The module with the change."""
        return source[: self.start] + self.after + source[self.end :]


def mutants(path: str, source: str) -> list[Mutant]:
    """All mutants of a module, by their places."""
    found = sorted(set(_Finder(path, source).found()), key=lambda each: (each.start, each.end, each.after))
    seen: Counter[str] = Counter()
    for n, each in enumerate(found):
        seen[each.name] += 1
        found[n] = replace(each, nth=seen[each.name])
    return found


def is_python(mutant: Mutant, source: str) -> bool:
    """Whether the module with the change can be compiled at all."""
    try:
        compile(mutant.applied(source), "mutant", "exec")
    except SyntaxError:
        return False
    return True


class _Finder:
    def __init__(self, path: str, source: str) -> None:
        self._path = path
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._lines = source.splitlines(keepends=True)

    def found(self) -> Iterator[Mutant]:
        yield from self._inside(ast.parse(self._source), "module", (1, 1))

    def _inside(self, node: ast.AST, function: str, lines: tuple[int, int]) -> Iterator[Mutant]:
        for child in _running(node):
            at = _lines(child) if isinstance(child, ast.stmt) else lines
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = child.name if function == "module" else f"{function}.{child.name}"
                yield from self._inside(child, name, at)
            else:
                yield from self._of(child, function, at)
                yield from self._inside(child, function, at)

    def _of(self, node: ast.AST, function: str, lines: tuple[int, int]) -> Iterator[Mutant]:
        for changed in _changes(node):
            start, end = self._at(node)
            text = ast.unparse(changed)
            if isinstance(node, ast.expr) and not isinstance(node, ast.Constant):
                text = f"({text})"
            yield Mutant(self._path, function, lines, " ".join(self._source[start:end].split()), text, start, end)

    def _at(self, node: ast.AST) -> tuple[int, int]:
        """The characters of a node; the columns of ast are bytes of UTF-8."""
        assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno is not None and node.end_col_offset is not None

        def place(line: int, column: int) -> int:
            return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

        return place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)


def _lines(statement: ast.stmt) -> tuple[int, int]:
    """Those of a statement, without its blocks."""
    body = getattr(statement, "body", None)
    last = int(body[0].lineno) - 1 if body else int(statement.end_lineno or statement.lineno)
    return statement.lineno, max(statement.lineno, last)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that run, and that are not for people alone."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):  # their texts
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params", "bases", "keywords_of_class"):
            continue
        if isinstance(node, ast.ClassDef) and name == "keywords":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_for_people(child):
                yield child


def _is_for_people(node: ast.AST) -> bool:
    """A log line, or the text of an option's help."""
    if isinstance(node, ast.Expr):
        return _is_for_people(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        root = node.func.value
        return isinstance(root, ast.Name) and root.id in _LOGS
    return False


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """What a node is changed into."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield ast.Compare(node.left, [_COMPARISONS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS and not _joins_texts(node):
        yield ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Constant):
        yield from _other_constants(node)
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, ast.AugAssign) and type(node.op) in _OPERATORS:
        yield ast.AugAssign(node.target, _OPERATORS[type(node.op)](), node.value)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        yield ast.Pass()
    elif isinstance(node, ast.Continue):
        yield ast.Break()
    elif isinstance(node, ast.Break):
        yield ast.Continue()


def _other_constants(node: ast.Constant) -> Iterator[ast.AST]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _joins_texts(node: ast.BinOp) -> bool:
    """A text put together, or formatted with %: its other form is a TypeError, which tells nothing."""
    return any(
        isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Constant) and isinstance(each.value, str | bytes))
        for each in (node.left, node.right)
    )
