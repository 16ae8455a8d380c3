//! What was counted, group by group, and the tables that show it.

use std::collections::BTreeMap;

use crate::explain::Table;

/// Cells of a histogram of ratios.
const CELLS: usize = 2000;

/// Ratios between 0 and 1, counted; a ratio above 1 counts as 1 and is kept as the largest.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Histogram {
    cells: Vec<u64>,
    largest: f64,
}

impl Histogram {
    /// Counts one.
    pub fn add(&mut self, ratio: f64) {
        if self.cells.is_empty() {
            self.cells = vec![0; CELLS + 1];
        }
        self.cells[(ratio.clamp(0.0, 1.0) * CELLS as f64) as usize] += 1;
        self.largest = self.largest.max(ratio);
    }

    /// The largest.
    pub fn largest(&self) -> f64 {
        self.largest
    }

    /// The median, to half a thousandth; NaN of nothing.
    pub fn median(&self) -> f64 {
        let count: u64 = self.cells.iter().sum();
        let mut below = 0;
        for (cell, number) in self.cells.iter().enumerate() {
            below += number;
            if 2 * below >= count && count > 0 {
                return (cell as f64 + 0.5) / CELLS as f64;
            }
        }
        f64::NAN
    }

    fn join(&mut self, other: &Self) {
        if self.cells.is_empty() {
            self.cells.clone_from(&other.cells);
        } else {
            self.cells.iter_mut().zip(&other.cells).for_each(|(to, from)| *to += from);
        }
        self.largest = self.largest.max(other.largest);
    }
}

/// What was counted.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tally {
    /// Runs.
    pub runs: u64,
    /// Output elements, and those outside their certified interval.
    pub elements: u64,
    /// Elements outside.
    pub outside: u64,
    /// Uses of the intervals.
    pub ratios: Histogram,
    /// Elements of partial outputs.
    pub partials: u64,
    /// Those outside their bound.
    pub partial_outside: u64,
    /// LSEs, merged and of ranks.
    pub lses: u64,
    /// Those outside the certified bound.
    pub lse_outside: u64,
    /// Largest use of it.
    pub lse_ratio: f64,
    /// Those outside the practical bound where its gate holds.
    pub practical_outside: u64,
    /// Largest use of it.
    pub practical_ratio: f64,
    /// Output elements that were compared with the probable bound where its gates hold.
    pub probable_elements: u64,
    /// Those outside.
    pub probable_outside: u64,
    /// Uses of the probable interval.
    pub probable_ratios: Histogram,
}

impl Tally {
    /// Violations of what conforming arithmetic must keep: certified bounds of outputs, partials and LSEs.
    pub fn violations(&self) -> u64 {
        self.outside + self.partial_outside + self.lse_outside
    }

    fn join(&mut self, other: &Self) {
        self.runs += other.runs;
        self.elements += other.elements;
        self.outside += other.outside;
        self.ratios.join(&other.ratios);
        self.partials += other.partials;
        self.partial_outside += other.partial_outside;
        self.lses += other.lses;
        self.lse_outside += other.lse_outside;
        self.lse_ratio = self.lse_ratio.max(other.lse_ratio);
        self.practical_outside += other.practical_outside;
        self.practical_ratio = self.practical_ratio.max(other.practical_ratio);
        self.probable_elements += other.probable_elements;
        self.probable_outside += other.probable_outside;
        self.probable_ratios.join(&other.probable_ratios);
    }
}

/// By what runs are grouped in a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Grouping {
    /// Input distribution.
    Distribution,
    /// Tokens.
    Tokens,
    /// Ranks.
    Ranks,
    /// Arithmetic of the merge.
    Merge,
    /// Format of the probabilities.
    Probabilities,
    /// Accumulation.
    Sums,
}

impl Grouping {
    /// All of them, in the order of a report.
    pub const ALL: [Self; 6] =
        [Self::Distribution, Self::Tokens, Self::Ranks, Self::Merge, Self::Probabilities, Self::Sums];

    /// Heading of its column.
    pub fn name(self) -> &'static str {
        match self {
            Self::Distribution => "distribution",
            Self::Tokens => "tokens up to",
            Self::Ranks => "ranks",
            Self::Merge => "merge",
            Self::Probabilities => "probabilities",
            Self::Sums => "sums",
        }
    }
}

/// What a measurement found.
#[derive(Debug, Clone, Default)]
pub struct Report {
    whole: Tally,
    groups: BTreeMap<(Grouping, String), Tally>,
    /// Runs whose contract and data admit anything, so that nothing could be judged.
    pub underivable: u64,
    /// The first scenarios with a violation.
    pub told: Vec<String>,
    /// Tokens, and share of the bound that an adversarial input uses.
    pub adversarial: Vec<(usize, f64)>,
    /// Whether a time limit ended it.
    pub cut_short: bool,
    /// Seconds that it took.
    pub elapsed_s: f64,
}

impl Report {
    /// Everything together.
    pub fn whole(&self) -> &Tally {
        &self.whole
    }

    /// Adds what a run of those groups counted.
    pub fn add(&mut self, groups: &[(Grouping, String)], tally: &Tally) {
        self.whole.join(tally);
        for group in groups {
            self.groups.entry(group.clone()).or_default().join(tally);
        }
    }

    /// The tables, each behind its grouping.
    pub fn tables(&self) -> Vec<Table> {
        let tables = Grouping::ALL.iter().map(|grouping| {
            let of_group = self.groups.iter().filter(|((of, _), _)| of == grouping);
            let rows = of_group.map(|((_, name), tally)| row(name.trim_start(), tally));
            Table::new(
                [
                    grouping.name(),
                    "runs",
                    "elements",
                    "outside",
                    "median use",
                    "largest use",
                    "LSE",
                    "practical LSE",
                    "probable: outside of",
                    "median use",
                    "largest use",
                ],
                rows,
            )
        });
        tables.collect()
    }

    /// The sentences above the tables.
    pub fn summary(&self) -> String {
        let whole = &self.whole;
        let mut text = format!(
            "{} runs, {} output elements, {} elements of partials, {} LSEs in {:.0} s{}\n",
            whole.runs,
            whole.elements,
            whole.partials,
            whole.lses,
            self.elapsed_s,
            if self.cut_short { ", ended by the time limit" } else { "" }
        );
        text += &format!(
            "outside the certified bound: {} output elements, {} elements of partials, {} LSEs\n",
            whole.outside, whole.partial_outside, whole.lse_outside
        );
        text += &format!(
            "outside the practical LSE bound where its gate holds: {}; outside the probable bound where its gates hold: {} of {}\n",
            whole.practical_outside, whole.probable_outside, whole.probable_elements
        );
        text += &format!("runs whose contract admits anything for their data: {}\n", self.underivable);
        for (tokens, used) in &self.adversarial {
            text += &format!(
                "adversarial probabilities, {tokens} tokens: {used:.4} of the bound before the final rounding\n"
            );
        }
        self.told.iter().for_each(|scenario| text += &format!("violation in {scenario}\n"));
        text
    }
}

fn row(name: &str, tally: &Tally) -> [String; 11] {
    let ratio = |value: f64| if value.is_nan() { "–".to_owned() } else { format!("{value:.3}") };
    [
        name.to_owned(),
        tally.runs.to_string(),
        tally.elements.to_string(),
        tally.violations().to_string(),
        ratio(tally.ratios.median()),
        ratio(tally.ratios.largest()),
        ratio(tally.lse_ratio),
        ratio(tally.practical_ratio),
        format!("{} of {}", tally.probable_outside, tally.probable_elements),
        ratio(tally.probable_ratios.median()),
        ratio(tally.probable_ratios.largest()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_knows_its_median_and_its_largest_ratio() {
        let mut histogram = Histogram::default();
        assert!(histogram.median().is_nan());
        (0..101).for_each(|i| histogram.add(f64::from(i) / 100.0));
        assert!((histogram.median() - 0.5).abs() < 1e-3);
        histogram.add(1.7);
        assert_eq!(histogram.largest(), 1.7);
        let mut other = Histogram::default();
        other.join(&histogram);
        other.join(&histogram);
        assert_eq!((other.median(), other.largest()), (histogram.median(), 1.7));
    }

    #[test]
    fn a_report_counts_a_run_once_in_the_whole_and_once_in_each_of_its_groups() {
        let mut report = Report::default();
        let tally = Tally { runs: 1, elements: 8, outside: 2, ..Tally::default() };
        let groups = [(Grouping::Merge, "a2a".to_owned()), (Grouping::Ranks, "8".to_owned())];
        report.add(&groups, &tally);
        report.add(&groups[..1], &tally);
        assert_eq!((report.whole().runs, report.whole().violations()), (2, 4));
        let tables = report.tables();
        assert!(tables[3].to_markdown().contains("| a2a | 2 | 16 | 4 |"), "{}", tables[3].to_markdown());
        assert!(tables[2].to_markdown().contains("| 8 | 1 | 8 | 2 |"));
        assert!(report.summary().contains("outside the certified bound: 4 output elements"));
    }
}
