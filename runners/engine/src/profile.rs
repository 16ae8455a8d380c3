//! What an engine declares of itself, operation by operation.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use shardcheck_formats::{Contract, Dtype, Overflow};

use crate::{LaneOrder, OperationKind, Provenance, RuleSetName};

/// Base of the logarithm that a partial LSE is given in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LseBase {
    /// Natural logarithm (ATOM, FlashAttention).
    #[default]
    E,
    /// Base 2 (FlashInfer): natural = value · ln 2.
    Two,
}

impl LseBase {
    /// Whether it is the natural one.
    pub fn is_e(&self) -> bool {
        *self == Self::E
    }

    /// What an LSE in this base is multiplied by to be a natural one.
    pub fn ln(self) -> f64 {
        match self {
            Self::E => 1.0,
            Self::Two => std::f64::consts::LN_2,
        }
    }
}

/// What a partial output holds for a row that sees no token: of a step of attention what it leaves there, of a merge what it
/// relies on in a state whose LSE is −∞.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EmptyPartial {
    /// Exact zeros (FlashInfer).
    Zero,
    /// Anything, NaN included; a merge ignores it (vLLM, aiter).
    Undefined,
}

/// How a value is divided by the cache scale before the cast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleRounding {
    /// f32 division, then the cast.
    Divide,
    /// Multiplication by the f32 reciprocal, then the cast: up to one unit in the last place from the quotient
    /// (aiter `concat_and_cache_mla`).
    Reciprocal,
}

/// Where a verification attends to its new tokens, which are in the cache as all others are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NewTokens {
    /// On the ranks that own them, with the history (ATOM, vLLM).
    #[default]
    OnRanks,
    /// Each rank for its own heads, as one more partial result beside those of the ranks (vLLM-Ascend since 0.30).
    Beside,
}

impl NewTokens {
    /// Whether the ranks that own them attend to them.
    pub fn are_on_ranks(&self) -> bool {
        *self == Self::OnRanks
    }
}

/// Conventions that differ between engines and are not errors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conventions {
    /// Base of partial LSEs.
    pub lse_base: LseBase,
    /// Content of an empty partial output.
    pub empty_partial: EmptyPartial,
    /// Lane orders that the packed exchange knows; empty when LSEs travel as 32-bit.
    pub lane_orders: Vec<LaneOrder>,
    /// How the cache scale is applied on write.
    pub scale_rounding: ScaleRounding,
    /// What the cast to the cache format does beyond its range.
    pub overflow: Overflow,
    /// Where a verification attends to its new tokens: how many partial results there are to be rounded.
    #[serde(default, skip_serializing_if = "NewTokens::are_on_ranks")]
    pub new_tokens: NewTokens,
}

/// What holds for one operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OperationProfile {
    /// How results are rounded. `None` for operations that move or count and never round.
    pub contract: Option<Contract>,
    /// Conventions of this operation.
    pub conventions: Conventions,
    /// Names of the optional outputs that replies carry (partials, row lengths, gathered queries): what localises a failure.
    pub observables: Vec<String>,
    /// Outputs that this engine has nothing to say about, such as the sub-page table of an engine without sub-pages.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub absent: Vec<String>,
    /// Element types of activations and of given states that the operation takes beyond bf16 (and f32 for given states), each with its
    /// contract: none for an operation that rounds nothing. A type that is not here is Unsupported.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub dtypes: BTreeMap<Dtype, Option<Contract>>,
}

impl OperationProfile {
    /// The same, taking activations of f16 as well, with the arithmetic of its contract in f16 ([`Contract::in_f16`]).
    #[must_use]
    pub fn with_f16(mut self) -> Self {
        self.dtypes.insert(Dtype::F16, self.contract.as_ref().map(Contract::in_f16));
        self
    }

    /// Whether the operation takes activations of a type.
    pub fn takes(&self, dtype: Dtype) -> bool {
        dtype == Dtype::Bf16 || self.dtypes.contains_key(&dtype)
    }

    /// The contract for activations of a type; `None` where the operation does not take it, or rounds nothing.
    pub fn contract_of(&self, dtype: Dtype) -> Option<&Contract> {
        match self.dtypes.get(&dtype) {
            Some(contract) => contract.as_ref(),
            None if dtype == Dtype::Bf16 => self.contract.as_ref(),
            None => None,
        }
    }
}

/// An engine's declaration.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Profile {
    /// Engine name, such as `cpu`.
    pub engine: String,
    /// Version of the engine.
    pub version: String,
    /// Source revision, where the engine knows it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub revision: String,
    /// SHA-256, in hexadecimal, of each file that computes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, String>,
    /// Devices that it runs on, in words.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
    /// What an adapter computes itself because the engine has no function for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub own_steps: Vec<String>,
    /// Surroundings of the engine that an adapter put something else in the place of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replaced: Vec<String>,
    /// Operations that it performs. An operation that is absent is Unsupported.
    pub operations: BTreeMap<OperationKind, OperationProfile>,
    /// Rule sets that `validate` answers for.
    pub rule_sets: Vec<RuleSetName>,
    /// Whether a session can hold a second KV group beside the first ([`crate::Configuration::second_group`]).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub second_group: bool,
    /// File with calls of the engine's own functions, for scripts of cases: a path on the machine of the adapter.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub call_file: String,
    /// Folder of the engine's own files, which those calls are given: a path on the machine of the adapter.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub release_folder: String,
}

impl Profile {
    /// Profile of one operation, if the engine performs it.
    pub fn operation(&self, kind: OperationKind) -> Option<&OperationProfile> {
        self.operations.get(&kind)
    }

    /// Refuses a profile whose contracts are so loose that anything would pass, and one that speaks of tensors that an operation does
    /// not have: what was meant would silently not be looked at.
    ///
    /// # Errors
    /// The operation, with the limit that its contract exceeds or the name that it does not know.
    pub fn check(&self) -> Result<(), String> {
        for (kind, operation) in &self.operations {
            for contract in operation.dtypes.values().chain([&operation.contract]).flatten() {
                contract.check_ceiling().map_err(|error| format!("contract of {kind}: {error}"))?;
            }
            if let Some(dtype) = operation.dtypes.keys().find(|dtype| **dtype != Dtype::F16) {
                return Err(format!(
                    "dtypes of {kind} has {dtype}, known is f16; bf16 has the contract itself"
                ));
            }
            known(*kind, "observables", &operation.observables, &[Provenance::Observable])?;
            known(*kind, "absent", &operation.absent, &[Provenance::Output, Provenance::Observable])?;
        }
        Ok(())
    }
}

/// Refuses a name that is not among an operation's tensors of these kinds.
fn known(
    kind: OperationKind,
    field: &str,
    names: &[String],
    provenances: &[Provenance],
) -> Result<(), String> {
    let all = || kind.tensors().iter().filter(|spec| provenances.contains(&spec.provenance));
    match names.iter().find(|name| !all().any(|spec| spec.name == name.as_str())) {
        None => Ok(()),
        Some(name) => {
            let all: Vec<&str> = all().map(|spec| spec.name).collect();
            Err(format!("{field} of {kind} has {name:?}, known are {}", all.join(", ")))
        }
    }
}
