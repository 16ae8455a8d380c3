//! Single tokens and single blocks: which one, left out or counted twice, gives what a row returned.

use std::collections::BTreeMap;

use super::call::Call;
use super::state::State;

/// Most sentences.
const MOST_SENTENCES: usize = 6;
/// Most candidates that a sentence lists.
const MOST_CANDIDATES: usize = 3;

/// A set of tokens that counts wrongly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Culprit {
    /// One token, by position.
    Token(usize),
    /// The tokens of one block of one rank: `(entry of the table, rank)`.
    Block(usize, usize),
}

/// How it counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Count {
    Missing,
    Twice,
}

impl Count {
    const ALL: [Self; 2] = [Self::Missing, Self::Twice];

    fn words(self) -> &'static str {
        match self {
            Self::Missing => "is missing",
            Self::Twice => "counts twice",
        }
    }
}

/// A sentence for each row that one token or one block explains on every head looked at.
pub(super) fn sentences(states: &[&State<'_>]) -> Vec<String> {
    let mut rows: Vec<(usize, usize)> =
        states.iter().map(|state| (state.spot.token, state.spot.piece)).collect();
    rows.dedup();
    rows.sort_unstable();
    rows.dedup();
    let mut lines = Vec::new();
    for (token, piece) in rows {
        let of_row: Vec<&State<'_>> = states
            .iter()
            .filter(|state| (state.spot.token, state.spot.piece) == (token, piece))
            .copied()
            .collect();
        let mut common: Option<Vec<(Culprit, Count)>> = None;
        for state in &of_row {
            let found = culprits(state);
            common = Some(match common {
                None => found,
                Some(before) => before.into_iter().filter(|culprit| found.contains(culprit)).collect(),
            });
        }
        let common = common.unwrap_or_default();
        if !common.is_empty() {
            lines.push(sentence(of_row[0], &common));
        }
    }
    let more = lines.len().saturating_sub(MOST_SENTENCES);
    lines.truncate(MOST_SENTENCES);
    if more > 0 {
        lines.push(format!("{more} more rows"));
    }
    lines
}

fn sentence(state: &State<'_>, culprits: &[(Culprit, Count)]) -> String {
    let (call, request) = (state.call, state.request);
    let row = call.place_row(state.spot.token);
    let words = |(culprit, count): &(Culprit, Count)| {
        let what = match culprit {
            Culprit::Token(position) => of_token(call, request, *position),
            Culprit::Block(entry, rank) => {
                let of_rank = if call.pages.per_rank { format!(" on rank {rank}") } else { String::new() };
                format!("block {entry} of its table{of_rank}")
            }
        };
        format!("{what} {}", count.words())
    };
    if culprits.len() > MOST_CANDIDATES {
        return format!(
            "{row}: one of {} tokens or blocks counts wrongly; they can't be told apart",
            culprits.len()
        );
    }
    format!("{row}: {}", culprits.iter().map(words).collect::<Vec<_>>().join(", or "))
}

fn of_token(call: &Call<'_>, request: usize, position: usize) -> String {
    match call.pages.slot(request, position) {
        Some(slot) => {
            format!("position {position} (rank {}, block {}, row {})", slot.rank, slot.block, slot.offset)
        }
        None => format!("position {position}"),
    }
}

/// What the tokens of a block add up to.
struct Sum {
    tokens: usize,
    weight: f64,
    values: Vec<f64>,
}

/// Everything single that gives what was seen.
fn culprits(state: &State<'_>) -> Vec<(Culprit, Count)> {
    if state.target.seen.iter().any(|seen| !seen.is_finite()) || state.visible < 2 {
        return Vec::new();
    }
    let dims = state.target.by_deviation();
    let held = &state.call.requests[state.request].held;
    let lse = state.target.lse;
    let mut found = Vec::new();
    let mut blocks: BTreeMap<(usize, usize), Sum> = BTreeMap::new();
    for position in 0..state.visible {
        let weight = (state.scores[position] - lse).exp();
        let value = held.value_at(state.call, position, state.kv_head);
        found.extend(
            Count::ALL
                .into_iter()
                .filter(|count| fits(state, &dims, weight, |d| f64::from(value[d]), *count))
                .map(|count| (Culprit::Token(position), count)),
        );
        let sum = blocks.entry(block_of(state.call, position)).or_insert_with(|| Sum {
            tokens: 0,
            weight: 0.0,
            values: vec![0.0; state.call.v_dim],
        });
        sum.tokens += 1;
        sum.weight += weight;
        sum.values.iter_mut().zip(value).for_each(|(to, value)| *to += weight * f64::from(*value));
    }
    // a block of one token is that token
    for ((entry, rank), sum) in blocks.iter().filter(|(_, sum)| sum.tokens > 1 && sum.weight > 0.0) {
        for count in Count::ALL {
            if fits(state, &dims, sum.weight, |d| sum.values[d] / sum.weight, count) {
                found.push((Culprit::Block(*entry, *rank), count));
            }
        }
    }
    found
}

/// Entry of the table and rank that a position belongs to.
fn block_of(call: &Call<'_>, position: usize) -> (usize, usize) {
    if call.pages.per_rank {
        (position / call.pages.layout.virtual_block_tokens(), call.pages.layout.owner(position))
    } else {
        (position / call.pages.block, 0)
    }
}

/// Whether a set of weight `w` and mean `v`, left out or counted twice, gives what was seen: `(o − w·v) / (1 − w)` or
/// `(o + w·v) / (1 + w)`, and an LSE that moves by `ln(1 ∓ w)`.
fn fits(state: &State<'_>, dims: &[usize], weight: f64, value: impl Fn(usize) -> f64, count: Count) -> bool {
    let total = match count {
        Count::Missing => 1.0 - weight,
        Count::Twice => 1.0 + weight,
    };
    if total < 1e-9 {
        return false;
    }
    let target = &state.target;
    // an engine may merge outputs and LSEs apart: an LSE that is right says nothing
    let lse = target
        .seen_lse
        .filter(|seen| (seen - target.lse).abs() > target.lse_bound)
        .map(|_| target.lse + total.ln());
    let moved = |d: usize| {
        let by = weight * (value(d) - target.right[d]) / total;
        match count {
            Count::Missing => target.right[d] - by,
            Count::Twice => target.right[d] + by,
        }
    };
    // most sets fail at the first element
    target.lse_fits(lse)
        && dims.iter().all(|d| target.element_fits(*d, moved(*d)))
        && target.is_explained(dims, &dims.iter().map(|d| moved(*d)).collect::<Vec<_>>(), lse)
}
