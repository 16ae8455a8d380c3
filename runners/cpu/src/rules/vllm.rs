//! Rules of vLLM: `config/parallel.py`, the model runner's prefill-context-parallel checks, and what an attention
//! backend must declare.

use super::{
    A2A_SPLITS_HEADS, DCP_DIVIDES_TP, Facts, GQA_REPLICATION, INTERLEAVE_FITS_BLOCK, KNOWN_BACKEND, Outcome,
    Rule, reject_if,
};

/// Rules in order.
pub const RULES: &[Rule] = &[
    Rule {
        id: "dcp-divides-tp",
        // with pcp the group may span it, see below
        judge: |f| if f.pcp > 1 { Outcome::Pass } else { (DCP_DIVIDES_TP.judge)(f) },
    },
    Rule {
        id: "dcp-under-pcp",
        judge: |f| {
            reject_if(f.pcp < 1 || (f.pcp > 1 && ![1, f.pcp, f.tp * f.pcp].contains(&f.dcp)), || {
                format!("with pcp {} dcp must be 1, pcp or tp·pcp, not {}", f.pcp, f.dcp)
            })
        },
    },
    Rule {
        id: "pcp-without-dp",
        judge: |f| {
            reject_if(f.pcp > 1 && f.integer("data_parallel_size", 1) > 1, || {
                "prefill context parallelism and data parallelism exclude each other".to_owned()
            })
        },
    },
    Rule {
        id: "world-is-pp-tp-pcp",
        judge: |f| {
            let world = f.integer("pipeline_parallel_size", 1) * f.tp * f.pcp;
            let given = f.integer("world_size", world);
            reject_if(given != world, || format!("world_size {given} is not pp·tp·pcp = {world}"))
        },
    },
    KNOWN_BACKEND,
    Rule {
        id: "a2a-needs-a-group",
        judge: |f| {
            reject_if(f.comm_backend == "a2a" && f.dcp <= 1, || {
                "a2a needs decode_context_parallel_size above 1".to_owned()
            })
        },
    },
    INTERLEAVE_FITS_BLOCK,
    Rule {
        id: "interleave-without-drafts",
        judge: |f| {
            let supported = f.truth("supports_mtp_with_interleave", false);
            reject_if(f.interleave > 1 && f.speculative && f.dcp * f.pcp > 1 && !supported, || {
                format!("this attention verifies drafts with interleave 1 only, not {}", f.interleave)
            })
        },
    },
    A2A_SPLITS_HEADS,
    GQA_REPLICATION,
    Rule {
        id: "dcp-needs-decode-lse",
        judge: |f| {
            reject_if(f.dcp > 1 && !f.truth("returns_decode_lse", true), || {
                "this attention does not return the LSE of decode".to_owned()
            })
        },
    },
    Rule {
        id: "pcp-needs-support",
        judge: |f| {
            reject_if(f.pcp > 1 && !f.truth("supports_pcp", true), || {
                "this attention does not support prefill context parallelism".to_owned()
            })
        },
    },
    Rule {
        id: "pcp-limits",
        judge: |f| {
            let graphs = f.truth("full_graph", false) || f.truth("piecewise_graph", false);
            let limits = [
                (!f.mla, "attention other than MLA"),
                (f.integer("pipeline_parallel_size", 1) > 1, "pipeline parallelism"),
                (f.truth("encoder_decoder", false), "encoder-decoder models"),
                (f.truth("multimodal", false), "multimodal models"),
                (f.truth("lora", false), "LoRA"),
                (f.speculative, "speculative decode"),
                (f.truth("full_graph", false), "full graphs"),
                (f.truth("sparse", false) && graphs, "graphs of sparse attention"),
            ];
            match limits.iter().find(|(holds, _)| *holds && f.pcp > 1) {
                Some((_, what)) => {
                    Outcome::Reject(format!("prefill context parallelism does not support {what}"))
                }
                None => Outcome::Pass,
            }
        },
    },
];

/// Draft models whose caches may be replicated.
const REPLICATING_DRAFTS: [&str; 2] = ["qwen3_dflash", "qwen3_dspark"];

/// Rules of drafts with several KV heads beside sharded caches, whose heads every rank of the group then holds (pull request 48392). A draft
/// of latent attention keeps its slots and needs none of them.
pub const REPLICATED_DRAFTS: &[Rule] = &[
    Rule {
        id: "replicated-draft-runner",
        judge: |f| {
            reject_if(replicates(f) && f.raw.text("runner", "v2") == "v1", || {
                "runner v1 does not replicate the heads of a draft's cache".to_owned()
            })
        },
    },
    Rule {
        id: "replicated-draft-model",
        judge: |f| {
            let model = f.raw.text("draft_model", "").to_owned();
            reject_if(replicates(f) && !REPLICATING_DRAFTS.contains(&model.as_str()), || {
                format!("draft {model:?} has no cache whose heads are replicated")
            })
        },
    },
    Rule {
        id: "replicated-draft-unquantised",
        judge: |f| {
            let dtype = f.raw.text("draft_kv_dtype", "auto").to_owned();
            reject_if(replicates(f) && dtype != "auto" && dtype != "bf16", || {
                format!("a draft's cache of {dtype} is not replicated")
            })
        },
    },
    Rule {
        id: "replicated-draft-whole",
        judge: |f| {
            // ranks that hold one head already: none, or the whole group
            let copies = f.tp / f.integer("draft_kv_heads", 0).max(1);
            reject_if(replicates(f) && copies > 1 && copies < f.dcp, || {
                format!(
                    "a head of the draft is on {copies} ranks of a group of {}: it is replicated in part",
                    f.dcp
                )
            })
        },
    },
    Rule {
        id: "replicated-draft-query-slots",
        judge: |f| {
            if !replicates(f) {
                return Outcome::Pass;
            }
            let reason =
                "the block attends to its own keys: in a cache of replicated heads its slots are padding";
            Outcome::Disable("draft_query_slots", reason.to_owned())
        },
    },
];

/// Whether a draft has KV heads that the group must replicate.
fn replicates(f: &Facts) -> bool {
    f.dcp > 1 && f.speculative && f.integer("draft_kv_heads", 0) > 1
}
