//! The formulas against lists of chunks that are cut one by one, and against worked examples.

use super::*;

const STRATEGIES: [Strategy; 5] = [
    Strategy::HeadTail,
    Strategy::HeadTailOrWhole,
    Strategy::Zigzag,
    Strategy::RoundRobin,
    Strategy::Contiguous,
];

fn prompt(context_tokens: usize, rows: usize) -> Sequence {
    Sequence { context_tokens, rows, is_prefilling: true }
}

fn decode(context_tokens: usize, rows: usize) -> Sequence {
    Sequence { context_tokens, rows, is_prefilling: false }
}

/// Rows of each rank, by cutting pieces off the front of what is left of a sequence.
fn cut(world: usize, strategy: Strategy, decodes: Decodes, batch: &[Sequence]) -> Vec<Vec<usize>> {
    let mut ranks = vec![Vec::new(); world];
    let (mut first, mut decode_count) = (0, 0);
    for sequence in batch {
        let rows: Vec<usize> = (first..first + sequence.rows).collect();
        first += sequence.rows;
        if rows.is_empty() {
            continue;
        }
        if !sequence.is_prefilling && decodes != Decodes::Split {
            match decodes {
                Decodes::Owned => ranks[decode_count % world].extend(&rows),
                _ => ranks.iter_mut().for_each(|rank| rank.extend(&rows)),
            }
            decode_count += 1;
            continue;
        }
        let mut pieces: Vec<Vec<usize>> = match strategy {
            Strategy::RoundRobin => {
                rows.iter().for_each(|row| ranks[row % world].push(*row));
                continue;
            }
            Strategy::Contiguous => rows.chunks(rows.len().div_ceil(world)).map(<[_]>::to_vec).collect(),
            Strategy::HeadTail | Strategy::HeadTailOrWhole => {
                rows.chunks(rows.len().div_ceil(2 * world)).map(<[_]>::to_vec).collect()
            }
            Strategy::Zigzag => {
                let (mut rest, mut pieces) = (rows.clone(), Vec::new());
                // the longest that leaves the others no more than a row behind
                for left in (1..=2 * world).rev() {
                    pieces.push(rest.drain(..rest.len().div_ceil(left)).collect());
                }
                pieces
            }
        };
        let wanted = if strategy == Strategy::Contiguous { world } else { 2 * world };
        if strategy == Strategy::HeadTailOrWhole && pieces.len() < wanted {
            ranks.iter_mut().for_each(|rank| rank.extend(&rows));
            continue;
        }
        pieces.resize(wanted, Vec::new());
        for (rank, own) in ranks.iter_mut().enumerate() {
            own.extend(&pieces[rank]);
            if wanted == 2 * world {
                own.extend(&pieces[wanted - 1 - rank]);
            }
        }
    }
    ranks.iter_mut().for_each(|rank| rank.sort_unstable());
    ranks
}

fn of_ranks(world: usize, placed: &[Placed]) -> Vec<Vec<usize>> {
    let of_rank = |rank| (0..placed.len()).filter(|row| placed[*row].is_on(rank)).collect();
    (0..world).map(of_rank).collect()
}

#[test]
fn every_row_is_where_cutting_the_sequences_puts_it() {
    let mut tried = 0;
    for world in [1, 2, 3, 4, 5, 8] {
        for rows in 0..=6 * world + 1 {
            let batch = [
                prompt(0, rows),
                decode(9, 1),
                prompt(5, 2 * world),
                decode(3, 0),
                decode(4, 3),
                prompt(2, rows / 2),
            ];
            for strategy in STRATEGIES {
                for decodes in [Decodes::Split, Decodes::Replicated, Decodes::Owned] {
                    let placed = place(world, strategy, decodes, &batch);
                    let wanted = cut(world, strategy, decodes, &batch);
                    assert_eq!(of_ranks(world, &placed), wanted, "{world} {rows} {strategy:?} {decodes:?}");
                    let fullest = wanted.iter().map(Vec::len).max().unwrap();
                    assert_eq!(padded_rows(world, &placed, 0), fullest);
                    tried += 1;
                }
            }
        }
    }
    assert!(tried > 1500, "{tried}");
}

#[test]
fn the_worked_examples_of_the_published_variants_come_out() {
    let on = |world, strategy, rows| {
        of_ranks(world, &place(world, strategy, Decodes::Replicated, &[prompt(0, rows)]))
    };
    // ATOM: seven rows over two ranks
    assert_eq!(on(2, Strategy::RoundRobin, 7), [vec![0, 2, 4, 6], vec![1, 3, 5]]);
    // vLLM: eleven rows over two ranks, five over four
    assert_eq!(on(2, Strategy::HeadTail, 11), [vec![0, 1, 2, 9, 10], vec![3, 4, 5, 6, 7, 8]]);
    assert_eq!(on(4, Strategy::HeadTail, 5), [vec![0], vec![1], vec![2], vec![3, 4]]);
    // SGLang: eleven rows over two ranks are blocks of 3, 3, 3 and 2
    assert_eq!(on(2, Strategy::Zigzag, 11), [vec![0, 1, 2, 9, 10], vec![3, 4, 5, 6, 7, 8]]);
    assert_eq!(on(2, Strategy::Zigzag, 9), [vec![0, 1, 2, 7, 8], vec![3, 4, 5, 6]]);
    assert_eq!(on(2, Strategy::HeadTail, 9), [vec![0, 1, 2], vec![3, 4, 5, 6, 7, 8]]);
}

#[test]
fn a_round_robin_goes_over_the_batch_and_not_over_each_sequence() {
    let placed = place(2, Strategy::RoundRobin, Decodes::Split, &[prompt(0, 3), prompt(4, 3)]);
    assert_eq!(of_ranks(2, &placed), [vec![0, 2, 4], vec![1, 3, 5]]);
    assert_eq!(placed.iter().map(|row| row.position).collect::<Vec<_>>(), [0, 1, 2, 4, 5, 6]);
}

#[test]
fn a_row_sees_the_context_and_the_new_rows_up_to_itself_on_whatever_rank_it_is() {
    let placed = place(2, Strategy::HeadTail, Decodes::Replicated, &[prompt(100, 8)]);
    assert_eq!(
        placed.iter().map(Placed::visible_tokens).collect::<Vec<_>>(),
        (101..=108).collect::<Vec<_>>()
    );
}

#[test]
fn runs_are_the_chunks_of_a_sequence() {
    let placed = place(2, Strategy::HeadTail, Decodes::Replicated, &[prompt(0, 8), decode(3, 2)]);
    let runs: Vec<usize> = placed.iter().map(|row| row.run).collect();
    assert_eq!(runs, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]);
}

#[test]
fn a_sequence_that_fills_no_last_chunk_is_whole_only_where_the_strategy_says_so() {
    let batch = [prompt(0, 5)];
    let whole = place(4, Strategy::HeadTailOrWhole, Decodes::Replicated, &batch);
    assert!(whole.iter().all(|row| row.owner.is_none()));
    let split = place(4, Strategy::HeadTail, Decodes::Replicated, &batch);
    assert!(split.iter().all(|row| row.owner.is_some()));
    // ceil(15 / 8) = 2, and seven chunks of two leave one row for the eighth
    let full = place(4, Strategy::HeadTailOrWhole, Decodes::Replicated, &[prompt(0, 15)]);
    assert_eq!(full, place(4, Strategy::HeadTail, Decodes::Replicated, &[prompt(0, 15)]));
}

#[test]
fn a_graph_may_ask_for_more_rows_than_the_fullest_rank_has() {
    let placed = place(2, Strategy::HeadTail, Decodes::Replicated, &[prompt(0, 11)]);
    assert_eq!([0, 6, 9].map(|at_least| padded_rows(2, &placed, at_least)), [6, 6, 9]);
    assert_eq!(padded_rows(3, &[], 0), 0);
}

#[test]
fn two_groups_have_half_of_the_rows_each_as_nearly_as_whole_requests_allow() {
    let first = |world: usize, rows: &[usize]| {
        first_group(world, &rows.iter().map(|rows| prompt(0, *rows)).collect::<Vec<_>>())
    };
    assert_eq!(first(2, &[5, 5]), 1);
    assert_eq!(first(2, &[1, 9]), 1, "the second group is never empty");
    assert_eq!(first(2, &[9, 1]), 1);
    assert_eq!(first(2, &[3, 2, 4, 4, 11]), 4, "twelve rows of twenty-four are reached by the fourth");
    assert_eq!(first(4, &[2, 5]), 2, "fewer than two rows a rank");
    assert_eq!(first(4, &[3, 5]), 1, "two rows a rank");
    assert_eq!(first(1, &[12]), 1, "a single request");
    assert_eq!(first(2, &[0, 8, 0]), 2, "requests without rows count as requests");
}

#[test]
fn rows_go_round_anew_in_the_second_group() {
    let batch = [prompt(0, 3), prompt(5, 4)];
    let placed = place_groups(2, Strategy::RoundRobin, Decodes::Split, &batch, 1);
    let owners: Vec<_> = placed.iter().map(|row| row.owner.unwrap()).collect();
    assert_eq!(owners, [0, 1, 0, 0, 1, 0, 1]);
    assert_eq!(placed[3].request, 1);
    assert_eq!(placed[3].position, 5);
    assert_ne!(placed[2].run, placed[3].run);
}
