"""What has to hold around a block, beyond its arithmetic, for one operator at its end to be able to replace it.

Each check takes the nodes that would go (``region``) and the values that the operator would read (``inputs``), and
answers with a `Refusal` when the graph does not prove what it needs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import fx

from compile_passes.compat import is_plain
from compile_passes.match import Refusal, in_words
from compile_passes.reading import Reading
from compile_passes.vocabulary import example, size_of, target_name, tensors_of
from moe_ops.compat import forward_mode_is_on
from moe_ops.integrations import containers

Pairs = frozenset[tuple[fx.Node, fx.Node]]

#: Calls whose result depends on the shape of their operand and none of its numbers.
CREATES = frozenset({"zeros", "zeros_like", "empty", "empty_like", "ones", "ones_like", "full", "metadata"})
#: Those that may take the shape or the dtype of another tensor, and none of its numbers: x.type_as(y), x.expand_as(y).
LIKE = frozenset({"cast", "view", "expand"})
_OUT_OF_PLACE = "Use the out-of-place form of this operation."


def readers_of_numbers(reading: Reading, value: fx.Node) -> list[fx.Node]:
    """The nodes that read more of ``value`` than its shape, in graph order."""
    return [reader for reader in reading.readers(value) if not _reads_shape(reading, reader, value)]


def _reads_shape(reading: Reading, reader: fx.Node, value: fx.Node) -> bool:
    like = reading.named(reader, *LIKE)
    return reading.named(reader, *CREATES) is not None or (like is not None and like["x"] is not value)


def unknown_tensors(
    region: Collection[fx.Node], inputs: Iterable[fx.Node], weights: Collection[fx.Node] = ()
) -> Refusal | None:
    """A refusal when a tensor of the block is of a type that the operators do not know, or of a function transform.

    ``weights`` may be containers of quantised bytes, and so may what the block makes of them.
    """
    values = (*inputs, *region)
    if forward_mode_is_on():
        return Refusal(
            values[-1], "The code is compiled under forward-mode differentiation, which operators do not implement.",
            "Differentiate in reverse (backward(), torch.autograd.grad).",
        )  # fmt: skip
    for node in values:
        value = example(node)
        if value is not None and not is_plain(value):
            if (node in weights or node in region) and containers.read(value) is not None:
                continue
            kind = type(value).__name__
            transformed = "a value of a function transform (vmap, grad, jvp)"
            what = transformed if kind == "Tensor" else f"a tensor of the type {kind}"
            return Refusal(
                node, f"{in_words(node)}: this is {what}, which the operators do not know.",
                "Pass plain tensors, or leave this block as it is.",
            )  # fmt: skip
    return None


def different_scope(reading: Reading, region: Collection[fx.Node]) -> Refusal | None:
    """A refusal when the block's nodes run under different modes, or inside of a function transform.

    Gradient modes and autocast are no part of this: what they do shows in the results' requires_grad and dtype.
    """
    scopes = {reading.scopes[node]: node for node in region if node in reading.scopes}
    for scope, node in scopes.items():
        transform = next((opener for opener in scope if reading.opens_transform(opener)), None)
        if transform is not None:
            return Refusal(
                node, f"The block runs inside of a function transform ({target_name(transform).strip('_')}), for which "
                "the operators have no rule.", "Call torch.vmap, torch.func.grad or jvp on code around the block only.",
            )  # fmt: skip
    if len(scopes) > 1:
        node = max(scopes.values(), key=reading.order.__getitem__)
        return Refusal(
            node, "Parts of the block run under different modes of torch.", "Put the whole block under one context."
        )
    return None


def chooses_kernels(reading: Reading, site: fx.Node) -> bool:
    """Whether the graph itself says before ``site`` which kernels of attention torch may choose.

    Then it need not choose the one that it does while compiling, nor have another one to fall back on.
    """
    choice = reading.kernel_choice
    return choice is not None and reading.order[choice] < reading.order[site]


def changed_memory(
    reading: Reading, region: Collection[fx.Node], inputs: Iterable[fx.Node], output: fx.Node, site: fx.Node
) -> Pairs | Refusal:
    """Whether the values that the operator reads at ``site`` are still those that the block read.

    Where a gradient is needed, nothing that the operator saves may be overwritten later either.

    Returns:
        A refusal, or the pairs (input that is overwritten, input that is read) which have to be memory apart: two
        inputs of a graph may be views of one storage, which the fake tensors of this call do not show.
    """
    read = [value for value in dict.fromkeys((*inputs, *_read_from_outside(reading, region))) if _is_memory(value)]
    problem = spoiled(reading, region) or _writes_elsewhere(reading, region, output)
    if problem is not None:
        return problem
    saved = _requires_grad(reading, output)
    end = None if saved else site
    for value in read:
        writer = reading.memory.written_between(value, value, end)
        if writer is not None and writer not in region:
            when = (
                "before the MoE block has finished with it"
                if _before(reading, writer, site)
                else ("after the MoE block, which keeps it for the backward pass")
            )
            return Refusal(writer, f"{in_words(writer)} overwrites {in_words(value)} {when}.", _mend(end))
    return _apart(reading, region, read, end)


def _mend(end: fx.Node | None) -> str:
    """What to do about a write; what is kept for a backward pass (``end`` is None) may not be written later either."""
    return _OUT_OF_PLACE if end is None else f"{_OUT_OF_PLACE[:-1]}, or move it after the block."


def _before(reading: Reading, one: fx.Node, other: fx.Node) -> bool:
    return reading.order[one] < reading.order[other]


def _is_memory(value: fx.Node) -> bool:
    return not isinstance(size_of(value), bool | int | float | torch.SymInt | torch.SymFloat | torch.Size)


def _read_from_outside(reading: Reading, region: Collection[fx.Node]) -> list[fx.Node]:
    """The values that the nodes of the region read and do not compute."""
    found: list[fx.Node] = []
    for node in region:
        call = reading.call(node)
        if call is not None:
            fx.map_arg(tuple(call.args.values()), found.append)
    return [value for value in found if value not in region]


def spoiled(reading: Reading, region: Collection[fx.Node]) -> Refusal | None:
    """A refusal when a node of the region reads what was overwritten through another view."""
    hazard = next((reading.hazards[node] for node in region if node in reading.hazards), None)
    if hazard is None:
        return None
    return Refusal(
        hazard.writer, f"{in_words(hazard.writer)} overwrites memory that {in_words(hazard.reader)} reads "
        "through another view.", _OUT_OF_PLACE,
    )  # fmt: skip


def _writes_elsewhere(reading: Reading, region: Collection[fx.Node], output: fx.Node) -> Refusal | None:
    """A refusal when the block writes memory that somebody else sees: the replacement would not."""
    for writer in region:
        for target in reading.memory.writes.get(writer, ()):
            seen = next(
                (user for name in reading.memory.names(target) for user in name.users
                 if user not in region and not _before(reading, user, writer) and user is not writer
                 and not reading.reads_after(user, name, output)), None,
            )  # fmt: skip
            if reading.memory.is_outside(target) or seen is not None:
                whose = "an input of the graph" if seen is None else f"memory that {in_words(seen)} reads"
                return Refusal(
                    writer, f"{in_words(writer)}, inside the MoE block, writes {whose}.",
                    "Write into memory of the block's own, and copy the result.",
                )  # fmt: skip
    return None


def _apart(
    reading: Reading, region: Collection[fx.Node], read: Iterable[fx.Node], end: fx.Node | None
) -> Pairs | Refusal:
    """The pairs of graph inputs, one written and one read by the block, that nothing proves to be different memory."""
    if not region:
        return frozenset()
    start = min(region, key=reading.order.__getitem__)
    writes = [(writer, origin) for writer, target in reading.memory.outside_writes(start, end)
              for origin in reading.memory.origins(target)]  # fmt: skip
    if not writes:
        return frozenset()
    pairs: set[tuple[fx.Node, fx.Node]] = set()
    for value in read:
        for origin in reading.memory.origins(value):
            for writer, written in writes:
                if reading.memory.shares(written) & reading.memory.shares(origin):
                    continue  # the same memory for certain; what is written there was looked at
                if origin.op != "placeholder" or written.op != "placeholder":
                    return Refusal(
                        writer, f"{in_words(writer)} writes {in_words(written)}, which cannot be proved not to be the "
                        f"memory of {in_words(origin)}, a value that the MoE block reads.", _mend(end),
                    )  # fmt: skip
                pairs.add((written, origin))
    return frozenset(pairs)


def different_gradient(
    reading: Reading, region: Collection[fx.Node], inputs: Collection[fx.Node], output: fx.Node, site: fx.Node
) -> Refusal | None:
    """A refusal when an operator at ``site`` would give ``inputs`` another gradient than the nodes of the region do.

    The fake results say where the code lets gradients through: a value that does not require grad although one of its
    operands does was computed under `no_grad`.
    """
    path = _float_path(reading, region, output)
    sources = {value for node in path for value in _float_operands(reading, node) if value not in path}
    expected = any(_requires_grad(reading, value) for value in sources & {*inputs}) and reading.grad_enabled(site)
    cut = next((node for node in path if _cuts(reading, node)), None)
    given = _requires_grad(reading, output)
    if given != expected or (expected and cut is not None):
        return Refusal(
            cut or output, "Part of the block runs under torch.no_grad(), and gradients would flow through it after "
            "fusion.", "Put the whole block, or nothing of it, under torch.no_grad().",
        )  # fmt: skip
    return None


def _float_path(reading: Reading, region: Collection[fx.Node], output: fx.Node) -> set[fx.Node]:
    """The nodes of the region through which a gradient could flow from ``output`` to its inputs."""
    path: set[fx.Node] = set()
    stack = [output]
    while stack:
        node = stack.pop()
        if node in path or node not in region:
            continue
        path.add(node)
        stack.extend(_float_operands(reading, node))
    return path


def _float_operands(reading: Reading, node: fx.Node) -> list[fx.Node]:
    call = reading.call(node)
    if call is None or call.name in CREATES:
        return []
    found: list[fx.Node] = []
    fx.map_arg(call["x"] if call.name in LIKE else tuple(call.args.values()), found.append)
    return [value for value in found if any(part.dtype.is_floating_point for part in _parts(reading, value))]


def _cuts(reading: Reading, node: fx.Node) -> bool:
    if not any(_required_grad(reading, value) for value in _float_operands(reading, node)):
        return False
    # A tensor that was written requires grad if any of the writes made it so: what this node did, the mode tells.
    return not _requires_grad(reading, node) or not reading.grad_enabled(node)


def _required_grad(reading: Reading, value: fx.Node) -> bool:
    """Whether ``value`` may have required grad when it was read. The fake tensor of what is written later (zeros that
    results are put into) is that of the end, so what the value was made of is asked.
    """
    if not _requires_grad(reading, value):
        return False
    if reading.call(value) is None or reading.is_writer(value):
        return True
    if reading.memory.written_between(value, value, None) is None:
        return True
    return any(_required_grad(reading, operand) for operand in _float_operands(reading, value))


def _parts(reading: Reading, node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors of a value: of the tensor that it was written to, when it has no name of its own."""
    return tensors_of(reading.operand(node))


def _requires_grad(reading: Reading, node: fx.Node) -> bool:
    return any(part.requires_grad for part in _parts(reading, node))
