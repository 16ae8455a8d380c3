//! One probe: the same text to both servers, and the positions at which their log-probabilities can be compared.

use std::collections::BTreeMap;

use serde::Serialize;

use super::plan::ProbeSpec;
use super::words::{self, ProbeText, Vocabulary};
use crate::client::{Client, Failure};
use crate::completion::Logprobs;
use crate::vocabulary::named;

/// Alternatives asked for per position; five is the most that OpenAI's API allows.
const TOP: u32 = 5;
/// How often B is put back on A's track after it wrote another token.
const MAX_RESTARTS: usize = 3;
/// Log-probabilities below this are as good as impossible (vLLM writes −9999 for −∞).
const LOWEST_LOGPROB: f64 = -50.0;
/// Probabilities closer to 1 than this are not told apart: their odds would be rounding noise.
const SUREST: f64 = 1e-4;

/// The way of computation that produced a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Route {
    /// Many tokens at once: an echoed prompt, or the first generated token.
    Prefill,
    /// One token at a time.
    Decode,
}

impl Route {
    /// Both routes.
    pub const ALL: [Route; 2] = [Route::Prefill, Route::Decode];

    /// The name used in reports.
    pub fn name(self) -> &'static str {
        match self {
            Route::Prefill => "prefill",
            Route::Decode => "decode",
        }
    }
}

named!(Route, "route");

/// One token that both servers gave a probability, behind the same tokens.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Position {
    /// Number of the probe, from 0.
    pub probe: usize,
    /// How it was computed.
    pub route: Route,
    /// Tokens before it: what attention could see.
    pub context_tokens: u64,
    /// Index of the token that it repeats, inside a needle.
    pub source: Option<u64>,
    /// Natural log-probability in A.
    pub logprob_a: f64,
    /// The same in B; an upper bound when the token was not among B's best.
    pub logprob_b: f64,
    /// Log-odds in A less log-odds in B: what logit noise shifts, whatever the probability.
    pub shift: f64,
    /// A's distance between its best and second-best token, when the two servers prefer different ones.
    pub flip_margin: Option<f64>,
}

impl Position {
    /// Whether both servers are so sure that a difference would not show: such a position says nothing about noise.
    pub fn is_saturated(&self) -> bool {
        let surest = (-SUREST).ln_1p();
        self.logprob_a >= surest && self.logprob_b >= surest
    }
}

/// What came of one probe.
#[derive(Debug, Clone, PartialEq)]
pub struct ProbeResult {
    /// The positions compared.
    pub positions: Vec<Position>,
    /// Shifts between two measurements of A.
    pub repeated: Vec<f64>,
    /// Decode positions that were planned and could not be compared, since the servers had gone apart.
    pub lost: usize,
    /// B's failure where A answered.
    pub b_failed: Option<Failure>,
    /// Where the texts first differed, if they did: context length and A's top-2 margin there, if A tells.
    pub first_divergence: Option<(u64, Option<f64>)>,
}

/// The two servers and what is asked of them.
pub struct Bench<'a> {
    /// The server taken as good.
    pub a: &'a Client,
    /// The server in question.
    pub b: &'a Client,
    /// A's model name.
    pub model_a: &'a str,
    /// B's model name.
    pub model_b: &'a str,
    /// The words.
    pub vocabulary: &'a Vocabulary,
    /// Tokens generated per probe.
    pub decode_tokens: u32,
}

/// A probe that came to nothing.
#[derive(Debug, Clone, PartialEq)]
pub enum ProbeError {
    /// A, the yardstick, failed.
    AFailed(Failure),
    /// The servers cut the same text into different tokens.
    DifferentTokens {
        /// Tokens in A.
        a: usize,
        /// Tokens in B.
        b: usize,
    },
}

impl Bench<'_> {
    /// Runs one probe. `repeat_a` measures A a second time, for its own noise.
    ///
    /// # Errors
    /// [`ProbeError`]; a failure of B is a result, not an error.
    pub fn run(&self, number: usize, spec: &ProbeSpec, repeat_a: bool) -> Result<ProbeResult, ProbeError> {
        let text = self.vocabulary.compose(spec.context_tokens, spec.needle_at, spec.seed);
        let mut result = ProbeResult {
            positions: Vec::new(),
            repeated: Vec::new(),
            lost: 0,
            b_failed: None,
            first_divergence: None,
        };
        match self.echoed(number, &text, repeat_a, &mut result) {
            Ok(()) => {}
            Err(Side::A(error)) => return Err(error),
            Err(Side::B(failure)) => result.b_failed = Some(failure),
        }
        match self.generated(number, &text, &mut result) {
            Ok(()) => {}
            Err(Side::A(error)) => return Err(error),
            Err(Side::B(failure)) => {
                result.b_failed.get_or_insert(failure);
            }
        }
        Ok(result)
    }

    /// Teacher-forced: the whole text, continuation included, scored by both.
    fn echoed(
        &self,
        number: usize,
        text: &ProbeText,
        repeat_a: bool,
        result: &mut ProbeResult,
    ) -> Result<(), Side> {
        let whole = format!("{}{}", text.context, text.continuation);
        let a = words::echo(self.a, self.model_a, &whole, TOP).map_err(Side::a)?;
        let sources = sources(&a.tokens, text);
        if repeat_a {
            let again = words::echo(self.a, self.model_a, &whole, TOP).map_err(Side::a)?;
            result.repeated = (1..a.tokens.len().min(again.tokens.len()))
                .filter_map(|index| Some(shift(a.token_logprobs[index]?, again.token_logprobs[index]?)))
                .collect();
        }
        let b = words::echo(self.b, self.model_b, &whole, TOP).map_err(Side::B)?;
        if a.tokens != b.tokens {
            let (a, b) = (a.tokens.len(), b.tokens.len());
            return Err(Side::A(ProbeError::DifferentTokens { a, b }));
        }
        for index in 1..a.tokens.len() {
            let Some(logprob_a) = a.token_logprobs[index] else { continue };
            let place = Place { probe: number, route: Route::Prefill, context_tokens: index as u64 };
            let source = sources.get(&(index as u64)).copied();
            result.positions.push(place.compare(
                source,
                logprob_a,
                b.token_logprobs[index],
                flip_margin(&a, &b, index, index),
            ));
        }
        Ok(())
    }

    /// Greedy generation by both; where B leaves A's track it is put back, so that the rest stays comparable.
    fn generated(&self, number: usize, text: &ProbeText, result: &mut ProbeResult) -> Result<(), Side> {
        let generate =
            |client, model, prompt: &str, tokens| words::generate(client, model, prompt, tokens, TOP);
        let (a, context_tokens, _) =
            generate(self.a, self.model_a, &text.context, self.decode_tokens).map_err(Side::a)?;
        let (mut done, mut restarts) = (0, 0);
        let mut prompt = text.context.clone();
        while done < a.tokens.len() {
            let wanted = (a.tokens.len() - done) as u32;
            let (b, b_context, _) = generate(self.b, self.model_b, &prompt, wanted).map_err(Side::B)?;
            if b_context != context_tokens + done as u64 {
                if done == 0 {
                    let (a, b) = (context_tokens as usize, b_context as usize);
                    return Err(Side::A(ProbeError::DifferentTokens { a, b }));
                }
                break; // A's tokens, put together, are read as other tokens: no common ground from here
            }
            let mut step = 0;
            while step < b.tokens.len() && done < a.tokens.len() {
                let Some(logprob_a) = a.token_logprobs[done] else { break };
                let route = if step == 0 { Route::Prefill } else { Route::Decode };
                let place = Place { probe: number, route, context_tokens: context_tokens + done as u64 };
                let agree = a.tokens[done] == b.tokens[step];
                let logprob_b =
                    if agree { b.token_logprobs[step] } else { upper_bound(&b, step, &a.tokens[done]) };
                let margin = flip_margin(&a, &b, done, step);
                result.positions.push(place.compare(None, logprob_a, logprob_b, margin));
                if !agree {
                    let own_margin =
                        a.top_logprobs.get(done).and_then(|top| best(top.as_ref()?)).map(|best| best.1);
                    result.first_divergence.get_or_insert((place.context_tokens, own_margin));
                }
                (done, step) = (done + 1, step + 1);
                if !agree {
                    break;
                }
            }
            if step == 0 || restarts == MAX_RESTARTS {
                break;
            }
            restarts += 1;
            prompt = format!("{}{}", text.context, a.tokens[..done].concat());
        }
        result.lost = a.tokens.len() - done;
        Ok(())
    }
}

/// Which server a probe ended on.
enum Side {
    A(ProbeError),
    B(Failure),
}

impl Side {
    fn a(failure: Failure) -> Self {
        Side::A(ProbeError::AFailed(failure))
    }
}

struct Place {
    probe: usize,
    route: Route,
    context_tokens: u64,
}

impl Place {
    fn compare(
        &self,
        source: Option<u64>,
        logprob_a: f64,
        logprob_b: Option<f64>,
        flip_margin: Option<f64>,
    ) -> Position {
        // a log-probability that is missing where A has one (NaN has no JSON) is as wrong as can be
        let logprob_b = logprob_b.filter(|value| value.is_finite()).unwrap_or(f64::NEG_INFINITY);
        Position {
            probe: self.probe,
            route: self.route,
            context_tokens: self.context_tokens,
            source,
            logprob_a,
            logprob_b,
            shift: shift(logprob_a, logprob_b),
            flip_margin,
        }
    }
}

/// Log-odds of a token against all others, in A less in B, from the two log-probabilities.
pub fn shift(logprob_a: f64, logprob_b: f64) -> f64 {
    log_odds(logprob_a) - log_odds(logprob_b)
}

fn log_odds(logprob: f64) -> f64 {
    let logprob = logprob.clamp(LOWEST_LOGPROB, (-SUREST).ln_1p());
    logprob - (-logprob.exp_m1()).ln()
}

/// A's margin at a position where the two prefer different tokens; `None` where they agree or do not say.
fn flip_margin(a: &Logprobs, b: &Logprobs, at_a: usize, at_b: usize) -> Option<f64> {
    let (best_a, margin) = best(a.top_logprobs.get(at_a)?.as_ref()?)?;
    let (best_b, _) = best(b.top_logprobs.get(at_b)?.as_ref()?)?;
    (best_a != best_b).then_some(margin)
}

/// The best token and its distance to the second-best.
fn best(top: &BTreeMap<String, f64>) -> Option<(&str, f64)> {
    let mut ordered: Vec<(&String, f64)> = top.iter().map(|(token, logprob)| (token, *logprob)).collect();
    ordered.sort_by(|left, right| right.1.total_cmp(&left.1));
    let first = ordered.first()?;
    let margin = ordered.get(1).map_or(f64::INFINITY, |second| first.1 - second.1);
    Some((first.0, margin))
}

/// The log-probability of a token that B did not choose: its own among B's best, else that of the least of them.
fn upper_bound(b: &Logprobs, at: usize, token: &str) -> Option<f64> {
    let top = b.top_logprobs.get(at)?.as_ref()?;
    top.get(token).copied().or_else(|| top.values().copied().reduce(f64::min))
}

/// For the tokens of the continuation, the index of the needle's token that each repeats.
fn sources(tokens: &[String], text: &ProbeText) -> BTreeMap<u64, u64> {
    if text.needle_chars_before_end == 0 {
        return BTreeMap::new();
    }
    let continuation = text.continuation.chars().count();
    let tail = words::tokens_of_suffix(tokens, continuation + text.cue_chars);
    let needle = words::tokens_of_suffix(tokens, continuation + text.needle_chars_before_end);
    let written = words::tokens_of_suffix(tokens, continuation);
    let (tail, needle) = ((tokens.len() - tail) as u64, (tokens.len() - needle) as u64);
    ((tokens.len() - written) as u64..tokens.len() as u64)
        .map(|index| (index, index - tail + needle))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shifts_measure_the_change_of_a_logit_whatever_the_probability() {
        // two tokens with logits 0 and x: log-odds of the second are x
        for x in [-6.0, -1.0, 0.0, 2.0, 8.0] {
            let logprob = |x: f64| -(1.0 + (-x).exp()).ln();
            let measured = shift(logprob(x), logprob(x - 0.25));
            assert!((measured - 0.25).abs() < 1e-9, "{x}: {measured}");
        }
        // beyond the clamp nothing is told apart, and nothing is infinite
        assert_eq!(shift(-1e-9, -1e-7), 0.0);
        assert!(shift(-0.1, f64::NEG_INFINITY).is_finite() && shift(-0.1, f64::NEG_INFINITY) > 40.0);
        assert!(shift(0.0, -0.01) > 0.0);
    }

    #[test]
    fn the_margin_is_that_of_a_and_only_where_the_best_tokens_differ() {
        let list = |entries: &[(&str, f64)]| Logprobs {
            top_logprobs: vec![Some(entries.iter().map(|(token, p)| ((*token).to_owned(), *p)).collect())],
            ..Logprobs::default()
        };
        let a = list(&[("x", -0.2), ("y", -1.7)]);
        assert_eq!(flip_margin(&a, &list(&[("y", -0.6), ("x", -0.8)]), 0, 0), Some(1.5));
        assert_eq!(flip_margin(&a, &list(&[("x", -0.6), ("y", -0.8)]), 0, 0), None);
        assert_eq!(upper_bound(&list(&[("y", -0.6), ("z", -0.8)]), 0, "x"), Some(-0.8));
        assert_eq!(upper_bound(&a, 0, "y"), Some(-1.7));
    }

    #[test]
    fn continuation_tokens_point_at_the_needle() {
        let tokens: Vec<String> =
            ["L:", " f", " n1", " n2", " n3", " g", " n1", " n2", " n3"].map(str::to_owned).to_vec();
        let text = ProbeText {
            context: "L: f n1 n2 n3 g n1".to_owned(),
            continuation: " n2 n3".to_owned(),
            needle_chars_before_end: " n1 n2 n3 g n1".len(),
            cue_chars: " n1".len(),
        };
        assert_eq!(sources(&tokens, &text), BTreeMap::from([(7, 3), (8, 4)]));
    }
}
