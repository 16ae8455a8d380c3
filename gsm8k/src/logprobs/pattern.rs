//! Which lengths a fault needs: the simplest statement about a position that separates the bad ones from the good.

use serde::Serialize;

use super::probe::{Position, Route};
use crate::coverage::Sharding;

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
    fn scattered_faults_and_no_faults_get_no_false_statement() {
        assert_eq!(first(|_| false), "");
        assert_eq!(first(|p| (p.context_tokens * 2_654_435_761) % 97 < 9), "");
    }
}
