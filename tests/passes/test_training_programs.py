"""Training programs around MoE blocks: which parameters get a gradient, and which, is eager torch's business alone.

Each program is run eagerly and compiled from equal modules; the loss, every parameter's gradient (or its absence), the
input's gradient and the module's buffers are compared, in fp32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from transformers.integrations import moe  # noqa: F401  (registers its grouped product)

from moe_ops.logs import quiet
from tests.passes.compare import compiled, difference

T, E, K, H, I = 12, 8, 2, 32, 16
TOLERANCE, BF16_TOLERANCE = 1e-4, 3e-2
PROGRAMS: dict[str, Callable[..., Any]] = {}
# Programs of plain blocks: refusing to train is not the answer.
FUSES = ("plain", "frozen_router", "frozen_experts", "hidden_needs_no_gradient", "aux_loss_on_logits")


def program(function):
    """Make ``function(model, x)``, which returns a loss or (loss, what else has to agree), one test per dispatch."""
    PROGRAMS[function.__name__] = function
    return function


class Model(nn.Module):
    """A router and stacked experts, with a projection before and after them."""

    def __init__(self, form: str) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=make) * 0.3)

        self.form = form
        self.before, self.after = parameter(H, H), parameter(H, H)
        self.gate, self.w1, self.w2 = parameter(E, H), parameter(E, 2 * I, H), parameter(E, H, I)
        self.bias = parameter(E)
        self.register_buffer("count", torch.zeros(E))

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.gate)

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.topk(logits.softmax(-1), K, -1)
        return weights / weights.sum(-1, keepdim=True), ids

    def experts(self, x, weights, ids, w1=None, w2=None, seen=lambda name, value: value, act=None):
        act = self.act if act is None else act
        w1, w2 = self.w1 if w1 is None else w1, self.w2 if w2 is None else w2
        flat = ids.reshape(-1)
        if self.form == "batched":
            rows = x.repeat_interleave(K, 0)
            h = seen("h", torch.bmm(w1[flat], rows.unsqueeze(-1)).squeeze(-1))
            out = torch.bmm(w2[flat], act(h).unsqueeze(-1)).squeeze(-1)
            return (out * weights.reshape(-1, 1)).view(-1, K, H).sum(1)
        ordered, perm = flat.sort()
        offsets = torch.histc(ordered.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback
        h = seen("h", product(x[perm // K], w1.mT, offsets))
        out = product(act(h), w2.mT, offsets) * weights.reshape(-1)[perm].unsqueeze(-1)
        return out[perm.argsort()].view(-1, K, H).sum(1)

    @staticmethod
    def act(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up

    def block(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.route(self.logits(x)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.block(F.linear(x, self.before)), self.after)


def loss_of(value: Tensor) -> Tensor:
    return (value * torch.linspace(0.5, 1.5, value.numel()).view(value.shape)).square().mean()


# ---- the block as it is


@program
def plain(model, x):
    return loss_of(model(x))


@program
def hidden_needs_no_gradient(model, x):
    return loss_of(model.block(x.detach()))


@program
def frozen_router(model, x):
    return loss_of(model.experts(x, *model.route(F.linear(x, model.gate.detach()))))


@program
def frozen_experts(model, x):
    return loss_of(model.experts(x, *model.route(model.logits(x)), model.w1.detach(), model.w2.detach()))


@program
def frozen_first_weight(model, x):
    return loss_of(model.experts(x, *model.route(model.logits(x)), model.w1.detach()))


@program
def weights_used_twice(model, x):
    """The second product with the first weight's memory."""
    tied = model.w1[:, :I].transpose(1, 2)
    return loss_of(model.experts(x, *model.route(model.logits(x)), w2=tied))


@program
def router_tied_to_the_experts(model, x):
    return loss_of(model.experts(x, *model.route(F.linear(x, model.w1[:, 0]))))


@program
def scaled_weights(model, x):
    return loss_of(model.experts(x, *model.route(model.logits(x)), model.w1 * 2, model.w2.exp()))


@program
def two_blocks_of_one_module(model, x):
    return loss_of(model.block(model.block(x)))


@program
def block_used_twice_in_the_loss(model, x):
    y = model.block(x)
    return loss_of(y) + y.sum() * loss_of(y + x)


@program
def residual(model, x):
    return loss_of(x + model.block(x))


@program
def residual_in_place(model, x):
    y = x * 1
    y += model.block(x)
    return loss_of(y)


# ---- parts without gradient


@program
def router_under_no_grad(model, x):
    logits = model.logits(x)
    with torch.no_grad():
        weights, ids = model.route(logits)
    return loss_of(model.experts(x, weights, ids))


@program
def logits_under_no_grad(model, x):
    with torch.no_grad():
        logits = model.logits(x)
    return loss_of(model.experts(x, *model.route(logits)))


@program
def softmax_under_no_grad(model, x):
    logits = model.logits(x)
    with torch.no_grad():
        scores = logits.softmax(-1)
    weights, ids = torch.topk(scores, K, -1)
    return loss_of(model.experts(x, weights, ids))


@program
def ids_under_no_grad(model, x):
    scores = model.logits(x).softmax(-1)
    with torch.no_grad():
        ids = scores.topk(K, -1)[1]
    return loss_of(model.experts(x, scores.gather(1, ids), ids))


@program
def normalisation_under_no_grad(model, x):
    weights, ids = torch.topk(model.logits(x).softmax(-1), K, -1)
    with torch.no_grad():
        total = weights.sum(-1, keepdim=True)
    return loss_of(model.experts(x, weights / total, ids))


@program
def detached_normalisation(model, x):
    weights, ids = torch.topk(model.logits(x).softmax(-1), K, -1)
    return loss_of(model.experts(x, weights / weights.detach().sum(-1, keepdim=True), ids))


@program
def detached_weights(model, x):
    weights, ids = model.route(model.logits(x))
    return loss_of(model.experts(x, weights.detach(), ids))


@program
def detached_logits(model, x):
    return loss_of(model.experts(x, *model.route(model.logits(x).detach())))


@program
def detached_hidden_for_the_router(model, x):
    return loss_of(model.experts(x, *model.route(model.logits(x.detach()))))


@program
def detached_hidden_for_the_experts(model, x):
    return loss_of(model.experts(x.detach(), *model.route(model.logits(x))))


@program
def detached_scores_in_the_selection(model, x):
    scores = model.logits(x).sigmoid()
    ids = (scores.detach() + model.bias).topk(K, -1)[1]
    return loss_of(model.experts(x, scores.gather(1, ids), ids))


@program
def bias_that_only_selects(model, x):
    scores = model.logits(x).sigmoid()
    ids = (scores + model.bias).topk(K, -1)[1]
    weights = scores.gather(1, ids)
    return loss_of(model.experts(x, weights / (weights.sum(-1, keepdim=True) + 1e-20), ids))


@program
def first_product_under_no_grad(model, x):
    weights, ids = model.route(model.logits(x))
    flat = ids.reshape(-1)
    with torch.no_grad():
        h = torch.bmm(model.w1[flat], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)
    out = torch.bmm(model.w2[flat], model.act(h).unsqueeze(-1)).squeeze(-1)
    return loss_of((out * weights.reshape(-1, 1)).view(-1, K, H).sum(1))


@program
def gather_under_no_grad(model, x):
    weights, ids = model.route(model.logits(x))
    flat = ids.reshape(-1)
    with torch.no_grad():
        rows, second = x.repeat_interleave(K, 0), model.w2[flat]
    h = torch.bmm(model.w1[flat], rows.unsqueeze(-1)).squeeze(-1)
    out = torch.bmm(second, model.act(h).unsqueeze(-1)).squeeze(-1)
    return loss_of((out * weights.reshape(-1, 1)).view(-1, K, H).sum(1))


@program
def activation_under_no_grad(model, x):
    def frozen(h):
        with torch.no_grad():
            return model.act(h)

    return loss_of(model.experts(x, *model.route(model.logits(x)), act=frozen) + x)


@program
def gate_under_no_grad(model, x):
    def half_frozen(h):
        gate, up = h.chunk(2, -1)
        with torch.no_grad():
            gate = F.silu(gate)
        return gate * up

    return loss_of(model.experts(x, *model.route(model.logits(x)), act=half_frozen))


@program
def combine_under_no_grad(model, x):
    weights, ids = model.route(model.logits(x))
    flat = ids.reshape(-1)
    h = torch.bmm(model.w1[flat], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)
    out = torch.bmm(model.w2[flat], model.act(h).unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        y = (out * weights.reshape(-1, 1)).view(-1, K, H).sum(1)
    return loss_of(y + x)


@program
def whole_block_under_no_grad(model, x):
    with torch.no_grad():
        y = model.block(x)
    return loss_of(F.linear(y + x, model.before))


@program
def gradients_inside_no_grad(model, x):
    with torch.no_grad():
        logits = model.logits(x)
        with torch.enable_grad():
            y = model.block(x)
        y = y * 1
    return loss_of(model.block(x) + logits.sum()) + y.sum()


@program
def detached_activation_of_the_gate(model, x):
    def half_detached(h):
        gate, up = h.chunk(2, -1)
        return F.silu(gate).detach() * up

    return loss_of(model.experts(x, *model.route(model.logits(x)), act=half_detached))


@program
def detached_rows(model, x):
    weights, ids = model.route(model.logits(x))
    flat = ids.reshape(-1)
    rows = x.repeat_interleave(K, 0).detach()
    h = torch.bmm(model.w1[flat], rows.unsqueeze(-1)).squeeze(-1)
    out = torch.bmm(model.w2[flat], model.act(h).unsqueeze(-1)).squeeze(-1)
    return loss_of((out * weights.reshape(-1, 1)).view(-1, K, H).sum(1))


@program
def data_of_a_parameter(model, x):
    return loss_of(model.experts(x, *model.route(model.logits(x)), model.w1.data))


# ---- more than the output is differentiated


@program
def aux_loss_on_logits(model, x):
    logits = model.logits(x)
    balance = logits.softmax(-1).mean(0).square().sum()
    z_loss = torch.logsumexp(logits, -1).square().mean()
    return loss_of(model.experts(x, *model.route(logits))) + 0.1 * balance + 0.01 * z_loss


@program
def aux_loss_on_scores_and_ids(model, x):
    scores = model.logits(x).softmax(-1)
    weights, ids = torch.topk(scores, K, -1)
    share = F.one_hot(ids, E).float().sum((0, 1)) / ids.numel()
    return loss_of(model.experts(x, weights, ids)) + (share * scores.mean(0)).sum()


@program
def aux_loss_on_weights(model, x):
    weights, ids = model.route(model.logits(x))
    return loss_of(model.experts(x, weights, ids)) + weights.square().sum()


@program
def intermediate_in_the_loss(model, x):
    kept = []
    y = model.experts(x, *model.route(model.logits(x)), seen=lambda name, value: kept.append(value) or value)
    return loss_of(y) + 0.1 * kept[0].square().mean()


@program
def intermediate_returned(model, x):
    kept = []
    y = model.experts(x, *model.route(model.logits(x)), seen=lambda name, value: kept.append(value) or value)
    return loss_of(y), kept[0].detach().clone()


@program
def logits_and_weights_returned(model, x):
    logits = model.logits(x)
    weights, ids = model.route(logits)
    return loss_of(model.experts(x, weights, ids)), logits, weights, ids


# ---- writes


@program
def output_written(model, x):
    y = model.block(x)
    y.mul_(2).add_(x)
    return loss_of(y)


@program
def hidden_written_after(model, x):
    z = x * 1
    y = model.block(z)
    z.add_(1)
    return loss_of(y.detach() + z)


@program
def weight_copy_written_after(model, x):
    w1 = model.w1 * 1
    y = model.experts(x, *model.route(model.logits(x)), w1)
    return loss_of(y.detach()) + loss_of(w1.mul_(2))


@program
def routing_weights_in_place(model, x):
    weights, ids = torch.topk(model.logits(x).softmax(-1), K, -1)
    weights /= weights.sum(-1, keepdim=True)
    return loss_of(model.experts(x, weights, ids))


@program
def noise_added_in_place(model, x):
    logits = model.logits(x)
    logits += torch.rand_like(logits) * 0.1
    return loss_of(model.experts(x, *model.route(logits)))


@program
def buffer_counts(model, x):
    weights, ids = model.route(model.logits(x))
    with torch.no_grad():
        model.count.add_(F.one_hot(ids, E).sum((0, 1)))
    return loss_of(model.experts(x, weights, ids))


@program
def activation_in_place(model, x):
    def in_place(h):
        gate, up = h.chunk(2, -1)
        return F.silu(gate).mul_(up)

    return loss_of(model.experts(x, *model.route(model.logits(x)), act=in_place))


@program
def dropout_on_the_output(model, x):
    return loss_of(F.dropout(model.block(x), 0.5))


@program
def jitter_of_the_input(model, x):
    x = x * 1
    x *= torch.empty_like(x).uniform_(0.9, 1.1)
    return loss_of(model.block(x))


# ---- contexts


@program
def checkpointed(model, x):
    return loss_of(checkpoint(model.block, x, use_reentrant=False))


@program
def experts_checkpointed(model, x):
    weights, ids = model.route(model.logits(x))
    return loss_of(checkpoint(model.experts, x, weights, ids, use_reentrant=False))


@program
def autocast_bf16(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model.block(x).float())


@program
def autocast_off_for_the_router(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = F.linear(x, model.before)
        with torch.autocast("cpu", enabled=False):
            y = model.block(h.float())
        return loss_of(F.linear(y, model.after).float())


class Doubled(torch.autograd.Function):
    """Identity whose gradient is doubled."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@program
def custom_function_around(model, x):
    return loss_of(Doubled.apply(model.block(Doubled.apply(x))))


@program
def custom_function_on_the_weights(model, x):
    weights, ids = model.route(model.logits(x))
    return loss_of(model.experts(x, Doubled.apply(weights), ids, Doubled.apply(model.w1)))


@program
def custom_function_inside(model, x):
    y = model.experts(x, *model.route(model.logits(x)), seen=lambda name, value: Doubled.apply(value))
    return loss_of(y)


@program
def straight_through_weights(model, x):
    weights, ids = model.route(model.logits(x))
    hard = (weights > 0.5).float()
    return loss_of(model.experts(x, hard + weights - weights.detach(), ids))


@program
def straight_through_logits(model, x):
    logits = model.logits(x)
    noisy = logits + (logits.tanh() - logits).detach()
    return loss_of(model.experts(x, *model.route(noisy)))


@program
def gradient_hook_on_the_weights(model, x):
    weights, ids = model.route(model.logits(x))
    weights.register_hook(lambda grad: grad * 3)
    return loss_of(model.experts(x, weights, ids))


@program
def gradient_hook_inside(model, x):
    def hooked(name, value):
        value.register_hook(lambda grad: grad * 3)
        return value

    return loss_of(model.experts(x, *model.route(model.logits(x)), seen=hooked))


@program
def functional_gradient(model, x):
    grad = torch.func.grad(lambda value: model.block(value).square().sum())(x)
    return loss_of(model.block(x) + grad.detach())


@program
def functional_gradient_of_the_gate(model, x):
    grad = torch.func.grad(lambda gate: loss_of(model.experts(x, *model.route(F.linear(x, gate)))))(model.gate)
    return loss_of(model.block(x)) + grad.square().sum().detach()


@program
def functional_vjp(model, x):
    y, pull = torch.func.vjp(lambda value: model.block(value), x)
    return loss_of(y) + pull(torch.ones_like(y))[0].sum().detach()


@program
def vmapped_heads(model, x):
    scale = torch.func.vmap(lambda row: row.softmax(-1).sum() + row.square().sum())(x)
    return loss_of(model.block(x) * scale.unsqueeze(-1))


@program
def scaled_gradient(model, x):
    y = model.block(x)
    return loss_of(y * 0.1 + (y * 0.9).detach())


@program
def conditional_weights(model, x):
    weights, ids = model.route(model.logits(x))
    weights = torch.where(weights > 0.6, weights, weights.detach() * 0.5)
    return loss_of(model.experts(x, weights, ids))


@program
def masked_tokens(model, x):
    weights, ids = model.route(model.logits(x))
    keep = (torch.arange(T) % 3 != 0).unsqueeze(-1)
    return loss_of(model.experts(x, weights * keep, ids))


@program
def unused_output(model, x):
    model.block(x)
    return loss_of(F.linear(x, model.before))


@program
def only_the_router_is_used(model, x):
    weights, ids = model.route(model.logits(x))
    model.experts(x, weights, ids)
    return loss_of(weights)


@program
def half_of_the_output(model, x):
    return loss_of(model.block(x)[: T // 2])


@program
def low_rank_update(model, x):
    """LoRA: the stored weights are frozen, a product of two small ones is added."""
    w1 = model.w1.detach() + torch.matmul(model.w1[:, :, :2], model.w2[:, :2].transpose(1, 2)[:, :2].repeat(1, 1, 16))
    return loss_of(model.experts(x, *model.route(model.logits(x)), w1))


@program
def softmax_after_the_selection(model, x):
    values, ids = torch.topk(model.logits(x), K, -1)
    return loss_of(model.experts(x, values.softmax(-1), ids))


# ---- running them


def _step(model: Model, run: Callable[..., Any], x: Tensor, steps: int = 1) -> Any:
    """Loss, gradients by name (None where there is none), buffers."""
    torch.manual_seed(0)
    seen = []
    for _ in range(steps):
        result = run(model, x)
        loss, *rest = result if isinstance(result, tuple) else (result,)
        loss.backward()
        seen.append((loss.detach(), [value.detach() for value in rest]))
    grads = {name: value.grad for name, value in model.named_parameters()}
    return seen, {**grads, "x": x.grad}, dict(model.named_buffers())


def _compare(function, form: str, steps: int = 1, prepare=lambda model: None, tolerance: float = TOLERANCE) -> int:
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(1))
    model, other = Model(form), Model(form)
    prepare(model)
    prepare(other)
    with quiet():
        expected = _step(model, function, x.clone().requires_grad_(), steps)
        got = _step(other, compiled(function), x.clone().requires_grad_(), steps)
    grads, expected_grads = got[1], expected[1]
    given = {name for name, grad in grads.items() if grad is not None}
    wanted = {name for name, grad in expected_grads.items() if grad is not None}
    assert given == wanted, f"gradients for {sorted(given)} instead of {sorted(wanted)}"
    for name in sorted(wanted):
        problem = difference(grads[name], expected_grads[name], tolerance)
        assert problem is None, f"gradient of {name}: {problem}"
    problem = difference((got[0], got[2]), (expected[0], expected[2]), tolerance)
    assert problem is None, problem
    return counters["moe_ops"]["fused"]


def _cases() -> Iterator[Any]:
    """Programs whose gradients are cut, and those that have to fuse, in both forms; the others in one, in turn."""
    for number, name in enumerate(PROGRAMS):
        both = "no_grad" in name or "detached" in name or name in FUSES
        for form in ("batched", "grouped") if both else (("batched", "grouped")[number % 2],):
            yield pytest.param(name, form, id=f"{name}-{form}")


@pytest.mark.parametrize(("name", "form"), _cases())
def test_program(name, form):
    fused = _compare(PROGRAMS[name], form, tolerance=BF16_TOLERANCE if "bf16" in name else TOLERANCE)
    if name in FUSES:
        assert fused == 1


@pytest.mark.parametrize("form", ["batched", "grouped"])
def test_gradients_add_up_over_steps(form):
    _compare(plain, form, steps=3)


@pytest.mark.parametrize("frozen", ["gate", "w1", "w2", "gate w1 w2", "before", "w1 w2"])
@pytest.mark.parametrize("form", ["batched", "grouped"])
def test_parameters_that_need_no_gradient(frozen, form):
    def freeze(model):
        for name in frozen.split():
            getattr(model, name).requires_grad_(False)

    assert _compare(plain, form, prepare=freeze) == 1


def _tripled(parameter: Tensor) -> None:
    parameter.grad.mul_(3)


@pytest.mark.parametrize("form", ["batched", "grouped"])
def test_hooks_of_the_module_and_of_parameters(form):
    def hooked(model):
        model.w1.register_hook(lambda grad: grad * 2)
        model.gate.register_post_accumulate_grad_hook(_tripled)

    _compare(plain, form, prepare=hooked)


@pytest.mark.parametrize("form", ["batched", "grouped"])
def test_tied_parameters(form):
    def tie(model):
        model.after = model.before

    _compare(plain, form, prepare=tie)


@pytest.mark.parametrize("form", ["batched", "grouped"])
def test_compiled_once_for_training_and_for_inference(form):
    """Gradients on, then off, then on: each call is right."""
    model = Model(form)
    other = copy.deepcopy(model)
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(1))
    with quiet():
        run = compiled(plain)
        for enabled in (True, False, True):
            with torch.set_grad_enabled(enabled):
                expected, got = plain(model, x), run(other, x)
                assert expected.requires_grad == got.requires_grad
                assert difference(got, expected, TOLERANCE) is None
            if enabled:
                expected.backward()
                got.backward()
        for one, two in zip(other.parameters(), model.parameters(), strict=True):
            assert difference(one.grad, two.grad, TOLERANCE) is None
