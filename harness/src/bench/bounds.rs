//! Do the bounds hold? Conforming arithmetic of every kind against the certified interval, and how much of it is used.

mod scenario;
mod tally;

use std::time::{Duration, Instant};

use rayon::prelude::*;
use shardcheck_formats::{Contract, Dtype, Merge};
use shardcheck_references::attention::plain::{Problem, Values};
use shardcheck_references::bound::{Certified, certify, certify_moments, interval, ratio};
use shardcheck_references::layout::Layout;
use shardcheck_references::moments::{Moments, Passes};
use shardcheck_references::split::Split;
use shardcheck_references::statistics::Model;
use shardcheck_references::visibility::Visible;

use super::simulation::{Knobs, Simulated, Sums, Tampering, simulate};
use super::{progress, within};
use scenario::Scenario;
pub use tally::{Grouping, Report, Tally};

/// Runs between two looks at the number of elements.
const BATCH: u64 = 128;
/// One run in so many also looks at the probable bound.
const PROBABLE_EVERY: u64 = 7;
/// Violations that are told with their scenario.
const TOLD: usize = 5;

/// How much to measure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Options {
    /// Output elements to reach.
    pub elements: u64,
    /// Seed of everything that is drawn.
    pub seed: u64,
    /// Ends the measurement early; what was measured until then depends on the machine.
    pub limit: Option<Duration>,
}

/// Measures. Equal options without a limit give equal reports on one machine.
pub fn measure(options: &Options) -> Report {
    let started = Instant::now();
    let bar = progress::bar(options.elements, "elements");
    let mut report = Report::default();
    let mut next = 0;
    while report.whole().elements < options.elements {
        if options.limit.is_some_and(|limit| started.elapsed() > limit) {
            report.cut_short = true;
            break;
        }
        let done: Vec<Option<Run>> =
            (next..next + BATCH).into_par_iter().map(|index| Run::of(options.seed, index)).collect();
        for run in done {
            match run {
                None => report.underivable += 1,
                Some(run) => {
                    report.add(&run.groups, &run.tally);
                    let room = TOLD - report.told.len().min(TOLD);
                    report.told.extend(run.told.into_iter().take(room));
                }
            }
        }
        next += BATCH;
        bar.set_position(report.whole().elements.min(options.elements));
    }
    bar.finish_and_clear();
    report.adversarial = [65, 257, 1025, 4097].map(|tokens| (tokens, adversarial(tokens))).to_vec();
    report.elapsed_s = started.elapsed().as_secs_f64();
    report
}

/// One run of the simulated engine.
struct Run {
    groups: Vec<(Grouping, String)>,
    tally: Tally,
    told: Option<String>,
}

impl Run {
    /// `None` where the contract and the data admit anything.
    fn of(seed: u64, index: u64) -> Option<Self> {
        let scenario = Scenario::drawn(seed, index);
        let problem = scenario.tensors.problem();
        let (layout, visible, contract) = (&scenario.layout, &scenario.visible, &scenario.contract);
        let passes = Passes::needed_by(contract);
        let moments = Moments::collect(&problem, Split::Ranks(layout), visible, passes).ok()?;
        let certified = certify_moments(&moments, contract, false).ok()?;
        let engine = (contract, &scenario.knobs);
        let seen = simulate(&problem, layout, visible, engine, &Tampering::default(), scenario.seed);
        let mut tally = Tally { runs: 1, ..Tally::default() };
        tally.add_outputs(&seen, &certified, contract.output);
        tally.add_partials(&seen, &certified);
        tally.add_lses(&seen, &certified);
        if index.is_multiple_of(PROBABLE_EVERY) {
            let model = Model::with_moments(&problem, layout, visible, contract, moments).ok()?;
            tally.add_probable(&seen, &model, contract.output);
        }
        let told = (tally.violations() > 0).then(|| format!("run {index} of seed {seed}: {scenario}"));
        Some(Self { groups: scenario.groups(), tally, told })
    }
}

impl Tally {
    fn add_outputs(&mut self, seen: &Simulated, certified: &Certified, output: Dtype) {
        for ((seen, out), pre) in seen.out.iter().zip(&certified.out).zip(&certified.pre) {
            let (low, high) = interval(*out, *pre, output);
            self.elements += 1;
            self.outside += u64::from(!(low <= *seen && *seen <= high));
            self.ratios.add(ratio(*seen, *out, low, high));
        }
    }

    fn add_partials(&mut self, seen: &Simulated, certified: &Certified) {
        for (seen, certified) in seen.partials.iter().zip(&certified.partials) {
            for (state, exact) in certified.lse.iter().enumerate() {
                if *exact == f64::NEG_INFINITY {
                    self.lse_outside += u64::from(seen.lse[state] != f64::NEG_INFINITY);
                    continue;
                }
                let practical = certified.practical_lse_bound[state];
                self.add_lse((seen.lse[state] - exact).abs(), certified.lse_bound[state], practical);
                let width = certified.out.len() / certified.lse.len();
                for d in state * width..(state + 1) * width {
                    let error = (seen.out[d] - certified.out[d]).abs();
                    self.partials += 1;
                    self.partial_outside += u64::from(!within(error, certified.pre[d]));
                }
            }
        }
    }

    fn add_lses(&mut self, seen: &Simulated, certified: &Certified) {
        for (state, exact) in certified.lse.iter().enumerate() {
            if *exact == f64::NEG_INFINITY {
                self.lse_outside += u64::from(seen.lse[state] != f64::NEG_INFINITY);
                continue;
            }
            let practical = certified.practical_lse_bound[state];
            self.add_lse((seen.lse[state] - exact).abs(), certified.lse_bound[state], practical);
        }
    }

    fn add_lse(&mut self, error: f64, bound: f64, practical: Option<f64>) {
        self.lses += 1;
        self.lse_outside += u64::from(!within(error, bound));
        self.lse_ratio = self.lse_ratio.max(if error == 0.0 { 0.0 } else { error / bound });
        if let Some(bound) = practical {
            self.practical_outside += u64::from(!within(error, bound));
            self.practical_ratio = self.practical_ratio.max(if error == 0.0 { 0.0 } else { error / bound });
        }
    }

    fn add_probable(&mut self, seen: &Simulated, model: &Model, output: Dtype) {
        let (moments, probable) = (model.moments(), model.probable());
        for (index, seen) in seen.out.iter().enumerate() {
            let (state, d) = (index / moments.v_dim, index % moments.v_dim);
            if !probable.gates_hold[state] {
                continue;
            }
            let out = moments.states[state].out[d];
            let (low, high) = interval(out, probable.pre[index], output);
            self.probable_elements += 1;
            self.probable_outside += u64::from(!(low <= *seen && *seen <= high));
            self.probable_ratios.add(ratio(*seen, out, low, high));
        }
    }
}

/// Share of the bound before the final rounding that is used where every probability rounds up by nearly the unit roundoff
/// and all values have one sign: what is missing to 1 could be cut from no bound by more.
pub fn adversarial(tokens: usize) -> f64 {
    let contract = Contract { output: Dtype::F32, ..Contract::bf16_default(Merge::A2a) };
    let probability: f64 = 0.5 * (1.0 + 2f64.powi(-8) + 2f64.powi(-14));
    let (mut key, mut value) = (vec![probability.ln() as f32; tokens], vec![1f32; tokens]);
    // the largest, exactly 1, has no value
    (key[0], value[0]) = (0.0, 0.0);
    let query = [1f32];
    let problem = Problem::new(1, 1, 1, 1, 1.0, &query, &key, Values::Separate(&value));
    let (layout, visible) = (Layout::single(), [Visible::Prefix(tokens)]);
    let Ok(certified) = certify(&problem, &layout, &visible, &contract) else { return f64::NAN };
    let knobs =
        Knobs { tile_tokens: tokens, base_2: false, exp_noise_ulp: 0, sums: Sums::Rounding, ..Knobs::USUAL };
    let seen = simulate(&problem, &layout, &visible, (&contract, &knobs), &Tampering::default(), 1);
    (seen.out[0] - certified.out[0]).abs() / certified.pre[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_conforming_run_is_outside_and_equal_seeds_give_equal_reports() {
        let options = Options { elements: 300_000, seed: 5, limit: None };
        let (first, second) = (measure(&options), measure(&options));
        let whole = first.whole();
        assert_eq!(whole.violations(), 0, "{:?}", first.told);
        assert!(whole.elements >= 300_000 && whole.lses > 3_000 && whole.partials > 300_000, "{whole:?}");
        assert!(
            whole.ratios.largest() > 0.9,
            "the intervals are never nearly used: {}",
            whole.ratios.largest()
        );
        assert!(whole.probable_elements > 10_000);
        assert_eq!(first.whole(), second.whole());
        assert!(first.underivable * 10 < whole.runs, "{} runs without a bound", first.underivable);
    }

    #[test]
    fn the_bound_is_attained_by_adversarial_inputs() {
        for tokens in [65, 1025] {
            let used = adversarial(tokens);
            assert!((0.95..=1.0).contains(&used), "{used} at {tokens} tokens");
        }
    }
}
