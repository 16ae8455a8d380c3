//! What the published rule sets say to launch settings.

use serde_json::json;
use shardcheck_cpu::engine;
use shardcheck_engine::{Answer, Decision, Engine, RuleSetName, Settings, Validation};

use RuleSetName::{Atom, AtomNext, Own, Vllm, VllmAscend};

fn sized(tp: i64, dcp: i64) -> Settings {
    Settings::new().with("tensor_parallel_size", tp).with("decode_context_parallel_size", dcp)
}

fn ask(rules: RuleSetName, settings: &Settings) -> Validation {
    match engine().validate(rules, settings).unwrap() {
        Answer::Done(validation) => validation,
        Answer::Unsupported(reason) => panic!("{reason}"),
    }
}

fn accepts(rules: RuleSetName, settings: Settings) {
    let validation = ask(rules, &settings);
    assert_eq!(validation, Validation::accept(), "{rules}: {settings:?}");
}

fn rejects(rules: RuleSetName, settings: Settings, because: &str) {
    let validation = ask(rules, &settings);
    assert_eq!(validation.decision, Decision::Reject, "{rules}: {settings:?}");
    assert!(validation.reason.contains(because), "{}", validation.reason);
}

fn disables(rules: RuleSetName, settings: Settings, features: &[&str]) {
    let validation = ask(rules, &settings);
    assert_eq!(validation.decision, Decision::Accept, "{rules}: {settings:?} {}", validation.reason);
    let seen: Vec<&str> = validation.disabled.iter().map(|d| d.feature.as_str()).collect();
    assert_eq!(seen, features, "{rules}: {settings:?}");
    assert!(validation.disabled.iter().all(|d| !d.reason.is_empty()));
}

#[test]
fn a_group_that_does_not_divide_the_tensor_parallel_ranks_is_refused_by_all() {
    for rules in RuleSetName::ALL {
        rejects(rules, sized(8, 3), "dcp-divides-tp");
        accepts(rules, sized(8, 4));
        accepts(rules, sized(8, 1));
        accepts(rules, sized(1, 1));
        for (tp, dcp) in [(8, 0), (8, -1), (1, 2)] {
            rejects(rules, sized(tp, dcp), "dcp-divides-tp");
        }
    }
    rejects(Vllm, sized(0, 1), "dcp-divides-tp");
}

#[test]
fn only_atom_asks_for_a_power_of_two_under_all_gather_and_reduce_scatter() {
    let ag_rs = |s: Settings| {
        s.with("dcp_config", json!({"comm_backend": "ag_rs"})).with("dcp_comm_backend", "ag_rs")
    };
    rejects(Atom, ag_rs(sized(6, 3)), "power of two");
    for dcp in [1, 2, 4, 8] {
        accepts(Atom, ag_rs(sized(8, dcp)));
    }
    for rules in [Own, Vllm] {
        accepts(rules, ag_rs(sized(6, 3)));
    }
}

#[test]
fn an_interleave_size_must_fit_its_block_and_in_atom_needs_a_group_without_drafts() {
    let interleave = |s: Settings, size: i64| {
        s.with("dcp_config", json!({"interleave_size": size})).with("cp_kv_cache_interleave_size", size)
    };
    for rules in RuleSetName::ALL {
        accepts(rules, interleave(sized(8, 8), 16));
        rejects(rules, interleave(sized(8, 8), 3), "interleave-fits-block");
        rejects(rules, interleave(sized(8, 8), 32), "interleave-fits-block");
        rejects(rules, interleave(sized(8, 8), 0), "interleave-fits-block");
        accepts(rules, interleave(sized(8, 8), 1).with("block_size", 1));
        rejects(rules, interleave(sized(8, 8), 1).with("block_size", 0), "interleave-fits-block");
    }
    rejects(Atom, interleave(sized(8, 1), 4), "interleave-needs-a-group");
    accepts(Vllm, interleave(sized(8, 1), 4));
    rejects(Atom, interleave(sized(8, 8), 4).with("speculative_tokens", 1), "interleave-without-drafts");
    rejects(Vllm, interleave(sized(8, 8), 4).with("speculative_tokens", 1), "interleave-without-drafts");
    let supported = interleave(sized(8, 8), 4).with("speculative_tokens", 1);
    accepts(Vllm, supported.with("supports_mtp_with_interleave", true));
    // one device verifies drafts with any interleave size: there is nothing to interleave over
    accepts(Vllm, interleave(sized(8, 1), 4).with("speculative_tokens", 1));
}

#[test]
fn a_misspelt_knob_is_refused_and_values_are_coerced_as_python_does() {
    let config = |value| sized(8, 8).with("dcp_config", value);
    rejects(Atom, config(json!({"interleave": 4})), "unknown dcp_config key");
    rejects(Atom, config(json!({"comm_backend": "ring"})), "known-comm-backend");
    rejects(Atom, config(json!({"interleave_size": "many"})), "no integer");
    accepts(Atom, config(json!({"interleave_size": "8", "enable_query_replication": 0})));
    // the text "false" is true, so that drafts switch the feature off
    let trap = config(json!({"enable_query_replication": "false"})).with("speculative_tokens", 2);
    disables(Atom, trap, &["enable_query_replication"]);
    let off = config(json!({"enable_query_replication": false})).with("speculative_tokens", 2);
    accepts(Atom, off);
}

#[test]
fn drafts_need_gfx950_and_switch_query_replication_off_in_the_earlier_revision_only() {
    let drafts = || sized(8, 8).with("speculative_tokens", 3).with("speculative_method", "mtp");
    for rules in [Atom, AtomNext] {
        rejects(rules, drafts().with("arch", "gfx942"), "gfx950");
        accepts(rules, sized(8, 8).with("arch", "gfx942"));
    }
    disables(Atom, drafts(), &["enable_query_replication"]);
    accepts(AtomNext, drafts());
    disables(AtomNext, drafts().with("query_projection_widened", false), &["enable_query_replication"]);
    disables(AtomNext, drafts().with("query_scale_layout", "per_1x32"), &["enable_query_replication"]);
    rejects(Atom, drafts().with("sparse", true), "one row");
    accepts(AtomNext, drafts().with("sparse", true));
}

#[test]
fn mxfp4_switches_both_features_off_whatever_the_interleave_size_is() {
    for size in [1, 4] {
        let settings = sized(8, 8).with("mxfp4", true).with("dcp_config", json!({"interleave_size": size}));
        disables(Atom, settings, &["enable_query_replication", "enable_project_before_merge"]);
    }
}

#[test]
fn without_a_group_features_that_were_asked_for_are_switched_off_and_defaults_pass_in_silence() {
    let asked = json!({"enable_query_replication": true, "enable_project_before_merge": true});
    for rules in [Own, Atom, AtomNext] {
        let settings = sized(8, 1).with("dcp_config", asked.clone());
        disables(rules, settings, &["enable_query_replication", "enable_project_before_merge"]);
        accepts(rules, sized(8, 1));
    }
    // the default exchange of ATOM has nothing to do without a group; vLLM refuses to be asked for it
    rejects(Vllm, sized(8, 1).with("dcp_comm_backend", "a2a"), "a2a");
}

#[test]
fn query_replication_needs_enough_gathered_heads() {
    rejects(Atom, sized(8, 2).with("query_heads", 32), "16 gathered heads");
    accepts(Atom, sized(8, 8).with("query_heads", 32));
    accepts(Atom, sized(8, 4).with("query_heads", 32));
    disables(
        Atom,
        sized(8, 2).with("query_heads", 32).with("mxfp4", true),
        &["enable_query_replication", "enable_project_before_merge"],
    );
}

#[test]
fn overlap_under_prefill_context_parallelism_is_checked_in_the_published_order() {
    let pcp = |tp: i64, pcp: i64, overlap: &str| {
        sized(tp, 1).with("prefill_context_parallel_size", pcp).with("enable_tbo", overlap)
    };
    disables(Atom, pcp(1, 8, "all").with("pcp_moe_merge", false), &["enable_tbo"]);
    disables(Atom, pcp(4, 2, "all"), &["enable_tbo"]);
    rejects(Atom, pcp(1, 8, "all"), "only prefill overlaps");
    accepts(Atom, pcp(1, 8, "prefill"));
    rejects(Atom, pcp(4, 4, "prefill"), "8 devices");
    rejects(Atom, pcp(4, 2, "prefill").with("enable_dp_attention", true), "data-parallel attention");
    disables(
        Atom,
        sized(4, 1).with("prefill_context_parallel_size", 2).with("tbo_token_split", true),
        &["tbo_token_split"],
    );
    rejects(Atom, sized(8, 8).with("forced_acceptance", true).with("confidence_schedule", true), "exclude");
}

#[test]
fn vllm_limits_prefill_context_parallelism() {
    let pcp = || sized(4, 1).with("prefill_context_parallel_size", 2);
    accepts(Vllm, pcp());
    accepts(Vllm, pcp().with("decode_context_parallel_size", 8));
    rejects(Vllm, pcp().with("decode_context_parallel_size", 4), "dcp must be 1, pcp or tp·pcp");
    rejects(Vllm, pcp().with("data_parallel_size", 2), "data parallelism");
    rejects(Vllm, pcp().with("world_size", 4), "not pp·tp·pcp = 8");
    rejects(Vllm, pcp().with("supports_pcp", false), "does not support");
    accepts(Vllm, sized(4, 1).with("supports_pcp", false));
    for (name, what) in
        [("lora", "LoRA"), ("encoder_decoder", "encoder-decoder"), ("full_graph", "full graphs")]
    {
        rejects(Vllm, pcp().with(name, true), what);
        accepts(Vllm, sized(4, 1).with(name, true));
    }
    rejects(Vllm, pcp().with("attention", "gqa"), "other than MLA");
    rejects(Vllm, sized(8, 8).with("returns_decode_lse", false), "LSE of decode");
    rejects(Vllm, sized(8, 8).with("dcp_comm_backend", "a2a").with("query_heads", 12), "cannot split");
}

#[test]
fn grouped_query_attention_is_sharded_only_as_far_as_its_kv_heads_are_replicated() {
    let gqa = |tp: i64, dcp: i64, q: i64, kv: i64| sized(tp, dcp).with("query_heads", q).with("kv_heads", kv);
    for rules in [Vllm, VllmAscend] {
        accepts(rules, gqa(8, 2, 64, 4));
        rejects(rules, gqa(8, 4, 64, 4), "gqa-kv-replication");
        rejects(rules, gqa(4, 2, 64, 8), "gqa-kv-replication");
        rejects(rules, gqa(8, 2, 12, 4), "query heads per KV head");
    }
    let draft = gqa(8, 2, 64, 4).with("draft_kv_heads", 8).with("draft_query_heads", 64);
    rejects(VllmAscend, draft, "gqa-kv-replication-of-draft");
}

#[test]
fn ascend_forces_block_interleave_for_sparse_attention_and_asks_for_it_in_transfers() {
    disables(VllmAscend, sized(8, 8).with("sparse", true), &["cp_kv_cache_interleave_size"]);
    rejects(VllmAscend, sized(8, 8).with("kv_transfer", true), "KV transfer needs interleave 16");
    accepts(VllmAscend, sized(8, 8).with("kv_transfer", true).with("cp_kv_cache_interleave_size", 16));
    disables(
        VllmAscend,
        sized(8, 8).with("kv_transfer", true).with("sparse", true),
        &["cp_kv_cache_interleave_size"],
    );
    rejects(VllmAscend, sized(8, 4).with("replicated_indexer", true), "dcp = tp");
    accepts(VllmAscend, sized(8, 8).with("replicated_indexer", true).with("sparse", true));
    rejects(VllmAscend, sized(8, 8).with("sparse_kv_offload", true), "offload");
    accepts(VllmAscend, sized(8, 1).with("sparse_kv_offload", true));
    rejects(VllmAscend, sized(8, 8).with("dynamic_speculation", true), "dynamic speculation");
    rejects(VllmAscend, sized(8, 8).with("runner", "v2"), "runner v2");
    rejects(VllmAscend, sized(4, 1).with("prefill_context_parallel_size", 2), "runner v1");
    let pcp = || sized(4, 1).with("prefill_context_parallel_size", 2).with("runner", "v2");
    accepts(VllmAscend, pcp());
    rejects(VllmAscend, pcp().with("decode_context_parallel_size", 2), "runner-v2-pcp-or-dcp");
    rejects(VllmAscend, pcp().with("kv_transfer", true), "KV transfer needs interleave 16");
    rejects(VllmAscend, pcp().with("sparse_kv_offload", true), "offload");
}

#[test]
fn a_setting_that_nobody_knows_is_unsupported_instead_of_ignored() {
    let answer = engine().validate(Own, &sized(8, 8).with("dcp", 8)).unwrap();
    assert!(matches!(answer, Answer::Unsupported(reason) if reason.contains("\"dcp\"")));
}
