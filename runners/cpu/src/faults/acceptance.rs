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
