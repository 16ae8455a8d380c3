//! Selected tokens of a stack: which ones each row attends to in the layers that have some named.

use serde::{Deserialize, Serialize};
use shardcheck_engine::{LayerKind, SlotList, Tensor};

use super::StackCase;
use crate::sparse::MAX_TOP_K;
use crate::stream::Stream;
use crate::tokens::Tokens;
use crate::{CaseError, Turn};

/// Tokens that rows attend to in layers that have some named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackSelection {
    /// Most tokens k of a row; all that it sees where those are fewer.
    pub top_k: usize,
    /// How a rank lists their slots.
    pub list: SlotList,
}

impl StackSelection {
    /// Behind the pattern of an id: `.x4.packed`.
    pub(super) fn spell(&self) -> String {
        format!(".x{}.{}", self.top_k, self.list)
    }

    pub(super) fn read(tokens: &mut Tokens) -> Result<Self, String> {
        Ok(Self {
            top_k: tokens.need_number("x")?,
            list: tokens.need("list", &SlotList::ALL, SlotList::name)?,
        })
    }
}

impl StackCase {
    /// Layers that have tokens named.
    fn selecting(&self) -> usize {
        let plan = self.plan();
        (0..self.layers).filter(|layer| plan.kind(*layer) == LayerKind::Selecting).count()
    }

    /// Checks that there is a selection where layers go by one, and only there.
    pub(super) fn check_selection(&self) -> Result<(), CaseError> {
        let fail = |reason: String| Err(CaseError::OutOfRange(reason));
        let plan = self.plan();
        let early =
            |layer: &usize| plan.kind(*layer) == LayerKind::Sharing && plan.selection(*layer).is_none();
        if let Some(layer) = (0..self.layers).find(early) {
            return fail(format!("layer {layer} shares a selection (r), and no layer before has one (s)"));
        }
        match self.selection {
            Some(_) if self.selecting() == 0 => {
                fail("x tokens of a row in layers that select, and no layer does (s)".to_owned())
            }
            Some(own) if own.top_k == 0 || own.top_k > MAX_TOP_K => {
                fail(format!("x (tokens of a row) is {}; it must be between 1 and {MAX_TOP_K}", own.top_k))
            }
            None if self.selecting() > 0 => {
                fail("layers select tokens (s), and it is not said how many".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// Positions of the tokens of each row of a run, for each layer that has some named; none for rows of padding.
    pub(super) fn select(&self, turn: &Turn, seed: u64) -> Vec<Vec<Vec<usize>>> {
        let Some(own) = self.selection else { return Vec::new() };
        let mut counter = Stream::StackSelection.counter(seed ^ ((turn.step as u64) << 32));
        let mut of_layer = || {
            let mut rows = Vec::new();
            for (tokens, new) in turn.tokens.iter().zip(&turn.new_tokens) {
                for row in 0..*new {
                    let mut rest: Vec<usize> = (0..=tokens.len() - new + row).collect();
                    let count = own.top_k.min(rest.len());
                    rows.push(
                        (0..count)
                            .map(|_| rest.swap_remove(counter.below(rest.len() as u64) as usize))
                            .collect(),
                    );
                }
            }
            rows.resize(rows.len() + turn.padded_rows, Vec::new());
            rows
        };
        (0..self.selecting()).map(|_| of_layer()).collect()
    }

    /// What a step is given of them.
    pub(super) fn selected_tensor(&self, selected: &[Vec<Vec<usize>>]) -> Option<Tensor> {
        let own = self.selection?;
        let mut entries = Vec::new();
        for row in selected.iter().flatten() {
            entries.extend(row.iter().map(|position| *position as i32));
            entries.resize(entries.len() + own.top_k - row.len(), -1);
        }
        let rows = selected.first().map_or(0, Vec::len);
        Some(Tensor::from_i32(&[selected.len(), rows, own.top_k], &entries))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use crate::{Body, Case, generate_stack};

    const ID: &str = "stack/l4.h20.i9.v13.whole.srms.x3.packed/tiny-mla/tp2.dcp2.h1.s1.b4.n9.bf16.ag_rs/selected/v0+6,1+0_v0+2,1+2.pad1/7";

    #[test]
    fn rows_have_different_tokens_that_they_see_and_other_ones_in_each_layer_that_selects() {
        let case = Case::read_back(ID);
        let Body::Stack(body) = &case.body else { panic!("another body") };
        let inputs = generate_stack(body, 3).unwrap();
        let [first, second] = &inputs.turns[1].selected[..] else { panic!("two layers select") };
        assert_ne!(first, second);
        for (row, seen) in [7, 8, 1, 2, 0].into_iter().enumerate() {
            let own: BTreeSet<usize> = first[row].iter().copied().collect();
            assert_eq!(own.len(), seen.min(3), "row {row}");
            assert!(own.iter().all(|position| *position < seen));
        }
        let given = inputs.tensors(body, &inputs.turns[1]).get("selected").unwrap().to_i64();
        assert_eq!(given.len(), 2 * 5 * 3);
        assert_eq!(given[12..15], [-1; 3]);
    }

    #[test]
    fn a_selection_that_nobody_has_or_goes_by_is_refused() {
        for (from, to, reason) in [
            ("srms", "rsms", "layer 0 shares a selection"),
            ("x3", "x0", "x (tokens of a row) is 0; it must be between 1 and 16384"),
            (".x3.packed", "", "\"x\" with a whole number is missing"),
            ("srms.x3.packed", "mmmm.x3.packed", "unknown here"),
        ] {
            let error = ID.replacen(from, to, 1).parse::<Case>().unwrap_err().to_string();
            assert!(error.contains(reason), "{from} {to}: {error}");
        }
    }
}
