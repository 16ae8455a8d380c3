//! The output as a whole: what its error shows that no single element does.
//!
//! A certified bound is a worst case, and one lost token of a long context hides in it. Its errors over all dimensions and heads
//! are no rounding all the same: they point along the value of that token.

use shardcheck_references::statistics::{Alarm, Detector, Examination, Model};
use shardcheck_references::visibility::Visible;

use crate::finding::{Failure, Stage};

use super::call::Call;

/// Most products (tokens times rows times heads times widths) of all requests that are examined: some seconds.
const MOST_PRODUCTS: usize = 1_000_000_000;

/// What an examination found.
pub(super) struct Whole {
    /// Alarms, in words, with the request where they have one.
    alarms: Vec<String>,
    /// Elements that took part.
    elements: usize,
    /// Products that it took.
    products: usize,
    /// Requests that were too large.
    skipped: usize,
}

impl Whole {
    /// Examines outputs that hold finite numbers; every element must be within its bound already.
    pub(super) fn of(call: &Call<'_>) -> Self {
        let mut whole = Self { alarms: Vec::new(), elements: 0, products: 0, skipped: 0 };
        for out in outputs(call) {
            let mut joined: Option<Examination> = None;
            for request in 0..call.requests.len() {
                let Some(examination) = whole.examined(call, request, &out) else { continue };
                let own = [Detector::RowChiSquare, Detector::Token, Detector::Block];
                for alarm in examination.alarms().iter().filter(|alarm| own.contains(&alarm.detector)) {
                    whole.alarms.push(format!("request {request}: {alarm}"));
                }
                match &mut joined {
                    Some(joined) => joined.join(&examination),
                    none => *none = Some(examination),
                }
            }
            if let Some(joined) = joined {
                let shared = |alarm: &&Alarm| {
                    !matches!(alarm.detector, Detector::RowChiSquare | Detector::Token | Detector::Block)
                };
                whole.alarms.extend(joined.alarms().iter().filter(shared).map(Alarm::to_string));
                whole.elements += joined.elements;
            }
        }
        whole
    }

    fn examined(&mut self, call: &Call<'_>, request: usize, out: &[f64]) -> Option<Examination> {
        let (rows, visible) = (&call.requests[request].rows, call.visible(request));
        if visible.iter().all(Visible::is_empty) {
            return None;
        }
        let states = rows.len() * call.heads * (call.qk_dim + call.v_dim);
        let products = self.products.saturating_add(call.requests[request].seq_len.saturating_mul(states));
        if products > MOST_PRODUCTS {
            self.skipped += 1;
            return None;
        }
        self.products = products;
        let problem = call.problem(request);
        let model = Model::new(&problem, &call.pages.layout, &visible, &call.contract).ok()?;
        let width = call.heads * call.v_dim;
        model.examine(&out[rows.start * width..rows.end * width])
    }

    /// What it says, where something is wrong.
    pub(super) fn failure(&self) -> Option<Failure> {
        let first = self.alarms.first()?;
        let mut failure = Failure::because(format!(
            "every element is within its bound, but their errors together are no rounding: {first}"
        ))
        .at(Stage::Output);
        failure.compared = self.elements as u64;
        failure.notes =
            self.alarms.iter().skip(1).take(5).map(|alarm| format!("pattern    {alarm}")).collect();
        Some(failure)
    }

    /// Requests that were too large to be examined.
    pub(super) fn skipped(&self) -> usize {
        self.skipped
    }
}

/// Outputs over all heads, `[tokens, heads, v_dim]` each: one where heads are dealt to ranks, one a rank where all hold them.
fn outputs(call: &Call<'_>) -> Vec<Vec<f64>> {
    if call.pieces.iter().all(|piece| piece.heads == call.heads) {
        return call.pieces.iter().map(|piece| piece.out.clone()).collect();
    }
    let tokens = call.query.len() / (call.heads * call.qk_dim);
    let mut out = Vec::with_capacity(tokens * call.heads * call.v_dim);
    for token in 0..tokens {
        for piece in &call.pieces {
            let width = piece.heads * call.v_dim;
            out.extend_from_slice(&piece.out[token * width..(token + 1) * width]);
        }
    }
    vec![out]
}
