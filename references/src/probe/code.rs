//! The code that values spell: signs from which a sum of tokens can be read back.
//!
//! Every dimension gives a token +1 or −1 (a Walsh function: the parity of some bits of its place), or 1 on one rank and
//! 0 elsewhere. With all scores equal, an output times the number of tokens is the sum of their signs, an integer. Signs
//! are made from the pair *(owner, local index)*: the parity of all bits of the local index is the Thue–Morse sequence,
//! whose prefix sums are 0 or 1, so that the sum of each rank stays within 2 at any length, any world size and any
//! interleave, and a floating-point output resolves 1/n however large n is. (The Thue–Morse sign of the *global*
//! position, summed over residues modulo a world size that is no power of two, grows without bound.)

use std::ops::Range;

use crate::layout::Layout;

/// A token, or a slot that holds none, in the words of its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token {
    /// Request; [`Code::nobody`] for a slot that belongs to no token.
    pub request: usize,
    /// Global position in the request. A slot of nobody has the position that it would have in a request whose virtual
    /// blocks are the physical ones in order.
    pub position: usize,
}

/// What is to be told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// Owner and local index of a position.
    pub layout: Layout,
    /// Requests of the batch.
    pub requests: usize,
    /// Positions of the longest request, those behind its length included that share its last block.
    pub tokens: usize,
    /// Physical blocks of a rank, where slots of nobody are coded too; 0 where they are not.
    pub blocks: usize,
}

/// Bits of a place whose parity is a sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bits {
    /// Of the request.
    pub request: usize,
    /// Of the rank that owns the token.
    pub owner: usize,
    /// Of the page: local index divided by the block size.
    pub page: usize,
    /// Of the offset in the page.
    pub offset: usize,
}

impl Bits {
    /// The bits that are in one of both.
    fn toggled(self, other: Self) -> Self {
        Self {
            request: self.request ^ other.request,
            owner: self.owner ^ other.owner,
            page: self.page ^ other.page,
            offset: self.offset ^ other.offset,
        }
    }
}

/// What one dimension of a value holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sign {
    /// +1 for every token: weights that do not sum to one and a lost scale show here alone.
    One,
    /// The parity of these bits.
    Parity(Bits),
    /// 1 for the tokens of one rank, 0 for those of others: the output is the rank's weight.
    Rank(usize),
}

/// The signs of a batch, dimension by dimension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Code {
    space: Space,
    bits: Widths,
    signs: Vec<Sign>,
    spelling: Range<usize>,
}

/// Number of bits of each part of a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Widths {
    request: u32,
    owner: u32,
    page: u32,
    offset: u32,
}

/// One bit of a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bit {
    /// Of the request.
    Request(u32),
    /// Of the owner.
    Owner(u32),
    /// Of the page.
    Page(u32),
    /// Of the offset in the page.
    Offset(u32),
}

impl Bit {
    /// The mask that holds this bit alone.
    pub fn mask(self) -> Bits {
        let none = Bits::default();
        match self {
            Self::Request(bit) => Bits { request: 1 << bit, ..none },
            Self::Owner(bit) => Bits { owner: 1 << bit, ..none },
            Self::Page(bit) => Bits { page: 1 << bit, ..none },
            Self::Offset(bit) => Bits { offset: 1 << bit, ..none },
        }
    }
}

impl Code {
    /// The code of a space. Its dimensions, in this order:
    ///
    /// * the constant;
    /// * tokens: the parity of the whole local index; the same with each bit of owner and request flipped in; the same
    ///   with each bit of the local index left out. A lost token shows as minus its signs, a doubled one as plus them;
    /// * pages: likewise from the page number alone, since a whole page sums to zero in the signs above;
    /// * one dimension a rank, where there are several;
    /// * likewise for each further unit in `units`: tokens of a rank that a kernel may lose or misread together.
    ///
    /// # Panics
    /// A unit does not divide the block size or is no power of two.
    pub fn new(space: Space, units: &[usize]) -> Self {
        let block = space.layout.block();
        let pages = space.tokens.max(1).div_ceil(space.layout.virtual_block_tokens()).max(space.blocks);
        let nobody = usize::from(space.blocks > 0);
        let bits = Widths {
            request: bits_for(space.requests + nobody),
            owner: bits_for(space.layout.world()),
            page: bits_for(pages),
            offset: bits_for(block),
        };
        let mut code = Self { space, bits, signs: vec![Sign::One], spelling: 1..1 };
        code.push_level(0);
        code.spelling = 1..code.signs.len();
        if block > 1 && bits.page > 0 {
            code.push_level(bits.offset);
        }
        if space.layout.world() > 1 {
            code.signs.extend((0..space.layout.world()).map(Sign::Rank));
        }
        for unit in units.iter().filter(|unit| **unit > 1 && **unit < block) {
            assert!(
                unit.is_power_of_two() && block.is_multiple_of(*unit),
                "a unit of {unit} tokens is no power of two that divides a block of {block}"
            );
            code.push_level(unit.trailing_zeros());
        }
        code
    }

    /// The signs that see a place from `low` bits of the offset upward.
    fn push_level(&mut self, low: u32) {
        let whole = Bits {
            page: mask(self.bits.page),
            offset: mask(self.bits.offset) & !mask(low),
            ..Bits::default()
        };
        self.signs.push(Sign::Parity(whole));
        for bit in self.index_bits(low) {
            self.signs.push(Sign::Parity(whole.toggled(bit.mask())));
        }
    }

    /// The bits of a place from `low` bits of the offset upward, in the order of the dimensions.
    fn index_bits(&self, low: u32) -> Vec<Bit> {
        let bits = self.bits;
        (0..bits.owner)
            .map(Bit::Owner)
            .chain((0..bits.request).map(Bit::Request))
            .chain((low..bits.offset).map(Bit::Offset))
            .chain((0..bits.page).map(Bit::Page))
            .collect()
    }

    /// The bits that tell the tokens of one request apart: owner, offset, page.
    pub fn token_bits(&self) -> Vec<Bit> {
        self.index_bits(0).into_iter().filter(|bit| !matches!(bit, Bit::Request(_))).collect()
    }

    /// Number of dimensions.
    pub fn dims(&self) -> usize {
        self.signs.len()
    }

    /// What dimension `dim` holds.
    pub fn sign_of(&self, dim: usize) -> Sign {
        self.signs[dim]
    }

    /// The dimensions that spell a token.
    pub fn spelling(&self) -> Range<usize> {
        self.spelling.clone()
    }

    /// The dimensions of each launch, where a value has room for `width` of them.
    ///
    /// # Panics
    /// `width` is 0.
    pub fn launches(&self, width: usize) -> Vec<Range<usize>> {
        (0..self.dims()).step_by(width).map(|first| first..(first + width).min(self.dims())).collect()
    }

    /// What is told apart.
    pub fn space(&self) -> &Space {
        &self.space
    }

    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.space.layout
    }

    /// The number that stands for the request of slots without a token.
    pub fn nobody(&self) -> usize {
        self.space.requests
    }

    /// The slot `offset` of physical block `block` on `rank`, as a token of nobody.
    pub fn slot(&self, rank: usize, block: usize, offset: usize) -> Token {
        let local = block * self.layout().block() + offset;
        Token { request: self.nobody(), position: self.layout().global_position(local, rank) }
    }

    /// Rank, page and offset of a token.
    pub fn place(&self, token: Token) -> (usize, usize, usize) {
        let (layout, block) = (self.layout(), self.layout().block());
        let local = layout.local_index(token.position);
        (layout.owner(token.position), local / block, local % block)
    }

    /// What dimension `dim` of a token's value holds: −1, 0 or 1.
    pub fn sign(&self, dim: usize, token: Token) -> i64 {
        let place = self.place(token);
        self.sign_at(dim, token.request, place)
    }

    /// All dimensions of a token's value.
    pub fn signs(&self, token: Token, out: &mut Vec<i64>) {
        let place = self.place(token);
        out.clear();
        out.extend((0..self.dims()).map(|dim| self.sign_at(dim, token.request, place)));
    }

    fn sign_at(&self, dim: usize, request: usize, (owner, page, offset): (usize, usize, usize)) -> i64 {
        match self.signs[dim] {
            Sign::One => 1,
            Sign::Rank(rank) => i64::from(rank == owner),
            Sign::Parity(bits) => {
                let word = (request & bits.request).count_ones()
                    + (owner & bits.owner).count_ones()
                    + (page & bits.page).count_ones()
                    + (offset & bits.offset).count_ones();
                1 - 2 * i64::from(word & 1)
            }
        }
    }

    /// Whether a bit of a token's place is set.
    pub fn bit(&self, bit: Bit, token: Token) -> bool {
        let (owner, page, offset) = self.place(token);
        match bit {
            Bit::Request(b) => token.request >> b & 1 == 1,
            Bit::Owner(b) => owner >> b & 1 == 1,
            Bit::Page(b) => page >> b & 1 == 1,
            Bit::Offset(b) => offset >> b & 1 == 1,
        }
    }

    /// Sum of dimension `dim` over the local indices in `span` of one request on one rank, in closed form; with `flipped`
    /// bits counted into the parity (a constant and a rank's dimension count as the parity of nothing).
    pub fn sum(&self, dim: usize, request: usize, rank: usize, span: Range<usize>, flipped: Bits) -> i64 {
        let bits = match self.signs[dim] {
            Sign::Rank(other) if other != rank => return 0,
            Sign::One | Sign::Rank(_) => flipped,
            Sign::Parity(bits) => bits.toggled(flipped),
        };
        let block = self.layout().block();
        let below = |end: usize| {
            let (page, offset) = (end / block, end % block);
            prefix(bits.page, page) * prefix(bits.offset, block)
                + parity(page & bits.page) * prefix(bits.offset, offset)
        };
        let common = parity(request & bits.request) * parity(rank & bits.owner);
        common * (below(span.end) - below(span.start))
    }

    /// The token that the spelling dimensions give as plus or minus its signs, and which of both. `None` where they spell
    /// nothing in the space.
    pub fn spell(&self, signs: &[i64]) -> Option<(Token, i64)> {
        let whole = *signs.first().filter(|whole| whole.abs() == 1)?;
        let mut place = Bits::default();
        for (bit, sign) in self.index_bits(0).into_iter().zip(&signs[1..self.spelling.len()]) {
            if sign.abs() != 1 {
                return None;
            }
            if sign * whole < 0 {
                place = place.toggled(bit.mask());
            }
        }
        let token = self.token_at(place)?;
        Some((token, whole * self.sign(self.spelling.start, token)))
    }

    /// The token at a place, if the space has it.
    pub(super) fn token_at(&self, place: Bits) -> Option<Token> {
        let (layout, space) = (self.layout(), &self.space);
        let pages = if place.request == self.nobody() {
            space.blocks
        } else {
            space.tokens.div_ceil(layout.virtual_block_tokens())
        };
        let known = place.request < space.requests + usize::from(space.blocks > 0)
            && place.owner < layout.world()
            && place.offset < layout.block()
            && place.page < pages;
        let local = place.page * layout.block() + place.offset;
        known.then(|| Token { request: place.request, position: layout.global_position(local, place.owner) })
    }

    /// The bits of a token's place.
    pub(super) fn bits_of(&self, token: Token) -> Bits {
        let (owner, page, offset) = self.place(token);
        Bits { request: token.request, owner, page, offset }
    }

    /// The bits that [`Self::spell`] reads, behind the first spelling dimension.
    pub(super) fn spelt_bits(&self) -> Vec<Bit> {
        self.index_bits(0)
    }

    /// The token whose place differs from that of `token` in just these bits, if the space has it.
    pub(super) fn across(&self, token: Token, bits: Bits) -> Option<Token> {
        self.token_at(self.bits_of(token).toggled(bits))
    }
}

/// Bits that number `count` things from 0.
fn bits_for(count: usize) -> u32 {
    usize::BITS - count.saturating_sub(1).leading_zeros()
}

fn mask(bits: u32) -> usize {
    (1 << bits) - 1
}

fn parity(word: usize) -> i64 {
    1 - 2 * i64::from(word.count_ones() & 1)
}

/// `Σ_{x<end} (−1)^popcount(x & mask)`: an aligned run of `2^k` numbers sums to zero unless the mask has none of its `k`
/// bits.
fn prefix(mask: usize, end: usize) -> i64 {
    let mut sum = 0;
    let mut rest = end;
    while rest > 0 {
        let run = 1 << rest.trailing_zeros();
        rest -= run;
        if mask & (run - 1) == 0 {
            sum += parity(rest & mask) * run as i64;
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(world: usize, interleave: usize, block: usize, requests: usize, tokens: usize) -> Code {
        let layout = Layout::new(world, interleave, block).unwrap();
        Code::new(Space { layout, requests, tokens, blocks: 5 }, &[])
    }

    #[test]
    fn every_token_and_every_free_slot_is_spelt_uniquely_lost_or_doubled() {
        for (world, interleave, block) in
            [(1, 1, 1), (1, 1, 6), (2, 1, 4), (3, 2, 4), (5, 4, 4), (6, 1, 96), (7, 1, 3), (8, 16, 16)]
        {
            let code = code(world, interleave, block, 3, 200);
            let mut signs = Vec::new();
            let own = (0..3).flat_map(|request| (0..200).map(move |position| Token { request, position }));
            let slots = (0..world).map(|rank| code.slot(rank, 4, block - 1));
            for token in own.chain(slots) {
                code.signs(token, &mut signs);
                let spelt = &signs[code.spelling()];
                assert_eq!(code.spell(spelt), Some((token, 1)), "W={world} S={interleave} B={block}");
                let lost: Vec<i64> = spelt.iter().map(|sign| -sign).collect();
                assert_eq!(code.spell(&lost), Some((token, -1)));
            }
        }
    }

    #[test]
    fn sums_in_closed_form_are_sums_of_signs() {
        for (world, interleave, block) in [(1, 1, 6), (2, 2, 8), (3, 1, 16), (6, 5, 10), (8, 1, 3)] {
            let code = code(world, interleave, block, 2, 300);
            let flips = [Bits::default(), Bits { offset: 1, owner: 1, ..Bits::default() }];
            for (dim, flipped) in (0..code.dims()).flat_map(|dim| flips.map(|flip| (dim, flip))) {
                for rank in 0..world {
                    let mut sum = 0;
                    for local in 0..30 {
                        assert_eq!(sum, code.sum(dim, 1, rank, 0..local, flipped), "{dim} {rank} {local}");
                        let position = code.layout().global_position(local, rank);
                        let place = code.place(Token { request: 1, position });
                        let flip = parity(flipped.offset & place.2) * parity(flipped.owner & place.0);
                        sum += code.sign(dim, Token { request: 1, position }) * flip;
                    }
                    let tail = code.sum(dim, 1, rank, 7..30, flipped);
                    assert_eq!(tail, sum - code.sum(dim, 1, rank, 0..7, flipped));
                }
            }
        }
    }

    #[test]
    fn sums_of_a_rank_stay_within_two_whatever_the_world_size() {
        for (world, interleave, block) in [(3, 1, 16), (5, 1, 64), (6, 4, 16), (7, 16, 16), (8, 1, 1)] {
            let code = code(world, interleave, block, 1, 100_003);
            let most = code.layout().local_len(100_003, 0);
            for dim in code.spelling() {
                for local in (0..most).step_by(17) {
                    let sum = code.sum(dim, 0, 0, 0..local, Bits::default());
                    assert!(sum.abs() <= 2, "W={world} S={interleave} dim {dim}, {local}: {sum}");
                }
            }
        }
    }

    #[test]
    fn sums_of_a_rank_stay_small_where_a_block_is_no_power_of_two() {
        for block in [3, 6, 12, 96, 1536] {
            let code = code(3, 1, block, 1, 100_003);
            let most = code.layout().local_len(100_003, 0);
            let largest = code
                .spelling()
                .flat_map(|dim| (0..most).step_by(7).map(move |local| (dim, local)))
                .map(|(dim, local)| code.sum(dim, 0, 0, 0..local, Bits::default()).abs())
                .max();
            assert!(largest.is_some_and(|sum| sum <= 8), "B={block}: {largest:?}");
        }
    }

    #[test]
    fn a_whole_page_shows_in_the_page_signs_alone() {
        let code = code(2, 1, 16, 1, 500);
        for dim in code.spelling() {
            assert_eq!(code.sum(dim, 0, 1, 16..32, Bits::default()), 0, "dim {dim}");
        }
        let page = code.spelling().end;
        assert_eq!(code.sum(page, 0, 1, 16..32, Bits::default()).abs(), 16);
    }

    #[test]
    fn a_million_tokens_over_eight_ranks_fit_a_head_of_sixty_four() {
        let layout = Layout::new(8, 1, 16).unwrap();
        let code = Code::new(Space { layout, requests: 1, tokens: 1 << 20, blocks: 0 }, &[]);
        assert!(code.dims() <= 64, "{} dimensions", code.dims());
        let launches = code.launches(64);
        assert_eq!(launches.len(), 1);
        assert_eq!(launches[0], 0..code.dims());
        assert_eq!(code.launches(12).len(), code.dims().div_ceil(12));
    }

    #[test]
    #[should_panic(expected = "no power of two")]
    fn a_unit_that_straddles_blocks_is_refused() {
        let layout = Layout::new(1, 1, 96).unwrap();
        Code::new(Space { layout, requests: 1, tokens: 500, blocks: 0 }, &[64]);
    }

    #[test]
    fn further_units_add_a_level_each() {
        let layout = Layout::new(1, 1, 64).unwrap();
        let space = Space { layout, requests: 1, tokens: 500, blocks: 0 };
        let (plain, finer) = (Code::new(space, &[]), Code::new(space, &[16]));
        // the whole, two bits of the offset above a unit, three of the page
        assert_eq!(finer.dims() - plain.dims(), 1 + 2 + 3);
        let unit = finer.dims() - 6;
        assert_eq!(finer.sum(unit, 0, 0, 16..32, Bits::default()).abs(), 16);
    }
}
