//! Tables of the closed vocabularies.

use shardcheck_cases::{Family, Probe};

use super::Table;
use crate::finding::Stage;
use crate::select::{Axis, TextAxis};
use crate::status::{Exit, Status};

/// Exit codes and their meaning.
pub fn exit_codes() -> Table {
    Table::new(
        ["code", "name", "meaning"],
        Exit::ALL.map(|exit| [exit.code().to_string(), format!("{exit:?}"), exit.meaning().to_owned()]),
    )
}

/// Verdicts, from best to worst.
pub fn statuses() -> Table {
    let yes_no = |yes: bool| if yes { "yes" } else { "no" };
    Table::new(
        ["status", "judged", "fails the run", "meaning"],
        Status::ALL.map(|s| [s.name(), yes_no(s.is_judged()), yes_no(s.is_failure()), s.meaning()]),
    )
}

/// What becomes of each verdict in a JUnit file.
pub fn junit_mapping() -> Table {
    Table::new(
        ["status", "JUnit element", "`type`", "`message`"],
        Status::ALL.map(|status| {
            let (element, message) = match status {
                Status::Pass | Status::Warn | Status::ExpectedFail => ("none: the test case passed", ""),
                Status::Unsupported | Status::Skipped | Status::Inconclusive => {
                    ("`skipped`", "verdict and reason")
                }
                Status::UnexpectedPass | Status::Fail => ("`failure`", "what was found"),
                Status::Crash | Status::Timeout | Status::DeviceLost | Status::HarnessError => {
                    ("`error`", "what the engine said")
                }
            };
            let kind = if message.is_empty() { String::new() } else { format!("`{status}`") };
            [format!("`{status}`"), element.to_owned(), kind, message.to_owned()]
        }),
    )
}

/// Families, in the order in which an engine is brought up.
pub fn families() -> Table {
    Table::new(["family", "what the engine is asked"], Family::ALL.map(|f| [f.name(), family_meaning(f)]))
}

/// Probes and what each exposes.
pub fn probes() -> Table {
    Table::new(
        ["probe", "what it draws, and what that exposes"],
        Probe::ALL.map(|p| [p.name(), probe_meaning(p)]),
    )
}

/// Stages, in the order of a step.
pub fn stages() -> Table {
    Table::new(["stage", "what happens there"], Stage::ALL.map(|s| [s.name(), stage_meaning(s)]))
}

/// Axes of filter expressions.
pub fn axes() -> Table {
    Table::new(
        ["axis", "what it is", "values"],
        Axis::ALL.map(|axis| {
            let values = match axis {
                Axis::Number(_) => "whole numbers".to_owned(),
                Axis::Text(TextAxis::Id | TextAxis::Prop) => "text".to_owned(),
                _ => axis.values().join(", "),
            };
            [axis.name().to_owned(), axis.meaning().to_owned(), values]
        }),
    )
}

/// What an engine is asked by cases of a family.
pub fn family_meaning(family: Family) -> &'static str {
    match family {
        Family::Layout => {
            "to derive lengths, slots and pages of a batch whose sequences lie interleaved over ranks"
        }
        Family::Acceptance => {
            "to accept or reject drafted tokens by the target's logits, and to draw the token behind them"
        }
        Family::SelectSparse => {
            "to select the tokens that each row attends to by the scores of an indexer whose keys lie over the ranks"
        }
        Family::AttendSelected => {
            "attention of new rows over the tokens that were selected for each, by lists of the slots in which a rank keeps its own"
        }
        Family::AttendSinks => {
            "causal attention of rows whose heads have sinks, logits that take their share of the softmax, once over all ranks"
        }
        Family::IndexLayers => {
            "to say which layers of a model compute a selection and which share one, by the model's configuration"
        }
        Family::Kda => {
            "Kimi delta attention: steps of requests that go on, fork, go back behind rejected rows and leave their slots"
        }
        Family::AttendPcp => {
            "attention of a batch whose rows lie on the ranks of prefill context parallelism, over the gathered keys of all"
        }
        Family::SelectPcp => {
            "to select tokens for the rows of a shared batch by the indexer's keys of all positions, and to bring the selections back"
        }
        Family::CompressPcp => {
            "to pool blocks of tokens whose rows lie on the ranks of prefill context parallelism into one entry each"
        }
        Family::Pcp => {
            "to share the rows of a batch out over the ranks of prefill context parallelism and to bring them back"
        }
        Family::Write => "to write keys and values through its own slots, and to give the caches back",
        Family::PackLse => "to split 32-bit LSEs into two 16-bit lanes and to join them again",
        Family::MergeStates => "to merge two given attention states, a prefix and a suffix",
        Family::MergeSegments => "to merge the given segments of a split kernel",
        Family::MergePartials => "to merge given partials of all ranks of a group, by either exchange",
        Family::Decode => "attention of one new row a request over its cached tokens",
        Family::Verify => "causal attention of several new rows a request, as target verification needs it",
        Family::Draft => "bidirectional attention of a draft block that is filled in one pass",
        Family::Context => "attention of new tokens over a cached context that is gathered in chunks",
        Family::Route => "to choose the experts of given logits and to weigh them",
        Family::Moe => {
            "a layer of experts: to share tokens and experts out over ranks and to bring the sums back"
        }
        Family::Sequence => {
            "the steps of one session: prefill, decode, verify with rejections, drafts, prefix hits, freed blocks, graph buckets"
        }
        Family::Stack => {
            "a small whole transformer: every step of a session from token ids through all layers to the greedy tokens"
        }
        Family::Rules => {
            "whether launch settings are accepted, refused, or accepted with a feature switched off"
        }
    }
}

fn probe_meaning(probe: Probe) -> &'static str {
    match probe {
        Probe::Gaussian => "independent values of zero mean, scores of unit deviation: the plain case",
        Probe::NewestDominant => {
            "the newest visible keys take most of the weight: a wrong causal edge moves the output by its own size"
        }
        Probe::ForbiddenPoison => {
            "the first key that a row must not see is aligned with its query and carries a huge value: seeing it is unmistakable"
        }
        Probe::Cold => "all scores strongly negative: an empty shard that claims LSE 0 takes over",
        Probe::Hot => "all scores strongly positive: an exponential that is not shifted overflows",
        Probe::Sink => {
            "position 0 takes most of the weight, as attention sinks do: the rank that holds it must not be lost"
        }
        Probe::CommonMode => {
            "a large common part in keys and values: errors of normalisation and subtraction show"
        }
        Probe::Cancellation => {
            "values that cancel to nearly nothing: a bound that is merely relative would hide errors"
        }
        Probe::TokenCode => {
            "equal scores, and values that spell the token's position: the attended set can be read back"
        }
    }
}

fn stage_meaning(stage: Stage) -> &'static str {
    match stage {
        Stage::Layout => "owner, local index, lengths and slots of each position are derived",
        Stage::Routing => "experts of each row are chosen and weighed",
        Stage::Selection => "tokens that each row attends to are scored and selected",
        Stage::RowBound => "each row gets the number of local keys that it may see",
        Stage::Write => "keys and values are cast and stored into the cache",
        Stage::Query => "queries of the group are gathered, or projected on every rank",
        Stage::Gather => {
            "a cached context is gathered from all ranks and put into the order of its positions"
        }
        Stage::Partial => "each rank attends to its own tokens",
        Stage::Exchange => "partials and their LSEs travel between ranks",
        Stage::Merge => "partials are merged by their LSEs",
        Stage::Output => "the result is projected and rounded for the last time",
        Stage::Configuration => "launch settings are accepted, refused or changed",
    }
}
