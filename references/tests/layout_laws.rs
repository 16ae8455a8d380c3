//! The layout against a walk that deals tokens one by one, for every small configuration.

use shardcheck_references::layout::{Layout, NO_SLOT};

const WORLDS: [usize; 8] = [1, 2, 3, 4, 5, 6, 8, 16];
const INTERLEAVES: [usize; 5] = [1, 2, 4, 16, 64];

/// Every (world, interleave, block) of the exhaustive tests; the block size is also tried as the interleave.
fn configurations() -> Vec<Layout> {
    let mut layouts = Vec::new();
    for world in WORLDS {
        for interleave in INTERLEAVES {
            for block in [interleave, 2 * interleave, 3 * interleave] {
                layouts.push(Layout::new(world, interleave, block).unwrap());
            }
        }
        for block in [3, 6, 24] {
            layouts.push(Layout::new(world, block, block).unwrap());
        }
    }
    layouts
}

/// Deals `len` tokens in runs, one token at a time: (owner, local index) of each.
fn dealt(layout: &Layout, len: usize) -> Vec<(usize, usize)> {
    let mut held = vec![0; layout.world()];
    let (mut rank, mut left_in_run) = (0, layout.interleave());
    (0..len)
        .map(|_| {
            if left_in_run == 0 {
                rank = (rank + 1) % layout.world();
                left_in_run = layout.interleave();
            }
            left_in_run -= 1;
            held[rank] += 1;
            (rank, held[rank] - 1)
        })
        .collect()
}

fn longest(layout: &Layout) -> usize {
    4 * layout.world() * layout.interleave()
}

#[test]
fn owners_and_local_indices_follow_the_deal() {
    let mut compared = 0;
    for layout in configurations() {
        for (pos, (rank, local)) in dealt(&layout, longest(&layout)).into_iter().enumerate() {
            assert_eq!((layout.owner(pos), layout.local_index(pos)), (rank, local), "{layout:?} at {pos}");
            assert_eq!(layout.global_position(local, rank), pos, "{layout:?} at {pos}");
            compared += 1;
        }
    }
    assert!(compared > 50_000, "only {compared} positions compared");
}

#[test]
fn local_lengths_count_the_deal_and_sum_to_the_length() {
    for layout in configurations() {
        let deal = dealt(&layout, longest(&layout));
        let mut held = vec![0; layout.world()];
        for len in 0..=longest(&layout) {
            let lens: Vec<_> = (0..layout.world()).map(|rank| layout.local_len(len, rank)).collect();
            assert_eq!(lens, held, "{layout:?} at length {len}");
            assert_eq!(lens.iter().sum::<usize>(), len);
            if let Some(&(rank, _)) = deal.get(len) {
                held[rank] += 1;
            }
        }
    }
}

#[test]
fn every_token_has_one_slot_and_no_slot_has_two_tokens() {
    for layout in configurations() {
        let len = longest(&layout).min(1024);
        let blocks = layout.blocks_needed(len);
        let table: Vec<i32> = (0..blocks).map(|i| ((i * 7 + 3) % (blocks * 8 + 1)) as i32).collect();
        let mut used = vec![std::collections::HashSet::new(); layout.world()];
        for pos in 0..len {
            let mut writers = 0;
            for rank in 0..layout.world() {
                let slot = layout.slot(pos, rank, &table);
                assert_eq!(slot, layout.slot_virtual_form(pos, rank, &table), "{layout:?} at {pos}");
                if slot == NO_SLOT {
                    continue;
                }
                writers += 1;
                assert!(used[rank].insert(slot), "{layout:?}: slot {slot} of rank {rank} is written twice");
                let block = slot as usize / layout.block();
                assert_eq!(block as i32, table[pos / layout.virtual_block_tokens()]);
            }
            assert_eq!(writers, 1, "{layout:?} at {pos}");
        }
    }
}

#[test]
fn rank_zero_needs_as_many_blocks_as_the_request() {
    for layout in configurations() {
        for len in 0..=longest(&layout) {
            let by_rank_zero = layout.local_len(len, 0).div_ceil(layout.block());
            assert_eq!(layout.blocks_needed(len), by_rank_zero, "{layout:?} at length {len}");
        }
    }
}

#[test]
fn a_verification_row_sees_exactly_the_tokens_up_to_its_own() {
    for layout in configurations().into_iter().filter(|layout| layout.interleave() <= 16) {
        for (seq_len, q_len) in [(1, 1), (2, 4), (10, 4), (37, 5), (130, 3)] {
            let deal = dealt(&layout, seq_len);
            for row in 0..q_len {
                // the query's tokens are the last q_len of the request; row t is token seq_len - q_len + t
                let own = (seq_len + row) as isize - q_len as isize;
                let visible = (0..seq_len as isize).filter(|&pos| pos <= own).count();
                assert_eq!(layout.row_boundary(seq_len, q_len, row), visible);
                for rank in 0..layout.world() {
                    let held = deal[..visible].iter().filter(|dealt| dealt.0 == rank).count();
                    assert_eq!(layout.verify_row_len(seq_len, q_len, row, rank), held, "{layout:?}");
                }
            }
        }
    }
}

#[test]
fn a_row_sees_and_reads_those_of_a_ranks_tokens_that_were_dealt_no_later_than_its_own() {
    let mut compared = 0;
    for layout in configurations().into_iter().filter(|layout| layout.interleave() <= 16) {
        for (seq_len, q_len) in [(1, 1), (10, 4), (37, 5), (130, 3)] {
            let deal = dealt(&layout, seq_len);
            let table: Vec<i32> =
                (0..layout.blocks_needed(seq_len)).map(|block| 40 - 3 * block as i32).collect();
            for (row, rank) in (0..q_len).flat_map(|row| (0..layout.world()).map(move |rank| (row, rank))) {
                let own = seq_len - q_len + row;
                let mut slots = Vec::new();
                for (pos, (_, local)) in deal.iter().enumerate().filter(|(_, dealt)| dealt.0 == rank) {
                    assert_eq!(layout.row_sees(seq_len, q_len, row, *local, rank), pos <= own, "{layout:?}");
                    if pos <= own {
                        let block = i64::from(table[pos / (layout.block() * layout.world())]);
                        slots.push(block * layout.block() as i64 + (local % layout.block()) as i64);
                    }
                    compared += 1;
                }
                assert_eq!(layout.row_slots(seq_len, q_len, row, rank, &table), slots, "{layout:?}");
            }
        }
    }
    assert!(compared > 50_000, "only {compared} tokens compared");
}

#[test]
fn a_local_mask_on_global_positions_is_a_prefix_of_the_rank() {
    // the kernel form: local token j of rank r is visible to row t iff its global position <= L - q + t
    for layout in configurations().into_iter().filter(|layout| layout.interleave() <= 16) {
        let (seq_len, q_len) = (101, 6);
        for row in 0..q_len {
            for rank in 0..layout.world() {
                let held = layout.local_len(seq_len, rank);
                let mask: Vec<bool> =
                    (0..held).map(|j| layout.global_position(j, rank) <= seq_len - q_len + row).collect();
                let prefix = layout.verify_row_len(seq_len, q_len, row, rank);
                assert_eq!(mask.iter().filter(|&&seen| seen).count(), prefix);
                assert!(mask[..prefix].iter().all(|&seen| seen));
            }
        }
    }
}

#[test]
fn the_hash_unit_is_the_virtual_block() {
    for layout in configurations() {
        assert_eq!(layout.hash_unit_tokens(), layout.block() * layout.world());
        // a hash unit always ends where every rank's physical block ends
        for rank in 0..layout.world() {
            assert_eq!(layout.local_len(layout.hash_unit_tokens(), rank), layout.block());
        }
    }
}
