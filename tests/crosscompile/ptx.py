"""PTX of inline assembly, run instruction by instruction: what decodes weights is tested where there is no GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch

WORD = 0xFFFFFFFF


def run(text: str, given: Mapping[str, int]) -> dict[str, int]:
    """Bits of all registers after the instructions, from those of the operands (`$8`) that they read."""
    registers = dict(given)
    for statement in re.split(r"[;\n]", re.sub(r"^\s*\{|\}\s*$", "", text)):
        name, *rest = statement.split(maxsplit=1)[:2] or [""]
        if not name or name == ".reg":
            continue
        target, *operands = re.findall(r"\{[^}]*\}|[^,\s]+", rest[0])
        result = _OPERATIONS[name](*(_value(operand, registers) for operand in operands))
        if target.startswith("{"):
            low, high = target.strip("{}").split(",")
            registers[low.strip()], registers[high.strip()] = result & 0xFFFF, result >> 16
        else:
            registers[target] = result & WORD
    return registers


def _value(operand: str, registers: Mapping[str, int]) -> int:
    return registers[operand] if operand in registers else int(operand, 0)


def _permuted(low: int, high: int, selectors: int) -> int:
    table, found = (low | high << 32).to_bytes(8, "little"), 0
    for place in range(4):
        selector = selectors >> 4 * place & 15
        byte = table[selector & 7]
        found |= (byte if selector < 8 else byte // 128 * 255) << 8 * place
    return found


def _by_table(a: int, b: int, c: int, table: int) -> int:
    found = 0
    for row in range(8):
        if table >> row & 1:
            of_row = WORD
            for value, bit in ((a, row >> 2 & 1), (b, row >> 1 & 1), (c, row & 1)):
                of_row &= value if bit else ~value & WORD
            found |= of_row
    return found


def _in_halves(dtype: torch.dtype, operation: Callable[..., torch.Tensor]) -> Callable[..., int]:
    def of_words(*words: int) -> int:
        halves = [torch.tensor([word & 0xFFFF, word >> 16]).to(torch.int16).view(dtype).double() for word in words]
        low, high = operation(*halves).to(dtype).view(torch.int16).tolist()
        return (low & 0xFFFF) | (high & 0xFFFF) << 16

    return of_words


def _widened(half: int) -> int:
    return int(torch.tensor([half]).to(torch.int16).view(torch.float16).float().view(torch.int32)) & WORD


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return a * b + c


_OPERATIONS: dict[str, Callable[..., int]] = {
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mov.b32": lambda a: a,
    "prmt.b32": _permuted,
    "lop3.b32": _by_table,
    "add.rn.f16x2": _in_halves(torch.float16, torch.add),
    "fma.rn.f16x2": _in_halves(torch.float16, _fma),
    "mul.rn.bf16x2": _in_halves(torch.bfloat16, torch.mul),
    "fma.rn.bf16x2": _in_halves(torch.bfloat16, _fma),
    "cvt.f32.f16": _widened,
}
