//! Inputs of attention cases: shapes, values, placement, and what reaches the caches.

use std::collections::HashSet;

use shardcheck_cases::{Case, Inputs, Probe, cache_code, cache_value};
use shardcheck_engine::{Conventions, EmptyPartial, LseBase, NewTokens, ScaleRounding};
use shardcheck_formats::{Dtype, Overflow, round_bf16};

fn conventions() -> Conventions {
    Conventions {
        lse_base: LseBase::E,
        empty_partial: EmptyPartial::Undefined,
        lane_orders: Vec::new(),
        scale_rounding: ScaleRounding::Divide,
        overflow: Overflow::NonFinite,
        new_tokens: NewTokens::OnRanks,
    }
}

fn inputs(id: &str) -> Inputs {
    id.parse::<Case>().unwrap_or_else(|error| panic!("{error}")).inputs().unwrap()
}

const RAGGED: &str = "verify/tiny-mla/tp4.dcp2.h2.s2.b4.bf16.a2a.hi_lo/9+3_0+0_3+2_17+1.pad2.shuf";

#[test]
fn shapes_follow_the_case() {
    let inputs = inputs(&format!("{RAGGED}/gaussian/1"));
    assert_eq!(inputs.query.len(), 8 * 8 * 24);
    assert_eq!(inputs.keys.iter().map(Vec::len).collect::<Vec<_>>(), [12 * 24, 0, 5 * 24, 18 * 24]);
    assert!(inputs.values.iter().all(Vec::is_empty), "the value of MLA is a part of its key");
    assert_eq!(inputs.w_uv.as_ref().unwrap().len(), 8 * 16 * 12);
    let attend = inputs.attend();
    assert_eq!(attend.get("query").unwrap().shape(), [8, 8, 24]);
    assert_eq!(attend.get("seq_lens").unwrap().to_i64(), [12, 0, 5, 18]);
    assert_eq!(attend.get("query_start_loc").unwrap().to_i64(), [0, 3, 3, 5, 6]);
    assert_eq!(attend.get("w_uv").unwrap().shape(), [8, 16, 12]);
    assert_eq!(attend.get("block_table").unwrap().shape(), [4, inputs.width]);
}

#[test]
fn grouped_query_inputs_have_values_of_their_own_and_no_up_projection() {
    let inputs = inputs("decode/tiny-gqa/tp2.dcp2.h2.s1.b4.bf16.a2a.hi_lo/9+1.seq/gaussian/1");
    assert_eq!(inputs.keys[0].len(), 10 * 2 * 16);
    assert_eq!(inputs.values[0].len(), 10 * 2 * 14);
    assert!(inputs.w_uv.is_none() && inputs.attend().find("w_uv").is_none());
    assert_eq!((0..4).map(|head| inputs.kv_head(head)).collect::<Vec<_>>(), [0, 0, 1, 1]);
}

#[test]
fn every_value_of_every_probe_is_exactly_bf16_and_padding_rows_are_nan() {
    for probe in Probe::ALL {
        for model in ["tiny-mla/tp4.dcp4.h2", "tiny-gqa/tp2.dcp2.h3"] {
            let id =
                format!("verify/{model}.s1.b4.e4m3fn@0.02.a2a.hi_lo/9+3_4+2.pad2.shuf/{}/3", probe.name());
            let id = if probe == Probe::TokenCode { id.replace("@0.02", "@0.5") } else { id };
            let inputs = inputs(&id);
            let row = inputs.query.len() / 7;
            let (rows, padding) = inputs.query.split_at(5 * row);
            assert!(padding.iter().all(|value| value.is_nan()), "{id}");
            let tokens = inputs
                .keys
                .iter()
                .chain(&inputs.values)
                .chain(&inputs.stale_keys)
                .chain(&inputs.stale_values);
            let all = rows.iter().chain(tokens.flatten()).chain(inputs.w_uv.iter().flatten());
            for value in all {
                assert!(value.is_finite() && round_bf16(*value) == *value, "{id}: {value}");
            }
        }
    }
}

#[test]
fn everything_of_every_probe_lies_within_the_range_of_every_cache_format() {
    for probe in Probe::ALL {
        for cache in ["e4m3fn@0.02", "e4m3fnuz@0.02", "e4m3fnuz@0.5", "e5m2@0.02", "e4m3fn@0.0078125"] {
            for model in ["tiny-mla", "tiny-gqa"] {
                let id = format!("verify/{model}/tp2.dcp2.h2.s1.b4.{cache}.a2a.hi_lo/30+3.shuf/{probe}/3");
                // signs are exact under powers of two alone; a smaller scale cannot hold ±1 in every format
                if probe == Probe::TokenCode && !cache.ends_with("0.5") {
                    continue;
                }
                let inputs = inputs(&id);
                let configuration = &inputs.case.configuration;
                let largest = configuration.kv_dtype.max_finite() * f64::from(configuration.kv_scale);
                for value in inputs.keys.iter().chain(&inputs.values).chain(&inputs.stale_keys).flatten() {
                    assert!(f64::from(value.abs()) <= largest, "{id}: {value} above {largest}");
                    let held = cache_value(configuration, cache_code(configuration, &conventions(), *value));
                    assert!(held.is_finite(), "{id}: {value} is held as {held}");
                }
            }
        }
    }
}

#[test]
fn equal_arguments_give_equal_bits_and_another_seed_other_ones() {
    let bits = |seed: u64| {
        let inputs = inputs(&format!("{RAGGED}/gaussian/{seed}"));
        let bits: Vec<u32> =
            inputs.query.iter().chain(inputs.keys.iter().flatten()).map(|v| v.to_bits()).collect();
        (bits, inputs.block_table)
    };
    assert_eq!(bits(5), bits(5));
    assert_ne!(bits(5).0, bits(6).0);
    assert_ne!(bits(5).1, bits(6).1, "a shuffled placement is drawn as well");
}

#[test]
fn a_token_keeps_its_value_when_its_request_grows_and_when_the_layout_changes() {
    let short = inputs("decode/tiny-gqa/tp2.dcp2.h2.s1.b4.bf16.a2a.hi_lo/9+1.seq/gaussian/1");
    let long = inputs("decode/tiny-gqa/tp4.dcp4.h1.s4.b8.bf16.ag_rs/25+1_3+1.shuf/gaussian/1");
    assert_eq!(short.keys[0], long.keys[0][..short.keys[0].len()]);
    assert_eq!(short.values[0], long.values[0][..short.values[0].len()]);
}

#[test]
fn block_tables_share_no_block_leave_block_zero_alone_and_end_out_of_range() {
    for placement in ["seq", "shuf", "desc"] {
        let id = format!(
            "verify/tiny-mla/tp4.dcp2.h2.s2.b4.bf16.a2a.hi_lo/9+3_0+0_3+2_17+1_40+1.{placement}/gaussian/1"
        );
        let inputs = inputs(&id);
        let blocks = inputs.case.configuration.blocks;
        let mut used = HashSet::new();
        for (request, row) in inputs.block_table.chunks_exact(inputs.width).enumerate() {
            let needed = inputs.case.workload.requests[request].seq_len().div_ceil(8);
            for (entry, id) in row.iter().enumerate() {
                let in_range = (1..blocks as i32).contains(id);
                assert_eq!(
                    in_range,
                    entry < needed,
                    "{placement}: entry {entry} of request {request} is {id}"
                );
                assert!(!in_range || used.insert(*id), "{placement}: block {id} is given twice");
            }
            assert!(needed < inputs.width, "every row has an entry that nobody needs");
        }
        assert!(used.len() < blocks - 1, "a block stays free");
    }
}

#[test]
fn placements_differ_and_a_descending_one_interleaves_requests() {
    let table = |placement: &str| {
        inputs(&format!("decode/tiny-mla/tp2.dcp2.h2.s1.b4.bf16.a2a.hi_lo/23+1x2.{placement}/gaussian/1"))
            .block_table
    };
    let (sequential, shuffled, descending) = (table("seq"), table("shuf"), table("desc"));
    assert_eq!(sequential[..3], [1, 2, 3]);
    assert_eq!(sequential[4..7], [4, 5, 6]);
    assert_eq!(descending[..3], [8, 6, 4]);
    assert_eq!(descending[4..7], [7, 5, 3]);
    assert_ne!(sequential, shuffled);
}

#[test]
fn out_of_range_ids_are_negative_huge_and_just_beyond_the_cache() {
    let inputs = inputs("decode/tiny-mla/tp2.dcp2.h2.s1.b4.bf16.a2a.hi_lo/23+1_1+1_0+0.seq/gaussian/1");
    let blocks = inputs.case.configuration.blocks as i32;
    for wanted in [-7, i32::MAX / 2, blocks + 3] {
        assert!(inputs.block_table.contains(&wanted), "{wanted} is missing in {:?}", inputs.block_table);
    }
}

#[test]
fn loaded_caches_hold_every_token_once_in_each_group_and_nan_elsewhere() {
    for id in [
        "decode/tiny-gqa/tp4.dcp2.h2.s2.b4.e4m3fn@0.02.a2a.hi_lo/9+1_0+0_16+1.shuf/gaussian/1",
        "decode/tiny-mla/tp3.dcp3.h1.s1.b8.e4m3fnuz@0.5.ag_rs.lat/30+1_3+1.desc/gaussian/1",
        "decode/tiny-mla/tp4.dcp4.h1.s16.b16.bf16.ag_rs.lat/70+1.desc/gaussian/1",
    ] {
        let inputs = inputs(id);
        let c = &inputs.case.configuration;
        let cache = inputs.caches(&conventions());
        let key = cache.get("key_cache").unwrap();
        let dims = c.attention.kv_heads() * c.attention.qk_dim();
        let codes = key.to_f32();
        let filled = codes.chunks_exact(dims).filter(|row| row.iter().all(|value| !value.is_nan())).count();
        let blank = codes.chunks_exact(dims).filter(|row| row.iter().all(|value| value.is_nan())).count();
        assert_eq!(filled, inputs.case.workload.total_tokens() * c.tp / c.dcp, "{id}");
        assert_eq!(filled + blank, c.tp * c.blocks * c.block_size, "{id}: a row is half written");
        assert_eq!(cache.find("value_cache").is_some(), !c.attention.is_mla());
        // and every token lies where the interleave says
        let (s, w, b) = (c.interleave, c.dcp, c.block_size);
        let held = inputs.held_keys(&conventions());
        for (request, keys) in held.iter().enumerate() {
            for (p, row) in keys.chunks_exact(dims).enumerate() {
                let (rank, local) = (p / s % w, p / (s * w) * s + p % s);
                let block = inputs.block_table[request * inputs.width + p / (b * w)] as usize;
                let at = ((rank * c.blocks + block) * b + local % b) * dims;
                let values: Vec<f32> = codes[at..at + dims].iter().map(|code| code * c.kv_scale).collect();
                assert_eq!(values, row, "{id}: position {p} of request {request}");
            }
        }
    }
}

#[test]
fn context_caches_hold_the_context_alone_and_new_tokens_keep_their_bf16_values() {
    let inputs = inputs("context/tiny-gqa/tp2.dcp2.h2.s1.b4.e4m3fn@0.5.a2a.hi_lo/9+3_0+2.seq.c8/gaussian/1");
    let key = inputs.caches(&conventions()).get("key_cache").unwrap().to_f32();
    assert_eq!(key.chunks_exact(2 * 16).filter(|row| !row[0].is_nan()).count(), 9);
    let held = inputs.held_keys(&conventions());
    assert_eq!(held[0][9 * 32..], inputs.keys[0][9 * 32..]);
    assert_ne!(held[0][..9 * 32], inputs.keys[0][..9 * 32], "the context went through the cache");
    let tensors = inputs.attend_context();
    assert_eq!(tensors.get("context_lens").unwrap().to_i64(), [9, 0]);
    assert_eq!(tensors.get("key").unwrap().shape(), [5, 2, 16]);
    assert_eq!(tensors.get("value").unwrap().shape(), [5, 2, 14]);
    assert_eq!(tensors.get("key").unwrap().to_f32()[..3 * 32], inputs.keys[0][9 * 32..]);
}

#[test]
fn written_tokens_are_the_context_and_the_new_rows_with_padding_that_belongs_to_nobody() {
    let inputs = inputs(&format!("{RAGGED}/gaussian/1"));
    let all = inputs.write_kv();
    assert_eq!(all.get("key").unwrap().shape(), [35 + 2, 1, 24]);
    let requests = all.get("requests").unwrap().to_i64();
    assert_eq!(requests[35..], [-1, -1]);
    assert!(all.get("key").unwrap().to_f32()[35 * 24..].iter().all(|value| value.is_nan()));
    let count = |tensors: &shardcheck_engine::Tensors| tensors.get("positions").unwrap().len();
    assert_eq!(count(&inputs.write_context()) + count(&inputs.write_new()), count(&all));
    assert_eq!(inputs.write_new().get("positions").unwrap().to_i64(), [9, 10, 11, 3, 4, 17, 0, 0]);
    assert_eq!(inputs.write_new().get("requests").unwrap().to_i64(), [0, 0, 0, 2, 2, 3, -1, -1]);
}

#[test]
fn a_reciprocal_moves_some_codes_and_a_power_of_two_none() {
    let moved = |scale: &str| {
        let inputs = inputs(&format!(
            "decode/tiny-mla/tp1.dcp1.h1.s1.b64.e4m3fn@{scale}.ag_rs.lat/4000+1.seq/gaussian/1"
        ));
        let reciprocal = Conventions { scale_rounding: ScaleRounding::Reciprocal, ..conventions() };
        let c = &inputs.case.configuration;
        let differs =
            |value: &&f32| cache_code(c, &conventions(), **value) != cache_code(c, &reciprocal, **value);
        inputs.keys[0].iter().filter(differs).count()
    };
    assert_eq!(moved("0.5"), 0);
    // seven eighths of a value midway between two codes is still bf16, and the error of the reciprocal decides it
    assert!(moved("0.875") > 0);
}

#[test]
fn an_overflowing_value_follows_the_declared_policy() {
    let case: Case =
        "decode/tiny-mla/tp1.dcp1.h1.s1.b4.e4m3fn@0.5.ag_rs.lat/4+1.seq/gaussian/1".parse().unwrap();
    let configuration = case.configuration().unwrap();
    let saturating = Conventions { overflow: Overflow::Saturate, ..conventions() };
    assert_eq!(cache_value(&configuration, cache_code(&configuration, &saturating, 1000.0)), 224.0);
    assert!(cache_value(&configuration, cache_code(&configuration, &conventions(), 1000.0)).is_nan());
}

#[test]
fn held_values_of_mla_are_the_first_part_of_its_held_keys() {
    let inputs = inputs("decode/tiny-mla/tp2.dcp2.h1.s1.b4.e5m2@0.25.ag_rs.lat/9+1.seq/gaussian/1");
    let (keys, values) = (inputs.held_keys(&conventions()), inputs.held_values(&conventions()));
    for (key, value) in keys[0].chunks_exact(24).zip(values[0].chunks_exact(16)) {
        assert_eq!(key[..16], *value);
    }
    assert_eq!(values[0].len(), 10 * 16);
}

#[test]
fn a_sixteen_bit_cache_holds_the_drawn_values_themselves() {
    let inputs = inputs("decode/tiny-gqa/tp2.dcp2.h1.s1.b4.bf16.ag_rs/9+1.seq/gaussian/1");
    assert_eq!(inputs.case.configuration.kv_dtype, Dtype::Bf16);
    assert_eq!(inputs.held_keys(&conventions()), inputs.keys);
    assert_eq!(inputs.held_values(&conventions()), inputs.values);
}

#[test]
fn the_same_tokens_can_be_laid_out_for_another_world_size() {
    let inputs = inputs("verify/tiny-mla/tp4.dcp4.h2.s1.b4.bf16.a2a.hi_lo/29+3_5+2.shuf/forbidden-poison/1");
    let single: Case =
        "verify/tiny-mla/tp1.dcp1.h8.s1.b4.n30.bf16.ag_rs/29+3_5+2.shuf/forbidden-poison/1".parse().unwrap();
    let relaid = inputs.relaid(&single.configuration().unwrap(), 9);
    assert_eq!((&relaid.query, &relaid.keys, &relaid.w_uv), (&inputs.query, &inputs.keys, &inputs.w_uv));
    assert_eq!(relaid.width, 32 / 4 + 1);
    // 32 tokens fill their blocks of 4, so that no stale token of the first request has a slot; the second one's has
    assert!(relaid.stale_keys[0].is_empty() && !inputs.stale_keys[1].is_empty());
    assert_eq!(relaid.stale_keys[1].len(), 24);
    let filled = relaid.caches(&conventions()).get("key_cache").unwrap().to_f32();
    assert_eq!(filled.chunks_exact(24).filter(|row| !row[0].is_nan()).count(), 32 + 7 + 1);
}

#[test]
fn hot_writes_reach_beyond_the_cache_format_and_meet_its_edges() {
    for (cache, largest) in [("e4m3fn@0.5", 224.0), ("e4m3fnuz@0.5", 120.0), ("e5m2@0.25", 14336.0)] {
        let inputs =
            inputs(&format!("write/tiny-mla/tp2.dcp2.h1.s1.b8.{cache}.a2a.hi_lo.lat/63+1.seq/hot/1"));
        let configuration = &inputs.case.configuration;
        let keys = &inputs.keys[0];
        let beyond = keys.iter().filter(|value| value.abs() > largest).count() as f64 / keys.len() as f64;
        assert!((0.02..0.2).contains(&beyond), "{cache}: {beyond}");
        let code = |value: f32, overflow| {
            cache_code(configuration, &Conventions { overflow, ..conventions() }, value)
        };
        let differing = keys
            .iter()
            .filter(|value| code(**value, Overflow::Saturate) != code(**value, Overflow::NonFinite))
            .count();
        assert!(differing > keys.len() / 50, "{cache}: {differing} tell the policies apart");
        let firsts: Vec<f32> = keys.chunks_exact(24).map(|key| key[0]).collect();
        assert!(firsts.contains(&largest) && firsts.iter().any(|value| value.to_bits() == 1 << 31));
    }
}
