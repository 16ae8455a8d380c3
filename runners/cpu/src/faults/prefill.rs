//! Faults of prefill context parallelism: rows on the wrong rank, lost, twice, or brought back wrongly.

use super::{Fault, FaultClass};
use crate::prefill::{balanced, chunk, first_group};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "pcp-chunk-rounded-down",
        title: "a chunk has q / 2P rows, so that the rows of the remainder are on no rank",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["pcp.partition", "pcp.restore", "pcp.writer"],
        apply: |p| p.prefill.chunk_rows = |rows, chunks| rows / chunks,
    },
    Fault {
        name: "pcp-chunk-not-clamped",
        title: "every chunk of a sequence has ceil(q / 2P) rows, the last ones those of the next sequence",
        class: FaultClass::LayoutIndex,
        bugs: &["TransformerEngine#1012"],
        killed_by: &["pcp.partition"],
        apply: |p| p.prefill.chunk = |index, size, _| index * size..(index + 1) * size,
    },
    Fault {
        name: "pcp-tail-chunk-off-by-one",
        title: "a rank's chunk from the end is 2P − r: the one in the middle is on no rank",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["pcp.partition", "pcp.restore", "prefill.rows", "index.rows", "compress.rows"],
        apply: |p| p.prefill.tail = |rank, ranks| 2 * ranks - rank,
    },
    Fault {
        name: "pcp-absent-chunk-has-a-row",
        title: "a chunk behind the end of its sequence is run as the last row once more",
        class: FaultClass::EmptyShard,
        bugs: &["vllm-ascend#11807"],
        killed_by: &["pcp.partition", "pcp.padding"],
        apply: |p| {
            p.prefill.chunk = |index, size, rows| {
                let own = chunk(index, size, rows);
                if own.is_empty() && rows > 0 { rows - 1..rows } else { own }
            }
        },
    },
    Fault {
        name: "pcp-short-chunk-dropped",
        title: "a last chunk that is shorter than the others is left out",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["pcp.partition", "pcp.restore", "pcp.writer"],
        apply: |p| {
            p.prefill.chunk = |index, size, rows| {
                let own = chunk(index, size, rows);
                if own.len() < size { own.start..own.start } else { own }
            }
        },
    },
    Fault {
        name: "pcp-tail-chunk-backwards",
        title: "the rows of a chunk from the end are run last row first",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["pcp.order", "prefill.rows"],
        apply: |p| p.prefill.tail_order = |rows| rows.reverse(),
    },
    Fault {
        name: "pcp-round-robin-by-sequence",
        title: "rows go round the ranks anew in each sequence instead of over the flattened batch",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["pcp.partition"],
        apply: |p| {
            p.prefill.striped = |rank, ranks, starts| {
                starts.windows(2).flat_map(|pair| (pair[0] + rank..pair[1]).step_by(ranks)).collect()
            }
        },
    },
    Fault {
        name: "pcp-overlap-at-half-of-the-requests",
        title: "two groups that overlap have half of the requests each, however long they are",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["pcp.groups"],
        apply: |p| {
            p.prefill.first_group = |starts, ranks| {
                let whole = starts.len() - 1;
                if first_group(starts, ranks) == whole { whole } else { whole / 2 }
            }
        },
    },
    Fault {
        name: "pcp-overlap-boundary-a-request-early",
        title: "the request in which half of the rows is reached goes to the second group",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["pcp.groups"],
        apply: |p| {
            p.prefill.first_group = |starts, ranks| {
                let whole = starts.len() - 1;
                if first_group(starts, ranks) == whole { whole } else { (balanced(starts) - 1).max(1) }
            }
        },
    },
    Fault {
        name: "pcp-overlap-with-less-than-two-rows",
        title: "a batch is divided although a rank has fewer than two rows of it",
        class: FaultClass::ConfigGate,
        bugs: &[],
        killed_by: &["pcp.groups"],
        apply: |p| {
            p.prefill.first_group = |starts, _| {
                let whole = starts.len() - 1;
                if whole < 2 { whole } else { balanced(starts).clamp(1, whole - 1) }
            }
        },
    },
    Fault {
        name: "pcp-overlap-dealt-out-before",
        title: "rows are dealt out over the whole batch and divided afterwards: the second group does not begin at rank 0",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["pcp.partition"],
        apply: |p| p.prefill.phase = |first, ranks| first % ranks,
    },
    Fault {
        name: "pcp-short-prompt-taken-for-a-decode",
        title: "a prompt of at most three new rows is handled as a decode",
        class: FaultClass::SpecDecode,
        bugs: &["vllm-ascend#10580", "vllm-ascend#5939"],
        killed_by: &["pcp.partition"],
        apply: |p| p.prefill.is_prompt = |prefills, rows| prefills && rows > 3,
    },
    Fault {
        name: "pcp-decode-owner-by-request",
        title: "a decode goes to a rank by its place in the batch, prompts and idle requests counted",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["pcp.partition", "pcp.balance"],
        apply: |p| p.prefill.owner = |_, request, ranks| request % ranks,
    },
    Fault {
        name: "pcp-decode-written-by-every-rank",
        title: "every copy of a decode's row has its KV written",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm-ascend#6344"],
        killed_by: &["pcp.writer"],
        apply: |p| p.prefill.writes = |_| true,
    },
    Fault {
        name: "pcp-decode-written-by-no-rank",
        title: "no copy of a decode's row has its KV written",
        class: FaultClass::LayoutIndex,
        bugs: &["tpu-inference#3344"],
        killed_by: &["pcp.writer"],
        apply: |p| p.prefill.writes = |_| false,
    },
    Fault {
        name: "pcp-padding-is-row-0",
        title: "padding rows are row 0 of the batch and no padding",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["pcp.partition", "pcp.padding", "prefill.rows"],
        apply: |p| p.prefill.padding = 0,
    },
    Fault {
        name: "pcp-padded-to-the-average",
        title: "every rank runs the average of rows, and what the fullest has more is cut off",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["pcp.partition", "pcp.padding"],
        apply: |p| {
            p.prefill.padded = |counts, asked| {
                let sum: usize = counts.iter().sum();
                sum.div_ceil(counts.len().max(1)).max(asked)
            }
        },
    },
    Fault {
        name: "pcp-restore-is-its-inverse",
        title: "rows come back by the index that gathers them, which is the inverse of the one that restores them",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["pcp.restore"],
        apply: |p| {
            p.prefill.restore = |shares| {
                let rows = shares.gathered.iter().map(|row| row.map_or(0, |row| row as i64));
                rows.chain(std::iter::repeat(0)).take(shares.rows).collect()
            }
        },
    },
    Fault {
        name: "pcp-restore-without-padding",
        title: "places are counted as if the ranks' rows were gathered without their padding",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["pcp.restore"],
        apply: |p| {
            p.prefill.restore = |shares| {
                let mut places = vec![-1; shares.rows];
                for (place, row) in shares.gathered.iter().flatten().enumerate() {
                    if let Some(known) = places.get_mut(*row) {
                        *known = place as i64;
                    }
                }
                places
            }
        },
    },
    Fault {
        name: "pcp-position-without-context",
        title: "positions count the new rows alone, without the tokens that were computed before",
        class: FaultClass::CausalBound,
        bugs: &[],
        killed_by: &["pcp.positions", "pcp.bounds"],
        apply: |p| p.prefill.position = |_, row, _| row,
    },
    Fault {
        name: "pcp-position-by-local-index",
        title: "a row's position is the context and its place among the rank's own rows",
        class: FaultClass::CausalBound,
        bugs: &["sglang#27276", "sglang#36297"],
        killed_by: &["pcp.positions", "pcp.bounds"],
        apply: |p| p.prefill.position = |computed, _, in_chunk| computed + in_chunk,
    },
    Fault {
        name: "pcp-bound-is-local",
        title: "a row sees as many tokens as its chunk has up to it",
        class: FaultClass::CausalBound,
        bugs: &["vllm#47181"],
        killed_by: &["pcp.bounds"],
        apply: |p| p.prefill.bound = |_, in_chunk| in_chunk + 1,
    },
    Fault {
        name: "pcp-bound-without-itself",
        title: "a row sees the tokens before it and not itself",
        class: FaultClass::CausalBound,
        bugs: &[],
        killed_by: &["pcp.bounds"],
        apply: |p| p.prefill.bound = |position, _| position,
    },
];

#[cfg(test)]
mod tests {
    use super::super::faulty;
    use crate::prefill::{PrefillPolicies, Shares};

    fn with(name: &str) -> PrefillPolicies {
        faulty::with(name).prefill
    }

    const HEALTHY: PrefillPolicies = PrefillPolicies::HEALTHY;

    #[test]
    fn chunks_are_cut_as_the_titles_say() {
        for (rows, chunks, down) in [(7, 4, 1), (8, 4, 2), (3, 4, 0)] {
            assert_eq!((with("pcp-chunk-rounded-down").chunk_rows)(rows, chunks), down);
        }
        let cut = |name: &str, rows: usize| [0, 1, 2, 3].map(|index| (with(name).chunk)(index, 2, rows));
        assert_eq!(cut("pcp-chunk-not-clamped", 5), [0..2, 2..4, 4..6, 6..8]);
        assert_eq!(cut("pcp-absent-chunk-has-a-row", 5), [0..2, 2..4, 4..5, 4..5]);
        assert_eq!(cut("pcp-absent-chunk-has-a-row", 0), [0..0, 0..0, 0..0, 0..0], "there is no last row");
        assert_eq!(cut("pcp-short-chunk-dropped", 5), [0..2, 2..4, 4..4, 5..5]);
        let tail = with("pcp-tail-chunk-off-by-one").tail;
        assert_eq!([tail(0, 3), tail(1, 3), tail(2, 3)], [6, 5, 4]);
        let mut rows = vec![4, 5, 6];
        (with("pcp-tail-chunk-backwards").tail_order)(&mut rows);
        assert_eq!(rows, [6, 5, 4]);
    }

    #[test]
    fn rows_go_round_the_ranks_anew_in_each_sequence() {
        let striped =
            |policies: PrefillPolicies| [0, 1].map(|rank| (policies.striped)(rank, 2, &[0, 3, 3, 8]));
        assert_eq!(striped(HEALTHY), [vec![0, 2, 4, 6], vec![1, 3, 5, 7]]);
        assert_eq!(striped(with("pcp-round-robin-by-sequence")), [vec![0, 2, 3, 5, 7], vec![1, 4, 6]]);
    }

    #[test]
    fn decodes_are_told_apart_owned_and_written_as_the_titles_say() {
        let is_prompt = with("pcp-short-prompt-taken-for-a-decode").is_prompt;
        assert_eq!(
            [(true, 3), (true, 4), (false, 4)].map(|(prefills, rows)| is_prompt(prefills, rows)),
            [false, true, false]
        );
        assert_eq!((with("pcp-decode-owner-by-request").owner)(0, 5, 3), 2);
        assert_eq!([0, 1, 2].map(with("pcp-decode-written-by-every-rank").writes), [true; 3]);
        assert_eq!([0, 1, 2].map(with("pcp-decode-written-by-no-rank").writes), [false; 3]);
    }

    #[test]
    fn padding_is_row_0_or_cut_to_the_average() {
        assert_eq!((HEALTHY.padding, with("pcp-padding-is-row-0").padding), (-1, 0));
        let padded = with("pcp-padded-to-the-average").padded;
        assert_eq!([padded(&[5, 2, 1], 0), padded(&[5, 2, 1], 4), padded(&[], 2)], [3, 4, 2]);
    }

    #[test]
    fn rows_come_back_by_the_inverse_or_by_places_without_padding() {
        // two ranks of three rows, the last of each padding; row 1 is on both
        let gathered = vec![Some(2), Some(1), None, Some(0), Some(1), None];
        let shares = Shares { gathered, counts: vec![2, 2], padded: 3, rows: 3 };
        assert_eq!((HEALTHY.restore)(&shares), [3, 1, 0]);
        assert_eq!((with("pcp-restore-is-its-inverse").restore)(&shares), [2, 1, 0]);
        assert_eq!((with("pcp-restore-without-padding").restore)(&shares), [2, 3, 0]);
        let beyond = Shares { gathered: vec![None, Some(9)], rows: 4, ..shares };
        assert_eq!((with("pcp-restore-is-its-inverse").restore)(&beyond), [0, 9, 0, 0]);
        assert_eq!((with("pcp-restore-without-padding").restore)(&beyond), [-1; 4]);
    }

    #[test]
    fn positions_and_bounds_are_those_of_the_titles() {
        // nine tokens before, row 4 of the new ones, row 1 of its chunk
        let position = |name: &str| (with(name).position)(9, 4, 1);
        assert_eq!((HEALTHY.position)(9, 4, 1), 13);
        assert_eq!(position("pcp-position-without-context"), 4);
        assert_eq!(position("pcp-position-by-local-index"), 10);
        let bound = |policies: PrefillPolicies| (policies.bound)(13, 1);
        assert_eq!(bound(HEALTHY), 14);
        assert_eq!(bound(with("pcp-bound-is-local")), 2);
        assert_eq!(bound(with("pcp-bound-without-itself")), 13);
    }
}
