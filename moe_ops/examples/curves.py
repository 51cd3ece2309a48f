"""The picture of a training: loss curves, and how far each is from the eager one."""

from __future__ import annotations

from pathlib import Path

from moe_ops.examples.training import EAGER, FUSED, NUDGED, PLAIN, Run

NONE = 1e-7
# Wide and pale below, narrow and dark on top: curves that lie on each other are all seen.
STYLES = {
    EAGER: dict(color="#9ecae1", linewidth=6.0, label="eager"),
    PLAIN: dict(color="#fd8d3c", linewidth=2.8, label="torch.compile"),
    FUSED: dict(color="#08306b", linewidth=1.1, label='backend="moe_ops"'),
    NUDGED: dict(color="#888888", linewidth=1.2, linestyle=":", label="eager, weights nudged by rounding"),
}


def require_matplotlib() -> None:
    """Raises:
    ValueError: it is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ValueError(
            'the picture is drawn with matplotlib, got none. pip install -e ".[bench]" has it; --no-picture '
            "goes without."
        ) from error


def draw(runs: dict[str, Run], title: str, tolerated: float | None, path: Path) -> None:
    """Write the picture of all runs that made a step; its ending says of what kind."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for name, run in runs.items():
        if name != NUDGED:
            above.plot(range(1, len(run.losses) + 1), run.losses, **STYLES[name])
    above.set_title(title, fontsize="medium")
    above.set_ylabel("training loss, nats per byte")
    for name, run in runs.items():
        if name == EAGER or not run.losses:
            continue
        style = STYLES[name] | {"linewidth": 1.4}
        far = [max(distance, NONE) for distance in run.distances(runs[EAGER])]  # (a logarithm has no 0)
        below.plot(range(1, len(far) + 1), far, **style)
    if tolerated is not None:
        label = "tolerated on average"
        below.axhline(tolerated, color="#cb181d", linewidth=1.0, linestyle="--", label=label)
    below.set_yscale("log")
    below.set_ylabel("from eager, nats\n(none is drawn as 1e-7)")
    below.set_xlabel("step of the optimizer")
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    above.legend(frameon=False)
    if below.get_legend_handles_labels()[0]:
        below.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)
