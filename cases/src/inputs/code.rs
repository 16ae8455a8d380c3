//! The code of the token-code probe: signs that spell a token's owner and local index.
//!
//! With all scores equal, an output times its number of visible tokens is the sum of their signs: a small integer, exact in
//! any order of summation. Each dimension is a Walsh function (a parity of index bits); multiplying by the Thue–Morse sign (the
//! parity of all bits) keeps every prefix sum of a rank at 0 or ±1, so that 1/n stays visible at any n. Signs are made from the
//! pair *(owner, local index)* and not from the global position: summed over residues modulo a W that is no power of two, the
//! Thue–Morse sign of the global position grows without bound.

use shardcheck_engine::Configuration;

use crate::AttentionCase;

/// What one dimension spells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sign {
    /// Always +1: weights that do not sum to one, or a lost scale, show here alone.
    One,
    /// Parity of the bits of the local index that the mask keeps.
    Local(usize),
    /// Parity of the whole local index, and one bit of the owner.
    Owner(u32),
}

/// The signs of one case. Dimensions: a constant, the Thue–Morse sign, one for each bit of the owner, one for each bit of the
/// local index (low bits first), then the parities of whole blocks. Where there are fewer dimensions than signs the last ones
/// are left out, where there are more the signs repeat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenCode {
    interleave: usize,
    dcp: usize,
    owner_bits: u32,
    local_bits: u32,
    signs: Vec<Sign>,
    dims: usize,
}

impl TokenCode {
    /// The code for `dims` dimensions and positions below `max_tokens`.
    pub fn new(configuration: &Configuration, max_tokens: usize, dims: usize) -> Self {
        let (interleave, dcp) = (configuration.interleave, configuration.dcp);
        let owner_bits = bits_of(dcp - 1);
        let local_bits = bits_of(max_tokens.div_ceil(interleave * dcp) * interleave);
        let whole = (1usize << local_bits) - 1;
        let mut signs = vec![Sign::One, Sign::Local(whole)];
        signs.extend((0..owner_bits).map(Sign::Owner));
        signs.extend((0..local_bits).map(|bit| Sign::Local(whole & !(1 << bit))));
        let block_bit = configuration.block_size.trailing_zeros();
        if configuration.block_size.is_power_of_two() && block_bit > 0 && block_bit < local_bits {
            // an aligned block sums to zero in all the signs above
            let high = whole & !((1 << block_bit) - 1);
            signs.push(Sign::Local(high));
            signs.extend((block_bit..local_bits).map(|bit| Sign::Local(high & !(1 << bit))));
        }
        signs.truncate(dims);
        Self { interleave, dcp, owner_bits, local_bits, signs, dims }
    }

    /// The code that the inputs of a case use: one dimension for each element of a value.
    pub(crate) fn for_case(case: &AttentionCase) -> Self {
        let longest = case.workload.requests.iter().map(crate::Request::seq_len).max().unwrap_or(0);
        Self::new(&case.configuration, longest.max(1), case.configuration.attention.value_dim())
    }

    /// Dimensions of the code.
    pub fn dims(&self) -> usize {
        self.dims
    }

    /// Whether the dimensions spell every token uniquely.
    pub fn is_complete(&self) -> bool {
        self.signs.len() >= (2 + self.owner_bits + self.local_bits) as usize
    }

    /// The sign that dimension `dim` gives to a position: +1 or −1.
    pub fn sign(&self, dim: usize, position: usize) -> f32 {
        let (owner, local) = self.pair(position);
        let odd = match self.signs[dim % self.signs.len()] {
            Sign::One => 0,
            Sign::Local(mask) => (local & mask).count_ones() & 1,
            Sign::Owner(bit) => (local.count_ones() ^ (owner >> bit) as u32) & 1,
        };
        if odd == 1 { -1.0 } else { 1.0 }
    }

    /// The position that the signs of all dimensions spell, up to one sign common to all of them but the first (a lost token
    /// shows as minus its code). `None` when the code is not complete or nothing below `max_tokens` is spelt so.
    pub fn position(&self, signs: &[f32], max_tokens: usize) -> Option<usize> {
        if !self.is_complete() || signs.len() < self.signs.len() {
            return None;
        }
        let whole = signs[1];
        let differs = |dim: u32| usize::from(signs[dim as usize] * whole < 0.0);
        let owner: usize = (0..self.owner_bits).map(|bit| differs(2 + bit) << bit).sum();
        let local: usize = (0..self.local_bits).map(|bit| differs(2 + self.owner_bits + bit) << bit).sum();
        let position =
            (local / self.interleave * self.dcp + owner) * self.interleave + local % self.interleave;
        let common = self.sign(1, position) * whole;
        let spelt = (1..self.signs.len()).all(|dim| self.sign(dim, position) * common * signs[dim] > 0.0);
        (owner < self.dcp && position < max_tokens && spelt).then_some(position)
    }

    fn pair(&self, position: usize) -> (usize, usize) {
        let run = self.interleave * self.dcp;
        (position / self.interleave % self.dcp, position / run * self.interleave + position % self.interleave)
    }
}

fn bits_of(largest: usize) -> u32 {
    usize::BITS - largest.leading_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::blocks;
    use crate::{Case, Family};

    fn code(dcp: usize, interleave: usize, max_tokens: usize) -> TokenCode {
        let id = format!(
            "decode/tiny-mla/tp{dcp}.dcp{dcp}.h1.s{interleave}.b16.bf16.a2a.hi_lo/9+1.seq/token-code/1"
        );
        let case: Case = id.parse().unwrap();
        assert_eq!(case.family, Family::Decode);
        TokenCode::new(&case.configuration().unwrap(), max_tokens, 64)
    }

    #[test]
    fn every_token_is_spelt_uniquely_whatever_the_world_size() {
        for (dcp, interleave) in [(1, 1), (2, 1), (3, 1), (5, 4), (6, 1), (8, 16), (16, 1)] {
            let code = code(dcp, interleave, 500);
            assert!(code.is_complete());
            for position in 0..500 {
                let signs: Vec<f32> = (0..code.dims()).map(|dim| code.sign(dim, position)).collect();
                assert_eq!(code.position(&signs, 500), Some(position), "W={dcp} S={interleave}");
                let mut lost: Vec<f32> = signs.iter().map(|sign| -sign).collect();
                lost[0] = 1.0;
                assert_eq!(code.position(&lost, 500), Some(position), "a lost token spells minus its code");
            }
        }
    }

    #[test]
    fn prefix_sums_of_a_rank_stay_within_one_for_every_world_size() {
        for dcp in [1, 2, 3, 5, 6, 7, 8, 16] {
            let code = code(dcp, 1, 4096);
            for dim in 1..(2 + code.owner_bits) as usize {
                let mut sums = vec![0.0f32; dcp];
                for position in 0..4096 {
                    sums[position % dcp] += code.sign(dim, position);
                    assert!(sums[position % dcp].abs() <= 1.0, "W={dcp} dim={dim} position={position}");
                }
            }
        }
    }

    #[test]
    fn a_whole_block_sums_to_zero_in_the_index_signs_and_not_in_the_block_signs() {
        let code = code(2, 1, 500);
        let sum = |dim: usize| (0..32).map(|position| code.sign(dim, position)).sum::<f32>();
        assert_eq!(sum(1), 0.0);
        let block_sign = (2 + code.owner_bits + code.local_bits) as usize;
        assert_eq!(sum(block_sign).abs(), 32.0);
    }

    #[test]
    fn too_few_dimensions_say_so_instead_of_naming_a_wrong_token() {
        let full = code(4, 1, 500);
        let short = TokenCode { signs: full.signs[..4].to_vec(), ..full };
        assert!(!short.is_complete());
        assert_eq!(short.position(&[1.0; 64], 500), None);
    }

    #[test]
    fn places_agree_with_the_pair_of_the_code() {
        let case: Case =
            "decode/tiny-mla/tp4.dcp4.h1.s4.b16.bf16.a2a.hi_lo/200+1.seq/token-code/1".parse().unwrap();
        let configuration = case.configuration().unwrap();
        let code = TokenCode::new(&configuration, 201, 64);
        for position in 0..201 {
            let place = blocks::place(&configuration, position);
            let (owner, local) = code.pair(position);
            assert_eq!((place.owner, place.entry * 16 + place.offset), (owner, local));
        }
    }
}
