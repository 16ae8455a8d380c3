//! Faults of the compressor: blocks of the wrong tokens, entries that come too early, gates that are weighed among too few.

use super::shared_rows::rank_major;
use super::{Fault, FaultClass};
use crate::prefill::compressing::{Part, pool};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "compress-blocks-of-local-neighbours",
        title: "gathered rows are pooled as they arrive: a block is m neighbours of one rank, not m tokens in a row",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["compress.entries", "compress.state"],
        apply: |p| p.compress.places = |_, shares| rank_major(shares),
    },
    Fault {
        name: "compress-own-rows-alone",
        title: "each rank pools its own rows in the place of all: there is no gather",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["compress.entries", "compress.ranks"],
        apply: |p| p.compress.gather = |link, own| Ok(own.repeat(link.world)),
    },
    Fault {
        name: "compress-open-block-emitted",
        title: "a block that is not full at the end of a step becomes an entry at once",
        class: FaultClass::CausalBound,
        bugs: &[],
        killed_by: &["compress.blocks"],
        apply: |p| p.compress.filled = |before, behind, ratio| before / ratio..behind.div_ceil(ratio),
    },
    Fault {
        name: "compress-last-block-waits",
        title: "a block that its last token has just filled waits for the token behind it",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["compress.blocks"],
        apply: |p| {
            p.compress.filled =
                |before, behind, ratio| before.saturating_sub(1) / ratio..behind.saturating_sub(1) / ratio
        },
    },
    Fault {
        name: "compress-blocks-begin-with-the-chunk",
        title: "blocks count from the first new token: what was held of an open block is left out",
        class: FaultClass::StaleMetadata,
        bugs: &[],
        killed_by: &["compress.blocks", "compress.chunks"],
        apply: |p| p.compress.origin = |computed| computed,
    },
    Fault {
        name: "compress-first-block-behind-another-request",
        title: "the first block of a request pools the last tokens of the request before it in the batch",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["compress.entries"],
        apply: |p| p.compress.before = |request| request.checked_sub(1),
    },
    Fault {
        name: "compress-first-block-behind-zeros",
        title: "where no block is before the first, zeros with gates of zero are pooled instead of nothing",
        class: FaultClass::EmptyShard,
        bugs: &[],
        killed_by: &["compress.entries"],
        apply: |p| p.compress.absent = Some((0.0, 0.0)),
    },
    Fault {
        name: "compress-halves-swapped",
        title: "the block before is pooled by the second half of the columns, the block itself by the first",
        class: FaultClass::HeadLayout,
        bugs: &[],
        killed_by: &["compress.entries"],
        apply: |p| p.compress.halves = [1, 0],
    },
    Fault {
        name: "compress-bias-by-place-in-the-chunk",
        title: "a token gets the bias of its place among the new tokens, not in its block",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["compress.entries", "compress.chunks"],
        apply: |p| {
            p.compress.bias_place = |position, computed, ratio| {
                (position as i64 - computed as i64).rem_euclid(ratio as i64) as usize
            }
        },
    },
    Fault {
        name: "compress-gates-weighed-by-rank",
        title: "gates are normalised over the tokens that one rank has of a block, and the parts are averaged",
        class: FaultClass::LseMath,
        bugs: &[],
        killed_by: &["compress.entries"],
        apply: |p| p.compress.pool = by_rank,
    },
    Fault {
        name: "compress-entry-of-the-own-block-seen",
        title: "a row sees the entry of the block that it lies in, which holds tokens behind it",
        class: FaultClass::CausalBound,
        bugs: &[],
        killed_by: &["compress.visible"],
        apply: |p| p.compress.visible = |position, _, ratio| position / ratio + 1,
    },
    Fault {
        name: "compress-entries-by-place-on-the-rank",
        title: "a row sees as many entries as its place among the rank's rows of the request says",
        class: FaultClass::CausalBound,
        bugs: &["vllm-ascend#10827"],
        killed_by: &["compress.visible"],
        apply: |p| p.compress.visible = |_, on_rank, ratio| (on_rank + 1) / ratio,
    },
    Fault {
        name: "compress-full-block-not-held",
        title: "only the tokens of the open block are held, so that the next one has nothing before it",
        class: FaultClass::StaleMetadata,
        bugs: &[],
        killed_by: &["compress.state"],
        apply: |p| p.compress.first_held = |tokens, ratio, _| tokens / ratio * ratio,
    },
];

/// The mean of what each rank makes of its own tokens.
fn by_rank(parts: &[Part]) -> f32 {
    let mut ranks: Vec<Option<usize>> = parts.iter().map(|part| part.rank).collect();
    ranks.sort_unstable();
    ranks.dedup();
    let of_rank = |rank: &Option<usize>| {
        pool(&parts.iter().copied().filter(|part| part.rank == *rank).collect::<Vec<_>>())
    };
    ranks.iter().map(of_rank).sum::<f32>() / ranks.len() as f32
}

#[cfg(test)]
mod tests {
    use super::super::faulty::with;
    use super::*;

    #[test]
    fn blocks_are_filled_as_the_titles_say() {
        let filled = |name: &str| (with(name).compress.filled)(3, 9, 4);
        assert_eq!(filled("compress-open-block-emitted"), 0..3);
        assert_eq!((with("compress-last-block-waits").compress.filled)(3, 8, 4), 0..1);
        assert_eq!((with("compress-blocks-begin-with-the-chunk").compress.origin)(7), 7);
    }

    #[test]
    fn gates_by_rank_are_those_of_one_rank_where_it_has_all_tokens() {
        let part = |rank, score, value| Part { score, value, rank: Some(rank) };
        let whole = [part(1, 0.0, 1.0), part(1, 1.0, 2.0)];
        assert_eq!(by_rank(&whole), pool(&whole));
        let apart = [part(0, 0.0, 1.0), part(1, 1.0, 2.0)];
        assert_eq!(by_rank(&apart), 1.5);
    }
}
