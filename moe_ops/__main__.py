"""`python -m moe_ops`: the command line `moe-ops`, which lives in the package above, where every command is known."""

import sys

from moe_ops import siblings

siblings.require("compile_passes", by="moe_ops")

from compile_passes.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
