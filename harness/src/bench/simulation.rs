//! A float32 engine that keeps a rounding contract, with a knob for everything that the contract leaves open.
//!
//! It shares nothing with the oracle, and computes as kernels do: tiles of tokens in some order under a running maximum, exp or
//! exp2 with errors of its own, probabilities rounded before they meet the values, splits and ranks merged by their LSEs, every
//! intermediate stored in the format that the contract names. [`Tampering`] turns it into a faulty one.

use shardcheck_formats::{Contract, Counter, Dtype, Overflow, decode_f32, encode_f32, round_bf16};
use shardcheck_references::attention::plain::Problem;
use shardcheck_references::layout::Layout;
use shardcheck_references::visibility::Visible;

pub use super::sums::Sums;
use super::sums::{BLOCK, add_block, product, tree};

/// In which order tiles come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    /// Oldest first.
    Forward,
    /// Newest first.
    Reverse,
    /// Any.
    Random,
}

impl Order {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Forward, Self::Reverse, Self::Random];
}

/// How the engine goes about what its contract leaves open.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Knobs {
    /// Tokens of a tile.
    pub tile_tokens: usize,
    /// Order of the tiles.
    pub order: Order,
    /// Accumulation of scores and outputs.
    pub sums: Sums,
    /// exp2 of scores that were multiplied by log2(e), instead of exp.
    pub base_2: bool,
    /// Largest error of an exponential beyond its rounding, in units in the last place.
    pub exp_noise_ulp: u32,
    /// Parts of a rank's tokens that are attended to by themselves and merged before the partial is stored.
    pub splits: usize,
    /// Factor on probabilities before their cast.
    pub p_scale: f32,
    /// How far a score may rise above the running maximum before that is moved; 0 for a true running maximum.
    pub lazy_gap: f32,
    /// Merge weights are divided by their sum once more.
    pub normalised: bool,
    /// LSEs travel as the sum of two bf16 values.
    pub lse_in_halves: bool,
}

impl Knobs {
    /// A usual kernel.
    pub const USUAL: Self = Self {
        tile_tokens: 64,
        order: Order::Forward,
        sums: Sums::Rounding,
        base_2: true,
        exp_noise_ulp: 1,
        splits: 1,
        p_scale: 1.0,
        lazy_gap: 0.0,
        normalised: false,
        lse_in_halves: false,
    };
}

/// Changes the positions that a rank attends to for a row: `(row, rank, positions)`.
pub type ChangeOfHeld<'a> = &'a (dyn Fn(usize, usize, &mut Vec<usize>) + Sync);
/// Changes a rank's natural LSE: `(rank, LSE)`.
pub type ChangeOfLse<'a> = &'a (dyn Fn(usize, f32) -> f32 + Sync);

/// What a faulty engine does differently.
#[derive(Default, Clone, Copy)]
pub struct Tampering<'a> {
    /// What ranks attend to.
    pub held: Option<ChangeOfHeld<'a>>,
    /// What they return as their LSE.
    pub lse: Option<ChangeOfLse<'a>>,
    /// Merge weights are relative to the largest LSE and their sum is never divided by.
    pub unnormalised: bool,
}

/// What one rank returns.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RankOutput {
    /// `[rows, heads, v_dim]`, as stored.
    pub out: Vec<f64>,
    /// `[rows, heads]`, natural.
    pub lse: Vec<f64>,
}

/// What the engine returns.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Simulated {
    /// `[rows, heads, v_dim]`.
    pub out: Vec<f64>,
    /// `[rows, heads]`, natural.
    pub lse: Vec<f64>,
    /// `[ranks]`; empty on a single rank.
    pub partials: Vec<RankOutput>,
}

/// Runs every row and head. Equal arguments give equal bits on one machine.
pub fn simulate(
    problem: &Problem,
    layout: &Layout,
    visible: &[Visible],
    (contract, knobs): (&Contract, &Knobs),
    tampering: &Tampering,
    seed: u64,
) -> Simulated {
    let world = layout.world();
    let mut simulated = Simulated::default();
    if world > 1 {
        simulated.partials = vec![RankOutput::default(); world];
    }
    let engine = Engine { problem, contract, knobs, tampering };
    for (row, seen) in visible.iter().enumerate() {
        let mut held = vec![Vec::new(); world];
        seen.positions().for_each(|position| held[layout.owner(position)].push(position));
        if let Some(change) = tampering.held {
            held.iter_mut().enumerate().for_each(|(rank, positions)| change(row, rank, positions));
        }
        for head in 0..problem.heads {
            let mut random = Counter::new(seed, (row * problem.heads + head) as u32);
            let mut partials: Vec<Partial> = held
                .iter()
                .enumerate()
                .map(|(rank, positions)| engine.rank((row, head), rank, positions, world == 1, &mut random))
                .collect();
            for (kept, partial) in simulated.partials.iter_mut().zip(&partials) {
                kept.out.extend(partial.out.iter().map(|x| f64::from(*x)));
                kept.lse.push(f64::from(partial.lse));
            }
            if let (Some(sink), true) = (problem.sink, world > 1) {
                partials.push(Partial { out: vec![0.0; problem.v_dim], lse: sink[head] as f32 });
            }
            let merged =
                if world == 1 { partials.remove(0).or_zero() } else { engine.merge(&partials, &mut random) };
            simulated.out.extend(merged.out.iter().map(|x| f64::from(round_to(contract.output, *x))));
            simulated.lse.push(f64::from(merged.lse));
        }
    }
    simulated
}

/// A stored partial result.
#[derive(Debug, Clone)]
struct Partial {
    out: Vec<f32>,
    lse: f32,
}

impl Partial {
    /// Zeros where nothing was seen.
    fn or_zero(mut self) -> Self {
        if self.lse == f32::NEG_INFINITY {
            self.out.fill(0.0);
        }
        self
    }
}

/// Running sums under a running maximum, in the engine's base.
struct Running {
    max: f32,
    sum: f32,
    out: Vec<f64>,
}

struct Engine<'a> {
    problem: &'a Problem<'a>,
    contract: &'a Contract,
    knobs: &'a Knobs,
    tampering: &'a Tampering<'a>,
}

impl Engine<'_> {
    /// One rank's attention, stored if it travels.
    fn rank(
        &self,
        (row, head): (usize, usize),
        rank: usize,
        positions: &[usize],
        alone: bool,
        random: &mut Counter,
    ) -> Partial {
        let v_dim = self.problem.v_dim;
        let sink = self.problem.sink.filter(|_| alone).map(|sink| sink[head] as f32);
        if positions.is_empty() && sink.is_none() {
            return Partial { out: vec![f32::NAN; v_dim], lse: f32::NEG_INFINITY };
        }
        let length = positions.len().div_ceil(self.knobs.splits).max(1);
        let splits: Vec<Running> =
            positions.chunks(length).map(|split| self.split(row, head, split, random)).collect();
        let mut running = self.join(splits);
        if let Some(sink) = sink {
            let sink = if self.knobs.base_2 { sink * std::f32::consts::LOG2_E } else { sink };
            let max = running.max.max(sink);
            let rescale =
                if running.max == f32::NEG_INFINITY { 0.0 } else { self.exp(running.max - max, random) };
            running.sum = running.sum * rescale + self.exp(sink - max, random);
            running.out.iter_mut().for_each(|x| *x = f64::from(*x as f32 * rescale));
            running.max = max;
        }
        let mut out: Vec<f32> =
            running.out.iter().map(|x| *x as f32 / running.sum / self.knobs.p_scale).collect();
        let lse = if self.knobs.base_2 {
            (running.max + f64::from(running.sum).log2() as f32) * std::f32::consts::LN_2
        } else {
            running.max + f64::from(running.sum).ln() as f32
        };
        if !alone {
            out.iter_mut().for_each(|x| *x = round_to(self.contract.partial, *x));
        }
        Partial { out, lse: self.tampering.lse.map_or(lse, |change| change(rank, lse)) }
    }

    /// Online softmax over the tiles of one split.
    fn split(&self, row: usize, head: usize, positions: &[usize], random: &mut Counter) -> Running {
        let mut tiles: Vec<&[usize]> = positions.chunks(self.knobs.tile_tokens).collect();
        match self.knobs.order {
            Order::Forward => {}
            Order::Reverse => tiles.reverse(),
            Order::Random => {
                for i in (1..tiles.len()).rev() {
                    tiles.swap(i, random.below(i as u64 + 1) as usize);
                }
            }
        }
        let mut running = Running { max: f32::NEG_INFINITY, sum: 0.0, out: vec![0.0; self.problem.v_dim] };
        let (mut exact, mut rounded) = (Vec::new(), Vec::new());
        let kv_head = self.problem.kv_head(head);
        for tile in tiles {
            exact.clear();
            exact.extend(tile.iter().map(|&token| self.score(row, head, token)));
            let largest = exact.iter().copied().fold(running.max, f32::max);
            if running.max == f32::NEG_INFINITY || largest > running.max + self.knobs.lazy_gap {
                if running.max > f32::NEG_INFINITY {
                    let rescale = self.exp(running.max - largest, random);
                    running.sum *= rescale;
                    running.out.iter_mut().for_each(|x| *x = f64::from(*x as f32 * rescale));
                }
                running.max = largest;
            }
            exact.iter_mut().for_each(|p| *p = self.exp(*p - running.max, random));
            rounded.clear();
            rounded.extend(exact.iter().map(|p| self.probability(*p)));
            let unscaled = 1.0 / self.knobs.p_scale;
            if self.contract.l_rounded {
                exact.iter_mut().zip(&rounded).for_each(|(exact, rounded)| *exact = rounded * unscaled);
            }
            running.sum = add_all(running.sum, &exact, self.knobs.sums);
            for (tokens, weights) in tile.chunks(BLOCK).zip(rounded.chunks(BLOCK)) {
                let mut rows: [&[f32]; BLOCK] = [&[]; BLOCK];
                for (row, &token) in rows.iter_mut().zip(tokens) {
                    *row = self.problem.value_at(token, kv_head);
                }
                add_block(weights, &rows[..tokens.len()], self.knobs.sums, &mut running.out);
            }
        }
        running
    }

    /// A score in the engine's base.
    fn score(&self, row: usize, head: usize, token: usize) -> f32 {
        let problem = self.problem;
        let key = problem.key_at(token, problem.kv_head(head));
        let product = product(problem.query_at(row, head), key, self.knobs.sums);
        let log2_e = if self.knobs.base_2 { std::f64::consts::LOG2_E } else { 1.0 };
        match problem.softcap {
            None => (problem.scale * log2_e) as f32 * product,
            Some(cap) => {
                let cap = cap as f32;
                let bent = f64::from(product * problem.scale as f32 / cap).tanh() as f32;
                cap * bent * log2_e as f32
            }
        }
    }

    /// `e^x` or `2^x` for `x ≤` the lazy gap; exactly 1 at 0.
    fn exp(&self, x: f32, random: &mut Counter) -> f32 {
        let exact = if self.knobs.base_2 { f64::from(x).exp2() } else { f64::from(x).exp() } as f32;
        let noise = self.knobs.exp_noise_ulp;
        if noise == 0 || x == 0.0 || exact < f32::MIN_POSITIVE * 1e3 {
            return exact;
        }
        let shift = random.below(2 * u64::from(noise) + 1) as i32 - noise as i32;
        f32::from_bits((exact.to_bits() as i32 + shift) as u32)
    }

    /// A probability as it meets the values, the scale still on it.
    fn probability(&self, p: f32) -> f32 {
        let scaled = p * self.knobs.p_scale;
        self.contract.p_dtype.map_or(scaled, |dtype| round_to(dtype, scaled))
    }

    /// Merges splits in f32.
    fn join(&self, mut splits: Vec<Running>) -> Running {
        if splits.len() == 1 {
            return splits.remove(0);
        }
        let max = splits.iter().map(|split| split.max).fold(f32::NEG_INFINITY, f32::max);
        let mut joined = Running { max, sum: 0.0, out: vec![0.0; self.problem.v_dim] };
        for split in splits {
            let exponent = f64::from(split.max - max);
            let factor = if self.knobs.base_2 { exponent.exp2() } else { exponent.exp() } as f32;
            joined.sum += split.sum * factor;
            joined
                .out
                .iter_mut()
                .zip(split.out)
                .for_each(|(to, x)| *to = f64::from(*to as f32 + x as f32 * factor));
        }
        joined
    }

    /// Merges ranks by the contract's merge.
    fn merge(&self, partials: &[Partial], random: &mut Counter) -> Partial {
        let v_dim = self.problem.v_dim;
        let carried =
            |partial: &Partial| if self.knobs.lse_in_halves { in_halves(partial.lse) } else { partial.lse };
        let lses: Vec<f32> = partials.iter().map(carried).collect();
        let max = lses.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if max == f32::NEG_INFINITY {
            return Partial { out: vec![0.0; v_dim], lse: max };
        }
        let exp = |x: f32| f64::from(x).exp() as f32;
        let shares: Vec<f32> = lses.iter().map(|lse| exp(lse - max)).collect();
        let sum: f32 = shares.iter().sum();
        let lse = max + f64::from(sum).ln() as f32;
        let weights: Vec<f32> = match (self.tampering.unnormalised, self.knobs.normalised) {
            (true, _) => shares,
            (false, true) => shares.iter().map(|share| share / sum).collect(),
            (false, false) => lses.iter().map(|own| exp(own - lse)).collect(),
        };
        let round = |x: f32| self.contract.merge.rounded_to().map_or(x, |dtype| round_to(dtype, x));
        let held: Vec<(f32, &Partial)> =
            weights.into_iter().zip(partials).filter(|(weight, _)| *weight > 0.0).collect();
        // one reduction tree for all dimensions: pairs to be added, the second into the first
        let mut alive: Vec<usize> = (0..held.len()).collect();
        let mut steps = Vec::new();
        while alive.len() > 1 {
            let gone = alive.swap_remove(random.below(alive.len() as u64) as usize);
            steps.push((alive[random.below(alive.len() as u64) as usize], gone));
        }
        let mut terms = vec![0.0; held.len()];
        let out = (0..v_dim)
            .map(|d| {
                terms
                    .iter_mut()
                    .zip(&held)
                    .for_each(|(term, (weight, part))| *term = round(weight * part.out[d]));
                steps.iter().for_each(|(into, from)| terms[*into] = round(terms[*into] + terms[*from]));
                terms[alive[0]]
            })
            .collect();
        Partial { out, lse }
    }
}

/// Adds probabilities to the normaliser in chains no longer than the contract's.
fn add_all(mut sum: f32, terms: &[f32], sums: Sums) -> f32 {
    if sums == Sums::Sequential {
        return terms.iter().fold(sum, |sum, p| sum + p);
    }
    for chunk in terms.chunks(BLOCK) {
        let mut block = [0.0; BLOCK];
        block[..chunk.len()].copy_from_slice(chunk);
        sum += tree(&mut block);
    }
    sum
}

/// `x` rounded to a format, saturating.
pub fn round_to(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::Bf16 => round_bf16(x),
        Dtype::F32 => x,
        Dtype::E4m3fn => round_small(x, 3, -6, 448.0),
        other => decode_f32(other, encode_f32(other, x, Overflow::Saturate)),
    }
}

/// Rounding to `fraction_bits` with exponents from `min_exponent` on, to nearest even.
fn round_small(x: f32, fraction_bits: i32, min_exponent: i32, largest: f32) -> f32 {
    if !x.is_finite() || x == 0.0 {
        return x;
    }
    let exponent = ((x.to_bits() >> 23 & 0xFF) as i32 - 127).max(min_exponent);
    // a power of two by its bits
    let step = f32::from_bits(((exponent - fraction_bits + 127) as u32) << 23);
    ((x / step).round_ties_even() * step).clamp(-largest, largest)
}

/// An LSE as the sum of two bf16 values.
fn in_halves(lse: f32) -> f32 {
    if !lse.is_finite() {
        return lse;
    }
    let high = round_bf16(lse);
    high + round_bf16(lse - high)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcheck_formats::Merge;
    use shardcheck_references::attention::plain::{Values, attend};

    struct Scene {
        query: Vec<f32>,
        key: Vec<f32>,
        value: Vec<f32>,
    }

    impl Scene {
        fn new(tokens: usize) -> Self {
            let mut random = Counter::new(8, 0);
            let mut draw = |count: usize| (0..count).map(|_| round_bf16(random.gaussian() as f32)).collect();
            Self { query: draw(2 * 4 * 32), key: draw(tokens * 2 * 32), value: draw(tokens * 2 * 24) }
        }

        fn problem(&self) -> Problem<'_> {
            Problem::new(
                4,
                2,
                32,
                24,
                32f64.powf(-0.5),
                &self.query,
                &self.key,
                Values::Separate(&self.value),
            )
        }
    }

    #[test]
    fn every_setting_of_the_knobs_gives_global_attention() {
        let scene = Scene::new(150);
        let (problem, visible) = (scene.problem(), Visible::causal(150, 2));
        let exact = attend(&problem, &visible);
        for (run, sums) in Sums::ALL.into_iter().cycle().take(24).enumerate() {
            let knobs = Knobs {
                tile_tokens: [16, 64][run % 2],
                order: Order::ALL[run % 3],
                sums,
                base_2: run % 2 == 0,
                splits: 1 + run % 4,
                lazy_gap: [0.0, 2.0][run / 4 % 2],
                normalised: run % 5 == 0,
                lse_in_halves: run % 7 == 0,
                ..Knobs::USUAL
            };
            let contract = Contract::bf16_default(Merge::ALL[run % 3]);
            let layout = Layout::new([1, 2, 3, 8][run % 4], 1, 1).unwrap();
            let seen = simulate(&problem, &layout, &visible, (&contract, &knobs), &Tampering::default(), 1);
            for (seen, exact) in seen.out.iter().zip(&exact.out) {
                assert!((seen - exact).abs() < 6e-3, "{knobs:?}: {seen} {exact}");
            }
            let far = if knobs.lse_in_halves { 2e-4 } else { 5e-6 };
            for (seen, exact) in seen.lse.iter().zip(&exact.lse) {
                assert!((seen - exact).abs() < far, "{knobs:?}: {seen} {exact}");
            }
        }
    }

    #[test]
    fn equal_seeds_give_equal_bits_and_others_do_not() {
        let scene = Scene::new(90);
        let run = |seed| {
            let contract = Contract::bf16_default(Merge::AgRsBf16);
            let knobs = Knobs { order: Order::Random, tile_tokens: 16, ..Knobs::USUAL };
            let layout = Layout::new(3, 1, 1).unwrap();
            let visible = Visible::causal(90, 2);
            simulate(&scene.problem(), &layout, &visible, (&contract, &knobs), &Tampering::default(), seed)
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }

    #[test]
    fn tampering_reaches_the_merge() {
        let scene = Scene::new(64);
        let visible = Visible::causal(64, 2);
        let run = |tampering: &Tampering| {
            let contract = Contract::bf16_default(Merge::A2a);
            let layout = Layout::new(4, 1, 1).unwrap();
            simulate(&scene.problem(), &layout, &visible, (&contract, &Knobs::USUAL), tampering, 1)
        };
        let clean = run(&Tampering::default());
        let shift = |rank: usize, lse: f32| if rank == 2 { lse + 0.5 } else { lse };
        assert_ne!(run(&Tampering { lse: Some(&shift), ..Tampering::default() }).out, clean.out);
        let lose = |_: usize, rank: usize, held: &mut Vec<usize>| {
            if rank == 1 {
                held.clear();
            }
        };
        let lost = run(&Tampering { held: Some(&lose), ..Tampering::default() });
        assert_eq!(lost.partials[1].lse, [f64::NEG_INFINITY; 8]);
        let larger = run(&Tampering { unnormalised: true, ..Tampering::default() });
        assert!(larger.out.iter().zip(&clean.out).all(|(a, b)| a.abs() >= b.abs()));
    }

    #[test]
    fn fast_rounding_to_e4m3_is_that_of_the_codec() {
        let mut random = Counter::new(9, 0);
        for _ in 0..4000 {
            let x = random.gaussian() as f32 * 2f32.powi(random.below(24) as i32 - 14);
            assert_eq!(
                round_to(Dtype::E4m3fn, x),
                decode_f32(Dtype::E4m3fn, encode_f32(Dtype::E4m3fn, x, Overflow::Saturate)),
                "{x:e}"
            );
        }
    }
}
