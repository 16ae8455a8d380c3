//! The published figures on what GSM8K gates can see, recomputed from the formulas.

use shardcheck_gsm8k::statistics::design::{
    CountGate, Design, Errors, drop_of_rare_fault, pairs_for_all_clear, significantly_low,
    smallest_difference, smallest_drop,
};
use shardcheck_gsm8k::statistics::mcnemar;

const N: u64 = 1319;
const HEALTHY: f64 = 0.955;

fn points(share: f64) -> String {
    format!("{:.2}", 100.0 * share)
}

#[test]
fn the_smallest_detectable_drops_of_each_design_are_the_tabulated_ones() {
    let two_sided = Errors { alpha: 0.005, ..Errors::USUAL };
    let table = [
        (Design::Unpaired, Errors::USUAL, "3.38", 45),
        (Design::Unpaired, two_sided, "3.65", 48),
        (Design::Constant, Errors::USUAL, "2.21", 29),
        (Design::Paired { churn: 0.0 }, Errors::USUAL, "0.80", 11),
        (Design::Paired { churn: 0.01 }, Errors::USUAL, "1.60", 21),
        (Design::Paired { churn: 0.01 }, two_sided, "1.74", 23),
        (Design::Paired { churn: 0.02 }, Errors::USUAL, "1.99", 26),
        (Design::Paired { churn: 0.032 }, Errors::USUAL, "2.37", 31),
        (Design::Paired { churn: 0.053 }, Errors::USUAL, "2.86", 38),
    ];
    for (design, errors, expected, samples) in table {
        let drop = smallest_drop(design, N, HEALTHY, errors);
        assert_eq!(points(drop), expected, "{design:?}");
        assert_eq!((drop * N as f64).round(), f64::from(samples), "{design:?}");
    }
}

#[test]
fn the_paired_drop_is_the_one_that_the_exact_test_finds_nine_times_in_ten() {
    for churn in [0.0, 0.01, 0.053] {
        let drop = smallest_drop(Design::Paired { churn }, N, HEALTHY, Errors::USUAL);
        assert!((mcnemar::power(N, churn, drop, 0.01) - 0.9).abs() < 1e-6);
        assert!(mcnemar::power(N, churn, 0.5 * drop, 0.01) < 0.5);
    }
}

#[test]
fn an_all_clear_at_one_point_takes_several_full_runs() {
    let table = [(0.01, 1302, 1), (0.02, 2604, 2), (0.032, 4166, 4), (0.053, 6899, 6)];
    for (churn, pairs, runs) in table {
        let needed = pairs_for_all_clear(churn, 0.01, Errors::USUAL);
        assert_eq!(needed, pairs, "churn {churn}");
        assert_eq!(needed.div_ceil(N), runs, "churn {churn}");
    }
}

#[test]
fn current_gates_let_as_much_garbage_pass_as_is_tabulated() {
    let table = [
        // threshold, questions, healthy accuracy, fails nine times in ten below, garbage share in percent
        (0.90 - 0.08, N, HEALTHY, "0.806", Some("15.6")),
        (0.88 - 0.03, N, 0.877, "0.837", Some("4.5")),
        (0.955 * 0.92, N, HEALTHY, "0.866", Some("9.3")),
        (0.935, 500, HEALTHY, "0.920", Some("3.7")),
        (0.94, N, HEALTHY, "0.931", Some("2.5")),
        (0.64, 256, HEALTHY, "0.600", None),
    ];
    for (threshold, questions, healthy, caught, garbage) in table {
        let gate = CountGate::at_threshold(threshold, questions);
        assert_eq!(format!("{:.3}", gate.accuracy_caught(0.9)), caught, "{threshold}");
        if let Some(garbage) = garbage {
            assert_eq!(format!("{:.1}", 100.0 * gate.garbage_share(healthy, 0.9)), garbage, "{threshold}");
        }
    }
    let false_alarms =
        |threshold, questions| CountGate::at_threshold(threshold, questions).failure_probability(HEALTHY);
    assert_eq!(format!("{:.1}", 100.0 * false_alarms(0.935, 500)), "2.0");
    assert_eq!(format!("{:.1}", 100.0 * false_alarms(0.94, N)), "0.5");
}

#[test]
fn a_threshold_that_is_a_whole_number_of_answers_passes_at_that_number() {
    assert_eq!(CountGate::at_threshold(0.5, 10).least_passing, 5);
    assert_eq!(CountGate::at_threshold(0.94, N).least_passing, 1240);
    assert_eq!(CountGate::at_threshold(0.0, N).failure_probability(0.5), 0.0);
}

#[test]
fn a_significantly_low_count_is_the_last_one_within_the_error_probability() {
    let low = significantly_low(N, HEALTHY, 0.01).unwrap();
    let at = |count| CountGate { questions: N, least_passing: count + 1 }.failure_probability(HEALTHY);
    assert!(at(low) <= 0.01 && at(low + 1) > 0.01, "{low}");
    assert_eq!(significantly_low(3, 0.5, 0.01), None);
}

#[test]
fn acceptance_shifts_of_a_hundredth_of_a_token_are_in_reach() {
    // 55,000 steps with a deviation of 0.56 tokens per step; steps of one request correlate: design effect 3
    let stderr = 0.56 / 55_000f64.sqrt();
    assert_eq!(format!("{stderr:.4}"), "0.0024");
    assert_eq!(format!("{:.3}", smallest_difference(stderr, Errors::USUAL)), "0.012");
    assert_eq!(format!("{:.3}", smallest_difference(stderr * 3f64.sqrt(), Errors::USUAL)), "0.021");
}

#[test]
fn a_rare_fault_hides_in_a_hundred_and_forty_wrong_tokens() {
    let per_step = 1.7e-4 / 0.2;
    let drop = drop_of_rare_fault(HEALTHY, 125.0, per_step, 0.2);
    assert!((drop - 0.02).abs() < 3e-4, "{drop}");
    assert!((per_step * 165_000.0 - 140.0).abs() < 1.0);
}
