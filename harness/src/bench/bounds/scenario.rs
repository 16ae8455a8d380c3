//! One draw of everything that a bound must hold for.

use std::fmt;

use shardcheck_formats::{Contract, Counter, Depth, Dtype, Merge};
use shardcheck_references::layout::Layout;
use shardcheck_references::visibility::Visible;

use super::tally::Grouping;
use crate::bench::inputs::{CacheFormat, Family, Shape, Tensors};
use crate::bench::simulation::{Knobs, Order, Sums};

/// Lengths that most runs are drawn near to.
const LENGTHS: [usize; 13] = [1, 2, 3, 7, 16, 37, 64, 64, 128, 128, 257, 512, 1000];
/// One run in so many has 4,096 tokens, one in so many 32,768.
const LONG_EVERY: (u64, u64) = (48, 384);

/// A scenario.
pub(super) struct Scenario {
    pub family: Family,
    pub tensors: Tensors,
    pub cache: CacheFormat,
    pub layout: Layout,
    pub visible: Vec<Visible>,
    pub contract: Contract,
    pub knobs: Knobs,
    /// Seed of the engine's own choices.
    pub seed: u64,
}

/// One of them.
fn pick<T: Copy>(random: &mut Counter, from: &[T]) -> T {
    from[random.below(from.len() as u64) as usize]
}

/// True once in `times`.
fn once_in(random: &mut Counter, times: u64) -> bool {
    random.below(times) == 0
}

impl Scenario {
    /// The scenario `index` of a seed.
    pub fn drawn(seed: u64, index: u64) -> Self {
        let mut random = Counter::new(shardcheck_formats::word(seed, 77, index), 0);
        let family = Family::ALL[(index % Family::ALL.len() as u64) as usize];
        let tokens = tokens(&mut random, index);
        let shape = shape(&mut random, tokens);
        let cache = pick(
            &mut random,
            &[
                CacheFormat::BF16,
                CacheFormat::BF16,
                CacheFormat { dtype: Dtype::E4m3fn, scale: 0.5 },
                CacheFormat { dtype: Dtype::E4m3fn, scale: 0.875 },
            ],
        );
        let mut tensors = Tensors::drawn(family, shape, cache, random.next_u64());
        if once_in(&mut random, 6) {
            tensors.sink =
                Some((0..shape.heads).map(|_| f64::from(random.gaussian() as f32) * 3.0).collect());
        }
        if once_in(&mut random, 10) {
            tensors.softcap = Some(pick(&mut random, &[5.0, 30.0, 50.0]));
        }
        let world = pick(&mut random, &[1, 2, 3, 4, 6, 8]);
        let interleave = pick(&mut random, &[1, 1, 16]);
        let visible = match random.below(8) {
            0 => Visible::sliding_window(tokens, shape.rows, 1 + random.below(tokens as u64) as usize),
            1 => Visible::draft_block(tokens, shape.rows),
            _ => Visible::causal(tokens, shape.rows),
        };
        let (contract, knobs) = engine(&mut random);
        Self {
            family,
            tensors,
            cache,
            layout: Layout::new(world, interleave, interleave).expect("a block of one run"),
            visible,
            contract,
            knobs,
            seed: random.next_u64(),
        }
    }

    /// The groups that it belongs to.
    pub fn groups(&self) -> Vec<(Grouping, String)> {
        let tokens = self.tensors.shape.tokens;
        let up_to = [3, 16, 64, 128, 512, 1000, 4096, 32768].into_iter().find(|limit| tokens <= *limit);
        let probabilities = self.contract.p_dtype.map_or("f32 (not rounded)", Dtype::name);
        vec![
            (Grouping::Distribution, self.family.name().to_owned()),
            // padded, so that text sorts as numbers do
            (Grouping::Tokens, format!("{:>6}", up_to.unwrap_or(tokens))),
            (Grouping::Ranks, self.layout.world().to_string()),
            (Grouping::Merge, self.contract.merge.name().to_owned()),
            (Grouping::Probabilities, probabilities.to_owned()),
            (Grouping::Sums, format!("{:?}", self.knobs.sums).to_lowercase()),
        ]
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shape, layout) = (&self.tensors.shape, &self.layout);
        write!(
            f,
            "{} {shape:?}, cache {}, W {} S {}, sink {}, soft cap {:?}, {:?}, {:?}",
            self.family,
            self.cache.dtype,
            layout.world(),
            layout.interleave(),
            self.tensors.sink.is_some(),
            self.tensors.softcap,
            self.contract,
            self.knobs
        )
    }
}

fn tokens(random: &mut Counter, index: u64) -> usize {
    if index % LONG_EVERY.1 == LONG_EVERY.1 - 1 {
        return 32768 - random.below(100) as usize;
    }
    if index % LONG_EVERY.0 == LONG_EVERY.0 - 1 {
        return 4096 - random.below(300) as usize;
    }
    let near = pick(random, &LENGTHS);
    near - random.below(near as u64 / 3 + 1) as usize
}

fn shape(random: &mut Counter, tokens: usize) -> Shape {
    // fewer states where a state costs much
    let (rows, heads) = match tokens {
        0..=600 => (1 + random.below(4) as usize, pick(random, &[4, 8, 16])),
        601..=4096 => (1 + random.below(2) as usize, 4),
        _ => (1, 2),
    };
    let (qk_dim, v_dim, latent) = match random.below(10) {
        0 if tokens <= 600 => (576, 512, true),
        1 | 2 => (80, 64, true),
        3 if tokens <= 4096 => (192, 128, false),
        4..=6 if tokens <= 4096 => (128, 128, false),
        _ => (64, 64, false),
    };
    let kv_heads = if latent { 1 } else { pick(random, &[1, 2, heads.min(4)]) };
    Shape { rows, heads, kv_heads, qk_dim, v_dim, latent, tokens }
}

/// An engine and the contract that it keeps.
fn engine(random: &mut Counter) -> (Contract, Knobs) {
    let sums = pick(random, &Sums::ALL);
    let lazy = once_in(random, 7);
    let (p_dtype, p_floor, p_scale) = match random.below(8) {
        0 if !lazy => (Some(Dtype::E4m3fn), 2f64.powi(-10) / 256.0, 256.0),
        1 if !lazy => (Some(Dtype::E4m3fn), 2f64.powi(-10), 1.0),
        2 => (Some(Dtype::F16), 0.0, 1.0),
        3 => (None, 0.0, 1.0),
        _ => (Some(Dtype::Bf16), 0.0, 1.0),
    };
    let (exp_noise_ulp, kexp) = pick(random, &[(0, 2.0), (1, 2.0), (1, 2.0), (14, 16.0)]);
    let lse_in_halves = once_in(random, 8);
    let knobs = Knobs {
        tile_tokens: pick(random, &[16, 32, 64, 128, 512]),
        order: pick(random, &Order::ALL),
        sums,
        base_2: once_in(random, 2),
        exp_noise_ulp,
        splits: pick(random, &[1, 1, 2, 5]),
        p_scale,
        lazy_gap: if lazy { pick(random, &[2.0, 8.0]) } else { 0.0 },
        normalised: once_in(random, 3),
        lse_in_halves,
    };
    let depth = match sums {
        Sums::Sequential => Depth::Any,
        _ => Depth::PerTile { tile: 16, extra: 16 },
    };
    let contract = Contract {
        u_acc: sums.unit_roundoff(),
        depth,
        kexp,
        tile_min: knobs.tile_tokens,
        p_dtype,
        p_floor,
        exact_max: !lazy,
        l_rounded: once_in(random, 4),
        partial: pick(random, &[Dtype::Bf16, Dtype::Bf16, Dtype::F16, Dtype::F32]),
        merge: pick(random, &Merge::ALL),
        lse_rel: if lse_in_halves { 2f64.powi(-16) } else { 0.0 },
        output: pick(random, &[Dtype::Bf16, Dtype::Bf16, Dtype::Bf16, Dtype::F16, Dtype::F32]),
    };
    (contract, knobs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_thousand_draws_touch_every_value_of_every_knob_and_keep_within_the_ceiling() {
        let mut seen = BTreeSet::new();
        for index in 0..1000 {
            let mut random = Counter::new(index, 0);
            let (contract, knobs) = engine(&mut random);
            assert_eq!(contract.check_ceiling(), Ok(()), "{contract:?}");
            seen.insert(format!("sums {:?}", knobs.sums));
            seen.insert(format!("order {:?}", knobs.order));
            seen.insert(format!("probabilities {:?} {}", contract.p_dtype, knobs.p_scale));
            seen.insert(format!("lazy {}", knobs.lazy_gap));
            seen.insert(format!("merge {}", contract.merge));
            seen.insert(format!("partial {}", contract.partial));
            seen.insert(format!("rounded normaliser {}", contract.l_rounded));
            seen.insert(format!("halves {}", knobs.lse_in_halves));
        }
        // 4 sums, 3 orders, 5 probabilities, 3 gaps, 4 merges, 3 partials, 2, 2
        assert_eq!(seen.len(), 26, "{seen:?}");
    }

    #[test]
    fn lengths_reach_from_one_to_thirty_two_thousand() {
        let lengths: BTreeSet<usize> =
            (0..800).map(|index| tokens(&mut Counter::new(index, 1), index)).collect();
        assert!(lengths.contains(&1) && lengths.iter().any(|n| *n > 32_000));
        assert!(lengths.iter().any(|n| (3000..=4096).contains(n)) && lengths.len() > 100);
    }
}
