//! The dtype of attention outputs: what a kernel writes, what goes over the wire, what the merge returns.

use std::fmt;
use std::str::FromStr;

/// Dtype of partial and merged outputs. Scores, sums and LSE are f32 in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputDtype {
    /// IEEE binary32: a DCP run differs from one rank by summation order alone.
    F32,
    /// bfloat16, as GPU engines have it.
    Bf16,
}

impl OutputDtype {
    /// Every dtype.
    pub const ALL: [Self; 2] = [Self::F32, Self::Bf16];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }

    /// `x` rounded to this dtype, ties to even.
    pub fn round(self, x: f32) -> f32 {
        match self {
            Self::F32 => x,
            Self::Bf16 if x.is_nan() => x,
            Self::Bf16 => {
                let bits = x.to_bits();
                let half = 0x7fff + (bits >> 16 & 1);
                f32::from_bits(bits.wrapping_add(half) & 0xffff_0000)
            }
        }
    }
}

impl fmt::Display for OutputDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for OutputDtype {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let names = || Self::ALL.map(Self::name).join(", ");
        Self::ALL
            .into_iter()
            .find(|d| d.name() == name)
            .ok_or_else(|| format!("`{name}` is none of {}", names()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_to_nearest_and_ties_to_even() {
        let round = |bits: u32| OutputDtype::Bf16.round(f32::from_bits(bits)).to_bits();
        assert_eq!(round(0x3f80_8000), 0x3f80_0000, "tie, even below");
        assert_eq!(round(0x3f81_8000), 0x3f82_0000, "tie, even above");
        assert_eq!(round(0x3f80_8001), 0x3f81_0000);
        assert_eq!(round(0xbf80_7fff), 0xbf80_0000);
        assert_eq!(round(0x7f7f_ffff), f32::INFINITY.to_bits(), "past the largest");
        assert!(OutputDtype::Bf16.round(f32::NAN).is_nan());
        assert_eq!(OutputDtype::F32.round(1.000_000_1), 1.000_000_1);
    }

    #[test]
    fn names_lead_back_to_dtypes() {
        for dtype in OutputDtype::ALL {
            assert_eq!(dtype.name().parse(), Ok(dtype));
        }
        assert!("fp8".parse::<OutputDtype>().expect_err("unknown").contains("f32, bf16"));
    }
}
