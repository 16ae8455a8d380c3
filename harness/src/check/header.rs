//! The header of an image: what is checked, and what the tensors do not say of themselves. Described in docs/check.md.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use shardcheck_engine::{LseBase, Mask};
use shardcheck_formats::{Contract, Depth, Dtype, Merge};

use super::CheckError;

/// Version of the header that this program reads and writes.
pub const SCHEMA_VERSION: u32 = 1;

/// Most ranks.
const MOST_RANKS: usize = 4096;

/// What is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// Attention of one new token a request, or several of them, to everything before and themselves.
    Decode,
    /// Attention of several rows a request, with the rows' own bounds.
    Verify,
    /// Partial outputs and LSEs, joined.
    Merge,
    /// Integers: local lengths, slots, row lengths.
    Layout,
}

impl Subject {
    /// Every subject.
    pub const ALL: [Self; 4] = [Self::Decode, Self::Verify, Self::Merge, Self::Layout];

    /// Its name in a header.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Verify => "verify",
            Self::Merge => "merge",
            Self::Layout => "layout",
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Order of the axes within a page of keys or values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PageLayout {
    /// `[block_size, kv_heads, dim]`.
    #[default]
    #[serde(rename = "NHD")]
    Nhd,
    /// `[kv_heads, block_size, dim]`.
    #[serde(rename = "HND")]
    Hnd,
}

/// Order of the axes of an LSE.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LseLayout {
    /// `[tokens, heads]`.
    #[serde(rename = "TH")]
    TokensHeads,
    /// `[heads, tokens]`.
    #[serde(rename = "HT")]
    HeadsTokens,
}

/// What a row without tokens must give.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EmptyRows {
    /// Zeros, with an LSE of −inf.
    #[default]
    Zeros,
    /// Anything: such rows are not judged.
    Undefined,
}

/// A named rounding contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Preset {
    /// [`Contract::bf16_default`]: products and sums in f32, probabilities and partials in bf16.
    Bf16,
    /// The same with probabilities and partials in f16.
    F16,
    /// Everything in f32, in any order of summation.
    F32,
    /// As `bf16` with probabilities in e4m3, not scaled before the cast.
    Fp8,
}

/// A name that is no preset.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown contract {found:?}: use one of bf16, f16, f32, fp8, or an object with all fields of a contract"
)]
pub struct UnknownPreset {
    /// The text that was given.
    pub found: String,
}

impl Preset {
    /// Every preset.
    pub const ALL: [Self; 4] = [Self::Bf16, Self::F16, Self::F32, Self::Fp8];

    /// Its name in a header.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::Fp8 => "fp8",
        }
    }

    /// The contract, for outputs of `output`.
    pub fn contract(self, output: Dtype) -> Contract {
        let base = Contract { output, ..Contract::bf16_default(Merge::A2a) };
        match self {
            Self::Bf16 => base,
            Self::F16 => Contract { output, ..base.in_f16() },
            Self::F32 => Contract {
                u_acc: 1.0 / (1u64 << 24) as f64,
                depth: Depth::Any,
                tile_min: 1,
                p_dtype: None,
                partial: Dtype::F32,
                ..base
            },
            Self::Fp8 => Contract { p_dtype: Some(Dtype::E4m3fn), p_floor: Contract::MAX_P_FLOOR, ..base },
        }
    }
}

impl FromStr for Preset {
    type Err = UnknownPreset;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|preset| preset.name() == text)
            .ok_or_else(|| UnknownPreset { found: text.to_owned() })
    }
}

/// A contract by name, or in full.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ContractChoice {
    /// One of [`Preset::ALL`].
    Named(String),
    /// All fields.
    Full(Box<Contract>),
}

impl Default for ContractChoice {
    fn default() -> Self {
        Self::Named(Preset::Bf16.name().to_owned())
    }
}

/// What an image says of its tensors. Fields that a check has no use for are ignored by it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// What is checked.
    pub check: Subject,
    /// How the call rounds.
    #[serde(default)]
    pub contract: ContractChoice,
    /// Arithmetic of the merge over ranks, in the place of the contract's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<Merge>,
    /// Factor on the product of query and key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub softmax_scale: Option<f64>,
    /// Width of the latent that is key and value at once (MLA); without it keys and values are two caches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_lora_rank: Option<usize>,
    /// Order of the axes within a page.
    #[serde(default)]
    pub kv_layout: PageLayout,
    /// Factor by which a stored key is multiplied.
    #[serde(default = "one")]
    pub k_scale: f64,
    /// Factor by which a stored value is multiplied.
    #[serde(default = "one")]
    pub v_scale: f64,
    /// Ranks that the context is dealt to.
    #[serde(default = "single")]
    pub world: usize,
    /// Tokens that are dealt to a rank at a time.
    #[serde(default = "single")]
    pub interleave: usize,
    /// Tokens of a block; only for `layout`, elsewhere the caches say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_size: Option<usize>,
    /// Whether the caches have a leading axis of ranks; by default the number of their axes decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_rank: Option<bool>,
    /// Blocks of the whole cache, where only some of them were sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_blocks: Option<usize>,
    /// What a row sees of its own request.
    #[serde(default = "causal")]
    pub mask: Mask,
    /// Base of every LSE of the image.
    #[serde(default = "natural")]
    pub lse_base: LseBase,
    /// Axes of every LSE; by default what fits, `[tokens, heads]` where both do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lse_layout: Option<LseLayout>,
    /// What rows without tokens must give.
    #[serde(default)]
    pub empty_rows: EmptyRows,
    /// Whether the errors of a whole output are examined, where every element is within its bound.
    #[serde(default = "yes")]
    pub statistics: bool,
    /// The rank whose integers these are, where a layout check has those of one rank only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
}

fn one() -> f64 {
    1.0
}

fn yes() -> bool {
    true
}

fn single() -> usize {
    1
}

fn causal() -> Mask {
    Mask::Causal
}

fn natural() -> LseBase {
    LseBase::E
}

impl Header {
    /// A header in which everything but the subject has its default.
    pub fn new(check: Subject) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            check,
            contract: ContractChoice::default(),
            merge: None,
            softmax_scale: None,
            kv_lora_rank: None,
            kv_layout: PageLayout::default(),
            k_scale: 1.0,
            v_scale: 1.0,
            world: 1,
            interleave: 1,
            block_size: None,
            per_rank: None,
            cache_blocks: None,
            mask: Mask::Causal,
            lse_base: LseBase::E,
            lse_layout: None,
            empty_rows: EmptyRows::default(),
            statistics: true,
            rank: None,
        }
    }

    /// The contract of the call, for an output of `output`.
    ///
    /// # Errors
    /// A name that is no preset, a contract beyond its ceiling, or one that states another output format.
    pub fn contract_for(&self, output: Dtype) -> Result<Contract, CheckError> {
        let mut contract = match &self.contract {
            ContractChoice::Named(name) => {
                let preset: Preset =
                    name.parse().map_err(|error: UnknownPreset| CheckError::Header(error.to_string()))?;
                preset.contract(output)
            }
            ContractChoice::Full(contract) => *contract.clone(),
        };
        if contract.output != output {
            return Err(CheckError::Value(format!(
                "the contract says that outputs are {}, but out is {output}",
                contract.output
            )));
        }
        if let Some(merge) = self.merge {
            contract.merge = merge;
        }
        contract.check_ceiling()?;
        Ok(contract)
    }

    /// The scales of keys and values.
    ///
    /// # Errors
    /// One is not positive and finite.
    pub fn scales(&self) -> Result<(f64, f64), CheckError> {
        for (field, value) in [("k_scale", self.k_scale), ("v_scale", self.v_scale)] {
            positive(field, value)?;
        }
        Ok((self.k_scale, self.v_scale))
    }

    /// # Errors
    /// There are more ranks than any machine has: each is counted through one by one.
    pub fn check_world(&self) -> Result<(), CheckError> {
        if self.world <= MOST_RANKS {
            return Ok(());
        }
        Err(CheckError::Number {
            field: "world",
            value: self.world as f64,
            wanted: "a count of ranks, up to 4096",
        })
    }

    /// The factor on scores.
    ///
    /// # Errors
    /// It is missing, or not positive and finite.
    pub fn scale(&self) -> Result<f64, CheckError> {
        let why = "the factor on the product of query and key, such as 1/sqrt(head size)";
        let scale = self.softmax_scale.ok_or(CheckError::Field { field: "softmax_scale", why })?;
        positive("softmax_scale", scale)?;
        Ok(scale)
    }
}

fn positive(field: &'static str, value: f64) -> Result<(), CheckError> {
    if value.is_finite() && value > 0.0 {
        Ok(())
    } else {
        Err(CheckError::Number { field, value, wanted: "a positive, finite number" })
    }
}
