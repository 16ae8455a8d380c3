//! The same codecs between f32 and the 8- and 16-bit floats, written for inner loops.
//!
//! All functions agree with [`codec`] bit for bit (NaN payloads aside) and are short enough to inline;
//! with a constant `dtype` the match disappears, and with a loop-invariant one the compiler hoists it.

use crate::codec::{self, Overflow};
use crate::dtype::Dtype;

const SIGN: u32 = 0x8000_0000;
const INFINITY: u32 = 0x7F80_0000;

/// Values of the 256 codes of `e4m3fn`.
static E4M3FN: [f32; 256] = fp8_table(3, 7, Dtype::E4m3fn);
/// Values of the 256 codes of `e4m3fnuz`.
static E4M3FNUZ: [f32; 256] = fp8_table(3, 8, Dtype::E4m3fnuz);
/// Values of the 256 codes of `e5m2`.
static E5M2: [f32; 256] = fp8_table(2, 15, Dtype::E5m2);

/// The code of `value` in `dtype`: [`encode`](crate::encode) for an f32 argument.
#[inline(always)]
pub fn encode_f32(dtype: Dtype, value: f32, overflow: Overflow) -> u64 {
    match dtype {
        Dtype::F32 => {
            let bits = value.to_bits();
            let saturates = overflow == Overflow::Saturate && bits & !SIGN == INFINITY;
            u64::from(if value.is_nan() { bits | 0x0040_0000 } else { bits - u32::from(saturates) })
        }
        Dtype::Bf16 => {
            let code = bf16_from_f32(value);
            let saturates = overflow == Overflow::Saturate && code & 0x7FFF == 0x7F80;
            u64::from(code - u16::from(saturates))
        }
        Dtype::F16 => {
            let code = f16_from_f32(value);
            let saturates = overflow == Overflow::Saturate && code & 0x7FFF == 0x7C00;
            u64::from(code - u16::from(saturates))
        }
        Dtype::E4m3fn => u64::from(fp8_code::<3, 7, 0x7E, 0x7F, 0x7F>(value, overflow)),
        Dtype::E4m3fnuz => {
            let code = fp8_code::<3, 8, 0x7F, 0x80, 0x80>(value, overflow);
            // every path to 0x80 but a true NaN or overflow is a negative zero
            let is_zero = code == 0x80 && value.abs() <= E4M3FNUZ_LARGEST_TO_ZERO;
            u64::from(if is_zero { 0 } else { code })
        }
        Dtype::E5m2 => u64::from(fp8_code::<2, 15, 0x7B, 0x7C, 0x7E>(value, overflow)),
        Dtype::F64 | Dtype::I64 | Dtype::I32 | Dtype::U16 | Dtype::U8 => {
            codec::encode(dtype, f64::from(value), overflow)
        }
    }
}

/// The value of a code: [`decode`](crate::decode) as f32. Exact for every float up to 32 bits, `U8` and `U16`;
/// `F64`, `I64` and `I32` round to nearest.
#[inline(always)]
pub fn decode_f32(dtype: Dtype, bits: u64) -> f32 {
    match dtype {
        Dtype::F32 => f32::from_bits(bits as u32),
        Dtype::Bf16 => bf16_to_f32(bits as u16),
        Dtype::F16 => f16_to_f32(bits as u16),
        Dtype::E4m3fn => E4M3FN[usize::from(bits as u8)],
        Dtype::E4m3fnuz => E4M3FNUZ[usize::from(bits as u8)],
        Dtype::E5m2 => E5M2[usize::from(bits as u8)],
        Dtype::U16 => f32::from(bits as u16),
        Dtype::U8 => f32::from(bits as u8),
        Dtype::I32 => bits as i32 as f32,
        Dtype::I64 => bits as i64 as f32,
        Dtype::F64 => f64::from_bits(bits) as f32,
    }
}

/// The bf16 code of `value`, to nearest even; beyond the largest finite value an infinity, NaN a quiet NaN that keeps
/// sign and leading payload.
#[inline(always)]
pub fn bf16_from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    (if value.is_nan() { (bits >> 16) | 0x0040 } else { rounded }) as u16
}

/// The value of a bf16 code.
#[inline(always)]
pub fn bf16_to_f32(code: u16) -> f32 {
    f32::from_bits(u32::from(code) << 16)
}

/// `value` rounded to bf16 and back.
#[inline(always)]
pub fn round_bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) & 0xFFFF_0000;
    f32::from_bits(if value.is_nan() { bits | 0x0040_0000 } else { rounded })
}

/// The f16 code of `value`, to nearest even; beyond the largest finite value (from 65520) an infinity, NaN a quiet NaN
/// that keeps sign and leading payload.
#[inline(always)]
pub fn f16_from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & !SIGN;
    let code = narrow_magnitude::<10, 15>(magnitude).min(0x7C00);
    let nan = 0x7E00 | ((magnitude >> 13) & 0x03FF);
    (sign | if magnitude > INFINITY { nan } else { code }) as u16
}

/// The value of an f16 code.
#[inline(always)]
pub fn f16_to_f32(code: u16) -> f32 {
    let magnitude = u32::from(code & 0x7FFF);
    // as a (possibly subnormal) f32 the shifted code is the value times 2^-112: the product is exact
    let finite = f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23);
    let special = INFINITY | (magnitude << 13);
    let bits = if magnitude >= 0x7C00 { special } else { finite.to_bits() };
    f32::from_bits(bits | (u32::from(code & 0x8000) << 16))
}

/// `value` rounded to a float format and back: to nearest even, beyond the largest finite value as
/// [`Overflow::NonFinite`].
#[inline(always)]
pub fn round_f32(dtype: Dtype, value: f32) -> f32 {
    match dtype {
        Dtype::F64 | Dtype::F32 => value,
        Dtype::Bf16 => round_bf16(value),
        Dtype::F16 => f16_to_f32(f16_from_f32(value)),
        _ => decode_f32(dtype, encode_f32(dtype, value, Overflow::NonFinite)),
    }
}

/// Half of the smallest `e4m3fnuz` value, 2^−11: the largest magnitude that rounds to zero.
const E4M3FNUZ_LARGEST_TO_ZERO: f32 = f32::from_bits((127 - 11) << 23);

/// Code of a finite or infinite magnitude (f32 bits, sign clear) with M fraction bits, to nearest even, in a format
/// whose exponent has no end. NaN gives a meaningless code.
#[inline(always)]
fn narrow_magnitude<const M: u32, const BIAS: u32>(magnitude: u32) -> u32 {
    let drop = 23 - M;
    let rebased = magnitude.wrapping_sub((127 - BIAS) << 23);
    let normal = rebased.wrapping_add((1 << (drop - 1)) - 1 + ((rebased >> drop) & 1)) >> drop;
    // a number whose unit in the last place is the format's subnormal step: the addition rounds to that step
    let anchor = (1 + 127 - BIAS + drop) << 23;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(anchor)).to_bits().wrapping_sub(anchor);
    if magnitude < (1 + 127 - BIAS) << 23 { subnormal } else { normal }
}

/// An fp8 code with its sign at bit 7; a negative zero comes out as 0x80.
#[inline(always)]
fn fp8_code<const M: u32, const BIAS: u32, const MAX: u32, const BEYOND: u32, const NAN: u32>(
    value: f32,
    overflow: Overflow,
) -> u8 {
    let bits = value.to_bits();
    let magnitude = bits & !SIGN;
    let code = narrow_magnitude::<M, BIAS>(magnitude);
    let beyond = if overflow == Overflow::Saturate { MAX } else { BEYOND };
    let code = if code > MAX { beyond } else { code };
    let code = if magnitude > INFINITY { NAN } else { code };
    (code | ((bits >> 24) & 0x80)) as u8
}

/// Decoding table of an 8-bit float, made from bits alone at compile time.
const fn fp8_table(mantissa_bits: u32, bias: u32, dtype: Dtype) -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut code = 0u32;
    while code < 256 {
        table[code as usize] = f32::from_bits(fp8_to_f32_bits(code, mantissa_bits, bias, dtype));
        code += 1;
    }
    table
}

const fn fp8_to_f32_bits(code: u32, mantissa_bits: u32, bias: u32, dtype: Dtype) -> u32 {
    let sign = (code & 0x80) << 24;
    let magnitude = code & 0x7F;
    let quiet_nan = sign | 0x7FC0_0000;
    match dtype {
        Dtype::E4m3fn if magnitude == 0x7F => return quiet_nan,
        Dtype::E4m3fnuz if code == 0x80 => return quiet_nan,
        Dtype::E5m2 if magnitude == 0x7C => return sign | INFINITY,
        Dtype::E5m2 if magnitude > 0x7C => return quiet_nan,
        _ => {}
    }
    let mut exponent = magnitude >> mantissa_bits;
    let mut fraction = magnitude & ((1 << mantissa_bits) - 1);
    if exponent == 0 {
        if fraction == 0 {
            return sign;
        }
        // shift a subnormal up to its leading 1; the field may pass below 0, so it is kept 127 − bias higher
        let lift = mantissa_bits + 1 - (u32::BITS - fraction.leading_zeros());
        fraction = (fraction << lift) & ((1 << mantissa_bits) - 1);
        exponent = 127 - bias + 1 - lift;
    } else {
        exponent += 127 - bias;
    }
    sign | (exponent << 23) | (fraction << (23 - mantissa_bits))
}
