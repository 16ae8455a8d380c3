//! How fast the oracle and the judge are: beside the peak of the machine, and beside PyTorch.

use std::fmt;
use std::hint::black_box;
use std::str::FromStr;
use std::time::Instant;

use shardcheck_formats::{Contract, Merge};
use shardcheck_references::attention::streaming;
use shardcheck_references::bound::certify_moments;
use shardcheck_references::layout::Layout;
use shardcheck_references::moments::{Moments, Passes};
use shardcheck_references::split::Split;
use shardcheck_references::statistics::Model;
use shardcheck_references::visibility::Visible;

use super::inputs::{CacheFormat, Family, Shape, Tensors};
use super::{peak, progress, torch, within};
use crate::expected::allowed_out;
use crate::explain::Table;
use crate::judge::Comparison;

/// Ranks of the layout that bounds are made for.
const RANKS: usize = 8;
/// Largest difference that a reference of the same precision may show.
const AGREEMENT: f64 = 1e-11;

/// A head count and widths to measure with, one decode row each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OracleShape {
    /// Absorbed MLA: 128 heads of 576 and 512 over one latent.
    Mla,
    /// Eight sampled heads of it.
    MlaSampled,
    /// GQA: 64 heads of 128 over eight KV heads.
    Gqa,
}

impl OracleShape {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Mla, Self::MlaSampled, Self::Gqa];

    /// Name on the command line and in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mla => "mla",
            Self::MlaSampled => "mla-8",
            Self::Gqa => "gqa",
        }
    }

    fn shape(self, tokens: usize) -> Shape {
        let latent =
            |heads| Shape { rows: 1, heads, kv_heads: 1, qk_dim: 576, v_dim: 512, latent: true, tokens };
        match self {
            Self::Mla => latent(128),
            Self::MlaSampled => latent(8),
            Self::Gqa => {
                Shape { rows: 1, heads: 64, kv_heads: 8, qk_dim: 128, v_dim: 128, latent: false, tokens }
            }
        }
    }
}

impl fmt::Display for OracleShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for OracleShape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|shape| shape.name() == text).ok_or_else(|| {
            format!("unknown shape {text:?}; known are {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

/// Longest context for which the residual's model is timed: it keeps a weight for every head and token, and no suite builds it at
/// a million.
pub const MOST_RESIDUAL_TOKENS: usize = 1 << 17;
/// What to measure.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Shapes.
    pub shapes: Vec<OracleShape>,
    /// Tokens.
    pub contexts: Vec<usize>,
    /// Runs of which the median counts.
    pub runs: usize,
    /// Whether to time PyTorch beside it.
    pub against_torch: bool,
}

/// Medians of one shape and context, in seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Timing {
    /// Shape.
    pub shape: OracleShape,
    /// Tokens.
    pub tokens: usize,
    /// Multiplications and additions of QK and PV.
    pub operations: f64,
    /// Attention without bounds.
    pub attend_s: f64,
    /// Attention with the moments of eight ranks.
    pub moments_s: f64,
    /// Bounds from the moments.
    pub bounds_s: f64,
    /// Comparison of an output with its intervals.
    pub judge_s: f64,
    /// Model of the residual, moments given, and examination of an output; `None` beyond [`MOST_RESIDUAL_TOKENS`].
    pub residual_s: Option<(f64, f64)>,
    /// PyTorch.
    pub torch_s: Option<f64>,
}

/// Everything that was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Peak of float64 multiply-adds in operations a second, on one thread and on all.
    pub peak: (f64, f64),
    /// Threads.
    pub threads: usize,
    /// Runs of each median.
    pub runs: usize,
    /// Timings.
    pub timings: Vec<Timing>,
    /// Version of PyTorch, or why there is none; nothing when it was not asked for.
    pub torch: Option<Result<String, String>>,
}

/// Measures on the current thread pool.
///
/// # Errors
/// When PyTorch is installed and its reference does not run or does not agree.
pub fn measure(options: &Options) -> Result<Report, String> {
    let torch = options.against_torch.then(torch::version);
    let with_torch = matches!(torch, Some(Ok(_)));
    let bar = progress::bar((options.shapes.len() * options.contexts.len()) as u64, "shapes");
    let mut report = Report {
        peak: peak::measured(),
        threads: rayon::current_num_threads(),
        runs: options.runs,
        timings: Vec::new(),
        torch,
    };
    for &shape in &options.shapes {
        for &tokens in &options.contexts {
            report.timings.push(timing(shape, tokens, options.runs, with_torch)?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(report)
}

fn timing(shape: OracleShape, tokens: usize, runs: usize, with_torch: bool) -> Result<Timing, String> {
    let sizes = shape.shape(tokens);
    let tensors = Tensors::drawn(Family::Gauss, sizes, CacheFormat::BF16, 1);
    let (problem, visible) = (tensors.problem(), [Visible::Prefix(tokens)]);
    let layout = Layout::new(RANKS, 1, 1).map_err(|error| error.to_string())?;
    let contract = Contract::bf16_default(Merge::A2a);
    let split = Split::Ranks(&layout);
    let attend_s = median(runs, || streaming::attend(&problem, &visible));
    let collect = || Moments::collect(&problem, split, &visible, Passes::One);
    let moments_s = median(runs, collect);
    let moments = collect().map_err(|error| error.to_string())?;
    let bounds_s = median(runs, || certify_moments(&moments, &contract, false));
    let certified = certify_moments(&moments, &contract, false).map_err(|error| error.to_string())?;
    let rounded: Vec<f64> =
        certified.out.iter().map(|out| shardcheck_formats::round(contract.output, *out)).collect();
    let judge_s = median(runs, || {
        let mut comparison = Comparison::new("out");
        let pairs = certified.out.iter().zip(&certified.pre);
        for (index, ((out, pre), seen)) in pairs.zip(&rounded).enumerate() {
            comparison.element(index, *seen, allowed_out(*out, *pre, contract.output));
        }
        comparison
    });
    let residual_s = if tokens <= MOST_RESIDUAL_TOKENS {
        let model = |moments| Model::with_moments(&problem, &layout, &visible, &contract, moments);
        let model_s = median_of(runs, || moments.clone(), model);
        let built = model(moments.clone()).map_err(|error| error.to_string())?;
        Some((model_s, median(runs, || built.examine(&rounded))))
    } else {
        None
    };
    let torch_s = if with_torch {
        let reference =
            torch::measure(&tensors, runs).map_err(|why| format!("the PyTorch reference: {why}"))?;
        let pairs = reference.out.iter().zip(&certified.out);
        let far = pairs.map(|(torch, own)| (torch - own).abs()).fold(0.0, f64::max);
        if reference.out.len() != certified.out.len() || !within(far, AGREEMENT) {
            return Err(format!("the PyTorch reference differs by {far:e} at {shape}, {tokens} tokens"));
        }
        Some(middle(reference.seconds))
    } else {
        None
    };
    let operations = 2.0 * (sizes.heads * tokens * (sizes.qk_dim + sizes.v_dim)) as f64;
    Ok(Timing { shape, tokens, operations, attend_s, moments_s, bounds_s, judge_s, residual_s, torch_s })
}

fn median<R>(runs: usize, run: impl Fn() -> R) -> f64 {
    median_of(runs, || (), |()| run())
}

/// Median seconds of `run` over inputs that are made outside of the clock.
fn median_of<I, R>(runs: usize, input: impl Fn() -> I, run: impl Fn(I) -> R) -> f64 {
    let one = || {
        let input = input();
        let start = Instant::now();
        let result = black_box(run(input));
        let seconds = start.elapsed().as_secs_f64();
        drop(result);
        seconds
    };
    middle((0..runs).map(|_| one()).collect())
}

fn middle(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied().unwrap_or(f64::NAN)
}

impl Report {
    /// The sentences above the table.
    pub fn summary(&self) -> String {
        let mut text = format!(
            "peak of float64 multiply-adds: {:.1} GF/s on one thread, {:.1} GF/s on {}; medians of {} runs\n",
            self.peak.0 * 1e-9,
            self.peak.1 * 1e-9,
            self.threads,
            self.runs
        );
        match &self.torch {
            None => {}
            Some(Ok(version)) => {
                text +=
                    &format!("PyTorch {version}: float64, all scores formed, same bf16 cache, same threads\n")
            }
            Some(Err(why)) => {
                text += &format!(
                    "PyTorch is not importable by python3, so there is nothing to compare with: {why}\n"
                )
            }
        }
        text
    }

    /// One row a shape and context.
    pub fn table(&self) -> Table {
        let with_torch = matches!(self.torch, Some(Ok(_)));
        let mut headings = vec![
            "shape",
            "tokens",
            "attend",
            "GF/s",
            "of peak",
            "with moments",
            "x attend",
            "bounds",
            "judge",
            "residual model",
            "examine",
        ];
        if with_torch {
            headings.extend(["torch", "torch / attend"]);
        }
        let seconds =
            |value: f64| if value < 1.0 { format!("{:.2} ms", value * 1e3) } else { format!("{value:.2} s") };
        let row = |timing: &Timing| {
            let rate = timing.operations / timing.attend_s;
            let mut row = vec![
                timing.shape.name().to_owned(),
                timing.tokens.to_string(),
                seconds(timing.attend_s),
                format!("{:.1}", rate * 1e-9),
                format!("{:.0} %", 100.0 * rate / self.peak.1),
                seconds(timing.moments_s),
                format!("{:.2}", timing.moments_s / timing.attend_s),
                seconds(timing.bounds_s),
                seconds(timing.judge_s),
                timing.residual_s.map_or("–".to_owned(), |(model, _)| seconds(model)),
                timing.residual_s.map_or("–".to_owned(), |(_, examine)| seconds(examine)),
            ];
            if with_torch {
                row.push(timing.torch_s.map_or("–".to_owned(), seconds));
                row.push(
                    timing
                        .torch_s
                        .map_or("–".to_owned(), |torch| format!("{:.2}", torch / timing.attend_s)),
                );
            }
            row
        };
        Table::of(headings.into_iter().map(str::to_owned).collect(), self.timings.iter().map(row).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_a_small_shape_is_measured_and_torch_is_named_or_its_absence_is() {
        let options = Options {
            shapes: vec![OracleShape::MlaSampled, OracleShape::Gqa],
            contexts: vec![64],
            runs: 5,
            against_torch: true,
        };
        let report = measure(&options).unwrap();
        assert_eq!(report.timings.len(), 2);
        for timing in &report.timings {
            let (model_s, examine_s) = timing.residual_s.unwrap();
            let parts = [timing.attend_s, timing.moments_s, timing.bounds_s, model_s, examine_s];
            assert!(parts.iter().all(|seconds| *seconds > 0.0), "{timing:?}");
            assert_eq!(timing.torch_s.is_some(), matches!(report.torch, Some(Ok(_))));
        }
        assert!(report.peak.0 > 1e8 && report.summary().contains("PyTorch"), "{}", report.summary());
        assert_eq!(report.table().to_markdown().lines().count(), 4);
    }

    #[test]
    fn the_median_is_the_middle_one() {
        assert_eq!(middle(vec![3.0, 1.0, 2.0, 100.0, 0.5]), 2.0);
    }

    #[test]
    fn shapes_are_known_by_name() {
        for shape in OracleShape::ALL {
            assert_eq!(shape.to_string().parse(), Ok(shape));
        }
        assert!("mqa".parse::<OracleShape>().is_err());
    }
}
