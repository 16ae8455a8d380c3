//! Judging a merge: given partial outputs and LSEs, what the merged ones may be.

use std::collections::{BTreeMap, BTreeSet};
use std::f64::consts::{LN_2, LOG2_E};

use shardcheck_engine::Tensors;
use shardcheck_formats::Contract;
use shardcheck_references::bound::{Certified, MergeInputs, certify_merge, interval};
use shardcheck_references::merge::log_sum_exp;

use crate::finding::{Failure, Stage};
use crate::judge::Allowed;

use super::diagnosis::causes;
use super::report::{Diagnosis, Explanation, Report};
use super::sizes::{Piece, floats, natural_lse, pieces};
use super::tally::{Axes, Spot, Tally};
use super::target::Target;
use super::{CheckError, EmptyRows, Header};

/// Half a unit in the last place of f32, relative: LSEs are stored after they were bounded.
const U32: f64 = 1.0 / (1u64 << 24) as f64;
/// Most failed states that hypotheses are tried on.
const MOST_STATES: usize = 256;

/// A slip of a merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MergeHypothesis {
    /// Nothing was written.
    Zeros,
    /// A part is left out.
    PartMissing,
    /// A part counts twice.
    PartTwice,
    /// A part was returned as the whole.
    PartAlone,
    /// Weights in another base than the LSEs.
    MergeBase,
    /// Parts averaged.
    Averaged,
    /// Parts added up.
    Summed,
    /// A part without tokens counts as if its LSE were 0.
    EmptyCounted,
    /// The axes of the partial LSEs are exchanged.
    LseTransposed,
    /// The merged LSE is in another base than said.
    LseBase,
    /// The merged LSE is the largest one instead of the sum.
    LseLargest,
    /// A head has the output of its neighbour.
    HeadsShifted,
}

impl MergeHypothesis {
    /// Every slip.
    pub const ALL: [Self; 12] = [
        Self::Zeros,
        Self::PartMissing,
        Self::PartTwice,
        Self::PartAlone,
        Self::MergeBase,
        Self::Averaged,
        Self::Summed,
        Self::EmptyCounted,
        Self::LseTransposed,
        Self::LseBase,
        Self::LseLargest,
        Self::HeadsShifted,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        self.entry().0
    }

    /// What happened, in words.
    pub const fn sentence(self) -> &'static str {
        self.entry().1
    }

    const fn entry(self) -> (&'static str, &'static str) {
        match self {
            Self::Zeros => ("zeros", "the output is zero, as if nothing had been written"),
            Self::PartMissing => ("part-missing", "a part is left out"),
            Self::PartTwice => ("part-twice", "a part counts twice"),
            Self::PartAlone => ("part-alone", "one part was returned without a merge"),
            Self::MergeBase => ("merge-base", "the merge exponentiates LSEs in another base than they have"),
            Self::Averaged => {
                ("partials-averaged", "the parts are averaged, without the weights of their LSEs")
            }
            Self::Summed => ("partials-summed", "the parts are added up, without the weights of their LSEs"),
            Self::EmptyCounted => {
                ("empty-counted", "a part without tokens counts as if its LSE were 0 instead of -inf")
            }
            Self::LseTransposed => ("lse-transposed", "the axes of the partial LSEs are exchanged"),
            Self::LseBase => {
                ("lse-base", "the output is right and the LSE has another base than lse_base says")
            }
            Self::LseLargest => (
                "lse-largest",
                "the output is right and the LSE is the largest of the parts' instead of their sum",
            ),
            Self::HeadsShifted => ("heads-shifted", "the head holds the output of its neighbour"),
        }
    }
}

/// Given parts with what must come of them.
struct Merging {
    contract: Contract,
    parts: usize,
    rows: usize,
    heads: usize,
    v_dim: usize,
    /// `[parts, rows, heads, v_dim]`.
    out: Vec<f64>,
    /// `[parts, rows, heads]`, natural.
    lse: Vec<f64>,
    /// `[rows]`; `None` where no bound can be derived.
    certified: Vec<Option<Certified>>,
    pieces: Vec<Piece>,
}

/// Judges a merge.
///
/// # Errors
/// [`CheckError`]: what is missing, or does not fit.
pub(super) fn judge(header: &Header, tensors: &Tensors) -> Result<Report, CheckError> {
    let mut report = Report::new(header.check);
    let merging = Merging::read(header, tensors, &mut report)?;
    let (mut out, mut lse) = (
        Tally::new("out", merging.axes(merging.v_dim)),
        tensors.find("lse").map(|_| Tally::new("lse", merging.axes(1))),
    );
    for (index, piece) in merging.pieces.iter().enumerate() {
        for row in 0..merging.rows {
            for of_piece in 0..piece.heads {
                let head = piece.first_head + of_piece;
                let spot = Spot { piece: index, token: row, head };
                let target = merging.target(spot);
                for d in 0..merging.v_dim {
                    let seen = piece.out[(row * piece.heads + of_piece) * merging.v_dim + d];
                    out.element((spot, d), seen, allowed_out(header, target.as_ref(), d));
                }
                if let (Some(lse), Some(seen)) = (&mut lse, &piece.lse) {
                    let allowed = allowed_lse(header, target.as_ref());
                    lse.element((spot, 0), seen[row * piece.heads + of_piece], allowed);
                }
            }
        }
    }
    let mut broken = out.broken.clone();
    for tally in [Some(&out), lse.as_ref()].into_iter().flatten() {
        report.add(&tally.comparison, &tally.fixed);
        if !tally.comparison.holds() {
            report.failures.push(merging.failure(tally));
        }
        broken.extend(&tally.broken);
    }
    if !broken.is_empty() {
        report.diagnosis = Some(merging.diagnose(&broken));
    }
    Ok(report.settled())
}

/// What an output element may be; `None` where no bound can be derived.
fn allowed_out(header: &Header, target: Option<&Target<'_>>, d: usize) -> Allowed {
    match (target, header.empty_rows) {
        (None, _) => Allowed::Undefined,
        (Some(target), EmptyRows::Zeros) if target.lse == f64::NEG_INFINITY => Allowed::Exactly(0.0),
        (Some(target), EmptyRows::Undefined) if target.lse == f64::NEG_INFINITY => Allowed::Undefined,
        (Some(target), _) => {
            let (low, high) = interval(target.right[d], target.pre[d], target.output);
            Allowed::Between { expected: target.right[d], low, high }
        }
    }
}

fn allowed_lse(header: &Header, target: Option<&Target<'_>>) -> Allowed {
    match target {
        Some(target) if target.lse.is_finite() => Allowed::near(target.lse, target.lse_bound),
        Some(_) if header.empty_rows == EmptyRows::Zeros => Allowed::NegativeInfinity,
        _ => Allowed::Undefined,
    }
}

impl Merging {
    fn read(header: &Header, tensors: &Tensors, report: &mut Report) -> Result<Self, CheckError> {
        let partial = tensors.get("partial_out")?;
        floats("partial_out", partial)?;
        let [parts, rows, heads, v_dim] = *partial.shape() else {
            return Err(CheckError::shape("partial_out", partial.shape(), "[parts, tokens, heads, size]"));
        };
        if parts * rows * heads * v_dim == 0 {
            return Err(CheckError::shape("partial_out", partial.shape(), "no axis is empty"));
        }
        let out = tensors.get("out")?;
        floats("out", out)?;
        let given = tensors.get("partial_lse")?;
        let mut merging = Self {
            contract: header.contract_for(out.dtype())?,
            parts,
            rows,
            heads,
            v_dim,
            out: partial.to_f64(),
            lse: natural_lse(header, "partial_lse", given, (Some(parts), rows, heads))?,
            certified: Vec::new(),
            pieces: pieces(header, (out, tensors.find("lse")), (rows, heads, v_dim))?,
        };
        for row in 0..rows {
            let of_row = |values: &[f64], width: usize| -> Vec<f64> {
                let part = |part: usize| {
                    let start = (part * rows + row) * width;
                    &values[start..start + width]
                };
                (0..parts).flat_map(part).copied().collect()
            };
            let (out, lse) = (of_row(&merging.out, heads * v_dim), of_row(&merging.lse, heads));
            let inputs = MergeInputs { rows: 1, heads, v_dim, out: &out, lse: &lse };
            let certified = certify_merge(&inputs, &merging.contract, false);
            if let Err(why) = &certified {
                report.inconclusive.push(format!("row {row}: a part holds NaN or infinity beside a finite LSE, or its LSE is NaN or +inf ({why})"));
            }
            merging.certified.push(certified.ok());
        }
        Ok(merging)
    }

    fn axes(&self, dim: usize) -> Axes {
        Axes { tokens: self.rows, heads: self.heads, dim }
    }

    fn target(&self, spot: Spot) -> Option<Target<'_>> {
        let (certified, piece) = (self.certified[spot.token].as_ref()?, &self.pieces[spot.piece]);
        let range = spot.head * self.v_dim..(spot.head + 1) * self.v_dim;
        let at = spot.token * piece.heads + spot.head - piece.first_head;
        let lse = certified.lse[spot.head];
        Some(Target {
            seen: &piece.out[at * self.v_dim..(at + 1) * self.v_dim],
            seen_lse: piece.lse.as_ref().map(|lse| lse[at]),
            right: &certified.out[range.clone()],
            pre: &certified.pre[range],
            lse,
            lse_bound: certified.lse_bound[spot.head] + if lse.is_finite() { U32 * lse.abs() } else { 0.0 },
            output: self.contract.output,
        })
    }

    fn failure(&self, tally: &Tally) -> Failure {
        let (spot, dim) = tally.worst().expect("a failed comparison has a worst element");
        let of_dim = if tally.tensor == "lse" { String::new() } else { format!(", dim {dim}") };
        let rank = self.pieces[spot.piece].rank;
        let of_rank = rank.map(|rank| format!(", returned by rank {rank}")).unwrap_or_default();
        let place = format!("row {}, head {}{of_dim}{of_rank}", spot.token, spot.head);
        let mut failure = tally.comparison.failure("", Stage::Merge, |_| place.clone());
        failure.headline = format!(
            "{} of {} values of {} are out of bound",
            failure.out_of_bound, failure.compared, tally.tensor
        );
        let given = (0..self.parts).map(|part| format!("{:.4}", self.lse_of(part, spot.token, spot.head)));
        failure.notes.push(format!("parts      natural LSEs {}", given.collect::<Vec<_>>().join(", ")));
        failure
    }

    fn lse_of(&self, part: usize, row: usize, head: usize) -> f64 {
        self.lse[(part * self.rows + row) * self.heads + head]
    }

    fn out_of(&self, part: usize, row: usize, head: usize) -> &[f64] {
        let start = ((part * self.rows + row) * self.heads + head) * self.v_dim;
        &self.out[start..start + self.v_dim]
    }

    fn diagnose(&self, broken: &BTreeSet<Spot>) -> Diagnosis {
        let step = broken.len().div_ceil(MOST_STATES).max(1);
        let spots: Vec<Spot> = broken.iter().copied().step_by(step).collect();
        let dims: Vec<usize> = (0..self.v_dim).collect();
        let mut explained: BTreeMap<(MergeHypothesis, Option<String>), BTreeSet<usize>> = BTreeMap::new();
        for (index, spot) in spots.iter().enumerate() {
            let Some(target) = self.target(*spot) else { continue };
            for hypothesis in MergeHypothesis::ALL {
                for (which, out, lse) in self.predictions(hypothesis, *spot, &target) {
                    if target.is_explained(&dims, &out, lse) {
                        explained.entry((hypothesis, which)).or_default().insert(index);
                    }
                }
            }
        }
        let (named, _) = causes(&explained, spots.len());
        let explanation = |(hypothesis, which): &(MergeHypothesis, Option<String>)| Explanation {
            hypothesis: hypothesis.name().to_owned(),
            which: which.clone(),
            stage: Stage::Merge,
            sentence: match which {
                Some(which) => format!("{}: {which}", hypothesis.sentence()),
                None => hypothesis.sentence().to_owned(),
            },
            explains: explained[&(*hypothesis, which.clone())].len(),
            requests: Vec::new(),
        };
        Diagnosis {
            failed_states: broken.len(),
            looked_at: spots.len(),
            explanations: named.iter().map(explanation).collect(),
            tokens: Vec::new(),
        }
    }

    fn predictions(&self, slip: MergeHypothesis, spot: Spot, target: &Target<'_>) -> Vec<Predicted> {
        let (row, head) = (spot.token, spot.head);
        let lses: Vec<f64> = (0..self.parts).map(|part| self.lse_of(part, row, head)).collect();
        let held = |part: &usize| lses[*part].is_finite();
        let part_name = |part: usize| Some(format!("part {part}"));
        let each = |counts: &dyn Fn(usize, usize) -> f64| -> Vec<Predicted> {
            let kept = |left: usize| {
                let moved: Vec<f64> =
                    (0..self.parts).map(|part| lses[part] + counts(left, part).ln()).collect();
                let (out, lse) = self.merged(row, head, &moved);
                (part_name(left), out, Some(lse))
            };
            (0..self.parts).filter(held).map(kept).collect()
        };
        let with = |which: Option<String>, weights: Vec<f64>| (which, self.sum(row, head, &weights), None);
        let constant =
            |weight: f64| lses.iter().map(|lse| if lse.is_finite() { weight } else { 0.0 }).collect();
        let in_base = |which: &str, factor: f64| {
            let scaled: Vec<f64> = lses.iter().map(|lse| lse * factor).collect();
            (Some(which.to_owned()), self.merged(row, head, &scaled).0, None)
        };
        let count = (0..self.parts).filter(held).count().max(1);
        match slip {
            MergeHypothesis::Zeros => vec![(None, vec![0.0; self.v_dim], None)],
            MergeHypothesis::PartMissing => each(&|left, part| f64::from(u8::from(left != part))),
            MergeHypothesis::PartTwice => each(&|left, part| f64::from(1 + u8::from(left == part))),
            MergeHypothesis::PartAlone => each(&|left, part| f64::from(u8::from(left == part))),
            MergeHypothesis::MergeBase => {
                vec![in_base("2^LSE of natural LSEs", LN_2), in_base("e^LSE of LSEs in base 2", LOG2_E)]
            }
            MergeHypothesis::Averaged => vec![
                with(Some("over all parts".to_owned()), constant(1.0 / self.parts as f64)),
                with(Some("over parts that hold tokens".to_owned()), constant(1.0 / count as f64)),
            ],
            MergeHypothesis::Summed => vec![with(None, constant(1.0))],
            MergeHypothesis::EmptyCounted if count < self.parts => {
                let counted: Vec<f64> =
                    lses.iter().map(|lse| if lse.is_finite() { *lse } else { 0.0 }).collect();
                let (out, lse) = self.merged(row, head, &counted);
                vec![(None, out, Some(lse))]
            }
            MergeHypothesis::LseTransposed => {
                let flat = row * self.heads + head;
                let (of_head, of_row) = (flat / self.rows, flat % self.rows);
                let lses: Vec<f64> = (0..self.parts).map(|part| self.lse_of(part, of_row, of_head)).collect();
                vec![(None, self.merged(row, head, &lses).0, None)]
            }
            MergeHypothesis::LseBase => [("base 2 instead of e", LOG2_E), ("base e instead of 2", LN_2)]
                .map(|(which, by)| (Some(which.to_owned()), target.right.to_vec(), Some(target.lse * by)))
                .to_vec(),
            MergeHypothesis::LseLargest => {
                let largest = lses.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                vec![(None, target.right.to_vec(), Some(largest))]
            }
            MergeHypothesis::HeadsShifted => self.shifted(row, head),
            MergeHypothesis::EmptyCounted => Vec::new(),
        }
    }

    fn shifted(&self, row: usize, head: usize) -> Vec<Predicted> {
        let Some(certified) = self.certified[row].as_ref().filter(|_| self.heads > 1) else {
            return Vec::new();
        };
        let of = |which: &str, other: usize| {
            let out = certified.out[other * self.v_dim..(other + 1) * self.v_dim].to_vec();
            (Some(which.to_owned()), out, Some(certified.lse[other]))
        };
        let heads = self.heads;
        vec![of("the one after it", (head + 1) % heads), of("the one before it", (head + heads - 1) % heads)]
    }

    /// The merge with other LSEs; a part without weight is not read.
    fn merged(&self, row: usize, head: usize, lses: &[f64]) -> (Vec<f64>, f64) {
        let total = log_sum_exp(lses.iter().copied());
        let weight = |lse: &f64| if total == f64::NEG_INFINITY { 0.0 } else { (lse - total).exp() };
        let weights: Vec<f64> = lses.iter().map(weight).collect();
        (self.sum(row, head, &weights), total)
    }

    fn sum(&self, row: usize, head: usize, weights: &[f64]) -> Vec<f64> {
        let mut sum = vec![0.0; self.v_dim];
        for (part, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight != 0.0) {
            sum.iter_mut().zip(self.out_of(part, row, head)).for_each(|(to, out)| *to += weight * out);
        }
        sum
    }
}

/// Which one, output, natural LSE.
type Predicted = (Option<String>, Vec<f64>, Option<f64>);

#[cfg(test)]
mod tests;
