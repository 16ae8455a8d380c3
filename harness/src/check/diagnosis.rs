//! Which known slips give the answers that were seen, and which single tokens do.

use std::collections::{BTreeMap, BTreeSet};

use super::attention::Truth;
use super::call::Call;
use super::hypothesis::Hypothesis;
use super::report::{Diagnosis, Explanation};
use super::state::State;
use super::tally::Spot;
use super::tokens;

/// Most states that are looked at.
const MOST_STATES: usize = 64;
/// Most heads of one row and piece that are looked at.
const MOST_HEADS: usize = 3;
/// Most multiplications for scores of looked-at states; a few states are looked at in any case.
const MOST_PRODUCTS: usize = 400_000_000;
/// States that are looked at in any case.
const LEAST_STATES: usize = 3;
/// Most causes that are named, one for what another leaves open.
const MOST_CAUSES: usize = 3;
/// Most slips that are named for the same states.
const MOST_ALIKE: usize = 3;

/// A slip and which one of its kind.
type Named = (Hypothesis, Option<String>);

/// Looks for what explains the broken rows and heads.
pub(super) fn diagnose(call: &Call<'_>, truth: &Truth, broken: &BTreeSet<Spot>) -> Diagnosis {
    let states: Vec<State<'_>> =
        looked_at(call, broken).into_iter().filter_map(|spot| State::new(call, truth, spot)).collect();
    let mut explained: BTreeMap<Named, BTreeSet<usize>> = BTreeMap::new();
    for (index, state) in states.iter().enumerate() {
        for hypothesis in Hypothesis::ALL {
            for (which, prediction) in hypothesis.predictions(state) {
                if prediction.fits(state) {
                    explained.entry((hypothesis, which)).or_default().insert(index);
                }
            }
        }
    }
    let mut diagnosis =
        Diagnosis { failed_states: broken.len(), looked_at: states.len(), ..Diagnosis::default() };
    let (causes, open) = causes(&explained, states.len());
    diagnosis.explanations =
        causes.iter().map(|named| explanation(named, &explained[named], &states)).collect();
    diagnosis.tokens = tokens::sentences(&open.iter().map(|index| &states[*index]).collect::<Vec<_>>());
    diagnosis
}

/// The causes that explain most of `count` states, with those that explain as much, and then the same for what is left; and
/// what stays open.
pub(super) fn causes<K: Ord + Clone>(
    explained: &BTreeMap<K, BTreeSet<usize>>,
    count: usize,
) -> (Vec<K>, BTreeSet<usize>) {
    let mut open: BTreeSet<usize> = (0..count).collect();
    let mut named = Vec::new();
    for _ in 0..MOST_CAUSES {
        let most = explained.values().map(|found| found.intersection(&open).count()).max().unwrap_or(0);
        if most == 0 {
            break;
        }
        let best = explained.iter().filter(|(_, found)| found.intersection(&open).count() == most);
        let best: Vec<(&K, &BTreeSet<usize>)> = best.take(MOST_ALIKE).collect();
        named.extend(best.iter().map(|(cause, _)| (*cause).clone()));
        open.retain(|index| !best[0].1.contains(index));
    }
    (named, open)
}

fn explanation(named: &Named, found: &BTreeSet<usize>, states: &[State<'_>]) -> Explanation {
    let requests: BTreeSet<usize> = found.iter().map(|index| states[*index].request).collect();
    let (hypothesis, which) = named;
    Explanation {
        hypothesis: hypothesis.name().to_owned(),
        which: which.clone(),
        stage: hypothesis.stage(),
        sentence: hypothesis.sentence(which.as_deref()),
        explains: found.len(),
        requests: requests.into_iter().collect(),
    }
}

/// A few heads of as many rows as the work allows, spread over the batch.
fn looked_at(call: &Call<'_>, broken: &BTreeSet<Spot>) -> Vec<Spot> {
    let mut by_row: BTreeMap<(usize, usize), Vec<Spot>> = BTreeMap::new();
    for spot in broken {
        by_row.entry((spot.token, spot.piece)).or_default().push(*spot);
    }
    let step = by_row.len().div_ceil(MOST_STATES).max(1);
    let rows: Vec<Vec<Spot>> = by_row.into_values().step_by(step).collect();
    let (mut chosen, mut products) = (Vec::new(), 0);
    for turn in 0..MOST_HEADS {
        for spots in &rows {
            // the first, the last and the middle one
            let index = [0, spots.len() - 1, spots.len() / 2][turn];
            if turn > 0 && spots.len() <= turn
                || chosen.len() >= MOST_STATES
                || chosen.contains(&spots[index])
            {
                continue;
            }
            let tokens =
                call.request_of(spots[index].token).map_or(0, |request| call.requests[request].seq_len);
            products += tokens * call.qk_dim;
            if products > MOST_PRODUCTS && chosen.len() >= LEAST_STATES {
                return chosen;
            }
            chosen.push(spots[index]);
        }
    }
    chosen
}
