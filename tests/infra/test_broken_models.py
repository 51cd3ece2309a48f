"""Five models broken on purpose: what the testing kit says of each names the line, why, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_ops.examples import broken
from moe_ops.examples.broken import EXAMPLES, Sound, tokens
from moe_ops.testing import assert_cuda_graph_safe, assert_fused, assert_no_recompiles

# The line that breaks the model, and words of the reason and of the cure.
SAID = {
    "a graph break": (
        "if hidden.isnan().any():", "A graph break cuts the block in pieces: Data-dependent branching",
        "torch.where in place of `if`",
    ),
    "a compilation for every batch size": (
        "for start in range(0, x.shape[0], 16)]", "size 20 compiles again after size 4", "ties the code to a size",
    ),
    "a wait for the device": (
        "used = int(ids.max()) + 1", "the host needs a value that is on the device",
        "Keep the value on the device, as a tensor.",
    ),
    "a wrong layout": (
        "return (F.silu(gate) * up).reshape(-1, WIDTH)", "is not the gate half of the first expert product",
        "Take the halves with h.chunk(2, dim=-1)",
    ),
    "a value that escapes": (
        "return torch.bmm(self.gate_up_experts[ids], rows.unsqueeze(-1)).squeeze(-1)", "is also used by",
        "Only the routing logits, weights and ids may be used outside of the block.",
    ),
}  # fmt: skip


def test_there_are_five() -> None:
    assert set(SAID) == set(EXAMPLES) and len(EXAMPLES) == 5


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_message_names_the_line_the_reason_and_the_cure(name: str) -> None:
    said, (line, reason, cure) = EXAMPLES[name].message(), SAID[name]
    source = Path(broken.__file__).read_text().splitlines()
    place = 1 + next(at for at, text in enumerate(source) if line in text)
    assert line in said and f"broken.py:{place}" in said, said
    assert reason in said and cure in said, said


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_runs_and_computes_a_block(name: str) -> None:
    """Nobody notices without the check. (Weights in another order of rows are another block's.)"""
    torch.manual_seed(0)
    model, x = EXAMPLES[name].model(), tokens(20)
    sound = Sound()
    sound.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert model(x).shape == sound(x).shape
        if name != "a wrong layout":
            torch.testing.assert_close(model(x), sound(x))


def test_the_sound_model_passes_every_check() -> None:
    with torch.no_grad():
        assert_fused(Sound(), tokens(), blocks=1)
    assert_no_recompiles(Sound(), tokens, sizes=(4, 20, 40))
    assert_cuda_graph_safe(Sound(), tokens())


def test_a_check_that_passes_is_an_error() -> None:
    with pytest.raises(ValueError, match="Sound: the check must fail"):
        broken.Example(Sound, lambda model: None, "").message()


def test_the_messages_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(broken, "EXAMPLES", {"a wrong layout": EXAMPLES["a wrong layout"]})
    broken.main()
    printed = capsys.readouterr().out
    assert printed.startswith("a wrong layout (WrongLayout)\n\n1 of 1 MoE block(s) not fused:")
    assert EXAMPLES["a wrong layout"].cure in printed
