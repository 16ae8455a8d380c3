//! The scores printed in the announcements of DCP and speculative decoding, recomputed from counts.

use shardcheck_gsm8k::score::{Score, counts_printed_as};

const N: u64 = 1319;

#[test]
fn ten_digit_scores_and_error_bars_come_out_to_every_digit() {
    let printed = [
        (1268, "0.9613343442", "0.0053105832"), // vLLM #51705, target only, both filters
        (1270, "0.9628506444", "0.0052095163"), // vLLM #51705 with #54546, strict
        (1271, "0.9636087945", "0.0051581135"), // the same run, flexible
    ];
    for (correct, mean, stderr) in printed {
        let score = Score { correct, total: N };
        assert_eq!(format!("{:.10}", score.mean()), mean);
        assert_eq!(format!("{:.10}", score.stderr()), stderr);
        assert_eq!(counts_printed_as(mean, N), [correct]);
    }
}

#[test]
fn the_full_precision_of_lm_eval_is_met_to_twelve_digits() {
    let score = Score { correct: 1268, total: N };
    assert!((score.mean() - 0.9613343442001516).abs() < 1e-12);
    assert!((score.stderr() - 0.005310583162098114).abs() < 1e-12);
}

#[test]
fn four_digit_tables_have_one_count_each_and_consistent_error_bars() {
    let printed = [
        ("0.9606", "0.0054", 1267), // vLLM #52188, Kimi-K3 with DSpark, three back ends
        ("0.9613", "0.0053", 1268),
        ("0.9621", "0.0053", 1269),
    ];
    for (mean, stderr, correct) in printed {
        assert_eq!(counts_printed_as(mean, N), [correct]);
        assert_eq!(format!("{:.4}", Score { correct, total: N }.stderr()), stderr);
    }
}

#[test]
fn scores_printed_without_error_bars_are_possible_counts() {
    // ATOM's context-parallel guide: Kimi-K3, Kimi-K3 with DSpark, GLM-5.2 flexible and strict
    for (mean, correct) in [("0.9553", 1260), ("0.9522", 1256), ("0.9689", 1278), ("0.9666", 1275)] {
        assert_eq!(counts_printed_as(mean, N), [correct]);
    }
}

#[test]
fn the_gap_between_two_published_runs_is_three_questions_and_far_inside_the_noise() {
    use shardcheck_gsm8k::statistics::paired::PairCounts;
    // 1,268 against 1,271 at a churn of 2 %: 26 discordant pairs, 12 one way and 15 the other at most
    let pairs = PairCounts { both_right: 1256, only_a: 12, only_b: 15, both_wrong: 36 };
    assert_eq!(pairs.total(), N);
    assert!(pairs.p_value() > 0.5, "{}", pairs.p_value());
}
