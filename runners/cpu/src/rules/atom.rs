//! Rules of ATOM: its context-parallel guide of August 2026 and `config.py`, and the later revision in which query
//! replication under speculation is decided layer by layer.

use super::facts::Overlap;
use super::own::{PROJECT_BEFORE_MERGE_NEEDS_A_GROUP, QUERY_REPLICATION_NEEDS_A_GROUP};
use super::{
    A2A_SPLITS_HEADS, DCP_DIVIDES_TP, Facts, INTERLEAVE_FITS_BLOCK, KNOWN_BACKEND, Outcome, Rule, reject_if,
};

/// Fewest heads of ATOM's MLA kernels.
const MLA_MIN_HEADS: i64 = 16;
/// Most heads that one of them is made for.
const MLA_MAX_HEADS: i64 = 128;

/// Rules in order; `next` for the later revision.
pub fn rules(next: bool) -> Vec<Rule> {
    let mut rules = vec![
        KNOWN_BACKEND,
        TP_OF_ONE_NODE,
        DCP_DIVIDES_TP,
        INTERLEAVE_FITS_BLOCK,
        INTERLEAVE_NEEDS_A_GROUP,
        INTERLEAVE_WITHOUT_DRAFTS,
        DRAFTS_NEED_GFX950,
    ];
    if !next {
        rules.extend([GATHERED_HEADS_FIT_A_KERNEL, SPARSE_DECODES_ONE_ROW]);
    }
    rules.push(QUERY_REPLICATION_NEEDS_A_GROUP);
    rules.push(if next { QUERY_REPLICATION_BY_LAYER } else { QUERY_REPLICATION_WITHOUT_DRAFTS });
    rules.extend([
        QUERY_REPLICATION_WITHOUT_MXFP4,
        PROJECT_BEFORE_MERGE_NEEDS_A_GROUP,
        PROJECT_BEFORE_MERGE_WITHOUT_MXFP4,
        QUERY_REPLICATION_FILLS_A_KERNEL,
        AG_RS_NEEDS_A_POWER_OF_TWO,
        A2A_SPLITS_HEADS,
        PCP_OF_ONE_NODE,
        PCP_WITHOUT_DP_ATTENTION,
        TBO_UNDER_PCP,
        TOKEN_SPLIT_UNDER_PCP,
        FORCED_ACCEPTANCE_WITHOUT_SCHEDULE,
    ]);
    rules
}

const TP_OF_ONE_NODE: Rule = Rule {
    id: "tp-of-one-node",
    judge: |f| {
        reject_if(!(1..=8).contains(&f.tp), || {
            format!("tensor_parallel_size {} is not between 1 and 8", f.tp)
        })
    },
};

const INTERLEAVE_NEEDS_A_GROUP: Rule = Rule {
    id: "interleave-needs-a-group",
    judge: |f| {
        reject_if(f.interleave > 1 && f.dcp <= 1, || {
            format!("interleave_size {} has no meaning at decode_context_parallel_size 1", f.interleave)
        })
    },
};

const INTERLEAVE_WITHOUT_DRAFTS: Rule = Rule {
    id: "interleave-without-drafts",
    judge: |f| {
        reject_if(f.interleave > 1 && f.speculative, || {
            format!("the verify kernel assumes token interleave; interleave_size is {}", f.interleave)
        })
    },
};

const DRAFTS_NEED_GFX950: Rule = Rule {
    id: "drafts-need-gfx950",
    judge: |f| {
        reject_if(f.speculative && f.dcp > 1 && f.arch != "gfx950", || {
            format!("speculative decode with dcp {} needs gfx950, this is {}", f.dcp, f.arch)
        })
    },
};

/// The earlier revision folds heads onto its 16-head kernel, which is slow and wrong for several rows; the later one fails in the kernel.
const GATHERED_HEADS_FIT_A_KERNEL: Rule = Rule {
    id: "gathered-heads-fit-a-kernel",
    judge: |f| match f.gathered_heads() {
        Some(heads) if f.dcp > 1 && heads > MLA_MAX_HEADS => Outcome::Warn(
            "decode_context_parallel_size",
            format!("{heads} gathered heads are more than {MLA_MAX_HEADS}: lower dcp or raise tp"),
        ),
        _ => Outcome::Pass,
    },
};

const SPARSE_DECODES_ONE_ROW: Rule = Rule {
    id: "sparse-decodes-one-row",
    judge: |f| {
        reject_if(f.truth("sparse", false) && f.dcp > 1 && f.query_len() > 1, || {
            format!("sparse decode under dcp takes one row a request, not {}", f.query_len())
        })
    },
};

/// Switches query replication off for a reason.
fn no_query_replication(f: &mut Facts, condition: bool, reason: &str) -> Outcome {
    if !(f.query_replication.on && condition) {
        return Outcome::Pass;
    }
    f.query_replication.on = false;
    Outcome::Disable("enable_query_replication", reason.to_owned())
}

const QUERY_REPLICATION_WITHOUT_DRAFTS: Rule = Rule {
    id: "query-replication-without-drafts",
    judge: |f| {
        let speculative = f.speculative;
        no_query_replication(f, speculative, "speculative decode verifies several rows a request")
    },
};

const QUERY_REPLICATION_BY_LAYER: Rule = Rule {
    id: "query-replication-by-layer",
    judge: |f| {
        let narrow = !f.truth("query_projection_widened", true);
        let unsliceable = f.raw.text("query_scale_layout", "none") == "per_1x32";
        no_query_replication(f, narrow, "the layer's query projection was not widened")
            .or(|| no_query_replication(f, unsliceable, "scales of 1x32 groups cannot be sliced by rows"))
    },
};

const QUERY_REPLICATION_WITHOUT_MXFP4: Rule = Rule {
    id: "query-replication-without-mxfp4",
    judge: |f| {
        let mxfp4 = f.truth("mxfp4", false);
        no_query_replication(f, mxfp4, "mxfp4 weights have another scale structure")
    },
};

const PROJECT_BEFORE_MERGE_WITHOUT_MXFP4: Rule = Rule {
    id: "project-before-merge-without-mxfp4",
    judge: |f| {
        if !(f.project_before_merge.on && f.truth("mxfp4", false)) {
            return Outcome::Pass;
        }
        f.project_before_merge.on = false;
        Outcome::Disable(
            "enable_project_before_merge",
            "mxfp4 weights have another scale structure".to_owned(),
        )
    },
};

const QUERY_REPLICATION_FILLS_A_KERNEL: Rule = Rule {
    id: "query-replication-fills-a-kernel",
    judge: |f| {
        let few = f.gathered_heads().filter(|heads| *heads < MLA_MIN_HEADS);
        reject_if(f.query_replication.on && few.is_some(), || {
            format!("query replication needs {MLA_MIN_HEADS} gathered heads, there are {}", few.unwrap_or(0))
        })
    },
};

const AG_RS_NEEDS_A_POWER_OF_TWO: Rule = Rule {
    id: "ag-rs-needs-a-power-of-two",
    judge: |f| {
        let power_of_two = f.dcp > 0 && f.dcp & (f.dcp - 1) == 0;
        reject_if(f.comm_backend == "ag_rs" && !power_of_two, || {
            format!("ag_rs corrects over a power of two of ranks, not {}", f.dcp)
        })
    },
};

const PCP_OF_ONE_NODE: Rule = Rule {
    id: "pcp-of-one-node",
    judge: |f| {
        reject_if(f.pcp < 1 || (f.pcp > 1 && f.tp * f.pcp > 8), || {
            format!("tp {} times pcp {} is more than the 8 devices of a node", f.tp, f.pcp)
        })
    },
};

const PCP_WITHOUT_DP_ATTENTION: Rule = Rule {
    id: "pcp-without-dp-attention",
    judge: |f| {
        reject_if(f.pcp > 1 && f.truth("enable_dp_attention", false), || {
            "prefill context parallelism and data-parallel attention exclude each other".to_owned()
        })
    },
};

/// Checked in this order: without merged experts there is nothing to overlap, even for `all`; with tp above 1 it may
/// hang; only then is overlap of decode refused.
const TBO_UNDER_PCP: Rule = Rule {
    id: "tbo-under-pcp",
    judge: |f| {
        if f.pcp <= 1 || f.overlap == Overlap::Off {
            return Outcome::Pass;
        }
        let reason = if !f.truth("pcp_moe_merge", true) {
            "experts are not merged over pcp: no communication to overlap"
        } else if f.tp > 1 {
            "two-batch overlap under pcp needs tp 1"
        } else if f.overlap == Overlap::All {
            return Outcome::Reject("under pcp only prefill overlaps: use enable_tbo prefill".to_owned());
        } else {
            return Outcome::Pass;
        };
        f.overlap = Overlap::Off;
        Outcome::Disable("enable_tbo", reason.to_owned())
    },
};

const TOKEN_SPLIT_UNDER_PCP: Rule = Rule {
    id: "token-split-under-pcp",
    judge: |f| {
        if f.pcp <= 1 || !f.truth("tbo_token_split", false) {
            return Outcome::Pass;
        }
        Outcome::Disable("tbo_token_split", "under pcp batches are split between requests".to_owned())
    },
};

const FORCED_ACCEPTANCE_WITHOUT_SCHEDULE: Rule = Rule {
    id: "forced-acceptance-without-schedule",
    judge: |f| {
        reject_if(f.truth("forced_acceptance", false) && f.truth("confidence_schedule", false), || {
            "forced acceptance and a confidence schedule exclude each other".to_owned()
        })
    },
};
