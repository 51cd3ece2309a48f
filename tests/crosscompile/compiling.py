"""Compile a Triton kernel for a GPU that is not there, and read what came out of it."""

from __future__ import annotations

import re
import subprocess
from bisect import bisect_left
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache, cached_property
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from meta.schemes import SCHEMES

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CAPABILITIES = (80, 90, 100)
MOST_OF_A_LOOP = 1500  # instructions of one around products; longer ones walk through tiles
#: By Triton's hash: tests that compile the same share what is read out of it, which takes half as long again.
KERNELS: dict[str, Compiled] = {}


@dataclass(frozen=True)
class Compiled:
    """One kernel's machine code and its resources.

    registers: per thread. stack: bytes of local memory per thread, which is where spills go. shared: bytes per CTA,
    static and dynamic. log: what the assembler said, "" if what it made was in Triton's cache.
    """

    name: str
    registers: int
    stack: int
    shared: int
    ptx: str
    cubin: bytes
    log: str

    @cached_property
    def sass(self) -> str:
        """Disassembly, for `"HGMMA" in kernel.sass` and the like.

        As `cuobjdump -sass` has it made, but for the encoding of instructions and the analysis of where branches may
        go, which take half as long again.
        """
        return _on_cubin(self.cubin, "nvdisasm", "-pb", "-ndf")

    def ptx_count(self, pattern: str) -> int:
        """How many PTX instructions match a regular expression."""
        return len(re.findall(pattern, self.ptx))

    @cached_property
    def serialised(self) -> list[str]:
        """What the assembler says of asynchronous products that it makes wait for each other."""
        return re.findall(r"\(C75\d\d\).*", self.log or self._assembled_again())

    def _assembled_again(self) -> str:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.ptx"
            path.write_text(self.ptx)
            arch = re.search(r"\.target (sm_\w+)", self.ptx)[1]
            command = [TOOLS / "ptxas", f"-arch={arch}", "-v", path, "-o", path.with_suffix(".cubin")]
            said = subprocess.run(command, check=True, capture_output=True, text=True)
        return said.stdout + said.stderr

    @cached_property
    def loops(self) -> list[list[tuple[int, str, str]]]:
        """Of the loops around products that are no walk through tiles, the instructions: (address, name, operands)."""
        lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+ )?(\S+)(.*?);", self.sass, re.MULTILINE)
        code = [(int(at, 16), operation, operands) for at, operation, operands in lines]
        places = [at for at, _, _ in code]
        products = [at for at, operation, _ in code if re.match("[HQI]G?MMA", operation)]
        found = []
        for past, (at, operation, operands) in enumerate(code, 1):
            target = re.search(r"0x([0-9a-f]+)", operands)
            if operation == "BRA" and target and int(target[1], 16) < at:
                body = code[bisect_left(places, int(target[1], 16)) : past]
                if len(body) < MOST_OF_A_LOOP and bisect_left(products, body[0][0]) < bisect_left(products, at):
                    found.append(body)
        return found

    @cached_property
    def overwritten(self) -> list[str]:
        """Instructions in loops that write a register which a product under way still reads as its first operand."""
        return [found for body in self.loops for found in _hazards([*body, *body])]

    @cached_property
    def voted(self) -> list[str]:
        """Atomic additions by lanes that voted which of them add, see `hopper._by_one_lane`."""
        return re.findall(r"VOTEU?\.ANY U?R\d+(?:.*\n){1,16}?.*?\b((?:ATOM|RED)G?\.\S+)", self.sass)

    @property
    def loads_16_bytes(self) -> bool:
        """Whether global loads (or asynchronous copies) of 16 bytes a thread are present."""
        load, copy = r"ld\.global\S*\.(v4\.b32|v2\.b64)", r"cp\.async\.cg\.\S+ \[[^]]+\], \[[^]]+\], 0x10"
        return self.ptx_count(f"{load}|{copy}") > 0

    @property
    def stores_16_bytes(self) -> bool:
        """Whether global stores of 16 bytes a thread are present."""
        return self.ptx_count(r"st\.global\S*\.v4\.b32|st\.global\S*\.v2\.b64") > 0


@cache
def quantized(scheme: str, rows: int, columns: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """(codes, scales) of the same weights for two experts, which nobody writes to: quantising them for each kernel took
    up to half as long as compiling it.
    """
    stored, scales = SCHEMES[scheme].quantize(torch.randn(1, rows, columns))
    twice = [part.expand(2, -1, -1).contiguous() for part in (stored, *scales)]
    return twice[0], tuple(twice[1:])


def compile_kernel(
    fn: Any,
    signature: dict[str, str],
    constexprs: dict[str, Any],
    *,
    capability: int = 90,
    num_warps: int = 4,
    num_stages: int = 3,
    **options: Any,
) -> Compiled:
    """Compile `fn` for sm_<capability> and return a `Compiled`.

    Args:
        fn: a `triton.jit` function.
        signature: argument name -> Triton type such as "*bf16", "i32" or "fp32"; a ":16" suffix says that the pointer
            is 16-byte aligned or the integer divisible by 16, as the launcher would find out.
        constexprs: argument name -> value; None for an absent pointer belongs here too.
        options: further compile options, e.g. `launch_pdl=True`.
    """
    types = {name: kind.partition(":")[0] for name, kind in signature.items()}
    types |= dict.fromkeys(constexprs, "constexpr")
    ordered = {name: types[name] for name in fn.arg_names}
    aligned = {(fn.arg_names.index(n),): [["tt.divisibility", 16]] for n, kind in signature.items() if ":16" in kind}
    source = GluonASTSource if fn.is_gluon() else ASTSource
    with knobs.nvidia.scope(), redirect_stdout(StringIO()) as said:
        knobs.nvidia.dump_ptxas_log = True
        kernel = triton.compile(
            source(fn, ordered, constexprs, aligned),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": num_warps, "num_stages": num_stages, **options},
        )
    if kernel.hash in KERNELS:
        return KERNELS[kernel.hash]
    usage = _on_cubin(kernel.asm["cubin"], "cuobjdump", "-res-usage")
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    KERNELS[kernel.hash] = Compiled(
        name=fn.__name__,
        registers=numbers["REG"],
        stack=numbers["STACK"] + numbers["LOCAL"],
        shared=kernel.metadata.shared,
        ptx=kernel.asm["ptx"],
        cubin=kernel.asm["cubin"],
        log=said.getvalue(),
    )
    return KERNELS[kernel.hash]


def _hazards(code: list[tuple[int, str, str]]) -> list[str]:
    """Of instructions one after the other: those that write what a product under way reads."""
    groups: list[set[int]] = []
    open_group: set[int] = set()
    found = []
    for at, operation, operands in code:
        names = operands.split(",")
        if re.match("[HQI]GMMA", operation):
            first = re.fullmatch(r"\s*R(\d+)", names[1])
            if first:
                open_group |= {int(first[1]) + register for register in range(4)}
            if "gsb0" in operands:
                groups, open_group = [*groups, open_group], set()
        elif operation.startswith("WARPGROUP.DEPBAR"):
            left = int(names[-1].strip(), 16)
            groups = groups[len(groups) - left :] if left else []
        elif written := re.match(r"\s*R(\d+)", names[0]):
            if not operation.startswith(("ST", "RED", "BAR")):
                size = {".64": 2, "128": 4}.get(operation[-3:], 1)
                registers = {int(written[1]) + register for register in range(size)}
                if registers & set().union(open_group, *groups):
                    found.append(f"{at:x} {operation}{operands}")
    return found


def _on_cubin(cubin: bytes, tool: str, *flags: str) -> str:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([TOOLS / tool, *flags, path], check=True, capture_output=True, text=True).stdout
