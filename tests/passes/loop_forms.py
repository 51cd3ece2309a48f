"""Near misses of loops over experts: what a loop over all of them would do otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from benchmarks.loops import Block, E, H, K, Unique

HIT = 0


class Missing(Block):
    """Hit experts one after the other; `each` is what a near miss does besides."""

    def __init__(self) -> None:
        super().__init__()
        self.hits = nn.Buffer(torch.zeros(E))
        self.log: list[int] = []


class Jitter(Missing):
    """One number for every expert that was hit."""

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            rows = x[token] * torch.empty(1, dtype=x.dtype).uniform_(0.99, 1.01)
            out.index_add_(0, token, self.experts[e](rows) * w[token, slot, None])
        return out


class CountsHits(Missing):
    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            self.hits[e] += 1
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


class CountsHitsByAnotherName(Missing):
    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out, hits = torch.zeros_like(x), self.hits
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            hits[e] += 1
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


class CountsInPlace(Missing):
    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out, hits = torch.zeros_like(x), self.hits
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            hits.add_(1)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


class CountsInAList(Missing):
    """Nothing but the trial sees it."""

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            torch._foreach_add_([self.hits], 1)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


class AddsInPlace(Missing):
    """Zeros, until somebody sets the coefficient: no trial sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.coefficient = 0.0

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out, penalty = torch.zeros_like(x), torch.zeros((), dtype=x.dtype)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            penalty.add_(self.coefficient * self.experts[e].w1.weight.square().sum())
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out, penalty


class AddsToAView(AddsInPlace):
    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out, sums = torch.zeros_like(x), torch.zeros(2, dtype=x.dtype)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            first = sums[0].view(1)
            first.add_(self.coefficient * self.experts[e].w1.weight.square().sum())
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out, sums


class AddsInAnArgument(AddsInPlace):
    """Of the call that adds the results."""

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out, penalty = torch.zeros_like(x), torch.zeros((), dtype=x.dtype)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            rows = self.experts[e](x[token]) * w[token, slot, None]
            out.index_add_(0, token, rows + 0 * penalty.add_(self.coefficient))
        return out, penalty


class AddsWithOut(AddsInPlace):
    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out, penalty = torch.zeros_like(x), torch.zeros((), dtype=x.dtype)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            torch.add(penalty, self.coefficient, out=penalty)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out, penalty


class Decays(Missing):
    """Nothing but the trial sees it."""

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            torch._foreach_mul_([out], 0.99)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


class Remembers(Missing):
    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out, log = torch.zeros_like(x), self.log
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            log.insert(0, e)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


class RemembersInPrivate(Missing):
    """The same, in an attribute that its name calls its own."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[int] = []

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out, noted = torch.zeros_like(x), self._noted
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            noted.insert(0, e)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


class LeavesTheLast(Missing):
    """The number of the last expert that was hit."""

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out + 0 * e


class CountsInAnExpression(Missing):
    """How many experts were hit, by an assignment in an index."""

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out, n = torch.zeros_like(x), 0
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[(n := n + 1) * 0 + e](x[token]) * w[token, slot, None])
        return out + 0 * n


class WritesAGlobal(Missing):
    """What other code may read."""

    def forward(self, x):
        global HIT
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            HIT += 1
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


class RemembersATensor(Missing):
    """The tokens of the last expert that was hit."""

    def __init__(self) -> None:
        super().__init__()
        self.last = None

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out, token = torch.zeros_like(x), None
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        self.last = token
        return out


class Counter:
    """What an expert counts its calls in."""

    called = 0

    def __init__(self) -> None:
        self.calls = 0
        self.sizes = {"least": torch.zeros(1)}

    def note(self, rows):
        self.calls += 1
        return rows


CALLS = [0]
COUNTER = Counter()


def in_a_list(rows):
    CALLS[0] += 1
    return rows


def in_an_object(rows):
    COUNTER.calls += 1
    return rows


def in_a_class(rows):
    Counter.called += 1
    return rows


def in_a_tensor(rows):
    COUNTER.sizes["least"] += 1
    return rows


@dataclass(slots=True)
class Slots:
    calls: int = 0


SPACE, SLOTS, ARRAY, MODULE = SimpleNamespace(calls=0), Slots(), np.zeros(1), nn.Module()
MODULE.register_buffer("calls", torch.zeros(1))


def in_a_namespace(rows):
    SPACE.calls += 1
    return rows


def in_slots(rows):
    SLOTS.calls += 1
    return rows


def in_an_array(rows):
    ARRAY[0] += 1
    return rows


def in_a_module(rows):
    MODULE.calls += 1
    return rows


def in_a_new_attribute(rows):
    Slots.calls_in_all = getattr(Slots, "calls_in_all", 0) + SLOTS.calls + 1
    return rows


def in_a_default(rows, calls=[0]):  # noqa: B006
    calls[0] += 1
    return rows


class Through(nn.Module):
    """An expert of which each call is noted."""

    def __init__(self, expert: nn.Module, note) -> None:
        super().__init__()
        self.inner, self.note = expert, note

    def forward(self, rows):
        return self.inner(self.note(rows))


class Counts(Missing, Unique):
    """Calls of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Through(expert, self.note) for expert in self.experts)


class CountsInAGlobal(Counts):
    note = staticmethod(in_a_list)


class CountsInAnObject(Counts):
    note = staticmethod(in_an_object)


class CountsInAClass(Counts):
    note = staticmethod(in_a_class)


class CountsInATensor(Counts):
    note = staticmethod(in_a_tensor)


class CountsInANamespace(Counts):
    note = staticmethod(in_a_namespace)


class CountsInSlots(Counts):
    note = staticmethod(in_slots)


class CountsInAnArray(Counts):
    note = staticmethod(in_an_array)


class CountsInAModule(Counts):
    note = staticmethod(in_a_module)


class CountsInANewAttribute(Counts):
    note = staticmethod(in_a_new_attribute)


class CountsInADefault(Counts):
    note = staticmethod(in_a_default)


class CountsInItsOwn(Counts):
    """Calls, in an object that the block holds, by a method of that."""

    def __init__(self) -> None:
        self.__dict__["note"] = Counter().note
        super().__init__()


class Subtracts(Missing):
    """Counts as a list, and results that are taken away."""

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        counts = torch.bincount(ids.flatten(), minlength=self.num_experts).tolist()
        for e in range(self.num_experts):
            if counts[e] == 0:
                continue
            token, slot = torch.where(ids == e)
            out[token] -= self.experts[e](x[token]) * w[token, slot, None]
        return out.view(shape)


class SkipsAnExpert(Missing):
    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            if e == 1:
                continue
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


class SkipsFewTokens(Missing):
    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if token.numel() < 2:
                continue
            out.index_add_(0, token, expert(x[token]) * w[token, slot, None])
        return out


class SkipsSmallWeights(Missing):
    """No batch of a trial may have weights as small as these."""

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            big = w[token, slot] > 1e-6
            if big.any():
                out.index_add_(0, token, expert(x[token]) * w[token, slot, None])
        return out


class CountsTokens(Missing):
    """In a tensor beside the results."""

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out, hits = torch.zeros_like(x), torch.zeros(len(self.experts))
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            hits[e] += token.numel()
            out.index_add_(0, token, expert(x[token]) * w[token, slot, None])
        return out, hits


class HitsByWeight(Missing):
    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in ids[w > 1e-6].unique().tolist():
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


class CapacityOfSlices(Missing):
    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        idxs = ids.view(-1).argsort()
        rows = x[idxs // K]
        counts = ids.flatten().bincount(minlength=E).clamp(max=100).tolist()
        outputs, start = [], 0
        for i, count in enumerate(counts):
            end = start + count
            outputs.append(self.experts[i](rows[start:end]))
            start = end
        outs = torch.cat(outputs)
        new = torch.empty_like(outs)
        new[idxs] = outs
        return (new.view(-1, K, H) * w.unsqueeze(-1)).sum(1)


class WeightsInOrderOfExperts(Missing):
    """Results are weighted before they are put back."""

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        idxs = ids.view(-1).argsort()
        rows = x[idxs // K]
        outputs = []
        start = 0
        for i, count in enumerate(ids.flatten().bincount(minlength=E).tolist()):
            end = start + count
            out = self.experts[i](rows[start:end])
            outputs.append(out)
            start = end
        outs = torch.cat(outputs)
        new = torch.empty_like(outs)
        new[idxs] = outs
        return (new.view(-1, K, H) * w.unsqueeze(-1)).sum(1) + 0 * (outs * w.view(-1)[idxs, None]).sum()


class RowsChangeBeforeTheLoop(Missing):
    def forward(self, x):
        x = x.reshape(-1, H)
        _, ids = self.route(x)
        out = torch.zeros_like(x)
        idxs = ids.view(-1).argsort()
        rows = x[idxs // K]
        x = x * 2
        start = 0
        for i, count in enumerate(ids.flatten().bincount(minlength=E).tolist()):
            end = start + count
            out.index_add_(0, (idxs // K)[start:end], self.experts[i](rows[start:end]))
            start = end
        return out


class Breaks(Missing):
    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out, n = torch.zeros_like(x), 0
        for e in ids.unique().tolist():
            if n == 100:
                break
            n += 1
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


class InOrderOfLoad(Missing):
    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in torch.bincount(ids.flatten(), minlength=E).argsort().tolist():
            token, slot = torch.where(ids == e)
            out[token] = self.experts[e](x[token]) * w[token, slot, None]
        return out


class Overwrites(Missing):
    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            out[token] = self.experts[e](x[token]) * w[token, slot, None]
        return out


class Prints(Missing):
    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            print(e)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


class Averages(Missing):
    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out, n = torch.zeros_like(x), 0
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            n += 1
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out / n


class TakesIds(Missing):
    """Its ids come from outside, and the modules around it take more, too."""

    def forward(self, x, ids):
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            token, _ = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token]))
        return out


MISSES = {
    Jitter: "gives other random numbers",
    CountsHits: "the loop writes self.hits, for experts that were hit alone",
    CountsHitsByAnotherName: "what the loop writes is not chosen by ids.unique",
    CountsInPlace: "what the loop writes is not chosen by ids.unique",
    CountsInAList: "the static form gives other values of hits",
    AddsInPlace: "what the loop writes is not chosen by ids.unique",
    AddsToAView: "what the loop writes is not chosen by ids.unique",
    AddsInAnArgument: "what the loop writes is not chosen by ids.unique",
    AddsWithOut: "what the loop writes is not chosen by ids.unique",
    Decays: "the static form gives other outputs",
    Remembers: "the static form gives other values of len(log)",
    RemembersInPrivate: "the static form gives other values of len(_noted)",
    LeavesTheLast: "e of the last round is read after the loop",
    CountsInAnExpression: "a `namedexpr` in the loop",
    WritesAGlobal: "`global HIT`, where a loop may write what others read",
    RemembersATensor: "the static form gives other values of last",
    CountsInAGlobal: "the static form gives other values of CALLS[0]",
    CountsInAnObject: "the static form gives other values of COUNTER.calls",
    CountsInAClass: "the static form gives other values of Counter.called",
    CountsInATensor: "the static form gives other values of COUNTER.sizes['least']",
    CountsInANamespace: "the static form gives other values of SPACE.calls",
    CountsInSlots: "the static form gives other values of SLOTS.calls",
    CountsInAnArray: "the static form gives other values of ARRAY",
    CountsInAModule: "the static form gives other values of MODULE.calls",
    CountsInANewAttribute: "the static form gives other values of Slots.calls_in_all",
    CountsInADefault: "the static form gives other values of default 0 of in_a_default",
    CountsInItsOwn: "the static form gives other values of note.calls",
    SkipsAnExpert: f"captured but not fused: The loop runs {E - 1} of {E} experts",
    SkipsFewTokens: "`if token.numel() < 2` is no test for an expert without tokens. ",
    SkipsSmallWeights: "`if big.any()` is no test for an expert without tokens: the loop writes more than the rows",
    CountsTokens: "`if token.numel() == 0` is no test for an expert without tokens: the loop writes more than the rows",
    HitsByWeight: "may be other experts than those that were hit",
    CapacityOfSlices: "no loop in it is over the experts that were hit",
    WeightsInOrderOfExperts: "a value inside of the MoE block",
    RowsChangeBeforeTheLoop: "x changes before the loop",
    Breaks: "a `break` in the loop",
    InOrderOfLoad: "is no list of the experts that were hit",
    Overwrites: "captured but not fused",
    Prints: "the loop calls print for what that does",
    Averages: "what the loop writes is not chosen by ids.unique",
    TakesIds: "takes more than hidden states",
}
