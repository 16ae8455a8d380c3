//! What a run cannot have seen, in sentences with its own figures.

use super::RunReport;
use crate::coverage::{Reach, ShardReach};
use crate::statistics::design::{Design, Errors, smallest_drop};

/// The churn assumed when no pair of equal runs is at hand, as a share of questions. Published repeats of greedy runs
/// lie between 1 % and 5.5 % (SGLang-JAX #1333: 3.2 %, vLLM #54920: 1.1 to 7.8 %).
pub const TYPICAL_CHURN: f64 = 0.02;

/// One sentence for each kind of fault that this run is blind to.
pub fn sentences(report: &RunReport) -> Vec<String> {
    let mut unseen = Vec::new();
    match &report.reach {
        Some(reach) => lengths(reach, &mut unseen),
        None => unseen
            .push("the server gave no token counts, so the lengths that were reached are unknown".to_owned()),
    }
    concurrency(report, &mut unseen);
    prefix_cache(report, &mut unseen);
    drops(report, &mut unseen);
    unseen.push(
        "numeric errors that leave the best token in place; `logprobs` compares the probabilities themselves"
            .to_owned(),
    );
    if report.acceptance.is_none() {
        unseen.push(
            "draft and verification of speculative decoding: no acceptance was reported, so if drafting is on, a \
             broken draft would go unnoticed"
                .to_owned(),
        );
    }
    unseen.push("sampling: every request was greedy".to_owned());
    unseen
}

fn lengths(reach: &Reach, unseen: &mut Vec<String>) {
    unseen.push(format!(
        "contexts longer than {} tokens: split contexts, further rows of the block table, wide offsets, prefill in \
         chunks",
        reach.longest_sequence
    ));
    match &reach.shards {
        Some(shards) => shard_lengths(reach, shards, unseen),
        None => unseen.push(
            "what a rank held: state the server's sharding with --dcp, --interleave and --block-size to have it \
             reported"
                .to_owned(),
        ),
    }
}

fn shard_lengths(reach: &Reach, shards: &ShardReach, unseen: &mut Vec<String>) {
    let sharding = shards.sharding;
    let round = sharding.dcp * sharding.interleave;
    unseen.push(format!(
        "more than {} tokens on one rank (dcp {}, interleave {})",
        shards.most_on_a_rank, sharding.dcp, sharding.interleave
    ));
    if shards.with_empty_shard == 0 && sharding.dcp > 1 {
        unseen.push(format!(
            "a rank that owns nothing (LSE of −∞ in the merge): it takes a context below {} tokens, the shortest \
             prompt had {}",
            sharding.shortest_without_empty_shard(),
            reach.shortest_prompt
        ));
    }
    if shards.residues_seen < round {
        unseen.push(format!(
            "{} of the {round} positions within a round of dcp × interleave tokens",
            round - shards.residues_seen
        ));
    }
    if shards.crossed_virtual_block == Some(0) {
        unseen.push("a decode step that opens a new virtual block".to_owned());
    }
}

fn concurrency(report: &RunReport, unseen: &mut Vec<String>) {
    let peak = report.manifest.sessions.iter().filter_map(|session| session.server_peak);
    let running = peak.map(|peak| peak.running).reduce(f64::max);
    unseen.push(match running {
        Some(running) => format!(
            "batches of more than {running} requests: so many ran together at most by the server's own count \
             ({} were in flight here)",
            report.most_in_flight
        ),
        None => format!(
            "batches of more than {} requests, and fewer if the server's own maximum is lower: its metrics were not \
             available",
            report.most_in_flight
        ),
    });
}

fn prefix_cache(report: &RunReport, unseen: &mut Vec<String>) {
    let plan = &report.manifest.plan;
    if plan.prompts_sharing_two_shots * 10 < plan.questions {
        unseen.push(format!(
            "reuse of cached prefixes: {} of {} prompts share their first two shots with an earlier one",
            plan.prompts_sharing_two_shots, plan.questions
        ));
    }
}

fn drops(report: &RunReport, unseen: &mut Vec<String>) {
    let questions = report.manifest.plan.questions as u64;
    let Some(accuracy) = report.scores.values().next().map(|score| score.mean()) else { return };
    if !(0.02..1.0).contains(&accuracy) || questions < 20 {
        unseen.push(format!("any but gross faults: {questions} questions at this accuracy resolve little"));
        return;
    }
    let points = |design| 100.0 * smallest_drop(design, questions, accuracy, Errors::USUAL);
    unseen.push(format!(
        "a drop below {:.2} points against a fixed number, or below {:.2} points when paired with a run of the same \
         prompts at a churn of {:.0} % (α = 0.01 one-sided, found 9 times in 10)",
        points(Design::Constant),
        points(Design::Paired { churn: TYPICAL_CHURN }),
        100.0 * TYPICAL_CHURN
    ));
}

#[cfg(test)]
mod tests {
    use super::super::tests::{answer, manifest};
    use super::*;
    use crate::coverage::Sharding;
    use crate::server_metrics::ServerPeak;

    fn joined(sharding: Option<Sharding>, running: Option<f64>) -> String {
        let mut manifest = manifest();
        manifest.sharding = sharding;
        manifest.sessions[0].server_peak =
            running.map(|running| ServerPeak { running, waiting: 0.0, readings: 1 });
        let answers = [answer(0, true, true), answer(1, false, true), answer(2, true, true)];
        RunReport::new(manifest, &answers).unseen.join("\n")
    }

    #[test]
    fn lengths_ranks_and_empty_shards_are_named_with_figures() {
        let text = joined(Some(Sharding { dcp: 8, interleave: 64, block_size: Some(64) }), None);
        assert!(text.contains("longer than 802 tokens"), "{text}");
        // 802 = 1·512 + 290: rank 0 holds 64 + 64
        assert!(text.contains("more than 128 tokens on one rank"), "{text}");
        assert!(text.contains("below 449 tokens, the shortest prompt had 700"), "{text}");
        assert!(text.contains("of the 512 positions"), "{text}");
        assert!(text.contains("opens a new virtual block"), "{text}");
    }

    #[test]
    fn the_servers_own_batch_counts_where_it_is_known() {
        assert!(joined(None, Some(2.0)).contains("more than 2 requests"));
        let text = joined(None, None);
        assert!(text.contains("more than 4 requests") && text.contains("--dcp"), "{text}");
        assert!(text.contains("any but gross faults"), "{text}");
    }
}
