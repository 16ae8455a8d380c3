//! What the embedded engine declares of itself.

use std::collections::BTreeMap;

use shardcheck_engine::{
    Conventions, EmptyPartial, LaneOrder, LseBase, NewTokens, OperationKind, OperationProfile, Profile,
    Provenance, RuleSetName, ScaleRounding,
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
        OperationKind::Decode
        | OperationKind::Verify
        | OperationKind::Draft
        | OperationKind::AttendSelected
        | OperationKind::AttendSinks => Some(attention_contract()),
        OperationKind::Context
        | OperationKind::AttendPcp
        | OperationKind::MergePartials
        | OperationKind::MergeStates => Some(Contract { partial: Dtype::F32, ..attention_contract() }),
        OperationKind::MergeSegments => {
            Some(Contract { partial: Dtype::F32, output: Dtype::F32, ..attention_contract() })
        }
        // sums of the experts go element by element; parts travel in bf16 and are added in it
        OperationKind::Route | OperationKind::Moe | OperationKind::Forward => Some(Contract {
            u_acc: 1.0 / (1u64 << 24) as f64,
            depth: Depth::Any,
            ..Contract::bf16_default(Merge::AgRsBf16)
        }),
        // scores are sums of 32 bits in any order, and stay in them
        OperationKind::SelectSparse | OperationKind::SelectPcp | OperationKind::CompressPcp => {
            Some(Contract {
                u_acc: 1.0 / (1u64 << 24) as f64,
                depth: Depth::Any,
                output: Dtype::F32,
                ..Contract::bf16_default(Merge::A2a)
            })
        }
        // sums go element by element; nothing is stored in less than 32 bits but the output
        OperationKind::Kda => Some(Contract {
            u_acc: 1.0 / (1u64 << 24) as f64,
            depth: Depth::Any,
            partial: Dtype::F32,
            ..Contract::bf16_default(Merge::A2a)
        }),
        OperationKind::Layout
        | OperationKind::WriteKv
        | OperationKind::ReadCache
        | OperationKind::LoadCache
        | OperationKind::ImportCache
        | OperationKind::PackLse
        | OperationKind::PcpLayout
        | OperationKind::IndexLayers
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
        new_tokens: NewTokens::OnRanks,
    };
    let profile =
        OperationProfile { contract, conventions, observables, absent: Vec::new(), dtypes: BTreeMap::new() };
    if kind.has_activations() { profile.with_f16() } else { profile }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_names_itself_and_declares_every_operation_and_every_rule_set() {
        let profile = profile();
        assert_eq!((profile.engine.as_str(), profile.version.as_str()), ("cpu", env!("CARGO_PKG_VERSION")));
        assert!(OperationKind::ALL.iter().all(|kind| profile.operation(*kind).is_some()));
        assert_eq!(profile.rule_sets, RuleSetName::ALL);
        assert!(profile.second_group);
    }

    #[test]
    fn contracts_are_those_of_the_kernel_and_its_wires() {
        let contract = |kind| profile().operation(kind).unwrap().contract.clone();
        let attention = contract(OperationKind::Decode).unwrap();
        // f32 sums: half the distance from 1 to the next number
        assert_eq!(attention.u_acc, f64::from(f32::EPSILON) / 2.0);
        // sixteen groups in a row, each two additions deep, and what joins the tile to the sum
        assert_eq!(attention.depth, Depth::PerTile { tile: TILE_TOKENS, extra: 24 });
        assert_eq!((attention.kexp, attention.tile_min), (2.0, TILE_TOKENS));
        assert_eq!((attention.partial, attention.output), (Dtype::Bf16, Dtype::Bf16));
        for kind in [
            OperationKind::Verify,
            OperationKind::Draft,
            OperationKind::AttendSelected,
            OperationKind::AttendSinks,
        ] {
            assert_eq!(contract(kind).as_ref(), Some(&attention), "{kind}");
        }
        let unrounded = Contract { partial: Dtype::F32, ..attention };
        for kind in [
            OperationKind::Context,
            OperationKind::AttendPcp,
            OperationKind::MergePartials,
            OperationKind::MergeStates,
        ] {
            assert_eq!(contract(kind).as_ref(), Some(&unrounded), "{kind}");
        }
        let segments = Contract { output: Dtype::F32, ..unrounded };
        assert_eq!(contract(OperationKind::MergeSegments), Some(segments));
        for kind in [OperationKind::Layout, OperationKind::WriteKv, OperationKind::PackLse] {
            assert_eq!(contract(kind), None, "{kind} rounds nothing");
        }
    }

    #[test]
    fn every_observable_of_an_operation_is_declared_and_no_output_is_absent() {
        for kind in OperationKind::ALL {
            let profile = operation(kind);
            let observable =
                kind.tensors().iter().filter(|tensor| tensor.provenance == Provenance::Observable);
            assert!(observable.map(|tensor| tensor.name).eq(profile.observables.iter().map(String::as_str)));
            assert!(profile.absent.is_empty(), "{kind}");
            assert_eq!(profile.conventions.lse_base, LseBase::E);
            assert_eq!(profile.conventions.empty_partial, EmptyPartial::Undefined);
            assert_eq!(profile.conventions.lane_orders, LaneOrder::ALL);
            assert_eq!(profile.conventions.scale_rounding, ScaleRounding::Reciprocal);
            assert_eq!(profile.conventions.overflow, Overflow::Saturate);
        }
        assert!(operation(OperationKind::Decode).observables.contains(&"partial_lse".to_owned()));
    }
}
