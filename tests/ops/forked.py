"""Programs in processes of their own, which share the imports of one."""

from __future__ import annotations

import json
import subprocess
import sys

EACH = """
import json, os, sys, traceback
found = {}
for name, code in json.loads(sys.argv[1]).items():
    read, write = os.pipe()
    if not os.fork():
        os.dup2(write, 1)
        try:
            exec(code, globals())
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        found[name] = said.read()
    os.wait()
print(json.dumps(found))
"""


def forked(before: str, programs: dict[str, str]) -> dict[str, str]:
    """What each of ``programs`` wrote, and the error that ended it, in a process that has run ``before`` and nothing
    that another one has.
    """
    command = [sys.executable, "-c", before + EACH, json.dumps(programs)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-2000:]
    found: dict[str, str] = json.loads(result.stdout)
    return found
