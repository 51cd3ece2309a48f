"""Refuses, when imported, a foreign package under the name `moe_ops`: a script called moe_ops.py, most often."""

import runpy
from pathlib import Path

# By its path, because what has the name may not be ours.
_checks = runpy.run_path(str(Path(__file__).resolve().parents[1] / "moe_ops" / "siblings.py"))
_checks["require"]("moe_ops", by="compile_passes")
