"""Loops over slices of sorted rows: spellings of bounds and of what is done with results, and near misses."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from benchmarks.loops import Block, E, H, K


class Sorting(Block):
    """Pairs sorted by expert; subclasses take the slices."""

    def forward(self, x):
        rows = x.reshape(-1, H)
        w, ids = self.route(rows)
        return self.infer(rows, ids, w).view_as(x)


class OffsetsBehindZero(Sorting):
    def infer(self, x, ids, w):
        flat = ids.view(-1)
        order = flat.argsort()
        counts = torch.bincount(flat, minlength=E)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        out = torch.zeros_like(x)
        for e in range(E):
            start, end = offsets[e].item(), offsets[e + 1].item()
            if start == end:
                continue
            token = order[start:end] // K
            out.index_add_(0, token, self.experts[e](x[token]) * w.view(-1)[order[start:end], None])
        return out


class WrittenBehindZero(Sorting):
    """Bounds that are written into zeros; the token of every pair is listed."""

    def infer(self, x, ids, w):
        listed = torch.arange(len(x)).unsqueeze(1).expand_as(ids).flatten()
        ordered, order = ids.flatten().sort()
        token, weights = listed[order], w.flatten()[order]
        ends = torch.zeros(E + 1, dtype=torch.long)
        ends[1:] = torch.bincount(ordered, minlength=E).cumsum(0)
        bounds = ends.tolist()
        out = torch.zeros_like(x)
        for e in range(E):
            start, end = bounds[e], bounds[e + 1]
            if start == end:
                continue
            mine = token[start:end]
            out.index_add_(0, mine, self.experts[e](x[mine]) * weights[start:end].unsqueeze(-1))
        return out


class CountsOfAChain(Sorting):
    """Counts of a mask that one expression makes, and slices by running starts."""

    def infer(self, x, ids, w):
        counts = ids.new_zeros(len(ids), E).scatter_(1, ids, 1).sum(0).tolist()
        order = ids.flatten().argsort()
        rows, found, start = x[order // K], [], 0
        for e, count in enumerate(counts):
            if count == 0:
                continue
            found.append(self.experts[e](rows[start : start + count]))
            start += count
        back = torch.empty_like(rows)
        back[order] = torch.cat(found)
        return (back.view(*ids.shape, -1) * w[..., None]).sum(1)


class CountsByComparing(Sorting):
    """Ids compared with all experts at once."""

    def infer(self, x, ids, w):
        counts = (ids[..., None] == torch.arange(E)).sum((0, 1)).cpu().numpy()
        order = ids.flatten().argsort()
        token, weights, start = order // K, w.flatten()[order], 0
        out = torch.zeros_like(x)
        for e, count in enumerate(counts):
            end = start + count
            if count > 0:
                mine = token[start:end]
                out.index_add_(0, mine, self.experts[e](x[mine]) * weights[start:end, None])
            start = end
        return out


class AddedToZeros(Sorting):
    """Ones that are added to zeros where the ids are."""

    def infer(self, x, ids, w):
        flat = ids.flatten()
        ends = torch.zeros(E, dtype=torch.long).scatter_add_(0, flat, torch.ones_like(flat)).cumsum(0).tolist()
        order = flat.argsort()
        token, weights = order // K, w.flatten()[order]
        out = torch.zeros_like(x)
        for e, end in enumerate(ends):
            start = 0 if e == 0 else ends[e - 1]
            if start == end:
                continue
            mine = token[start:end]
            out.index_add_(0, mine, self.experts[e](x[mine]) * weights[start:end, None])
        return out


class PaddedEndsInTheSlices(Sorting):
    def infer(self, x, ids, w):
        flat = ids.flatten()
        order = torch.argsort(flat)
        token, sorted_weights = order // K, w.flatten()[order]
        ends = F.pad(flat.bincount(minlength=E).cumsum(0), (1, 0)).tolist()
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = expert(x[token[ends[e] : ends[e + 1]]])
            out.index_add_(0, token[ends[e] : ends[e + 1]], rows * sorted_weights[ends[e] : ends[e + 1], None])
        return out


class EndOfTheOneBefore(Sorting):
    def infer(self, x, ids, w):
        flat = ids.view(-1)
        order = flat.argsort()
        ends = torch.bincount(flat, minlength=E).cumsum(0)
        out = torch.zeros_like(x)
        for e in range(len(self.experts)):
            start = ends[e - 1] if e > 0 else 0
            end = ends[e]
            if end <= start:
                continue
            token = order[start:end] // K
            out.index_add_(0, token, self.experts[e](x[token]) * w.view(-1)[order[start:end]].unsqueeze(-1))
        return out


class RunningStart(Sorting):
    def infer(self, x, ids, w):
        flat = ids.view(-1)
        order = flat.argsort()
        counts = torch.bincount(flat, minlength=E).cpu()
        out, start = torch.zeros_like(x), 0
        for e in range(E):
            n = counts[e].item()
            if n == 0:
                continue
            token = order[start : start + n] // K
            out.index_add_(0, token, self.experts[e](x[token]) * w.view(-1)[order[start : start + n], None])
            start += n
        return out


class StartsAndEnds(Sorting):
    def infer(self, x, ids, w):
        flat = ids.view(-1)
        order = flat.argsort()
        counts = torch.bincount(flat, minlength=E)
        ends = counts.cumsum(0)
        starts = ends - counts
        out = torch.zeros_like(x)
        for e in range(E):
            token = order[starts[e] : ends[e]] // K
            out.index_add_(0, token, self.experts[e](x[token]) * w.view(-1)[order[starts[e] : ends[e]], None])
        return out


class CollectedBehindZero(Sorting):
    def infer(self, x, ids, w):
        flat = ids.view(-1)
        order = flat.argsort()
        offsets = [0] + torch.bincount(flat, minlength=E).cumsum(0).tolist()  # noqa: RUF005  (as people write it)
        rows, outputs = x[order // K], []
        for e in range(E):
            start, end = offsets[e], offsets[e + 1]
            if start == end:
                continue
            outputs.append(self.experts[e](rows[start:end]))
        outs = torch.cat(outputs)
        pairs = torch.empty_like(outs)
        pairs[order] = outs
        return (pairs.view(*ids.shape, -1) * w.unsqueeze(-1)).sum(1)


class BufferAddedToTokens(Sorting):
    def infer(self, x, ids, w):
        flat = ids.view(-1)
        order = flat.argsort()
        token = order // K
        rows, sorted_weights = x[token], w.view(-1)[order]
        offsets = [0, *torch.bincount(flat, minlength=E).cumsum(0).tolist()]
        outs = torch.empty_like(rows)
        for e in range(E):
            start, end = offsets[e], offsets[e + 1]
            if start < end:
                outs[start:end] = self.experts[e](rows[start:end])
        out = torch.zeros_like(x)
        out.index_add_(0, token, outs * sorted_weights[:, None])
        return out


class BufferPutBackByTheInverse(Sorting):
    def infer(self, x, ids, w):
        flat = ids.view(-1)
        order = flat.argsort()
        rows = x[order // K]
        ends = torch.bincount(flat, minlength=E).cumsum(0).cpu()
        outs, start = torch.zeros_like(rows), 0
        for e in range(E):
            end = int(ends[e])
            if end > start:
                outs[start:end] = self.experts[e](rows[start:end])
            start = end
        outs = outs[order.argsort()].view(*ids.shape, -1)
        return (outs * w.unsqueeze(-1)).sum(1)


class BufferPutBackByPlaces(Sorting):
    def infer(self, x, ids, w):
        order = ids.flatten().argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        rows = x[order // ids.shape[1]]
        outs, start = torch.empty_like(rows), 0
        for e, n in enumerate(torch.bincount(ids.flatten(), minlength=E).tolist()):
            end = start + n
            if n == 0:
                continue
            outs[start:end] = self.experts[e](rows[start:end])
            start = end
        return torch.einsum("tkh,tk->th", outs[back].view(*ids.shape, -1), w)


class ListAddedToTokens(Sorting):
    def infer(self, x, ids, w):
        flat = ids.view(-1)
        order = flat.argsort()
        token = order // K
        rows, outputs, start = x[token], [], 0
        for e, n in enumerate(flat.bincount(minlength=E).tolist()):
            outputs.append(self.experts[e](rows[start : start + n]))
            start += n
        outs = torch.cat(outputs, dim=0)
        outs = outs * w.view(-1)[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add_(0, token, outs)


class TokenAndSlot(Sorting):
    def infer(self, x, ids, w):
        flat = ids.view(-1)
        order = flat.argsort()
        ends = torch.bincount(flat, minlength=E).cumsum(0).tolist()
        out, start = torch.zeros_like(x), 0
        for e, end in enumerate(ends):
            if start == end:
                continue
            pair = order[start:end]
            token, slot = pair // K, pair % K
            out.index_add_(0, token, w[token, slot].unsqueeze(1) * self.experts[e](x[token]))
            start = end
        return out


class OfTheNextExpert(Sorting):
    """Near miss: an expert takes the rows of the one behind it."""

    def infer(self, x, ids, w):
        flat = ids.view(-1)
        order = flat.argsort()
        counts = torch.bincount(flat, minlength=E)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        out = torch.zeros_like(x)
        for e in range(E - 1):
            start, end = offsets[e + 1].item(), offsets[e + 2].item()
            token = order[start:end] // K
            out.index_add_(0, token, self.experts[e](x[token]) * w.view(-1)[order[start:end], None])
        return out


class BufferInTheSortedOrder(Sorting):
    """Near miss: results meet the weights of other pairs."""

    def infer(self, x, ids, w):
        flat = ids.view(-1)
        order = flat.argsort()
        token = order // K
        rows = x[token]
        offsets = [0, *torch.bincount(flat, minlength=E).cumsum(0).tolist()]
        outs = torch.empty_like(rows)
        for e in range(E):
            start, end = offsets[e], offsets[e + 1]
            if start < end:
                outs[start:end] = self.experts[e](rows[start:end])
        out = torch.zeros_like(x)
        out.index_add_(0, token, outs * w.view(-1)[:, None])
        return out


class LeftSorted(Sorting):
    """Near miss: the sum is over results of neighbours in the sorted order."""

    def infer(self, x, ids, w):
        flat = ids.view(-1)
        order = flat.argsort()
        rows = x[order // K]
        outs, start = torch.empty_like(rows), 0
        for e, n in enumerate(flat.bincount(minlength=E).tolist()):
            outs[start : start + n] = self.experts[e](rows[start : start + n])
            start += n
        return (outs.view(*ids.shape, -1) * w.unsqueeze(-1)).sum(1)


class CountsOfOthers(Sorting):
    """Near miss: the slices are as long as there are pairs of other ids."""

    def infer(self, x, ids, w):
        flat = ids.view(-1)
        order = flat.argsort()
        counts = torch.bincount((flat + 1) % E, minlength=E)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        out = torch.zeros_like(x)
        for e in range(E):
            start, end = offsets[e].item(), offsets[e + 1].item()
            token = order[start:end] // K
            out.index_add_(0, token, self.experts[e](x[token]) * w.view(-1)[order[start:end], None])
        return out


class FirstIsLost(Sorting):
    """Near miss: the first number is a 1, so that a pair of the first expert is left out."""

    def infer(self, x, ids, w):
        flat = ids.view(-1)
        order = flat.argsort()
        counts = torch.bincount(flat, minlength=E)
        offsets = torch.cat([counts.new_ones(1), counts.cumsum(0)])
        out = torch.zeros_like(x)
        for e in range(E):
            start, end = offsets[e].item(), offsets[e + 1].item()
            token = order[start:end] // K
            out.index_add_(0, token, self.experts[e](x[token]) * w.view(-1)[order[start:end], None])
        return out


class WrittenTwice(Sorting):
    """Near miss: the first of the bounds is no zero."""

    def infer(self, x, ids, w):
        order = ids.flatten().argsort()
        ends = torch.zeros(E + 1, dtype=torch.long)
        ends[1:] = torch.bincount(ids.flatten(), minlength=E).cumsum(0)
        ends[0] = 1
        bounds = ends.tolist()
        out = torch.zeros_like(x)
        for e in range(E):
            token = order[bounds[e] : bounds[e + 1]] // K
            weights = w.view(-1)[order[bounds[e] : bounds[e + 1]], None]
            out.index_add_(0, token, self.experts[e](x[token]) * weights)
        return out


class BesideTheirCounts(Sorting):
    """Experts beside the counts of their rows."""

    def infer(self, x, ids, w):
        flat = ids.flatten()
        order = flat.argsort()
        inputs, rows, start = x[order // K], [], 0
        for expert, count in zip(self.experts, torch.bincount(flat, minlength=E).tolist(), strict=True):
            if count == 0:
                continue
            rows.append(expert(inputs[start : start + count]))
            start += count
        return torch.zeros_like(x).index_add_(0, order // K, torch.cat(rows) * w.flatten()[order].unsqueeze(-1))


class BesideStartsAndEnds(Sorting):
    """In a list by an expression; starts are the ends of those before."""

    def infer(self, x, ids, w):
        flat = ids.flatten()
        order = flat.argsort()
        inputs = x[order // K]
        ends = torch.bincount(flat, minlength=E).cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        rows = torch.cat([e(inputs[a:b]) for e, a, b in zip(self.experts, starts, ends, strict=True)])
        return torch.zeros_like(x).index_add_(0, order // K, rows * w.flatten()[order].unsqueeze(-1))


class BesideDifferences(Sorting):
    """Starts are ends without the counts."""

    def infer(self, x, ids, w):
        flat = ids.flatten()
        order = flat.argsort()
        counts = torch.bincount(flat, minlength=E)
        ends = counts.cumsum(0)
        starts, inputs, rows = ends - counts, x[order // K], []
        for e, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            rows.append(self.experts[e](inputs[start:end]))
        return torch.zeros_like(x).index_add_(0, order // K, torch.cat(rows) * w.flatten()[order].unsqueeze(-1))


class BesideNeighbours(Sorting):
    """Two neighbours of the bounds at a time."""

    def infer(self, x, ids, w):
        flat = ids.flatten()
        order = flat.argsort()
        inputs = x[order // K]
        bounds = F.pad(torch.bincount(flat, minlength=E).cumsum(0), (1, 0)).tolist()
        rows = [e(inputs[a:b]) for e, a, b in zip(self.experts, bounds[:-1], bounds[1:], strict=True)]
        return torch.zeros_like(x).index_add_(0, order // K, torch.cat(rows) * w.flatten()[order].unsqueeze(-1))


class Pairwise(Sorting):
    """The same by itertools, a loop over tokens."""

    def infer(self, x, ids, w):
        flat = ids.flatten()
        order = flat.argsort()
        token, weights, out = order // K, w.flatten()[order], torch.zeros_like(x)
        bounds = [0, *torch.bincount(flat, minlength=E).cumsum(0).tolist()]
        for expert, (start, end) in zip(self.experts, pairwise(bounds), strict=True):
            mine = token[start:end]
            out.index_add_(0, mine, expert(x[mine]) * weights[start:end, None])
        return out


class Repeated(Sorting):
    """Every token's row as often as it has experts, in one sort with the ids; results are scattered back."""

    def infer(self, x, ids, w):
        ordered, order = ids.view(-1).sort()
        inputs = x.repeat_interleave(K, dim=0)[order]
        chunks = inputs.split(torch.bincount(ordered, minlength=E).tolist())
        rows = torch.cat([self.experts[e](chunk) for e, chunk in enumerate(chunks)])
        back = torch.zeros_like(rows).scatter_(0, order[:, None].expand_as(rows), rows)
        return (back.view(*ids.shape, -1) * w.unsqueeze(-1)).sum(1)


class OfThoseHit(Sorting):
    """Experts without rows are in no list."""

    def infer(self, x, ids, w):
        flat = ids.view(-1)
        order = flat.argsort()
        hit, counts = torch.unique_consecutive(flat[order], return_counts=True)
        inputs, rows, start = x[order // K], [], 0
        for e, count in zip(hit.tolist(), counts.tolist(), strict=True):
            rows.append(self.experts[e](inputs[start : start + count]))
            start += count
        return torch.zeros_like(x).index_add_(0, order // K, torch.cat(rows) * w.flatten()[order, None])


class ChunksOfThoseHit(Sorting):
    """The same with chunks."""

    def infer(self, x, ids, w):
        flat = ids.view(-1)
        order = flat.argsort()
        hit, counts = flat.unique(return_counts=True)
        chunks = x[order // K].split(counts.tolist())
        rows = torch.cat([self.experts[e](chunk) for e, chunk in zip(hit.tolist(), chunks, strict=True)])
        back = torch.empty_like(rows)
        back[order] = rows
        return (back.view(*ids.shape, -1) * w.unsqueeze(-1)).sum(1)


class Narrowed(Sorting):
    """Slices by a call."""

    def infer(self, x, ids, w):
        flat = ids.view(-1)
        order = flat.argsort()
        inputs, rows, start = x[order // K], [], 0
        for e, count in enumerate(torch.bincount(flat, minlength=E).tolist()):
            rows.append(self.experts[e](inputs.narrow(0, start, count)))
            start += count
        return torch.zeros_like(x).index_add_(0, order // K, torch.cat(rows) * w.flatten()[order, None])


class ScaledByTheirCounts(Sorting):
    """Results times how many rows an expert has."""

    def infer(self, x, ids, w):
        flat = ids.view(-1)
        order = flat.argsort()
        inputs, rows, start = x[order // K], [], 0
        for expert, count in zip(self.experts, torch.bincount(flat, minlength=E).tolist(), strict=True):
            rows.append(expert(inputs[start : start + count]) * count)
            start += count
        return torch.zeros_like(x).index_add_(0, order // K, torch.cat(rows) * w.flatten()[order, None])


class StartsOfOthers(Sorting):
    """Starts are the ends of those behind."""

    def infer(self, x, ids, w):
        flat = ids.flatten()
        order = flat.argsort()
        inputs = x[order // K]
        ends = torch.bincount(flat, minlength=E).cumsum(0).tolist()
        starts = [0, *ends[1:]]
        rows = [e(inputs[a:b]) for e, a, b in zip(self.experts, starts, ends, strict=True)]
        rows = torch.cat([*rows, inputs])[: len(inputs)]
        return torch.zeros_like(x).index_add_(0, order // K, rows * w.flatten()[order].unsqueeze(-1))


FORMS = [
    OffsetsBehindZero, WrittenBehindZero, PaddedEndsInTheSlices, EndOfTheOneBefore, RunningStart, StartsAndEnds,
    CollectedBehindZero, BufferAddedToTokens, BufferPutBackByTheInverse, BufferPutBackByPlaces, ListAddedToTokens,
    TokenAndSlot, BesideTheirCounts, BesideStartsAndEnds, BesideDifferences, BesideNeighbours, Pairwise,
    Repeated, OfThoseHit, ChunksOfThoseHit, Narrowed, CountsOfAChain, CountsByComparing, AddedToZeros,
]  # fmt: skip
# Near misses, and what is said of them.
MISSES = {
    OfTheNextExpert: "No loop in it is over the experts that were hit",
    BufferInTheSortedOrder: "The static form gives other outputs",
    LeftSorted: "outs is not put in the order of the pairs again",
    CountsOfOthers: "The static form gives other outputs",
    FirstIsLost: "The static form gives other outputs",
    ScaledByTheirCounts: "count is more than a number of rows",
    StartsOfOthers: "rows of an expert are not taken in a known way",
    WrittenTwice: "No loop in it is over the experts that were hit",
}
