//! Layers that share a selection: what an engine reads out of a model's configuration. Integers, so exact.

use shardcheck_cases::{Body, Family, IndexLayersCase};
use shardcheck_engine::{IndexerType, SharingRule};
use shardcheck_formats::Dtype;
use shardcheck_references::sharing::{Reading, Sharing};

use super::{Property, always};
use crate::finding::{Failure, Finding, Measured, Stage};
use crate::laboratory::{Halt, Laboratory};

const LAYERS: &[Family] = &[Family::IndexLayers];
const EXACT: &str = "exact: integers";

pub(super) const PROPERTIES: &[Property] = &[
    Property {
        id: "sharing.layers",
        statement: "a layer computes its selection or shares one as types, a pattern or a period with its offset say, in this order; draft layers and those behind a list compute",
        source: "ATOM `_should_skip_index_topk`; vLLM `skip_topk` of `DeepseekV2MLAAttention`",
        bugs: &[],
        tolerance: EXACT,
        families: LAYERS,
        applies: always,
        check: layers,
    },
    Property {
        id: "sharing.source",
        statement: "a layer that shares attends by the selection of the last layer before it that computed one",
        source: "transformers `prev_topk_indices`; ATOM and vLLM: one buffer, which only layers that compute write",
        bugs: &[],
        tolerance: EXACT,
        families: LAYERS,
        applies: always,
        check: source,
    },
    Property {
        id: "sharing.metadata",
        statement: "lists, row pointers and work plan are made anew for the layers that compute and for no other",
        source: "ATOM: shared layers reuse indices, compact row pointers and the persistent plan",
        bugs: &[],
        tolerance: EXACT,
        families: LAYERS,
        applies: always,
        check: metadata,
    },
];

/// For each layer the one by whose selection it attends.
fn sources(case: &IndexLayersCase) -> Result<Vec<usize>, Halt> {
    let sharing = &case.sharing;
    let pattern: Option<Vec<bool>> =
        sharing.pattern.as_ref().map(|pattern| pattern.chars().map(|letter| letter == 'S').collect());
    let types: Option<Vec<bool>> =
        sharing.types.as_ref().map(|types| types.iter().map(|t| *t == IndexerType::Shared).collect());
    let reading = match sharing.rule {
        SharingRule::Atom => Reading::Atom,
        SharingRule::Vllm => Reading::Vllm,
    };
    let oracle = Sharing {
        reading,
        layers: (sharing.layers, sharing.draft_layers),
        kept: sharing.index_cache,
        period: (sharing.frequency, sharing.offset),
        pattern: pattern.as_deref(),
        types: types.as_deref(),
    };
    let sources = oracle.sources().into_iter().collect::<Option<_>>();
    sources.ok_or_else(|| Halt::Inconclusive("the first layer shares, and nobody is before it".to_owned()))
}

/// Compares an output with what each layer must have, given its number and its source.
fn compare(
    laboratory: &Laboratory,
    (name, dtype): (&str, Dtype),
    wanted: impl Fn(usize, usize) -> i64,
    words: impl Fn(usize, i64) -> String,
) -> Result<Finding, Halt> {
    let Body::IndexLayers(case) = &laboratory.case.body else {
        return Err(Halt::Inconclusive("not a case of layers that share".to_owned()));
    };
    let sources = sources(case)?;
    let seen = laboratory.observed()?.output(name, dtype, &[1, sources.len()])?.to_i64();
    for (layer, (seen, source)) in seen.iter().zip(&sources).enumerate() {
        if *seen != wanted(layer, *source) {
            let draft = if layer < case.sharing.layers { "" } else { " (of the drafts)" };
            let headline = format!("layer {layer}{draft} {}", words(*source, *seen));
            return Err(Failure::because(headline).at(Stage::Selection).into());
        }
    }
    Ok(Finding::Holds(Measured::exact(seen.len())))
}

fn layers(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let own = |layer: usize, source: usize| i64::from(layer == source);
    compare(laboratory, ("computes", Dtype::U8), own, |source, seen| match seen {
        0 => "shares a selection where it must compute one".to_owned(),
        1 => format!("computes a selection where it must share that of layer {source}"),
        other => format!("is said to compute by {other}, which is neither 0 nor 1"),
    })
}

fn source(laboratory: &Laboratory) -> Result<Finding, Halt> {
    compare(
        laboratory,
        ("source", Dtype::I32),
        |_, source| source as i64,
        |source, seen| format!("attends by the selection of layer {seen}, not of layer {source}"),
    )
}

fn metadata(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let own = |layer: usize, source: usize| i64::from(layer == source);
    compare(laboratory, ("rebuilds", Dtype::U8), own, |source, seen| match seen {
        0 => "attends by a plan that was made for another selection".to_owned(),
        _ => format!("makes a plan anew where that of layer {source} holds"),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use shardcheck_cases::{Case, SuiteName, suite};
    use shardcheck_cpu::{CpuEngine, faults};

    use super::*;
    use crate::status::Status;
    use crate::verdicts::{failures, judged};

    fn cases(name: SuiteName) -> Vec<Case> {
        suite(name, 1).into_iter().filter(|case| case.family == Family::IndexLayers).collect()
    }

    #[test]
    fn the_embedded_engine_reads_every_configuration_of_the_suites() {
        let engine = shardcheck_cpu::engine();
        for name in [SuiteName::Gate, SuiteName::Nightly] {
            for case in cases(name) {
                let passed = judged(&engine, &case).into_iter().filter(|(_, status)| *status == Status::Pass);
                assert_eq!(passed.count(), 4, "{}", case.id());
            }
        }
    }

    #[test]
    fn every_fault_of_sharing_fails_every_property_that_it_names_on_the_gate() {
        let (cases, mut tried) = (cases(SuiteName::Gate), 0);
        for fault in faults().iter().filter(|fault| fault.killed_by[0].starts_with("sharing.")) {
            let engine = CpuEngine::with_fault(fault);
            let failed: BTreeSet<&str> = cases.iter().flat_map(|case| failures(&engine, case)).collect();
            let left: Vec<_> = fault.killed_by.iter().filter(|id| !failed.contains(**id)).collect();
            assert!(left.is_empty(), "{} is not seen by {left:?}", fault.name);
            tried += 1;
        }
        assert_eq!(tried, 12);
    }

    #[test]
    fn a_wrong_layer_is_named() {
        let case: Case = "index_layers/atom.l6.m1.f2/none/none".parse().unwrap();
        let engine = CpuEngine::with_fault(shardcheck_cpu::fault("sharing-of-drafts").unwrap());
        let material =
            crate::material::Material::of(&case, shardcheck_engine::Engine::profile(&engine)).unwrap();
        let laboratory = Laboratory::new(&case, &engine, &material);
        let said = format!("{:?}", layers(&laboratory).unwrap_err());
        assert!(said.contains("layer 6 (of the drafts) shares a selection"), "{said}");
    }
}
