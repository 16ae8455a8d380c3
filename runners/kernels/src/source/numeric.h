// Numbers: bf16, f16 and eight-bit codes, exp and log. All of it in plain f32 arithmetic, so that two vendors' cards agree.

#define SC_NAN SC_FLOAT(0x7FC00000u)
#define SC_INF SC_FLOAT(0x7F800000u)
#define SC_NEG_INF SC_FLOAT(0xFF800000u)

SC_DEVICE bool is_nan(float x) { return (SC_BITS(x) & 0x7FFFFFFFu) > 0x7F800000u; }

// Nearest even; an overflow is an infinity, a NaN stays one.
SC_DEVICE u16 bf16_of(float x) {
    const u32 bits = SC_BITS(x);
    if (is_nan(x)) return (u16)((bits >> 16) | 0x0040u);
    return (u16)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
SC_DEVICE float of_bf16(u16 code) { return SC_FLOAT((u32)code << 16); }
SC_DEVICE float round_bf16(float x) { return of_bf16(bf16_of(x)); }

SC_DEVICE float of_f16(u16 code) {
    const u32 sign = (u32)(code & 0x8000u) << 16, rest = code & 0x7FFFu;
    if (rest >= 0x7C00u) return SC_FLOAT(sign | 0x7F800000u | ((rest & 0x3FFu) << 13));
    // 2^112 moves the exponent's bias from 15 to 127; subnormal codes come out right because the product is exact
    return SC_FLOAT(sign | SC_BITS(SC_FLOAT(rest << 13) * SC_FLOAT(0x77800000u)));
}

SC_DEVICE float of_e4m3fn(u8 code) {
    const u32 sign = (u32)(code & 0x80u) << 24, rest = code & 0x7Fu;
    if (rest == 0x7Fu) return SC_NAN;
    return SC_FLOAT(sign | SC_BITS(SC_FLOAT(rest << 20) * SC_FLOAT(0x7B800000u)));  // 2^120
}
SC_DEVICE float of_e4m3fnuz(u8 code) {
    if (code == 0x80u) return SC_NAN;
    const u32 sign = (u32)(code & 0x80u) << 24, rest = code & 0x7Fu;
    return SC_FLOAT(sign | SC_BITS(SC_FLOAT(rest << 20) * SC_FLOAT(0x7B000000u)));  // 2^119
}
SC_DEVICE float of_e5m2(u8 code) {
    const u32 sign = (u32)(code & 0x80u) << 24, rest = code & 0x7Fu;
    if (rest >= 0x7Cu) return SC_FLOAT(sign | 0x7F800000u | ((rest & 3u) << 21));
    return SC_FLOAT(sign | SC_BITS(SC_FLOAT(rest << 21) * SC_FLOAT(0x77800000u)));  // 2^112
}

// A finite magnitude to a small float of `mantissa` fraction bits and exponent bias `bias`, to nearest even, without its sign.
SC_DEVICE u32 small_float(float magnitude, i32 mantissa, i32 bias) {
    const u32 bits = SC_BITS(magnitude);
    const i32 exponent = (i32)(bits >> 23) - 127;
    if (exponent >= 1 - bias) {
        const i32 drop = 23 - mantissa;
        const u32 rounded = bits + (((u32)1 << (drop - 1)) - 1u) + ((bits >> drop) & 1u);
        return (rounded >> drop) - ((u32)(127 - bias) << mantissa);
    }
    // subnormal: the unit of the last place is 2^(1 - bias - mantissa)
    const i32 shift = 23 - mantissa + (1 - bias - exponent);
    if (shift > 24) return 0;
    const u32 whole = exponent < -126 ? bits : (bits & 0x7FFFFFu) | 0x800000u;
    const u32 half = (u32)1 << (shift - 1), kept = whole >> shift, rest = whole & (((u32)1 << shift) - 1u);
    return kept + (rest > half || (rest == half && (kept & 1u)) ? 1u : 0u);
}

// To nearest even; an overflow, from 65520 on, is an infinity, a NaN stays one.
SC_DEVICE u16 f16_of(float x) {
    const u32 bits = SC_BITS(x), sign = (bits >> 16) & 0x8000u;
    if (is_nan(x)) return (u16)(sign | 0x7E00u | ((bits >> 13) & 0x3FFu));
    const float magnitude = SC_FLOAT(bits & 0x7FFFFFFFu);
    return (u16)(sign | (magnitude >= 65520.0f ? 0x7C00u : small_float(magnitude, 10, 15)));
}

// Element types of a wire, and the code of a value on one of 16 bits.
enum WireType { WIRE_F32 = 0, WIRE_BF16 = 1, WIRE_F16 = 2 };
SC_DEVICE u16 half_of(i32 wire, float value) { return wire == WIRE_F16 ? f16_of(value) : bf16_of(value); }

// Beyond the range the largest finite number of the same sign, for an infinity too; NaN stays NaN.
SC_DEVICE u32 saturated(float x, i32 mantissa, i32 bias, u32 largest, u32 nan, u32 sign_bit) {
    const u32 sign = (SC_BITS(x) >> 31) ? sign_bit : 0u;
    if (is_nan(x)) return nan;
    const float magnitude = SC_FLOAT(SC_BITS(x) & 0x7FFFFFFFu);
    if (magnitude >= SC_FLOAT(0x7F000000u)) return sign | largest;
    const u32 code = small_float(magnitude, mantissa, bias);
#ifdef FAULT_CAST_OVERFLOWS_TO_NAN
    if (code > largest) return nan;
#endif
    return sign | (code > largest ? largest : code);
}

// Raw code of a value in a cache, right-aligned.
SC_DEVICE u32 encode(i32 dtype, float x) {
#if defined(FAULT_WRITTEN_AS_THE_OTHER_E4M3)
    if (dtype == CODE_E4M3FN) dtype = CODE_E4M3FNUZ;
    else if (dtype == CODE_E4M3FNUZ) dtype = CODE_E4M3FN;
#endif
    const u32 bits = SC_BITS(x);
    switch (dtype) {
    case CODE_BF16: {
        const u16 code = bf16_of(x);
        return (code & 0x7FFFu) == 0x7F80u ? code - 1u : code;
    }
    case CODE_F16: return saturated(x, 10, 15, 0x7BFFu, 0x7E00u | ((bits >> 16) & 0x8000u) | ((bits >> 13) & 0x3FFu), 0x8000u);
    case CODE_E4M3FN: return saturated(x, 3, 7, 0x7Eu, 0x7Fu | ((bits >> 24) & 0x80u), 0x80u);
    case CODE_E4M3FNUZ: {
        const u32 code = saturated(x, 3, 8, 0x7Fu, 0x80u, 0x80u);
        // the only zero has no sign: its code with one is the NaN
        return code == 0x80u && !is_nan(x) ? 0u : code;
    }
    case CODE_E5M2: return saturated(x, 2, 15, 0x7Bu, 0x7Eu | ((bits >> 24) & 0x80u), 0x80u);
    default: return is_nan(x) ? bits | 0x00400000u : (bits & 0x7FFFFFFFu) == 0x7F800000u ? bits - 1u : bits;
    }
}

SC_DEVICE i32 code_bytes(i32 dtype) { return dtype == CODE_F32 ? 4 : dtype <= CODE_F16 ? 2 : 1; }

// Value of the code at element `at`.
SC_DEVICE float decode(i32 dtype, const void *codes, i64 at) {
#if defined(FAULT_FNUZ_READ_AS_FN)
    if (dtype == CODE_E4M3FNUZ) dtype = CODE_E4M3FN;
#elif defined(FAULT_FN_READ_AS_FNUZ)
    if (dtype == CODE_E4M3FN) dtype = CODE_E4M3FNUZ;
#endif
    switch (dtype) {
    case CODE_BF16: return of_bf16(((const u16 *)codes)[at]);
    case CODE_F16: return of_f16(((const u16 *)codes)[at]);
    case CODE_E4M3FN: return of_e4m3fn(((const u8 *)codes)[at]);
    case CODE_E4M3FNUZ: return of_e4m3fnuz(((const u8 *)codes)[at]);
    case CODE_E5M2: return of_e5m2(((const u8 *)codes)[at]);
    default: return ((const float *)codes)[at];
    }
}

// The same where the codes may lie at any byte.
SC_DEVICE float decode_bytes(i32 dtype, const u8 *codes, i64 at) {
    const i32 size = code_bytes(dtype);
    u32 word = 0;
    for (i32 i = 0; i < size; i++) word |= (u32)codes[at * size + i] << (8 * i);
    return decode(dtype, &word, 0);
}

// 2^n of an integer, exact where it is a normal number.
SC_DEVICE float power_of_two(i32 n) { return SC_FLOAT((u32)(n + 127) << 23); }

// e^x to about one unit in the last place: x = n·ln 2 + r, |r| <= ln 2 / 2, a polynomial of degree 6 in r (Cephes, expf), and
// 2^n in two steps, so that subnormal results are rounded once. 0 below the range, infinity above it, NaN for NaN.
SC_DEVICE float natural_exp(float x) {
    if (is_nan(x)) return x;
    if (x > 88.8f) return SC_INF;
    if (x < -104.0f) return 0.0f;
    const float shifted = SC_FMA(x, 1.44269504f, 12582912.0f);  // rounds to an integer in the low bits
    const float n = shifted - 12582912.0f;
    float r = SC_FMA(n, -0.693359375f, x);
    r = SC_FMA(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = SC_FMA(p, r, 1.3981999507e-3f);
    p = SC_FMA(p, r, 8.3334519073e-3f);
    p = SC_FMA(p, r, 4.1665795894e-2f);
    p = SC_FMA(p, r, 1.6666665459e-1f);
    p = SC_FMA(p, r, 5.0000001201e-1f);
    p = SC_FMA(p, r * r, r) + 1.0f;
    const i32 e = (i32)n, half = e / 2;
    return p * power_of_two(half) * power_of_two(e - half);
}

// ln x to about one unit in the last place for positive x (Cephes, logf): the fraction in [sqrt(1/2), sqrt(2)), a polynomial of
// degree 8, and the exponent's ln 2 in two parts. -infinity for 0, NaN below, infinity for infinity.
SC_DEVICE float natural_log(float x) {
    if (is_nan(x) || x < 0.0f) return SC_NAN;
    if (x == 0.0f) return SC_NEG_INF;
    if (x == SC_INF) return x;
    i32 e = 0;
    if (SC_BITS(x) < 0x00800000u) {
        x *= 8388608.0f;
        e = -23;
    }
    const u32 bits = SC_BITS(x);
    e += (i32)(bits >> 23) - 126;
    float f = SC_FLOAT((bits & 0x7FFFFFu) | 0x3F000000u);  // [0.5, 1)
    if (f < 0.707106781f) {
        e -= 1;
        f = f + f - 1.0f;
    } else {
        f = f - 1.0f;
    }
    const float z = f * f, n = (float)e;
    float p = 7.0376836292e-2f;
    p = SC_FMA(p, f, -1.1514610310e-1f);
    p = SC_FMA(p, f, 1.1676998740e-1f);
    p = SC_FMA(p, f, -1.2420140846e-1f);
    p = SC_FMA(p, f, 1.4249322787e-1f);
    p = SC_FMA(p, f, -1.6668057665e-1f);
    p = SC_FMA(p, f, 2.0000714765e-1f);
    p = SC_FMA(p, f, -2.4999993993e-1f);
    p = SC_FMA(p, f, 3.3333331174e-1f);
    float y = f * z * p;
    y = SC_FMA(n, -2.12194440e-4f, y);
    y = SC_FMA(z, -0.5f, y);
    return SC_FMA(n, 0.693359375f, f + y);
}

#define SC_LN2 0.693147181f
#define SC_LOG2E 1.44269504f

// 2^x and log2 x by way of the natural ones; for statistics that are given in base 2.
SC_DEVICE float base_2_exp(float x) {
    if (x == SC_NEG_INF) return 0.0f;
    if (is_nan(x) || x > 129.0f || x < -151.0f) return is_nan(x) ? x : x > 0.0f ? SC_INF : 0.0f;
    const float shifted = x + 12582912.0f;
    const float n = shifted - 12582912.0f;
    const i32 e = (i32)n, half = e / 2;
    return natural_exp((x - n) * SC_LN2) * power_of_two(half) * power_of_two(e - half);
}
SC_DEVICE float base_2_log(float x) {
    if (!(x > 0.0f) || x == SC_INF) return natural_log(x);
    const u32 bits = SC_BITS(x);
    if (bits < 0x00800000u) return natural_log(x) * SC_LOG2E;
    i32 e = (i32)(bits >> 23) - 127;
    float f = SC_FLOAT((bits & 0x7FFFFFu) | 0x3F800000u);
    if (f > 1.41421356f) {
        f *= 0.5f;
        e += 1;
    }
    return SC_FMA(natural_log(f), SC_LOG2E, (float)e);
}
