//! Python's `random.Random`: the Mersenne Twister with CPython's seeding, `random`, `randrange` and `sample`.
//!
//! lm-eval draws its few-shot examples from it, so a prompt can only be reproduced by reproducing the generator.
//! Sources: Matsumoto & Nishimura 1998 (MT19937, `init_by_array`); CPython `Lib/random.py` and `_randommodule.c`.

use std::collections::HashSet;

const STATE_WORDS: usize = 624;
const SHIFT_WORDS: usize = 397;
const MATRIX: u32 = 0x9908_b0df;
const UPPER_BIT: u32 = 0x8000_0000;
const LOWER_BITS: u32 = 0x7fff_ffff;

/// A generator whose stream equals that of `random.Random(seed)`.
#[derive(Clone)]
pub struct PythonRandom {
    state: [u32; STATE_WORDS],
    position: usize,
}

impl PythonRandom {
    /// The generator that `random.Random(seed)` makes for a non-negative integer seed.
    pub fn new(seed: u64) -> Self {
        let low = seed as u32;
        let high = (seed >> 32) as u32;
        if high == 0 { Self::from_key(&[low]) } else { Self::from_key(&[low, high]) }
    }

    /// The next 32 bits of the stream.
    pub fn next_u32(&mut self) -> u32 {
        if self.position == STATE_WORDS {
            self.refill();
        }
        let mut word = self.state[self.position];
        self.position += 1;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c_5680;
        word ^= (word << 15) & 0xefc6_0000;
        word ^ (word >> 18)
    }

    /// A uniform number in `[0, 1)` with 53 bits, as `random.random()`.
    pub fn uniform(&mut self) -> f64 {
        let high = f64::from(self.next_u32() >> 5);
        let low = f64::from(self.next_u32() >> 6);
        (high * 67_108_864.0 + low) / 9_007_199_254_740_992.0
    }

    /// A uniform integer in `0..limit`, as `random.randrange(limit)`.
    ///
    /// # Panics
    /// When `limit` is zero or does not fit into 32 bits.
    pub fn below(&mut self, limit: usize) -> usize {
        let limit = u32::try_from(limit).expect("limits beyond 32 bits are not drawn here");
        assert!(limit > 0, "there is no number below zero");
        let bits = u32::BITS - limit.leading_zeros();
        loop {
            let draw = self.next_u32() >> (u32::BITS - bits);
            if draw < limit {
                return draw as usize;
            }
        }
    }

    /// `count` distinct indices out of `0..population`, in the order of `random.sample(range(population), count)`.
    ///
    /// # Panics
    /// When `count` exceeds `population`.
    pub fn sample(&mut self, population: usize, count: usize) -> Vec<usize> {
        assert!(count <= population, "cannot draw {count} of {population} without repetition");
        // CPython draws from a list while that is smaller than a set of the same draws would be.
        let set_size = if count > 5 { 21 + smallest_power_of_four_above(count * 3) } else { 21 };
        if population <= set_size {
            self.sample_from_pool(population, count)
        } else {
            self.sample_with_rejection(population, count)
        }
    }

    fn sample_from_pool(&mut self, population: usize, count: usize) -> Vec<usize> {
        let mut pool: Vec<usize> = (0..population).collect();
        (0..count)
            .map(|drawn| {
                let last = population - drawn - 1;
                let at = self.below(last + 1);
                let chosen = pool[at];
                pool[at] = pool[last];
                chosen
            })
            .collect()
    }

    fn sample_with_rejection(&mut self, population: usize, count: usize) -> Vec<usize> {
        let mut seen = HashSet::with_capacity(count);
        let mut chosen = Vec::with_capacity(count);
        while chosen.len() < count {
            let draw = self.below(population);
            if seen.insert(draw) {
                chosen.push(draw);
            }
        }
        chosen
    }

    fn from_key(key: &[u32]) -> Self {
        let mut state = linear_fill(19_650_218);
        let mut i = 1;
        let mut j = 0;
        for _ in 0..STATE_WORDS.max(key.len()) {
            let mixed = (state[i - 1] ^ (state[i - 1] >> 30)).wrapping_mul(1_664_525);
            state[i] = (state[i] ^ mixed).wrapping_add(key[j]).wrapping_add(j as u32);
            (i, j) = (next_index(&mut state, i), (j + 1) % key.len());
        }
        for _ in 0..STATE_WORDS - 1 {
            let mixed = (state[i - 1] ^ (state[i - 1] >> 30)).wrapping_mul(1_566_083_941);
            state[i] = (state[i] ^ mixed).wrapping_sub(i as u32);
            i = next_index(&mut state, i);
        }
        state[0] = UPPER_BIT;
        Self { state, position: STATE_WORDS }
    }

    fn refill(&mut self) {
        for i in 0..STATE_WORDS {
            let joined = (self.state[i] & UPPER_BIT) | (self.state[(i + 1) % STATE_WORDS] & LOWER_BITS);
            let twist = if joined & 1 == 1 { MATRIX } else { 0 };
            self.state[i] = self.state[(i + SHIFT_WORDS) % STATE_WORDS] ^ (joined >> 1) ^ twist;
        }
        self.position = 0;
    }
}

fn linear_fill(seed: u32) -> [u32; STATE_WORDS] {
    let mut state = [seed; STATE_WORDS];
    for i in 1..STATE_WORDS {
        let previous = state[i - 1] ^ (state[i - 1] >> 30);
        state[i] = previous.wrapping_mul(1_812_433_253).wrapping_add(i as u32);
    }
    state
}

fn next_index(state: &mut [u32; STATE_WORDS], i: usize) -> usize {
    if i + 1 == STATE_WORDS {
        state[0] = state[STATE_WORDS - 1];
        1
    } else {
        i + 1
    }
}

/// `4 ** ceil(log(value, 4))`; exact here because a multiple of three is never a power of four.
fn smallest_power_of_four_above(value: usize) -> usize {
    let mut power = 1;
    while power < value {
        power *= 4;
    }
    power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_vector_of_init_by_array_comes_out() {
        // First outputs of mt19937ar.out, published with the generator.
        let mut twister = PythonRandom::from_key(&[0x123, 0x234, 0x345, 0x456]);
        let first: Vec<u32> = (0..5).map(|_| twister.next_u32()).collect();
        assert_eq!(first, [1_067_595_299, 955_945_823, 477_289_528, 4_107_218_783, 4_228_976_476]);
    }

    #[test]
    fn floats_and_integers_equal_cpython() {
        // CPython 3.11: r = random.Random(1234); [r.random() for _ in range(3)]
        let mut random = PythonRandom::new(1234);
        let floats: Vec<f64> = (0..3).map(|_| random.uniform()).collect();
        assert_eq!(floats, PYTHON_FLOATS);
        // CPython 3.11: r = random.Random(2**40 + 7); [r.randrange(1000) for _ in range(6)]
        let mut random = PythonRandom::new((1 << 40) + 7);
        let integers: Vec<usize> = (0..6).map(|_| random.below(1000)).collect();
        assert_eq!(integers, PYTHON_INTEGERS);
    }

    #[test]
    fn samples_equal_cpython_on_both_of_its_routes() {
        // CPython 3.11: random.Random(1234).sample(range(7473), 5), then (range(7473), 8) from the same stream
        let mut random = PythonRandom::new(1234);
        assert_eq!(random.sample(7473, 5), [6374, 3610, 957, 61, 742]);
        assert_eq!(random.sample(7473, 8), PYTHON_EIGHT);
        // CPython 3.11: random.Random(0).sample(range(30), 10): small enough for the pool
        assert_eq!(PythonRandom::new(0).sample(30, 10), PYTHON_POOL);
    }

    #[test]
    #[should_panic(expected = "without repetition")]
    fn more_than_everything_cannot_be_drawn() {
        PythonRandom::new(1).sample(3, 4);
    }

    const PYTHON_FLOATS: [f64; 3] = [0.9664535356921388, 0.4407325991753527, 0.007491470058587191];
    const PYTHON_INTEGERS: [usize; 6] = [628, 765, 834, 960, 967, 654];
    const PYTHON_EIGHT: [usize; 8] = [7462, 6610, 4769, 286, 5501, 5677, 687, 806];
    const PYTHON_POOL: [usize; 10] = [27, 12, 24, 13, 1, 8, 16, 15, 28, 9];
}
