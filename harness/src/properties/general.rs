//! What must hold of every sharded step: what was decided is what ran.

use shardcheck_cases::Case;
use shardcheck_engine::{CommBackend, Configuration};

use super::Property;
use crate::finding::{Failure, Finding, Measured, Stage};
use crate::laboratory::{Halt, Laboratory, attend};

pub(super) const PROPERTIES: &[Property] = &[
    Property {
        id: "dispatch.path",
        statement: "what the configuration and the metadata decided is what ran: route, backend, replication, projection, head width",
        source: "vLLM: one owner of the routing decision; ATOM `mla_dcp_kernel_num_heads`",
        bugs: &["vllm-ascend#10580", "vllm#54300", "local-inference-lab/vllm#72", "vllm#28990"],
        tolerance: "exact: the effective path of the reply",
        families: super::attend::WITH_SINKS,
        applies: sharded,
        check: dispatch_path,
    },
    Property {
        id: "dispatch.observed",
        statement: "the effective path is what can be seen: replication saves a collective, another backend enters another number of them, projected partials have the projected width",
        source: "ATOM: a2a saves one collective, query replication removes the all-gather of Q",
        bugs: &["vllm#54300", "vllm-ascend#10580", "local-inference-lab/vllm#72"],
        tolerance: "exact: collective counts and shapes, compared with the run that is configured the other way",
        families: super::attend::WITH_SINKS,
        applies: |case| sharded(case) && crate::run::is_small(case),
        check: dispatch_observed,
    },
];

fn sharded(case: &Case) -> bool {
    matches!(&case.body, shardcheck_cases::Body::Attention(attention) if attention.configuration.dcp > 1)
}

/// Smallest dispatched head width that holds `heads`; `heads` itself beyond all of them or without any.
pub(super) fn kernel_width(configuration: &Configuration) -> usize {
    let heads = configuration.gathered_heads();
    configuration.kernel_head_widths.iter().copied().filter(|width| *width >= heads).min().unwrap_or(heads)
}

fn dispatch_path(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let configuration = material.configuration();
    let effective = &laboratory.observed()?.reply.effective;
    if effective.iter().next().is_none() {
        return Err(Halt::Unsupported("the engine does not report an effective path".to_owned()));
    }
    let wanted = [
        ("route", laboratory.case.family.name().to_owned()),
        ("comm_backend", configuration.comm_backend.name().to_owned()),
        ("query_replication", configuration.query_replication.to_string()),
        ("project_before_merge", (configuration.project_before_merge && material.is_projected()).to_string()),
        ("kernel_heads", kernel_width(configuration).to_string()),
    ];
    let mut compared = 0;
    for (key, wanted) in &wanted {
        let Some(seen) = effective.get(key) else { continue };
        compared += 1;
        if seen != wanted {
            let headline = format!("{key} was to be {wanted}, but {seen} took effect");
            return Err(Failure::because(headline)
                .at(Stage::Configuration)
                .note(format!("effective path: {effective}"))
                .into());
        }
    }
    Ok(Finding::Holds(Measured::exact(compared)))
}

/// Collectives of a run of the case changed by `change`, with its effective path.
fn counted(
    laboratory: &Laboratory,
    change: impl Fn(&mut Configuration),
) -> Result<(u64, shardcheck_engine::EffectivePath), Halt> {
    let material = laboratory.attention();
    let mut case = material.case.clone();
    change(&mut case.configuration);
    let other = material.variant(case)?;
    let (observed, _) = attend(&laboratory.engine, &other)?;
    Ok((observed.reply.collectives.iter().copied().max().unwrap_or(0), observed.reply.effective))
}

fn dispatch_observed(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let observed = laboratory.observed()?;
    let effective = &observed.reply.effective;
    let Some(count) = observed.reply.collectives.iter().copied().max() else {
        return Err(Halt::Unsupported("the engine does not count its collectives".to_owned()));
    };
    let broken = |headline: String| Err(Failure::because(headline).at(Stage::Exchange).into());
    let (other, path) = counted(laboratory, |c| c.query_replication = !c.query_replication)?;
    let says = |path: &shardcheck_engine::EffectivePath| path.get("query_replication") == Some("true");
    if says(effective) != says(&path) {
        let (with, without) = if says(effective) { (count, other) } else { (other, count) };
        if with >= without {
            return broken(format!(
                "query replication is reported, but {with} collectives ran with it and {without} without: the queries were gathered"
            ));
        }
    }
    let (other, path) = counted(laboratory, |c| {
        c.comm_backend =
            if c.comm_backend == CommBackend::A2a { CommBackend::AgRs } else { CommBackend::A2a };
    })?;
    if effective.get("comm_backend") != path.get("comm_backend") && count == other {
        return broken(format!("two backends are reported, but {count} collectives ran with either"));
    }
    let attention = material.configuration().attention;
    let widths = (attention.value_dim(), attention.v_head_dim());
    if material.is_projected() && widths.0 != widths.1 && observed.reply.outputs.find("partial_out").is_some()
    {
        let says = effective.get("project_before_merge") == Some("true");
        let seen = material.exchanged_dim(observed);
        let wanted = if says { widths.1 } else { widths.0 };
        if seen != wanted {
            return broken(format!(
                "project_before_merge={says} is reported, but partials of width {seen} were exchanged instead of {wanted}"
            ));
        }
    }
    Ok(Finding::Holds(Measured::exact(3)))
}
