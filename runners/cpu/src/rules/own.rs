//! Rules of this engine: any world size, S divides B, no prefill context parallelism.

use super::{
    A2A_SPLITS_HEADS, DCP_DIVIDES_TP, INTERLEAVE_FITS_BLOCK, KNOWN_BACKEND, Outcome, Rule, reject_if,
};
use crate::engine::MAX_RANKS;

/// Rules in order.
pub const RULES: &[Rule] = &[
    DCP_DIVIDES_TP,
    INTERLEAVE_FITS_BLOCK,
    KNOWN_BACKEND,
    A2A_SPLITS_HEADS,
    Rule {
        id: "ranks-are-threads",
        judge: |f| {
            reject_if(f.tp > MAX_RANKS as i64, || format!("tp {} is more than {MAX_RANKS} threads", f.tp))
        },
    },
    Rule {
        id: "no-prefill-context-parallelism",
        judge: |f| reject_if(f.pcp != 1, || "this engine shards decode alone: use pcp 1".to_owned()),
    },
    QUERY_REPLICATION_NEEDS_A_GROUP,
    PROJECT_BEFORE_MERGE_NEEDS_A_GROUP,
];

fn query_replication_needs_a_group(f: &mut super::Facts) -> Outcome {
    if f.dcp > 1 || !f.query_replication.on {
        return Outcome::Pass;
    }
    f.query_replication.on = false;
    // a default that has nothing to act on is not worth a word
    if !f.query_replication.asked {
        return Outcome::Pass;
    }
    Outcome::Disable(
        "enable_query_replication",
        "decode_context_parallel_size is 1: no query is gathered".to_owned(),
    )
}

fn project_before_merge_needs_a_group(f: &mut super::Facts) -> Outcome {
    if f.dcp > 1 || !f.project_before_merge.on {
        return Outcome::Pass;
    }
    f.project_before_merge.on = false;
    if !f.project_before_merge.asked {
        return Outcome::Pass;
    }
    Outcome::Disable(
        "enable_project_before_merge",
        "decode_context_parallel_size is 1: nothing is merged".to_owned(),
    )
}

/// Query replication off without a group (also ATOM's rule).
pub const QUERY_REPLICATION_NEEDS_A_GROUP: Rule =
    Rule { id: "query-replication-needs-a-group", judge: query_replication_needs_a_group };

/// Project before merge off without a group (also ATOM's rule).
pub const PROJECT_BEFORE_MERGE_NEEDS_A_GROUP: Rule =
    Rule { id: "project-before-merge-needs-a-group", judge: project_before_merge_needs_a_group };
