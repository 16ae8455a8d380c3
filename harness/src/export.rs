//! A suite's questions as files, for whatever can't be started by this program: an emulator, a lab without a network, C++.
//!
//! `shardcheck export` writes the inputs of one plain pass of each case, something computes, and `shardcheck judge` decides on the outputs that
//! lie beside them. docs/files.md has the formats.

mod decide;
mod filed;
mod plan;
mod write;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shardcheck_engine::{
    Configuration, Conventions, EffectivePath, EmptyPartial, LaneOrder, LseBase, NewTokens, Operation,
    OperationKind, OperationProfile, Profile, ScaleRounding,
};
use shardcheck_formats::{Contract, Depth, Dtype, Merge, Overflow};

pub(crate) use plan::{Pass, pass_of};

pub use decide::{Decided, decide, read_manifest};
pub use write::export;

/// Version of export.json and request.json. A reader refuses a version that it does not know.
pub const EXPORT_SCHEMA_VERSION: u32 = 1;
/// Name of the manifest, by which an export is known.
pub const MANIFEST_FILE: &str = "export.json";
const REQUEST_FILE: &str = "request.json";
const INPUTS_FILE: &str = "inputs.safetensors";
const OUTPUTS_FILE: &str = "outputs.safetensors";
const REPLY_FILE: &str = "reply.json";

/// What an export holds, and what its answers are judged by.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`EXPORT_SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Version of the program that wrote it.
    pub tool_version: String,
    /// Suite name, or `cases` for given case files.
    pub suite: String,
    /// Seed of the suite.
    pub seed: u64,
    /// Contract and conventions of whatever computes.
    pub profile: Profile,
    /// Exported cases.
    pub cases: Vec<ManifestEntry>,
    /// Selected cases that files can't ask, and why.
    pub left_out: Vec<LeftOut>,
}

/// An exported case.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestEntry {
    /// Case id.
    pub id: String,
    /// Folder beside the manifest.
    pub folder: String,
}

/// A case that is not exported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeftOut {
    /// Case id.
    pub id: String,
    /// Why.
    pub reason: String,
}

/// request.json: the steps of one session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// [`EXPORT_SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Case id.
    pub id: String,
    /// What the session is opened with.
    pub configuration: Configuration,
    /// Steps in order; caches and metadata live from one to the next.
    pub steps: Vec<StepRequest>,
}

/// One step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepRequest {
    /// Folder of the step, in that of the case.
    pub folder: String,
    /// What is asked.
    pub operation: Operation,
    /// Its name in a profile.
    pub kind: OperationKind,
    /// Whether the case can't be judged without the outputs of this step.
    pub needed: bool,
    /// Conventions that outputs are read by.
    pub conventions: Conventions,
    /// Tensors of `inputs.safetensors`.
    pub inputs: Vec<TensorShape>,
    /// Tensors of `outputs.safetensors`.
    pub outputs: Vec<OutputShape>,
}

/// Element type and shape of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorShape {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Extent of each axis.
    pub shape: Vec<usize>,
}

/// A tensor that is to be computed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutputShape {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Extent of each axis.
    pub shape: Vec<usize>,
    /// Whether it must be there; the others localise a failure.
    pub required: bool,
}

/// reply.json: what an answer says beside its outputs. Everything is optional.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileReply {
    /// What really ran.
    #[serde(default)]
    pub effective: EffectivePath,
    /// Collectives that each rank entered in this step.
    #[serde(default)]
    pub collectives: Vec<u64>,
    /// Why this step is not done, in place of outputs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unsupported: Option<String>,
}

/// Why an export can't be written or read.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The file system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The folder holds something.
    #[error("{} is not empty: give a new folder, so that no answer is taken for one to other questions", path.display())]
    NotEmpty {
        /// The folder.
        path: PathBuf,
    },
    /// Something that this program wrote is not what it wrote.
    #[error("{} was altered: {reason}; export again", path.display())]
    Altered {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The case can't be asked at all.
    #[error("{id} can't be exported: {reason}")]
    Case {
        /// Case id.
        id: String,
        /// Why.
        reason: String,
    },
}

impl ExportError {
    fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }
}

/// The profile that answers are judged by when none is given: attention with probabilities and partials in bf16, f32 accumulation, everything rounded
/// to nearest ([`Contract::bf16_default`]); given states are merged in f32. A better engine passes it too; one with other conventions gives its own.
pub fn default_profile() -> Profile {
    let operations = OperationKind::ALL.into_iter().map(|kind| (kind, default_operation(kind))).collect();
    Profile { engine: "files".to_owned(), version: "1".to_owned(), operations, ..Profile::default() }
}

fn default_operation(kind: OperationKind) -> OperationProfile {
    let attention = Contract::bf16_default(Merge::A2a);
    let contract = match kind {
        OperationKind::Decode
        | OperationKind::Verify
        | OperationKind::Draft
        | OperationKind::Context
        | OperationKind::AttendSelected
        | OperationKind::AttendSinks => Some(attention),
        OperationKind::AttendPcp | OperationKind::MergePartials | OperationKind::MergeStates => {
            Some(Contract { partial: Dtype::F32, ..attention })
        }
        OperationKind::MergeSegments => {
            Some(Contract { partial: Dtype::F32, output: Dtype::F32, ..attention })
        }
        OperationKind::Route | OperationKind::Moe | OperationKind::Forward => {
            Some(Contract::bf16_default(Merge::AgRsBf16))
        }
        // scores and states are sums of 32 bits in any order
        OperationKind::SelectSparse | OperationKind::SelectPcp | OperationKind::CompressPcp => {
            Some(Contract { depth: Depth::Any, partial: Dtype::F32, output: Dtype::F32, ..attention })
        }
        OperationKind::Kda => Some(Contract { depth: Depth::Any, partial: Dtype::F32, ..attention }),
        OperationKind::Layout
        | OperationKind::WriteKv
        | OperationKind::ReadCache
        | OperationKind::LoadCache
        | OperationKind::ImportCache
        | OperationKind::PackLse
        | OperationKind::PcpLayout
        | OperationKind::AcceptDrafts
        | OperationKind::IndexLayers => None,
    };
    let conventions = Conventions {
        lse_base: LseBase::E,
        empty_partial: EmptyPartial::Undefined,
        lane_orders: LaneOrder::ALL.to_vec(),
        scale_rounding: ScaleRounding::Divide,
        overflow: Overflow::Saturate,
        new_tokens: NewTokens::OnRanks,
    };
    let absent = match kind {
        OperationKind::Layout => vec!["sub_page_table".to_owned()],
        _ => Vec::new(),
    };
    let (observables, dtypes) = (Vec::new(), BTreeMap::new());
    let profile = OperationProfile { contract, conventions, observables, absent, dtypes };
    if kind.has_activations() { profile.with_f16() } else { profile }
}

#[cfg(test)]
mod tests;
