//! Every probe does what it says, on the values that the engine really holds.

use shardcheck_cases::{Case, Family, Inputs};
use shardcheck_engine::{Conventions, EmptyPartial, LseBase, NewTokens, ScaleRounding};
use shardcheck_formats::Overflow;

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

/// Configurations that a probe is tried on: both kinds of attention, 16- and 8-bit caches, scales that are powers of two and not.
const CONFIGURATIONS: [&str; 6] = [
    "tiny-mla/tp4.dcp4.h2.s1.b4.bf16.a2a.hi_lo.lat",
    "tiny-mla/tp2.dcp2.h2.s2.b8.e4m3fn@0.02.a2a.hi_lo.lat",
    "tiny-gqa/tp2.dcp2.h3.s1.b8.e4m3fnuz@0.02.a2a.hi_lo",
    "tiny-mla/tp3.dcp3.h1.s1.b4.e5m2@0.02.ag_rs.lat",
    "tiny-mha/tp4.dcp2.h1.s4.b4.e4m3fn@0.5.ag_rs",
    "tiny-gqa/tp8.dcp8.h1.s1.b4.bf16.ag_rs",
];

/// One row of one head: the scores of all tokens that exist, visible ones first, and the values of the visible ones.
struct Row {
    label: String,
    request: usize,
    row: usize,
    kv_head: usize,
    visible: usize,
    scores: Vec<f64>,
    values: Vec<Vec<f64>>,
}

impl Row {
    fn weights(&self) -> Vec<f64> {
        let max = self.scores[..self.visible].iter().copied().fold(f64::MIN, f64::max);
        let exps: Vec<f64> = self.scores[..self.visible].iter().map(|score| (score - max).exp()).collect();
        let sum: f64 = exps.iter().sum();
        exps.iter().map(|exp| exp / sum).collect()
    }

    fn output(&self) -> Vec<f64> {
        let weights = self.weights();
        (0..self.values[0].len())
            .map(|d| weights.iter().zip(&self.values).map(|(p, v)| p * v[d]).sum())
            .collect()
    }
}

fn scores(inputs: &Inputs, query: &[f32], keys: &[f32], kv_head: usize) -> Vec<f64> {
    let attention = inputs.case.configuration.attention;
    let scale = f64::from(inputs.case.configuration.softmax_scale);
    keys.chunks_exact(attention.kv_heads() * attention.qk_dim())
        .map(|token| {
            let key = &token[kv_head * attention.qk_dim()..][..attention.qk_dim()];
            scale * query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>()
        })
        .collect()
}

/// Every row of every head of a case.
fn rows(id: &str) -> (Inputs, Vec<Row>) {
    let inputs = id.parse::<Case>().unwrap_or_else(|error| panic!("{error}")).inputs().unwrap();
    let configuration = &inputs.case.configuration;
    let (heads, dim) = (configuration.total_heads(), configuration.attention.qk_dim());
    let value_dim = configuration.attention.value_dim();
    let (keys, values) = (inputs.held_keys(&conventions()), inputs.held_values(&conventions()));
    let mut rows = Vec::new();
    for (index, place) in inputs.case.workload.rows().into_iter().enumerate() {
        let Some((request, row)) = place else { continue };
        for head in 0..heads {
            let kv_head = inputs.kv_head(head);
            let query = &inputs.query[(index * heads + head) * dim..][..dim];
            let visible = inputs.visible_tokens(request, row);
            let values = values[request]
                .chunks_exact(configuration.attention.kv_heads() * value_dim)
                .map(|token| {
                    token[kv_head * value_dim..][..value_dim].iter().map(|v| f64::from(*v)).collect()
                })
                .take(visible)
                .collect();
            let label = format!("{id} request {request} row {row} head {head}");
            let scores = scores(&inputs, query, &keys[request], kv_head);
            rows.push(Row { label, request, row, kv_head, visible, scores, values });
        }
    }
    (inputs, rows)
}

fn all(family: Family, workload: &str, probe: &str) -> Vec<(Inputs, Vec<Row>)> {
    let id = |configuration: &str| {
        let configuration = if probe == "token-code" {
            configuration.replace("@0.02", "@0.5")
        } else {
            configuration.to_owned()
        };
        format!("{family}/{configuration}/{workload}/{probe}/11")
    };
    CONFIGURATIONS.iter().map(|configuration| rows(&id(configuration))).collect()
}

fn deviation(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let count = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / count;
    (mean, (values.map(|value| (value - mean).powi(2)).sum::<f64>() / count).sqrt())
}

#[test]
fn gaussian_scores_have_unit_deviation_and_values_have_zero_mean() {
    for (_, rows) in all(Family::Decode, "127+1_60+1.seq", "gaussian") {
        let scores = || rows.iter().flat_map(|row| row.scores.iter().copied());
        let (mean, std) = deviation(scores().collect::<Vec<_>>().into_iter());
        assert!((0.5..1.6).contains(&std) && mean.abs() < 0.3, "{}: {mean} ± {std}", rows[0].label);
        let longest = &rows[0];
        for d in 0..longest.values[0].len() {
            let (mean, std) = deviation(longest.values.iter().map(|value| value[d]));
            assert!(
                std > 0.2 && mean.abs() < 4.5 * std / (longest.visible as f64).sqrt(),
                "dim {d}: {mean} ± {std}"
            );
        }
    }
}

#[test]
fn newest_dominant_puts_most_weight_on_the_newest_visible_key_of_every_causal_row() {
    for (_, rows) in all(Family::Verify, "127+5_0+3_6+4.seq", "newest-dominant") {
        for row in rows {
            let weights = row.weights();
            assert!(weights[row.visible - 1] > 0.75, "{}: {}", row.label, weights[row.visible - 1]);
        }
    }
}

#[test]
fn newest_dominant_follows_long_prefills_row_by_row() {
    for (_, rows) in all(Family::Context, "40+27.seq.c9", "newest-dominant") {
        for row in rows {
            assert!(row.weights()[row.visible - 1] > 0.75, "{}", row.label);
        }
    }
}

#[test]
fn in_a_draft_block_the_newest_key_of_the_block_dominates_every_row() {
    for (_, rows) in all(Family::Draft, "60+4_0+5.seq", "newest-dominant") {
        for row in rows {
            assert_eq!(row.visible, row.scores.len());
            assert!(row.weights()[row.visible - 1] > 0.75, "{}", row.label);
        }
    }
}

#[test]
fn a_wrong_causal_edge_moves_a_newest_dominant_output_by_the_size_of_a_value() {
    for (_, rows) in all(Family::Verify, "61+3.seq", "newest-dominant") {
        for row in rows {
            let whole = row.output();
            let short =
                Row { visible: row.visible - 1, values: row.values[..row.visible - 1].to_vec(), ..row };
            let moved = short.output().iter().zip(&whole).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
            let size = whole.iter().map(|v| v * v).sum::<f64>().sqrt();
            assert!(moved > 0.4 * size, "{}: moved {moved} of {size}", short.label);
        }
    }
}

#[test]
fn the_first_forbidden_key_of_a_causal_row_outscores_all_that_it_sees_and_carries_a_huge_value() {
    for (inputs, rows) in all(Family::Verify, "40+5_0+3_7+2.seq", "forbidden-poison") {
        let values = inputs.held_values(&conventions());
        let width = values[0].len() / inputs.case.workload.requests[0].seq_len();
        let value_dim = inputs.case.configuration.attention.value_dim();
        let typical = deviation(values[0][..20 * width].iter().map(|v| f64::from(*v))).1;
        let mut forbidden = 0;
        for row in rows.iter().filter(|row| row.visible < row.scores.len()) {
            let highest = row.scores[..row.visible].iter().copied().fold(f64::MIN, f64::max);
            assert!(
                row.scores[row.visible] > highest + 10.0,
                "{}: {} against {highest}",
                row.label,
                row.scores[row.visible]
            );
            let value = &values[row.request][row.visible * width + row.kv_head * value_dim..][..value_dim];
            let largest = value.iter().map(|value| value.abs()).fold(0.0, f32::max);
            assert!(f64::from(largest) > 3.0 * typical, "{}: value {largest}, others {typical}", row.label);
            forbidden += 1;
        }
        assert!(forbidden > 0);
    }
}

#[test]
fn rows_beyond_the_steering_elements_are_poisoned_on_a_higher_level_and_with_the_other_sign() {
    // six elements of tiny-mha steer, eight of tiny-gqa and tiny-mla
    for (inputs, rows) in all(Family::Context, "20+15.seq.c9", "forbidden-poison") {
        let values = inputs.held_values(&conventions());
        let width = values[0].len() / 35;
        let mut shared = 0;
        for row in rows.iter().filter(|row| row.visible < 35) {
            let mut order: Vec<usize> = (0..=row.visible).collect();
            order.sort_by(|a, b| row.scores[*b].total_cmp(&row.scores[*a]));
            assert_eq!(order[0], row.visible, "{}", row.label);
            let (first, second) = (row.scores[order[0]], row.scores[order[1]]);
            assert!(first > second + 10.0, "{}: {first} against {second}", row.label);
            if second > 10.0 {
                // the visible poison of a lower level, which must not look like its own
                assert!(values[0][order[0] * width] != values[0][order[1] * width], "{}", row.label);
                shared += 1;
            }
        }
        assert!(shared > 0);
    }
}

#[test]
fn later_rows_do_see_the_key_that_was_forbidden_and_it_does_not_dominate_them() {
    for (_, rows) in all(Family::Verify, "40+5.seq", "forbidden-poison") {
        for row in rows.iter().filter(|row| row.row >= 1) {
            let seen = &row.scores[41..row.visible];
            assert_eq!(seen.len(), row.row);
            assert!(seen.iter().all(|score| score.abs() < 6.0), "{}: {seen:?}", row.label);
        }
    }
}

#[test]
fn stale_slots_behind_a_request_outscore_all_that_its_rows_see() {
    for family in [Family::Decode, Family::Verify, Family::Draft] {
        let workload = if family == Family::Decode { "40+1_6+1.seq" } else { "40+3_6+2.seq" };
        for (inputs, rows) in all(family, workload, "forbidden-poison") {
            let dim = inputs.case.configuration.attention.qk_dim();
            assert!(inputs.stale_keys.iter().any(|keys| !keys.is_empty()), "{}", rows[0].label);
            for (index, row) in rows.iter().enumerate() {
                let query = &inputs.query[index * dim..][..dim];
                let highest = row.scores[..row.visible].iter().copied().fold(f64::MIN, f64::max);
                for score in scores(&inputs, query, &inputs.stale_keys[row.request], row.kv_head) {
                    assert!(score > highest + 10.0, "{}: {score} against {highest}", row.label);
                }
            }
            let stale = inputs.write_stale().unwrap();
            let positions = stale.get("positions").unwrap().to_i64();
            let requests = stale.get("requests").unwrap().to_i64();
            for (position, request) in positions.iter().zip(requests) {
                assert!(*position >= inputs.case.workload.requests[request as usize].seq_len() as i64);
            }
        }
    }
}

#[test]
fn a_draft_block_forbids_no_key_of_its_own() {
    for (_, rows) in all(Family::Draft, "40+4.seq", "forbidden-poison") {
        for row in rows {
            assert!(row.scores.iter().all(|score| score.abs() < 6.0), "{}", row.label);
        }
    }
}

#[test]
fn only_the_poison_probe_leaves_stale_tokens() {
    for probe in shardcheck_cases::Probe::ALL {
        let id = format!("decode/tiny-mla/tp2.dcp2.h1.s1.b8.bf16.a2a.hi_lo.lat/9+1.seq/{probe}/3");
        let inputs = id.parse::<Case>().unwrap().inputs().unwrap();
        assert_eq!(
            inputs.write_stale().is_some(),
            probe == shardcheck_cases::Probe::ForbiddenPoison,
            "{probe}"
        );
    }
}

#[test]
fn all_cold_scores_lie_below_minus_twenty() {
    for (_, rows) in all(Family::Verify, "97+3_0+2.seq", "cold") {
        for row in rows {
            assert!(row.scores.iter().all(|score| *score < -20.0), "{}", row.label);
        }
    }
}

#[test]
fn all_hot_scores_overflow_an_unshifted_exponential() {
    for (_, rows) in all(Family::Verify, "97+3_0+2.seq", "hot") {
        for row in rows {
            assert!(row.scores.iter().all(|score| *score > f64::from(f32::MAX.ln())), "{}", row.label);
        }
    }
}

#[test]
fn position_zero_takes_most_of_the_weight_of_a_sink() {
    for (_, rows) in all(Family::Verify, "127+3_5+2.seq", "sink") {
        for row in rows {
            assert!(row.weights()[0] > 0.9, "{}: {}", row.label, row.weights()[0]);
        }
    }
}

#[test]
fn common_mode_keys_and_values_share_a_part_larger_than_their_spread() {
    for (_, rows) in all(Family::Decode, "127+1.seq", "common-mode") {
        for row in &rows {
            for d in 0..row.values[0].len() {
                let (mean, std) = deviation(row.values.iter().map(|value| value[d]));
                assert!(mean.abs() > 2.5 * std && std > 0.1, "{} dim {d}: {mean} ± {std}", row.label);
            }
        }
        let shift = rows.iter().map(|row| deviation(row.scores.iter().copied()).0.abs()).fold(0.0, f64::max);
        let within = deviation(rows[0].scores.iter().copied()).1;
        assert!(shift > 1.5 * within, "scores shift by {shift} and vary by {within} within a head");
    }
}

#[test]
fn cancelling_values_leave_an_output_that_is_nearly_nothing() {
    for (_, rows) in all(Family::Decode, "95+1.seq", "cancellation") {
        for row in rows {
            let largest = row.output().iter().map(|value| value.abs()).fold(0.0, f64::max);
            assert!(row.visible % 2 == 0 && largest < 1e-9, "{}: {largest}", row.label);
        }
    }
}

#[test]
fn cancelling_queries_have_scores_far_below_the_magnitudes_that_they_sum() {
    for (inputs, rows) in all(Family::Decode, "95+1.seq", "cancellation") {
        let configuration = &inputs.case.configuration;
        let (dim, scale) = (configuration.attention.qk_dim(), f64::from(configuration.softmax_scale));
        let held = inputs.held_keys(&conventions());
        for (index, row) in rows.iter().enumerate() {
            let query = &inputs.query[index * dim..][..dim];
            let key = &held[0][row.kv_head * dim..][..dim];
            let magnitudes: f64 = query.iter().zip(key).map(|(q, k)| scale * f64::from((q * k).abs())).sum();
            assert!(row.scores[0].abs() < 6.0, "{}", row.label);
            assert!(magnitudes > 3.0 * row.scores[0].abs(), "{}: {magnitudes}", row.label);
        }
        let mean = rows
            .iter()
            .map(|row| row.scores.iter().map(|score| score.abs()).fold(0.0, f64::max))
            .sum::<f64>();
        assert!(mean / (rows.len() as f64) < 5.0);
    }
}

#[test]
fn token_code_scores_are_all_equal_and_outputs_are_sums_of_signs() {
    for (inputs, rows) in all(Family::Verify, "40+3_6+2.seq", "token-code") {
        let code = inputs.token_code();
        for row in rows {
            assert!(row.scores.iter().all(|score| *score == 0.0), "{}", row.label);
            for (d, out) in row.output().iter().enumerate() {
                let sum: f32 = (0..row.visible).map(|position| code.sign(d, position)).sum();
                assert!((out * row.visible as f64 - f64::from(sum)).abs() < 1e-9, "{} dim {d}", row.label);
            }
        }
    }
}

#[test]
fn a_lost_token_can_be_read_back_from_a_token_code_output() {
    let (inputs, rows) = rows("decode/tiny-mla/tp4.dcp4.h1.s2.b8.bf16.a2a.hi_lo.lat/60+1.seq/token-code/5");
    let code = inputs.token_code();
    assert!(code.is_complete(), "16 dimensions spell 61 tokens over 4 ranks");
    for lost in 0..61 {
        let signs: Vec<f32> = (0..code.dims())
            .map(|d| {
                (0..61).filter(|p| *p != lost).map(|p| code.sign(d, p)).sum::<f32>()
                    - (0..61).map(|p| code.sign(d, p)).sum::<f32>()
            })
            .collect();
        assert_eq!(code.position(&signs, 61), Some(lost));
    }
    assert_eq!(rows[0].visible, 61);
}

#[test]
fn the_up_projection_of_the_token_code_keeps_the_first_signs() {
    let case: Case = "decode/tiny-mla/tp2.dcp2.h1.s1.b8.bf16.a2a.hi_lo/9+1.seq/token-code/5".parse().unwrap();
    let inputs = case.inputs().unwrap();
    for head in inputs.w_uv.unwrap().chunks_exact(16 * 12) {
        for (index, weight) in head.iter().enumerate() {
            assert_eq!(*weight, f32::from(u8::from(index / 12 == index % 12)));
        }
    }
}

#[test]
fn probes_hold_at_the_widths_of_a_real_model() {
    for probe in ["newest-dominant", "forbidden-poison", "cold", "hot", "sink"] {
        let (_, rows) =
            rows(&format!("verify/kimi-k3/tp8.dcp8.h1.s1.b16.e4m3fn@0.02.a2a.lo_hi.lat/60+3.seq/{probe}/5"));
        for row in rows {
            let weights = row.weights();
            match probe {
                "newest-dominant" => assert!(weights[row.visible - 1] > 0.75, "{}", row.label),
                "forbidden-poison" if row.visible < row.scores.len() => {
                    let highest = row.scores[..row.visible].iter().copied().fold(f64::MIN, f64::max);
                    assert!(row.scores[row.visible] > highest + 10.0, "{}", row.label);
                }
                "cold" => assert!(row.scores.iter().all(|score| *score < -20.0), "{}", row.label),
                "hot" => assert!(row.scores.iter().all(|score| *score > 88.73), "{}", row.label),
                "sink" => assert!(weights[0] > 0.9, "{}", row.label),
                _ => {}
            }
        }
    }
}
