//! Distribution of error ratios as bars of an SVG.

use serde::Serialize;

use crate::report::block::short;

/// Width of a bar's slot in the drawing.
const SLOT: f64 = 22.0;
/// Height of the tallest bar.
const HEIGHT: f64 = 70.0;
/// Bins between 1e-4 and 1: half a decade each.
const INNER_BINS: usize = 8;
/// Bins beyond the bound: to √10, to 10, further.
const OUTER_BINS: usize = 3;
/// Zero, below 1e-4, the inner and the outer ones.
const BINS: usize = 2 + INNER_BINS + OUTER_BINS;

/// One bar.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Bar {
    /// Left edge.
    pub x: f64,
    /// Upper edge.
    pub y: f64,
    /// Height; 0 for an empty bin.
    pub height: f64,
    /// Checks in the bin.
    pub count: usize,
    /// Which ratios it holds.
    pub label: String,
    /// Whether the ratios are past the bound.
    pub beyond: bool,
}

/// Histogram of |error| over its bound, on a logarithmic axis.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Histogram {
    /// Bars from small to large ratios.
    pub bars: Vec<Bar>,
    /// Where the bound lies on the axis.
    pub bound_x: f64,
    /// Width of the drawing.
    pub width: f64,
    /// Height of the drawing, without labels.
    pub height: f64,
    /// Checks counted.
    pub total: usize,
    /// Largest ratio.
    pub largest: String,
}

impl Histogram {
    /// Histogram of the ratios; `None` when there is none.
    pub fn of(ratios: &[f64]) -> Option<Self> {
        let mut counts = [0usize; BINS];
        for ratio in ratios {
            counts[bin(*ratio)] += 1;
        }
        let tallest = counts.into_iter().max().filter(|count| *count > 0)?;
        let bars = counts
            .into_iter()
            .enumerate()
            .map(|(index, count)| {
                // a bin that holds anything stays visible
                let height =
                    if count == 0 { 0.0 } else { (HEIGHT * count as f64 / tallest as f64).max(2.0).round() };
                let x = SLOT * index as f64;
                Bar {
                    x,
                    y: HEIGHT - height,
                    height,
                    count,
                    label: label(index),
                    beyond: index >= 2 + INNER_BINS,
                }
            })
            .collect();
        let largest = short(ratios.iter().copied().fold(0.0, f64::max));
        let (bound_x, width) = (SLOT * (2 + INNER_BINS) as f64 - 1.0, SLOT * BINS as f64);
        Some(Self { bars, bound_x, width, height: HEIGHT, total: ratios.len(), largest })
    }
}

/// Bin of a ratio. A ratio of exactly 1 holds; NaN lies beyond everything.
fn bin(ratio: f64) -> usize {
    if ratio == 0.0 {
        return 0;
    }
    let upper_edges = (0..INNER_BINS + OUTER_BINS).map(|index| 10f64.powf(index as f64 / 2.0 - 4.0));
    1 + upper_edges.take_while(|edge| ratio.is_nan() || ratio > *edge).count()
}

fn label(index: usize) -> String {
    let edge = |index: usize| short(10f64.powf(index as f64 / 2.0 - 4.0));
    match index {
        0 => "0".to_owned(),
        1 => format!("up to {}", edge(0)),
        _ if index == BINS - 1 => format!("above {}", edge(index - 2)),
        _ => format!("{} to {}", edge(index - 2), edge(index - 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_of_one_holds_and_the_next_is_beyond_the_bound() {
        let histogram = Histogram::of(&[1.0, 1.0 + 1e-9]).unwrap();
        let within: usize = histogram.bars.iter().filter(|bar| !bar.beyond).map(|bar| bar.count).sum();
        assert_eq!(within, 1);
    }

    #[test]
    fn every_ratio_falls_into_one_bin() {
        let ratios = [
            0.0,
            1e-9,
            1e-4,
            2e-4,
            0.01,
            0.1,
            0.5,
            0.9999,
            1.0,
            3.0,
            9.0,
            11.0,
            1e300,
            f64::INFINITY,
            f64::NAN,
        ];
        let histogram = Histogram::of(&ratios).unwrap();
        assert_eq!(histogram.bars.iter().map(|bar| bar.count).sum::<usize>(), ratios.len());
        assert_eq!(histogram.bars.len(), BINS);
        assert_eq!(histogram.bars[0].count, 1);
        assert_eq!(histogram.bars[BINS - 1].count, 4, "NaN and infinity lie beyond everything");
        assert_eq!(histogram.bars.iter().filter(|bar| bar.beyond).map(|bar| bar.count).sum::<usize>(), 6);
    }

    #[test]
    fn bars_are_in_proportion_and_a_single_check_stays_visible() {
        let mut ratios = vec![0.5; 1000];
        ratios.push(1e-9);
        let histogram = Histogram::of(&ratios).unwrap();
        let heights: Vec<f64> = histogram.bars.iter().map(|bar| bar.height).filter(|h| *h > 0.0).collect();
        assert_eq!(heights, [2.0, HEIGHT]);
        assert!(histogram.bars.iter().all(|bar| bar.y + bar.height == HEIGHT));
    }

    #[test]
    fn nothing_measured_is_no_histogram() {
        assert_eq!(Histogram::of(&[]), None);
    }
}
