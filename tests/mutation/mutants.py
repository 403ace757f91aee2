"""Small changes of a module that may break it: each is a mutant that a test should notice."""

from __future__ import annotations

import ast
import collections
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
IN_SQL = (
    (" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > "), (" = ", " <> "), (" + ", " - "),
    (" - ", " + "), (" AND ", " OR "), (" OR ", " AND "), (" IS NULL", " IS NOT NULL"), ("ORDER BY", "--"),
)  # fmt: skip
SQL = re.compile(r"\b(SELECT|INSERT INTO|UPDATE|DELETE FROM|WHERE|SET|AND|expires)\s")
SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Delete)
UNASKED = (ast.Import, ast.ImportFrom, ast.Pass)


@dataclass(frozen=True)
class Mutant:
    """A changed module. The name says in which function what became what, whatever the line is by then."""

    path: str
    line: int
    name: str
    source: str


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module, in the order of its lines."""
    tree, names = ast.parse(source), collections.Counter[str]()
    for parent, field, index, node, where in _places(tree, ""):
        for changed in _changes(node):
            before, after = _text(node), "nothing" if changed is None else _text(changed)
            if before == after or (
                changed is None and not where
            ):  # a module without a name cannot be imported
                continue
            old = getattr(parent, field)
            new = ast.copy_location(ast.Pass() if changed is None else changed, node)
            if index is None:
                setattr(parent, field, new)
            else:
                old[index] = new
            names[name := f"{where}: {before} -> {after}"] += 1
            if names[name] > 1:
                name += f" ({names[name]})"
            yield Mutant(path, node.lineno, name, ast.unparse(tree))
            if index is None:
                setattr(parent, field, old)
            else:
                old[index] = node


def _places(node: ast.AST, where: str) -> Iterator[tuple[ast.AST, str, int | None, ast.AST, str]]:
    """Yield what can be changed within a node: its parent, field and index, itself, and the function."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases", "ops", "op", "ctx", "type"):
            continue
        several = isinstance(value, list)
        for index, child in enumerate(value if several else [value]):
            if not isinstance(child, ast.AST) or isinstance(child, UNASKED) or _is_docstring(child):
                continue
            inner = where
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = f"{where}.{child.name}".lstrip(".")
            if hasattr(child, "lineno"):
                yield node, field, index if several else None, child, inner
            if not isinstance(child, ast.Raise):  # what an error says is for people
                yield from _places(child, inner)


def _changes(node: ast.AST) -> Iterator[ast.AST | None]:
    """Yield what may stand in a node's place; `None` is a statement's absence."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        yield ast.Compare(node.left, [COMPARED[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED and not _has_text(node):
        yield ast.BinOp(node.left, COMPUTED[type(node.op)](), node.right)
    elif isinstance(node, ast.Constant):
        yield from _constants(node.value)
    elif isinstance(node, (ast.If, ast.While)) and not isinstance(node.test, (ast.Compare, ast.UnaryOp)):
        yield type(node)(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Return) and node.value is not None and _text(node.value) != "None":
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, (ast.Break, ast.Continue)):
        yield ast.Continue() if isinstance(node, ast.Break) else ast.Break()
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        other = ast.Name("max" if node.func.id == "min" else "min", ast.Load())
        yield ast.Call(other, node.args, node.keywords)
    elif isinstance(node, ast.AugAssign) and type(node.op) in COMPUTED:
        yield ast.AugAssign(node.target, COMPUTED[type(node.op)](), node.value)
    if isinstance(node, SIMPLE) and not _is_docstring(node):
        yield None


def _constants(value: object) -> Iterator[ast.AST]:
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, (int, float)):
        yield ast.Constant(value + 1)
        if value > 0:
            yield ast.Constant(value - 1)
    elif isinstance(value, str) and SQL.search(value):
        for old, new in IN_SQL:
            for found in re.finditer(re.escape(old), value):
                yield ast.Constant(value[: found.start()] + new + value[found.end() :])


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _has_text(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in ast.walk(node))


def _text(node: ast.AST) -> str:
    """Return the first line of a node's code, which is enough to find it."""
    text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(node)))
    return re.sub(r"\s+", " ", text if isinstance(node, ast.Constant) else text.partition("\n")[0])
