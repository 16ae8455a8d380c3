//! Deliberate defects: each replaces one policy of the healthy engine.

use std::fmt;
use std::str::FromStr;

use crate::grid::{LayoutPolicies, Sight};
use crate::policies::Policies;

/// What kind of mistake a fault is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FaultClass {
    /// A position, slot, block or unit computed wrongly.
    LayoutIndex,
    /// A row sees too much or too little.
    CausalBound,
    /// A wrong LSE or weight.
    LseMath,
    /// A rank without tokens takes part in the result.
    EmptyShard,
    /// A wrong cast or scale.
    DtypeScale,
    /// Heads in the wrong place.
    HeadLayout,
    /// An exchange that brings the wrong data.
    CollectiveOrder,
    /// Padding that takes part in the result.
    Padding,
    /// A configuration that is taken, refused or switched off wrongly.
    ConfigGate,
    /// Draft blocks.
    SpecDecode,
    /// Metadata of an earlier step.
    StaleMetadata,
    /// Ranks that wait for ever.
    Hang,
}

impl FaultClass {
    /// All classes, in a stable order.
    pub const ALL: [Self; 12] = [
        Self::LayoutIndex,
        Self::CausalBound,
        Self::LseMath,
        Self::EmptyShard,
        Self::DtypeScale,
        Self::HeadLayout,
        Self::CollectiveOrder,
        Self::Padding,
        Self::ConfigGate,
        Self::SpecDecode,
        Self::StaleMetadata,
        Self::Hang,
    ];

    /// Name as it stands in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::LayoutIndex => "layout-index",
            Self::CausalBound => "causal-bound",
            Self::LseMath => "lse-math",
            Self::EmptyShard => "empty-shard",
            Self::DtypeScale => "dtype-scale",
            Self::HeadLayout => "head-layout",
            Self::CollectiveOrder => "collective-order",
            Self::Padding => "padding",
            Self::ConfigGate => "config-gate",
            Self::SpecDecode => "spec-decode",
            Self::StaleMetadata => "stale-metadata",
            Self::Hang => "hang",
        }
    }
}

impl fmt::Display for FaultClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for FaultClass {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|class| class.name() == text).ok_or_else(|| {
            format!("unknown fault class {text:?}; known are {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

/// A deliberate defect.
pub struct Fault {
    /// Name, unique among all faults.
    pub name: &'static str,
    /// What is wrong, in one line.
    pub title: &'static str,
    /// Kind of mistake.
    pub class: FaultClass,
    /// Public bugs of this kind.
    pub bugs: &'static [&'static str],
    /// Properties that must notice it.
    pub killed_by: &'static [&'static str],
    /// Replaces the policy.
    pub apply: fn(&mut Policies),
}

/// All faults.
pub fn faults() -> &'static [Fault] {
    FAULTS
}

/// The fault of that name.
pub fn fault(name: &str) -> Option<&'static Fault> {
    FAULTS.iter().find(|fault| fault.name == name)
}

static FAULTS: &[Fault] = &[
    Fault {
        name: "committed-prefix-rows",
        title: "every row of a verify step sees only what was committed before it",
        class: FaultClass::CausalBound,
        bugs: &["vllm#51705"],
        killed_by: &[
            "verify.output",
            "verify.lse",
            "verify.row-lengths",
            "layout.row-lengths",
            "decode.output",
        ],
        apply: |p| p.layout.row_len = committed_prefix,
    },
    Fault {
        name: "length-of-full-round",
        title: "a rank counts one token too many where the length is a multiple of W",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm#27518"],
        killed_by: &["layout.local-lengths", "layout.row-sum", "decode.row-lengths", "decode.output"],
        apply: |p| {
            p.layout.local_len = |len, member, grid| {
                let rest = len.checked_sub(1).map_or(0, |last| usize::from(member <= last % grid.world));
                len / grid.world + rest
            }
        },
    },
];

fn committed_prefix(layout: &LayoutPolicies, sight: &Sight) -> usize {
    let committed = sight.seq_len.saturating_sub(sight.query_len);
    (layout.local_len)(committed, sight.member, &sight.grid)
}
