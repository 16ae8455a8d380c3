//! Sets of tokens that a row may have seen by a usual mistake, tried one after the other.

use super::attribution::{Attribution, Page, Sight};
use super::code::{Bits, Sign};
use super::decode::{Candidate, Counts, Decoder, Seen};
use super::tally::Tally;
use crate::layout::Layout;

/// Most pairs of pages that are tried: 4,096 pages against each other.
const MOST_PAGE_PAIRS: usize = 1 << 24;
/// Most tokens of a request whose placement is tried token by token.
const MOST_PLACED: usize = 1 << 16;
/// Most combinations of local lengths that are tried.
const MOST_SHARES: usize = 4096;

impl Decoder<'_> {
    /// The first tokens of the same request, but another number of them.
    pub(super) fn as_other_prefix(&self, sight: Sight, counts: &Counts, seen: &Seen) -> Option<Attribution> {
        let block = self.code.layout().virtual_block_tokens();
        let most = self.code.space().tokens.div_ceil(block) * block;
        let tried = *counts.start()..=(*counts.end()).min(most as i64);
        for tokens in tried.map(|tokens| tokens as usize).filter(|tokens| *tokens != sight.visible) {
            if !self.is(&Tally::prefix(self.code, sight.request, tokens), seen) {
                continue;
            }
            return Some(match tokens {
                0 => Attribution::RowMisplaced { request: None, seen: 0 },
                seen if seen < sight.visible => Attribution::PrefixShort { seen },
                seen => Attribution::PrefixLong { seen },
            });
        }
        None
    }

    /// What a row of another request has to see, as many tokens of another request, or all of them.
    pub(super) fn as_other_row(&self, sight: Sight, counts: &Counts, seen: &Seen) -> Option<Attribution> {
        let rows = self.rows.iter().map(|row| (row.request, row.visible));
        let whole = self.written.iter().copied().enumerate();
        let others = (0..self.written.len()).map(|request| (request, sight.visible)).chain(whole);
        for (request, visible) in rows.chain(others).filter(|(request, _)| *request != sight.request) {
            let counted = counts.contains(&(visible as i64));
            if counted && visible > 0 && self.is(&Tally::prefix(self.code, request, visible), seen) {
                return Some(Attribution::RowMisplaced { request: Some(request), seen: visible });
            }
        }
        None
    }

    /// The first tokens of each rank, but wrong numbers of them.
    pub(super) fn as_other_shares(
        &self,
        sight: Sight,
        right: &Tally,
        counts: &Counts,
        seen: &Seen,
    ) -> Option<Attribution> {
        let own: Vec<usize> = right.counts().iter().map(|count| *count as usize).collect();
        let found =
            self.usual_shares(sight, &own, counts).chain(self.seen_shares(counts, seen)).find(|shares| {
                *shares != own && self.is(&Tally::shares(self.code, sight.request, shares), seen)
            })?;
        let layout = self.code.layout();
        let dealt = |interleave: usize| {
            let other = self.other_interleave(interleave)?;
            let lens: Vec<usize> = (0..own.len()).map(|rank| other.local_len(sight.visible, rank)).collect();
            (lens == found).then_some(interleave)
        };
        if let Some(interleave) = (1..=layout.block()).find_map(dealt) {
            return Some(Attribution::WrongInterleave { interleave });
        }
        let mut differing = (0..own.len()).filter(|rank| own[*rank] != found[*rank]);
        match (differing.next(), differing.next()) {
            (Some(rank), None) if found[rank] == 0 => Some(Attribution::RankMissing { rank }),
            _ => Some(Attribution::WrongShares { seen: found }),
        }
    }

    /// Local lengths by usual mistakes: a rank missing, one rank off, all ranks alike, another interleave.
    fn usual_shares<'s>(
        &'s self,
        sight: Sight,
        own: &'s [usize],
        counts: &'s Counts,
    ) -> impl Iterator<Item = Vec<usize>> + 's {
        let (layout, world) = (*self.code.layout(), own.len());
        let total: usize = own.iter().sum();
        let missing = (0..world).map(move |rank| changed(own, rank, 0));
        let off = counts.clone().take(64).flat_map(move |tokens| {
            (0..world).filter_map(move |rank| {
                let len = own[rank] as i64 + tokens - total as i64;
                usize::try_from(len).ok().map(|len| changed(own, rank, len))
            })
        });
        let alike = [0, world - 1].into_iter().map(move |rank| vec![own[rank]; world]);
        let interleaved = (1..=layout.block()).filter_map(move |interleave| {
            let other = self.other_interleave(interleave)?;
            Some((0..world).map(|rank| other.local_len(sight.visible, rank)).collect())
        });
        let all = missing.chain(off).chain(alike).chain(interleaved);
        all.filter(move |shares: &Vec<usize>| counts.contains(&(shares.iter().sum::<usize>() as i64)))
    }

    /// Local lengths as the dimensions of the ranks show them, where they show them finely enough.
    fn seen_shares(&self, counts: &Counts, seen: &Seen) -> impl Iterator<Item = Vec<usize>> {
        let weights = self.rank_weights(seen);
        let mut found = Vec::new();
        for tokens in counts.clone().take(64) {
            let ranges: Vec<(usize, usize)> = weights
                .iter()
                .map(|weight| {
                    let (count, slack) = (weight * tokens as f64, weight * tokens as f64 / 64.0 + 1e-3);
                    ((count - slack).ceil().max(0.0) as usize, (count + slack).floor().max(0.0) as usize)
                })
                .collect();
            let combinations: f64 =
                ranges.iter().map(|(low, high)| (high + 1).saturating_sub(*low) as f64).product();
            if !weights.is_empty() && combinations <= MOST_SHARES as f64 {
                combine(&ranges, tokens as usize, &mut Vec::new(), &mut found);
            }
        }
        found.into_iter()
    }

    /// Weight of each rank as its own dimension shows it; nothing where there is one rank.
    fn rank_weights(&self, seen: &Seen) -> Vec<f64> {
        (0..self.code.dims())
            .filter(|dim| matches!(self.code.sign_of(*dim), Sign::Rank(_)))
            .map(|dim| seen.out[dim])
            .collect()
    }

    /// A page that is missing, or another page in its place: on one rank, or on all.
    pub(super) fn as_pages(
        &self,
        sight: Sight,
        right: &Tally,
        counts: &Counts,
        seen: &Seen,
    ) -> Option<Attribution> {
        let (layout, world) = (self.code.layout(), right.counts().len());
        let block = layout.block();
        let pages = (right.counts()[0] as usize).div_ceil(block);
        let sources = self.readable_pages();
        let span = |page: usize, rank: usize| {
            let len = right.counts()[rank] as usize;
            (page * block).min(len)..((page + 1) * block).min(len)
        };
        let ranks = std::iter::once(None).chain((0..world).filter(|_| world > 1).map(Some));
        for rank in ranks {
            let takes_part = |other: usize| rank.is_none_or(|rank| rank == other);
            for page in 0..pages {
                let own = |dim: usize, on: usize| {
                    self.code.sum(dim, sight.request, on, span(page, on), Bits::default())
                };
                let mut lens = right.counts().to_vec();
                (0..world).filter(|r| takes_part(*r)).for_each(|r| lens[r] -= span(page, r).len() as i64);
                let without = |dim: usize, on: usize| {
                    right.rank_sum(dim, on) - if takes_part(on) { own(dim, on) } else { 0 }
                };
                let lost = lens.iter().sum::<i64>();
                let named = Page { request: sight.request, page };
                if lost < right.tokens()
                    && counts.contains(&lost)
                    && self.fits(&Candidate { counts: &lens, sum: &without }, seen)
                {
                    return Some(Attribution::PageLost { page: named, rank });
                }
                if !counts.contains(&right.tokens()) || pages * sources.len() > MOST_PAGE_PAIRS {
                    continue;
                }
                for read in sources.iter().copied().filter(|read| *read != named) {
                    let with = |dim: usize, on: usize| {
                        let first = read.page * block;
                        let other = first..first + span(page, on).len();
                        let added = if takes_part(on) {
                            self.code.sum(dim, read.request, on, other, Bits::default())
                        } else {
                            0
                        };
                        without(dim, on) + added
                    };
                    if self.fits(&Candidate { counts: right.counts(), sum: &with }, seen) {
                        return Some(Attribution::PageAliased { page: named, read, rank });
                    }
                }
            }
        }
        None
    }

    /// Every page of every request, and every block as one of nobody.
    fn readable_pages(&self) -> Vec<Page> {
        let span = self.code.layout().virtual_block_tokens();
        let own =
            self.written.iter().enumerate().flat_map(|(request, tokens)| {
                (0..tokens.div_ceil(span)).map(move |page| Page { request, page })
            });
        let nobody = self.code.nobody();
        own.chain((0..self.code.space().blocks).map(|page| Page { request: nobody, page })).collect()
    }

    /// Tokens that were stored as if dealt in other runs, and read in these.
    pub(super) fn as_other_interleave(
        &self,
        sight: Sight,
        counts: &Counts,
        seen: &Seen,
    ) -> Option<Attribution> {
        let (layout, written) = (self.code.layout(), *self.written.get(sight.request)?);
        let table = *self.tables.get(sight.request)?;
        if written > MOST_PLACED || layout.world() == 1 || !counts.contains(&(sight.visible as i64)) {
            return None;
        }
        (1..=layout.block()).find_map(|interleave| {
            let other = self.other_interleave(interleave)?;
            let mut tally = Tally::nothing(self.code);
            for rank in 0..layout.world() {
                for local in 0..layout.local_len(sight.visible, rank) {
                    let position = other.global_position(local, rank);
                    let token = if position < written {
                        super::code::Token { request: sight.request, position }
                    } else {
                        let block = usize::try_from(*table.get(local / layout.block())?).ok()?;
                        self.code.slot(rank, block, local % layout.block())
                    };
                    tally.add(self.code, token, rank, 1);
                }
            }
            self.is(&tally, seen).then_some(Attribution::WrongInterleave { interleave })
        })
    }

    /// The layout with another interleave size that divides the block.
    fn other_interleave(&self, interleave: usize) -> Option<Layout> {
        let layout = self.code.layout();
        let other = (interleave != layout.interleave()).then_some(interleave)?;
        Layout::new(layout.world(), other, layout.block()).ok()
    }

    /// The right tokens of every rank, weighed wrongly.
    pub(super) fn as_other_weights(&self, right: &Tally, seen: &Seen) -> Option<Attribution> {
        let weights = self.rank_weights(seen);
        if weights.is_empty() || weights.iter().any(|weight| *weight < 0.0) {
            return None;
        }
        let roundoff = self.rounding.contract().output.unit_roundoff();
        let explained = (0..self.code.dims()).all(|dim| {
            let terms = weights.iter().zip(right.counts()).enumerate().map(|(rank, (weight, count))| {
                if *count == 0 { 0.0 } else { weight * right.rank_sum(dim, rank) as f64 / *count as f64 }
            });
            let (sum, size) =
                terms.fold((0.0, 0.0), |(sum, size), term: f64| (sum + term, size + term.abs()));
            // the weight, the partial, a product and the sums are rounded, each to the output's format at worst
            (seen.out[dim] - sum).abs() <= (4.0 + weights.len() as f64) * roundoff * size
        });
        explained.then_some(Attribution::WrongWeights { seen: weights })
    }
}

fn changed(own: &[usize], rank: usize, len: usize) -> Vec<usize> {
    let mut shares = own.to_vec();
    shares[rank] = len;
    shares
}

/// Every choice of one number from each range that adds up to `total`.
fn combine(ranges: &[(usize, usize)], total: usize, chosen: &mut Vec<usize>, found: &mut Vec<Vec<usize>>) {
    let Some((low, high)) = ranges.get(chosen.len()).copied() else {
        if total == 0 {
            found.push(chosen.clone());
        }
        return;
    };
    for len in low..=high.min(total) {
        chosen.push(len);
        combine(ranges, total - len, chosen, found);
        chosen.pop();
    }
}
