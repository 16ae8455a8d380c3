//! Deliberate defects: each replaces one policy of the healthy engine.

mod acceptance;
mod attention;
mod cache;
mod causal;
mod compress;
mod context;
mod drafts;
mod exchange;
mod gates;
mod groups;
mod half;
mod heads;
mod hybrid;
mod kda;
mod kv_groups;
mod lanes;
mod layout;
mod lse;
mod mixtures;
mod moe;
mod plans;
mod positions;
mod prefill;
mod router;
mod rows;
mod scales;
mod segments;
mod selected;
mod settings;
mod shared_index;
mod shared_rows;
mod shared_selection;
mod sharing;
mod sinks;
mod small;
mod sparse;
mod stack;
mod stale;
mod steps;
mod transfer;
mod weights;

use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

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
    /// Tokens scored, selected or listed wrongly.
    TopKSelect,
    /// Experts chosen, weighed or reached wrongly.
    MoeRoute,
    /// Draft blocks.
    SpecDecode,
    /// Metadata of an earlier step, or of another KV group of the session.
    StaleMetadata,
    /// Ranks that wait for ever.
    Hang,
}

impl FaultClass {
    /// All classes, in a stable order.
    pub const ALL: [Self; 14] = [
        Self::LayoutIndex,
        Self::CausalBound,
        Self::LseMath,
        Self::EmptyShard,
        Self::DtypeScale,
        Self::HeadLayout,
        Self::CollectiveOrder,
        Self::Padding,
        Self::ConfigGate,
        Self::TopKSelect,
        Self::MoeRoute,
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
            Self::TopKSelect => "top-k-select",
            Self::MoeRoute => "moe-route",
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
#[derive(Clone, Copy)]
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

impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fault({}, {})", self.name, self.class)
    }
}

/// All faults, by the part of the engine that they replace.
pub fn faults() -> &'static [Fault] {
    static FAULTS: LazyLock<Vec<Fault>> = LazyLock::new(|| {
        [
            layout::FAULTS,
            plans::FAULTS,
            cache::FAULTS,
            causal::FAULTS,
            heads::FAULTS,
            hybrid::FAULTS,
            mixtures::FAULTS,
            shared_selection::FAULTS,
            attention::FAULTS,
            lse::FAULTS,
            exchange::FAULTS,
            context::FAULTS,
            segments::FAULTS,
            small::FAULTS,
            half::FAULTS,
            stale::FAULTS,
            steps::FAULTS,
            gates::FAULTS,
            positions::FAULTS,
            rows::FAULTS,
            groups::FAULTS,
            weights::FAULTS,
            scales::FAULTS,
            settings::FAULTS,
            transfer::FAULTS,
            kv_groups::FAULTS,
            prefill::FAULTS,
            shared_rows::FAULTS,
            shared_index::FAULTS,
            compress::FAULTS,
            router::FAULTS,
            moe::FAULTS,
            acceptance::FAULTS,
            sparse::FAULTS,
            selected::FAULTS,
            sinks::FAULTS,
            sharing::FAULTS,
            kda::FAULTS,
            stack::FAULTS,
            lanes::FAULTS,
            drafts::FAULTS,
        ]
        .concat()
    });
    &FAULTS
}

/// The fault of that name.
pub fn fault(name: &str) -> Option<&'static Fault> {
    faults().iter().find(|fault| fault.name == name)
}

#[cfg(test)]
/// What the tests of single faults share: each holds a fault to what its title says.
mod faulty {
    use shardcheck_engine::{Attention, CommBackend, Configuration, LaneOrder};
    use shardcheck_formats::Dtype;

    use crate::cache::KvFormat;
    use crate::grid::Grid;
    use crate::policies::Policies;

    /// The policies of the engine with that fault.
    pub fn with(name: &str) -> Policies {
        let mut policies = Policies::HEALTHY;
        (super::fault(name).unwrap_or_else(|| panic!("no fault {name}")).apply)(&mut policies);
        policies
    }

    /// Layouts in which no two of W, S, B are alike, and the smallest ones.
    pub fn grids() -> [Grid; 5] {
        [(1, 1, 4), (2, 1, 4), (3, 2, 4), (2, 4, 12), (4, 2, 6)].map(|(world, interleave, block)| Grid {
            world,
            interleave,
            block,
        })
    }

    /// MLA of two heads a rank on a world of two, latent width 16, rotary width 8.
    pub fn configuration() -> Configuration {
        Configuration {
            attention: Attention::Mla { kv_lora_rank: 16, qk_rope_head_dim: 8, v_head_dim: 4 },
            tp: 4,
            dcp: 2,
            heads_per_rank: 2,
            interleave: 1,
            block_size: 4,
            blocks: 8,
            dtype: Dtype::Bf16,
            kv_dtype: Dtype::Bf16,
            kv_scale: 1.0,
            softmax_scale: 0.3,
            comm_backend: CommBackend::A2a,
            lane_order: LaneOrder::HiLo,
            query_replication: true,
            project_before_merge: true,
            kernel_head_widths: vec![],
            second_group: None,
        }
    }

    /// A cache of keys of four elements, of which the last two are rotary, and values of two.
    pub fn format(dtype: Dtype, scale: f32) -> KvFormat {
        KvFormat {
            dtype,
            activations: Dtype::Bf16,
            scale,
            kv_heads: 1,
            key_dim: 4,
            value_dim: 2,
            rope_start: 2,
            shared: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn faults_have_a_unique_kebab_case_name_a_title_and_a_property_that_kills_them() {
        let mut names = BTreeSet::new();
        for fault in faults() {
            assert!(names.insert(fault.name), "{} twice", fault.name);
            assert!(fault.name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'));
            assert!(fault.title.len() > 20 && !fault.title.ends_with('.'), "{}", fault.name);
            assert!(!fault.killed_by.is_empty(), "{}", fault.name);
            assert!(fault.killed_by.iter().all(|id| id.split('.').count() == 2), "{}", fault.name);
            assert!(fault.bugs.iter().all(|bug| bug.contains('#') || bug.contains('@')), "{}", fault.name);
        }
    }

    #[test]
    fn every_class_has_a_fault_and_reads_back_by_name() {
        for class in FaultClass::ALL {
            assert!(faults().iter().any(|fault| fault.class == class), "{class}");
            assert_eq!(class.name().parse::<FaultClass>().unwrap(), class);
        }
        assert!("moe".parse::<FaultClass>().unwrap_err().contains("layout-index"));
    }
}
