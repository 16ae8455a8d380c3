//! The closed vocabulary of element types, with the constants of each format.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An element type. Names (`name()`, `FromStr`, serde) are lower case: `bf16`, `e4m3fn`, …
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// IEEE 754 binary64.
    F64,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of binary32: 8 exponent bits, 7 fraction bits.
    Bf16,
    /// OCP 8-bit float, 4 exponent and 3 fraction bits, bias 7: no infinity, largest 448, NaN is 0x7F and 0xFF.
    E4m3fn,
    /// As `E4m3fn` with bias 8: largest 240, no negative zero, the only NaN is 0x80.
    E4m3fnuz,
    /// OCP 8-bit float, 5 exponent and 2 fraction bits, bias 15: infinities and NaNs as in IEEE 754, largest 57344.
    E5m2,
    /// Signed 64-bit integer, two's complement.
    I64,
    /// Signed 32-bit integer, two's complement.
    I32,
    /// Unsigned 16-bit integer.
    U16,
    /// Unsigned 8-bit integer.
    U8,
}

/// A name that is no element type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown dtype `{found}`: use one of {}", Dtype::names())]
pub struct UnknownDtype {
    /// The text that was given.
    pub found: String,
}

/// The bit layout of a binary floating-point format.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FloatLayout {
    /// Width of a code in bits.
    pub bits: u32,
    /// Stored fraction bits.
    pub mantissa_bits: u32,
    /// Exponent bias.
    pub bias: i32,
    /// Largest finite code of positive sign; the codes below it are all finite and ordered as their values.
    pub max_code: u64,
    /// Which codes are not finite.
    pub specials: Specials,
}

/// How a format writes what is not a finite number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Specials {
    /// IEEE 754: all exponent bits set means infinity (fraction 0) or NaN.
    Ieee,
    /// No infinity; NaN is all ones behind either sign.
    NanOnly,
    /// No infinity and no negative zero: the code of negative zero is the NaN.
    NegativeZeroIsNan,
}

impl FloatLayout {
    /// Exponent of the smallest normal number.
    pub const fn min_exponent(&self) -> i32 {
        1 - self.bias
    }

    /// Mask of the sign bit.
    pub const fn sign_mask(&self) -> u64 {
        1 << (self.bits - 1)
    }
}

impl Dtype {
    /// Every element type, floats first, wide before narrow.
    pub const ALL: [Dtype; 11] = [
        Dtype::F64,
        Dtype::F32,
        Dtype::F16,
        Dtype::Bf16,
        Dtype::E4m3fn,
        Dtype::E4m3fnuz,
        Dtype::E5m2,
        Dtype::I64,
        Dtype::I32,
        Dtype::U16,
        Dtype::U8,
    ];

    /// The name used in files and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F64 => "f64",
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
            Dtype::E4m3fn => "e4m3fn",
            Dtype::E4m3fnuz => "e4m3fnuz",
            Dtype::E5m2 => "e5m2",
            Dtype::I64 => "i64",
            Dtype::I32 => "i32",
            Dtype::U16 => "u16",
            Dtype::U8 => "u8",
        }
    }

    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            Dtype::F64 | Dtype::I64 => 8,
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::F16 | Dtype::Bf16 | Dtype::U16 => 2,
            Dtype::E4m3fn | Dtype::E4m3fnuz | Dtype::E5m2 | Dtype::U8 => 1,
        }
    }

    /// Whether the type is a floating-point format.
    pub const fn is_float(self) -> bool {
        self.layout().is_some()
    }

    /// Whether the type is one of the 8-bit floats.
    pub const fn is_fp8(self) -> bool {
        matches!(self, Dtype::E4m3fn | Dtype::E4m3fnuz | Dtype::E5m2)
    }

    /// The largest finite value; for `I64` the largest f64 that is not above 2^63 − 1.
    pub const fn max_finite(self) -> f64 {
        match self {
            Dtype::F64 => f64::MAX,
            Dtype::F32 => f32::MAX as f64,
            Dtype::F16 => 65504.0,
            // 2^128 − 2^120
            Dtype::Bf16 => f64::from_bits(0x47EF_E000_0000_0000),
            Dtype::E4m3fn => 448.0,
            Dtype::E4m3fnuz => 240.0,
            Dtype::E5m2 => 57344.0,
            // 2^63 − 2^10
            Dtype::I64 => f64::from_bits(0x43DF_FFFF_FFFF_FFFF),
            Dtype::I32 => i32::MAX as f64,
            Dtype::U16 => u16::MAX as f64,
            Dtype::U8 => u8::MAX as f64,
        }
    }

    /// Largest relative error of one rounding to nearest of a value in the normal range, 2^−(fraction bits + 1):
    /// 2^−8 for bf16, 2^−4 for both e4m3, 2^−24 for f32. 0 for integers, whose error is absolute.
    pub const fn unit_roundoff(self) -> f64 {
        match self.layout() {
            Some(layout) => f64::from_bits((1022 - layout.mantissa_bits as u64) << 52),
            None => 0.0,
        }
    }

    /// Stored fraction bits (the leading 1 not counted); 0 for integers.
    pub const fn mantissa_bits(self) -> u32 {
        match self.layout() {
            Some(layout) => layout.mantissa_bits,
            None => 0,
        }
    }

    /// Exponent of the smallest normal number (−6 for e4m3fn: 2^−6 is normal); 0 for integers.
    pub const fn min_exponent(self) -> i32 {
        match self.layout() {
            Some(layout) => layout.min_exponent(),
            None => 0,
        }
    }

    /// The bit layout, or `None` for integers.
    pub(crate) const fn layout(self) -> Option<FloatLayout> {
        let (bits, mantissa_bits, bias, max_code, specials) = match self {
            Dtype::F64 => (64, 52, 1023, 0x7FEF_FFFF_FFFF_FFFF, Specials::Ieee),
            Dtype::F32 => (32, 23, 127, 0x7F7F_FFFF, Specials::Ieee),
            Dtype::F16 => (16, 10, 15, 0x7BFF, Specials::Ieee),
            Dtype::Bf16 => (16, 7, 127, 0x7F7F, Specials::Ieee),
            Dtype::E4m3fn => (8, 3, 7, 0x7E, Specials::NanOnly),
            Dtype::E4m3fnuz => (8, 3, 8, 0x7F, Specials::NegativeZeroIsNan),
            Dtype::E5m2 => (8, 2, 15, 0x7B, Specials::Ieee),
            Dtype::I64 | Dtype::I32 | Dtype::U16 | Dtype::U8 => return None,
        };
        Some(FloatLayout { bits, mantissa_bits, bias, max_code, specials })
    }

    fn names() -> String {
        Dtype::ALL.map(Dtype::name).join(", ")
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Dtype {
    type Err = UnknownDtype;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Dtype::ALL
            .into_iter()
            .find(|dtype| dtype.name() == text)
            .ok_or_else(|| UnknownDtype { found: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back_to_its_type_also_through_serde() {
        for dtype in Dtype::ALL {
            assert_eq!(dtype.name().parse::<Dtype>(), Ok(dtype));
            assert_eq!(dtype.to_string(), dtype.name());
            let json = serde_json::to_string(&dtype).unwrap();
            assert_eq!(json, format!("\"{}\"", dtype.name()));
            assert_eq!(serde_json::from_str::<Dtype>(&json).unwrap(), dtype);
        }
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_list_of_valid_ones() {
        let message = "fp8".parse::<Dtype>().unwrap_err().to_string();
        assert!(message.contains("`fp8`"), "{message}");
        for dtype in Dtype::ALL {
            assert!(message.contains(dtype.name()), "{message} lacks {dtype}");
        }
    }

    #[test]
    fn the_constants_of_a_format_follow_from_its_layout() {
        for dtype in Dtype::ALL {
            let Some(layout) = dtype.layout() else {
                assert!(!dtype.is_float() && !dtype.is_fp8());
                assert_eq!(dtype.unit_roundoff(), 0.0);
                continue;
            };
            assert_eq!(layout.bits as usize, 8 * dtype.size_bytes());
            assert_eq!(dtype.unit_roundoff(), 2f64.powi(-(layout.mantissa_bits as i32) - 1));
            // the largest finite value is what its code says
            let exponent = (layout.max_code >> layout.mantissa_bits) as i32 - layout.bias;
            let fraction = layout.max_code & ((1 << layout.mantissa_bits) - 1);
            let significand = 1.0 + fraction as f64 * 2f64.powi(-(layout.mantissa_bits as i32));
            assert_eq!(dtype.max_finite(), significand * 2f64.powi(exponent), "{dtype}");
        }
        assert_eq!(Dtype::Bf16.unit_roundoff(), 0.00390625);
        assert_eq!(Dtype::E4m3fn.min_exponent(), -6);
        assert_eq!(Dtype::E4m3fnuz.min_exponent(), -7);
    }
}
