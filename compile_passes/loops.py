"""Expert loops that no compiler can capture, found by the structure of their code.

A loop over the experts that were hit (`for e in hit.nonzero()`) has a trip count that only the data knows. Dynamo
breaks the graph there, and the expert products are in no graph at all, so that no pass can find them.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from compile_passes.dispatchers import has_dispatcher
from compile_passes.reached import names_of, of_torch, reached, tree_of
from compile_passes.source import CUTS, CUTS_AT, call_it_self, is_zero

CAPTURABLE = "grouped_mm"
# What transformers' `use_experts_implementation` sets on every instance of a class that it decorates.
_DECORATED = ("config", "has_gate", "has_bias", "is_transposed")
SETTING = "_experts_implementation"
# On a module whose loop has been given a static form: the names of the methods that were.
STATIC = "_moe_ops_static"
# On such a module: a number of its own for as long as its experts are as they were, as far as they tell; then 0.
ALIKE = "_moe_ops_alike"
# What was bound there, by which a wrapper that somebody has put around it since is told apart.
FORMS: WeakSet[Callable[..., Any]] = WeakSet()
PARAMETERS = nn.ParameterList | nn.ParameterDict
LISTS = nn.ModuleList | nn.ModuleDict | PARAMETERS
# Children that are called by numbers: expert_0, expert_1; or ffn_0, ffn_1, where a router scores as many.
_NUMBERED = re.compile(r"(\D+)(\d+)")
_EXPERTS = re.compile(r"\D*experts?_?")
#: So many experts take Dynamo long enough for a trial that spares it most of them.
MANY = 16
# How many modules around the experts belong to their block.
_AROUND = 2
# Calls whose result has a size, or a value, that only the data knows.
_DATA_DEPENDENT = frozenset({"tolist", "item", "bincount", "masked_select", "unique", "numpy"})
_COUNTS = frozenset({"bincount"})
# Calls whose result has a size that only the data knows, `where` of one argument beside them.
_SIZED_BY_DATA = frozenset({"bincount", "nonzero", "argwhere", "masked_select"})
# Lists of positions: a loop over them has a trip count that only the data knows; indexing by them has not.
_POSITIONS = frozenset({"nonzero", "argwhere", "where"})

# Calls that read numbers of a tensor on the host, and that cut rows by such.
_NUMBERS = frozenset({"tolist", "item"})
_NAMES_CALLED: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()
#: Why `moe_ops.compile` left the loop of a module as it is.
LEFT: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


@dataclass(frozen=True)
class ExpertLoop:
    """A module that runs its experts in a Python loop.

    Attributes:
        switchable: transformers offers the same in one graph.
        stacked: its weights are parameters of all experts together, not those of a list of modules.
    """

    name: str
    module: nn.Module
    switchable: bool
    stacked: bool


@dataclass(frozen=True)
class ExpertGroup:
    """The experts of one block: the module that holds them, and their weights."""

    name: str
    module: nn.Module
    weights: tuple[nn.Parameter, ...]


def find_loops(model: nn.Module) -> list[ExpertLoop]:
    """Modules whose experts run as a Python loop: transformers experts on "eager", or a loop over hits."""
    found = []
    for name, module in model.named_modules():
        if all(hasattr(module, attribute) for attribute in _DECORATED):
            if getattr(module.config, SETTING, None) == "eager":
                found.append(ExpertLoop(name, module, switchable=True, stacked=True))
        elif _holds_experts(name, module) and not is_static(module) and loops_over_data(type(module)):
            found.append(ExpertLoop(name, module, switchable=False, stacked=not _has_list(module)))
    return found


def is_static(module: nn.Module) -> bool:
    """Whether static forms stand in the place of methods of ``module``. Unpickled, methods are those of the class."""
    return any(getattr(vars(module).get(name), "__func__", None) in FORMS for name in vars(module).get(STATIC, ()))


def find_experts(model: nn.Module) -> list[ExpertGroup]:
    """The modules that hold the weights of several experts, one for each block."""
    found: dict[str, ExpertGroup] = {}
    for name, module in model.named_modules():
        if any(name == inner or name.startswith(f"{inner}.") for inner in found):
            continue
        weights = _stacked_weights(name, module)
        for child in _lists(module):
            weights += [weight for weight in child.parameters() if weight.dim() > 1]
        if weights:
            found[name] = ExpertGroup(name, module, tuple(weights))
    return _by_block(model, list(found.values()))


def _by_block(model: nn.Module, groups: list[ExpertGroup]) -> list[ExpertGroup]:
    """Groups beside each other in one module (a module per projection, shared experts) are one block; with a router
    each they are layers.
    """
    beside: dict[str, list[ExpertGroup]] = {}
    for group in groups:
        beside.setdefault(group.name.rpartition(".")[0], []).append(group)
    merged = []
    for parent, rows in beside.items():
        if len(rows) == 1 or all(map(has_router, rows)):
            merged += rows
        else:
            weights = tuple(weight for row in rows for weight in row.weights)
            merged.append(ExpertGroup(parent, model.get_submodule(parent), weights))
    return merged


def has_router(group: ExpertGroup) -> bool:
    """Whether the module of a group scores as many experts as it holds."""
    held = counts_of_experts(group.module)
    held |= {weight.shape[0] for weight in group.weights if weight.dim() > 2}
    return not held.isdisjoint(_scored(group.module))


def cure(loop: ExpertLoop, *, tried: bool = False) -> str:
    """What the user can do about a loop.

    Args:
        tried: whether `moe_ops.compile` has looked at it already.
    """
    if loop.switchable:
        return f'moe_ops.compile(model) switches it, or model.set_experts_implementation("{CAPTURABLE}").'
    call = "moe_ops.fused_experts(hidden_states, gate_up_proj, down_proj, topk_weights, topk_ids)"
    first = "" if tried else "moe_ops.compile(model) gives it a static form, where it can prove one equal. By hand: "
    if not are_projections(loop.module):
        text = (
            "give every expert all tokens, and multiply by routing weights that are 0 where it was not chosen, which "
            "can be captured; its experts are not two projections with an activation between them, as those of "
            "moe_ops.fused_experts are."
        )
    elif loop.stacked:
        weights = "its weights are stacked already: viewed as [E, N, K], they can be given to"
        text = f"{weights} {call} in place of the loop."
    else:
        text = f"store the experts as stacked [E, N, K] weights, and replace the loop by {call}."
    if _leaves_tokens_out(type(loop.module)):
        text += " Pairs that the loop leaves out, of tokens beyond a capacity, have the id -1 there."
    return first + text if first else text[0].upper() + text[1:]


def _leaves_tokens_out(kind: type[nn.Module]) -> bool:
    """Whether a loop asks whether an expert has more tokens than something, other than 0 and 1."""
    loops = [loop for tree in _forward_code(kind) for loop in ast.walk(tree) if isinstance(loop, ast.For)]
    asked = [node.test for loop in loops for node in ast.walk(loop) if isinstance(node, ast.If | ast.IfExp)]
    tests = [part for test in asked if _asks_for_numbers(test) for part in ast.walk(test)]
    more = [test for test in tests if isinstance(test, ast.Compare)
            and isinstance(test.ops[0], ast.Gt | ast.GtE | ast.Lt | ast.LtE)]  # fmt: skip
    return any(not isinstance(test.comparators[0], ast.Constant) for test in more)


def are_projections(module: nn.Module) -> bool:
    """Whether the experts that ``module`` has as modules, if there are any, have matrices as those of a gated or plain
    layer of two projections, and biases. Lists of equal length beside each other have a projection each.
    """
    lists = [[*child.children()] for name, child in module.named_children() if number_of_experts(module, name, child)]
    if len({len(inner) for inner in lists}) == 1:
        lists = [[nn.ModuleList(parts) for parts in zip(*lists, strict=True)]]
    experts = [module.get_submodule(key) for key in numbered_experts(module)[1]]
    experts += [expert for inner in lists for expert in inner]
    weights = [dict(_shapes(expert)) for expert in experts]
    return all(
        _are_of_two_projections([shape for shape in shapes.values() if len(shape) == 2])
        and all(len(shape) == 2 or "bias" in name for name, shape in shapes.items())
        for shapes in filter(None, weights)  # those of a stacked list have no parameters
    )


def _are_of_two_projections(matrices: list[tuple[int, ...]]) -> bool:
    """Of three, two are alike: gate and up."""
    return len(matrices) == 2 or (len(matrices) == 3 and len({*matrices}) < 3)


def _holds_experts(name: str, module: nn.Module) -> bool:
    """Whether ``module`` is called like experts or has a list, or stacks, of them."""
    return "expert" in name.rsplit(".", 1)[-1] or bool(_lists(module) or _stacked_weights(name, module))


def _lists(module: nn.Module) -> list[nn.Module]:
    """The children of ``module`` that are lists of experts, or experts beside other modules."""
    beside = numbered_experts(module)[1]
    lists = [child for name, child in module.named_children() if number_of_experts(module, name, child)]
    return lists + [module.get_submodule(key) for key in beside]


def numbered_experts(module: nn.Module | None) -> tuple[str, tuple[str, ...]]:
    """(what they are called, their keys by number) of children ``expert_0``, ``expert_1``, ..., or of other names, if
    they are alike and as many as a router scores; none where a number is left out or there twice, or where there are
    several such groups beside shared ones.
    """
    groups: dict[str, list[tuple[int, str]]] = {}
    children = {} if module is None or isinstance(module, LISTS | nn.Sequential) else module._modules
    for key, child in children.items():
        match = _NUMBERED.fullmatch(key)
        if match is not None and child is not None:
            groups.setdefault(match[1], []).append((int(match[2]), key))
    several = [(name, sorted(pairs)) for name, pairs in groups.items() if len(pairs) > 1 and "shared" not in name]
    found = [group for group in several if _EXPERTS.fullmatch(group[0])]
    if module is not None and several and not found:
        scored = _scored(module)
        found = [(name, pairs) for name, pairs in several if len(pairs) in scored and _are_alike(module, pairs)]
    if len(found) != 1:
        return "", ()
    name, pairs = found[0]
    whole = all(number == pairs[0][0] + place for place, (number, _) in enumerate(pairs))
    return (name, tuple(key for _, key in pairs)) if whole else ("", ())


def _are_alike(module: nn.Module, pairs: list[tuple[int, str]]) -> bool:
    """Whether the children of these keys have parameters of the same names and shapes, more than a projection has: a
    name alone does not tell them from layers that follow each other.
    """
    first, *others = (_shapes(module.get_submodule(key)) for _, key in pairs)
    return all(shapes == first for shapes in others) and sum(len(shape) > 1 for _, shape in first) > 1


def _shapes(module: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(weight.shape)) for name, weight in module.named_parameters())


def counts_of_experts(module: nn.Module) -> set[int]:
    """How many experts each list among the children of ``module`` has, and how many are called by numbers."""
    counts = {number_of_experts(module, name, child) for name, child in module.named_children()}
    return (counts | {len(numbered_experts(module)[1])}) - {0}


def number_of_experts(module: nn.Module, name: str, child: nn.Module) -> int:
    """How many experts a child of ``module`` is a list of, 0 of anything else: it is called so, or has modules of one
    class, as many as a router scores; or parameters, as many as there are said to be experts.
    """
    if not isinstance(child, LISTS) or len(child) < 2:
        return 0
    if isinstance(child, nn.ParameterDict) and not _are_numbers_of_one_name(child):
        return 0  # the weights of one layer, by their names
    if isinstance(child, PARAMETERS):
        said = {key: value for key, value in vars(module).items() if "expert" in key and "_per_" not in key}
        counts = _scored(module).union(value for value in said.values() if type(value) is int)
        return len(child) if "expert" in name or len(child) in counts else 0
    alike = len({type(inner) for inner in child.children()}) == 1
    if isinstance(child, nn.ModuleDict) and _NUMBERED.fullmatch(name) and len({*map(_shapes, child.children())}) > 1:
        return 0  # `expert_0`: the layers of one, by their names
    return len(child) if "expert" in name or (alike and len(child) in _scored(module)) else 0


def _are_numbers_of_one_name(child: nn.ParameterDict) -> bool:
    keys = [key.rstrip("0123456789") for key in child]
    return len(set(keys)) == 1 and all(len(key) > len(name) for key, name in zip(child, keys, strict=True))


def _scored(module: nn.Module) -> set[int]:
    """How many experts the routers in ``module`` score."""
    weights = ((name.partition(".")[0], weight) for name, weight in module.named_parameters() if weight.dim() == 2)
    return {weight.shape[0] for name, weight in weights if "gate" in name or "router" in name}


def _has_list(module: nn.Module) -> bool:
    """Whether experts are modules of a list, rather than slices of weights."""
    return isinstance(module, LISTS) or any(map(_lists, module.modules()))


def _stacked_weights(name: str, module: nn.Module) -> list[nn.Parameter]:
    """Own weights of all experts together: ``[E, ., .]``, or several flat ones as in dbrx."""
    called = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
    own = {name: weight for name, weight in module.named_parameters(recurse=False) if weight.dim() > 1}
    deep = {name: weight for name, weight in own.items() if weight.dim() > 2 and weight.shape[0] > 1}
    if "expert" not in called and "moe" not in called:
        return list(deep.values()) if _are_routed_to(module, deep) else []
    return list(deep.values()) or (list(own.values()) if len(own) > 1 and "expert" in called else [])


def _are_routed_to(module: nn.Module, stacks: dict[str, nn.Parameter]) -> bool:
    """Whether stacks in a module that is called otherwise are called experts', or a router in it scores as many."""
    counts = {weight.shape[0] for weight in stacks.values()}
    routed = len(stacks) > 1 and counts <= _scored(module)
    return len(counts) == 1 and (routed or any("expert" in name for name in stacks))


def find_blocks(model: nn.Module, has: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """For each group of experts it, or the nearest module around it, of which ``has`` is true; each once."""
    found = set()
    for group in find_experts(model):
        name = group.name
        for _ in range(_AROUND + 1):
            module = model.get_submodule(name)
            if has(module):
                if name not in found:
                    yield name, module
                found.add(name)
                break
            name = name.rpartition(".")[0]


def find_sizes_of_the_data(model: nn.Module) -> list[str]:
    """Modules at the experts, or beside them, that loop over nothing that the data knows, with results of such sizes:
    of `bincount`, whose ``minlength`` Dynamo does not ask for, `nonzero`, `where` and masks. Not where the same code
    makes lists of what tensors hold: Dynamo breaks the graph there, and would fail once it captures such sizes.
    """
    groups = [group.name for group in find_experts(model)]
    around = {*groups, *(name.rpartition(".")[0] for name in groups)}
    beside = {
        f"{name}.{child}".lstrip(".") for name in around for child, _ in model.get_submodule(name).named_children()
    }
    kinds = {name: type(model.get_submodule(name)) for name in sorted(around | beside)}
    sized = {
        kind
        for kind in set(kinds.values())
        if any(map(_has_sizes_of_the_data, _code_reached(kind))) and not loops_over_data(kind) and not makes_lists(kind)
    }
    return [name for name, kind in kinds.items() if kind in sized]


def makes_lists(kind: type[nn.Module]) -> bool:
    """Whether code of a class makes lists of what tensors hold."""
    return any("tolist" in names_of(function.__code__) for function in reached((kind,)))


def _code_reached(kind: type[nn.Module]) -> Iterator[ast.AST]:
    """The syntax trees of what ``forward`` reaches; of all methods where it asks for some by a name that it makes."""
    functions = [*reached((kind,))]
    if any("getattr" in names_of(function.__code__) for function in functions):
        own = [base for base in kind.__mro__ if not of_torch(base.__module__)]
        functions = [*reached((kind,), *{name for base in own for name in vars(base)})]
    yield from filter(None, map(tree_of, functions))


def _has_sizes_of_the_data(tree: ast.AST) -> bool:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if any(
        _name(call.func) in _SIZED_BY_DATA or (_name(call.func) == "where" and len(call.args) == 1) for call in calls
    ):
        return True
    masks = _assigned(tree, _compares)
    return any(_compares(part) or masks & _names(part) for part in _taken_by(tree))


def _compares(tree: ast.AST) -> bool:
    """Whether an expression asks where something is an expert's number, or, of a one-hot as `mask.bool()` or of an
    expert's column, not 0.
    """
    parts = [*ast.walk(tree)]
    tests = [node for node in parts if isinstance(node, ast.Compare)]
    masks = [node.func for node in parts if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return any(mask.attr == "bool" for mask in masks) or any(
        (isinstance(test.ops[0], ast.Eq) and not isinstance(test.left, ast.Constant)) or _is_of_column(test)
        for test in tests
    )


def _is_of_column(test: ast.Compare) -> bool:
    """`scores[:, e] > 0`, `scores[:, e] != 0`."""
    index = test.left.slice if isinstance(test.left, ast.Subscript) else None
    column = isinstance(index, ast.Tuple) and isinstance(index.elts[0], ast.Slice)
    return column and isinstance(test.ops[0], ast.Gt | ast.NotEq) and is_zero(test.comparators[0])


def _taken_by(tree: ast.AST) -> Iterator[ast.AST]:
    """What rows are taken by in the loops of a function, or may be in a function that they call."""
    for node in (node for loop in ast.walk(tree) if isinstance(loop, ast.For) for node in ast.walk(loop)):
        if isinstance(node, ast.Subscript):
            yield node.slice
        elif isinstance(node, ast.Call):
            of_module = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "self"
            # Python's own functions take no rows: `any(p.device == meta for p in ...)` compares no tensors.
            if of_module or (isinstance(node.func, ast.Name) and not hasattr(builtins, node.func.id)):
                yield from node.args


def names_called(kind: type[nn.Module], depth: int = 3) -> frozenset[str]:
    """The names that the methods of a class, and the functions that these call, read: most code need not be parsed.
    Torch's own classes have none that matter.
    """
    if kind not in _NAMES_CALLED:
        classes = [base for base in kind.__mro__ if not of_torch(base.__module__)]
        own = [value for base in classes for value in vars(base).values()]
        waiting = [(value, depth) for value in own if isinstance(value, FunctionType)]
        found: set[str] = set()
        while waiting:
            function, deep = waiting.pop()
            function = inspect.unwrap(function)
            named = function.__code__.co_names if isinstance(function, FunctionType) else ()
            found.update(named)
            inner = [function.__globals__.get(name) for name in named] if deep else []
            waiting += [(value, deep - 1) for value in inner if isinstance(value, FunctionType)]
        _NAMES_CALLED[kind] = frozenset(found)
    return _NAMES_CALLED[kind]


def cuts_by_numbers(module: nn.Module) -> bool:
    """Whether code of a module, or of those inside of it, splits rows, and reads numbers of tensors on the host."""
    named = frozenset[str]().union(*(names_called(type(inside)) for inside in module.modules()))
    return not named.isdisjoint(_NUMBERS) and not named.isdisjoint(CUTS | CUTS_AT)


def loops_over_data(kind: type[nn.Module]) -> bool:
    """Whether ``forward`` of a class, or a method or function that it calls, loops over what only the data knows."""
    return any(_has_such_loop(tree) for tree in _forward_code(kind)) or has_dispatcher(kind)


def loops_over_many(module: nn.Module) -> bool:
    """Whether code of a module loops over something, not over what only the data knows, and it has many experts."""
    counts = counts_of_experts(module) | {weight.shape[0] for weight in module.parameters(False) if weight.dim() > 2}
    if max(counts, default=0) < MANY or is_static(module) or loops_over_data(type(module)):
        return False
    return any(isinstance(node, ast.For) for tree in _forward_code(type(module)) for node in ast.walk(tree))


def _has_such_loop(tree: ast.AST) -> bool:
    """A loop statement, and an operation whose result size depends on the data, in one function; counts of rows matter
    where a loop reads them, and not beside it.
    """
    loops: list[ast.AST] = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
    numbers, made = _calls(tree, _NUMBERS), [node for node in ast.walk(tree) if isinstance(node, ast.ListComp)]
    cut = _calls(tree, CUTS | CUTS_AT)
    loops += [node for node in made if cut or (numbers and _slices(node))]  # lists of the parts
    if loops and _calls(tree, _DATA_DEPENDENT - _COUNTS):
        return True
    counted = _assigned(tree, lambda value: _calls(value, _COUNTS))
    if any(_calls(loop, _COUNTS) or counted & _names(loop) for loop in loops):
        return True
    listed = _assigned(tree, _lists_positions)
    over = [loop.iter for loop in loops if isinstance(loop, ast.For)]
    if any(_lists_positions(value) or listed & _names(value) for value in over):
        return True
    return any(decides(node) for loop in loops for node in ast.walk(loop))


def _slices(made: ast.ListComp) -> bool:
    """`[... rows[start:end] ... for start, end in ...]`."""
    own = set[str]().union(*(_names(part.target) for part in made.generators))
    return any(isinstance(node, ast.Slice) and own & _names(node) for node in ast.walk(made.elt))


def has_data_dependent_calls(tree: ast.AST) -> bool:
    """Whether a piece of code calls what has a size, or a value, that only the data knows."""
    return _calls(tree, _DATA_DEPENDENT)


def _calls(tree: ast.AST, names: frozenset[str]) -> bool:
    return any(isinstance(node, ast.Call) and _name(node.func) in names for node in ast.walk(tree))


def _lists_positions(tree: ast.AST) -> bool:
    """Whether an expression is made of the places where a condition holds, as many as there are: a list of such, one
    for every expert, is as long as that of the experts.
    """
    if isinstance(tree, ast.ListComp | ast.DictComp):
        return any(_calls(part.iter, _POSITIONS) for part in tree.generators)
    return _calls(tree, _POSITIONS)


def _assigned(tree: ast.AST, made: Callable[[ast.AST], bool]) -> set[str]:
    """The names of what is ``made``, and of what is computed from such."""
    found: set[str] = set()
    while True:
        more = {
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and (made(node.value) or found & _names(node.value))
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        if more <= found:
            return found
        found |= more


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def decides(node: ast.AST) -> bool:
    """An `if` on what tensors hold, or on how many positions there are: `if mask.any():`, `if token.shape[0] == 0:`."""
    return isinstance(node, ast.If) and _asks_for_numbers(node.test)


def _asks_for_numbers(test: ast.expr) -> bool:
    calls = [part for part in ast.walk(test) if isinstance(part, ast.Call)]
    asked = {_name(part.func) for part in calls}
    asked |= {"size" for part in calls if _name(part.func) == "len" and isinstance(part.args[0], ast.Name)}
    sizes = any(isinstance(part, ast.Attribute) and part.attr == "shape" for part in ast.walk(test))
    return bool(asked & {"any", "all", "numel", "size", "sum"}) or sizes


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _forward_code(kind: type[nn.Module]) -> Iterator[ast.AST]:
    """The syntax trees of ``forward`` and of the methods of the class, and of those it derives from, that it calls."""
    waiting, seen = [(kind, "forward")], set()
    while waiting:
        owner, name = waiting.pop()
        function: Any = getattr(owner, name, None)
        if function in seen or not callable(function) or (name != "forward" and hasattr(nn.Module, name)):
            continue
        seen.add(function)
        tree = _parse(function)
        if tree is None:
            continue
        method = isinstance(inspect.getattr_static(owner, name, None), FunctionType)
        if method and isinstance(tree.body[0], ast.FunctionDef):
            call_it_self(tree.body[0])
        yield tree
        bases = {base.__name__: base for base in kind.__mro__} | {"self": kind}
        for node in ast.walk(tree):
            called = node.func if isinstance(node, ast.Call) else None
            if not isinstance(called, ast.Attribute):
                continue
            if isinstance(called.value, ast.Name) and called.value.id in bases:
                waiting.append((bases[called.value.id], called.attr))
            elif isinstance(called.value, ast.Call) and _name(called.value.func) == "super":
                waiting += [(base, called.attr) for base in owner.__mro__[1:]]


def _parse(function: Callable[..., Any]) -> ast.Module | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError, ValueError):  # no source, or a piece of one
        return None
