//! Laws of a router: which experts a token has, and what they weigh.

use shardcheck_cases::{Family, LogitPattern};
use shardcheck_formats::Dtype;

use super::{Property, always};
use crate::finding::{Failure, Finding, Measured, Stage};
use crate::judge::Comparison;
use crate::laboratory::{Halt, Laboratory, Observed, Run};
use crate::routing::RouteMaterial;

const ROUTE: &[Family] = &[Family::Route];

pub(super) const PROPERTIES: &[Property] = &[
    Property {
        id: "route.distinct",
        statement: "a token has k different experts, each of which there is",
        source: "`torch.topk`; an expert that stands there twice counts twice in the renormalisation and once in the exchange",
        bugs: &["vllm#56079"],
        tolerance: "exact: integers",
        families: ROUTE,
        applies: always,
        check: distinct,
    },
    Property {
        id: "route.choice",
        statement: "the experts of a token are the k best by score and bias among the groups that are kept; where choices are as near as the scores' rounding any of them is right, and their order never matters",
        source: "vLLM `grouped_topk`; SGLang `biased_grouped_topk_impl`; aiter `biased_grouped_topk_torch`; transformers DeepseekV3",
        bugs: &["aiter#4041"],
        tolerance: "derived: each score lies in the interval of its 32-bit arithmetic; a set is right if some scores within them make it the best",
        families: ROUTE,
        applies: always,
        check: choice,
    },
    Property {
        id: "route.weights",
        statement: "an expert weighs its score without the bias, divided by the sum of the chosen ones and scaled where the router says so",
        source: "DeepSeek-V3 router; 1e-20 in the sum: transformers, SGLang",
        bugs: &[],
        tolerance: "certified bound of scores, sum, quotient and product in 32 bits",
        families: ROUTE,
        applies: always,
        check: weights,
    },
    Property {
        id: "route.alone",
        statement: "a token by itself has the experts and weights that it may have in a batch",
        source: "a router works row by row",
        bugs: &["aiter#4041"],
        tolerance: "as for the batch",
        families: ROUTE,
        applies: |case| match &case.body {
            shardcheck_cases::Body::Route(route) => route.tokens > 1 && route.logits != LogitPattern::Cold,
            _ => false,
        },
        check: alone,
    },
];

fn broken(headline: String) -> Halt {
    Failure::because(headline).at(Stage::Routing).into()
}

/// Ids and weights of a reply, `[tokens, k]`.
fn answer(
    material: &RouteMaterial,
    observed: &Observed,
    tokens: usize,
) -> Result<(Vec<i64>, Vec<f64>), Halt> {
    let shape = [1, tokens, material.routing.top_k()];
    let ids = observed.output("topk_ids", Dtype::I32, &shape)?.to_i64();
    let weights = observed.output("topk_weights", Dtype::F32, &shape)?.to_f64();
    Ok((ids, weights))
}

fn distinct(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.routing();
    let (ids, _) = answer(material, laboratory.observed()?, material.tokens)?;
    for (token, ids) in ids.chunks(material.routing.top_k()).enumerate() {
        material.routing.experts(token, ids).map_err(broken)?;
    }
    Ok(Finding::Holds(Measured::exact(ids.len())))
}

fn choice(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.routing();
    let (ids, _) = answer(material, laboratory.observed()?, material.tokens)?;
    for (token, ids) in ids.chunks(material.routing.top_k()).enumerate() {
        if let Some(why) = material.routing.refusal(token, ids) {
            return Err(broken(why));
        }
    }
    Ok(Finding::Holds(Measured::exact(ids.len())))
}

fn weights(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.routing();
    let (ids, seen) = answer(material, laboratory.observed()?, material.tokens)?;
    let top_k = material.routing.top_k();
    let mut comparison = Comparison::new("topk_weights");
    for (token, (ids, seen)) in ids.chunks(top_k).zip(seen.chunks(top_k)).enumerate() {
        material.routing.compare(&mut comparison, token * top_k, token, ids, seen);
    }
    let headline = "an expert weighs something else than its score, renormalised and scaled";
    Ok(comparison
        .finding(headline, Stage::Routing, |flat| format!("token {}, expert {}", flat / top_k, ids[flat])))
}

fn alone(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.routing();
    let mut run = Run::open(&laboratory.engine, &material.configuration)?;
    let mut comparison = Comparison::new("topk_weights");
    for token in 0..material.tokens {
        let observed = run.step(&material.operation, &material.alone(token))?;
        let (ids, seen) = answer(material, &observed, 1)?;
        if let Some(why) = material.routing.refusal(token, &ids) {
            return Err(broken(format!("by itself, {why}")));
        }
        material.routing.compare(&mut comparison, token * ids.len(), token, &ids, &seen);
    }
    let headline = "a token by itself has other weights than in a batch";
    let top_k = material.routing.top_k();
    Ok(comparison.finding(headline, Stage::Routing, |flat| format!("token {}", flat / top_k)))
}
