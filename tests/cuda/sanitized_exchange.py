"""The kernels that write into other GPUs' memory, as `test_sanitizers.py` runs them under compute-sanitizer.

One GPU plays two ranks, one behind the other, since the sanitizer may let a kernel run alone: what the first one waits
for is there before it starts. The second one gets what the first one wrote.
"""

from __future__ import annotations

import torch

from moe_ops.kernels.triton import deliver, push

RANKS = 2
SLOT = 3 * push.BLOCK * push.PROGRAMS // 2  # words of a rank's part: some programs have two blocks of it
ROWS = (1, 3, 700)
WIDTHS = (1024, 8, 7)  # words of a row of every tensor
TOKENS, TOP_K, H = 37, 3, 200


def main() -> None:
    """Every exchange, by each rank as the second one."""
    torch.manual_seed(0)
    exchanges()
    deliveries()
    torch.cuda.synchronize()
    print("ran")


def exchanges() -> None:
    """Rows of changing number, gathered and sent apart, call behind call."""
    flags = push.flag_words(RANKS)
    buffers = [torch.zeros(flags + 2 * RANKS * SLOT, dtype=torch.int32, device="cuda") for _ in range(RANKS)]
    peers = torch.tensor([buffer.data_ptr() for buffer in buffers], device="cuda")
    calls = [torch.zeros(push.PROGRAMS, dtype=torch.int32, device="cuda") for _ in range(RANKS)]
    for call, (rows, gather) in enumerate([(rows, gather) for rows in ROWS for gather in (True, False)], 1):
        blocks = 1 if gather else RANKS
        sent = [[words(blocks * rows * width) for width in WIDTHS] for _ in range(RANKS)]
        received = [[words(RANKS * rows * width).fill_(-1) for width in WIDTHS] for _ in range(RANKS)]
        first, second = (0, 1) if call % 2 else (1, 0)
        buffers[first][:flags].view(-1, RANKS)[:, second] = call
        for rank in (first, second):
            push.exchange(peers, calls[rank], RANKS * SLOT, SLOT, sent[rank], received[rank], rank, gather)
        for number, got in enumerate(received[second]):
            parts = [sent[rank][number].view(blocks, -1)[0 if gather else second] for rank in range(RANKS)]
            assert torch.equal(got, torch.cat(parts)), f"call {call}, tensor {number}"


def words(number: int) -> torch.Tensor:
    return torch.randint(0, 1 << 31, (number,), device="cuda", dtype=torch.int32)


def deliveries() -> None:
    """Sums of pairs of both ranks' tokens, of each rank."""
    said, results = 4 * RANKS, RANKS * TOKENS * H  # words that say something; numbers of fp32
    buffers = [torch.zeros(said + results, dtype=torch.int32, device="cuda") for _ in range(RANKS)]
    peers = torch.tensor([buffer.data_ptr() for buffer in buffers], device="cuda")
    rows = [torch.randn(90, H, device="cuda") for _ in range(RANKS)]
    places = torch.randint(-1, 91, (RANKS * TOKENS, TOP_K), device="cuda", dtype=torch.int32)
    weights = torch.rand(places.shape, device="cuda")
    buffers[0][RANKS + 1] = 1  # the first one to wait: for a word that was not said
    for rank in range(RANKS):
        deliver.deliver(rows[rank], places, weights, peers=peers, at=said, tokens=TOKENS, first=0, rank=rank)
        deliver.meet(peers, RANKS, rank, say=True)
    kept = ((places >= 0) & (places < 90)).unsqueeze(-1) * weights.unsqueeze(-1).double()
    want = sum((own.double()[places.clamp(0, 89).long()] * kept).sum(1) for own in rows)
    for rank, buffer in enumerate(buffers):
        got = deliver.sum_parts(buffer[said:].view(torch.float32).view(RANKS, TOKENS, H))
        torch.testing.assert_close(got.double(), want[rank * TOKENS : (rank + 1) * TOKENS], rtol=0, atol=1e-4)


if __name__ == "__main__":
    main()
