//! The part of a suite that is about experts: covering arrays over routers, and over layers of experts on ranks.

use serde::Deserialize;
use shardcheck_engine::{
    Activation, ExpertChoice, ExpertSharding, MaskedFill, MoeExchange, MoePlan, Renormalise, Router, Scoring,
    SharedExpert,
};

use super::Collector;
use crate::covering::covering;
use crate::{Case, ExpertWeights, LogitPattern, MoeCase, RouteCase};

/// Experts, experts of a token, groups, groups that are kept.
type Sizes = (usize, usize, usize, usize);

/// A covering array of routers.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RoutePart {
    strength: usize,
    count: usize,
    scorings: Vec<Scoring>,
    choices: Vec<ExpertChoice>,
    sizes: Vec<Sizes>,
    fills: Vec<MaskedFill>,
    renormalisations: Vec<Renormalise>,
    scales: Vec<f32>,
    tokens: Vec<usize>,
    logits: Vec<LogitPattern>,
}

impl RoutePart {
    pub(super) fn collect(&self, seed: u64, suite: &mut Collector) {
        let levels = [
            self.choices.len(),
            self.sizes.len(),
            self.scorings.len(),
            self.fills.len(),
            self.renormalisations.len(),
            self.scales.len(),
            self.tokens.len(),
            self.logits.len(),
        ];
        // a table knows no groups, and no bias that could make a choice negative
        let allow = |row: &[Option<usize>]| {
            let hashed = row[0].is_some_and(|index| self.choices[index] == ExpertChoice::Hashed);
            let biased = row[0].is_none_or(|index| self.choices[index] == ExpertChoice::Biased);
            let negative = row[7].is_some_and(|index| self.logits[index] == LogitPattern::Negative);
            !(hashed && row[1].is_some_and(|index| self.sizes[index].2 > 1) || negative && !biased)
        };
        suite.fill(self.count, |round| {
            let rows = covering(&levels, self.strength, &allow, seed.wrapping_add(round << 32));
            rows.iter().map(|row| Case::route(self.case(row), 0)).collect()
        });
    }

    fn case(&self, row: &[usize]) -> RouteCase {
        let (experts, top_k, groups, top_groups) = self.sizes[row[1]];
        let router = Router {
            scoring: self.scorings[row[2]],
            choice: self.choices[row[0]],
            top_k,
            groups,
            top_groups,
            fill: self.fills[row[3]],
            renormalise: self.renormalisations[row[4]],
            scale: self.scales[row[5]],
        };
        RouteCase { router, experts, tokens: self.tokens[row[6]], logits: self.logits[row[7]] }
    }
}

/// Tokens of the first data-parallel group, at the edges of a split over so many ranks; others have more or fewer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
enum Count {
    #[serde(rename = "0")]
    Zero,
    #[serde(rename = "1")]
    One,
    #[serde(rename = "p-1")]
    Below,
    #[serde(rename = "p")]
    Ranks,
    #[serde(rename = "p+1")]
    Above,
    #[serde(rename = "2p-1")]
    BelowTwice,
    #[serde(rename = "2p")]
    Twice,
    #[serde(rename = "17")]
    Seventeen,
}

impl Count {
    /// Tokens of each group; the groups differ, and one of them may have none.
    fn of_groups(self, dp: usize, ranks: usize) -> Vec<usize> {
        let first = match self {
            Self::Zero => 0,
            Self::One => 1,
            Self::Below => ranks - 1,
            Self::Ranks => ranks,
            Self::Above => ranks + 1,
            Self::BelowTwice => 2 * ranks - 1,
            Self::Twice => 2 * ranks,
            Self::Seventeen => 17,
        };
        (0..dp)
            .map(
                |group| if group % 2 == 0 { first + group } else { 2 * ranks + 3 - first.min(2 * ranks + 3) },
            )
            .collect()
    }
}

/// What a token's experts are and do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Experts {
    /// Random and gated.
    Gated,
    /// Random and gated by SiTU.
    Situ,
    /// Random and linear.
    Linear,
    /// The identity.
    Identity,
    /// Such that write who computed what.
    Tagged,
}

/// A covering array of layers of experts.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MoePart {
    strength: usize,
    count: usize,
    exchanges: Vec<MoeExchange>,
    /// dp, pcp, tp.
    worlds: Vec<(usize, usize, usize)>,
    shardings: Vec<ExpertSharding>,
    shared: Vec<SharedExpert>,
    experts: Vec<Experts>,
    choices: Vec<ExpertChoice>,
    sizes: Vec<Sizes>,
    tokens: Vec<Count>,
    scorings: Vec<Scoring>,
}

/// Width of a token that is no power of two.
const HIDDEN: usize = 24;
/// Inner width of a random expert, which few numbers of ranks divide.
const INNER: usize = 10;

impl MoePart {
    pub(super) fn collect(&self, seed: u64, suite: &mut Collector) {
        let levels = [
            self.exchanges.len(),
            self.worlds.len(),
            self.shardings.len(),
            self.shared.len(),
            self.experts.len(),
            self.choices.len(),
            self.sizes.len(),
            self.tokens.len(),
            self.scorings.len(),
        ];
        let allow = |row: &[Option<usize>]| {
            let is_sliced = row[0].is_some_and(|index| self.exchanges[index] == MoeExchange::Sliced);
            let refused = row[1].is_some_and(|index| self.worlds[index].1 > 1)
                || row[2].is_some_and(|index| self.shardings[index] == ExpertSharding::Split)
                || row[3].is_some_and(|index| self.shared[index] == SharedExpert::Sharded);
            let hashed = row[5].is_some_and(|index| self.choices[index] == ExpertChoice::Hashed);
            let grouped = row[6].is_some_and(|index| self.sizes[index].2 > 1);
            !(is_sliced && refused || hashed && grouped)
        };
        suite.fill(self.count, |round| {
            let rows = covering(&levels, self.strength, &allow, seed.wrapping_add(round << 32));
            rows.iter().map(|row| Case::moe(self.case(row), 0)).collect()
        });
    }

    fn case(&self, row: &[usize]) -> MoeCase {
        let (exchange, (dp, pcp, tp)) = (self.exchanges[row[0]], self.worlds[row[1]]);
        let (shared, kind) = (self.shared[row[3]], self.experts[row[4]]);
        let (experts, top_k, groups, top_groups) = self.sizes[row[6]];
        let is_tagged = kind == Experts::Tagged;
        let router = Router {
            scoring: self.scorings[row[8]],
            choice: self.choices[row[5]],
            top_k,
            groups,
            top_groups,
            fill: MaskedFill::NegativeInfinity,
            renormalise: Renormalise::SumAndTiny,
            scale: if is_tagged { 1.0 } else { 2.5 },
        };
        let is_random = matches!(kind, Experts::Gated | Experts::Situ | Experts::Linear);
        let inner = if is_random { INNER } else { HIDDEN };
        let split = if exchange == MoeExchange::Sliced { tp } else { pcp * tp };
        MoeCase {
            router,
            experts,
            plan: MoePlan {
                dp,
                pcp,
                tp,
                exchange,
                sharding: self.shardings[row[2]],
                shared,
                activation: match kind {
                    Experts::Gated => Activation::SiluGated,
                    Experts::Situ => Activation::SituGated,
                    _ => Activation::Linear,
                },
            },
            dp_tokens: self.tokens[row[7]].of_groups(dp, split),
            hidden: HIDDEN,
            inner,
            shared_inner: if shared == SharedExpert::None { 0 } else { inner },
            weights: match kind {
                Experts::Gated | Experts::Situ | Experts::Linear => ExpertWeights::Random,
                Experts::Identity => ExpertWeights::Identity,
                Experts::Tagged => ExpertWeights::Tagged,
            },
            logits: if is_tagged { LogitPattern::OneHot } else { LogitPattern::Random },
        }
    }
}
