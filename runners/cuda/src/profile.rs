//! What the engine declares of itself.

use std::collections::BTreeMap;
use std::sync::Arc;

use shardcheck_engine::{
    Conventions, EmptyPartial, LaneOrder, LseBase, NewTokens, OperationKind, OperationProfile, Profile,
    Provenance, ScaleRounding,
};
use shardcheck_formats::{Contract, Depth, Dtype, Merge, Overflow};

use crate::device::{Device, Properties};
use crate::engine::Graphs;
use crate::fabric::Fabric;

/// Tokens of Σ p·v for which one addition of unit roundoff 2^-23 is declared. One matrix instruction adds 16 products to an accumulator; it
/// aligns all 17 to the largest and cuts each at 2^-25 of it, then the sum at 2^-23: at most (1 + 17/4)·2^-23 of the largest, which
/// is less than 16/3 units.
const TOKENS_A_UNIT: usize = 3;

/// The declaration for the devices.
pub fn profile(devices: &[Arc<Device>], fabric: Option<&Fabric>, graphs: Graphs) -> Profile {
    let ranks = match fabric {
        None => "one device plays all ranks".to_owned(),
        Some(fabric) => {
            let (count, version) = (devices.len(), fabric.version());
            format!("rank r on device r mod {count}, NCCL {version} between devices")
        }
    };
    let properties = devices.iter().map(|device| &device.properties);
    let devices = properties.map(|properties| format!("{}; {ranks}", text_of(properties))).collect();
    declaration(devices, graphs, fabric.is_some())
}

fn text_of(properties: &Properties) -> String {
    let (major, minor) = properties.capability;
    format!(
        "{}, compute capability {major}.{minor}, {} multiprocessors, {:.1} GiB, driver interface {}, kernels for {}",
        properties.name,
        properties.multiprocessors,
        properties.memory_bytes as f64 / (1u64 << 30) as f64,
        properties.driver_version,
        properties.target,
    )
}

fn declaration(devices: Vec<String>, graphs: Graphs, joined: bool) -> Profile {
    Profile {
        engine: match graphs {
            Graphs::Off => "cuda".to_owned(),
            Graphs::On => "cuda:graphs".to_owned(),
        },
        version: env!("CARGO_PKG_VERSION").to_owned(),
        devices,
        operations: OperationKind::ALL
            .into_iter()
            .filter(|kind| !(WITHOUT_KERNELS.contains(kind) || joined && WITHOUT_COLLECTIVES.contains(kind)))
            .map(|kind| (kind, operation(kind)))
            .collect::<BTreeMap<_, _>>(),
        second_group: true,
        ..Profile::default()
    }
}

/// Operations that no kernel does.
const WITHOUT_KERNELS: &[OperationKind] = &[
    OperationKind::AttendPcp,
    OperationKind::AttendSinks,
    OperationKind::SelectPcp,
    OperationKind::CompressPcp,
    OperationKind::AcceptDrafts,
    OperationKind::IndexLayers,
    OperationKind::SelectSparse,
    OperationKind::Kda,
    OperationKind::Forward,
];

/// Operations that joined devices do not do: their ranks are played by one device.
const WITHOUT_COLLECTIVES: &[OperationKind] = &[OperationKind::Moe];

/// Sums of the matrix unit, over segments that are then added; the plain kernel, whose sums are shorter and round to nearest, keeps
/// it as well.
pub fn attention_contract() -> Contract {
    Contract {
        u_acc: 1.0 / (1u64 << 23) as f64,
        depth: Depth::PerTile { tile: TOKENS_A_UNIT, extra: 24 },
        kexp: 2.0,
        tile_min: shardcheck_kernels::TILE_TOKENS,
        ..Contract::bf16_default(Merge::A2a)
    }
}

/// A tile of 64 tokens adds in four runs of 16, two additions deep; the tiles follow one by one; all in f32 to nearest.
fn plain_contract() -> Contract {
    Contract {
        u_acc: 1.0 / (1u64 << 24) as f64,
        depth: Depth::PerTile { tile: shardcheck_kernels::TILE_TOKENS, extra: 24 },
        partial: Dtype::F32,
        ..attention_contract()
    }
}

/// Every product of a row adds its elements one by one in f32 to nearest; activations and parts are bf16, and so are the sums of parts.
fn experts_contract() -> Contract {
    Contract {
        u_acc: 1.0 / (1u64 << 24) as f64,
        depth: Depth::Any,
        kexp: 2.0,
        ..Contract::bf16_default(Merge::AgRsBf16)
    }
}

fn operation(kind: OperationKind) -> OperationProfile {
    let contract = match kind {
        OperationKind::Decode
        | OperationKind::Verify
        | OperationKind::Draft
        | OperationKind::AttendSelected => Some(attention_contract()),
        OperationKind::Context | OperationKind::MergePartials | OperationKind::MergeStates => {
            Some(plain_contract())
        }
        OperationKind::MergeSegments => Some(Contract { output: Dtype::F32, ..plain_contract() }),
        OperationKind::Route | OperationKind::Moe => Some(experts_contract()),
        OperationKind::Layout
        | OperationKind::WriteKv
        | OperationKind::ReadCache
        | OperationKind::LoadCache
        | OperationKind::ImportCache
        | OperationKind::PcpLayout
        | OperationKind::AttendSinks
        | OperationKind::AcceptDrafts
        | OperationKind::SelectSparse
        | OperationKind::IndexLayers
        | OperationKind::Kda
        | OperationKind::Forward
        | OperationKind::AttendPcp
        | OperationKind::SelectPcp
        | OperationKind::CompressPcp
        | OperationKind::PackLse => None,
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
    // kernels of attention hold their queries and keys in bf16
    match kind {
        OperationKind::MergePartials | OperationKind::MergeStates | OperationKind::PackLse => {
            profile.with_f16()
        }
        _ => profile,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_declaration_is_tight_enough_to_be_taken() {
        let properties = Properties {
            name: "a card".to_owned(),
            capability: (9, 0),
            multiprocessors: 1,
            shared_bytes: 0,
            memory_bytes: 1 << 30,
            driver_version: 13000,
            target: "sm_90a".to_owned(),
        };
        let profile = declaration(vec![text_of(&properties)], Graphs::Off, false);
        profile.check().unwrap();
        let missing = |profile: &Profile| -> BTreeSet<OperationKind> {
            OperationKind::ALL.into_iter().filter(|kind| profile.operation(*kind).is_none()).collect()
        };
        let set = |kinds: &[&[OperationKind]]| kinds.concat().into_iter().collect::<BTreeSet<_>>();
        assert_eq!(missing(&profile), set(&[WITHOUT_KERNELS]));
        let joined = declaration(vec![text_of(&properties)], Graphs::Off, true);
        joined.check().unwrap();
        assert_eq!(missing(&joined), set(&[WITHOUT_COLLECTIVES, WITHOUT_KERNELS]));
        assert!(profile.devices[0].starts_with("a card, compute capability 9.0"), "{:?}", profile.devices);
        assert_eq!(properties.target, "sm_90a");
    }
}
