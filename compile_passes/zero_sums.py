"""Sums of parameters times 0, by which training code keeps experts without tokens in autograd's graph.

    elif self.training: y[0, 0] += 0 * sum(p.sum() for p in expert.parameters())

They are 0 as long as no parameter is infinite or NaN, of an expert and of what has slices of a stack, whose gradient is
0 in the rows of such an expert without them.

    else: out = out + expert(torch.zeros_like(x[:1]))

So is what experts without biases make of zeros, as Nemotron-H has it; that these have none is found out by the trial.
"""

from __future__ import annotations

import ast

from compile_passes.emptiness import Tests, is_empty
from compile_passes.source import ZEROS, Scope, called, names


def is_zero_sum(node: ast.AST) -> bool:
    """`0 * sum(p.sum() for p in module.parameters())`, the other way round, of a list, with 0.0."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    sides = [(node.left, node.right), (node.right, node.left)]
    return any(isinstance(one, ast.Constant) and one.value in (0, 0.0) and _is_sum(other) for one, other in sides)


def _is_sum(node: ast.expr) -> bool:
    made = node.args[0] if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords else None
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != "sum":
        return False
    if not isinstance(made, ast.GeneratorExp | ast.ListComp) or len(made.generators) != 1 or made.generators[0].ifs:
        return False
    part, asked = ast.unparse(made.generators[0].target), made.generators[0].iter
    called = asked.func if isinstance(asked, ast.Call) and not asked.args and not asked.keywords else None
    return (
        isinstance(called, ast.Attribute) and called.attr == "parameters" and ast.unparse(made.elt) == f"{part}.sum()"
    )


def drop_zero_sums(tree: ast.FunctionDef) -> list[str]:
    """Leave them out where they are added to something, and `if` that does nothing, or the same, without them; which
    they are, one line each.
    """
    dropping = _Dropping()
    dropping.visit(tree)
    return dropping.said


def drop_results_of_zeros(tree: ast.FunctionDef) -> list[str]:
    """Leave out what a loop adds for an expert without tokens where that is made of zeros; which, one line each."""
    said = []
    asked = Tests(Scope(tree), frozenset(), None, any_rows=True)
    tests = [node for loop in ast.walk(tree) if isinstance(loop, ast.For) for node in ast.walk(loop)]
    for test in [node for node in tests if isinstance(node, ast.If) and node.orelse]:
        inner = test.orelse[0]
        only = len(test.orelse) == 1 and isinstance(inner, ast.If) and not inner.orelse and _is_plain(inner.test)
        body = inner.body if only and isinstance(inner, ast.If) else test.orelse
        added = _added(body) if is_empty(test.test, test, asked) is False else None
        if added is not None and not _own(body) & _read_outside(tree, body):
            test.orelse = []
            what = f"`{ast.unparse(added)}`, which experts make of zeros, and which is 0"
            said.append(f"line {body[-1].lineno}: without {what}")
    return said


def _added(body: list[ast.stmt]) -> ast.expr | None:
    """What the last statement adds to something, where the others only make that of zeros."""
    *before, last = body
    if not all(isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name) for part in before):
        return None
    match last:
        case ast.AugAssign(op=ast.Add(), value=added):
            pass
        case ast.Assign([ast.Name(to), *_], ast.BinOp(ast.Name(left), ast.Add(), added)) if to == left:
            pass
        case _:
            return None
    parts = [node for part in body for node in ast.walk(part) if isinstance(node, ast.Call)]
    return added if any(called(part) in ZEROS for part in parts) else None


def _own(body: list[ast.stmt]) -> set[str]:
    """The names that all statements but the last assign to."""
    parts = [node for part in body[:-1] for node in ast.walk(part) if isinstance(node, ast.Name)]
    return {node.id for node in parts if isinstance(node.ctx, ast.Store)}


def _read_outside(tree: ast.FunctionDef, body: list[ast.stmt]) -> set[str]:
    inside = {id(node) for part in body for node in ast.walk(part)}
    rest = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in inside]
    return {node.id for node in rest if isinstance(node.ctx, ast.Load)}


class _Dropping(ast.NodeTransformer):
    def __init__(self) -> None:
        self.said: list[str] = []

    def _drop(self, node: ast.AST) -> None:
        line, text = getattr(node, "lineno", 0), ast.unparse(node)
        self.said.append(f"line {line}: without `{text}`, which is 0 as long as all weights are finite")

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST | None:
        if isinstance(node.op, ast.Add) and is_zero_sum(node.value):
            self._drop(node.value)
            return None
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        for one, other in ((node.left, node.right), (node.right, node.left)):
            if isinstance(node.op, ast.Add) and is_zero_sum(one):
                self._drop(one)
                return ast.copy_location(self.visit(other), node)  # type: ignore[no-any-return]
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt] | None:
        before = len(self.said)
        self.generic_visit(node)
        if len(self.said) == before:
            return node
        if not node.body and not node.orelse and _is_plain(node.test):
            return None
        node.body = node.body or [ast.copy_location(ast.Pass(), node)]
        same = [ast.dump(part) for part in node.body] == [ast.dump(part) for part in node.orelse]
        return node.body if same else node


def _is_plain(test: ast.expr) -> bool:
    """Whether a condition does nothing but read attributes of the module."""
    kinds = ast.Attribute | ast.Name | ast.Load | ast.UnaryOp | ast.Not | ast.BoolOp | ast.And | ast.Or
    return names(test) == {"self"} and all(isinstance(part, kinds) for part in ast.walk(test))
