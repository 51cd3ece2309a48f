"""Sums of parameters times 0, by which training code keeps experts without tokens in autograd's graph.

    elif self.training: y[0, 0] += 0 * sum(p.sum() for p in expert.parameters())

They are 0 as long as no parameter is infinite or NaN, of an expert and of what has slices of a stack, whose gradient is
0 in the rows of such an expert without them.
"""

from __future__ import annotations

import ast

from compile_passes.source import names


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
