//! Acceptance of drafted tokens: argmax, each draft by itself, or a block of them; over a vocabulary that is sharded over ranks.
//!
//! Formulas: Leviathan et al. 2211.17192, Sun et al. 2403.10444, vLLM `rejection_sampler_utils` (placeholders end the drafts of a
//! request, greedy requests stay greedy in every method). All in 32 bits, as probabilities' logarithms.

mod batch;

use shardcheck_engine::{AcceptanceMethod, EngineError, Reply, Tensor, Tensors};
use shardcheck_formats::Dtype;

pub use batch::shards;
use batch::{Batch, Request};

/// Most ranks that a vocabulary is sharded over.
const MAX_RANKS: usize = 4096;

/// Largest logit of a shard, and the sum of its exponentials relative to that.
pub type Part = (f32, f32);

/// What a draft −1 does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoDraft {
    /// It ends the drafts of its request: what follows is drawn from the target.
    Ends,
    /// It is rejected like a draft: what follows is drawn from what the drafter's row leaves over.
    Rejected,
    /// It is taken as accepted.
    Accepted,
}

/// How drafts are accepted.
#[derive(Clone, Copy, PartialEq)]
pub struct AcceptancePolicies {
    /// Drafts of a request: `(its rows less the bonus row, columns of the batch)`.
    pub drafts: fn(usize, usize) -> usize,
    /// What a draft −1 does.
    pub none: NoDraft,
    /// Row whose target decides a draft: `(first row of the request, index of the draft)`.
    pub target_row: fn(usize, usize) -> usize,
    /// Row of the token behind all drafts: `(first row of the request, drafts)`.
    pub bonus_row: fn(usize, usize) -> usize,
    /// Whether a request is greedy at a temperature.
    pub is_greedy: fn(f32) -> bool,
    /// A logit of the target, and one of the drafter, at a temperature.
    pub temper: [fn(f32, f32) -> f32; 2],
    /// Whether a logit takes the place of the best one before it in its shard, and of the best of an earlier shard.
    pub better: [fn(f32, f32) -> bool; 2],
    /// Token of a place in a shard: `(place, first token of the shard)`.
    pub token: fn(usize, usize) -> usize,
    /// What all shards have together.
    pub join: fn(&[Part]) -> Part,
    /// How many drafts are accepted of those that are the target's argmax.
    pub matching: fn(&[bool]) -> usize,
    /// Whether a draft is the argmax: `(draft, argmax, logits of the row)`.
    pub matches: fn(i64, usize, &[f32]) -> bool,
    /// Number that decides a row: `(rank, row, numbers)`.
    pub number: fn(usize, usize, &[f32]) -> f32,
    /// Logarithm of the probability of a draft without a law: `(tokens)`.
    pub one_hot: fn(usize) -> f32,
    /// Whether a draft is accepted by itself: `(ln target, ln draft, number)`.
    pub accepts: fn(f32, f32, f32) -> bool,
    /// Probability of a prefix: `(that of the one before, ln target − ln draft)`.
    pub prefix: fn(f32, f32) -> f32,
    /// Bound of a prefix that is not the last: `(what is left over behind it, its probability)`.
    pub continued: fn(f32, f32) -> f32,
    /// Bound of the last prefix: `(what the row behind would leave over, its probability)`.
    pub whole: fn(f32, f32) -> f32,
    /// Drafts that are accepted as a block, of prefixes that pass or not.
    pub longest: fn(&[bool]) -> usize,
    /// Weight of a token behind a rejected draft: `(probability of the prefix, target, draft)`.
    pub residual: fn(f32, f32, f32) -> f32,
    /// Weight of the rejected draft itself where drafts have no law, given its target.
    pub rejected: fn(f32) -> f32,
    /// Score of a token: `(ln weight, noise)`.
    pub score: fn(f32, f32) -> f32,
    /// What stands behind the emitted tokens, given the draft there.
    pub tail: fn(i64) -> i64,
    /// Whether the token behind the accepted drafts is emitted: `(accepted, drafts)`.
    pub emits: fn(usize, usize) -> bool,
    /// Accepted drafts as they are reported: `(accepted, drafts)`.
    pub reported: fn(usize, usize) -> usize,
    /// Mean acceptance length and acceptance rate: `(accepted, drafted, columns)`.
    pub statistics: fn(&[usize], &[usize], usize) -> [f32; 2],
}

impl AcceptancePolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        drafts: |own, _| own,
        none: NoDraft::Ends,
        target_row: |first, index| first + index,
        bonus_row: |first, drafts| first + drafts,
        is_greedy: |temperature| temperature == 0.0,
        // a temperature of 0 divides nothing
        temper: [|logit, temperature| if temperature == 0.0 { logit } else { logit / temperature }; 2],
        better: [|logit, best| logit > best; 2],
        token: |place, first| first + place,
        join,
        matching: prefix_of,
        matches: |draft, argmax, _| draft == argmax as i64,
        number: |_, row, numbers| numbers[row],
        one_hot: |_| 0.0,
        accepts: |target, draft, number| target > number.ln() + draft,
        prefix: |before, ratio| (before * ratio.exp()).min(1.0),
        continued,
        whole: |_, prefix| prefix,
        longest: |passes| passes.iter().rposition(|passes| *passes).map_or(0, |index| index + 1),
        residual: |prefix, target, draft| (prefix * target - draft).max(0.0),
        rejected: |_| 0.0,
        score: |weight, noise| weight + noise,
        tail: |_| -1,
        emits: |_, _| true,
        reported: |accepted, _| accepted,
        statistics,
    };
}

/// Those before the first that is not so.
pub fn prefix_of(flags: &[bool]) -> usize {
    flags.iter().take_while(|flag| **flag).count()
}

fn join(parts: &[Part]) -> Part {
    let most = parts.iter().map(|part| part.0).fold(f32::NEG_INFINITY, f32::max);
    // a shard without a token that can be has nothing to add
    let parts = parts.iter().filter(|part| part.1 > 0.0);
    (most, parts.map(|(largest, sum)| sum * (largest - most).exp()).sum())
}

/// h of a prefix.
pub fn continued(mass: f32, prefix: f32) -> f32 {
    let whole = mass + (1.0 - prefix);
    if whole == 0.0 { 1.0 } else { mass / whole }
}

/// As reported by serving engines.
pub fn statistics(accepted: &[usize], drafted: &[usize], _: usize) -> [f32; 2] {
    let (all, of) = (accepted.iter().sum::<usize>() as f32, drafted.iter().sum::<usize>() as f32);
    [1.0 + all / accepted.len().max(1) as f32, if of == 0.0 { 0.0 } else { all / of }]
}

/// What is drawn behind the accepted drafts.
enum Draw {
    /// From the target, at a row.
    Target(usize),
    /// From what the drafter's law leaves over of the target's: row, index of the draft, probability of the prefix.
    Residual(usize, usize, f32),
    /// The argmax of a row.
    Argmax(usize),
}

/// Accepts the drafts of a batch on every rank.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit; a crash for starts that fall, drafts that are no tokens, or no ranks.
pub fn accept_drafts(
    inputs: &Tensors,
    (method, ranks): (AcceptanceMethod, usize),
    policies: &AcceptancePolicies,
) -> Result<Reply, EngineError> {
    if ranks == 0 || ranks > MAX_RANKS {
        return Err(EngineError::Crash { text: format!("{ranks} ranks") });
    }
    let batch = Batch::read(inputs, method)?;
    let (count, width) = (batch.requests(), batch.columns + 1);
    let (mut tokens, mut accepted, mut figures) = (Vec::new(), Vec::new(), Vec::new());
    for rank in 0..ranks {
        let sampler =
            Sampler { rank, method, batch: &batch, shards: shards(batch.vocabulary, ranks), policies };
        let found: Vec<Emitted> =
            (0..count).map(|request| sampler.emit(batch.request(request, policies))).collect();
        let lengths: Vec<usize> = found.iter().map(|emitted| emitted.accepted).collect();
        let drafted: Vec<usize> = found.iter().map(|emitted| emitted.drafted).collect();
        figures.extend((policies.statistics)(&lengths, &drafted, batch.columns));
        accepted.extend(lengths.iter().map(|length| *length as i32));
        for (request, emitted) in found.iter().enumerate() {
            let behind = |place: usize| (policies.tail)(batch.draft_at(request, place));
            tokens.extend(
                (0..width).map(|place| emitted.tokens.get(place).copied().unwrap_or_else(|| behind(place))),
            );
        }
    }
    let outputs = Tensors::new()
        .with("tokens", Tensor::from_i64(&[ranks, count, width], &tokens))
        .with("accepted", Tensor::from_i32(&[ranks, count], &accepted))
        .with("statistics", Tensor::from_f32(Dtype::F32, &[ranks, 2], &figures));
    Ok(Reply { outputs, collectives: vec![0; ranks], ..Reply::default() })
}

struct Emitted {
    tokens: Vec<i64>,
    accepted: usize,
    drafted: usize,
}

/// One rank: it works on the shards' parts, which every rank has gathered.
struct Sampler<'a> {
    rank: usize,
    method: AcceptanceMethod,
    batch: &'a Batch,
    shards: Vec<std::ops::Range<usize>>,
    policies: &'a AcceptancePolicies,
}

impl Sampler<'_> {
    fn emit(&self, request: Request) -> Emitted {
        let greedy =
            self.method == AcceptanceMethod::Greedy || (self.policies.is_greedy)(request.temperature);
        let (accepted, draw) = match self.method {
            _ if greedy => self.greedy(&request),
            AcceptanceMethod::Block => self.block(&request),
            _ => self.standard(&request),
        };
        let mut tokens = request.drafts[..accepted].to_vec();
        if (self.policies.emits)(accepted, request.drafts.len()) {
            tokens.push(self.draw(&request, draw) as i64);
        }
        tokens.truncate(self.batch.columns + 1);
        let drafted = request.drafts.len();
        Emitted { tokens, accepted: (self.policies.reported)(accepted, drafted), drafted }
    }

    fn target_row(&self, request: &Request, index: usize) -> usize {
        (self.policies.target_row)(request.first, index)
    }

    fn bonus(&self, request: &Request) -> usize {
        (self.policies.bonus_row)(request.first, request.drafts.len())
    }

    fn number(&self, row: usize) -> f32 {
        let numbers = &self.batch.uniform;
        (self.policies.number)(self.rank, row.min(numbers.len() - 1), numbers)
    }

    fn greedy(&self, request: &Request) -> (usize, Draw) {
        let matches = |(index, draft): (usize, &i64)| {
            let row = self.batch.target_row(self.target_row(request, index));
            *draft < 0 || (self.policies.matches)(*draft, self.argmax(row), row)
        };
        let matches: Vec<bool> = request.drafts.iter().enumerate().map(matches).collect();
        let accepted = (self.policies.matching)(&matches);
        let row =
            if accepted == matches.len() { self.bonus(request) } else { self.target_row(request, accepted) };
        (accepted, Draw::Argmax(row))
    }

    /// `ln target` and `ln draft` of a draft.
    fn chances(&self, request: &Request, index: usize) -> (f32, f32) {
        let draft = request.drafts[index];
        let Ok(token) = usize::try_from(draft) else {
            // a draft that is none is beyond every number, or below
            let taken = self.policies.none == NoDraft::Accepted;
            return (if taken { f32::INFINITY } else { f32::NEG_INFINITY }, 0.0);
        };
        let target = self.target_law(self.target_row(request, index), request.temperature)[token];
        let law = self.draft_law(request, index);
        (target, law.map_or_else(|| (self.policies.one_hot)(self.batch.vocabulary), |law| law[token]))
    }

    fn standard(&self, request: &Request) -> (usize, Draw) {
        for index in 0..request.drafts.len() {
            let (target, draft) = self.chances(request, index);
            let number = self.number(request.first + index);
            if !(self.policies.accepts)(target, draft, number) {
                return (index, Draw::Residual(self.target_row(request, index), index, 1.0));
            }
        }
        (request.drafts.len(), Draw::Target(self.bonus(request)))
    }

    fn block(&self, request: &Request) -> (usize, Draw) {
        let count = request.drafts.len();
        let (mut prefixes, mut passes) = (vec![1.0f32], Vec::new());
        for index in 0..count {
            let (target, draft) = self.chances(request, index);
            let prefix = (self.policies.prefix)(prefixes[index], target - draft);
            prefixes.push(prefix);
            let bound = if index + 1 == count {
                (self.policies.whole)(prefix, prefix)
            } else {
                (self.policies.continued)(self.mass(request, index + 1, prefix), prefix)
            };
            let number = self.number(request.first + index);
            passes.push(prefix > 0.0 && number <= bound);
        }
        let accepted = (self.policies.longest)(&passes).min(count);
        let draw = if accepted == count {
            Draw::Target(self.bonus(request))
        } else {
            Draw::Residual(self.target_row(request, accepted), accepted, prefixes[accepted])
        };
        (accepted, draw)
    }

    /// What the drafter's law of draft `index` leaves over of the target's, summed over the shards.
    fn mass(&self, request: &Request, index: usize, prefix: f32) -> f32 {
        if self.batch.draft.is_none() {
            let (target, _) = self.chances(request, index);
            return prefix * (1.0 - target.exp());
        }
        let weights = self.residual(request, self.target_row(request, index), index, prefix);
        self.shards.iter().map(|shard| weights[shard.clone()].iter().sum::<f32>()).sum()
    }

    fn residual(&self, request: &Request, row: usize, index: usize, prefix: f32) -> Vec<f32> {
        let mut target: Vec<f32> =
            self.target_law(row, request.temperature).iter().map(|log| log.exp()).collect();
        if let Some(draft) = self.draft_law(request, index) {
            let left = |(target, draft): (&f32, &f32)| (self.policies.residual)(prefix, *target, draft.exp());
            return target.iter().zip(&draft).map(left).collect();
        }
        if let Ok(token) = usize::try_from(request.drafts[index]) {
            target[token] = (self.policies.rejected)(target[token]);
        }
        target
    }

    fn draw(&self, request: &Request, draw: Draw) -> usize {
        let (row, weights) = match draw {
            Draw::Argmax(row) => return self.argmax(self.batch.target_row(row)),
            Draw::Target(row) => (row, self.target_law(row, request.temperature)),
            Draw::Residual(row, index, prefix) => {
                let weights = self.residual(request, row, index, prefix);
                if weights.iter().all(|weight| *weight <= 0.0) {
                    // both laws are the same: the rejection was a rounding
                    (row, self.target_law(row, request.temperature))
                } else {
                    (row, weights.iter().map(|weight| weight.ln()).collect())
                }
            }
        };
        let noise = self.batch.noise_row(row);
        let scores: Vec<f32> =
            weights.iter().zip(noise).map(|(weight, noise)| (self.policies.score)(*weight, *noise)).collect();
        self.argmax(&scores)
    }

    /// The best of each shard, and the best of those: on every rank the same.
    fn argmax(&self, row: &[f32]) -> usize {
        let [in_shard, over_shards] = self.policies.better;
        let mut best: Option<(f32, usize)> = None;
        for shard in self.shards.iter().filter(|shard| !shard.is_empty()) {
            let own = &row[shard.clone()];
            let place =
                (1..own.len()).fold(0, |best, at| if in_shard(own[at], own[best]) { at } else { best });
            if best.is_none_or(|(value, _)| over_shards(own[place], value)) {
                best = Some((own[place], (self.policies.token)(place, shard.start)));
            }
        }
        best.map_or(0, |(_, token)| token)
    }

    fn target_law(&self, row: usize, temperature: f32) -> Vec<f32> {
        self.law(self.batch.target_row(row), temperature, self.policies.temper[0])
    }

    fn draft_law(&self, request: &Request, index: usize) -> Option<Vec<f32>> {
        let row = self.batch.draft_row(request.number, index)?;
        Some(self.law(row, request.temperature, self.policies.temper[1]))
    }

    /// Logarithms of a row's probabilities, from the largest logit and the sum of each shard.
    fn law(&self, logits: &[f32], temperature: f32, temper: fn(f32, f32) -> f32) -> Vec<f32> {
        let scaled: Vec<f32> = logits.iter().map(|logit| temper(*logit, temperature)).collect();
        let part = |shard: &std::ops::Range<usize>| {
            let own = &scaled[shard.clone()];
            let most = own.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum =
                if most == f32::NEG_INFINITY { 0.0 } else { own.iter().map(|z| (z - most).exp()).sum() };
            (most, sum)
        };
        let (most, sum) = (self.policies.join)(&self.shards.iter().map(part).collect::<Vec<_>>());
        let log = sum.ln();
        scaled.iter().map(|z| (z - most) - log).collect()
    }
}
