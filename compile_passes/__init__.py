"""Compiler passes that find MoE blocks in unmodified models and replace them by `moe_ops` operators.

`moe_ops.compile`, `explain`, `fuse`, `stack_experts_` and `restore` are the functions of this package; `moe_ops` looks
them up here on first use, which is the only time that it looks upward. Importing this package registers the
torch.compile backends "moe_ops" and "moe_ops_eager"; an installed distribution also announces them by entry points.
"""

from compile_passes import siblings as _siblings  # noqa: F401  (first: it refuses a foreign `moe_ops`)

# isort: split

from compile_passes.backend import compile, fuse
from compile_passes.explain import explain
from compile_passes.prepare import restore
from compile_passes.stacking import stack_experts_

__all__ = ["compile", "explain", "fuse", "restore", "stack_experts_"]
