//! Encoding and decoding of every element type through f64, with one rounding and an explicit overflow policy.
//!
//! Rounding is to nearest, ties to even (IEEE 754 `roundTiesToEven`), done once from the f64 argument: a value that
//! goes through f32 first may round twice and end elsewhere. The 8-bit formats are the OCP 8-bit Floating Point
//! Specification's `E4M3` (here `e4m3fn`) and `E5M2`, and the `fnuz` variant of gfx942 with bias 8.
//!
//! Implementations disagree on what lies beyond the largest finite value (PyTorch saturates `e4m3fn`, even from
//! infinity; ml_dtypes gives NaN; CUDA has both), so the caller always says which with [`Overflow`].

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::dtype::{Dtype, FloatLayout, Specials};

/// What an encoder does beyond the largest finite value. "Beyond" is judged after rounding: `e4m3fn` takes 464,
/// the tie between 448 and the missing 480, to 448; anything above 464 overflows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overflow {
    /// The largest finite value of the same sign, also for an infinity. NaN stays NaN.
    Saturate,
    /// Infinity where the format has one (f32, f16, bf16, e5m2), else NaN.
    NonFinite,
}

/// A name that is no overflow policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown overflow policy `{found}`: use `saturate` or `non_finite`")]
pub struct UnknownOverflow {
    /// The text that was given.
    pub found: String,
}

impl Overflow {
    /// Both policies.
    pub const ALL: [Overflow; 2] = [Overflow::Saturate, Overflow::NonFinite];

    /// The name used in files and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Overflow::Saturate => "saturate",
            Overflow::NonFinite => "non_finite",
        }
    }
}

impl fmt::Display for Overflow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Overflow {
    type Err = UnknownOverflow;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Overflow::ALL
            .into_iter()
            .find(|policy| policy.name() == text)
            .ok_or_else(|| UnknownOverflow { found: text.to_owned() })
    }
}

/// The code of `value` in `dtype`, in the low `8 · size_bytes` bits; the others are 0.
///
/// Floats round to nearest even, once. NaN becomes the quiet NaN without payload of the same sign (`e4m3fnuz` has
/// a single NaN, 0x80); the zero that a negative value underflows to keeps its sign, except in `e4m3fnuz`, which has
/// no negative zero. Integers round to nearest even and always saturate, having nothing else to give; NaN becomes 0.
pub fn encode(dtype: Dtype, value: f64, overflow: Overflow) -> u64 {
    match dtype.layout() {
        Some(layout) => encode_float(&layout, value, overflow),
        None => encode_integer(dtype, value),
    }
}

/// The value of a code; bits above the width of `dtype` are ignored.
///
/// Exact, except for `I64` codes beyond ±2^53, which round to the nearest f64. Every NaN code gives a NaN.
pub fn decode(dtype: Dtype, bits: u64) -> f64 {
    match dtype {
        Dtype::F64 => f64::from_bits(bits),
        Dtype::F32 => f64::from(f32::from_bits(bits as u32)),
        Dtype::F16 | Dtype::Bf16 | Dtype::E4m3fn | Dtype::E4m3fnuz | Dtype::E5m2 => {
            f64::from(crate::single::decode_f32(dtype, bits))
        }
        Dtype::I64 => bits as i64 as f64,
        Dtype::I32 => f64::from(bits as i32),
        Dtype::U16 => f64::from(bits as u16),
        Dtype::U8 => f64::from(bits as u8),
    }
}

/// `value` rounded to the nearest value of `dtype` (ties to even), beyond the largest finite one as
/// [`Overflow::NonFinite`].
pub fn round(dtype: Dtype, value: f64) -> f64 {
    match dtype {
        Dtype::F64 => value,
        Dtype::F32 => f64::from(value as f32),
        _ => decode(dtype, encode(dtype, value, Overflow::NonFinite)),
    }
}

/// Half the distance from `|value|` to the next larger value of the format: `hulp_p(x)` of the a-priori bounds.
///
/// With e = max(⌊log2 |x|⌋, smallest normal exponent) this is 2^(e − fraction bits − 1), so subnormals count with
/// their own spacing, and a power of two with the (larger) spacing above it. It never falls as |x| grows; hence
/// `|RN(y) − y| ≤ half_ulp(dtype, x)` for every |y| ≤ |x|, and a bound on |y| may be put in y's place.
///
/// 0 at 0, infinite at ±∞, NaN at NaN. Beyond the largest finite value the exponent goes on as if the format had no
/// end. Integers have half a unit everywhere but at 0. For `F64` subnormals 2^−1075 is not a number; 2^−1074 is given.
pub fn half_ulp(dtype: Dtype, value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value.abs();
    }
    let Some(layout) = dtype.layout() else {
        return 0.5;
    };
    let exponent = unbiased_exponent(value).max(layout.min_exponent());
    power_of_two(exponent - layout.mantissa_bits as i32 - 1)
}

/// Exponent field of an f64 less its bias; −1023 for zero and subnormals.
fn unbiased_exponent(value: f64) -> i32 {
    ((value.to_bits() >> 52) & 0x7FF) as i32 - 1023
}

/// 2^exponent, or the smallest positive f64 where that would be less.
fn power_of_two(exponent: i32) -> f64 {
    if exponent >= -1022 {
        f64::from_bits(((exponent + 1023) as u64) << 52)
    } else {
        f64::from_bits(1 << (exponent + 1074).max(0))
    }
}

fn encode_float(layout: &FloatLayout, value: f64, overflow: Overflow) -> u64 {
    let sign = if value.is_sign_negative() { layout.sign_mask() } else { 0 };
    if value.is_nan() {
        return nan_code(layout, sign);
    }
    let magnitude = if layout.bits == 64 { value.abs().to_bits() } else { round_magnitude(layout, value) };
    if magnitude > layout.max_code {
        return match (overflow, layout.specials) {
            (Overflow::Saturate, _) => sign | layout.max_code,
            (Overflow::NonFinite, Specials::Ieee) => sign | (layout.max_code + 1),
            (Overflow::NonFinite, _) => nan_code(layout, sign),
        };
    }
    if magnitude == 0 && layout.specials == Specials::NegativeZeroIsNan {
        return 0;
    }
    sign | magnitude
}

/// Code of |value| rounded to nearest even in a format without end; at most one past the largest representable
/// exponent matters, the caller compares with the largest finite code.
fn round_magnitude(layout: &FloatLayout, value: f64) -> u64 {
    let exponent = unbiased_exponent(value);
    if exponent == -1023 {
        // zero, or below half the smallest subnormal of every narrower format
        return 0;
    }
    let significand = (value.to_bits() & ((1 << 52) - 1)) | (1 << 52);
    let step_exponent = exponent.max(layout.min_exponent());
    let shift = 52 - layout.mantissa_bits as i32 + (step_exponent - exponent);
    if shift > 53 {
        return 0;
    }
    let kept = significand >> shift;
    let rest = significand & ((1 << shift) - 1);
    let half = 1 << (shift - 1);
    let up = rest > half || (rest == half && kept & 1 == 1);
    // `kept` holds the leading 1 of a normal number, which the addition turns into one more in the exponent field;
    // so does a carry out of the fraction
    (((step_exponent - layout.min_exponent()) as u64) << layout.mantissa_bits) + kept + u64::from(up)
}

fn nan_code(layout: &FloatLayout, sign: u64) -> u64 {
    match layout.specials {
        Specials::Ieee => sign | (layout.max_code + 1) | (1 << (layout.mantissa_bits - 1)),
        Specials::NanOnly => sign | (layout.max_code + 1),
        Specials::NegativeZeroIsNan => layout.sign_mask(),
    }
}

fn encode_integer(dtype: Dtype, value: f64) -> u64 {
    let rounded = value.round_ties_even();
    // `as` saturates and takes NaN to 0
    match dtype {
        Dtype::I64 => rounded as i64 as u64,
        Dtype::I32 => u64::from(rounded as i32 as u32),
        Dtype::U16 => u64::from(rounded as u16),
        Dtype::U8 => u64::from(rounded as u8),
        _ => unreachable!("{dtype} is a float"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tie_above_448_rounds_down_and_the_next_value_overflows() {
        let next = f64::from_bits(464f64.to_bits() + 1);
        for overflow in Overflow::ALL {
            assert_eq!(encode(Dtype::E4m3fn, 464.0, overflow), 0x7E);
        }
        assert_eq!(encode(Dtype::E4m3fn, next, Overflow::Saturate), 0x7E);
        assert_eq!(encode(Dtype::E4m3fn, next, Overflow::NonFinite), 0x7F);
        assert_eq!(encode(Dtype::E4m3fn, -next, Overflow::NonFinite), 0xFF);
    }

    #[test]
    fn both_policies_read_back_by_name() {
        for overflow in Overflow::ALL {
            assert_eq!(overflow.to_string().parse(), Ok(overflow));
            assert_eq!(serde_json::to_string(&overflow).unwrap(), format!("\"{overflow}\""));
        }
        assert!("clip".parse::<Overflow>().unwrap_err().to_string().contains("non_finite"));
    }
}
