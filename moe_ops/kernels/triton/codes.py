"""Codes of weights, and what becomes of them in registers: numbers in bf16, by the word of 32 bits.

Four or eight codes at once: integer instructions put the bits of pairs of codes where bf16 numbers have them, and one
product of two numbers at a time does the rest. No code moves between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.triton.util import INTERPRETED

# e2m1 in place of the last exponent bits of a bf16 number is 2^-126 of its value, e4m3 2^-120; the scale of its group
# brings 2^SHIFT of that back, the end of the sum the rest. So scales from 2^-60 to 2^64 leave no number of e2m1 out of
# bf16's range.
E2M1_SHIFT = tl.constexpr(62)
E4M3_SHIFT = tl.constexpr(60)
E2M1_FACTOR = tl.constexpr(2.0**E2M1_SHIFT.value)
E2M1_UNIT = tl.constexpr(2.0 ** (126 - E2M1_SHIFT.value))
E4M3_UNIT = tl.constexpr(2.0 ** (120 - E4M3_SHIFT.value))

E2M1 = tl.constexpr(0)
INT4 = tl.constexpr(1)
E4M3 = tl.constexpr(2)
INT8 = tl.constexpr(3)
#: Names of `meta.formats.CODES`.
CODE_NUMBERS = {"e2m1": E2M1.value, "int4": INT4.value, "e4m3": E4M3.value, "int8": INT8.value}


@triton.constexpr_function
def codes_of_word(code):
    """How many codes of a number of CODE_NUMBERS a word has."""
    return 8 if code in (E2M1.value, INT4.value) else 4


# A word's codes in pairs of 16 bits, $8 to code0, ..., code3, each twice: one's sign is in place, the other's rest.
_COPIES_OF_E2M1 = tl.constexpr("""
    .reg .b32 high;
    shr.u32 high, $8, 8;
    and.b32 code0, $8, 0x000F000F;
    and.b32 code1, $8, 0x00F000F0;
    and.b32 code2, high, 0x000F000F;
    and.b32 code3, high, 0x00F000F0;
    mul.lo.u32 code0, code0, 0x1040;
    mul.lo.u32 code1, code1, 0x0104;
    mul.lo.u32 code2, code2, 0x1040;
    mul.lo.u32 code3, code3, 0x0104;
""")


@triton.constexpr_function
def _wide_instructions(code):
    """What makes fp32 of the codes of a word, in order: of e2m1 2^-126 times them, as `_instructions` does, of int4
    numbers less 8, of int8 these. Integers are fp16 before, which an instruction widens that is none of the integer
    pipe's, what kernels wait for where each code is multiplied by itself: int4 the last bits of 1024 + code, less 1032,
    or of 1024 + 16 code, divided by 16, less 72; int8 the last byte of 1024 + 128 + code, less 1152.
    """
    if code == E2M1.value:
        body = _COPIES_OF_E2M1.value + "".join(
            f"""
            shl.b32 ${n}, code{n}, 16;
            and.b32 ${n + 4}, code{n}, 0x81C00000;
            and.b32 ${n}, ${n}, 0x81C00000;
            """
            for n in range(4)
        )
        return f"{{ .reg .b32 code<4>; {body} }}"
    if code == INT4.value:
        body = """
            .reg .b32 high, more, part, less;
            mov.b32 more, 0xE408E408;
            mov.b32 part, 0x2C002C00;
            mov.b32 less, 0xD480D480;
            shr.u32 high, $8, 8;
            lop3.b32 code0, $8, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 code1, $8, 0x00F000F0, 0x64006400, 0xEA;
            lop3.b32 code2, high, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 code3, high, 0x00F000F0, 0x64006400, 0xEA;
            add.rn.f16x2 code0, code0, more;
            fma.rn.f16x2 code1, code1, part, less;
            add.rn.f16x2 code2, code2, more;
            fma.rn.f16x2 code3, code3, part, less;
        """
        places = [(n, n + 4) for n in range(4)]
    else:
        body = """
            .reg .b32 bytes, more;
            mov.b32 more, 0xE480E480;
            xor.b32 bytes, $4, 0x80808080;
            prmt.b32 code0, bytes, 0x64646464, 0x4140;
            prmt.b32 code1, bytes, 0x64646464, 0x4342;
            add.rn.f16x2 code0, code0, more;
            add.rn.f16x2 code1, code1, more;
        """
        places = [(0, 1), (2, 3)]
    widened = "".join(
        f"mov.b32 {{first, second}}, code{n}; cvt.f32.f16 ${a}, first; cvt.f32.f16 ${b}, second;"
        for n, (a, b) in enumerate(places)
    )
    return f"{{ .reg .b32 code<4>; .reg .b16 first, second; {body} {widened} }}"


@triton.constexpr_function
def _instructions(code, bare):
    """What makes bf16 of the codes of a word, a pair in each of code0, code1, ...: codes that are 16 bits apart.

    e2m1: their bits at the ends of the fields, which is 2^-126 of them; a product with two powers of two is two copies
    of a code, one's sign and the other's rest in their places. int4: 128 + code, the last bits of a number in
    [128, 256). int8: seven bits as such, less 128, or 256 where the eighth says so. e4m3: the bits of a number of fewer
    exponents, which is 2^-120 of them. NaN, all bits but the sign, gets all exponents where `bare`; elsewhere 2^120
    follows, what it would be, 480, times a number that 448 can be multiplied with is infinite, and NaN times 0.
    """
    if code == E2M1.value:
        body = f"""
            {_COPIES_OF_E2M1.value}
            and.b32 code0, code0, 0x81C081C0;
            and.b32 code1, code1, 0x81C081C0;
            and.b32 code2, code2, 0x81C081C0;
            and.b32 code3, code3, 0x81C081C0;
        """
    elif code == INT4.value:
        body = """
            shr.u32 code1, $8, 4;
            shr.u32 code2, $8, 8;
            shr.u32 code3, $8, 12;
            lop3.b32 code0, $8, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 code1, code1, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 code2, code2, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 code3, code3, 0x000F000F, 0x43004300, 0xEA;
        """
    elif code == INT8.value:
        body = """
            .reg .b32 high, minus, most<2>;
            mov.b32 minus, 0xBF80BF80;
            shr.u32 high, $4, 8;
            lop3.b32 code0, $4, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 code1, high, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 most0, $4, 0x00800080, 0x43004300, 0xEA;
            lop3.b32 most1, high, 0x00800080, 0x43004300, 0xEA;
            fma.rn.bf16x2 code0, most0, minus, code0;
            fma.rn.bf16x2 code1, most1, minus, code1;
        """
    else:
        first, last = (
            (
                """
                mad.lo.u32 over0, rest0, 16, 0x00100010;
                mad.lo.u32 over1, rest1, 16, 0x00100010;
                and.b32 over0, over0, 0x08000800;
                and.b32 over1, over1, 0x08000800;
                """,
                """
                mad.lo.u32 code0, over0, 15, code0;
                mad.lo.u32 code1, over1, 15, code1;
                """,
            )
            if bare
            else (
                """
                mov.b32 large, 0x7B807B80;
                mov.b32 huge, 0x7B117B11;
                mov.b32 zero, 0;
                """,
                """
                mul.rn.bf16x2 code0, code0, large;
                mul.rn.bf16x2 code1, code1, large;
                mul.rn.bf16x2 over0, code0, huge;
                mul.rn.bf16x2 over1, code1, huge;
                fma.rn.bf16x2 code0, over0, zero, code0;
                fma.rn.bf16x2 code1, over1, zero, code1;
                """,
            )
        )
        body = f"""
            .reg .b32 high, sign, large, huge, zero, rest<2>, over<2>;
            shr.u32 high, $4, 8;
            and.b32 rest0, $4, 0x007F007F;
            and.b32 rest1, high, 0x007F007F;
            {first}
            mul.lo.u32 rest0, rest0, 16;
            mul.lo.u32 rest1, rest1, 16;
            shl.b32 sign, $4, 8;
            lop3.b32 code0, sign, 0x80008000, rest0, 0xEA;
            lop3.b32 code1, $4, 0x80008000, rest1, 0xEA;
            {last}
        """
    pairs = 4 if code in (E2M1.value, INT4.value) else 2
    results = "".join(f"mov.b32 {{${pair}, ${pair + pairs}}}, code{pair};" for pair in range(pairs))
    return f"{{ .reg .b32 code<{pairs}>; {body} {results} }}"


@triton.jit
def _numbers(words, CODE: tl.constexpr, BARE: tl.constexpr):
    """bf16 of each word's codes in order, see `_instructions`."""
    INSTRUCTIONS: tl.constexpr = _instructions(CODE, BARE)
    if codes_of_word(CODE) == 8:
        return tl.inline_asm_elementwise(
            INSTRUCTIONS, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            INSTRUCTIONS, "=h,=h,=h,=h,r", [words], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=1
        )


@triton.jit
def codes_of_bytes(stored):
    """The codes [rows, 2 columns] of bytes [rows, columns], for the interpreter."""
    codes = tl.join(stored.to(tl.int32) & 15, stored.to(tl.int32) >> 4)
    return codes.reshape(stored.shape[0], 2 * stored.shape[1])


@triton.jit
def e2m1_value(nibble):
    """fp32 of e2m1, for the interpreter."""
    exponent, mantissa = (nibble >> 1) & 3, (nibble & 1).to(tl.float32)
    scale = (1 << tl.maximum(exponent - 1, 0)).to(tl.float32)
    magnitude = tl.where(exponent == 0, 0.5 * mantissa, (1.0 + 0.5 * mantissa) * scale)
    return tl.where(nibble >= 8, -magnitude, magnitude)


@triton.jit
def _e4m3_value(byte):
    """fp32 of e4m3, for the interpreter."""
    exponent, mantissa = (byte >> 3) & 15, (byte & 7).to(tl.float32)
    scale = ((tl.maximum(exponent, 1) + 120) << 23).to(tl.float32, bitcast=True)
    magnitude = (tl.where(exponent == 0, 0.0, 1.0) + mantissa * 0.125) * scale
    magnitude = tl.where((byte & 127) == 127, float("nan"), magnitude)
    return tl.where(byte >= 128, -magnitude, magnitude)


@triton.jit
def in_order(c):
    """[..., 2, 2 or 4] of the numbers of a word; a thread's neighbours are halves of one register."""
    if len(c) == 8:
        first, second = (
            tl.join(tl.join(c[0], c[2]), tl.join(c[1], c[3])),
            tl.join(tl.join(c[4], c[6]), tl.join(c[5], c[7])),
        )
        found = tl.join(first, second).permute(0, 1, 4, 2, 3)
    else:
        found = tl.join(tl.join(c[0], c[1]), tl.join(c[2], c[3])).permute(0, 1, 3, 2)
    return found.reshape(c[0].shape[0], c[0].shape[1], 2, len(c) // 2)


@triton.jit
def decode_words(words, zero, CODE: tl.constexpr, BARE: tl.constexpr = False):
    """Codes of words [rows, words], first to last: e2m1 times 2^-126, e4m3, where BARE times 2^-120, integers less
    `zero`, which broadcasts to the words, or int4 less 8.

    Returns:
        [rows, words, 2, 4], of eight bits [rows, words, 2, 2]; bf16, fp32 in the interpreter.
    """
    PER_WORD: tl.constexpr = codes_of_word(CODE)
    if INTERPRETED:
        BITS: tl.constexpr = 32 // PER_WORD
        code = (words[:, :, None] >> (BITS * tl.arange(0, PER_WORD))[None, None, :]) & (2**BITS - 1)
        if CODE == E2M1:
            value = e2m1_value(code) * (1.0 / E2M1_UNIT / E2M1_FACTOR)
        elif CODE == E4M3:
            value = _e4m3_value(code) * (2.0**-120 if BARE else 1.0)
        else:
            if CODE == INT8:
                code = (code ^ 128) - 128
            if zero is not None:
                code -= zero.to(tl.int32)[:, :, None]
            elif CODE == INT4:
                code -= 8
            value = code.to(tl.float32)
        found = value.reshape(words.shape[0], words.shape[1], 2, PER_WORD // 2)
    else:
        found = in_order(_numbers(words, CODE, BARE))
        if CODE == INT4:
            if zero is None:
                found -= 136.0
            else:
                found -= (zero.to(tl.float32) + 128.0).to(tl.bfloat16)[:, :, None, None]
        elif CODE == INT8 and zero is not None:
            found -= zero.to(tl.bfloat16)[:, :, None, None]
    return found


@triton.jit
def decode_wide(words, zero, CODE: tl.constexpr):
    """:func:`decode_words` in fp32, not of e4m3."""
    if INTERPRETED:
        found = decode_words(words, zero, CODE)
    else:
        INSTRUCTIONS: tl.constexpr = _wide_instructions(CODE)
        if codes_of_word(CODE) == 8:
            numbers = tl.inline_asm_elementwise(
                INSTRUCTIONS, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [words], dtype=(tl.float32,) * 8, is_pure=True,
                pack=1,
            )  # fmt: skip
        else:
            numbers = tl.inline_asm_elementwise(
                INSTRUCTIONS, "=&r,=&r,=&r,=&r,r", [words], dtype=(tl.float32,) * 4, is_pure=True, pack=1
            )
        found = in_order(numbers)
        if zero is not None:
            found -= (zero.to(tl.float32) - (8.0 if CODE == INT4 else 0.0))[:, :, None, None]
    return found


@triton.jit
def decode_bytes(stored, zero, CODE: tl.constexpr):
    """fp32 of bytes that are e4m3, or int8 less `zero`, which broadcasts: what is not stored as words."""
    if CODE == E4M3:
        if INTERPRETED:
            value = _e4m3_value(stored.to(tl.int32))
        else:
            value = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # Bits of 2^23 + 128 + code, less as much: the conversion instruction takes four times as long.
        bits = (stored.to(tl.int32) & 0xFF) ^ 0x4B000080
        value = bits.to(tl.float32, bitcast=True) - 8388736.0
        if zero is not None:
            value -= zero.to(tl.float32)
    return value


@triton.jit
def as_words(stored):
    """int32 [rows, columns / 4] of bytes [rows, columns]."""
    if stored.dtype == tl.int32:
        words = stored
    else:
        parts = stored.reshape(stored.shape[0], stored.shape[1] // 4, 4).to(tl.int32)
        words = tl.sum(parts << (8 * tl.arange(0, 4))[None, None, :], axis=2)
    return words
