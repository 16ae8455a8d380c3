//! What the embedded engine declares of itself.

use std::collections::BTreeMap;

use shardcheck_engine::{
    Conventions, EmptyPartial, LaneOrder, LseBase, OperationKind, OperationProfile, Profile, Provenance,
    RuleSetName, ScaleRounding,
};
use shardcheck_formats::{Contract, Depth, Dtype, Merge, Overflow};

use crate::kernel::TILE_TOKENS;

/// The declaration of the embedded engine.
///
/// Contracts state [`Merge::A2a`]. Under `ag_rs` the merge is [`Merge::AgRsBf16`]: take it from the `comm_backend` of
/// the effective path. Context and given states are merged in f32 and rounded once, from unrounded f32 states
/// (`partial = f32`), chunks and the new tokens being the parts of the merge; no rank exchanges an output there.
pub fn profile() -> Profile {
    let operations =
        OperationKind::ALL.into_iter().map(|kind| (kind, operation(kind))).collect::<BTreeMap<_, _>>();
    Profile {
        engine: "cpu".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        operations,
        rule_sets: RuleSetName::ALL.to_vec(),
        second_group: true,
        ..Profile::default()
    }
}

/// One 64-token tile adds in four-token groups, 16 of them in a row, two additions deep; the tiles follow one by one.
fn attention_contract() -> Contract {
    Contract {
        u_acc: 1.0 / (1u64 << 24) as f64,
        depth: Depth::PerTile { tile: TILE_TOKENS, extra: 24 },
        kexp: 2.0,
        tile_min: TILE_TOKENS,
        ..Contract::bf16_default(Merge::A2a)
    }
}

fn operation(kind: OperationKind) -> OperationProfile {
    let contract = match kind {
        OperationKind::Decode | OperationKind::Verify | OperationKind::Draft => Some(attention_contract()),
        OperationKind::Context | OperationKind::MergePartials | OperationKind::MergeStates => {
            Some(Contract { partial: Dtype::F32, ..attention_contract() })
        }
        OperationKind::MergeSegments => {
            Some(Contract { partial: Dtype::F32, output: Dtype::F32, ..attention_contract() })
        }
        // sums of the experts go element by element; parts travel in bf16 and are added in it
        OperationKind::Route | OperationKind::Moe => Some(Contract {
            u_acc: 1.0 / (1u64 << 24) as f64,
            depth: Depth::Any,
            ..Contract::bf16_default(Merge::AgRsBf16)
        }),
        OperationKind::Layout
        | OperationKind::WriteKv
        | OperationKind::ReadCache
        | OperationKind::LoadCache
        | OperationKind::ImportCache
        | OperationKind::PackLse
        | OperationKind::PcpLayout
        | OperationKind::AcceptDrafts => None,
    };
    let observables = kind
        .tensors()
        .iter()
        .filter(|tensor| tensor.provenance == Provenance::Observable)
        .map(|tensor| tensor.name.to_owned())
        .collect();
    let conventions = Conventions {
        lse_base: LseBase::E,
        empty_partial: EmptyPartial::Undefined,
        lane_orders: LaneOrder::ALL.to_vec(),
        scale_rounding: ScaleRounding::Reciprocal,
        overflow: Overflow::Saturate,
    };
    OperationProfile { contract, conventions, observables, absent: Vec::new() }
}
