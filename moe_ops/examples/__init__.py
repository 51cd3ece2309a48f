"""Programs to run with `python -m moe_ops.examples.NAME`."""
