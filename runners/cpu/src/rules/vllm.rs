//! Rules of vLLM: `config/parallel.py`, the model runner's prefill-context-parallel checks, and what an attention
//! backend must declare.

use super::{
    A2A_SPLITS_HEADS, DCP_DIVIDES_TP, GQA_REPLICATION, INTERLEAVE_FITS_BLOCK, KNOWN_BACKEND, Outcome, Rule,
    reject_if,
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
