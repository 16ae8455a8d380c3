//! What a row saw, told from what came out: every mistake of a small row is named for what it is.

use super::*;
use crate::layout::Layout;
use shardcheck_formats::contract::{Contract, Merge};

/// Two requests over three ranks; the row sees the first 28 of its request's 40 tokens.
struct Small {
    code: Code,
    contract: Contract,
    tables: [Vec<i32>; 2],
}

const SIGHT: Sight = Sight { request: 1, row: 2, visible: 28, beside_from: None };
const OTHER: Sight = Sight { request: 0, row: 0, visible: 17, beside_from: None };
const WRITTEN: [usize; 2] = [22, 40];

impl Small {
    fn new(interleave: usize) -> Self {
        let layout = Layout::new(3, interleave, 4).unwrap();
        let code = Code::new(Space { layout, requests: 2, tokens: 48, blocks: 9 }, &[]);
        let contract = Contract::bf16_default(Merge::A2a);
        Self { code, contract, tables: [vec![7, 2, 5, 0], vec![1, 8, 3, 6]] }
    }

    fn right(&self) -> Tally {
        Tally::prefix(&self.code, SIGHT.request, SIGHT.visible)
    }

    /// What is said of a row that saw these tokens, with its LSE or without.
    fn named(&self, tally: &Tally, with_lse: bool) -> Option<Attribution> {
        let (out, lse) = plain_row(tally, self.code.dims(), &self.contract);
        self.named_of(&out, with_lse.then_some(lse))
    }

    fn named_of(&self, out: &[f64], lse: Option<f64>) -> Option<Attribution> {
        let tables: Vec<&[i32]> = self.tables.iter().map(Vec::as_slice).collect();
        let decoder = Decoder {
            code: &self.code,
            rounding: Rounding::of(&self.contract),
            rows: &[OTHER, SIGHT],
            written: &WRITTEN,
            tables: &tables,
        };
        decoder.decode(SIGHT, &Seen { out, lse })
    }

    /// The right tokens with some added or taken away, each on its owner.
    fn edited(&self, edits: &[(Token, i64)]) -> Tally {
        let mut tally = self.right();
        for (token, times) in edits {
            tally.add(&self.code, *token, self.code.layout().owner(token.position), *times);
        }
        tally
    }
}

fn own(position: usize) -> Token {
    Token { request: SIGHT.request, position }
}

#[test]
fn a_row_that_saw_its_tokens_is_silent() {
    for interleave in [1, 2, 4] {
        let small = Small::new(interleave);
        assert_eq!((small.named(&small.right(), true), small.named(&small.right(), false)), (None, None));
    }
}

#[test]
fn every_token_lost_or_counted_twice_is_named() {
    let small = Small::new(2);
    for with_lse in [true, false] {
        for position in 0..SIGHT.visible {
            let lost = small.named(&small.edited(&[(own(position), -1)]), with_lse).unwrap();
            let last = position + 1 == SIGHT.visible;
            let expected = if last {
                Attribution::PrefixShort { seen: position }
            } else {
                Attribution::Lost(own(position))
            };
            assert_eq!(lost, expected, "with the LSE: {with_lse}");
            let doubled = small.named(&small.edited(&[(own(position), 1)]), with_lse);
            assert_eq!(doubled, Some(Attribution::Doubled(own(position))), "with the LSE: {with_lse}");
        }
    }
}

#[test]
fn every_token_that_the_row_may_not_see_is_named() {
    let small = Small::new(1);
    for position in SIGHT.visible..WRITTEN[1] {
        let seen = small.named(&small.edited(&[(own(position), 1)]), true).unwrap();
        if position == SIGHT.visible {
            assert_eq!(seen, Attribution::PrefixLong { seen: position + 1 });
        } else {
            assert_eq!(seen, Attribution::Foreign(own(position)));
        }
    }
    for position in 0..WRITTEN[0] {
        let token = Token { request: 0, position };
        assert_eq!(small.named(&small.edited(&[(token, 1)]), true), Some(Attribution::Foreign(token)));
    }
    // a copy on a rank that does not own the token
    let mut tally = small.right();
    tally.add(&small.code, own(4), 2, 1);
    assert_eq!(small.code.layout().owner(4), 1);
    assert_eq!(small.named(&tally, true), Some(Attribution::Doubled(own(4))));
}

#[test]
fn a_token_that_does_not_explain_all_that_was_seen_is_not_named() {
    let small = Small::new(1);
    // a token of the other request, which cannot be missing
    let foreign = Token { request: 0, position: 3 };
    let named = small.named(&small.edited(&[(foreign, -1)]), true);
    assert!(named.is_some() && named != Some(Attribution::Lost(foreign)), "{named:?}");
    // the signs spell a token, and another dimension contradicts them
    let (mut out, lse) = plain_row(&small.edited(&[(own(4), -1)]), small.code.dims(), &small.contract);
    let spelling = small.code.spelling();
    let other =
        (0..small.code.dims()).find(|dim| !spelling.contains(dim)).expect("a dimension that spells nothing");
    assert_eq!(small.named_of(&out, Some(lse)), Some(Attribution::Lost(own(4))));
    out[other] += 0.25;
    let named = small.named_of(&out, Some(lse));
    assert!(named.is_some() && named != Some(Attribution::Lost(own(4))), "{named:?}");
}

#[test]
fn a_prefix_of_another_length_is_named_with_its_length() {
    for interleave in [1, 4] {
        let small = Small::new(interleave);
        for seen in 1..WRITTEN[1] {
            let tally = Tally::prefix(&small.code, SIGHT.request, seen);
            let expected = match seen {
                seen if seen < SIGHT.visible => Some(Attribution::PrefixShort { seen }),
                seen if seen > SIGHT.visible => Some(Attribution::PrefixLong { seen }),
                _ => None,
            };
            assert_eq!(small.named(&tally, true), expected);
        }
        let nothing = small.named(&Tally::nothing(&small.code), true);
        assert_eq!(nothing, Some(Attribution::RowMisplaced { request: None, seen: 0 }));
    }
}

#[test]
fn a_row_of_another_request_is_named() {
    let small = Small::new(1);
    for seen in [OTHER.visible, WRITTEN[0], SIGHT.visible] {
        let named = small.named(&Tally::prefix(&small.code, 0, seen), true);
        assert_eq!(named, Some(Attribution::RowMisplaced { request: Some(0), seen }));
    }
    // as many tokens of the other request as no row sees and as were not written
    let named = small.named(&Tally::prefix(&small.code, 0, 5), true).unwrap();
    assert!(!matches!(named, Attribution::RowMisplaced { .. }), "{named:?}");
}

#[test]
fn a_rank_without_its_tokens_and_wrong_local_lengths_are_named() {
    let small = Small::new(1);
    let lens: Vec<usize> = (0..3).map(|rank| small.code.layout().local_len(SIGHT.visible, rank)).collect();
    assert_eq!(lens, [10, 9, 9]);
    for rank in 0..3 {
        let mut missing = lens.clone();
        missing[rank] = 0;
        let tally = Tally::shares(&small.code, SIGHT.request, &missing);
        assert_eq!(small.named(&tally, true), Some(Attribution::RankMissing { rank }));
    }
    for seen in [vec![10, 7, 9], vec![10, 9, 5], vec![13, 9, 9], vec![7, 8, 9]] {
        let tally = Tally::shares(&small.code, SIGHT.request, &seen);
        assert_eq!(small.named(&tally, true), Some(Attribution::WrongShares { seen }));
    }
}

#[test]
fn lengths_of_another_interleave_are_named_by_it() {
    let small = Small::new(1);
    for interleave in [2, 4] {
        let other = Layout::new(3, interleave, 4).unwrap();
        let seen: Vec<usize> = (0..3).map(|rank| other.local_len(SIGHT.visible, rank)).collect();
        let tally = Tally::shares(&small.code, SIGHT.request, &seen);
        assert_eq!(small.named(&tally, true), Some(Attribution::WrongInterleave { interleave }));
    }
}

#[test]
fn tokens_that_were_stored_as_dealt_in_other_runs_are_named_by_them() {
    let mut named = 0;
    for (interleave, other) in [(1, 2), (1, 4), (2, 1), (2, 4), (4, 1), (4, 2)] {
        let (small, dealt) = (Small::new(interleave), Layout::new(3, other, 4).unwrap());
        let mut tally = Tally::nothing(&small.code);
        for rank in 0..3 {
            for local in 0..small.code.layout().local_len(SIGHT.visible, rank) {
                tally.add(&small.code, own(dealt.global_position(local, rank)), rank, 1);
            }
        }
        // fewer tokens out of place have simpler explanations, or none is needed
        match small.named(&tally, true) {
            Some(Attribution::WrongInterleave { interleave }) => {
                assert_eq!(interleave, other);
                named += 1;
            }
            Some(Attribution::WrongShares { .. } | Attribution::Exchanged { .. }) => {}
            said => assert_eq!((said, &tally), (None, &small.right())),
        }
    }
    assert!(named >= 2, "{named}");
}

#[test]
fn two_tokens_exchanged_are_among_the_pairs_that_are_named() {
    let small = Small::new(1);
    let mut certain = 0;
    for lost in 0..SIGHT.visible {
        let counted = (lost + 3) % SIGHT.visible;
        let named = small.named(&small.edited(&[(own(lost), -1), (own(counted), 1)]), true).unwrap();
        let Attribution::Exchanged { lost: from, counted: to, among } = named else { panic!("{named:?}") };
        if among == 1 {
            assert_eq!((from, to), (own(lost), own(counted)));
            certain += 1;
        }
        let signs = |a: Token, b: Token| -> Vec<i64> {
            small.code.spelling().map(|dim| small.code.sign(dim, a) - small.code.sign(dim, b)).collect()
        };
        assert_eq!(signs(to, from), signs(own(counted), own(lost)), "another pair has the same signs");
    }
    assert!(certain > 0);
}

#[test]
fn pages_that_are_lost_or_read_from_elsewhere_are_named() {
    let small = Small::new(1);
    let span = |page: usize, len: usize| (page * 4).min(len)..((page + 1) * 4).min(len);
    for page in 0..2 {
        for only in [None, Some(0), Some(2)] {
            let mut lost = small.right();
            let mut aliased = small.right();
            for rank in (0..3).filter(|rank| only.is_none_or(|only| only == *rank)) {
                lost.add_span(&small.code, SIGHT.request, rank, span(page, 9), -1);
                aliased.add_span(&small.code, SIGHT.request, rank, span(page, 9), -1);
                aliased.add_span(&small.code, 0, rank, span(0, 9), 1);
            }
            let named = Page { request: SIGHT.request, page };
            assert_eq!(small.named(&lost, true), Some(Attribution::PageLost { page: named, rank: only }));
            let read = Page { request: 0, page: 0 };
            // a page of one rank may give the same sums as that of another
            let told = small.named(&aliased, true).unwrap();
            let Attribution::PageAliased { page: of, read: from, rank } = told else { panic!("{told:?}") };
            assert_eq!((of, from, rank.is_some()), (named, read, only.is_some()));
        }
    }
}

#[test]
fn what_is_no_set_of_tokens_is_not_explained() {
    let small = Small::new(1);
    let (mut out, lse) = plain_row(&small.right(), small.code.dims(), &small.contract);
    assert_eq!(small.named_of(&out, Some(f64::NAN)), Some(Attribution::NotFinite));
    let healthy = out.clone();
    out[3] = f64::INFINITY;
    assert_eq!(small.named_of(&out, Some(lse)), Some(Attribution::NotFinite));
    let noise: Vec<f64> = healthy.iter().enumerate().map(|(dim, _)| 0.3 + 0.01 * dim as f64).collect();
    let unexplained = small.named_of(&noise, Some(lse));
    assert_eq!(unexplained, Some(Attribution::Unexplained { tokens: Some(SIGHT.visible) }));
    assert_eq!(small.named_of(&noise, None), Some(Attribution::Unexplained { tokens: None }));
}
