//! Which lengths a fault needs: the simplest statement about a position that separates the bad ones from the good.

use std::collections::BTreeMap;

use serde::Serialize;

use super::probe::{Position, Route};
use crate::coverage::Sharding;

/// How much larger shifts must become at once to count as a beginning, and for how many lengths to stay so.
const JUMP: f64 = 30.0;
const STAYS_FOR: usize = 8;
/// Shifts below this, in log-odds, are rounding of the log-probabilities.
const LEAST_SHIFT: f64 = 1e-5;
/// Prompts that must have a context length for it to count.
const LEAST_PROMPTS: usize = 3;
/// Good positions before the first bad ones that a rule about those needs.
const LEAST_GOOD_BEFORE: usize = 5;
/// Share of the bad positions that a statement must cover to be reported.
const LEAST_RECALL: f64 = 0.9;

/// A statement about positions and how well it tells bad from good.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Pattern {
    /// The statement, in words.
    pub words: String,
    /// Bad positions that it covers.
    pub bad_inside: usize,
    /// All positions that it covers.
    pub inside: usize,
    /// Bad positions that it leaves out.
    pub bad_outside: usize,
    /// All positions that it leaves out.
    pub outside: usize,
}

impl Pattern {
    fn share_inside(&self) -> f64 {
        self.bad_inside as f64 / self.inside.max(1) as f64
    }

    fn recall(&self) -> f64 {
        self.bad_inside as f64 / (self.bad_inside + self.bad_outside).max(1) as f64
    }

    /// How much denser bad positions are inside than overall; 1 is no information.
    fn lift(&self) -> f64 {
        let overall =
            (self.bad_inside + self.bad_outside) as f64 / (self.inside + self.outside).max(1) as f64;
        self.share_inside() / overall
    }
}

/// The statements that cover nearly all bad positions, the most telling first; at most three.
pub fn explain(positions: &[Position], is_bad: &[bool], sharding: Sharding) -> Vec<Pattern> {
    let bad: Vec<&Position> =
        positions.iter().zip(is_bad).filter(|(_, bad)| **bad).map(|(position, _)| position).collect();
    let (Some(shortest), Some(longest)) = (
        bad.iter().map(|position| position.context_tokens).min(),
        bad.iter().map(|position| position.context_tokens).max(),
    ) else {
        return Vec::new();
    };
    let mut patterns: Vec<Pattern> = candidates(shortest, longest, sharding)
        .into_iter()
        .map(|(words, holds)| score(words, &*holds, positions, is_bad))
        .filter(|pattern| pattern.recall() >= LEAST_RECALL && pattern.lift() > 1.2)
        .collect();
    // candidates are in order of simplicity, and the sort keeps it among equals
    patterns.sort_by(|left, right| right.lift().total_cmp(&left.lift()));
    patterns.truncate(3);
    patterns
}

/// The context length from which on the servers differ.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Beginning {
    /// The length.
    pub context_tokens: u64,
    /// Largest usual shift at shorter contexts, in log-odds.
    pub before: f64,
    /// Usual shift at this length.
    pub after: f64,
}

/// The shortest context at which the usual shift of the prompts jumps, and stays there.
///
/// It needs no idea of the noise, since it compares lengths with each other. It is no sign of a fault by itself: the
/// first length at which two ranks share the work brings their rounding as well.
pub fn beginning(positions: &[Position]) -> Option<Beginning> {
    let mut by_context: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for position in positions.iter().filter(|position| position.route == Route::Prefill) {
        by_context.entry(position.context_tokens).or_default().push(position.shift.abs());
    }
    let usual: Vec<(u64, f64)> = by_context
        .into_iter()
        .filter(|(_, sizes)| sizes.len() >= LEAST_PROMPTS)
        .map(|(context, mut sizes)| {
            sizes.sort_by(f64::total_cmp);
            (context, sizes[sizes.len() / 2])
        })
        .collect();
    let mut before = LEAST_SHIFT;
    for (index, (context_tokens, after)) in usual.iter().enumerate() {
        let next: Vec<f64> = usual[index..].iter().take(STAYS_FOR).map(|(_, size)| *size).collect();
        let stays = next.iter().filter(|size| **size >= JUMP / 3.0 * before).count() * 2 > next.len();
        if index > 0 && *after >= JUMP * before && stays {
            return Some(Beginning { context_tokens: *context_tokens, before, after: *after });
        }
        before = before.max(*after);
    }
    None
}

/// Where in a period each prompt first goes beyond the limit, if always at the same place: the step that a fault needs,
/// when all that follows is its consequence.
///
/// The period is a round, a block or a virtual block. Good positions at that place before a beginning speak against it.
pub fn first_step(positions: &[Position], is_bad: &[bool], sharding: Sharding) -> Option<String> {
    let mut walks: BTreeMap<(Route, usize), Vec<(u64, bool)>> = BTreeMap::new();
    for (position, bad) in positions.iter().zip(is_bad) {
        walks.entry((position.route, position.probe)).or_default().push((position.context_tokens, *bad));
    }
    let mut firsts = Vec::new();
    let mut good_before = Vec::new();
    for walk in walks.values_mut() {
        walk.sort_unstable();
        let Some(first) = walk.iter().position(|(_, bad)| *bad) else { continue };
        firsts.push(walk[first].0);
        good_before.extend(walk[..first].iter().map(|(context, _)| *context));
    }
    firsts.sort_unstable();
    firsts.dedup();
    let round = sharding.dcp * sharding.interleave;
    let block = sharding.block_size.unwrap_or(1);
    let mut periods = [(round, "round"), (block, "block"), (block * sharding.dcp, "virtual block")];
    periods.sort_unstable();
    periods.into_iter().rev().find_map(|(period, name)| {
        let place = firsts.first()? % period.max(1);
        let at_place = |context: &u64| context % period == place;
        let told = period >= 2
            && firsts.len() >= LEAST_PROMPTS
            && good_before.len() >= LEAST_GOOD_BEFORE
            && firsts.iter().all(at_place)
            && !good_before.iter().any(at_place);
        told.then(|| {
            format!("each prompt first goes beyond the limit at a context of {place} mod {period} (a {name})")
        })
    })
}

type Statement = (String, Box<dyn Fn(&Position) -> bool>);

fn candidates(shortest: u64, longest: u64, sharding: Sharding) -> Vec<Statement> {
    let mut all: Vec<Statement> = Vec::new();
    for route in Route::ALL {
        all.push((format!("route {route}"), Box::new(move |p| p.route == route)));
    }
    let virtual_block = sharding.block_size.map(|size| size * sharding.dcp);
    let blocks = |length: u64| {
        virtual_block
            .map_or(String::new(), |size| format!(" ({} virtual blocks)", length as f64 / size as f64))
    };
    all.push((
        format!("context of at least {shortest} tokens{}", blocks(shortest)),
        Box::new(move |p| p.context_tokens >= shortest),
    ));
    all.push((
        format!("context of at most {longest} tokens{}", blocks(longest)),
        Box::new(move |p| p.context_tokens <= longest),
    ));
    let decode_from = move |p: &Position| p.route == Route::Decode && p.context_tokens >= shortest;
    all.push((format!("decode at a context of at least {shortest} tokens"), Box::new(decode_from)));
    let (dcp, interleave) = (sharding.dcp, sharding.interleave);
    if dcp > 1 {
        let edge = sharding.shortest_without_empty_shard();
        all.push((
            format!("a rank is empty (context below {edge})"),
            Box::new(move |p| p.context_tokens < edge),
        ));
        for rank in 0..dcp {
            let owner = move |index: u64| index / interleave % dcp;
            all.push((
                format!("the repeated token lies on rank {rank}"),
                Box::new(move |p| p.source.is_some_and(|source| owner(source) == rank)),
            ));
            all.push((
                format!("the newest token lies on rank {rank}"),
                Box::new(move |p| p.context_tokens > 0 && owner(p.context_tokens - 1) == rank),
            ));
        }
        all.extend(residues("a round of W·S tokens", dcp * interleave));
    }
    if let Some(size) = sharding.block_size.filter(|_| dcp > 1) {
        all.extend(residues("a block of B tokens", size));
    }
    if let Some(size) = virtual_block {
        all.extend(residues("a virtual block of B·W tokens", size));
    }
    all
}

/// Statements about the place of a context's end within a period.
fn residues(what: &str, period: u64) -> Vec<Statement> {
    if !(2..=4096).contains(&period) {
        return Vec::new();
    }
    (0..period)
        .map(|residue| -> Statement {
            (
                format!("context mod {period} = {residue} (in {what})"),
                Box::new(move |p| p.context_tokens % period == residue),
            )
        })
        .collect()
}

fn score(
    words: String,
    holds: &dyn Fn(&Position) -> bool,
    positions: &[Position],
    is_bad: &[bool],
) -> Pattern {
    let mut pattern = Pattern { words, bad_inside: 0, inside: 0, bad_outside: 0, outside: 0 };
    for (position, bad) in positions.iter().zip(is_bad) {
        let (all, bad_ones) = if holds(position) {
            (&mut pattern.inside, &mut pattern.bad_inside)
        } else {
            (&mut pattern.outside, &mut pattern.bad_outside)
        };
        *all += 1;
        *bad_ones += usize::from(*bad);
    }
    pattern
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARDING: Sharding = Sharding { dcp: 4, interleave: 1, block_size: Some(16) };

    fn positions() -> Vec<Position> {
        (1..400)
            .flat_map(|context_tokens| {
                Route::ALL.map(|route| Position {
                    probe: 0,
                    route,
                    context_tokens,
                    source: (context_tokens % 7 == 0).then_some(context_tokens / 2),
                    logprob_a: -1.0,
                    logprob_b: -1.0,
                    shift: 0.0,
                    flip_margin: None,
                })
            })
            .collect()
    }

    fn first(is_bad: impl Fn(&Position) -> bool) -> String {
        let positions = positions();
        let flags: Vec<bool> = positions.iter().map(is_bad).collect();
        explain(&positions, &flags, SHARDING).first().map_or(String::new(), |pattern| pattern.words.clone())
    }

    #[test]
    fn each_kind_of_fault_gets_its_statement() {
        assert_eq!(
            first(|p| p.context_tokens >= 129),
            "context of at least 129 tokens (2.015625 virtual blocks)"
        );
        assert_eq!(first(|p| p.context_tokens < 4), "context of at most 3 tokens (0.046875 virtual blocks)");
        assert_eq!(
            first(|p| p.context_tokens % 64 == 1),
            "context mod 64 = 1 (in a virtual block of B·W tokens)"
        );
        assert_eq!(first(|p| p.context_tokens % 4 == 3), "the newest token lies on rank 2");
        assert_eq!(first(|p| p.source.is_some_and(|s| s % 4 == 3)), "the repeated token lies on rank 3");
        assert_eq!(first(|p| p.route == Route::Decode), "route decode");
        let late_decode = |p: &Position| p.route == Route::Decode && p.context_tokens >= 200;
        assert_eq!(first(late_decode), "decode at a context of at least 200 tokens");
    }

    #[test]
    fn the_beginning_is_found_without_knowing_the_noise() {
        let with_noise = |noise: f64, from: u64| {
            let mut positions: Vec<Position> = (0..4).flat_map(|_| positions()).collect();
            for (index, position) in positions.iter_mut().enumerate() {
                let late = if position.context_tokens >= from { 0.2 } else { 0.0 };
                position.shift = (noise + late) * (1.0 + (index % 5) as f64 / 5.0);
            }
            beginning(&positions)
        };
        assert_eq!(with_noise(1e-6, 4).unwrap().context_tokens, 4);
        assert_eq!(with_noise(1e-3, 129).unwrap().context_tokens, 129);
        assert_eq!(with_noise(1e-3, 10_000), None);
        assert_eq!(with_noise(0.3, 129), None);
    }

    #[test]
    fn a_fault_whose_consequences_stay_is_known_by_its_first_step() {
        let walks: Vec<Position> = [41, 55, 90, 123]
            .iter()
            .enumerate()
            .flat_map(|(probe, start)| {
                (0..16).map(move |step| Position {
                    probe,
                    route: Route::Decode,
                    context_tokens: start + step,
                    ..positions()[0].clone()
                })
            })
            .collect();
        let from = |first: &dyn Fn(u64) -> bool| {
            let mut spoilt = std::collections::BTreeSet::new();
            let flags: Vec<bool> = walks
                .iter()
                .map(|position| {
                    first(position.context_tokens) && spoilt.insert(position.probe)
                        || spoilt.contains(&position.probe)
                })
                .collect();
            first_step(&walks, &flags, SHARDING)
        };
        let told = from(&|context| context % 4 == 0).unwrap();
        assert!(told.contains("0 mod 4 (a round)"), "{told}");
        let told = from(&|context| context % 16 == 1).unwrap();
        assert!(told.contains("1 mod 16 (a block)"), "{told}");
        assert_eq!(from(&|_| true), None);
        assert_eq!(from(&|context| context % 7 == 3), None);
    }

    #[test]
    fn scattered_faults_and_no_faults_get_no_false_statement() {
        assert_eq!(first(|_| false), "");
        assert_eq!(first(|p| (p.context_tokens * 2_654_435_761) % 97 < 9), "");
    }
}
