"""The quick start runs on this machine's devices and shows what it promises."""

import pytest

from moe_ops.examples import quickstart
from moe_ops.examples.families import COMMON, FAMILIES


@pytest.mark.slow
def test_quickstart_shows_graphs_errors_and_times(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMON, "num_hidden_layers", 1)
    monkeypatch.setattr(quickstart, "TIMED_MS", 0.0)  # the times are printed, whatever they are
    assert quickstart.main(["--models", "mixtral"]) == 0
    printed = capsys.readouterr().out
    for part in ("as captured", "_grouped_mm", "as compiled", "moe_ops.fused_moe", "original", "Whole models"):
        assert part in printed
    assert "1 MoE blocks fused, 0 refused; 1 graph, 0 breaks" in printed


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_fused_block_is_as_accurate_as_the_original(family: quickstart.Family) -> None:
    import torch

    with torch.no_grad():
        model = family.build("cpu", torch.bfloat16)
        tokens = torch.randint(0, model.config.vocab_size, (1, 16))
        original, fused = quickstart.block_errors(quickstart.compile_block(model, tokens, "moe_ops_eager"))
    assert fused < 1.1 * original, "the same block, rounded at fewer places"
    assert original < 0.02
