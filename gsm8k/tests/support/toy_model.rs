//! A small language model that is computed for real, with its attention sharded over ranks and merged by LSE.
//!
//! Tokens are bytes. One attention layer compares the last six bytes with every earlier run of six and copies what came
//! next: an induction head. Its random embeddings make it a model that recalls what it has read, which is what a lost
//! shard destroys.

use serde_json::{Value, json};
use shardcheck_gsm8k::mersenne::PythonRandom;

use super::hostile_server::{HostileServer, Reply, Request};

const WIDTH: usize = 16;
const LOOK_BACK: usize = 6;
const SHARPNESS: f32 = 4.0;
const CONFIDENCE: f32 = 9.0;
const BOS: u8 = 0;

/// A defect of the sharded computation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
    None,
    /// A rank's partial is left out of the merge from a context length on.
    LostRankFrom(u64, usize),
    /// The newest token is invisible when it opens a virtual block.
    NewestMissingAtVirtualBlock,
    /// While decoding, the second local block of every rank is read as its first.
    StaleBlockInDecode,
    /// One rank's weight in the merge is too large by this factor.
    Overweight(f32),
    /// The server dies at contexts longer than this.
    CrashBeyond(usize),
    /// Log-probabilities come out as NaN, i.e. as null, at contexts longer than this.
    NanBeyond(usize),
}

#[derive(Clone)]
pub struct ToyModel {
    embeddings: Vec<[f32; WIDTH]>,
    /// How much each byte resembles each other: the products of their embeddings.
    likeness: Vec<[f32; 256]>,
    pub ranks: u64,
    pub interleave: u64,
    pub block_size: u64,
    pub rounds_to_bf16: bool,
    pub fault: Fault,
}

impl ToyModel {
    pub fn new(ranks: u64, interleave: u64, fault: Fault) -> Self {
        let mut random = PythonRandom::new(99);
        let embeddings: Vec<[f32; WIDTH]> = (0..256)
            .map(|_| {
                let mut vector = [0.0; WIDTH];
                vector.iter_mut().for_each(|x| *x = random.uniform() as f32 - 0.5);
                let norm = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
                vector.map(|x| x / norm)
            })
            .collect();
        let likeness = embeddings.iter().map(|a| std::array::from_fn(|b| dot(a, &embeddings[b]))).collect();
        Self { embeddings, likeness, ranks, interleave, block_size: 16, rounds_to_bf16: false, fault }
    }

    /// Serves this model; `/v1/models` lists `m`.
    pub fn serve(self) -> HostileServer {
        HostileServer::start(move |request| self.answer(request))
    }

    fn answer(&self, request: &Request) -> Reply {
        let body = request.json();
        let mut tokens = vec![BOS];
        tokens.extend(body["prompt"].as_str().unwrap().bytes());
        let prompt_tokens = tokens.len();
        if let Fault::CrashBeyond(longest) = self.fault
            && prompt_tokens > longest
        {
            return Reply::status(400, "{\"error\": {\"message\": \"engine dead\"}}");
        }
        let top = body["logprobs"].as_u64().unwrap_or(0) as usize;
        let mut lists = Lists::default();
        if body["echo"] == true {
            lists.push(BOS, None, top);
            for at in 1..tokens.len() {
                lists.push(tokens[at], Some(self.logprobs(&tokens[..at], false)), top);
            }
        }
        for step in 0..body["max_tokens"].as_u64().unwrap() {
            let logprobs = self.logprobs(&tokens, step > 0);
            let best = (0..256).max_by(|a, b| logprobs[*a].total_cmp(&logprobs[*b])).unwrap() as u8;
            lists.push(best, Some(logprobs), top);
            tokens.push(best);
        }
        let generated: String = tokens[prompt_tokens..].iter().map(|byte| *byte as char).collect();
        Reply::ok(
            json!({
                "model": "m",
                "choices": [{"index": 0, "text": generated, "finish_reason": "length", "logprobs": lists.json()}],
                "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": tokens.len() - prompt_tokens},
            })
            .to_string(),
        )
    }

    /// Log-probabilities of the next token after `tokens`.
    fn logprobs(&self, tokens: &[u8], decoding: bool) -> Vec<f64> {
        let output = self.attend(tokens, decoding);
        let logits: Vec<f32> =
            self.embeddings.iter().map(|embedding| CONFIDENCE * dot(embedding, &output)).collect();
        let largest = logits.iter().copied().fold(f32::MIN, f32::max);
        let sum: f32 = logits.iter().map(|logit| (logit - largest).exp()).sum();
        let nan = matches!(self.fault, Fault::NanBeyond(longest) if tokens.len() > longest);
        logits
            .iter()
            .map(|logit| if nan { f64::NAN } else { f64::from(logit - largest - sum.ln()) })
            .collect()
    }

    /// Attention of the newest position over all of `tokens`: a partial per rank, then the merge.
    fn attend(&self, tokens: &[u8], decoding: bool) -> [f32; WIDTH] {
        let length = tokens.len();
        let virtual_block = (self.block_size * self.ranks) as usize;
        let partials: Vec<Partial> = (0..self.ranks)
            .map(|rank| {
                let mut partial = Partial::empty();
                for at in 0..length {
                    let owner = at as u64 / self.interleave % self.ranks;
                    let opens_block = at + 1 == length && length % virtual_block == 1 && length > 1;
                    let hidden = opens_block && self.fault == Fault::NewestMissingAtVirtualBlock;
                    if owner == rank && !hidden {
                        partial.add(self.score(tokens, at), &self.value(tokens, at, decoding, virtual_block));
                    }
                }
                partial
            })
            .collect();
        self.merge(&partials, length)
    }

    fn merge(&self, partials: &[Partial], length: usize) -> [f32; WIDTH] {
        let weight = |rank: usize, partial: &Partial| match self.fault {
            Fault::LostRankFrom(lost, from) if rank as u64 == lost && length >= from => 0.0,
            Fault::Overweight(factor) if rank == 0 => partial.sum * factor,
            _ => partial.sum,
        };
        let largest = partials.iter().map(|partial| partial.largest).fold(f32::MIN, f32::max);
        let mut merged = [0.0; WIDTH];
        let mut total = 0.0;
        for (rank, partial) in partials.iter().enumerate().filter(|(_, partial)| partial.sum > 0.0) {
            let weight = weight(rank, partial) * (partial.largest - largest).exp();
            total += weight;
            for (out, value) in merged.iter_mut().zip(&partial.accumulated) {
                let own = value / partial.sum;
                let own = if self.rounds_to_bf16 { to_bf16(own) } else { own };
                *out += weight * own;
            }
        }
        merged.map(|x| if total > 0.0 { x / total } else { 0.0 })
    }

    /// How well the bytes before position `at` match the newest bytes.
    fn score(&self, tokens: &[u8], at: usize) -> f32 {
        let newest = tokens.len();
        (1..=LOOK_BACK)
            .filter(|back| at >= *back && newest >= *back)
            .map(|back| {
                let (key, query) = (tokens[at - back] as usize, tokens[newest - back] as usize);
                SHARPNESS * self.likeness[query][key]
            })
            .sum()
    }

    fn value(&self, tokens: &[u8], at: usize, decoding: bool, virtual_block: usize) -> [f32; WIDTH] {
        let stale = self.fault == Fault::StaleBlockInDecode && decoding;
        let at = if stale && at / virtual_block == 1 { at - virtual_block } else { at };
        self.embeddings[tokens[at] as usize]
    }
}

struct Partial {
    largest: f32,
    sum: f32,
    accumulated: [f32; WIDTH],
}

impl Partial {
    fn empty() -> Self {
        Self { largest: f32::NEG_INFINITY, sum: 0.0, accumulated: [0.0; WIDTH] }
    }

    fn add(&mut self, score: f32, value: &[f32; WIDTH]) {
        let largest = self.largest.max(score);
        let (old, new) = ((self.largest - largest).exp(), (score - largest).exp());
        self.sum = self.sum * old + new;
        for (sum, x) in self.accumulated.iter_mut().zip(value) {
            *sum = *sum * old + new * x;
        }
        self.largest = largest;
    }
}

#[derive(Default)]
struct Lists {
    tokens: Vec<String>,
    logprobs: Vec<Value>,
    top: Vec<Value>,
}

impl Lists {
    fn push(&mut self, token: u8, logprobs: Option<Vec<f64>>, top: usize) {
        self.tokens.push(name(token));
        let Some(logprobs) = logprobs else {
            self.logprobs.push(Value::Null);
            self.top.push(Value::Null);
            return;
        };
        // serde_json writes NaN as null, as strict JSON servers have to
        self.logprobs.push(json!(logprobs[token as usize]));
        let mut order: Vec<usize> = (0..256).collect();
        order.sort_by(|a, b| logprobs[*b].total_cmp(&logprobs[*a]));
        let best: serde_json::Map<String, Value> = order[..top]
            .iter()
            .filter(|token| logprobs[**token].is_finite())
            .map(|token| (name(*token as u8), json!(logprobs[*token])))
            .collect();
        self.top.push(Value::Object(best));
    }

    fn json(&self) -> Value {
        json!({"tokens": self.tokens, "token_logprobs": self.logprobs, "top_logprobs": self.top})
    }
}

fn name(token: u8) -> String {
    if token == BOS { "<s>".to_owned() } else { (token as char).to_string() }
}

fn dot(a: &[f32; WIDTH], b: &[f32; WIDTH]) -> f32 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    f32::from_bits(rounded & 0xffff_0000)
}
