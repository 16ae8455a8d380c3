//! Every fault changes what it is said to change.

mod battery;
mod scene;

use std::time::Duration;

use battery::{Seen, Trial, trials};
use shardcheck_cpu::{CpuEngine, Fault, FaultClass, engine, faults};

/// Parts of the battery that a property looks at.
fn parts_of(property: &str) -> Vec<String> {
    let (family, what) = property.split_once('.').unwrap();
    let all = |parts: &[&str], names: &[&str]| -> Vec<String> {
        parts.iter().flat_map(|part| names.iter().map(move |name| format!("{part}.{name}"))).collect()
    };
    const ATTEND: [&str; 3] = ["decode", "verify", "draft"];
    match (family, what) {
        ("layout", "partition") => all(&["layout"], &["slots", "local_lens"]),
        ("layout", "slots" | "slot-bijection") => all(&["layout"], &["slots"]),
        ("layout", "local-lengths") => all(&["layout"], &["local_lens"]),
        ("layout", "row-sum" | "row-lengths") => all(&["layout"], &["row_lens"]),
        ("layout", "draft-lengths") => all(&["layout"], &["draft_lens"]),
        ("layout", "blocks") => all(&["layout"], &["blocks_needed"]),
        ("layout", "units") => all(&["layout"], &["units"]),
        ("layout", "row-mask") => all(&["layout"], &["row_mask"]),
        ("layout", "read-slots") => all(&["layout"], &["read_slots"]),
        ("layout", "sub-pages") => all(&["layout"], &["sub_page_table"]),
        ("write", "overflow") => all(&["write"], &["key_cache", "value_cache"]),
        ("write", "single-writer") => all(&["write"], &["slots"]),
        ("write", _) => all(&["write"], &["key_cache", "value_cache"]),
        ("decode" | "verify" | "draft", "row-lengths") => all(&[family], &["row_lens"]),
        ("decode" | "verify", "query") => all(&[family], &["gathered_query"]),
        ("decode" | "verify" | "draft", "partial-lse") => all(&[family], &["partial_lse"]),
        ("decode" | "verify" | "draft", "partial-output") => all(&[family], &["partial_out"]),
        ("decode" | "verify" | "draft" | "merge" | "states" | "segments" | "context", "output") => {
            all(&[family], &["out"])
        }
        ("decode" | "verify" | "draft" | "merge" | "states" | "segments" | "context", "lse") => {
            all(&[family], &["lse"])
        }
        // the N-way merge against a fold of two-state merges: either may be the one that is wrong
        ("merge", "fold") => all(&["merge", "states"], &["out", "lse"]),
        ("merge" | "states", _) => all(&[family], &["out", "lse"]),
        ("context", "state") => all(&["context"], &["context_out", "context_lse"]),
        ("context", "gather") => all(&["context"], &["gathered_key"]),
        ("context", "chunks") => all(&["context"], &["chunk_lens"]),
        ("pack", "round-trip") => all(&["pack"], &["unpacked"]),
        ("pack", "lanes") => all(&["pack"], &["lanes"]),
        ("lse", "unit") => all(&["unit"], &["lse", "partial_lse"]),
        ("attend", "padding") => all(&ATTEND, &["out", "lse", "row_lens"]),
        ("attend", "collectives") => all(&ATTEND, &["collectives"]),
        ("attend", "given-cache") => all(&["given"], &["out"]),
        ("dispatch", "path") => all(&ATTEND, &["effective"]),
        ("dispatch", "observed") => all(&ATTEND, &["collectives", "partial_out"]),
        ("equal", _) => all(&["decode", "verify", "draft", "context"], &["out"]),
        ("pcp" | "prefill", _) => parts_of_prefill(family, what),
        ("index" | "compress" | "sharing", _) => parts_of_shared_tokens(family, what),
        ("kda", "state" | "gates") => all(&["kda"], &["state"]),
        ("kda", "core" | "window") => all(&["kda"], &[what]),
        ("kda", _) => all(&["kda"], &["out"]),
        ("stack", _) => all(&["stack"], &[part_of_stack(what)]),
        ("acceptance", "statistics") => all(&["acceptance"], &["statistics"]),
        ("acceptance", _) => all(&["acceptance"], &["tokens", "accepted"]),
        ("sparse", "scores") => all(&["sparse"], &["index_scores"]),
        ("sparse", "partition") => all(&["sparse"], &["counts", "slots"]),
        ("sparse", "slots") => all(&["sparse"], &["slots"]),
        ("sparse", "lists") => all(&["sparse"], &["indptr", "slots"]),
        ("sparse", _) => all(&["sparse"], &["topk"]),
        ("selected" | "sinks", what) => parts_of_variants(family, what),
        ("route", "weights") => all(&["route"], &["topk_weights"]),
        ("route", _) | ("moe", "routing") => all(&[family], &["topk_ids", "topk_weights"]),
        ("moe", "slices") => all(&["moe"], &["slice_rows"]),
        ("moe", "counts") => all(&["moe"], &["expert_tokens"]),
        ("moe", _) => all(&["moe"], &["out"]),
        ("rules", _) => all(&["rules"], &["answers"]),
        ("identity", "rows") => all(&["merge", "context"], &["out"]),
        ("inputs", "unchanged") => all(&["attend"], &["inputs"]),
        ("probe", _) => all(&ATTEND, &["out", "lse"]),
        ("statistics", "residual") => all(&["decode", "verify"], &["out"]),
        ("sequence", what) if what.starts_with("group-") => {
            parts_of(&what.replacen("group-", "sequence.", 1))
        }
        ("sequence", "output") => all(&["sequence"], &["out"]),
        ("sequence", "metadata") => all(&["sequence"], &["row_lens", "chunk_lens", "local_lens"]),
        ("sequence", "writers") => all(&["sequence"], &["slots", "key_cache"]),
        ("sequence", "transfer") => all(&["transfer"], &["key_cache"]),
        ("sequence", "untouched") => all(&["sequence"], &["key_cache"]),
        ("sequence", "collectives") => all(&["sequence"], &["collectives"]),
        _ => panic!("no part of the battery shows {property}"),
    }
}

/// What a property of stacks looks at.
fn part_of_stack(property: &str) -> &str {
    match property {
        "embedding" | "residual" => "hidden",
        "norm" => "normed",
        "attention-update" | "feed-forward" | "kda-update" => "update",
        "kda-input" => "kda_channels",
        "kda" => "kda_out",
        "state" => "kda_state",
        "window" => "kda_window",
        "latent-experts" => "latent_sum",
        "latent-norm" => "latent_normed",
        "whole" => "hidden",
        "drafts" => "draft_tokens",
        "speculation" => "accepted_drafts",
        "ranks" | "run" => "tokens",
        "router" => "router_logits",
        "experts" => "topk_ids",
        "pcp-rows" => "rows",
        "gate" => "gated",
        shown => shown,
    }
}

/// Of shared rows: where they are, and what they attend to.
fn parts_of_prefill(family: &str, what: &str) -> Vec<String> {
    let names: &[&str] = match (family, what) {
        ("pcp", "partition" | "order" | "padding" | "balance") | ("prefill", "rows") => &["rows"],
        ("pcp", "positions") => &["positions"],
        (_, "bounds") => &["row_lens"],
        ("pcp", "restore") => &["restore"],
        ("pcp", "writer") => &["kv_writer"],
        ("pcp", "groups") => &["groups"],
        (_, "query") => &["kernel_query"],
        (_, "gather") => &["gathered_key", "gathered_value"],
        (_, "local" | "copies") => &["local_out"],
        (_, "lse") => &["lse"],
        (_, "ranks") => &["gathered_key", "out"],
        _ => &["out"],
    };
    names.iter().map(|name| format!("{family}.{name}")).collect()
}

/// Of an indexer and a compressor of shared rows, and of layers that share a selection.
fn parts_of_shared_tokens(family: &str, what: &str) -> Vec<String> {
    let name = match (family, what) {
        (_, "rows") => "rows",
        ("index", "bounds") => "row_lens",
        ("index", "gather") => "gathered_key",
        ("index", "scores") => "index_scores",
        ("index", "choice" | "padding") => "local_topk",
        ("index", _) => "topk",
        ("sharing", "layers") => "computes",
        ("sharing", "source") => "source",
        ("sharing", _) => "rebuilds",
        (_, "blocks") => "entry_start_loc",
        (_, "visible") => "entry_lens",
        (_, "state") => "new_state_kv",
        _ => "entries",
    };
    vec![format!("{family}.{name}")]
}

/// Parts that show attention with sinks, and over selected tokens.
fn parts_of_variants(family: &str, what: &str) -> Vec<String> {
    let of_sinks: &[&str] = match what {
        "partial-lse" => &["sinks.partial_lse"],
        "partial-output" => &["sinks.partial_out"],
        "lse" => &["sinks.lse"],
        _ => &["sinks.out", "sinks.lse"],
    };
    if family == "sinks" {
        return of_sinks.iter().map(|part| (*part).to_owned()).collect();
    }
    let parts: &[&str] = match what {
        "lists" => &["selected.counts", "selected.indptr", "selected.slots"],
        "partial-lse" => &["selected.partial_lse"],
        "partial-output" => &["selected.partial_out"],
        "query" => &["selected.gathered_query"],
        "lse" => &["selected.lse"],
        "shared" => &["shared.out"],
        _ => &["selected.out"],
    };
    parts.iter().map(|part| (*part).to_owned()).collect()
}

/// The battery, and what the healthy engine shows in each of its trials.
fn healthy() -> Vec<(Trial, Seen)> {
    let healthy = engine();
    let with_seen = |trial: Trial| {
        let seen = trial.observe(&healthy);
        (trial, seen)
    };
    trials().into_iter().map(with_seen).collect()
}

#[test]
fn every_fault_changes_each_part_that_its_properties_look_at() {
    let battery = healthy();
    let (even, odd): (Vec<_>, Vec<_>) = faults().iter().enumerate().partition(|(index, _)| index % 2 == 0);
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let battery = &battery;
        let halves = [even, odd].map(|half| {
            scope.spawn(move || half.into_iter().flat_map(|(_, fault)| unseen(battery, fault)).collect())
        });
        halves.into_iter().flat_map(|half| -> Vec<String> { half.join().unwrap() }).collect()
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Properties that name a fault of which they could see nothing.
fn unseen(battery: &[(Trial, Seen)], fault: &'static Fault) -> Vec<String> {
    // a fault that hangs is waited for; all others must never come near the limit
    let limit = if fault.class == FaultClass::Hang { 20 } else { 60_000 };
    let faulty = CpuEngine::with_fault(fault).with_timeout(Duration::from_millis(limit));
    let mut blind: Vec<(&str, Vec<String>)> =
        fault.killed_by.iter().map(|property| (*property, parts_of(property))).collect();
    for (property, parts) in &blind {
        let shown = |part: &String| battery.iter().any(|(_, healthy)| healthy.contains_key(part));
        assert!(parts.iter().all(shown), "the battery does not show what {property} looks at");
    }
    for (trial, healthy) in battery {
        // what no blind property looks at need not be tried
        if !blind.iter().any(|(_, parts)| parts.iter().any(|part| healthy.contains_key(part))) {
            continue;
        }
        let seen = trial.observe(&faulty);
        let differs = |part: &String| healthy.contains_key(part) && healthy.get(part) != seen.get(part);
        blind.retain(|(_, parts)| !parts.iter().any(differs));
    }
    blind.into_iter().map(|(property, _)| format!("{} does not change {property}", fault.name)).collect()
}

#[test]
fn the_healthy_engine_shows_the_same_twice() {
    let again = engine();
    for (trial, seen) in healthy() {
        assert_eq!(trial.observe(&again), seen);
    }
}

#[test]
fn faults_that_are_not_of_class_hang_never_time_out() {
    // the names of those that do are what the class says
    let hanging: Vec<_> = faults().iter().filter(|f| f.class == FaultClass::Hang).map(|f| f.name).collect();
    assert_eq!(
        hanging,
        [
            "one-rank-skips-the-query-gather",
            "one-rank-skips-the-lse-gather",
            "rank-without-context-skips-the-gather",
            "one-rank-keeps-out-of-the-gather-of-a-larger-step"
        ]
    );
}
