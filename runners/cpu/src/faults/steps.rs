//! Faults of a session: metadata of earlier steps, unwritten rows, features that do not take effect.

use shardcheck_engine::{Configuration, Tensor, Tensors};

use super::{Fault, FaultClass};
use crate::batch::Batch;
use crate::route::{Backend, Dispatch, Route, dispatch};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "lengths-of-the-first-step",
        title: "later steps of a session run with the lengths of the first, as a graph that captured them",
        class: FaultClass::StaleMetadata,
        bugs: &["vllm#36070", "ATOM#2102", "vllm-ascend#10895"],
        killed_by: &["sequence.second-step"],
        apply: |p| {
            p.session.recall = |earlier, batch| {
                recalled(earlier, batch, |first, batch| Batch {
                    seq_lens: first.seq_lens[..batch.seq_lens.len()].to_vec(),
                    ..batch
                })
            }
        },
    },
    Fault {
        name: "block-table-of-the-first-step",
        title: "later steps of a session run with the block table of the first",
        class: FaultClass::StaleMetadata,
        bugs: &["vllm-ascend#4221"],
        killed_by: &["sequence.second-step"],
        apply: |p| {
            p.session.recall = |earlier, batch| {
                recalled(earlier, batch, |first, batch| Batch { table: first.table.clone(), ..batch })
            }
        },
    },
    Fault {
        name: "rows-of-the-first-step",
        title: "later steps of a session deal their rows to requests as the first did",
        class: FaultClass::StaleMetadata,
        bugs: &["vllm-ascend#11072"],
        killed_by: &["sequence.second-step"],
        apply: |p| {
            p.session.recall = |earlier, batch| {
                recalled(earlier, batch, |first, batch| {
                    let edges = &first.starts[..=batch.seq_lens.len()];
                    let starts = edges.iter().map(|edge| (*edge).min(batch.rows as i32)).collect();
                    Batch { starts, ..batch }
                })
            }
        },
    },
    Fault {
        name: "lengths-counted-up-in-place",
        title: "a step counts the lengths up in its inputs for the step after it",
        class: FaultClass::StaleMetadata,
        bugs: &["vllm-ascend#7549", "ATOM#1746"],
        killed_by: &["inputs.unchanged"],
        apply: |p| p.session.touch = count_up,
    },
    Fault {
        name: "padding-output-unwritten",
        title: "the rows of graph padding keep what the output buffer held",
        class: FaultClass::Padding,
        bugs: &["flashinfer#3779", "ATOM#1700"],
        killed_by: &["attend.padding", "probe.tokens", "probe.pairing", "probe.needle"],
        apply: |p| p.session.written_rows = |_, real| real,
    },
    Fault {
        name: "query-replication-silently-off",
        title: "query replication is switched off, and the engine says so only in its effective path",
        class: FaultClass::ConfigGate,
        bugs: &["local-inference-lab/vllm#72"],
        killed_by: &["dispatch.path"],
        apply: |p| p.session.dispatch = |c, up| truthful(c, up, |route| route.query_replication = false),
    },
    Fault {
        name: "project-before-merge-silently-off",
        title: "project-before-merge is switched off, and the engine says so only in its effective path",
        class: FaultClass::ConfigGate,
        bugs: &["local-inference-lab/vllm#72"],
        killed_by: &["dispatch.path"],
        apply: |p| p.session.dispatch = |c, up| truthful(c, up, |route| route.project_before_merge = false),
    },
    Fault {
        name: "all-to-all-silently-off",
        title: "the all-to-all falls back to all-gather and reduce-scatter",
        class: FaultClass::ConfigGate,
        bugs: &["vllm#54300"],
        killed_by: &["dispatch.path", "probe.tokens", "probe.pairing"],
        apply: |p| {
            p.session.dispatch = |c, up| {
                truthful(c, up, |route| {
                    if route.backend == Backend::A2a {
                        route.backend = Backend::AgRs;
                    }
                })
            }
        },
    },
    Fault {
        name: "query-replication-claimed",
        title: "queries are gathered although the effective path says that they are replicated",
        class: FaultClass::ConfigGate,
        bugs: &["vllm#54300"],
        killed_by: &["dispatch.observed"],
        apply: |p| p.session.dispatch = |c, up| untruthful(c, up, |route| route.query_replication = false),
    },
    Fault {
        name: "project-before-merge-claimed",
        title: "partials travel unprojected although the effective path says that they are projected",
        class: FaultClass::ConfigGate,
        bugs: &["vllm#54300"],
        killed_by: &["dispatch.observed"],
        apply: |p| p.session.dispatch = |c, up| untruthful(c, up, |route| route.project_before_merge = false),
    },
    Fault {
        name: "all-to-all-claimed",
        title: "partials are reduced and scattered although the effective path says all-to-all",
        class: FaultClass::ConfigGate,
        bugs: &["vllm#54300"],
        killed_by: &["dispatch.observed", "probe.tokens", "probe.pairing"],
        apply: |p| {
            p.session.dispatch = |c, up| {
                untruthful(c, up, |route| {
                    if route.backend == Backend::A2a {
                        route.backend = Backend::AgRs;
                    }
                })
            }
        },
    },
];

/// The batch with something of the session's first one, where that has as many requests or more.
fn recalled(earlier: &mut Option<Batch>, batch: Batch, mix: fn(&Batch, Batch) -> Batch) -> Batch {
    let first = earlier.get_or_insert_with(|| batch.clone());
    if first.seq_lens.len() >= batch.seq_lens.len() { mix(first, batch) } else { batch }
}

fn count_up(inputs: &mut Tensors) {
    for name in ["seq_lens", "context_lens"] {
        if let Some(tensor) = inputs.get_mut(name) {
            let counted: Vec<i32> = tensor.to_i64().into_iter().map(|len| len as i32 + 1).collect();
            *tensor = Tensor::from_i32(tensor.shape(), &counted);
        }
    }
}

fn truthful(configuration: &Configuration, projects: bool, change: fn(&mut Route)) -> Dispatch {
    let mut run = dispatch(configuration, projects).run;
    change(&mut run);
    Dispatch { run, reported: run }
}

fn untruthful(configuration: &Configuration, projects: bool, change: fn(&mut Route)) -> Dispatch {
    let mut dispatch = dispatch(configuration, projects);
    change(&mut dispatch.run);
    dispatch
}
