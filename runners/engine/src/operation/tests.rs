//! Operations read back as they were written, and their tensors are named once.

use super::*;
use crate::{Activation, KdaGate, StackPcp, StreamLayout};

#[test]
fn every_operation_names_its_tensors_once() {
    for kind in OperationKind::ALL {
        let mut names: Vec<_> = kind
            .tensors()
            .iter()
            .map(|t| (t.name, matches!(t.provenance, Provenance::Output | Provenance::Observable)))
            .collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count, "{kind} names a tensor twice");
    }
}

#[test]
fn several_rows_of_a_request_make_a_causal_step_a_verification() {
    let operation = Operation::Attend { mask: Mask::Causal };
    let step =
        |starts: &[i32]| Tensors::new().with("query_start_loc", Tensor::from_i32(&[starts.len()], starts));
    assert_eq!(operation.kind(&step(&[0, 1, 1, 2])), OperationKind::Decode);
    assert_eq!(operation.kind(&step(&[0, 1, 3])), OperationKind::Verify);
    let draft = Operation::Attend { mask: Mask::Bidirectional };
    assert_eq!(draft.kind(&step(&[0, 1])), OperationKind::Draft);
}

#[test]
fn operation_names_parse_back() {
    for kind in OperationKind::ALL {
        assert_eq!(kind.name().parse::<OperationKind>().unwrap(), kind);
    }
}

#[test]
fn an_operation_survives_a_json_round_trip() {
    for operation in [
        Operation::Layout,
        Operation::Attend { mask: Mask::Bidirectional },
        Operation::AttendContext { chunk_budget_tokens: 64 },
        Operation::ImportCache { source: CacheLayout { dcp: 3, interleave: 2, block_size: 4 } },
        Operation::MergeSegments { tile_tokens: 64 },
        Operation::Attend { mask: Mask::Causal }.in_group(1),
        Operation::PcpLayout {
            world: 4,
            strategy: PcpStrategy::HeadTail,
            decodes: PcpDecodes::Owned,
            padded_rows: 7,
            overlap: true,
        },
        Operation::AcceptDrafts { method: AcceptanceMethod::Block, ranks: 4 },
        Operation::SelectSparse {
            selector: Selector {
                top_k: 2048,
                mode: crate::SelectionMode::Union,
                list: crate::SlotList::PackedDummy,
            },
        },
        Operation::AttendSelected { list: crate::SlotList::Packed, shared: true },
        Operation::AttendSinks,
        Operation::SelectPcp {
            plan: IndexPlan {
                world: 3,
                strategy: PcpStrategy::Zigzag,
                decodes: PcpDecodes::Replicated,
                padded_rows: 0,
                top_k: 8,
            },
        },
        Operation::CompressPcp {
            plan: CompressPlan {
                world: 2,
                strategy: PcpStrategy::RoundRobin,
                decodes: PcpDecodes::Split,
                padded_rows: 9,
                ratio: 4,
                overlap: true,
            },
        },
        Operation::IndexLayers {
            sharing: crate::IndexSharing {
                rule: crate::SharingRule::Atom,
                layers: 4,
                draft_layers: 1,
                index_cache: true,
                frequency: 2,
                offset: Some(3),
                pattern: None,
                types: Some(vec![crate::IndexerType::Full, crate::IndexerType::Shared]),
            },
        },
        Operation::Kda { plan: KdaPlan { gate: KdaGate::Softplus, slots: 4, drafts: 3, chunk: 8 } },
        Operation::Forward {
            plan: StackPlan {
                layers: 3,
                stream: StreamLayout::Sharded,
                experts: None,
                pattern: None,
                recurrent: None,
                activation: Activation::SituGated,
                output_gate: true,
                list: None,
                drafts: 2,
                pcp: Some(StackPcp {
                    world: 2,
                    strategy: PcpStrategy::Zigzag,
                    decodes: PcpDecodes::Replicated,
                    merged: true,
                }),
            },
        },
    ] {
        let text = serde_json::to_string(&operation).unwrap();
        assert_eq!(serde_json::from_str::<Operation>(&text).unwrap(), operation);
    }
}
