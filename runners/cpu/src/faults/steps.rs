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
        apply: |p| p.session.touch = |_, inputs| count_up(inputs),
    },
    Fault {
        name: "later-lengths-counted-up-in-place",
        title: "from the second attention of a session on, the lengths are counted up in the inputs for the step after it",
        class: FaultClass::SpecDecode,
        bugs: &["vllm-ascend#7549", "ATOM#1746"],
        killed_by: &["inputs.unchanged"],
        apply: |p| {
            p.session.touch = |before, inputs| {
                if before > 0 {
                    count_up(inputs);
                }
            }
        },
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

#[cfg(test)]
mod tests {
    use super::super::faulty::{configuration, with};
    use super::*;

    #[test]
    fn lengths_are_counted_up_in_the_inputs_and_nothing_else_is() {
        let lens =
            |name: &str, lens: &[i32]| Tensors::new().with(name, Tensor::from_i32(&[lens.len()], lens));
        for name in ["seq_lens", "context_lens"] {
            let mut inputs = lens(name, &[3, 0]).with("other", Tensor::from_i32(&[1], &[5]));
            (with("lengths-counted-up-in-place").session.touch)(0, &mut inputs);
            assert_eq!(inputs, lens(name, &[4, 1]).with("other", Tensor::from_i32(&[1], &[5])));
        }
    }

    #[test]
    fn later_lengths_are_counted_up_once_a_step_of_attention_has_been_before() {
        let touch = with("later-lengths-counted-up-in-place").session.touch;
        for (before, counted) in [(0, 3), (1, 4), (2, 4)] {
            let mut inputs = Tensors::new().with("seq_lens", Tensor::from_i32(&[1], &[3]));
            touch(before, &mut inputs);
            assert_eq!(inputs.get("seq_lens").unwrap().to_i64(), [counted], "{before}");
        }
    }

    #[test]
    fn rows_of_padding_are_not_written() {
        assert_eq!((with("padding-output-unwritten").session.written_rows)(7, 5), 5);
    }

    #[test]
    fn a_feature_is_off_and_said_to_be_off_or_on() {
        let configuration = configuration();
        let published = dispatch(&configuration, true).run;
        assert_eq!(published.backend, Backend::A2a);
        assert!(published.query_replication && published.project_before_merge);
        let replication = Route { query_replication: false, ..published };
        let projection = Route { project_before_merge: false, ..published };
        let backend = Route { backend: Backend::AgRs, ..published };
        for (off, claimed, run) in [
            ("query-replication-silently-off", "query-replication-claimed", replication),
            ("project-before-merge-silently-off", "project-before-merge-claimed", projection),
            ("all-to-all-silently-off", "all-to-all-claimed", backend),
        ] {
            let seen = |name: &str| (with(name).session.dispatch)(&configuration, true);
            assert_eq!(seen(off), Dispatch { run, reported: run }, "{off}");
            assert_eq!(seen(claimed), Dispatch { run, reported: published }, "{claimed}");
        }
        let alone = Configuration { dcp: 1, ..configuration };
        for name in ["all-to-all-silently-off", "all-to-all-claimed"] {
            assert_eq!(
                (with(name).session.dispatch)(&alone, true),
                dispatch(&alone, true),
                "{name}: nothing is exchanged"
            );
        }
    }
}
