"""Bring the code that other projects' peers need, from a wheel (a zip file) into `.peers`: of vLLM for `vllm_kernel`,
`triton_kernels` and `triton_kernels_mxfp4`, of those in WHOLE for `liger` and `sonicmoe`.

The folder is ignored by git: the code is run, and never becomes part of this repository. Installing vLLM would bring
its own torch, and SonicMoE asks for an older one. Of vLLM a few files are taken, of the others all.
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
#: A file of each wheel that is taken whole. The last three are what SonicMoE imports.
WHOLE = (
    "liger_kernel/ops/fused_moe.py",
    "sonicmoe/functional/__init__.py",
    "quack/gemm_interface.py",
    "nvidia_cutlass_dsl.pth",
    "tvm_ffi/__init__.py",
)
TUNED = re.compile(r"vllm/model_executor/layers/fused_moe/configs/E=\d+,N=\d+,device_name=NVIDIA_H[12]00[^,]*\.json")


def carry(wheel: Path, folder: Path = PEERS) -> list[Path]:
    """Write `lib/triton_kernels`, `lib/vllm_kernel.py` and `cfg/*.json` of vLLM, or all of a wheel of WHOLE into `lib`,
    below ``folder``; returns the files.

    Raises:
        ValueError: ``wheel`` is no wheel of a vLLM that holds them, nor one with a file of WHOLE.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            whole = not set(WHOLE).isdisjoint(archive.namelist())
            files = all_files(archive) if whole else files_of_vllm(archive)
    except (OSError, zipfile.BadZipFile, KeyError) as failure:
        raise ValueError(
            f"benchmarks: carry must get a vLLM wheel with {PACKAGE} and {', '.join(KERNELS)} in {MODULE}, or one "
            f"with any of {', '.join(WHOLE)}, got {wheel} ({failure}). Try that of `pip download --no-deps vllm==0.33` "
            "or `liger-kernel==0.8.5`."
        ) from None
    for top in {PurePosixPath(name).parts[1] for name in files if name.startswith(f"{LIBRARY}/")}:
        for old in (folder / LIBRARY).glob(re.sub(r"-.*(?=\.dist-info$)", "-*", top)):
            shutil.rmtree(old, ignore_errors=True)  # of another version, say; a single file is written over
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return [folder / name for name in files]


def files_of_vllm(archive: zipfile.ZipFile) -> dict[str, bytes]:
    """What of a vLLM wheel is carried, by its path below the folder.

    Raises:
        KeyError: something is not in it.
    """
    names = archive.namelist()
    kernels = kernel_module(archive.read(MODULE).decode())
    package = [name for name in names if name.startswith(PACKAGE) and not name.endswith("/")]
    if not package:
        raise KeyError(PACKAGE)
    files = {f"{LIBRARY}/triton_kernels/{name.removeprefix(PACKAGE)}": archive.read(name) for name in package}
    tuned = [name for name in names if TUNED.fullmatch(name)]
    files |= {f"{CONFIGURATIONS}/{PurePosixPath(name).name}": archive.read(name) for name in tuned}
    return files | {f"{LIBRARY}/vllm_kernel.py": kernels.encode()}


def all_files(archive: zipfile.ZipFile) -> dict[str, bytes]:
    """All of a wheel, its version too, by its path below the folder."""
    return {f"{LIBRARY}/{name}": archive.read(name) for name in archive.namelist() if not name.endswith("/")}


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
