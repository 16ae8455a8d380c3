//! Rules of vLLM on Ascend.

use super::{DCP_DIVIDES_TP, Facts, GQA_REPLICATION, INTERLEAVE_FITS_BLOCK, Outcome, Rule, reject_if};

/// Rules in order.
pub const RULES: &[Rule] = &[
    DCP_DIVIDES_TP,
    INTERLEAVE_FITS_BLOCK,
    GQA_REPLICATION,
    Rule { id: "gqa-kv-replication-of-draft", judge: draft_replication },
    Rule {
        id: "pcp-needs-runner-v2",
        judge: |f| {
            reject_if(f.pcp > 1 && runner(f) == "v1", || {
                "runner v1 has no prefill context parallelism".to_owned()
            })
        },
    },
    Rule {
        id: "runner-v2-pcp-or-dcp",
        judge: |f| {
            reject_if(f.pcp > 1 && f.dcp > 1 && runner(f) == "v2", || {
                "runner v2 takes pcp or dcp, not both".to_owned()
            })
        },
    },
    Rule {
        id: "dcp-needs-runner-v1",
        judge: |f| {
            reject_if(f.dcp > 1 && runner(f) == "v2", || {
                "runner v2 has no decode context parallelism".to_owned()
            })
        },
    },
    Rule {
        id: "dcp-without-dynamic-speculation",
        judge: |f| {
            reject_if(f.dcp > 1 && f.truth("dynamic_speculation", false), || {
                "dynamic speculation does not run under dcp".to_owned()
            })
        },
    },
    Rule {
        id: "replicated-indexer",
        judge: |f| {
            let replicated = f.truth("replicated_indexer", false) && f.dcp > 1;
            reject_if(replicated && (f.dcp != f.tp || f.arch == "a5"), || {
                format!(
                    "a replicated indexer needs dcp = tp and no A5; dcp {}, tp {}, {}",
                    f.dcp, f.tp, f.arch
                )
            })
        },
    },
    Rule {
        id: "sparse-forces-block-interleave",
        judge: |f| {
            let sharded_indexer = f.truth("sparse", false) && !f.truth("replicated_indexer", false);
            if !(sharded_indexer && f.dcp * f.pcp > 1 && f.interleave != f.block_size) {
                return Outcome::Pass;
            }
            f.interleave = f.block_size;
            Outcome::Disable(
                "cp_kv_cache_interleave_size",
                format!("sparse attention needs {}", f.block_size),
            )
        },
    },
    Rule {
        id: "kv-transfer-needs-block-interleave",
        judge: |f| {
            let sharded = f.truth("kv_transfer", false) && f.dcp * f.pcp > 1;
            reject_if(sharded && f.interleave != f.block_size, || {
                format!("KV transfer needs interleave {} = block size, not {}", f.block_size, f.interleave)
            })
        },
    },
    Rule {
        id: "sparse-offload-without-sharding",
        judge: |f| {
            reject_if(f.truth("sparse_kv_offload", false) && f.dcp * f.pcp > 1, || {
                "sparse KV offload does not run under context parallelism".to_owned()
            })
        },
    },
];

fn runner(f: &Facts) -> &str {
    f.raw.text("runner", "v1")
}

fn draft_replication(f: &mut Facts) -> Outcome {
    let known = |name: &str| f.raw.get(name).map(|_| f.integer(name, 0));
    let Some(kv_heads) = known("draft_kv_heads").filter(|heads| *heads > 1) else { return Outcome::Pass };
    let mut draft = f.clone();
    (draft.kv_heads, draft.query_heads, draft.mla) = (Some(kv_heads), known("draft_query_heads"), false);
    (GQA_REPLICATION.judge)(&mut draft)
}
