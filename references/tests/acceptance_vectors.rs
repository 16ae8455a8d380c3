//! Acceptance of drafts against what published samplers decided, on stored inputs (shared/data/fixtures, when present).

mod stored;

use shardcheck_references::acceptance::{Method, Request, outcomes};
use stored::{Stored, count};

/// The request's tokens as the file has them: accepted drafts and what stands behind them.
fn assert_is_an_outcome(method: Method, request: &Request<'_>, seen: &[i64], place: &str) {
    let found = outcomes(method, request);
    let (accepted, last) = (seen.len() - 1, seen[seen.len() - 1] as usize);
    let outcome = found.iter().find(|outcome| outcome.accepted == accepted);
    assert!(outcome.is_some_and(|outcome| outcome.tokens.contains(&last)), "{place}: {seen:?} of {found:?}");
    assert_eq!(seen[..accepted], request.drafts[..accepted], "{place}");
    // the file's margins are far above rounding: nothing is left open
    assert!(found.len() == 1 && found[0].tokens.len() == 1, "{place}: {found:?}");
}

#[test]
fn the_decisions_of_a_published_sampler_are_the_oracles() {
    let Some(stored) = Stored::open("fixtures/spec") else { return };
    let mut compared = 0;
    for case in stored.cases() {
        let (name, config) = (case["name"].as_str().unwrap(), &case["config"]);
        let Some(mode) = config["mode"].as_str() else { continue };
        let method = match mode {
            "greedy" => Method::Greedy,
            "standard" => Method::Standard,
            _ => Method::Block,
        };
        let tensor = |field: &str| stored.f32(&format!("{name}.{field}"));
        let [requests, most, vocabulary] = ["B", "K", "V"].map(|field| count(config, field));
        let (starts, drafts) = (tensor("cu_num_logits"), tensor("draft_sampled"));
        let (target, temperature) = (tensor("target_logits"), tensor("temperature"));
        let draft = (config["one_hot"] == false).then(|| tensor("draft_logits"));
        let (uniform, noise) = (tensor("u"), tensor("gumbel"));
        let (lengths, sampled) = (tensor("num_sampled"), tensor("sampled"));
        for request in 0..requests {
            let (first, end) = (starts[request] as usize, starts[request + 1] as usize);
            let heat = temperature[request];
            // the target's logits are tempered already, the drafter's are not
            let tempered = |logit: &f32| if heat == 0.0 { *logit } else { logit / heat };
            let own = draft.as_ref().map(|all| {
                let size = most * vocabulary;
                all[request * size..][..size].iter().map(tempered).collect::<Vec<_>>()
            });
            let tokens: Vec<i64> = drafts[first + 1..end].iter().map(|token| *token as i64).collect();
            let given = Request {
                vocabulary,
                drafts: &tokens,
                target: &target[first * vocabulary..end * vocabulary],
                draft: own.as_deref(),
                temperature: if heat == 0.0 { 0.0 } else { 1.0 },
                uniform: &uniform[first..end],
                noise: &noise[first * vocabulary..end * vocabulary],
            };
            let seen: Vec<i64> = sampled[request * (most + 1)..][..lengths[request] as usize]
                .iter()
                .map(|token| *token as i64)
                .collect();
            assert_is_an_outcome(method, &given, &seen, &format!("{name} request {request}"));
            compared += 1;
        }
    }
    assert_eq!(compared, 6 * 32);
}

#[test]
fn the_decisions_of_the_older_sampler_are_the_oracles_where_it_has_a_draft_and_a_number_above_zero() {
    let Some(stored) = Stored::open("fixtures/spec") else { return };
    let (mut compared, mut left_out) = (0, 0);
    for case in stored.cases() {
        let (name, config) = (case["name"].as_str().unwrap(), &case["config"]);
        if config["mode"].is_string() {
            continue;
        }
        let tensor = |field: &str| stored.f32(&format!("{name}.{field}"));
        let [requests, most, vocabulary] = ["B", "K", "V"].map(|field| count(config, field));
        let (ends, drafts, output) =
            (tensor("cu_num_draft_tokens"), tensor("draft_token_ids"), tensor("output"));
        let logs = |field: &str| tensor(field).iter().map(|p| p.ln()).collect::<Vec<_>>();
        let (target, numbers, bonus) = (logs("target_probs"), tensor("uniform"), tensor("bonus_token_ids"));
        let draft = (config["one_hot"] == false).then(|| logs("draft_probs"));
        let noise = logs("inv_q");
        let greedy = stored.bytes(&format!("{name}.is_greedy"));
        for request in 0..requests {
            let first = if request == 0 { 0 } else { ends[request - 1] as usize };
            let end = ends[request] as usize;
            let tokens: Vec<i64> = drafts[first..end].iter().map(|token| *token as i64).collect();
            // it recovers a draft that is none otherwise, and takes one of probability 0 for the number 0
            if tokens.contains(&-1) || numbers[first..end].contains(&0.0) {
                left_out += 1;
                continue;
            }
            // the bonus is given: a row that has it alone
            let mut rows = target[first * vocabulary..end * vocabulary].to_vec();
            rows.extend(
                (0..vocabulary).map(|t| if t as f32 == bonus[request] { 0.0 } else { f32::NEG_INFINITY }),
            );
            let own = &noise[request * vocabulary..][..vocabulary];
            let given = Request {
                vocabulary,
                drafts: &tokens,
                target: &rows,
                draft: draft.as_ref().map(|all| &all[first * vocabulary..end * vocabulary]),
                temperature: if greedy[request] == 1 { 0.0 } else { 1.0 },
                uniform: &[&numbers[first..end], &[0.0]].concat(),
                noise: &own.repeat(end - first + 1),
            };
            let seen: Vec<i64> = output[request * (most + 1)..][..most + 1]
                .iter()
                .map(|token| *token as i64)
                .take_while(|token| *token >= 0)
                .collect();
            assert_is_an_outcome(Method::Standard, &given, &seen, &format!("{name} request {request}"));
            compared += 1;
        }
    }
    assert!(compared > 40 && left_out < 24, "{compared} {left_out}");
}
