//! Laws of a layer of experts: every token gets what its experts make of it, whoever has the token and whoever has the experts.

use shardcheck_cases::{Case, ExpertWeights, Family, MoeCase};
use shardcheck_engine::{ExpertSharding, MoeExchange, MoePlan, SharedExpert};
use shardcheck_formats::Dtype;

use super::{Property, always, broken};
use crate::finding::{Finding, Measured, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory, Observed, Run};
use crate::layer::MoeMaterial;

const MOE: &[Family] = &[Family::Moe];
const BOUND: &str =
    "certified bound of router, experts, parts and their sums, for any sharing out over the ranks";

pub(super) const PROPERTIES: &[Property] = &[
    Property {
        id: "moe.slices",
        statement: "a rank enters the exchange with the rows of the fullest rank that takes part in it, and no more",
        source: "vllm-ascend `PrepareAndFinalizeWithMC2`: padded to the maximum over data-parallel groups; ATOM: ceil(n / pcp)",
        bugs: &["ATOM#1915", "vllm#56079"],
        tolerance: "exact: integers",
        families: MOE,
        applies: always,
        check: slices,
    },
    Property {
        id: "moe.routing",
        statement: "on every rank the rows that it has are routed by their own logits and token ids, wherever they were gathered or sliced",
        source: "ATOM: ids for hash routing are gathered in the order of the rows; TensorCast: the gate runs on all tokens, logits are sliced as rows are",
        bugs: &["vllm-ascend#16834", "ATOM#1208"],
        tolerance: "as for a router",
        families: MOE,
        applies: always,
        check: routing,
    },
    Property {
        id: "moe.counts",
        statement: "each token reaches each of its experts once, and padding none: what the ranks count adds up to tokens · k, expert by expert",
        source: "tokens are conserved; `mc2_mask` marks padding",
        bugs: &["vllm#56079", "ATOM#1229", "ATOM#1700", "vllm-ascend#4030"],
        tolerance: "exact: integers; by expert where all sets are unique",
        families: MOE,
        applies: always,
        check: counts,
    },
    Property {
        id: "moe.tags",
        statement: "experts that write a token's number into a column of their own leave exactly that, with their weight, in the row of the token",
        source: "row identity: linear experts over integers, and weights of 1 or 1/k, have no rounding",
        bugs: &["vllm-ascend#4030", "vllm-ascend#16834", "sglang#20360", "ATOM#1208", "ATOM#1915"],
        tolerance: "exact: integers times a power of two",
        families: MOE,
        applies: |case| moe_case(case).is_some_and(|moe| moe.weights == ExpertWeights::Tagged),
        check: tags,
    },
    Property {
        id: "moe.output",
        statement: "every row comes out as Σ w·E(x) over its experts, plus the shared expert once",
        source: "ATOM `pcp_moe` merge 0 and 1; DeepSeek-V3 MoE",
        bugs: &["vllm-ascend#4030", "sglang#20360", "vllm-ascend#10557", "vllm-ascend#13538"],
        tolerance: BOUND,
        families: MOE,
        applies: always,
        check: output,
    },
    Property {
        id: "moe.ranks",
        statement: "ranks that have the same row have the same bits of it",
        source: "an all-reduce gives every rank the same sum; what follows on the ranks must not drift apart",
        bugs: &["sglang#20360"],
        tolerance: "exact: bits",
        families: MOE,
        applies: |case| moe_case(case).is_some_and(|moe| shares_rows(&moe.plan)),
        check: ranks,
    },
    Property {
        id: "moe.single",
        statement: "merge 0, merge 1 and one rank give each token the same within their bounds",
        source: "ATOM: merge is a choice of how, not of what",
        bugs: &["vllm-ascend#4030", "vllm-ascend#10557", "vllm-ascend#13538"],
        tolerance: "sum of the bounds of both runs",
        families: MOE,
        applies: |case| moe_case(case).is_some_and(|moe| moe.plan.ranks() > 1 && moe.tokens() > 0),
        check: single,
    },
];

fn moe_case(case: &Case) -> Option<&MoeCase> {
    match &case.body {
        shardcheck_cases::Body::Moe(moe) => Some(moe),
        _ => None,
    }
}

fn shares_rows(plan: &MoePlan) -> bool {
    plan.tp > 1 || plan.exchange == MoeExchange::Redundant && plan.pcp > 1
}

/// The output, element by element and in its codes.
fn out(material: &MoeMaterial, observed: &Observed) -> Result<(Vec<f64>, Vec<u64>), Halt> {
    let shape = [material.case.plan.ranks(), material.rows(), material.case.hidden];
    let out = observed.output("out", material.output_dtype(), &shape)?;
    Ok((out.to_f64(), out.to_codes()))
}

/// Rank, token and first element of every row that is not padding.
fn placed(material: &MoeMaterial) -> Vec<(usize, usize, usize)> {
    let width = material.case.hidden;
    let of_rank = |rank: usize| {
        let first = rank * material.rows() * width;
        material
            .rows_of(rank)
            .into_iter()
            .enumerate()
            .map(move |(row, token)| (rank, token, first + row * width))
    };
    (0..material.case.plan.ranks()).flat_map(of_rank).collect()
}

fn slices(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.layer();
    let count = material.case.plan.ranks();
    let seen = laboratory.observed()?.output("slice_rows", Dtype::I32, &[count])?.to_i64();
    let wanted: Vec<i64> = (0..count).map(|rank| material.slice_rows(rank) as i64).collect();
    let headline = "a rank enters the exchange with another number of rows than its peers must have";
    Ok(Comparison::integers("slice_rows", &seen, &wanted)
        .finding(headline, Stage::Exchange, |rank| format!("rank {rank}")))
}

fn routing(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let (material, observed) = (laboratory.layer(), laboratory.observed()?);
    let top_k = material.routing.top_k();
    let shape = [material.case.plan.ranks(), material.rows(), top_k];
    let ids = observed.observable("topk_ids", Dtype::I32, &shape)?.to_i64();
    let weights = observed.observable("topk_weights", Dtype::F32, &shape)?.to_f64();
    let mut comparison = Comparison::new("topk_weights");
    for (rank, token, first) in placed(material) {
        let at = first / material.case.hidden * top_k;
        let (ids, seen) = (&ids[at..at + top_k], &weights[at..at + top_k]);
        if let Some(why) = material.routing.refusal(token, ids) {
            return Err(broken(format!("on rank {rank}, {why}"), Stage::Routing));
        }
        material.routing.compare(&mut comparison, at, token, ids, seen);
    }
    let headline = "on a rank, the experts of a row weigh something else than by its logits";
    Ok(comparison
        .finding(headline, Stage::Routing, |flat| material.place_words(flat / top_k * material.case.hidden)))
}

/// Tokens of each expert among those of a pool; `None` where a token may have several sets.
fn wanted_counts(material: &MoeMaterial, tokens: &[usize]) -> Option<Vec<i64>> {
    let mut counts = vec![0; material.case.experts];
    for token in tokens {
        let sets = material.routing.sets(*token).filter(|sets| sets.len() == 1)?;
        sets[0].iter().for_each(|expert| counts[*expert] += 1);
    }
    Some(counts)
}

fn counts(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.layer();
    let (count, experts) = (material.case.plan.ranks(), material.case.experts);
    let seen = laboratory.observed()?.output("expert_tokens", Dtype::I32, &[count, experts])?.to_i64();
    let mut judged = 0;
    for rank in 0..count {
        let (peers, tokens) = material.pool(rank);
        let is_whole = material.case.plan.sharding == ExpertSharding::Whole;
        // whole experts are on one rank of the pool each; of split ones every rank has a part
        let ranks = if is_whole { &peers[..] } else { &[rank][..] };
        let of_expert = |expert: usize| ranks.iter().map(|rank| seen[rank * experts + expert]).sum::<i64>();
        let total: i64 = (0..experts).map(of_expert).sum();
        let wanted = (tokens.len() * material.routing.top_k()) as i64;
        if total != wanted {
            let whose =
                if is_whole { format!("ranks {ranks:?} count") } else { format!("rank {rank} counts") };
            return Err(broken(
                format!("{whose} {total} rows of experts where {wanted} are tokens'"),
                Stage::Exchange,
            ));
        }
        let wanted = wanted_counts(material, &tokens);
        let differs = |wanted: &Vec<i64>| (0..experts).find(|expert| of_expert(*expert) != wanted[*expert]);
        if let Some((expert, wanted)) = wanted.and_then(|wanted| Some((differs(&wanted)?, wanted))) {
            let (seen, wanted) = (of_expert(expert), wanted[expert]);
            return Err(broken(
                format!("expert {expert} gets {seen} tokens, where {wanted} chose it"),
                Stage::Exchange,
            ));
        }
        judged += experts;
    }
    Ok(Finding::Holds(Measured::exact(judged)))
}

fn tags(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.layer();
    let (seen, _) = out(material, laboratory.observed()?)?;
    let (case, mut comparison) = (&material.case, Comparison::new("out"));
    let mut notes = Vec::new();
    for (rank, token, first) in placed(material) {
        let sets = material.routing.sets(token).filter(|sets| sets.len() == 1);
        let Some(set) = sets.and_then(|mut sets| sets.pop()) else { continue };
        let weights = material.routing.weights(token, &set);
        let tag = MoeCase::tag(token) as f64;
        let mut wanted = vec![0.0; case.hidden];
        for (expert, weight) in set.iter().zip(&weights.value) {
            wanted[MoeCase::column(*expert)] = tag * f64::from(*weight as f32);
        }
        if case.plan.shared != SharedExpert::None {
            wanted[MoeCase::column(case.experts)] = tag;
        }
        let before = comparison.broken().len();
        for (dim, wanted) in wanted.iter().enumerate().filter(|(dim, _)| material.is_exact(*dim)) {
            comparison.element(first + dim, seen[first + dim], Allowed::Exactly(*wanted));
        }
        if comparison.broken().len() > before && notes.len() < 8 {
            let row = &seen[first..first + case.hidden];
            let read = row.iter().enumerate().filter(|(_, value)| **value != 0.0);
            let read: Vec<String> = read.map(|(dim, value)| format!("{value} in column {dim}")).collect();
            notes.push(format!(
                "rank {rank}, token {token} (number {tag}, experts {set:?}) has {}",
                read.join(", ")
            ));
        }
    }
    let headline = "a row bears the number of another token, or of other experts";
    if comparison.holds() {
        return Ok(Finding::Holds(comparison.measured()));
    }
    let mut failure = comparison.failure(headline, Stage::Exchange, |flat| material.place_words(flat));
    failure.notes.extend(notes);
    Ok(Finding::Broken(Box::new(failure)))
}

fn output(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.layer();
    let (seen, _) = out(material, laboratory.observed()?)?;
    let width = material.case.hidden;
    let mut comparison = Comparison::new("out");
    for (_, token, first) in placed(material) {
        let Some(outputs) = &material.expected()[token] else { continue };
        let row = &seen[first..first + width];
        let fits = |allowed: &[Allowed]| allowed.iter().zip(row).all(|(allowed, seen)| allowed.admits(*seen));
        // of several sets that a token may have, the one that it was given, or else the first
        let own = outputs.iter().find(|output| fits(&output.allowed)).or(outputs.first());
        for (dim, allowed) in own.into_iter().flat_map(|output| &output.allowed).enumerate() {
            comparison.element(first + dim, row[dim], *allowed);
        }
    }
    let headline = "a row is not what its experts make of it";
    Ok(comparison.finding(headline, Stage::Merge, |flat| material.place_words(flat)))
}

fn ranks(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.layer();
    let (_, codes) = out(material, laboratory.observed()?)?;
    let width = material.case.hidden;
    let mut first_of = vec![None; material.case.tokens()];
    let mut compared = 0;
    for (rank, token, at) in placed(material) {
        let (other, from) = *first_of[token].get_or_insert((rank, at));
        if let Some(dim) = (0..width).find(|dim| codes[from + dim] != codes[at + dim]) {
            return Err(broken(
                format!("ranks {other} and {rank} differ in dim {dim} of token {token}"),
                Stage::Merge,
            ));
        }
        compared += width;
    }
    Ok(Finding::Holds(Measured::exact(compared)))
}

/// First copy of each token's row.
fn by_token(material: &MoeMaterial, observed: &Observed) -> Result<Vec<Vec<f64>>, Halt> {
    let (seen, _) = out(material, observed)?;
    let mut rows = vec![Vec::new(); material.case.tokens()];
    for (_, token, first) in placed(material) {
        if rows[token].is_empty() {
            rows[token] = seen[first..first + material.case.hidden].to_vec();
        }
    }
    Ok(rows)
}

fn single(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.layer();
    let own = by_token(material, laboratory.observed()?)?;
    let plan = material.case.plan;
    let mut others = vec![("one rank", material.on_one_rank())];
    for (exchange, other, name) in [
        (MoeExchange::Local, MoeExchange::Gathered, "merge 1"),
        (MoeExchange::Gathered, MoeExchange::Local, "merge 0"),
    ] {
        if plan.exchange == exchange {
            let plan = MoePlan { exchange: other, ..plan };
            others.push((name, material.on(plan, material.case.dp_tokens.clone())));
        }
    }
    let mut measured = Measured::default();
    for (name, other) in &others {
        let observed =
            Run::open(&laboratory.engine, &other.configuration)?.step(&other.operation, &other.inputs)?;
        let there = by_token(other, &observed)?;
        let mut comparison = Comparison::new("out");
        for (token, (here, there)) in own.iter().zip(&there).enumerate() {
            let (Some([a]), Some([b])) =
                (material.expected()[token].as_deref(), other.expected()[token].as_deref())
            else {
                continue;
            };
            for (dim, (here, there)) in here.iter().zip(there).enumerate() {
                let room = reach(a.allowed[dim]) + reach(b.allowed[dim]);
                comparison.element(token * material.case.hidden + dim, *here, Allowed::near(*there, room));
            }
        }
        let headline = format!("a token comes out otherwise than with {name}");
        let width = material.case.hidden;
        let finding = comparison
            .finding(&headline, Stage::Merge, |flat| format!("token {}, dim {}", flat / width, flat % width));
        let Finding::Holds(more) = finding else { return Ok(finding) };
        measured = measured.and(more);
    }
    Ok(Finding::Holds(measured))
}

/// How far from the exact value an element may be.
fn reach(allowed: Allowed) -> f64 {
    match allowed {
        Allowed::Between { expected, low, high } => (expected - low).max(high - expected),
        _ => 0.0,
    }
}
