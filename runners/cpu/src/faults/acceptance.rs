//! Faults of accepting drafts: the wrong row, number, weight or count.

use super::{Fault, FaultClass};
use crate::acceptance::{NoDraft, prefix_of};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "accept-target-row-behind",
        title: "a draft is judged by the target's row behind its own",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.greedy", "acceptance.decision", "acceptance.enumeration", "acceptance.law"],
        apply: |p| p.acceptance.target_row = |first, index| first + index + 1,
    },
    Fault {
        name: "accept-bonus-from-last-draft",
        title: "the bonus token is drawn at the row of the last draft",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.greedy", "acceptance.token"],
        apply: |p| p.acceptance.bonus_row = |first, drafts| first + drafts.max(1) - 1,
    },
    Fault {
        name: "accept-no-bonus",
        title: "no token follows where all drafts are accepted",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.identities"],
        apply: |p| p.acceptance.emits = |accepted, drafts| accepted < drafts,
    },
    Fault {
        name: "accept-without-draft-law",
        title: "a draft is accepted with the target's probability, whatever the drafter gave it",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.decision", "acceptance.enumeration", "acceptance.law"],
        apply: |p| p.acceptance.accepts = |target, _, number| target > number.ln(),
    },
    Fault {
        name: "accept-number-on-the-wrong-side",
        title: "a draft is accepted iff u·p > q",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.decision", "acceptance.law"],
        apply: |p| p.acceptance.accepts = |target, draft, number| target + number.ln() > draft,
    },
    Fault {
        name: "accept-number-zero-takes-all",
        title: "a draft is accepted iff p ≥ u·q: the number 0 accepts what the target can't have",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.support"],
        apply: |p| p.acceptance.accepts = |target, draft, number| target >= number.ln() + draft,
    },
    Fault {
        name: "accept-residual-is-target",
        title: "the token behind a rejection is drawn from the target",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.token", "acceptance.support", "acceptance.enumeration", "acceptance.law"],
        apply: |p| p.acceptance.residual = |_, target, _| target,
    },
    Fault {
        name: "accept-residual-of-the-draft",
        title: "the token behind a rejection is drawn from max(q − p, 0)",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.token", "acceptance.support", "acceptance.enumeration", "acceptance.law"],
        apply: |p| p.acceptance.residual = |prefix, target, draft| (draft - prefix * target).max(0.0),
    },
    Fault {
        name: "accept-residual-not-clamped",
        title: "the token behind a rejection is drawn from |p − q|",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.token", "acceptance.support", "acceptance.enumeration", "acceptance.law"],
        apply: |p| p.acceptance.residual = |prefix, target, draft| (prefix * target - draft).abs(),
    },
    Fault {
        name: "accept-residual-of-weights-not-logs",
        title: "noise is added to the weights behind a rejection and not to their logarithms",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.token", "acceptance.law"],
        apply: |p| {
            p.acceptance.score = |log, noise| if log == f32::NEG_INFINITY { log } else { log.exp() + noise }
        },
    },
    Fault {
        name: "accept-block-residual-unscaled",
        title: "behind a block the token is drawn from max(p − q, 0), without the probability of the block",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.token", "acceptance.enumeration"],
        apply: |p| p.acceptance.residual = |_, target, draft| (target - draft).max(0.0),
    },
    Fault {
        name: "accept-block-stops-early",
        title: "a block ends in front of the first prefix that does not pass, though a longer one does",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.decision", "acceptance.enumeration", "acceptance.law"],
        apply: |p| p.acceptance.longest = prefix_of,
    },
    Fault {
        name: "accept-block-prefix-above-one",
        title: "the probability of a prefix is not cut off at 1",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.decision", "acceptance.enumeration"],
        apply: |p| p.acceptance.prefix = |before, ratio| before * ratio.exp(),
    },
    Fault {
        name: "accept-block-prefix-alone",
        title: "the probability of a prefix is that of its last draft",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.decision", "acceptance.enumeration"],
        apply: |p| p.acceptance.prefix = |_, ratio| ratio.exp().min(1.0),
    },
    Fault {
        name: "accept-block-prefix-for-bound",
        title: "a prefix that is not the last passes with its probability instead of h",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.decision", "acceptance.enumeration", "acceptance.law"],
        apply: |p| p.acceptance.continued = |_, prefix| prefix,
    },
    Fault {
        name: "accept-ragged-counts-ignored",
        title: "every request has as many drafts as the one with most",
        class: FaultClass::SpecDecode,
        bugs: &["vllm-ascend#8547"],
        killed_by: &["acceptance.identities", "acceptance.greedy"],
        apply: |p| p.acceptance.drafts = |_, columns| columns,
    },
    Fault {
        name: "accept-none-is-accepted",
        title: "a draft −1 is accepted and emitted",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["acceptance.identities", "acceptance.greedy"],
        apply: |p| p.acceptance.none = NoDraft::Accepted,
    },
    Fault {
        name: "accept-none-leaves-a-residual",
        title: "behind a draft −1 the token is drawn from max(p − q, 0) of a drafter that did not draw",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["acceptance.token"],
        apply: |p| p.acceptance.none = NoDraft::Rejected,
    },
    Fault {
        name: "accept-one-hot-as-uniform",
        title: "a draft without a law counts as drawn from the uniform one",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.decision", "acceptance.enumeration", "acceptance.law"],
        apply: |p| p.acceptance.one_hot = |tokens| -(tokens as f32).ln(),
    },
    Fault {
        name: "accept-one-hot-keeps-the-rejected",
        title: "a rejected draft without a law may be drawn again",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.token", "acceptance.support", "acceptance.law"],
        apply: |p| p.acceptance.rejected = |target| target,
    },
    Fault {
        name: "accept-ranks-draw-for-themselves",
        title: "each rank has numbers of its own",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["acceptance.ranks"],
        apply: |p| p.acceptance.number = |rank, row, numbers| numbers[(row + 5 * rank) % numbers.len()],
    },
    Fault {
        name: "accept-numbers-by-request",
        title: "all drafts of a batch are decided by one number",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.decision", "acceptance.law"],
        apply: |p| p.acceptance.number = |_, _, numbers| numbers[0],
    },
    Fault {
        name: "accept-tie-takes-the-last",
        title: "the last of equal logits is the argmax",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.greedy"],
        apply: |p| p.acceptance.better = [|logit, best| logit >= best; 2],
    },
    Fault {
        name: "accept-tie-takes-the-last-shard",
        title: "of equal logits the one on the highest rank is the argmax",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["acceptance.greedy"],
        apply: |p| p.acceptance.better[1] = |logit, best| logit >= best,
    },
    Fault {
        name: "accept-shard-offset-forgotten",
        title: "the argmax over shards is the token's place in its shard",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["acceptance.greedy", "acceptance.token"],
        apply: |p| p.acceptance.token = |place, _| place,
    },
    Fault {
        name: "accept-shard-sums-not-rescaled",
        title: "the sums of the shards are added, each relative to a largest logit of its own",
        class: FaultClass::LseMath,
        bugs: &[],
        killed_by: &["acceptance.decision"],
        apply: |p| {
            p.acceptance.join = |parts| {
                let most = parts.iter().map(|part| part.0).fold(f32::NEG_INFINITY, f32::max);
                (most, parts.iter().map(|part| part.1).sum())
            }
        },
    },
    Fault {
        name: "accept-draft-not-tempered",
        title: "the drafter's logits are not divided by the temperature",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["acceptance.decision"],
        apply: |p| p.acceptance.temper[1] = |logit, _| logit,
    },
    Fault {
        name: "accept-temperature-twice",
        title: "the target's logits are divided by the temperature twice",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["acceptance.decision", "acceptance.token"],
        apply: |p| p.acceptance.temper[0] = |logit, temperature| logit / temperature / temperature,
    },
    Fault {
        name: "accept-greedy-request-drawn",
        title: "a request of temperature 0 is drawn like any other",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.greedy"],
        apply: |p| p.acceptance.is_greedy = |_| false,
    },
    Fault {
        name: "accept-greedy-counts-matches",
        title: "a greedy request accepts as many drafts as are the argmax, those behind a mismatch too",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.greedy"],
        apply: |p| p.acceptance.matching = |matches| matches.iter().filter(|matches| **matches).count(),
    },
    Fault {
        name: "accept-relaxed-unsaid",
        title: "a greedy request accepts a draft within 0.6 of the largest logit, and nothing says that this is lossy",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.greedy"],
        apply: |p| {
            p.acceptance.matches =
                |draft, argmax, row| usize::try_from(draft).is_ok_and(|draft| row[draft] >= row[argmax] - 0.6)
        },
    },
    Fault {
        name: "accept-rejected-drafts-left",
        title: "rejected drafts stand behind the emitted tokens",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["acceptance.identities"],
        apply: |p| p.acceptance.tail = |draft| draft,
    },
    Fault {
        name: "accept-counts-the-bonus",
        title: "the token behind the accepted drafts is counted as accepted",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.identities", "acceptance.greedy"],
        apply: |p| p.acceptance.reported = |accepted, drafts| (accepted + 1).min(drafts),
    },
    Fault {
        name: "accept-length-without-bonus",
        title: "the mean acceptance length leaves out the token behind the accepted drafts",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.statistics"],
        apply: |p| {
            p.acceptance.statistics = |accepted, drafted, columns| {
                let [mean, rate] = crate::acceptance::statistics(accepted, drafted, columns);
                [mean - 1.0, rate]
            }
        },
    },
    Fault {
        name: "accept-rate-over-columns",
        title: "the acceptance rate is over the drafts of the longest request, times requests",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["acceptance.statistics"],
        apply: |p| {
            p.acceptance.statistics = |accepted, drafted, columns| {
                let [mean, _] = crate::acceptance::statistics(accepted, drafted, columns);
                let all = accepted.iter().sum::<usize>() as f32;
                [mean, all / (drafted.len() * columns).max(1) as f32]
            }
        },
    },
    Fault {
        name: "accept-rate-of-no-drafts",
        title: "the acceptance rate of a batch without drafts is 0 / 0",
        class: FaultClass::EmptyShard,
        bugs: &[],
        killed_by: &["acceptance.statistics"],
        apply: |p| {
            p.acceptance.statistics = |accepted, drafted, columns| {
                let [mean, _] = crate::acceptance::statistics(accepted, drafted, columns);
                [mean, accepted.iter().sum::<usize>() as f32 / drafted.iter().sum::<usize>() as f32]
            }
        },
    },
];

#[cfg(test)]
mod tests {
    use super::super::faulty;
    use crate::acceptance::{AcceptancePolicies, NoDraft};

    fn with(name: &str) -> AcceptancePolicies {
        faulty::with(name).acceptance
    }

    const HEALTHY: AcceptancePolicies = AcceptancePolicies::HEALTHY;

    fn near(seen: f32, wanted: f32) {
        assert!((seen - wanted).abs() < 1e-6, "{seen} {wanted}");
    }

    #[test]
    fn rows_drafts_and_numbers_are_those_that_the_titles_name() {
        assert_eq!(((HEALTHY.target_row)(4, 2), (HEALTHY.bonus_row)(4, 3)), (6, 7));
        assert_eq!((with("accept-target-row-behind").target_row)(4, 2), 7);
        assert_eq!(
            [0, 1, 3].map(|drafts| (with("accept-bonus-from-last-draft").bonus_row)(4, drafts)),
            [4, 4, 6]
        );
        assert_eq!(((HEALTHY.drafts)(2, 5), (with("accept-ragged-counts-ignored").drafts)(2, 5)), (2, 5));
        let numbers = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6];
        let number = |policies: AcceptancePolicies, rank| (policies.number)(rank, 4, &numbers);
        assert_eq!([0, 2].map(|rank| number(HEALTHY, rank)), [0.4, 0.4]);
        assert_eq!([0, 2].map(|rank| number(with("accept-ranks-draw-for-themselves"), rank)), [0.4, 0.0]);
        assert_eq!(number(with("accept-numbers-by-request"), 2), 0.0);
        let nones = ["accept-none-is-accepted", "accept-none-leaves-a-residual"].map(|name| with(name).none);
        assert_eq!((HEALTHY.none, nones), (NoDraft::Ends, [NoDraft::Accepted, NoDraft::Rejected]));
    }

    #[test]
    fn a_draft_is_accepted_by_the_ratio_that_the_title_names() {
        // targets and drafts that differ from their logarithms' signs on either side of a number
        let accepts = |policies: AcceptancePolicies| {
            [(0.5f32, 0.8f32, 0.6f32), (0.5, 0.8, 0.7), (0.3, 0.2, 0.6), (0.3, 0.2, 0.9)]
                .map(|(target, draft, number)| (policies.accepts)(target.ln(), draft.ln(), number))
        };
        assert_eq!(accepts(HEALTHY), [true, false, true, true]);
        assert_eq!(accepts(with("accept-without-draft-law")), [false, false, false, false]);
        assert_eq!(accepts(with("accept-number-on-the-wrong-side")), [false, false, false, true]);
        let without = with("accept-without-draft-law").accepts;
        assert!(without(0.7f32.ln(), 0.9f32.ln(), 0.6) && !without(0.7f32.ln(), 0.1f32.ln(), 0.8));
        let (zero, half) = (f32::NEG_INFINITY, 0.5f32.ln());
        assert!(!(HEALTHY.accepts)(zero, half, 0.0) && !(HEALTHY.accepts)(half, half, 1.0));
        let takes_all = with("accept-number-zero-takes-all");
        assert!((takes_all.accepts)(zero, half, 0.0) && (takes_all.accepts)(half, half, 1.0));
        assert_eq!(accepts(takes_all), accepts(HEALTHY));
        assert_eq!((HEALTHY.one_hot)(8), 0.0);
        near((with("accept-one-hot-as-uniform").one_hot)(8), 0.125f32.ln());
    }

    #[test]
    fn what_is_left_over_weighs_as_the_titles_say() {
        let left = |policies: AcceptancePolicies| {
            [(0.5, 0.8, 0.2), (0.5, 0.4, 0.3), (0.5, 0.8, 0.6)]
                .map(|(prefix, target, draft)| (policies.residual)(prefix, target, draft))
        };
        for (name, wanted) in [
            ("accept-residual-is-target", [0.8, 0.4, 0.8]),
            ("accept-residual-of-the-draft", [0.0, 0.1, 0.2]),
            ("accept-residual-not-clamped", [0.2, 0.1, 0.2]),
            ("accept-block-residual-unscaled", [0.6, 0.1, 0.2]),
        ] {
            left(with(name)).into_iter().zip(wanted).for_each(|(seen, wanted)| near(seen, wanted));
        }
        left(HEALTHY).into_iter().zip([0.2, 0.0, 0.0]).for_each(|(seen, wanted)| near(seen, wanted));
        assert_eq!(
            ((HEALTHY.rejected)(0.3), (with("accept-one-hot-keeps-the-rejected").rejected)(0.3)),
            (0.0, 0.3)
        );
        let score = with("accept-residual-of-weights-not-logs").score;
        near((HEALTHY.score)(0.25f32.ln(), 2.0), 0.25f32.ln() + 2.0);
        near(score(0.25f32.ln(), 2.0), 2.25);
        assert_eq!(score(f32::NEG_INFINITY, 2.0), f32::NEG_INFINITY);
    }

    #[test]
    fn blocks_go_by_the_prefixes_that_the_titles_name() {
        let passes = [true, false, true, false];
        assert_eq!(((HEALTHY.longest)(&passes), (with("accept-block-stops-early").longest)(&passes)), (3, 1));
        assert_eq!((HEALTHY.longest)(&[false; 3]), 0);
        let prefix =
            |policies: AcceptancePolicies| [0.5f32, 4.0].map(|ratio| (policies.prefix)(0.5, ratio.ln()));
        for (policies, wanted) in [
            (HEALTHY, [0.25, 1.0]),
            (with("accept-block-prefix-above-one"), [0.25, 2.0]),
            (with("accept-block-prefix-alone"), [0.5, 1.0]),
        ] {
            prefix(policies).into_iter().zip(wanted).for_each(|(seen, wanted)| near(seen, wanted));
        }
        near((HEALTHY.continued)(0.3, 0.6), 3.0 / 7.0);
        near((HEALTHY.continued)(0.0, 1.0), 1.0);
        near((with("accept-block-prefix-for-bound").continued)(0.3, 0.6), 0.6);
    }

    #[test]
    fn the_best_token_and_the_mass_of_all_shards_are_those_that_the_titles_name() {
        let better = |policies: AcceptancePolicies| {
            policies.better.map(|better| [(1.0, 2.0), (2.0, 2.0), (3.0, 2.0)].map(|(a, b)| better(a, b)))
        };
        let (first, last) = ([false, false, true], [false, true, true]);
        assert_eq!(better(HEALTHY), [first, first]);
        assert_eq!(better(with("accept-tie-takes-the-last")), [last, last]);
        assert_eq!(better(with("accept-tie-takes-the-last-shard")), [first, last]);
        assert_eq!(((HEALTHY.token)(2, 5), (with("accept-shard-offset-forgotten").token)(2, 5)), (7, 2));
        let parts = [(0.0, 1.5), (f32::NEG_INFINITY, 0.0), (2f32.ln(), 1.0)];
        let join = |policies: AcceptancePolicies| (policies.join)(&parts);
        assert_eq!(
            (join(HEALTHY).0, join(with("accept-shard-sums-not-rescaled"))),
            (2f32.ln(), (2f32.ln(), 2.5))
        );
        near(join(HEALTHY).1, 1.75);
    }

    #[test]
    fn temperatures_count_as_the_titles_say() {
        let tempered =
            |policies: AcceptancePolicies| policies.temper.map(|temper| [0.0, 0.5].map(|t| temper(3.0, t)));
        assert_eq!(tempered(HEALTHY), [[3.0, 6.0]; 2]);
        assert_eq!(tempered(with("accept-draft-not-tempered")), [[3.0, 6.0], [3.0, 3.0]]);
        assert_eq!(tempered(with("accept-temperature-twice"))[0][1], 12.0);
        let greedy = |policies: AcceptancePolicies| [0.0, 0.5].map(policies.is_greedy);
        assert_eq!(
            (greedy(HEALTHY), greedy(with("accept-greedy-request-drawn"))),
            ([true, false], [false; 2])
        );
        let matches = [true, false, true];
        assert_eq!(
            ((HEALTHY.matching)(&matches), (with("accept-greedy-counts-matches").matching)(&matches)),
            (1, 2)
        );
        let row = [1.0, 0.3, 0.5];
        let is_one =
            |policies: AcceptancePolicies| [-1, 0, 1, 2].map(|draft| (policies.matches)(draft, 0, &row));
        assert_eq!(is_one(HEALTHY), [false, true, false, false]);
        assert_eq!(is_one(with("accept-relaxed-unsaid")), [false, true, false, true]);
    }

    #[test]
    fn what_is_emitted_and_reported_is_what_the_titles_say() {
        let emits = |policies: AcceptancePolicies| [1, 2].map(|accepted| (policies.emits)(accepted, 2));
        assert_eq!((emits(HEALTHY), emits(with("accept-no-bonus"))), ([true; 2], [true, false]));
        assert_eq!(((HEALTHY.tail)(9), (with("accept-rejected-drafts-left").tail)(9)), (-1, 9));
        let reported =
            |policies: AcceptancePolicies| [0, 1, 2].map(|accepted| (policies.reported)(accepted, 2));
        assert_eq!((reported(HEALTHY), reported(with("accept-counts-the-bonus"))), ([0, 1, 2], [1, 2, 2]));
        // three requests of 2, 4 and 2 drafts in four columns
        let figures = |name: Option<&str>, drafted: [usize; 3]| {
            let accepted = if drafted == [0; 3] { [0; 3] } else { [1, 4, 1] };
            (name.map_or(HEALTHY, with).statistics)(&accepted, &drafted, 4)
        };
        for (name, wanted) in [
            (None, [3.0, 0.75]),
            (Some("accept-length-without-bonus"), [2.0, 0.75]),
            (Some("accept-rate-over-columns"), [3.0, 0.5]),
            (Some("accept-rate-of-no-drafts"), [3.0, 0.75]),
        ] {
            assert_eq!(figures(name, [2, 4, 2]), wanted, "{name:?}");
        }
        assert_eq!(figures(None, [0; 3]), [1.0, 0.0]);
        assert_eq!((with("accept-rate-over-columns").statistics)(&[0], &[0], 0), [1.0, 0.0]);
        assert!(figures(Some("accept-rate-of-no-drafts"), [0; 3])[1].is_nan());
    }
}
