//! The reasons for a verdict on log-probabilities, in words with figures: signs of a fault, doubts, remarks.

use std::collections::BTreeMap;

use super::judge::{CHURN_FACTOR, JudgeInput, LEAST_LIMIT, RouteFigures};
use super::probe::{Position, ProbeResult, Route};

/// A length stands out when all its prompts have this many times the usual root mean square.
const STANDS_OUT: f64 = 6.0;
/// Positions of a prompt on a route that make a root mean square worth comparing.
const LEAST_POSITIONS: u32 = 4;
/// A shift of the mean by this many standard errors is systematic.
const SYSTEMATIC_Z: f64 = 5.0;
/// Smallest systematic shift that counts as a fault, in log-odds.
const LEAST_SYSTEMATIC: f64 = 0.01;
/// Noise of this width is more than 32-bit arithmetic makes of another order of summation.
const WIDE_FOR_F32: f64 = 1e-4;
/// Noise of this width is more than 16-bit arithmetic usually makes.
const WIDE_FOR_BF16: f64 = 0.15;

/// Every sign of a fault, in words.
pub(super) fn faults(
    results: &[ProbeResult],
    lengths: &[u64],
    routes: &[RouteFigures],
    bad: &[&Position],
    input: JudgeInput,
) -> Vec<String> {
    let mut faults = Vec::new();
    let failed: Vec<String> = results
        .iter()
        .zip(lengths)
        .filter_map(|(result, length)| Some(format!("{length} tokens: {}", result.b_failed.as_ref()?)))
        .collect();
    if !failed.is_empty() {
        faults.push(format!("B failed where A answered, {} times; first at {}", failed.len(), failed[0]));
    }
    // one position just beyond the limit is no proof, two or one far beyond are
    let far = bad.iter().filter(|position| position.shift.abs() > input.cap).count();
    if bad.len() >= 2 || far >= 1 {
        let worst = bad[0];
        faults.push(format!(
            "{} positions shifted by more than noise; worst {:+.4} in log-odds ({:.4} in A, {:.4} in B) at a context of {} \
             tokens, {}",
            bad.len(),
            worst.shift,
            worst.logprob_a,
            worst.logprob_b,
            worst.context_tokens,
            worst.route
        ));
    }
    for figures in routes {
        if let Some(most) = input.max_noise.filter(|most| figures.noise > *most) {
            faults.push(format!(
                "{}: the noise is {:.6} wide in log-odds, at most {most} is legitimate; {}",
                figures.route,
                figures.noise,
                noisy_lengths(results, lengths, figures.route, most)
            ));
        }
        if figures.flips > 0 && figures.largest_flip_margin > figures.limit {
            faults.push(format!(
                "{}: the best token changed although A preferred it by {:.4}; noise changes it below {:.4} only",
                figures.route, figures.largest_flip_margin, figures.limit
            ));
        }
        let floor = LEAST_SYSTEMATIC.max(0.5 * figures.noise);
        if figures.z.abs() > SYSTEMATIC_Z && figures.mean.abs() > floor {
            faults.push(format!(
                "{}: B is {} sure of the text throughout: mean shift {:+.4} in log-odds, {:.1} standard errors",
                figures.route,
                if figures.mean > 0.0 { "less" } else { "more" },
                figures.mean,
                figures.z.abs()
            ));
        }
    }
    faults.extend(Route::ALL.iter().filter_map(|route| standing_out(results, lengths, *route)));
    faults
}

/// What a reader should know although it decides nothing.
pub(super) fn notes(
    routes: &[RouteFigures],
    largest_repeated: Option<f64>,
    input: JudgeInput,
) -> Vec<String> {
    let widest = routes.iter().map(|figures| figures.noise).fold(0.0, f64::max);
    let like_16_bit = widest > WIDE_FOR_F32 && widest <= WIDE_FOR_BF16;
    if largest_repeated == Some(0.0) && like_16_bit && input.max_noise.is_none() {
        return vec![format!(
            "A repeats itself exactly, yet B differs everywhere, {widest:.4} wide in log-odds: usual for 16-bit arithmetic, \
             too much for 32-bit; an error of that size everywhere looks the same, and --max-noise decides it"
        )];
    }
    Vec::new()
}

/// Root mean square of a prompt's shifts on one route; `None` where there are too few positions.
fn root_mean_square(result: &ProbeResult, route: Route) -> Option<f64> {
    let mine = result.positions.iter().filter(|position| position.route == route);
    let (count, squares) =
        mine.fold((0, 0.0), |(count, sum), position| (count + 1, sum + position.shift * position.shift));
    (count >= LEAST_POSITIONS).then(|| (squares / f64::from(count)).sqrt())
}

/// Which of the probed lengths are noisier than is legitimate, in words.
fn noisy_lengths(results: &[ProbeResult], lengths: &[u64], route: Route, most: f64) -> String {
    let measured: Vec<(u64, f64)> = lengths
        .iter()
        .zip(results)
        .filter_map(|(length, result)| Some((*length, root_mean_square(result, route)?)))
        .collect();
    let noisy: Vec<u64> = measured.iter().filter(|(_, rms)| *rms > most).map(|(length, _)| *length).collect();
    match noisy.iter().min() {
        Some(shortest) => format!(
            "so it is with {} of {} prompts, from {shortest} tokens on (the shortest probed has {})",
            noisy.len(),
            measured.len(),
            measured.iter().map(|(length, _)| *length).min().unwrap_or_default()
        ),
        None => "no prompt shows it by itself".to_owned(),
    }
}

/// Lengths whose every prompt is noisier than the rest by far, on one route.
fn standing_out(results: &[ProbeResult], lengths: &[u64], route: Route) -> Option<String> {
    let rms = |result: &ProbeResult| root_mean_square(result, route);
    let mut by_length: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for (length, rms) in lengths.iter().zip(results.iter().map(rms)) {
        by_length.entry(*length).or_default().extend(rms);
    }
    let mut all: Vec<f64> = by_length.values().flatten().copied().collect();
    all.sort_by(f64::total_cmp);
    let usual = *all.get(all.len() / 2)?;
    let limit = (STANDS_OUT * usual).max(0.1 * LEAST_LIMIT);
    let loud: Vec<String> = by_length
        .iter()
        .filter(|(_, values)| values.len() >= 2 && values.iter().all(|value| *value > limit))
        .map(|(length, _)| length.to_string())
        .collect();
    (!loud.is_empty()).then(|| {
        format!(
            "{route}: prompts of {} tokens differ more than {STANDS_OUT} times as much as the others, each time",
            loud.join(", ")
        )
    })
}

/// Every reason why the absence of a fault proves little.
pub(super) fn doubts(
    results: &[ProbeResult],
    routes: &[RouteFigures],
    bad: &[&Position],
    recalled: f64,
    ranks_without_needle: &[u64],
    largest_repeated: Option<f64>,
    input: JudgeInput,
) -> Vec<String> {
    let mut doubts = Vec::new();
    if let Some(position) = bad.first() {
        doubts.push(format!(
            "one position, at a context of {} tokens, is beyond the limit ({:+.4}); repeat with another --seed",
            position.context_tokens, position.shift
        ));
    }
    for figures in routes.iter().filter(|figures| figures.noise > WIDE_FOR_BF16) {
        let own = largest_repeated.unwrap_or(0.0);
        if own < figures.noise {
            doubts.push(format!(
                "{}: B differs from A {:.3} wide in log-odds, A from itself by {own:.3} at most: more than 16-bit arithmetic \
                 usually makes",
                figures.route, figures.noise
            ));
        }
    }
    for route in Route::ALL {
        if !routes.iter().any(|figures| figures.route == route && figures.positions > 0) {
            doubts.push(format!("no {route} position could be compared"));
        }
    }
    let compared: usize = routes.iter().filter(|f| f.route == Route::Decode).map(|f| f.positions).sum();
    let lost: usize = results.iter().map(|result| result.lost).sum();
    if lost > compared {
        doubts.push(format!("{lost} decode positions could not be compared, only {compared} could"));
    }
    if let Some(largest) = largest_repeated.filter(|largest| CHURN_FACTOR * largest > input.cap) {
        doubts
            .push(format!("A differs from itself by up to {largest:.3} in log-odds: too noisy a yardstick"));
    }
    if !ranks_without_needle.is_empty() {
        let ranks: Vec<String> = ranks_without_needle.iter().map(u64::to_string).collect();
        doubts.push(format!(
            "no needle on rank {} was recalled by A ({:.0} % of all needle tokens were), so the loss of that shard would \
             hardly show",
            ranks.join(", "),
            100.0 * recalled
        ));
    }
    doubts
}

pub(super) fn clean_words(routes: &[RouteFigures]) -> String {
    let parts: Vec<String> = routes
        .iter()
        .map(|figures| {
            format!(
                "{}: largest shift {:.4} in log-odds over {} positions, limit {:.4}",
                figures.route, figures.largest, figures.positions, figures.limit
            )
        })
        .collect();
    parts.join("; ")
}
