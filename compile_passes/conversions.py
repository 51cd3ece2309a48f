"""`self.classifier = self.classifier.to(self.dtype)` in a forward: left out where the weights have that dtype.

Written so that a router runs in float32 whatever the model's dtype is, it does something in the first call alone, which
is done when the module is bound. In a graph it replaces the memory of a weight, after which nothing that the graph says
of its tensors can be trusted.
"""

from __future__ import annotations

import ast
import copy

import torch
from torch import nn

from compile_passes.source import NotStatic, Source, blocks, called, held, methods_of, sure
from compile_passes.static_loops import StaticForm


def without_conversions(module: nn.Module) -> StaticForm | None:
    """The methods of a module without such statements; None when it has none."""
    methods: dict[str, ast.FunctionDef] = {}
    sources: dict[str, Source] = {}
    said, holds, converts = [], [], []
    try:
        found = methods_of(module)
    except NotStatic:
        return None
    for name, source in found.items():
        tree = copy.deepcopy(source.tree)
        for block in blocks(tree):
            for place, statement in enumerate(block):
                conditions = _conditions(module, statement)
                if conditions:
                    block[place] = ast.copy_location(ast.Pass(), statement)
                    methods[name], sources[name] = tree, source
                    said.append(f"line {statement.lineno}: without `{ast.unparse(statement)}`")
                    holds += conditions
                    made = sure(ast.Assign, statement)
                    converts.append((made.targets[0], sure(ast.Call, made.value).args[0]))
    return StaticForm(methods, sources, tuple(said), tuple(holds), tuple(converts)) if methods else None


def _conditions(module: nn.Module, statement: ast.stmt) -> list[str]:
    """What has to hold of the weights for a statement to do nothing; nothing for any other statement."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or called(statement.value) != "to":
        return []
    call, target = statement.value, ast.unparse(statement.targets[0])
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or len(call.args) != 1:
        return []
    converted, dtype = held(module, call.func.value), held(module, call.args[0])
    if call.keywords or ast.unparse(call.func.value) != target:
        return []
    if not isinstance(converted, nn.Module) or not isinstance(dtype, torch.dtype):
        return []
    if any(True for _ in converted.buffers()):
        return []
    if not any(True for _ in converted.parameters()):
        return []
    # Of whatever module stands there by then, under whatever names.
    tensors = f"[*{target}.parameters(), *{target}.buffers()]"
    return [f"all([tensor.dtype == {ast.unparse(call.args[0])} for tensor in {tensors}])"]
