"""A second implementation of the recipes, from the text of src/recipe.rs, in exact integers and fractions.

Reads JSON lines {"recipe": {...}, "indices": [...]} and prints the element codes, one line of integers each.
"""
import json
import sys
from fractions import Fraction

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
# bits, fraction bits, bias, largest finite code, whether negative zero is the NaN
FLOATS = {
    "f64": (64, 52, 1023, 0x7FEFFFFFFFFFFFFF, False),
    "f32": (32, 23, 127, 0x7F7FFFFF, False),
    "f16": (16, 10, 15, 0x7BFF, False),
    "bf16": (16, 7, 127, 0x7F7F, False),
    "e4m3fn": (8, 3, 7, 0x7E, False),
    "e4m3fnuz": (8, 3, 8, 0x7F, True),
    "e5m2": (8, 2, 15, 0x7B, False),
}
INTEGERS = {"i64": (64, True), "i32": (32, True), "u16": (16, False), "u8": (8, False)}


def mix(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def word(seed, stream, index):
    key = mix(mix((seed + GOLDEN) & MASK) ^ stream)
    return mix((key + GOLDEN * (index + 1)) & MASK)


def centred_sum(words):
    return sum((w >> shift) & 0xFFFF for w in words for shift in (0, 16, 32, 48)) - 393210


def unscaled(distribution, draw, index):
    if distribution == "uniform":
        return Fraction(2 * (draw(index) >> 41) + 1 - (1 << 23), 1 << 23)
    if distribution == "gaussian":
        return Fraction(centred_sum([draw(3 * index + i) for i in range(3)]), 1 << 16)
    if distribution == "heavy_tail":
        last = draw(4 * index + 3)
        zeros = 64 if last == 0 else (last & -last).bit_length() - 1
        doublings = min(5, zeros // 2)
        return Fraction(centred_sum([draw(4 * index + i) for i in range(3)]) << doublings, 1 << 16)
    if distribution == "sign":
        return Fraction(1 - 2 * (draw(index) >> 63))
    return {"constant": Fraction(1), "zero": Fraction(0)}[distribution]


def encode(dtype, value):
    if dtype in INTEGERS:
        bits, signed = INTEGERS[dtype]
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
        return min(max(round(value), low), high) & ((1 << bits) - 1)
    bits, fraction_bits, bias, largest, no_negative_zero = FLOATS[dtype]
    sign, magnitude = (1 << (bits - 1) if value < 0 else 0), abs(value)
    exponent = 1 - bias
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    steps = round(magnitude / Fraction(2) ** (exponent - fraction_bits))  # round() takes ties to even
    code = min(((exponent - 1 + bias) << fraction_bits) + steps, largest)
    return 0 if code == 0 and no_negative_zero else sign | code


def main():
    for line in sys.stdin:
        case = json.loads(line)
        recipe = case["recipe"]

        def draw(index):
            return word(recipe["seed"], recipe["stream"], index)

        scale = Fraction(2) ** recipe["exponent"]
        codes = (encode(recipe["dtype"], unscaled(recipe["distribution"], draw, i) * scale) for i in case["indices"])
        print(*codes)


if __name__ == "__main__":
    main()
