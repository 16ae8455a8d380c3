//! Which lengths are probed: around every place where a sharded KV cache does something else than before.

use crate::coverage::Sharding;
use crate::vocabulary::named;

/// Why a length is probed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Edge {
    /// Another rank gets its first token: below, some rank owns nothing.
    EmptyShard,
    /// A round of `W·S` tokens is complete.
    Round,
    /// A multiple of the block size.
    Block,
    /// A virtual block of `B·W` tokens is complete.
    VirtualBlock,
    /// No edge: a long context.
    Long,
    /// No edge: a needle on a certain rank.
    Needle,
    /// A length that was asked for.
    Chosen,
}

impl Edge {
    /// Every reason.
    pub const ALL: [Edge; 7] = [
        Edge::EmptyShard,
        Edge::Round,
        Edge::Block,
        Edge::VirtualBlock,
        Edge::Long,
        Edge::Needle,
        Edge::Chosen,
    ];

    /// The name used in reports.
    pub fn name(self) -> &'static str {
        match self {
            Edge::EmptyShard => "empty-shard",
            Edge::Round => "round",
            Edge::Block => "block",
            Edge::VirtualBlock => "virtual-block",
            Edge::Long => "long",
            Edge::Needle => "needle",
            Edge::Chosen => "chosen",
        }
    }
}

named!(Edge, "reason for a length");

/// One prompt to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeSpec {
    /// Tokens of the context; generation goes on from there.
    pub context_tokens: u64,
    /// Index of the needle's first token, if there is room for one.
    pub needle_at: Option<u64>,
    /// The reasons for this length.
    pub why: Vec<Edge>,
    /// Seed of the words.
    pub seed: u64,
}

/// What the plan depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanInput {
    /// The sharding under test.
    pub sharding: Sharding,
    /// Longest context at an edge, in tokens.
    pub max_tokens: u64,
    /// Context lengths to walk across in any case, even beyond `max_tokens`.
    pub chosen: Vec<u64>,
    /// Shortest context that has room for a needle.
    pub shortest_with_needle: u64,
    /// Tokens generated after each context.
    pub decode_tokens: u64,
    /// Independent prompts per length.
    pub repeats: u64,
    /// Seed of the first prompt.
    pub seed: u64,
}

/// The prompts to be made, shortest first, and the edges that `max_tokens` leaves out.
///
/// Each context ends half of `decode_tokens` before its edge, so that generation walks across it.
pub fn plan(input: &PlanInput) -> (Vec<ProbeSpec>, Vec<u64>) {
    let half = input.decode_tokens / 2;
    let mut starts: Vec<(u64, Vec<Edge>)> = Vec::new();
    let (mut edges, beyond): (Vec<_>, Vec<_>) =
        edges(input).into_iter().partition(|(at, _)| *at <= input.max_tokens);
    edges.extend(input.chosen.iter().map(|at| (*at, Edge::Chosen)));
    edges.sort();
    for (at, edge) in edges {
        let start = at.saturating_sub(half).max(1);
        // an edge that the previous walk crosses anyway needs no walk of its own
        match starts.last_mut() {
            Some((previous, why)) if at + 2 <= *previous + input.decode_tokens => {
                if !why.contains(&edge) {
                    why.push(edge);
                }
            }
            _ => starts.push((start, vec![edge])),
        }
    }
    let mut specs = Vec::new();
    for repeat in 0..input.repeats {
        for (start, why) in &starts {
            let needle_at = (*start >= input.shortest_with_needle).then_some(start / 3);
            specs.push(ProbeSpec { context_tokens: *start, needle_at, why: why.clone(), seed: 0 });
        }
        specs.extend(needles(input, repeat));
    }
    specs.sort_by_key(|spec| spec.context_tokens);
    for (index, spec) in specs.iter_mut().enumerate() {
        spec.seed = input.seed.wrapping_add(index as u64);
    }
    (specs, beyond.into_iter().map(|(at, _)| at).collect())
}

/// Context lengths at which something changes, ascending.
fn edges(input: &PlanInput) -> Vec<(u64, Edge)> {
    let sharding = input.sharding;
    let round = sharding.dcp * sharding.interleave;
    let mut edges = Vec::new();
    if sharding.dcp > 1 {
        // the second and the last rank get their first token
        let last = sharding.shortest_without_empty_shard();
        edges.extend([sharding.interleave + 1, last].map(|at| (at, Edge::EmptyShard)));
        edges.extend([1, 2, 3, 7].map(|count| (count * round, Edge::Round)));
    }
    if let Some(block) = sharding.block_size {
        edges.extend([1, 2].map(|count| (count * block, Edge::Block)));
        edges.extend([1, 2, 3].map(|count| (count * block * sharding.dcp, Edge::VirtualBlock)));
    }
    for share in [4, 2, 1] {
        edges.push((input.max_tokens / share, Edge::Long));
    }
    edges.sort();
    edges.dedup();
    edges
}

/// One needle for each rank, its first token on that rank, in the middle of a long context.
fn needles(input: &PlanInput, repeat: u64) -> Vec<ProbeSpec> {
    let sharding = input.sharding;
    let round = sharding.dcp * sharding.interleave;
    let wanted = (4 * round).max(2 * input.shortest_with_needle).min(input.max_tokens);
    if wanted < input.shortest_with_needle {
        return Vec::new();
    }
    // odd steps keep the two repeats off the same positions within a round
    let context_tokens = wanted.saturating_sub(3 * repeat).max(input.shortest_with_needle);
    let middle = context_tokens / 2 / round * round;
    (0..sharding.dcp)
        .map(|rank| ProbeSpec {
            context_tokens,
            needle_at: Some((middle + rank * sharding.interleave).max(4)),
            why: vec![Edge::Needle],
            seed: 0,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input() -> PlanInput {
        PlanInput {
            sharding: Sharding { dcp: 4, interleave: 1, block_size: Some(16) },
            max_tokens: 256,
            chosen: vec![1000],
            shortest_with_needle: 30,
            decode_tokens: 16,
            repeats: 2,
            seed: 100,
        }
    }

    #[test]
    fn every_edge_within_reach_is_walked_across() {
        let (specs, beyond) = plan(&input());
        assert!(beyond.is_empty());
        for edge in [2, 4, 8, 12, 16, 28, 32, 64, 128, 192, 256, 1000] {
            let crossed =
                specs.iter().any(|spec| spec.context_tokens <= edge && edge < spec.context_tokens + 16);
            assert!(crossed, "{edge}");
        }
        assert!(specs.is_sorted_by_key(|spec| spec.context_tokens));
        let reasons: Vec<Edge> = specs.iter().flat_map(|spec| spec.why.clone()).collect();
        for edge in Edge::ALL {
            assert!(reasons.contains(&edge), "{edge}");
        }
    }

    #[test]
    fn each_rank_has_a_needle_in_each_repeat_and_no_text_occurs_twice() {
        let (specs, _) = plan(&input());
        for rank in 0..4 {
            let on_rank = |spec: &&ProbeSpec| {
                spec.why == [Edge::Needle] && spec.needle_at.is_some_and(|at| at % 4 == rank)
            };
            assert_eq!(specs.iter().filter(on_rank).count(), 2, "{rank}");
        }
        let mut seeds: Vec<u64> = specs.iter().map(|spec| spec.seed).collect();
        seeds.dedup();
        assert_eq!(seeds.len(), specs.len());
    }

    #[test]
    fn edges_out_of_reach_are_named() {
        let (specs, beyond) = plan(&PlanInput { max_tokens: 100, chosen: Vec::new(), ..input() });
        assert_eq!(beyond, [128, 192]);
        assert!(specs.iter().all(|spec| spec.context_tokens <= 100));
    }

    #[test]
    fn an_unsharded_engine_has_only_lengths_and_one_needle() {
        let sharding = Sharding { dcp: 1, interleave: 1, block_size: None };
        let (specs, _) = plan(&PlanInput { sharding, repeats: 1, chosen: Vec::new(), ..input() });
        let reasons: Vec<Edge> = specs.iter().flat_map(|spec| spec.why.clone()).collect();
        assert_eq!(reasons, [Edge::Long, Edge::Needle, Edge::Long, Edge::Long]);
    }

    #[test]
    fn reasons_are_read_back_by_name() {
        for edge in Edge::ALL {
            assert_eq!(edge.name().parse::<Edge>(), Ok(edge));
        }
    }
}
