//! One failed row and head under the magnifier: what was seen, what is right, and the scores of all its tokens.

use rayon::prelude::*;

use super::attention::Truth;
use super::call::Call;
use super::tally::Spot;
use super::target::Target;

/// A row and head of a call.
pub(super) struct State<'a> {
    pub(super) call: &'a Call<'a>,
    pub(super) truth: &'a Truth,
    pub(super) spot: Spot,
    pub(super) request: usize,
    /// Row within the request.
    pub(super) row: usize,
    pub(super) kv_head: usize,
    /// Tokens that the row sees: the first ones of its request.
    pub(super) visible: usize,
    /// Scores of all tokens of the request, scaled.
    pub(super) scores: Vec<f64>,
    pub(super) target: Target<'a>,
}

impl<'a> State<'a> {
    /// `None` for a row of padding.
    pub(super) fn new(call: &'a Call<'a>, truth: &'a Truth, spot: Spot) -> Option<Self> {
        let request = call.request_of(spot.token)?;
        let row = spot.token - call.requests[request].rows.start;
        let piece = &call.pieces[spot.piece];
        let state = spot.token * piece.heads + spot.head - piece.first_head;
        let of_batch = spot.token * call.heads + spot.head;
        let vector = |values: &'a [f64], state: usize| &values[state * call.v_dim..(state + 1) * call.v_dim];
        let mut magnified = Self {
            call,
            truth,
            spot,
            request,
            row,
            kv_head: call.kv_head(spot.head),
            visible: call.visible(request)[row].len(),
            scores: Vec::new(),
            target: Target {
                seen: vector(&piece.out, state),
                seen_lse: piece.lse.as_ref().map(|lse| lse[state]),
                right: vector(&truth.out, of_batch),
                pre: vector(&truth.pre, of_batch),
                lse: truth.lse[of_batch],
                lse_bound: truth.lse_bound[of_batch],
                output: call.contract.output,
            },
        };
        magnified.scores = magnified.scores_of(&call.requests[request].held, magnified.kv_head);
        Some(magnified)
    }

    /// Scores of this query with the keys of some tokens.
    pub(super) fn scores_of(&self, held: &super::call::Held, kv_head: usize) -> Vec<f64> {
        let query: Vec<f64> =
            self.call.query_at(self.spot.token, self.spot.head).iter().map(|q| f64::from(*q)).collect();
        let width = self.call.kv_heads * self.call.qk_dim;
        let start = kv_head * self.call.qk_dim;
        held.key
            .par_chunks_exact(width)
            .map(|keys| self.call.scale * product(&query, &keys[start..start + query.len()]))
            .collect()
    }

    /// Tokens of the request.
    pub(super) fn seq_len(&self) -> usize {
        self.call.requests[self.request].seq_len
    }

    /// Rows of the request.
    pub(super) fn rows(&self) -> usize {
        self.call.requests[self.request].rows.len()
    }
}

fn product(query: &[f64], key: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 8];
    let (blocks, rest) = query.as_chunks::<8>();
    let (key_blocks, key_rest) = key.as_chunks::<8>();
    for (q, k) in blocks.iter().zip(key_blocks) {
        for lane in 0..8 {
            lanes[lane] += q[lane] * f64::from(k[lane]);
        }
    }
    lanes.iter().sum::<f64>() + rest.iter().zip(key_rest).map(|(q, k)| q * f64::from(*k)).sum::<f64>()
}
