//! Faults of stacks over ranks of prefill context parallelism: rows of the wrong rank, in the wrong order, or not there.

use super::{Fault, FaultClass};
use crate::prefill::Shares;
use crate::stack::Gathered;

/// Rows of all ranks one behind the other, padding and copies left out, taken for the order of the batch.
fn as_they_come(shares: &Shares) -> Vec<i64> {
    let mut places: Vec<i64> = (0..shares.gathered.len() as i64).collect();
    places.retain(|place| shares.gathered[*place as usize].is_some());
    places.truncate(shares.rows);
    places
}

/// Rows as if they had been dealt out to the ranks by turns.
fn by_turns(shares: &Shares) -> Vec<i64> {
    let ranks = shares.counts.len();
    (0..shares.rows).map(|row| (row % ranks * shares.padded + row / ranks) as i64).collect()
}

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "stack-pcp-keys-of-own-rows-alone",
        title: "a rank of prefill context parallelism writes the keys of its own rows; slots of the others get zeros",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["stack.attention"],
        apply: |p| p.stack.lanes.comes = |what, _| what != Gathered::Keys,
    },
    Fault {
        name: "stack-pcp-keys-in-the-order-of-ranks",
        title: "gathered keys are written as they come, one rank's rows behind the other's, to the slots of the batch's order",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["stack.attention"],
        apply: |p| p.stack.lanes.restore[Gathered::Keys as usize] = as_they_come,
    },
    Fault {
        name: "stack-pcp-keys-restored-as-by-turns",
        title: "gathered keys are brought back as if rows went round the ranks by turns, whatever the strategy",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["stack.attention"],
        apply: |p| p.stack.lanes.restore[Gathered::Keys as usize] = by_turns,
    },
    Fault {
        name: "stack-pcp-rows-see-their-chunk-alone",
        title: "a row of a prompt sees as many tokens as its rank's chunk has up to it",
        class: FaultClass::CausalBound,
        bugs: &[],
        killed_by: &["stack.attention"],
        apply: |p| p.stack.lanes.visible = |_, in_chunk| in_chunk + 1,
    },
    Fault {
        name: "stack-pcp-rows-do-not-see-themselves",
        title: "a row of a prompt that is shared out sees the tokens before it",
        class: FaultClass::CausalBound,
        bugs: &[],
        killed_by: &["stack.attention"],
        apply: |p| p.stack.lanes.visible = |visible, _| visible - 1,
    },
    Fault {
        name: "stack-pcp-positions-among-the-rows-of-the-rank",
        title: "queries and keys are turned by a row's place among those of its rank",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["stack.query", "stack.key"],
        apply: |p| p.stack.lanes.position = |_, place| place,
    },
    Fault {
        name: "stack-pcp-states-of-own-rows-alone",
        title: "a recurrent layer runs over the rows of its rank; what other ranks have are zeros to it",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["stack.kda", "stack.state", "stack.window"],
        apply: |p| p.stack.lanes.comes = |what, _| what != Gathered::States,
    },
    Fault {
        name: "stack-pcp-states-in-the-order-of-ranks",
        title: "a recurrent layer runs over gathered rows as they come, one rank's behind the other's",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["stack.kda", "stack.state", "stack.window"],
        apply: |p| p.stack.lanes.restore[Gathered::States as usize] = as_they_come,
    },
    Fault {
        name: "stack-pcp-state-on-the-last-rank-alone",
        title: "behind a prompt the last rank has the states of its requests; slots of the other ranks hold zeros",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["stack.kda", "stack.state"],
        apply: |p| p.stack.lanes.keeps = |rank, ranks, is_shared| !is_shared || rank + 1 == ranks,
    },
    Fault {
        name: "stack-pcp-head-gets-rows-in-the-order-of-ranks",
        title: "rows come to the head as they were gathered, one rank's behind the other's",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["stack.restored"],
        apply: |p| p.stack.lanes.restore[Gathered::Last as usize] = as_they_come,
    },
    Fault {
        name: "stack-pcp-head-counts-padding",
        title: "the head takes the first rows of what was gathered, padding of the ranks among them",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["stack.restored"],
        apply: |p| {
            p.stack.lanes.restore[Gathered::Last as usize] = |shares| (0..shares.rows as i64).collect()
        },
    },
    Fault {
        name: "stack-pcp-head-on-the-first-rank-alone",
        title: "rows of other ranks come to the head of the first rank of prefill context parallelism alone",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["stack.restored", "stack.ranks"],
        apply: |p| p.stack.lanes.comes = |what, rank| what != Gathered::Last || rank == 0,
    },
    Fault {
        name: "stack-pcp-decodes-shared-out-as-prompts",
        title: "rows of decodes are dealt out like those of a prompt, where every rank should have them",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["stack.pcp-rows"],
        apply: |p| p.stack.lanes.is_prompt = |_, _| true,
    },
    Fault {
        name: "stack-pcp-short-prompts-taken-for-decodes",
        title: "a prompt of at most three new rows is handled as a decode",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["stack.pcp-rows"],
        apply: |p| p.stack.lanes.is_prompt = |prefills, rows| prefills && rows > 3,
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefill::restore;

    #[test]
    fn rows_that_come_in_the_order_of_ranks_or_by_turns_are_those_of_the_titles() {
        // two ranks with chunks from both ends of five rows, and one row of padding
        let gathered = [0, 1, 4, 2, 3].map(Some).into_iter().chain([None]).collect();
        let shares = Shares { gathered, counts: vec![3, 2], padded: 3, rows: 5 };
        assert_eq!(as_they_come(&shares), [0, 1, 2, 3, 4]);
        assert_eq!(by_turns(&shares), [0, 3, 1, 4, 2]);
        assert_eq!(restore(&shares), [0, 1, 3, 4, 2]);
    }
}
