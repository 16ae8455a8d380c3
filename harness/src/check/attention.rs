//! Judging an attention call: what each element may be, from the values that the block table addresses.

use std::collections::BTreeMap;

use shardcheck_references::attention::plain::Problem;
use shardcheck_references::bound::{Certified, certify, interval};
use shardcheck_references::moments::Underivable;
use shardcheck_references::visibility::Visible;

use crate::finding::Stage;
use crate::judge::Allowed;

use super::call::Call;
use super::diagnosis;
use super::report::Report;
use super::tally::{Axes, Spot, Tally};
use super::whole::Whole;
use super::{CheckError, EmptyRows};

/// Half a unit in the last place of f32, relative: LSEs are stored after they were bounded.
const U32: f64 = 1.0 / (1u64 << 24) as f64;
/// Most rows that a failure lists.
const MOST_ROWS: usize = 6;

/// What a row must give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowKind {
    /// A value near the oracle's.
    Bounded,
    /// Zero, with an LSE of −inf.
    Empty,
    /// Nothing is asked: padding, or no bound.
    Undefined,
}

/// The oracle's results for the whole batch.
pub(super) struct Truth {
    /// `[tokens]`.
    pub(super) rows: Vec<RowKind>,
    /// `[tokens, heads, v_dim]`.
    pub(super) out: Vec<f64>,
    /// `[tokens, heads, v_dim]`: bound before the final rounding.
    pub(super) pre: Vec<f64>,
    /// `[tokens, heads]`, natural.
    pub(super) lse: Vec<f64>,
    /// `[tokens, heads]`.
    pub(super) lse_bound: Vec<f64>,
    /// Why rows have no bound.
    inconclusive: Vec<String>,
}

/// Judges a call.
///
/// # Errors
/// None beyond those of reading the call.
pub(super) fn judge(call: &Call<'_>) -> Result<Report, CheckError> {
    let truth = Truth::of(call);
    let (out, lse) = compare(call, &truth);
    let mut report = Report::new(call.subject);
    report.inconclusive.clone_from(&truth.inconclusive);
    let mut broken = out.broken.clone();
    for tally in [Some(&out), lse.as_ref()].into_iter().flatten() {
        report.add(&tally.comparison, &tally.fixed);
        if !tally.comparison.holds() {
            report.failures.push(failure(call, tally));
        }
        broken.extend(&tally.broken);
    }
    if report.failures.is_empty() && report.inconclusive.is_empty() && call.statistics {
        let whole = Whole::of(call);
        report.failures.extend(whole.failure());
        if whole.skipped() > 0 {
            let count = whole.skipped();
            report.notes.push(format!(
                "the whole output's statistics leave out {count} requests: they are too large"
            ));
        }
    }
    if !broken.is_empty() {
        report.diagnosis = Some(diagnosis::diagnose(call, &truth, &broken));
    }
    Ok(report.settled())
}

impl Truth {
    fn of(call: &Call<'_>) -> Self {
        let tokens = call.query.len() / (call.heads * call.qk_dim);
        let states = tokens * call.heads;
        let mut truth = Self {
            rows: vec![RowKind::Undefined; tokens],
            out: vec![0.0; states * call.v_dim],
            pre: vec![0.0; states * call.v_dim],
            lse: vec![f64::NEG_INFINITY; states],
            lse_bound: vec![0.0; states],
            inconclusive: Vec::new(),
        };
        for (index, request) in call.requests.iter().enumerate() {
            let visible = call.visible(index);
            for (row, seen) in visible.iter().enumerate() {
                let empty = match call.empty_rows {
                    EmptyRows::Zeros => RowKind::Empty,
                    EmptyRows::Undefined => RowKind::Undefined,
                };
                truth.rows[request.rows.start + row] = if seen.is_empty() { empty } else { RowKind::Bounded };
            }
            if visible.iter().all(Visible::is_empty) {
                continue;
            }
            match certify(&call.problem(index), &call.pages.layout, &visible, &call.contract) {
                Ok(certified) => truth.take(call, request.rows.start, &certified),
                // what one row can't be told from may not touch the others
                Err(_) => truth.row_by_row(call, index, &visible),
            }
        }
        truth
    }

    fn row_by_row(&mut self, call: &Call<'_>, index: usize, visible: &[Visible]) {
        let problem = call.problem(index);
        let width = call.heads * call.qk_dim;
        for (row, seen) in visible.iter().enumerate().filter(|(_, seen)| !seen.is_empty()) {
            let one = Problem { query: &problem.query[row * width..(row + 1) * width], ..problem };
            let token = call.requests[index].rows.start + row;
            match certify(&one, &call.pages.layout, std::slice::from_ref(seen), &call.contract) {
                Ok(certified) => self.take(call, token, &certified),
                Err(why) => {
                    self.rows[token] = RowKind::Undefined;
                    self.inconclusive.push(undecided(call, index, token, seen, why));
                }
            }
        }
    }

    fn take(&mut self, call: &Call<'_>, first: usize, certified: &Certified) {
        let (state, flat) = (first * call.heads, first * call.heads * call.v_dim);
        self.out[flat..flat + certified.out.len()].copy_from_slice(&certified.out);
        self.pre[flat..flat + certified.pre.len()].copy_from_slice(&certified.pre);
        for (index, lse) in certified.lse.iter().enumerate() {
            // the practical bound is tighter where its gate holds; it is calibrated, the other one is proved
            let bound = certified.practical_lse_bound[index].unwrap_or(certified.lse_bound[index]);
            self.lse[state + index] = *lse;
            self.lse_bound[state + index] = bound + U32 * lse.abs();
        }
    }

    /// What an output element may be.
    fn allowed_out(&self, call: &Call<'_>, token: usize, flat: usize) -> Allowed {
        match self.rows[token] {
            RowKind::Undefined => Allowed::Undefined,
            RowKind::Empty => Allowed::Exactly(0.0),
            RowKind::Bounded => {
                let (low, high) = interval(self.out[flat], self.pre[flat], call.contract.output);
                Allowed::Between { expected: self.out[flat], low, high }
            }
        }
    }

    /// What an LSE may be.
    fn allowed_lse(&self, token: usize, state: usize) -> Allowed {
        match self.rows[token] {
            RowKind::Undefined => Allowed::Undefined,
            RowKind::Empty => Allowed::NegativeInfinity,
            RowKind::Bounded => Allowed::near(self.lse[state], self.lse_bound[state]),
        }
    }
}

/// Why a row has no bound: an input that is no number is named with its place.
fn undecided(call: &Call<'_>, request: usize, token: usize, seen: &Visible, why: Underivable) -> String {
    let place = call.place_row(token);
    let held = &call.requests[request].held;
    let infinite = |values: &[f32]| values.iter().any(|value| !value.is_finite());
    let broken = seen.positions().find(|position| {
        (0..call.kv_heads).any(|head| {
            infinite(held.key_at(call, *position, head)) || infinite(held.value_at(call, *position, head))
        })
    });
    let slot = broken.and_then(|position| Some((position, call.pages.slot(request, position)?)));
    match slot {
        Some((position, slot)) => format!(
            "{place}: the cache holds NaN or infinity for position {position} (rank {}, block {}, row {}), which the row sees",
            slot.rank, slot.block, slot.offset
        ),
        None if (0..call.heads).any(|head| infinite(call.query_at(token, head))) => {
            format!("{place}: the query holds NaN or infinity")
        }
        None => format!("{place}: {why}"),
    }
}

fn compare(call: &Call<'_>, truth: &Truth) -> (Tally, Option<Tally>) {
    let axes = |dim| Axes { tokens: truth.rows.len(), heads: call.heads, dim };
    let mut out = Tally::new("out", axes(call.v_dim));
    let mut lse = call.lse_dtype.map(|_| Tally::new("lse", axes(1)));
    for (index, piece) in call.pieces.iter().enumerate() {
        for token in 0..truth.rows.len() {
            for of_piece in 0..piece.heads {
                let head = piece.first_head + of_piece;
                let spot = Spot { piece: index, token, head };
                let (state, of_piece) = (token * call.heads + head, token * piece.heads + of_piece);
                for d in 0..call.v_dim {
                    let (flat, seen) = (state * call.v_dim + d, piece.out[of_piece * call.v_dim + d]);
                    out.element((spot, d), seen, truth.allowed_out(call, token, flat));
                }
                if let (Some(lse), Some(seen)) = (&mut lse, &piece.lse) {
                    lse.element((spot, 0), seen[of_piece], truth.allowed_lse(token, state));
                }
            }
        }
    }
    (out, lse)
}

fn failure(call: &Call<'_>, tally: &Tally) -> crate::finding::Failure {
    let (spot, dim) = tally.worst().expect("a failed comparison has a worst element");
    let of_rank =
        call.pieces[spot.piece].rank.map(|rank| format!(", returned by rank {rank}")).unwrap_or_default();
    let measured = tally.comparison.measured();
    let is_lse = tally.tensor == "lse";
    let of_dim = if is_lse { String::new() } else { format!(", dim {dim}") };
    let place = format!("{}, head {}{of_dim}{of_rank}", call.place_row(spot.token), spot.head);
    let mut failure = tally.comparison.failure("", Stage::Output, |_| place.clone());
    let what = if is_lse { "LSEs" } else { "elements of out" };
    failure.headline = format!("{} of {} {what} are out of bound", failure.out_of_bound, measured.compared);
    if let Some(line) = owners(call, spot.token) {
        failure.notes.push(format!("context    {line}"));
    }
    failure.notes.extend(rows(call, tally).into_iter().map(|line| format!("row        {line}")));
    failure
}

/// How the tokens that a row sees lie on the ranks.
fn owners(call: &Call<'_>, token: usize) -> Option<String> {
    let request = call.request_of(token)?;
    let row = token - call.requests[request].rows.start;
    let seen = call.visible(request)[row].len();
    let layout = &call.pages.layout;
    let shares = (0..layout.world()).map(|rank| format!("{} on rank {rank}", layout.local_len(seen, rank)));
    let shares = shares.collect::<Vec<_>>().join(", ");
    let dealt = if layout.world() > 1 { format!(": {shares}") } else { String::new() };
    Some(format!("the row sees {seen} tokens of request {request}{dealt}"))
}

/// Rows with an element out of bound, and on which heads.
fn rows(call: &Call<'_>, tally: &Tally) -> Vec<String> {
    let mut heads: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for spot in &tally.broken {
        let list = heads.entry(spot.token).or_default();
        if !list.contains(&spot.head) {
            list.push(spot.head);
        }
    }
    let line = |(token, heads): (&usize, &Vec<usize>)| {
        let which = match heads.as_slice() {
            all if all.len() == call.heads => "all heads".to_owned(),
            few if few.len() <= 8 => format!("heads {few:?}"),
            many => format!("{} of {} heads, from head {}", many.len(), call.heads, many[0]),
        };
        format!("{}: {which}", call.place_row(*token))
    };
    let mut lines: Vec<String> = heads.iter().take(MOST_ROWS).map(line).collect();
    if heads.len() > MOST_ROWS {
        lines.push(format!("and {} more rows", heads.len() - MOST_ROWS));
    }
    lines
}
