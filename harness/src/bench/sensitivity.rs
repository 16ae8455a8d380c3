//! What the rules see: faults of known size against every rule, and clean runs against the same.

mod fault;

use std::time::Instant;

use rayon::prelude::*;
use shardcheck_formats::{Contract, Counter, Merge};
use shardcheck_references::bound::{Certified, certify_moments};
use shardcheck_references::layout::Layout;
use shardcheck_references::moments::{Moments, Passes};
use shardcheck_references::split::Split;
use shardcheck_references::statistics::Model;
use shardcheck_references::visibility::Visible;

use super::inputs::{CacheFormat, Family, Shape, Tensors};
use super::progress;
use super::scheme::{Answer, Scheme, twice_the_usual_error};
use super::simulation::{Knobs, Order, Simulated, Sums, Tampering, simulate};
use crate::explain::Table;
pub use fault::SizedFault;

/// Query rows: a verification step.
const ROWS: usize = 4;
/// Query heads.
const HEADS: usize = 8;
/// Heads of keys and values.
const KV_HEADS: usize = 2;
/// Width of all vectors.
const DIM: usize = 128;
/// Ranks.
const RANKS: usize = 8;
/// Distributions of clean runs.
const CLEAN_FAMILIES: [Family; 4] = [Family::Gauss, Family::Heavy, Family::Sink, Family::MeanValue];
/// Schemes that cost a pass of their own and that clean runs are not counted for.
const NOT_FOR_CLEAN: [Scheme; 1] = [Scheme::Twice];

/// What to measure.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Trials of each fault at each length.
    pub trials: u64,
    /// Clean runs at each length.
    pub clean: u64,
    /// Lengths in tokens.
    pub tokens: Vec<usize>,
    /// Arithmetic of the merge.
    pub merge: Merge,
    /// Seed of everything that is drawn.
    pub seed: u64,
}

/// Rejections by rule.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Counts {
    /// Trials.
    pub trials: u64,
    /// `[Scheme::ALL]`: how many of them each rule rejected.
    pub rejected: [u64; Scheme::ALL.len()],
    /// How many named the right token, block or rank, where the fault has one.
    pub located: u64,
}

impl Counts {
    fn join(&mut self, other: &Self) {
        self.trials += other.trials;
        self.located += other.located;
        self.rejected.iter_mut().zip(other.rejected).for_each(|(to, from)| *to += from);
    }

    /// Rejections by one rule.
    pub fn of(&self, scheme: Scheme) -> u64 {
        let place = Scheme::ALL.iter().position(|other| *other == scheme);
        self.rejected[place.expect("ALL has every scheme")]
    }
}

/// What was measured at one length.
#[derive(Debug, Clone, PartialEq)]
pub struct Length {
    /// Tokens.
    pub tokens: usize,
    /// `[SizedFault::ALL]`.
    pub faults: Vec<Counts>,
    /// Clean runs, by distribution.
    pub clean: Vec<(Family, Counts)>,
    /// Clean runs that were rejected by mistake: distribution, number of the run, what was seen.
    pub false_alarms: Vec<String>,
    /// Seconds that it took.
    pub elapsed_s: f64,
}

impl Length {
    /// Clean runs of all distributions.
    pub fn all_clean(&self) -> Counts {
        let mut all = Counts::default();
        self.clean.iter().for_each(|(_, counts)| all.join(counts));
        all
    }
}

/// Measures. Equal options give equal results on one machine.
pub fn measure(options: &Options) -> Vec<Length> {
    options.tokens.iter().map(|tokens| measure_length(options, *tokens)).collect()
}

fn measure_length(options: &Options, tokens: usize) -> Length {
    let started = Instant::now();
    let bar = progress::bar(options.trials + options.clean, "trials");
    let mut faults = vec![Counts::default(); SizedFault::ALL.len()];
    let trials: Vec<Vec<Counts>> = (0..options.trials)
        .into_par_iter()
        .map(|trial| {
            let counts = Trial::new(options, Family::Gauss, tokens, trial).faults(trial);
            bar.inc(1);
            counts
        })
        .collect();
    for counts in trials {
        faults.iter_mut().zip(counts).for_each(|(to, from)| to.join(&from));
    }
    let mut clean: Vec<(Family, Counts)> = CLEAN_FAMILIES.map(|family| (family, Counts::default())).to_vec();
    let runs: Vec<(Counts, Option<String>)> = (0..options.clean)
        .into_par_iter()
        .map(|run| {
            let family = CLEAN_FAMILIES[run as usize % CLEAN_FAMILIES.len()];
            let found = Trial::new(options, family, tokens, options.trials + run).clean();
            bar.inc(1);
            found
        })
        .collect();
    let mut false_alarms = Vec::new();
    for (run, (counts, seen)) in runs.into_iter().enumerate() {
        let (family, joined) = &mut clean[run % CLEAN_FAMILIES.len()];
        joined.join(&counts);
        false_alarms
            .extend(seen.map(|seen| format!("{tokens} tokens, {}, run {run}: {seen}", family.name())));
    }
    bar.finish_and_clear();
    Length { tokens, faults, clean, false_alarms, elapsed_s: started.elapsed().as_secs_f64() }
}

/// One draw of inputs.
struct Trial {
    tensors: Tensors,
    layout: Layout,
    visible: Vec<Visible>,
    contract: Contract,
    knobs: Knobs,
    seed: u64,
}

impl Trial {
    fn new(options: &Options, family: Family, tokens: usize, index: u64) -> Self {
        let seed = shardcheck_formats::word(options.seed, tokens as u32, index);
        let mut random = Counter::new(seed, 1);
        let shape = Shape {
            rows: ROWS,
            heads: HEADS,
            kv_heads: KV_HEADS,
            qk_dim: DIM,
            v_dim: DIM,
            latent: false,
            tokens,
        };
        let sums = [Sums::Truncating, Sums::Rounding, Sums::Tree][random.below(3) as usize];
        let knobs = Knobs {
            tile_tokens: [32, 64, 128][random.below(3) as usize],
            order: Order::ALL[random.below(3) as usize],
            sums,
            base_2: random.below(2) == 0,
            splits: [1, 1, 4][random.below(3) as usize],
            normalised: random.below(2) == 0,
            ..Knobs::USUAL
        };
        let interleave = [1, 16][random.below(2) as usize];
        Self {
            tensors: Tensors::drawn(family, shape, CacheFormat::BF16, seed),
            layout: Layout::new(RANKS, interleave, interleave).expect("a block of one run"),
            visible: Visible::causal(tokens, ROWS),
            contract: Contract {
                u_acc: sums.unit_roundoff(),
                tile_min: 32,
                ..Contract::bf16_default(options.merge)
            },
            knobs,
            seed,
        }
    }

    /// The model of the inputs, and the bounds.
    fn prepared(&self) -> (Model<'_>, Certified) {
        let problem = self.tensors.problem();
        let passes = Passes::needed_by(&self.contract);
        let moments = Moments::collect(&problem, Split::Ranks(&self.layout), &self.visible, passes)
            .expect("finite inputs have moments");
        let certified = certify_moments(&moments, &self.contract, false).expect("usual inputs have a bound");
        let model = Model::with_moments(&problem, &self.layout, &self.visible, &self.contract, moments);
        (model.expect("usual inputs have a bound"), certified)
    }

    fn simulated(&self, tensors: &Tensors, tampering: &Tampering) -> Simulated {
        let engine = (&self.contract, &self.knobs);
        simulate(&tensors.problem(), &self.layout, &self.visible, engine, tampering, self.seed)
    }

    /// `[SizedFault::ALL]`: one trial of each.
    fn faults(&self, trial: u64) -> Vec<Counts> {
        let (model, certified) = self.prepared();
        let twice = twice_the_usual_error(&self.tensors.problem(), &self.visible, &certified.out);
        SizedFault::ALL
            .iter()
            .map(|fault| {
                let mut random = Counter::new(self.seed ^ trial, 5);
                let injected =
                    fault.inject(&self.tensors, &self.layout, &mut random, |tensors, tampering| {
                        self.simulated(tensors, tampering)
                    });
                let examination = model.examine(&injected.seen.out).expect("finite outputs");
                let answer = Answer {
                    seen: &injected.seen,
                    certified: &certified,
                    probable: Some(&model.probable().pre),
                    examination: &examination,
                    twice: Some(twice),
                    output: self.contract.output,
                };
                let located = injected.place.is_some_and(|place| place.is_named_by(&examination));
                Counts {
                    trials: 1,
                    rejected: Scheme::ALL.map(|scheme| u64::from(answer.is_rejected_by(scheme))),
                    located: u64::from(located),
                }
            })
            .collect()
    }

    /// One clean run, and what was seen in it if it is rejected.
    fn clean(&self) -> (Counts, Option<String>) {
        let (model, certified) = self.prepared();
        let seen = self.simulated(&self.tensors, &Tampering::default());
        let examination = model.examine(&seen.out).expect("finite outputs");
        let answer = Answer {
            seen: &seen,
            certified: &certified,
            probable: Some(&model.probable().pre),
            examination: &examination,
            twice: None,
            output: self.contract.output,
        };
        let counts = Counts {
            trials: 1,
            rejected: Scheme::ALL.map(|scheme| u64::from(answer.is_rejected_by(scheme))),
            located: 0,
        };
        let told = answer.is_rejected_by(Scheme::Combined).then(|| {
            let alarms: Vec<String> = examination.alarms().iter().map(ToString::to_string).collect();
            if alarms.is_empty() { "outside a certified bound".to_owned() } else { alarms.join("; ") }
        });
        (counts, told)
    }
}

/// Detection in percent, one column a rule, lengths side by side in a cell; the last column is how often the right token, block or
/// rank was named.
pub fn fault_table(lengths: &[Length]) -> Table {
    let mut headings: Vec<String> = vec!["fault".to_owned()];
    headings.extend(Scheme::ALL.map(|scheme| scheme.name().to_owned()));
    headings.push("named".to_owned());
    let rows = SizedFault::ALL.iter().enumerate().map(|(index, fault)| {
        let cell = |value: &dyn Fn(&Counts) -> u64| {
            let percent = |length: &Length| {
                let counts = &length.faults[index];
                let share = 100.0 * value(counts) as f64 / counts.trials.max(1) as f64;
                format!("{share:.0}")
            };
            lengths.iter().map(percent).collect::<Vec<_>>().join("/")
        };
        let mut row = vec![fault.name().to_owned()];
        row.extend(Scheme::ALL.map(|scheme| cell(&|counts| counts.of(scheme))));
        row.push(if fault.has_place() { cell(&|counts| counts.located) } else { "–".to_owned() });
        row
    });
    Table::of(headings, rows.collect())
}

/// False alarms in clean runs: a row for each length and distribution.
pub fn clean_table(lengths: &[Length]) -> Table {
    let schemes: Vec<Scheme> =
        Scheme::ALL.into_iter().filter(|scheme| !NOT_FOR_CLEAN.contains(scheme)).collect();
    let mut headings: Vec<String> = ["tokens", "distribution", "runs"].map(str::to_owned).to_vec();
    headings.extend(schemes.iter().map(|scheme| scheme.name().to_owned()));
    let mut rows = Vec::new();
    for length in lengths {
        let all = ("all", length.all_clean());
        let of_family = length.clean.iter().map(|(family, counts)| (family.name(), *counts));
        for (name, counts) in of_family.chain([all]) {
            let mut row = vec![length.tokens.to_string(), name.to_owned(), counts.trials.to_string()];
            row.extend(schemes.iter().map(|scheme| counts.of(*scheme).to_string()));
            rows.push(row);
        }
    }
    Table::of(headings, rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(tokens: usize, trials: u64, clean: u64, merge: Merge) -> Length {
        measure(&Options { trials, clean, tokens: vec![tokens], merge, seed: 3 }).remove(0)
    }

    #[test]
    fn every_fault_is_seen_at_128_tokens_and_clean_runs_are_not() {
        let length = measured(128, 4, 40, Merge::A2a);
        for (fault, counts) in SizedFault::ALL.iter().zip(&length.faults) {
            assert_eq!(counts.trials, 4);
            assert_eq!(counts.of(Scheme::Combined), 4, "{}: {counts:?}", fault.name());
        }
        let clean = length.all_clean();
        assert_eq!((clean.trials, clean.of(Scheme::Combined)), (40, 0), "{clean:?}");
        assert_eq!(length, Length { elapsed_s: length.elapsed_s, ..measured(128, 4, 40, Merge::A2a) });
    }

    #[test]
    fn one_lost_token_of_four_thousand_passes_fixed_tolerances_and_is_named_by_the_filter() {
        let length = measured(4096, 2, 0, Merge::A2a);
        let lost = SizedFault::ALL.iter().position(|fault| *fault == SizedFault::TokenLost).unwrap();
        let counts = &length.faults[lost];
        assert_eq!(
            (counts.of(Scheme::Fixed1), counts.of(Scheme::Fixed2), counts.of(Scheme::FivePercent)),
            (0, 0, 0)
        );
        assert_eq!((counts.of(Scheme::Token), counts.of(Scheme::Lse), counts.located), (2, 2, 2));
    }

    #[test]
    fn tables_have_a_column_for_every_rule() {
        let lengths = [measured(64, 1, 4, Merge::AgRsBf16), measured(128, 1, 4, Merge::AgRsBf16)];
        let text = fault_table(&lengths).to_markdown();
        assert!(Scheme::ALL.iter().all(|scheme| text.contains(scheme.name())), "{text}");
        assert_eq!(text.lines().count(), SizedFault::ALL.len() + 2);
        assert!(text.contains("/"), "{text}");
        assert!(clean_table(&lengths).to_text().contains("mean-value"));
    }
}
