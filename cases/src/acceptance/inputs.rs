//! Inputs of a case of accepting drafts: logits, drafts and the numbers that decide.

use shardcheck_engine::{AcceptanceMethod, Tensor, Tensors};
use shardcheck_formats::{Counter, Dtype};

use super::{AcceptanceCase, AcceptancePattern, DraftRequest};
use crate::stream::Stream;

/// Inputs of one case; the batch is that of the case or the one that its pattern makes.
#[derive(Debug, Clone)]
pub struct AcceptanceInputs {
    /// First row of each request, and the number of rows.
    pub starts: Vec<usize>,
    /// Drafts of each request, −1 for none.
    pub drafts: Vec<Vec<i64>>,
    /// Columns K of the drafts.
    pub columns: usize,
    /// Logits of the target, rows × V.
    pub target: Vec<f32>,
    /// Logits of the drafter, requests × K × V.
    pub draft: Option<Vec<f32>>,
    /// Temperature of each request.
    pub temperature: Vec<f32>,
    /// Number of each row.
    pub uniform: Vec<f32>,
    /// Gumbel noise, rows × V.
    pub noise: Vec<f32>,
    /// What an enumeration is of.
    pub enumeration: Option<Enumeration>,
    /// Tensors of the step.
    pub tensors: Tensors,
}

/// An enumeration over three tokens and two drafts.
#[derive(Debug, Clone)]
pub struct Enumeration {
    /// The target's law of the first token.
    pub first: [f64; 3],
    /// Its law of the second, for each first one.
    pub second: [[f64; 3]; 3],
    /// Group of each request and its weight there. The law of every group is the target's.
    pub weights: Vec<(usize, f64)>,
}

/// Laws of an enumeration as parts of a whole: of the first token, and of the second for each first one. Numbers are cut into
/// `cells` equal parts, noise into two; every threshold of the method lies between two parts.
struct Table {
    target: ([u32; 3], [[u32; 3]; 3]),
    draft: ([u32; 3], [[u32; 3]; 3]),
    cells: [usize; 2],
}

/// For drafts with a law, both methods.
const WITH_LAW: Table = Table {
    target: ([5, 2, 5], [[3, 4, 1], [2, 3, 3], [1, 2, 1]]),
    draft: ([1, 1, 2], [[6, 1, 1], [4, 1, 1], [1, 1, 1]]),
    cells: [6, 8],
};

/// For drafts without one that are accepted each by itself; `draft` only says which drafts there are.
const ONE_HOT: Table = Table {
    target: ([1, 1, 1], [[1, 1, 0], [1, 0, 3], [0, 1, 2]]),
    draft: ([1, 1, 1], [[1, 1, 0], [1, 0, 1], [0, 1, 1]]),
    cells: [3, 12],
};

/// For drafts without one that are accepted as a block.
const ONE_HOT_BLOCK: Table = Table {
    target: ([1, 1, 0], [[1, 1, 0], [1, 2, 0], [1, 1, 1]]),
    draft: ([1, 1, 0], [[1, 1, 0], [1, 1, 0], [1, 1, 1]]),
    cells: [60, 12],
};

/// Orders of three tokens.
const ORDERS: [[usize; 3]; 6] = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];

/// Makes the inputs of a case. Equal arguments give equal inputs.
pub fn generate_acceptance(case: &AcceptanceCase, seed: u64) -> AcceptanceInputs {
    let mut made =
        if case.pattern == AcceptancePattern::Enumerated { enumerate(case, seed) } else { draw(case, seed) };
    made.tensors = tensors(case, &made);
    made
}

fn tensors(case: &AcceptanceCase, made: &AcceptanceInputs) -> Tensors {
    let (count, rows, vocabulary) = (made.drafts.len(), made.target.len() / case.vocabulary, case.vocabulary);
    let starts: Vec<i32> = made.starts.iter().map(|start| *start as i32).collect();
    let mut garbage = Stream::AcceptanceDrafts.counter(rows as u64);
    let columns = made.columns;
    // entries behind a request's drafts are tokens like any other
    let drafts = made.drafts.iter().flat_map(|own| (0..columns).map(|column| own.get(column)));
    let drafts: Vec<i32> = drafts
        .map(|draft| draft.map_or_else(|| garbage.below(vocabulary as u64) as i32, |d| *d as i32))
        .collect();
    let floats = |shape: &[usize], values: &[f32]| Tensor::from_f32(Dtype::F32, shape, values);
    let mut tensors = Tensors::new()
        .with("query_start_loc", Tensor::from_i32(&[count + 1], &starts))
        .with("draft_tokens", Tensor::from_i32(&[count, columns], &drafts))
        .with("target_logits", floats(&[rows, vocabulary], &made.target));
    if case.method == AcceptanceMethod::Greedy {
        return tensors;
    }
    if let Some(draft) = &made.draft {
        tensors.insert("draft_logits", floats(&[count, columns, vocabulary], draft));
    }
    tensors
        .with("temperature", floats(&[count], &made.temperature))
        .with("uniform", floats(&[rows], &made.uniform))
        .with("noise", floats(&[rows, vocabulary], &made.noise))
}

fn starts(requests: &[DraftRequest]) -> Vec<usize> {
    let mut starts = vec![0];
    requests.iter().for_each(|request| starts.push(starts[starts.len() - 1] + request.drafts + 1));
    starts
}

/// Probabilities of a row at a temperature.
fn softmax(logits: &[f32], temperature: f32) -> Vec<f64> {
    let scaled = || logits.iter().map(|logit| f64::from(*logit) / f64::from(temperature));
    let most = scaled().fold(f64::NEG_INFINITY, f64::max);
    let terms: Vec<f64> = scaled().map(|z| (z - most).exp()).collect();
    let sum: f64 = terms.iter().sum();
    terms.iter().map(|term| term / sum).collect()
}

/// A token drawn from a law.
fn drawn(law: &[f64], counter: &mut Counter) -> usize {
    let mut left = counter.unit_f64();
    for (token, chance) in law.iter().enumerate() {
        if left < *chance {
            return token;
        }
        left -= chance;
    }
    // what rounding leaves over belongs to the last token that can be
    law.iter().rposition(|chance| *chance > 0.0).unwrap_or(0)
}

fn argmax(row: &[f32]) -> usize {
    (0..row.len()).fold(0, |best, token| if row[token] > row[best] { token } else { best })
}

/// Logits of the target and of the drafter at one row.
fn row_logits(case: &AcceptanceCase, counter: &mut Counter) -> (Vec<f32>, Vec<f32>) {
    let tokens = case.vocabulary;
    // softmax does not see what all logits of a row have in common
    let common = 4.0 * counter.gaussian();
    let mut gaussian = |spread: f64| (common + spread * counter.gaussian()) as f32;
    let target: Vec<f32> = (0..tokens).map(|_| gaussian(1.5)).collect();
    match case.pattern {
        AcceptancePattern::Equal => (target.clone(), target),
        AcceptancePattern::Ties => {
            let mut few = |count: u64| (0..tokens).map(|_| counter.below(count) as f32).collect::<Vec<_>>();
            (few(3), few(2))
        }
        AcceptancePattern::Zeros => {
            let mut holes = |row: &[f32]| {
                let kept = counter.below(tokens as u64) as usize;
                // one row in four has a single token
                let alone = counter.below(4) == 0;
                let hole = |(token, logit): (usize, &f32)| {
                    let leaves = alone || counter.below(2) == 0;
                    if token != kept && leaves { f32::NEG_INFINITY } else { *logit }
                };
                row.iter().enumerate().map(hole).collect::<Vec<_>>()
            };
            (holes(&target), holes(&target))
        }
        _ => {
            let other = 3.0 * counter.gaussian();
            let near = |logit: &f32| (f64::from(*logit) + other + 0.9 * counter.gaussian()) as f32;
            let draft = target.iter().map(near).collect();
            (target, draft)
        }
    }
}

fn temperature(case: &AcceptanceCase, counter: &mut Counter) -> f32 {
    let any = |values: &[f32], counter: &mut Counter| values[counter.below(values.len() as u64) as usize];
    match case.pattern {
        _ if case.method == AcceptanceMethod::Greedy => 0.0,
        AcceptancePattern::Gaussian => any(&[0.0, 0.6, 1.0, 1.4], counter),
        AcceptancePattern::Zeros => any(&[0.0, 0.6, 1.0, 1.0], counter),
        AcceptancePattern::Ties => any(&[0.0, 0.0, 0.0, 1.0], counter),
        AcceptancePattern::Equal | AcceptancePattern::Edges => any(&[0.7, 1.0, 1.3], counter),
        AcceptancePattern::Enumerated | AcceptancePattern::Sampled => 1.0,
    }
}

/// A number in [0, 1) for a draft with that ratio of probabilities.
fn number(case: &AcceptanceCase, ratio: f64, counter: &mut Counter) -> f32 {
    let plain = counter.below(1 << 24) as f32 / (1u32 << 24) as f32;
    // what can't be may not be accepted by the smallest of all numbers
    if case.pattern == AcceptancePattern::Zeros && counter.below(3) == 0 {
        return 0.0;
    }
    if case.pattern != AcceptancePattern::Edges {
        return plain;
    }
    let largest = 1.0 - f32::EPSILON / 2.0;
    match counter.below(6) {
        0 => 0.0,
        1 => largest,
        2 => (ratio * (1.0 - 1.0 / 256.0)).min(f64::from(largest)) as f32,
        3 => (ratio * (1.0 + 1.0 / 256.0)).min(f64::from(largest)) as f32,
        // the threshold itself, as near as it can be written
        4 => ratio.min(f64::from(largest)) as f32,
        _ => plain,
    }
}

fn gumbel(counter: &mut Counter) -> f32 {
    let part = (counter.below(1 << 24) as f64 + 0.5) / (1u64 << 24) as f64;
    -(-part.ln()).ln() as f32
}

fn draw(case: &AcceptanceCase, seed: u64) -> AcceptanceInputs {
    let stream = |stream: Stream| stream.counter(seed);
    let (mut logits, mut tokens) = (stream(Stream::AcceptanceLogits), stream(Stream::AcceptanceDrafts));
    let (mut numbers, mut noises) = (stream(Stream::AcceptanceUniform), stream(Stream::AcceptanceNoise));
    let mut temperatures = stream(Stream::AcceptanceTemperature);
    let columns = case.requests.iter().map(|request| request.drafts).max().unwrap_or(0).max(1);
    let sampled = case.pattern == AcceptancePattern::Sampled;
    let mut shared: Vec<(Vec<f32>, Vec<f32>)> = Vec::new();
    let mut made = AcceptanceInputs {
        starts: starts(&case.requests),
        drafts: Vec::new(),
        columns,
        target: Vec::new(),
        draft: (!case.one_hot).then(Vec::new),
        temperature: Vec::new(),
        uniform: Vec::new(),
        noise: Vec::new(),
        enumeration: None,
        tensors: Tensors::new(),
    };
    for request in &case.requests {
        let heat = temperature(case, &mut temperatures);
        made.temperature.push(heat);
        let mut own = Vec::new();
        for row in 0..columns.max(request.drafts) + 1 {
            let pair = if sampled && row < shared.len() {
                shared[row].clone()
            } else {
                row_logits(case, &mut logits)
            };
            if sampled && row == shared.len() {
                shared.push(pair.clone());
            }
            let (target, draft) = pair;
            if let Some(all) = made.draft.as_mut().filter(|_| row < columns) {
                all.extend(&draft);
            }
            if row > request.drafts {
                continue;
            }
            let token = drafted(case, (&target, &draft), heat, &mut tokens);
            let ratio = if heat == 0.0 {
                0.5
            } else {
                let given = if case.one_hot { 1.0 } else { softmax(&draft, heat)[token] };
                softmax(&target, heat)[token] / given
            };
            made.uniform.push(number(case, ratio, &mut numbers));
            for logit in &target {
                let drawn = gumbel(&mut noises);
                // a token that can't be is the first that a slip would take
                let tempting = case.pattern == AcceptancePattern::Zeros && *logit == f32::NEG_INFINITY;
                made.noise.push(if tempting { 30.0 } else { drawn });
            }
            if row < request.drafts {
                own.push(if request.none_at == Some(row) { -1 } else { token as i64 });
            }
            made.target.extend(&target);
        }
        made.drafts.push(own);
    }
    made
}

/// A draft of a row: drawn from the drafter's law where it has one, else what a drafter without one may propose.
fn drafted(
    case: &AcceptanceCase,
    (target, draft): (&[f32], &[f32]),
    heat: f32,
    counter: &mut Counter,
) -> usize {
    if heat > 0.0 && !case.one_hot {
        return drawn(&softmax(draft, heat), counter);
    }
    match counter.below(8) {
        0 => counter.below(case.vocabulary as u64) as usize,
        1 | 2 if heat > 0.0 => drawn(&softmax(target, heat), counter),
        _ => argmax(target),
    }
}

fn enumerate(case: &AcceptanceCase, seed: u64) -> AcceptanceInputs {
    let table = match (case.one_hot, case.method) {
        (false, _) => &WITH_LAW,
        (true, AcceptanceMethod::Block) => &ONE_HOT_BLOCK,
        (true, _) => &ONE_HOT,
    };
    let names = ORDERS[(seed % 6) as usize];
    let law = |parts: &[u32; 3]| {
        let whole = f64::from(parts.iter().sum::<u32>());
        let mut law = [0.0; 3];
        (0..3).for_each(|token| law[names[token]] = f64::from(parts[token]) / whole);
        law
    };
    let laws = |(first, second): &([u32; 3], [[u32; 3]; 3])| {
        let mut seconds = [[0.0; 3]; 3];
        (0..3).for_each(|token| seconds[names[token]] = law(&second[token]));
        (law(first), seconds)
    };
    let (target, draft) = (laws(&table.target), laws(&table.draft));
    let logits = |law: &[f64; 3]| law.map(|chance| chance.ln() as f32);
    let mut made = AcceptanceInputs {
        starts: vec![0],
        drafts: Vec::new(),
        columns: 2,
        target: Vec::new(),
        draft: (!case.one_hot).then(Vec::new),
        temperature: Vec::new(),
        uniform: Vec::new(),
        noise: Vec::new(),
        enumeration: None,
        tensors: Tensors::new(),
    };
    let mut weights = Vec::new();
    // both halves of the difference of any two tokens' noise: ln 3 is the middle of the upper one
    let lift = 3.0f32.ln();
    let cells = table.cells.map(|count| (0..count).map(move |cell| (cell as f32 + 0.5) / count as f32));
    for x in (0..9).map(|index| [index / 3, index % 3]) {
        let chance = draft.0[x[0]] * draft.1[x[0]][x[1]];
        if chance == 0.0 {
            continue;
        }
        let parts = (2 * table.cells[0] * table.cells[1]) as f64;
        // without a law every pair of drafts has to give the target's law by itself
        let weight = if case.one_hot { (3 * x[0] + x[1], 1.0 / parts) } else { (0, chance / parts) };
        for first in cells[0].clone() {
            for second in cells[1].clone() {
                for side in [lift, -lift] {
                    made.starts.push(made.starts[made.starts.len() - 1] + 3);
                    made.drafts.push(x.map(|token| token as i64).to_vec());
                    made.target.extend([logits(&target.0), logits(&target.1[x[0]]), [0.0; 3]].concat());
                    if let Some(all) = &mut made.draft {
                        all.extend([logits(&draft.0), logits(&draft.1[x[0]])].concat());
                    }
                    made.temperature.push(1.0);
                    made.uniform.extend([first, second, 0.5]);
                    made.noise.extend([side, 0.0, -side].repeat(3));
                    weights.push(weight);
                }
            }
        }
    }
    made.enumeration = Some(Enumeration { first: target.0, second: target.1, weights });
    made
}
