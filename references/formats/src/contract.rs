//! The rounding contract: how an implementation says it rounds, and how loose it may say so.
//!
//! The certified bound of an attention output is computed from these parameters and from nothing else, so a contract
//! is the only tolerance there is. The terms are those of a-priori rounding-error analysis (Higham, *Accuracy and
//! Stability of Numerical Algorithms*, γ_n = n·u / (1 − n·u); block-FMA units in Blanchard, Higham, Lopez, Mary and
//! Pranesh 2020; truncating tensor cores in Fasi, Higham, Mikaitis and Pranesh 2021). [`Contract::check_ceiling`]
//! refuses one loose enough to pass anything.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::codec::half_ulp;
use crate::dtype::Dtype;

/// Arithmetic of the merge of per-rank partial outputs by their log-sum-exp.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Merge {
    /// All-to-all of partials and LSEs; every rank merges its heads in f32 and rounds once at the end.
    A2a,
    /// All-gather of LSEs, local correction, reduce-scatter of the corrected partials in f32.
    AgRsF32,
    /// As `AgRsF32`, but each corrected partial and each of the W − 1 sums is rounded to bf16.
    AgRsBf16,
    /// As `AgRsBf16`, in f16.
    AgRsF16,
}

/// A name that is no merge arithmetic.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown merge `{found}`: use one of a2a, ag_rs_f32, ag_rs_bf16, ag_rs_f16")]
pub struct UnknownMerge {
    /// The text that was given.
    pub found: String,
}

impl Merge {
    /// Every merge arithmetic.
    pub const ALL: [Merge; 4] = [Merge::A2a, Merge::AgRsF32, Merge::AgRsBf16, Merge::AgRsF16];

    /// The name used in files and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Merge::A2a => "a2a",
            Merge::AgRsF32 => "ag_rs_f32",
            Merge::AgRsBf16 => "ag_rs_bf16",
            Merge::AgRsF16 => "ag_rs_f16",
        }
    }

    /// The 16-bit format that corrected partials and their sums are rounded to; `None` where both stay in f32.
    pub const fn rounded_to(self) -> Option<Dtype> {
        match self {
            Merge::A2a | Merge::AgRsF32 => None,
            Merge::AgRsBf16 => Some(Dtype::Bf16),
            Merge::AgRsF16 => Some(Dtype::F16),
        }
    }
}

impl fmt::Display for Merge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Merge {
    type Err = UnknownMerge;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Merge::ALL
            .into_iter()
            .find(|merge| merge.name() == text)
            .ok_or_else(|| UnknownMerge { found: text.to_owned() })
    }
}

/// The longest chain of additions that a summand of Σ p·v or Σ p passes through, for n summands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Depth {
    /// One addition for every `tile` summands (the K extent of one matrix instruction), and `extra` more within it
    /// and between splits: ⌊n / tile⌋ + extra. Usual: 16 and 16.
    PerTile {
        /// Summands that one instruction adds, at least 1.
        tile: usize,
        /// Additions that don't grow with n.
        extra: usize,
    },
    /// Any order of summation: n.
    Any,
}

/// How an implementation rounds, from its inputs (exact after quantisation) to its output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contract {
    /// Unit roundoff of one accumulation in Q·K and P·V: 2^−24 where f32 additions round to nearest, 2^−23 where
    /// the matrix unit truncates with guard bits.
    pub u_acc: f64,
    /// Longest chain of additions in Σ p·v and in the normaliser Σ p.
    pub depth: Depth,
    /// Largest error of exp, exp2 and log in ulp of f32: 2 for library functions, about 15 for fast-math ones.
    pub kexp: f64,
    /// Fewest KV tokens between two rescales of the running maximum: at most n / tile_min rescales plus one a rank.
    pub tile_min: usize,
    /// What the probabilities are rounded to before P·V; absent (`None`) means they stay in f32 and add no error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p_dtype: Option<Dtype>,
    /// Absolute error floor of that rounding, relative to the largest probability of the rank: 0 for bf16; for
    /// e4m3 2^−10 divided by the scale applied to P before the cast (half of its smallest subnormal, 2^−9).
    pub p_floor: f64,
    /// Whether the largest probability of a rank is exactly exp(0) = 1. False where the running maximum is updated
    /// lazily.
    pub exact_max: bool,
    /// Whether the normaliser sums the *rounded* probabilities.
    pub l_rounded: bool,
    /// Type of a rank's partial output before the merge (only where W > 1).
    pub partial: Dtype,
    /// Arithmetic of the merge (only where W > 1).
    pub merge: Merge,
    /// Relative error of an LSE on its way to the merge: 0 where all 32 bits travel, 2^−16 where it travels as the
    /// sum of two bf16 values.
    pub lse_rel: f64,
    /// Type of the merged output.
    pub output: Dtype,
}

/// Why a contract is refused. Each message names the field and what would be accepted.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ContractError {
    /// A number is NaN, infinite or negative.
    #[error("contract field `{field}` is {value}: give a finite number that is not negative")]
    NotAMagnitude {
        /// The field.
        field: &'static str,
        /// What it held.
        value: f64,
    },
    /// A number is beyond its ceiling.
    #[error("contract field `{field}` is {value}, more than {limit}: {why}")]
    TooLoose {
        /// The field.
        field: &'static str,
        /// What it held.
        value: f64,
        /// The most that is accepted.
        limit: f64,
        /// What a larger value would let pass.
        why: &'static str,
    },
    /// A count that must be at least 1 is 0.
    #[error("contract field `{field}` is 0: give a count of at least 1")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// An element type is too coarse for its role, or not a float.
    #[error("contract field `{field}` is {dtype}: use one of {accepted}")]
    Dtype {
        /// The field.
        field: &'static str,
        /// What it held.
        dtype: Dtype,
        /// The types that are accepted.
        accepted: &'static str,
    },
}

impl Contract {
    /// Largest `u_acc`, 2^−11: the roundoff of accumulating in f16. Sums over a context are not "f32 accumulation"
    /// long before that, and γ(576, 2^−11), the relative error of a 576-wide score, is already 0.39.
    pub const MAX_U_ACC: f64 = 1.0 / 2048.0;
    /// Largest `kexp`, 64 ulp: four times the worst fast-math exp.
    pub const MAX_KEXP: f64 = 64.0;
    /// Largest `lse_rel`, 2^−8: an LSE rounded once to bf16. Truncating an LSE is a fault, not a contract.
    pub const MAX_LSE_REL: f64 = 1.0 / 256.0;
    /// Largest `p_floor`, 2^−10: half of e4m3's smallest subnormal with P unscaled. Anything above would let tokens
    /// vanish that the coarsest accepted type still holds.
    pub const MAX_P_FLOOR: f64 = 1.0 / 1024.0;
    /// Most additions beyond the number of summands, for padding and splits: no order of summation has more than n.
    pub const MAX_DEPTH_EXTRA: usize = 64;

    /// The contract of a usual bf16 kernel: truncating matrix unit with f32 accumulators (u 2^−23, depth n/16 + 16),
    /// exp within 2 ulp, tiles of at least 32 tokens, P in bf16 under a true running maximum, the normaliser from
    /// unrounded P, bf16 partials and output, LSEs in f32.
    pub fn bf16_default(merge: Merge) -> Contract {
        Contract {
            u_acc: 1.0 / (1u64 << 23) as f64,
            depth: Depth::PerTile { tile: 16, extra: 16 },
            kexp: 2.0,
            tile_min: 32,
            p_dtype: Some(Dtype::Bf16),
            p_floor: 0.0,
            exact_max: true,
            l_rounded: false,
            partial: Dtype::Bf16,
            merge,
            lse_rel: 0.0,
            output: Dtype::Bf16,
        }
    }

    /// The same arithmetic on activations of f16: what is rounded to bf16 is rounded to f16 instead. Probabilities then have
    /// an absolute floor, half the spacing of f16's subnormals (2^−25), which bf16, with the exponents of f32, has none of.
    pub fn in_f16(&self) -> Contract {
        let half = |dtype: Dtype| if dtype == Dtype::Bf16 { Dtype::F16 } else { dtype };
        let p_floor = match self.p_dtype {
            Some(Dtype::Bf16) => self.p_floor.max(half_ulp(Dtype::F16, f64::MIN_POSITIVE)),
            _ => self.p_floor,
        };
        Contract {
            p_dtype: self.p_dtype.map(half),
            p_floor,
            partial: half(self.partial),
            merge: if self.merge == Merge::AgRsBf16 { Merge::AgRsF16 } else { self.merge },
            output: half(self.output),
            ..self.clone()
        }
    }

    /// Unit roundoff of the probabilities: that of `p_dtype`, 0 where they are not rounded.
    pub fn u_p(&self) -> f64 {
        self.p_dtype.map_or(0.0, Dtype::unit_roundoff)
    }

    /// Longest chain of additions over `n` summands.
    ///
    /// # Panics
    /// If the tile of [`Depth::PerTile`] is 0, which [`Contract::check_ceiling`] refuses.
    pub fn depth_for(&self, n: usize) -> usize {
        match self.depth {
            Depth::PerTile { tile, extra } => n / tile + extra,
            Depth::Any => n,
        }
    }

    /// Refuses a contract so loose that a bound made from it would pass faulty outputs.
    ///
    /// | field | ceiling | why |
    /// | --- | --- | --- |
    /// | `u_acc` | 2^−11 | accumulating in f16; beyond it a score has no correct digit left |
    /// | `depth` | n + 64 | no order of summation is longer than n; 64 for padding and splits |
    /// | `kexp` | 64 ulp | four times the worst fast-math exp |
    /// | `tile_min` | ≥ 1 | a rescale for every token is the most there can be |
    /// | `p_dtype` | e4m3 or finer | nothing coarser than 3 fraction bits is used for P; e5m2 would double the bound |
    /// | `p_floor` | 2^−10 | half of e4m3's smallest subnormal, P unscaled |
    /// | `partial`, `output` | bf16 or finer | an fp8 partial loses more than any single token weighs |
    /// | `lse_rel` | 2^−8 | an LSE rounded once to bf16 |
    ///
    /// # Errors
    /// The first field, in declaration order, that is beyond its ceiling, negative, infinite or NaN.
    pub fn check_ceiling(&self) -> Result<(), ContractError> {
        at_most("u_acc", self.u_acc, Self::MAX_U_ACC, "that is coarser than accumulating in f16")?;
        if let Depth::PerTile { tile, extra } = self.depth {
            at_least_one("depth.tile", tile)?;
            let why = "no order of summation needs more than n + 64 additions";
            at_most("depth.extra", extra as f64, Self::MAX_DEPTH_EXTRA as f64, why)?;
        }
        at_most("kexp", self.kexp, Self::MAX_KEXP, "no exp in use is that inaccurate")?;
        at_least_one("tile_min", self.tile_min)?;
        if let Some(dtype) = self.p_dtype {
            no_coarser_than("p_dtype", dtype, Dtype::E4m3fn, "f64, f32, f16, bf16, e4m3fn, e4m3fnuz")?;
        }
        let why = "tokens would vanish that e4m3 still holds";
        at_most("p_floor", self.p_floor, Self::MAX_P_FLOOR, why)?;
        no_coarser_than("partial", self.partial, Dtype::Bf16, "f64, f32, f16, bf16")?;
        let why = "that is coarser than an LSE rounded to bf16";
        at_most("lse_rel", self.lse_rel, Self::MAX_LSE_REL, why)?;
        no_coarser_than("output", self.output, Dtype::Bf16, "f64, f32, f16, bf16")
    }
}

fn at_most(field: &'static str, value: f64, limit: f64, why: &'static str) -> Result<(), ContractError> {
    if !value.is_finite() || value < 0.0 {
        return Err(ContractError::NotAMagnitude { field, value });
    }
    if value > limit {
        return Err(ContractError::TooLoose { field, value, limit, why });
    }
    Ok(())
}

fn at_least_one(field: &'static str, value: usize) -> Result<(), ContractError> {
    if value == 0 { Err(ContractError::Zero { field }) } else { Ok(()) }
}

fn no_coarser_than(
    field: &'static str,
    dtype: Dtype,
    coarsest: Dtype,
    accepted: &'static str,
) -> Result<(), ContractError> {
    if dtype.is_float() && dtype.unit_roundoff() <= coarsest.unit_roundoff() {
        Ok(())
    } else {
        Err(ContractError::Dtype { field, dtype, accepted })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> Contract {
        Contract::bf16_default(Merge::A2a)
    }

    fn refused_field(contract: &Contract) -> &'static str {
        match contract.check_ceiling().expect_err("the contract must be refused") {
            ContractError::NotAMagnitude { field, .. }
            | ContractError::TooLoose { field, .. }
            | ContractError::Zero { field }
            | ContractError::Dtype { field, .. } => field,
        }
    }

    #[test]
    fn the_default_contract_is_accepted_for_every_merge() {
        for merge in Merge::ALL {
            let contract = Contract::bf16_default(merge);
            assert_eq!(contract.check_ceiling(), Ok(()));
            assert_eq!(contract.merge, merge);
            assert_eq!(contract.u_acc, 2f64.powi(-23));
            assert_eq!(contract.u_p(), 2f64.powi(-8));
        }
    }

    #[test]
    fn a_number_is_accepted_at_its_ceiling_and_refused_just_above_it() {
        type Set = fn(&mut Contract, f64);
        let fields: [(&str, f64, Set); 4] = [
            ("u_acc", 2f64.powi(-11), |c, x| c.u_acc = x),
            ("kexp", 64.0, |c, x| c.kexp = x),
            ("p_floor", 2f64.powi(-10), |c, x| c.p_floor = x),
            ("lse_rel", 2f64.powi(-8), |c, x| c.lse_rel = x),
        ];
        for (field, limit, set) in fields {
            let mut contract = base();
            set(&mut contract, limit);
            assert_eq!(contract.check_ceiling(), Ok(()), "{field} at its ceiling");
            set(&mut contract, limit.next_up());
            assert_eq!(refused_field(&contract), field);
            for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1e-9] {
                set(&mut contract, bad);
                assert!(matches!(
                    contract.check_ceiling(),
                    Err(ContractError::NotAMagnitude { field: f, .. }) if f == field
                ));
            }
        }
    }

    #[test]
    fn a_tile_of_zero_tokens_is_refused() {
        let mut contract = base();
        contract.tile_min = 0;
        assert_eq!(refused_field(&contract), "tile_min");
        contract.tile_min = 1;
        assert_eq!(contract.check_ceiling(), Ok(()));
    }

    #[test]
    fn a_summation_longer_than_its_summands_is_refused() {
        let mut contract = base();
        contract.depth = Depth::PerTile { tile: 0, extra: 16 };
        assert_eq!(refused_field(&contract), "depth.tile");
        contract.depth = Depth::PerTile { tile: 1, extra: 65 };
        assert_eq!(refused_field(&contract), "depth.extra");
        contract.depth = Depth::PerTile { tile: 1, extra: 64 };
        assert_eq!(contract.check_ceiling(), Ok(()));
        contract.depth = Depth::Any;
        assert_eq!(contract.check_ceiling(), Ok(()));
    }

    #[test]
    fn probabilities_may_be_e4m3_but_nothing_coarser() {
        for dtype in Dtype::ALL {
            let contract = Contract { p_dtype: Some(dtype), ..base() };
            let accepted = dtype.is_float() && dtype != Dtype::E5m2;
            assert_eq!(contract.check_ceiling().is_ok(), accepted, "{dtype}");
        }
        assert_eq!(Contract { p_dtype: None, ..base() }.check_ceiling(), Ok(()));
    }

    #[test]
    fn partials_and_outputs_in_fp8_or_integers_are_refused() {
        for dtype in Dtype::ALL {
            let accepted = matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::Bf16);
            let partial = Contract { partial: dtype, ..base() };
            let output = Contract { output: dtype, ..base() };
            assert_eq!(partial.check_ceiling().is_ok(), accepted, "{dtype}");
            assert_eq!(output.check_ceiling().is_ok(), accepted, "{dtype}");
        }
    }

    #[test]
    fn unrounded_probabilities_have_no_roundoff() {
        assert_eq!(Contract { p_dtype: None, ..base() }.u_p(), 0.0);
        assert_eq!(Contract { p_dtype: Some(Dtype::E4m3fnuz), ..base() }.u_p(), 0.0625);
    }

    #[test]
    fn in_f16_all_that_was_bf16_is_f16_and_the_rest_stays() {
        let half = Contract::bf16_default(Merge::AgRsBf16).in_f16();
        assert_eq!((half.p_dtype, half.partial, half.output), (Some(Dtype::F16), Dtype::F16, Dtype::F16));
        assert_eq!((half.merge, half.p_floor), (Merge::AgRsF16, 2f64.powi(-25)));
        assert_eq!(half.check_ceiling(), Ok(()));
        assert_eq!(half.in_f16(), half);
        let wide = Contract { p_dtype: None, partial: Dtype::F32, output: Dtype::F32, ..base() };
        assert_eq!(wide.in_f16(), wide);
        let narrow = Contract { p_dtype: Some(Dtype::E4m3fn), p_floor: 2f64.powi(-12), ..base() };
        assert_eq!((narrow.in_f16().p_dtype, narrow.in_f16().p_floor), (narrow.p_dtype, narrow.p_floor));
        for merge in Merge::ALL {
            assert_eq!(
                merge.rounded_to().map(|dtype| format!("ag_rs_{dtype}")),
                match merge {
                    Merge::A2a | Merge::AgRsF32 => None,
                    named => Some(named.name().to_owned()),
                }
            );
        }
    }

    #[test]
    fn the_depth_counts_tiles_or_every_summand() {
        let mut contract = base();
        assert_eq!(contract.depth_for(0), 16);
        assert_eq!(contract.depth_for(15), 16);
        assert_eq!(contract.depth_for(4096), 272);
        contract.depth = Depth::Any;
        assert_eq!(contract.depth_for(4096), 4096);
    }

    #[test]
    fn a_contract_survives_json_bit_for_bit() {
        for merge in Merge::ALL {
            for depth in [Depth::Any, Depth::PerTile { tile: 32, extra: 24 }] {
                for p_dtype in [None, Some(Dtype::E4m3fn)] {
                    let mut contract = Contract::bf16_default(merge);
                    contract.depth = depth;
                    contract.p_dtype = p_dtype;
                    contract.lse_rel = 1.0 / 3.0 * 2f64.powi(-16);
                    let json = serde_json::to_string(&contract).unwrap();
                    assert_eq!(serde_json::from_str::<Contract>(&json).unwrap(), contract, "{json}");
                }
            }
        }
    }

    #[test]
    fn a_misspelt_or_missing_field_is_not_silently_a_default() {
        let json = serde_json::to_value(base()).unwrap();
        let mut misspelt = json.clone();
        misspelt["p_type"] = "bf16".into();
        assert!(serde_json::from_value::<Contract>(misspelt).is_err());
        for field in json.as_object().unwrap().keys().filter(|field| *field != "p_dtype") {
            let mut missing = json.clone();
            missing.as_object_mut().unwrap().remove(field);
            assert!(serde_json::from_value::<Contract>(missing).is_err(), "{field}");
        }
    }

    #[test]
    fn every_merge_reads_back_by_name() {
        for merge in Merge::ALL {
            assert_eq!(merge.to_string().parse(), Ok(merge));
            assert_eq!(serde_json::to_string(&merge).unwrap(), format!("\"{merge}\""));
        }
        assert!("ring".parse::<Merge>().unwrap_err().to_string().contains("ag_rs_bf16"));
    }
}
