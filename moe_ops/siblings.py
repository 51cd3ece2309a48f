"""The packages of this distribution have names that a user's own file may have: `meta.py` beside a script comes first.

Importing this module checks `meta`.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def require(name: str, by: str) -> None:
    """Raise unless the package ``name`` that Python finds is the one beside this one; nothing is imported.

    Args:
        name: a top-level package of this distribution.
        by: the package that needs it, for the message.

    Raises:
        ImportError: another module of that name comes first.
    """
    try:
        spec = find_spec(name)
    except ValueError:  # a module without a spec: a script that Python runs, or one made by hand
        spec = None
    found = getattr(sys.modules.get(name), "__file__", None) if spec is None else spec.origin
    ours = _ROOT / name / "__init__.py"
    if found is None or Path(found).resolve() != ours:
        raise ImportError(
            f"{by}: the package {name!r} must be {ours}, got {found or 'none'}, which Python finds first. "
            "Rename that file or folder, or take its folder off sys.path.",
            name=name,
            path=found,
        )


require("meta", by="moe_ops")
