//! Faults of a step as a whole: inputs that change, unwritten rows, features that do not take effect.

use shardcheck_engine::{Configuration, Tensor, Tensors};

use super::{Fault, FaultClass};
use crate::route::{Backend, Dispatch, Route, dispatch};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "lengths-counted-up-in-place",
        title: "a draft step counts the lengths up in its inputs for the step after it",
        class: FaultClass::SpecDecode,
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
