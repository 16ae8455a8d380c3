//! Merge of a split kernel's segments, and packing of the LSE.

use shardcheck_cases::{Family, MergeCase};
use shardcheck_engine::LaneOrder;
use shardcheck_formats::Dtype;

use super::{Property, always};
use crate::finding::{Finding, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory};

pub(super) const PROPERTIES: &[Property] = &[
    Property {
        id: "segments.output",
        statement: "active segments with base-2 statistics merge to Σ acc·2^(m−M) / Σ e·2^(m−M), inactive ones are not read",
        source: "vLLM `_merge_mla_segments_kernel`",
        bugs: &["flashinfer#58", "flashinfer@6cbaf6e", "vllm#51705"],
        tolerance: "f32 rounding of a sum of the active segments",
        families: &[Family::MergeSegments],
        applies: always,
        check: output,
    },
    Property {
        id: "segments.lse",
        statement: "the merged LSE of base-2 segments is natural: (M + log2 E)·ln 2, and −inf for a row without tokens",
        source: "vLLM `_merge_mla_segments_kernel`",
        bugs: &["flashinfer#58", "flashinfer#4485"],
        tolerance: "f32 rounding of a logarithm",
        families: &[Family::MergeSegments],
        applies: always,
        check: lse,
    },
    Property {
        id: "pack.round-trip",
        statement: "an LSE split into two 16-bit lanes and joined again has the same 32 bits, halves that are bf16 NaNs included",
        source: "ATOM `cp_lse_a2a`; vLLM `dcp_a2a_lse_reduce`",
        bugs: &["TransformerEngine#1624"],
        tolerance: "exact: bits",
        families: &[Family::PackLse],
        applies: always,
        check: round_trip,
    },
    Property {
        id: "pack.lanes",
        statement: "the two lanes hold the halves in the declared order",
        source: "ATOM: high half first; vLLM: low half first",
        bugs: &["vllm#26509"],
        tolerance: "exact: bits",
        families: &[Family::PackLse],
        applies: always,
        check: lanes,
    },
];

fn output(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.merging();
    let seen = laboratory.observed()?.output("out", Dtype::F32, &material.output_shape())?.to_f64();
    let headline = "merged segments are not the attention of their row";
    Ok(Comparison::all("out", &seen, &material.expected()?.out)
        .finding(headline, Stage::Merge, |flat| material.place(flat)))
}

fn lse(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.merging();
    let shape = material.output_shape();
    let seen = laboratory.observed()?.output("lse", Dtype::F32, &shape[..3])?.to_f64();
    let headline = "the LSE of merged segments is wrong";
    Ok(Comparison::all("lse", &seen, &material.expected()?.lse)
        .finding(headline, Stage::Merge, |flat| material.place_state(flat)))
}

fn given_bits(laboratory: &Laboratory) -> Result<Vec<u32>, Halt> {
    let tensor =
        laboratory.merging().inputs.tensors.get("lse").map_err(|e| Halt::Inconclusive(e.to_string()))?;
    Ok(tensor.to_codes().into_iter().map(|code| code as u32).collect())
}

fn round_trip(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let given = given_bits(laboratory)?;
    let seen = laboratory.observed()?.output("unpacked", Dtype::F32, &[1, given.len()])?.to_codes();
    let mut comparison = Comparison::new("unpacked");
    for (index, bits) in given.iter().enumerate() {
        comparison.element(index, seen[index] as f64, Allowed::Exactly(f64::from(*bits)));
    }
    let place = |index: usize| format!("value {index} (bits 0x{:08X} given; codes shown)", given[index]);
    Ok(comparison.finding("an LSE does not survive packing", Stage::Exchange, place))
}

fn lanes(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let given = given_bits(laboratory)?;
    let order = match &laboratory.case.body {
        shardcheck_cases::Body::Merge(MergeCase { lane_order, .. }) => *lane_order,
        _ => LaneOrder::HiLo,
    };
    let seen = laboratory.observed()?.output("lanes", Dtype::U16, &[1, given.len(), 2])?.to_codes();
    let mut comparison = Comparison::new("lanes");
    for (index, bits) in given.iter().enumerate() {
        let (high, low) = (f64::from(bits >> 16), f64::from(bits & 0xFFFF));
        let wanted = match order {
            LaneOrder::HiLo => [high, low],
            LaneOrder::LoHi => [low, high],
        };
        for lane in 0..2 {
            comparison.element(
                index * 2 + lane,
                seen[index * 2 + lane] as f64,
                Allowed::Exactly(wanted[lane]),
            );
        }
    }
    let place = |flat: usize| format!("value {} lane {}", flat / 2, flat % 2);
    Ok(comparison.finding("a lane does not hold its half", Stage::Exchange, place))
}
