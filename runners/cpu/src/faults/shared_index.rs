//! Faults of an indexer whose rows are shared out: keys of too few rows, bounds of the wrong place, selections that come back to other rows.

use super::shared_rows::{behind_padding, rank_major};
use super::{Fault, FaultClass};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "index-keys-of-own-rows",
        title: "a rank scores its rows by the keys of its own rows alone: there is no gather",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["index.gather", "index.scores", "index.choice"],
        apply: |p| p.index.gather = |link, own| Ok(own.repeat(link.world)),
    },
    Fault {
        name: "index-keys-rank-major",
        title: "gathered keys are used as they arrive, rank after rank, without being brought into order",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["index.gather", "index.scores", "index.choice", "index.output"],
        apply: |p| p.index.key_places = |_, shares| rank_major(shares),
    },
    Fault {
        name: "index-bound-by-place-on-the-rank",
        title: "a row sees as many tokens as its place among the rank's rows of the request says",
        class: FaultClass::CausalBound,
        bugs: &["vllm-ascend#10827"],
        killed_by: &["index.bounds", "index.choice", "index.output"],
        apply: |p| p.index.bound = |row| row.computed + row.on_rank + 1,
    },
    Fault {
        name: "index-prefix-left-out",
        title: "the bound of a row counts the new tokens alone",
        class: FaultClass::CausalBound,
        bugs: &[],
        killed_by: &["index.bounds", "index.choice", "index.output"],
        apply: |p| p.index.bound = |row| row.in_request + 1,
    },
    Fault {
        name: "index-prefix-never-selected",
        title: "a row behind a cached prefix selects among the new tokens alone",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["index.choice", "index.output", "index.scores"],
        apply: |p| p.index.first_key = |computed| computed,
    },
    Fault {
        name: "index-scores-of-the-next-row",
        title: "a row is scored by the query of the row behind it in the batch",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["index.scores", "index.choice", "index.output"],
        apply: |p| p.index.query_of = |row, rows| (row + 1).min(rows - 1),
    },
    Fault {
        name: "index-padding-selects",
        title: "padding has the length of the first request instead of none, and selects among its tokens",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["index.padding", "index.bounds"],
        apply: |p| p.index.padding_sees = |tokens| tokens,
    },
    Fault {
        name: "index-selections-rank-major",
        title: "gathered selections are returned as they arrive, rank after rank, padding cut off behind the last row",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["index.output"],
        apply: |p| p.index.out_places = |_, shares, _| (0..shares.rows as i64).collect(),
    },
    Fault {
        name: "index-selections-with-padding",
        title: "the padding of earlier ranks is not taken out of the gathered selections",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["index.output"],
        apply: |p| p.index.out_places = |places, shares, _| behind_padding(&places, shares),
    },
    Fault {
        name: "index-rank-keeps-its-own-order",
        title: "ranks other than 0 bring selections back rotated by a row",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["index.ranks", "index.output"],
        apply: |p| {
            p.index.out_places = |mut places, _, rank| {
                if rank > 0 {
                    places.rotate_left(1);
                }
                places
            }
        },
    },
];

#[cfg(test)]
mod tests {
    use super::super::faulty::with;
    use crate::prefill::indexing::Seen;

    #[test]
    fn bounds_are_what_the_titles_say() {
        let row = Seen { computed: 5, in_request: 7, on_rank: 2 };
        let bound = |name: &str| (with(name).index.bound)(&row);
        assert_eq!(bound("index-bound-by-place-on-the-rank"), 8);
        assert_eq!(bound("index-prefix-left-out"), 8);
        assert_eq!((crate::policies::Policies::HEALTHY.index.bound)(&row), 13);
    }
}
