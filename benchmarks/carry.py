"""Bring the code that the peers `vllm_kernel`, `triton_kernels` and `triton_kernels_mxfp4` need, from a vLLM wheel (a
zip file) into `.peers`.

The folder is ignored by git: the code is run, and never becomes part of this repository. Installing vLLM would bring
its own torch.
"""

from __future__ import annotations

import ast
import re
import shutil
import zipfile
from pathlib import Path, PurePosixPath

PEERS = Path(__file__).parent.parent / ".peers"
LIBRARY, CONFIGURATIONS = "lib", "cfg"  # in it
PACKAGE = "vllm/third_party/triton_kernels/"
MODULE = "vllm/model_executor/layers/fused_moe/fused_moe.py"
KERNELS = ("write_zeros_to_output", "fused_moe_kernel")
TUNED = re.compile(r"vllm/model_executor/layers/fused_moe/configs/E=\d+,N=\d+,device_name=NVIDIA_H[12]00[^,]*\.json")


def carry(wheel: Path, folder: Path = PEERS) -> list[Path]:
    """Write `lib/triton_kernels`, `lib/vllm_kernel.py` and `cfg/*.json` below ``folder``; returns the files.

    Raises:
        ValueError: ``wheel`` is no wheel of a vLLM that holds them.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            kernels = kernel_module(archive.read(MODULE).decode())
            package = [name for name in names if name.startswith(PACKAGE) and not name.endswith("/")]
            if not package:
                raise KeyError(PACKAGE)
            shutil.rmtree(folder / LIBRARY / "triton_kernels", ignore_errors=True)
            files = {LIBRARY + "/triton_kernels/" + name.removeprefix(PACKAGE): archive.read(name) for name in package}
            tuned = [name for name in names if TUNED.fullmatch(name)]
            files |= {f"{CONFIGURATIONS}/{PurePosixPath(name).name}": archive.read(name) for name in tuned}
    except (OSError, zipfile.BadZipFile, KeyError) as failure:
        raise ValueError(
            f"benchmarks: carry must get a vLLM wheel with {PACKAGE} and {', '.join(KERNELS)} in {MODULE}, got {wheel} "
            f"({failure}). Try that of `pip download --no-deps vllm==0.33`."
        ) from None
    files[f"{LIBRARY}/vllm_kernel.py"] = kernels.encode()
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return [folder / name for name in files]


def kernel_module(source: str) -> str:
    """A module with nothing but KERNELS of ``source``, which as a whole would import all of vLLM."""
    lines = source.splitlines(keepends=True)
    parts = ["import triton\nimport triton.language as tl\n"]
    found = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    for name in KERNELS:
        node = found[name]
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        parts.append("".join(lines[first - 1 : node.end_lineno]))
    return "\n\n".join(parts)
