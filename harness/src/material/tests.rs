//! Material of attention cases: variants keep the data that they must keep, and what is expected is plain attention.

use super::*;
use shardcheck_cases::Case;
use shardcheck_engine::CommBackend;
use shardcheck_engine::{Answer, Engine, Tensor};
use shardcheck_formats::Dtype;
use shardcheck_formats::Merge;

use crate::laboratory::{Watched, attend};

const VERIFY: &str =
    "verify/tiny-mla/tp4.dcp2.h2.s2.b8.n14.e4m3fn@0.5.ag_rs.qrep/12+3_0+0_7+2.pad2.shuf/gaussian/7";
const GQA: &str = "decode/tiny-gqa/tp4.dcp4.h2.s4.b8.n8.bf16.a2a.hi_lo/12+1_0+1_30+1.desc/gaussian/7";
const CONTEXT: &str =
    "context/tiny-mla/tp2.dcp2.h2.s4.b8.n10.bf16.ag_rs.lat/12+4_0+3_30+2.shuf.c16/gaussian/7";
const DRAFT: &str = "draft/tiny-mla/tp2.dcp2.h2.s4.b8.n10.bf16.ag_rs/12+4_0+3.shuf/gaussian/7";
const SELECTED: &str = "attend_selected/tiny-mla/tp4.dcp2.h2.s2.b8.n14.e4m3fn@0.5.a2a.hi_lo.lat/12+3_0+0_7+2.pad2.shuf/k4.packed.ragged/gaussian/7";

fn material(id: &str) -> Box<AttentionMaterial> {
    let case: Case = id.parse().unwrap_or_else(|error| panic!("{error}"));
    match Material::of(&case, shardcheck_cpu::engine().profile()) {
        Ok(Material::Attention(material)) => material,
        Ok(_) => panic!("{id} is an attention case"),
        Err(why) => panic!("{why}"),
    }
}

fn values<'a>(tensors: &'a Tensors, name: &str) -> &'a Tensor {
    tensors.get(name).unwrap()
}

/// Bits, because padding rows hold NaN.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Attention of a row and head over the first `tokens` of `keys` [L, K, Dk], in float64 and nothing clever.
fn plain(material: &AttentionMaterial, row: usize, head: usize, tokens: &[usize]) -> (Vec<f64>, f64) {
    let configuration = material.configuration();
    let attention = configuration.attention;
    let (request, _) = material.rows[row].unwrap();
    let kv_head = material.inputs.kv_head(head);
    let (dk, dv, kv_heads) = (attention.qk_dim(), attention.value_dim(), attention.kv_heads());
    let query = material.query(row, head);
    let key = |p: usize, d: usize| f64::from(material.held_keys[request][(p * kv_heads + kv_head) * dk + d]);
    let value = |p: usize, d: usize| match attention.is_mla() {
        true => key(p, d),
        false => f64::from(material.held_values[request][(p * kv_heads + kv_head) * dv + d]),
    };
    let score = |p: usize| {
        let dot: f64 = (0..dk).map(|d| f64::from(query[d]) * key(p, d)).sum();
        dot * f64::from(configuration.softmax_scale)
    };
    let total: f64 = tokens.iter().map(|p| score(*p).exp()).sum();
    let out = (0..dv).map(|d| tokens.iter().map(|p| score(*p).exp() * value(*p, d)).sum::<f64>() / total);
    (out.collect(), total.ln())
}

#[test]
fn what_is_expected_is_plain_attention_within_a_narrow_interval() {
    for id in [GQA, CONTEXT] {
        let material = material(id);
        let expected = material.expected().unwrap();
        let dim = material.configuration().attention.value_dim();
        for row in 0..material.case.workload.query_rows() {
            for head in 0..material.heads() {
                let tokens: Vec<usize> = (0..material.visible_tokens(row)).collect();
                let (out, lse) = plain(&material, row, head, &tokens);
                let state = row * material.heads() + head;
                assert!(expected.lse[state].admits(lse), "{id} row {row} head {head}");
                assert!(!expected.lse[state].admits(lse + 0.01), "{id} row {row} head {head}");
                for d in 0..dim {
                    let (low, high) = expected.out_interval(state * dim + d);
                    let rounded = shardcheck_formats::round(Dtype::Bf16, out[d]);
                    assert!(low <= rounded && rounded <= high, "{id} row {row} head {head} dim {d}");
                    assert!(high - low < 0.1, "{id} row {row} head {head} dim {d}: {low} to {high}");
                }
            }
        }
    }
}

#[test]
fn each_rank_is_expected_to_attend_to_its_own_tokens_and_a_rank_without_any_to_nothing() {
    let material = material(GQA);
    let expected = material.expected().unwrap();
    let mut empty = 0;
    for row in 0..material.rows.len() {
        for rank in 0..4 {
            let tokens: Vec<usize> =
                (0..material.visible_tokens(row)).filter(|p| p / 4 % 4 == rank).collect();
            let allowed = expected.partials[rank].lse[row * material.heads()];
            if tokens.is_empty() {
                empty += 1;
                assert!(allowed.admits(f64::NEG_INFINITY) && !allowed.admits(-1e30));
            } else {
                assert!(allowed.admits(plain(&material, row, 0, &tokens).1), "row {row} rank {rank}");
            }
            assert_eq!(material.local_visible_tokens(row, rank), tokens.len());
        }
    }
    assert!(empty >= 3, "the one token of the second request leaves three ranks without any");
}

#[test]
fn padding_rows_and_empty_requests_are_expected_to_be_zero_with_an_lse_of_minus_infinity() {
    let material = material(VERIFY);
    let expected = material.expected().unwrap();
    let (states, dim) = (expected.lse.len(), expected.out.len() / expected.lse.len());
    let padded = 5 * material.heads()..states;
    assert_eq!(padded.len(), 2 * material.heads());
    for state in padded {
        assert!(expected.lse[state].admits(f64::NEG_INFINITY) && !expected.lse[state].admits(0.0));
        assert_eq!(expected.out_interval(state * dim), (0.0, 0.0));
    }
}

#[test]
fn rows_see_what_their_family_lets_them_see() {
    let verify = material(VERIFY);
    let seen: Vec<usize> = (0..verify.rows.len()).map(|row| verify.visible_tokens(row)).collect();
    assert_eq!(seen, [13, 14, 15, 8, 9, 0, 0]);
    let draft = material(DRAFT);
    let seen: Vec<usize> = (0..draft.rows.len()).map(|row| draft.visible_tokens(row)).collect();
    assert_eq!(seen, [16, 16, 16, 16, 3, 3, 3]);
}

#[test]
fn places_are_told_in_words_that_a_person_can_find() {
    let material = material(VERIFY);
    assert_eq!(material.row_name(3), "request 2 row 0 of 2 (position 7)");
    assert_eq!(material.row_name(6), "padding row 6");
    let axes = [("rank", 4), ("row", 7), ("head", 2), ("dim", 5)];
    let flat = ((3 * 7 + 1) * 2 + 1) * 5 + 4;
    assert_eq!(material.place(flat, &axes), "rank 3, request 0 row 1 of 3 (position 13), head 1, dim 4");
    assert_eq!(material.token_at(14), (0, 14));
    assert_eq!(material.token_at(15), (2, 0));
}

#[test]
fn a_variant_in_another_configuration_keeps_every_number() {
    let material = material(VERIFY);
    let mut case = material.case.clone();
    case.configuration.comm_backend = CommBackend::A2a;
    case.configuration.query_replication = false;
    let other = material.variant(case.clone()).unwrap();
    assert!(bits(&other.inputs.query) == bits(&material.inputs.query));
    assert!(other.held_keys == material.held_keys);
    assert_eq!(other.case, case);
    case.configuration.interleave = 16;
    let Err(Halt::Inconclusive(why)) = material.variant(case) else { panic!("S > B is no configuration") };
    assert!(why.contains("interleave"), "{why}");
}

#[test]
fn a_request_alone_has_the_tokens_and_queries_that_it_has_in_its_batch() {
    let material = material(VERIFY);
    let alone = material.alone(2).unwrap();
    assert_eq!(alone.rows, [Some((0, 0)), Some((0, 1))]);
    assert!(alone.held_keys == [material.held_keys[2].clone()]);
    for (row, in_batch) in [(0, 3), (1, 4)] {
        for head in 0..material.heads() {
            assert_eq!(alone.query(row, head), material.query(in_batch, head));
        }
    }
    let (a, b) = (alone.expected().unwrap(), material.expected().unwrap());
    let dim = a.out.len() / a.lse.len();
    assert_eq!(a.out_interval(dim), b.out_interval((3 * material.heads() + 1) * dim));
}

#[test]
fn another_future_changes_nothing_up_to_the_first_new_row_and_everything_behind_it() {
    let material = material(VERIFY);
    let other = material.with_other_future().unwrap();
    let width = material.configuration().attention.qk_dim();
    for (request, spec) in material.case.workload.requests.iter().enumerate() {
        let (before, after) = (&material.inputs.keys[request], &other.inputs.keys[request]);
        let kept = ((spec.context_tokens + 1) * width).min(before.len());
        assert_eq!(before[..kept], after[..kept]);
        assert!(before[kept..].iter().zip(&after[kept..]).all(|(a, b)| *a == -*b));
    }
    assert!(material.inputs.keys != other.inputs.keys);
    assert!(bits(&material.inputs.query) == bits(&other.inputs.query));
}

#[test]
fn magnified_material_holds_every_key_times_the_factor() {
    let material = material(GQA);
    let large = material.magnified(4.0).unwrap();
    for (small, large) in material.inputs.values.iter().flatten().zip(large.inputs.values.iter().flatten()) {
        assert_eq!(*large, 4.0 * small);
    }
    assert!(bits(&material.inputs.query) == bits(&large.inputs.query));
}

#[test]
fn the_caches_that_the_healthy_engine_writes_are_those_that_the_harness_lays_out() {
    for id in [VERIFY, GQA, CONTEXT, DRAFT] {
        let material = material(id);
        let engine = shardcheck_cpu::engine();
        let (_, mut run) = attend(&Watched::new(&engine), &material).unwrap();
        let mut caches = run.step(&Operation::ReadCache, &Tensors::new()).unwrap().reply;
        assert!(material.caches_are_right(&caches), "{id}");
        let rank = material.ranks() - 1;
        let owned = *material.owned_slots(rank).iter().next().unwrap();
        let shape = material.cache_shape("key_cache");
        let (slots, width) = (shape[1] * shape[2], shape[3] * shape[4]);
        let byte = ((rank * slots + owned) * width) * material.configuration().kv_dtype.size_bytes();
        caches.outputs.get_mut("key_cache").unwrap().bytes_mut()[byte] ^= 1;
        assert!(!material.caches_are_right(&caches), "{id}: one flipped bit of the last rank");
        caches.outputs.remove("key_cache");
        assert!(!material.caches_are_right(&caches), "{id}: no cache at all");
    }
}

#[test]
fn every_token_has_one_owner_in_each_group_and_its_codes_are_those_of_the_format() {
    let material = material(VERIFY);
    let owned: usize = (0..2).map(|rank| material.owned_slots(rank).len()).sum();
    assert_eq!(owned, material.case.workload.total_tokens());
    let codes = material.cache_codes("key_cache", 0);
    let held = material.held_keys(0);
    assert_eq!(codes.len(), held.len());
    let configuration = material.configuration();
    for (code, held) in codes.iter().zip(held) {
        let value = shardcheck_formats::decode(configuration.kv_dtype, *code);
        assert_eq!((value * f64::from(configuration.kv_scale)) as f32, *held);
    }
}

#[test]
fn of_selected_tokens_plain_attention_over_each_set_is_expected_merged_and_per_rank() {
    let material = material(SELECTED);
    let (expected, dim) = (material.expected().unwrap(), material.configuration().attention.value_dim());
    let mut counts = Vec::new();
    for row in 0..material.rows.len() {
        let own: Vec<usize> = material.visible(row).positions().collect();
        counts.push(own.len());
        assert_eq!(material.visible_tokens(row), own.len());
        let of_rank = |rank: usize| own.iter().copied().filter(|p| p / 2 % 2 == rank).collect::<Vec<_>>();
        for head in 0..material.heads() {
            let state = row * material.heads() + head;
            for rank in 0..2 {
                let (own, allowed) = (of_rank(rank), expected.partials[rank].lse[state]);
                assert_eq!(material.local_visible_tokens(row, rank), own.len());
                let lse =
                    if own.is_empty() { f64::NEG_INFINITY } else { plain(&material, row, head, &own).1 };
                assert!(
                    allowed.admits(lse) && !allowed.admits(lse.max(-1e9) + 0.01),
                    "row {row} rank {rank}"
                );
            }
            if own.is_empty() {
                assert!(expected.lse[state].admits(f64::NEG_INFINITY));
                assert_eq!(expected.out_interval(state * dim), (0.0, 0.0));
                continue;
            }
            let (out, lse) = plain(&material, row, head, &own);
            assert!(expected.lse[state].admits(lse) && !expected.lse[state].admits(lse + 0.01));
            for d in 0..dim {
                let (low, high) = expected.out_interval(state * dim + d);
                let rounded = shardcheck_formats::round(Dtype::Bf16, out[d]);
                assert!(low <= rounded && rounded <= high, "row {row} head {head} dim {d}");
            }
        }
    }
    assert_eq!(counts[5..], [0, 0], "padding attends to nothing");
    assert!(counts[..5].iter().any(|count| *count > 1), "{counts:?}");
}

#[test]
fn a_row_that_is_given_a_token_twice_or_one_that_it_does_not_see_is_no_case() {
    let material = material(SELECTED);
    for (own, named) in [(vec![13], "position 13"), (vec![3, 1, 3], "position 3 is listed twice")] {
        let mut inputs = material.inputs.clone();
        inputs.selected[0] = own;
        let Err(Halt::Inconclusive(why)) = material.with_inputs(inputs) else { panic!("{named}") };
        assert!(why.contains("row 0") && why.contains(named), "{why}");
    }
}

#[test]
fn the_context_family_writes_its_context_alone_and_the_others_all_tokens() {
    let context = material(CONTEXT);
    assert_eq!(context.written_tokens().1.iter().filter(|position| **position >= 0).count(), 42);
    assert_eq!(values(&context.step_inputs(), "key").shape()[0], 9, "one key a new row");
    let verify = material(VERIFY);
    let (requests, positions) = verify.written_tokens();
    let real = requests.iter().filter(|request| **request >= 0).count();
    assert_eq!(real, verify.case.workload.total_tokens());
    assert_eq!(positions.len(), requests.len());
}

#[test]
fn the_merge_of_the_contract_follows_the_configured_exchange() {
    let engine = shardcheck_cpu::engine();
    let merge =
        |dtype, backend| contract_for(engine.profile(), Family::Decode, dtype, backend).unwrap().merge;
    for dtype in [Dtype::Bf16, Dtype::F16] {
        assert_eq!(merge(dtype, CommBackend::A2a), Merge::A2a);
    }
    assert_eq!(merge(Dtype::Bf16, CommBackend::AgRs), Merge::AgRsBf16);
    assert_eq!(merge(Dtype::F16, CommBackend::AgRs), Merge::AgRsF16);
    let mut profile = engine.profile().clone();
    let decode = profile.operations.get_mut(&OperationKind::Decode).unwrap();
    decode.contract.as_mut().unwrap().merge = Merge::AgRsF32;
    let exact = contract_for(&profile, Family::Decode, Dtype::Bf16, CommBackend::AgRs).unwrap();
    assert_eq!(exact.merge, Merge::AgRsF32, "sums in 32 bits are kept where they are declared");
    assert!(contract_for(engine.profile(), Family::Layout, Dtype::Bf16, CommBackend::A2a).is_none());
}

#[test]
fn a_case_that_the_engine_does_not_declare_or_declares_too_loosely_has_no_material() {
    let case: Case = GQA.parse().unwrap();
    let mut none = shardcheck_cpu::engine().profile().clone();
    none.operations.clear();
    let why = Material::of(&case, &none).err().unwrap();
    assert!(why.contains("does not declare decode"), "{why}");
    let mut loose = shardcheck_cpu::engine().profile().clone();
    let decode = loose.operations.get_mut(&OperationKind::Decode).unwrap();
    decode.contract.as_mut().unwrap().kexp = 1e6;
    let why = Material::of(&case, &loose).err().unwrap();
    assert!(why.contains("contract of decode") && why.contains("kexp"), "{why}");
}

#[test]
fn coverage_counts_the_rows_with_a_causal_edge_and_the_shards_without_a_token() {
    let coverage = Material::Attention(material(VERIFY)).coverage();
    // 3 + 2 rows, the last of each request masks nothing; three requests on two ranks, one of them empty
    assert_eq!((coverage.rows, coverage.masked_rows), (5, 3));
    assert_eq!((coverage.shards, coverage.empty_shards, coverage.real_heads), (6, 2, false));
    let coverage = Material::Attention(material(GQA)).coverage();
    // 13, 1 and 31 tokens in runs of four: the second request fills one rank of four
    assert_eq!((coverage.rows, coverage.masked_rows), (3, 0));
    assert_eq!((coverage.shards, coverage.empty_shards), (12, 3));
}

#[test]
fn the_width_of_the_exchange_is_read_off_the_partials() {
    let material = material(VERIFY);
    let engine = shardcheck_cpu::engine();
    let Answer::Done(_) = engine.open(material.configuration()).unwrap() else { panic!("it opens") };
    let (mut observed, _) = attend(&Watched::new(&engine), &material).unwrap();
    let attention = material.configuration().attention;
    assert_eq!(material.exchanged_dim(&observed), attention.value_dim());
    observed.reply.outputs.insert("partial_out", Tensor::from_f32(Dtype::F32, &[1, 1, 1, 3], &[0.0; 3]));
    assert_eq!(material.exchanged_dim(&observed), 3);
    observed.reply.outputs.remove("partial_out");
    assert_eq!(material.exchanged_dim(&observed), attention.value_dim());
}
