//! Faults in closed form: what a row would give if tokens, pages or ranks were lost, and what is read back from it.

use rayon::prelude::*;
use shardcheck_formats::contract::{Contract, Merge};
use shardcheck_formats::recipe::Counter;
use shardcheck_references::layout::Layout;
use shardcheck_references::probe::{
    Attribution, Bits, Code, Decoder, KeySelect, Rounding, Seen, Sight, Space, Tally, Token, plain_row,
};

/// One setting: a request of `tokens` tokens over a layout, on a backend.
pub struct Setting {
    /// The code of its tokens.
    pub code: Code,
    /// How outputs round.
    pub contract: Contract,
    /// The row: the last of its request.
    pub sight: Sight,
    right: Tally,
}

/// What became of some faults.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tried {
    /// Faults tried.
    pub tried: usize,
    /// Faults whose output is one of a healthy row.
    pub missed: usize,
    /// Faults that were named.
    pub named: usize,
}

impl Tried {
    fn and(self, other: Self) -> Self {
        Self {
            tried: self.tried + other.tried,
            missed: self.missed + other.missed,
            named: self.named + other.named,
        }
    }

    fn of(attribution: Option<Attribution>, named: impl Fn(&Attribution) -> bool) -> Self {
        let missed = usize::from(attribution.is_none());
        Self { tried: 1, missed, named: usize::from(attribution.as_ref().is_some_and(named)) }
    }
}

impl Setting {
    /// A request of `tokens` tokens.
    pub fn new(
        (world, interleave, block): (usize, usize, usize),
        tokens: usize,
        merge: Merge,
        units: &[usize],
    ) -> Self {
        let layout = Layout::new(world, interleave, block).expect("a layout");
        let code = Code::new(Space { layout, requests: 1, tokens: tokens + 1, blocks: 0 }, units);
        let right = Tally::prefix(&code, 0, tokens);
        let sight = Sight::of(0, 0, tokens);
        Self { code, contract: Contract::bf16_default(merge), sight, right }
    }

    /// Largest tolerance of the spelling dimensions, in tokens.
    pub fn tolerance(&self) -> f64 {
        self.decoder(&[]).expectation(self.sight).tolerance(self.code.spelling())
    }

    /// Whether a healthy row decodes as one.
    pub fn clean_is_silent(&self) -> bool {
        self.decode(&self.right, true).is_none() && self.decode(&self.right, false).is_none()
    }

    fn decoder<'s>(&'s self, rows: &'s [Sight]) -> Decoder<'s> {
        Decoder {
            code: &self.code,
            rounding: Rounding::of(&self.contract),
            rows,
            written: std::slice::from_ref(&self.sight.visible),
            tables: &[],
        }
    }

    fn decode(&self, tally: &Tally, with_lse: bool) -> Option<Attribution> {
        let (out, lse) = plain_row(tally, self.code.dims(), &self.contract);
        let seen = Seen { out: &out, lse: with_lse.then_some(lse) };
        self.decoder(&[]).decode_against(self.sight, &self.right, &seen)
    }

    /// Every token of the request dropped (`times` −1) or counted twice (+1), read back from the output alone.
    pub fn every_token(&self, times: i64) -> Tried {
        (0..self.sight.visible)
            .into_par_iter()
            .map(|position| {
                let token = Token { request: 0, position };
                let mut tally = self.right.clone();
                tally.add(&self.code, token, self.code.layout().owner(position), times);
                let last = position + 1 == self.sight.visible;
                Tried::of(self.decode(&tally, false), |attribution| match attribution {
                    Attribution::Lost(found) => times < 0 && *found == token,
                    Attribution::PrefixShort { seen } => times < 0 && last && *seen == position,
                    Attribution::Doubled(found) => times > 0 && *found == token,
                    _ => false,
                })
            })
            .reduce(Tried::default, Tried::and)
    }

    fn draws(&self, count: usize, seed: u64, draw: impl Fn(&mut Counter) -> Tried + Sync) -> Tried {
        (0..count)
            .into_par_iter()
            .map(|index| draw(&mut Counter::new(seed, index as u32)))
            .reduce(Tried::default, Tried::and)
    }

    fn span(&self, page: usize, rank: usize) -> std::ops::Range<usize> {
        let (block, len) = (self.code.layout().block(), self.right.counts()[rank] as usize);
        (page * block).min(len)..((page + 1) * block).min(len)
    }

    fn pages(&self) -> usize {
        (self.right.counts()[0] as usize).div_ceil(self.code.layout().block())
    }

    /// Pages lost: on all ranks, or on one.
    pub fn pages_lost(&self, count: usize) -> Tried {
        let world = self.code.layout().world();
        self.draws(count, 1, |draw| {
            let page = draw.below(self.pages() as u64) as usize;
            let only = (draw.below(2) == 0).then(|| draw.below(world as u64) as usize);
            let mut tally = self.right.clone();
            for rank in (0..world).filter(|rank| only.is_none_or(|only| only == *rank)) {
                tally.add_span(&self.code, 0, rank, self.span(page, rank), -1);
            }
            if tally == self.right {
                // the rank has nothing of the last page
                return Tried::default();
            }
            Tried::of(
                self.decode(&tally, true),
                |found| matches!(found, Attribution::PageLost { page: found, .. } if found.page == page),
            )
        })
    }

    /// Whole pages read from another whole page's place: on all ranks, or on one. Named by the caller's own means: a search
    /// over all pairs is not made here.
    pub fn pages_aliased(&self, count: usize) -> Tried {
        let (world, block) = (self.code.layout().world(), self.code.layout().block());
        let whole = *self.right.counts().last().expect("a rank") as usize / block;
        self.draws(count, 2, |draw| {
            let page = draw.below(whole as u64) as usize;
            let read = (page + 1 + draw.below(whole as u64 - 1) as usize) % whole;
            let only = (draw.below(2) == 0).then(|| draw.below(world as u64) as usize);
            let mut tally = self.right.clone();
            for rank in (0..world).filter(|rank| only.is_none_or(|only| only == *rank)) {
                tally.add_span(&self.code, 0, rank, self.span(page, rank), -1);
                tally.add_span(&self.code, 0, rank, self.span(read, rank), 1);
            }
            let (out, _) = plain_row(&tally, self.code.dims(), &self.contract);
            let seen = Seen { out: &out, lse: None };
            Tried { tried: 1, missed: usize::from(self.is_healthy(&seen)), named: 0 }
        })
    }

    fn is_healthy(&self, seen: &Seen) -> bool {
        let expected = self.decoder(&[]).expectation(self.sight);
        expected.elements.iter().zip(seen.out).all(|(element, seen)| element.admits(*seen))
    }

    /// A row of the cache overwritten by a copy of any other one, or of the row beside it on the same rank, which is always
    /// named.
    pub fn rows_overwritten(&self, count: usize, beside: bool) -> Tried {
        let (layout, tokens) = (*self.code.layout(), self.sight.visible);
        self.draws(count, 3, |draw| {
            let lost = draw.below(tokens as u64) as usize;
            let rank = layout.owner(lost);
            let neighbour = layout.global_position(layout.local_index(lost) ^ 1, rank);
            let counted = if beside { neighbour } else { draw.below(tokens as u64) as usize };
            if counted == lost || counted >= tokens {
                return Tried::default();
            }
            let [lost, counted] = [lost, counted].map(|position| Token { request: 0, position });
            let mut tally = self.right.clone();
            tally.add(&self.code, lost, rank, -1);
            tally.add(&self.code, counted, rank, 1);
            Tried::of(
                self.decode(&tally, false),
                |found| matches!(found, Attribution::Exchanged { lost: a, counted: b, .. } if (*a, *b) == (lost, counted)),
            )
        })
    }

    /// Everything of a rank lost.
    pub fn ranks_missing(&self, count: usize) -> Tried {
        let layout = *self.code.layout();
        self.draws(count, 4, |draw| {
            let rank = draw.below(layout.world() as u64) as usize;
            // another length each time, so that draws differ
            let visible = self.sight.visible - draw.below(self.sight.visible as u64 / 2) as usize;
            let mut lens: Vec<usize> =
                (0..layout.world()).map(|rank| layout.local_len(visible, rank)).collect();
            lens[rank] = 0;
            let (out, lse) =
                plain_row(&Tally::shares(&self.code, 0, &lens), self.code.dims(), &self.contract);
            let sight = Sight { visible, ..self.sight };
            let found = self.decoder(&[]).decode(sight, &Seen { out: &out, lse: Some(lse) });
            Tried::of(found, |found| *found == Attribution::RankMissing { rank })
        })
    }

    /// Keys of two tokens exchanged while their values stay (which is what exchanged values give too): under every selector,
    /// read back from the halves. Named where the pair is among those that explain what was seen.
    pub fn mispaired(&self, select: &KeySelect, count: usize) -> Tried {
        let tokens = self.sight.visible as u64;
        let rounding = Rounding::of(&self.contract);
        self.draws(count, 5, |draw| {
            let first = draw.below(tokens) as usize;
            let near = draw.below(2) == 0 && first + 1 < tokens as usize;
            let second = if near { first + 1 } else { draw.below(tokens) as usize };
            if first == second {
                return Tried::default();
            }
            let pair = [first, second].map(|position| Token { request: 0, position });
            let mut noticed = false;
            let mut differences = Vec::new();
            for selector in (0..select.launches()).flat_map(|launch| select.selectors(launch)) {
                let (right, _) = select.chosen(&self.code, selector, self.sight);
                let expected =
                    select.expectation(&self.code, selector, self.sight, self.code.dims(), &rounding);
                let mut seen = right.clone();
                for (slot, key) in [(pair[0], pair[1]), (pair[1], pair[0])] {
                    let rank = self.code.layout().owner(slot.position);
                    let held = |token: Token| i64::from(self.code.bit(selector.bit, token) == selector.set);
                    seen.add(&self.code, slot, rank, held(key) - held(slot));
                }
                let (out, _) = plain_row(&seen, self.code.dims(), &self.contract);
                noticed |= expected.elements.iter().zip(&out).any(|(element, seen)| !element.admits(*seen));
                let spelt = self.code.spelling();
                let whole = |dim: usize| (out[dim] * right.tokens() as f64).round() as i64 - right.sum(dim);
                differences.push((selector, spelt.map(whole).collect()));
            }
            let found = KeySelect::mispaired(&self.decoder(&[]), self.sight, &differences);
            let named = found.contains(&(pair[0].min(pair[1]), pair[0].max(pair[1])));
            Tried { tried: 1, missed: usize::from(!noticed), named: usize::from(named) }
        })
    }

    /// Whether sums of a dimension over a page are zero, so that the page shows in other dimensions alone.
    pub fn pages_hide_in(&self, dim: usize) -> bool {
        let block = self.code.layout().block();
        (0..self.pages() - 1)
            .all(|page| self.code.sum(dim, 0, 0, page * block..(page + 1) * block, Bits::default()) == 0)
    }
}
