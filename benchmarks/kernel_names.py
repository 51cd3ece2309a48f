"""Names of kernels as they are read: a C++ kernel's own, and of CUTLASS's products what tells one from another."""

from __future__ import annotations

import re

_CONSTANT = r"NS[0-9A-Z]*_(?:1C)?ILi\d+EEE"  # cute::C<n>
_SUBSTITUTE = r"S[0-9A-Z]*_"  # what stood before, by its number
_SIZES = rf"(?:{_CONSTANT}|{_SUBSTITUTE})+"
_GROUPED = re.compile(
    rf"IJ(?P<cluster>NS[0-9A-Z]*_1CILi\d+EEE{_SIZES})EEENS[0-9A-Z]*_\d+Kernel[A-Za-z0-9]*?EEENS[0-9A-Z]*_IJ(?P<tile>{_SIZES})EEE"
)
_MAJORS = re.compile(r"5MajorE([01])ELS?N?S?[0-9A-Z]*_(?:5MajorE)?([01])E")
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ENTRIES_BETWEEN = 3  # of the numbered ones: the cluster, the schedule, the main loop made of both
_IDENTIFIER = re.compile(r"(\d+)")


def short_name(name: str) -> str:
    """A kernel's own name, without namespaces, template arguments and parameters of C++; a short name stays as it is.

    Of a grouped product of CUTLASS: its tile (rows x columns x depth), and which operands are transposed, in the
    letters of BLAS: "tn" where both are contiguous along the contraction, as activations and weights of a linear layer
    are; "tt" where the second is contiguous along its columns; "nt" where neither is, as of a weight's gradient.
    """
    if (product := _cutlass_product(name)) is not None:
        return product
    if name.startswith("_Z"):
        return _last_identifier(name)
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    if inner := re.search(r"cutlass::\w+<(cutlass\w+)", plain):
        return inner[1]
    plain = re.split(r"[<(]", plain, maxsplit=1)[0].strip()
    return plain.split("::")[-1] or name[:40]


def _cutlass_product(name: str) -> str | None:
    """Of a mangled name: these are beyond what demanglers take. None of any other."""
    found, majors = _GROUPED.search(name), _MAJORS.search(name)
    if found is None or majors is None:
        return None
    tile = "x".join(str(size or "?") for size in _sizes(found["cluster"], found["tile"]))
    first, second = ("n" if majors[1] == "1" else "t"), ("t" if majors[2] == "1" else "n")
    return f"cutlass grouped gemm {tile} {first}{second}"


def _sizes(cluster: str, tile: str) -> list[int]:
    """The numbers of ``tile``, some of which are spelled as the place of what was spelled before; 0 for unknown ones.

    The mangling counts what may come again: the template `cute::C` first, then each of its constants, and
    :data:`_ENTRIES_BETWEEN` more behind those of the cluster.
    """
    template = re.findall(r"N(S[0-9A-Z]*_)I", cluster + tile)
    number = _number(template[0]) + 1 if template else 0
    known: dict[int, int] = {}
    sizes: list[int] = []
    for part in (cluster, tile):
        for item in re.findall(rf"{_CONSTANT}|{_SUBSTITUTE}", part):
            if value := re.search(r"ILi(\d+)E", item):
                known[number], number = int(value[1]), number + 1
                sizes.append(int(value[1]))
            else:
                sizes.append(known.get(_number(item), 0))
        if part is cluster:
            number += _ENTRIES_BETWEEN
            sizes.clear()
    return sizes


def _number(substitute: str) -> int:
    """ "S_" is the first, "S0_" the second."""
    digits = substitute[1:-1]
    value = 0
    for digit in digits:
        value = value * len(_DIGITS) + _DIGITS.index(digit)
    return value + 1 if digits else 0


def _last_identifier(name: str) -> str:
    """Of a mangled name: the last of its identifiers, before arguments of templates."""
    at, found = len("_ZN" if name.startswith("_ZN") else "_Z"), name
    while length := _IDENTIFIER.match(name, at):
        at = length.end() + int(length[1])
        found = name[length.end() : at]
    return found
