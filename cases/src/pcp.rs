//! Cases of prefill context parallelism: how a batch is shared out over P ranks and how its rows come back.

pub(crate) mod attention;
pub(crate) mod compression;
pub(crate) mod selection;

use serde::{Deserialize, Serialize};
use shardcheck_engine::{
    CommBackend, Configuration, LaneOrder, Operation, PcpDecodes, PcpStrategy, Tensor, Tensors,
};
use shardcheck_formats::Dtype;

use crate::tokens::{keyed, number};
use crate::{
    Body, Case, CaseError, Family, MAX_RANKS, MAX_REQUESTS, MAX_ROWS, MAX_TOKENS, MergeCase, MergePattern,
    StateView,
};

/// One request of a batch of prefill context parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PcpRequest {
    /// Tokens that were computed before: a prefix that was hit, earlier chunks of the prompt, or the tokens of a decode.
    pub context_tokens: usize,
    /// New rows; 0 is legal.
    pub query_tokens: usize,
    /// Whether the rows are a prompt's.
    pub is_prefilling: bool,
}

/// The layout of one batch over P ranks. Nothing is drawn for it, so its seed is 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PcpCase {
    /// Ranks P.
    pub world: usize,
    /// Which rows of a prompt a rank takes.
    pub strategy: PcpStrategy,
    /// What the rows of decodes do.
    pub decodes: PcpDecodes,
    /// Rows beyond those of the fullest rank that every rank runs, as in a graph.
    pub extra_rows: usize,
    /// Whether the batch is divided between requests into two groups that overlap.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub overlap: bool,
    /// The batch.
    pub requests: Vec<PcpRequest>,
}

impl PcpCase {
    /// Rows of the batch.
    pub fn rows(&self) -> usize {
        self.requests.iter().map(|request| request.query_tokens).sum()
    }

    /// What a session for the case is opened with: one rank of nothing, since the ranks of prefill context parallelism are the
    /// operation's own.
    pub fn configuration(&self) -> Configuration {
        nothing()
    }

    /// The step, for `padded_rows` rows of a rank at least.
    pub fn operation(&self, padded_rows: usize) -> Operation {
        let Self { world, strategy, decodes, overlap, .. } = *self;
        Operation::PcpLayout { world, strategy, decodes, padded_rows, overlap }
    }

    /// Inputs of the step.
    pub fn tensors(&self) -> Tensors {
        let count = self.requests.len();
        let mut starts = vec![0i32];
        for request in &self.requests {
            starts.push(starts[starts.len() - 1] + request.query_tokens as i32);
        }
        let contexts: Vec<i32> = self.requests.iter().map(|r| r.context_tokens as i32).collect();
        let prefilling: Vec<u64> = self.requests.iter().map(|r| u64::from(r.is_prefilling)).collect();
        Tensors::new()
            .with("query_start_loc", Tensor::from_i32(&[count + 1], &starts))
            .with("context_lens", Tensor::from_i32(&[count], &contexts))
            .with("is_prefilling", Tensor::from_codes(Dtype::U8, &[count], &prefilling))
    }

    /// Checks sizes, and that strategy and decodes go together.
    pub(crate) fn check(&self) -> Result<(), CaseError> {
        let fail = |reason: String| Err(CaseError::OutOfRange(reason));
        if self.world == 0 || self.world > MAX_RANKS {
            return fail(format!("world is {}; it must be between 1 and {MAX_RANKS}", self.world));
        }
        if self.requests.is_empty() || self.requests.len() > MAX_REQUESTS {
            return fail(format!("{} requests; there may be 1 to {MAX_REQUESTS}", self.requests.len()));
        }
        let too_long = |r: &PcpRequest| r.context_tokens > MAX_TOKENS || r.query_tokens > MAX_ROWS;
        if self.requests.iter().any(too_long) || self.rows() > MAX_ROWS || self.extra_rows > MAX_ROWS {
            return fail(format!("more than {MAX_ROWS} rows, or a context above {MAX_TOKENS} tokens"));
        }
        let (strategy, decodes) = (self.strategy, self.decodes);
        let goes_with = match strategy {
            PcpStrategy::RoundRobin => decodes == PcpDecodes::Split,
            PcpStrategy::HeadTailOrWhole | PcpStrategy::Zigzag => decodes == PcpDecodes::Replicated,
            PcpStrategy::HeadTail | PcpStrategy::Contiguous => decodes != PcpDecodes::Split,
        };
        if !goes_with {
            return fail(format!("strategy {strategy} does not go with {decodes} decodes"));
        }
        let in_turn = strategy == PcpStrategy::RoundRobin && self.extra_rows == 0;
        if self.overlap && !(in_turn && self.requests.iter().all(|request| request.is_prefilling)) {
            return fail("groups that overlap are prompts in turn, without rows of a graph".to_owned());
        }
        let shortest = 2 * self.world;
        let refused = |r: &PcpRequest| !r.is_prefilling || (1..shortest).contains(&r.query_tokens);
        if strategy == PcpStrategy::Zigzag && self.requests.iter().any(refused) {
            return fail(format!("zigzag takes prompts without rows or with {shortest} and more"));
        }
        Ok(())
    }

    /// Two parts of an id: the split and the batch, such as `head_tail.p4.owned/0+11_3+5x2_7+1d`.
    pub(crate) fn spell(&self) -> String {
        let mut split = format!("{}.p{}.{}", self.strategy, self.world, self.decodes);
        if self.extra_rows > 0 {
            split += &format!(".pad{}", self.extra_rows);
        }
        if self.overlap {
            split += ".overlap";
        }
        let alike = self.requests.chunk_by(|a, b| a == b);
        let batch = alike.map(|group| {
            let one = group[0];
            let decode = if one.is_prefilling { "" } else { "d" };
            let count = if group.len() > 1 { format!("x{}", group.len()) } else { String::new() };
            format!("{}+{}{decode}{count}", one.context_tokens, one.query_tokens)
        });
        format!("{split}/{}", batch.collect::<Vec<_>>().join("_"))
    }

    /// Reads what [`Self::spell`] wrote.
    pub(crate) fn read(split: &str, batch: &str) -> Result<Self, String> {
        let parts: Vec<&str> = split.split('.').collect();
        let (strategy, world, decodes, extra, overlap) = match parts[..] {
            [strategy, world, decodes] => (strategy, world, decodes, "pad0", false),
            [strategy, world, decodes, "overlap"] => (strategy, world, decodes, "pad0", true),
            [strategy, world, decodes, extra] => (strategy, world, decodes, extra, false),
            _ => return Err(format!("{split:?} is not STRATEGY.pRANKS.DECODES, such as head_tail.p4.owned")),
        };
        let mut case = Self {
            world: keyed("p", world)?,
            strategy: strategy.parse()?,
            decodes: decodes.parse()?,
            extra_rows: keyed("pad", extra)?,
            overlap,
            requests: Vec::new(),
        };
        for entry in batch.split('_') {
            let (one, count) = match entry.split_once('x') {
                None => (entry, 1),
                Some((one, count)) => (one, number("number of requests", count)?),
            };
            if count == 0 || case.requests.len().saturating_add(count) > MAX_REQUESTS {
                return Err(format!("there may be 1 to {MAX_REQUESTS} requests"));
            }
            let (one, is_prefilling) = one.strip_suffix('d').map_or((one, true), |decode| (decode, false));
            let (context, query) = one
                .split_once('+')
                .ok_or_else(|| format!("request {entry:?} is not CONTEXT+ROWS, such as 12+3 or 12+1d"))?;
            let request = PcpRequest {
                context_tokens: keyed("", context)?,
                query_tokens: keyed("", query)?,
                is_prefilling,
            };
            case.requests.extend(std::iter::repeat_n(request, count));
        }
        Ok(case)
    }
}

/// A session of one rank that holds nothing, for operations whose ranks are their own.
pub(crate) fn nothing() -> Configuration {
    // the session of a merge that has one rank, too, and no sequence
    let merge = MergeCase {
        world: 1,
        rows: 1,
        heads_per_rank: 1,
        dim: 8,
        dtype: Dtype::F32,
        comm_backend: CommBackend::AgRs,
        lane_order: LaneOrder::HiLo,
        pattern: MergePattern::Random,
        view: StateView::Contiguous,
    };
    merge.configuration(Family::MergeStates)
}

impl Case {
    /// A case of prefill context parallelism of the current schema version.
    pub fn pcp(body: PcpCase) -> Self {
        Self::of(Family::Pcp, Body::Pcp(body), 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(id: &str) -> Result<Case, CaseError> {
        id.parse()
    }

    #[test]
    fn an_id_and_the_json_read_back() {
        for id in [
            "pcp/head_tail.p4.owned/0+11_3+5x2_7+1d",
            "pcp/head_tail.p2.replicated.pad3/0+0_5+0d",
            "pcp/head_tail_or_whole.p8.replicated/0+5",
            "pcp/round_robin.p3.split/0+7_12+1dx3",
            "pcp/zigzag.p2.replicated/0+4_3+0",
            "pcp/contiguous.p1.owned/2+3",
            "pcp/round_robin.p2.split.overlap/0+7_5+9",
        ] {
            let case = case(id).unwrap();
            assert_eq!(case.id(), id);
            assert_eq!(Case::from_json(&case.to_json()).unwrap(), case);
            case.configuration().unwrap().check().unwrap();
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused_with_the_reason() {
        for (id, reason) in [
            ("pcp/round_robin.p2.replicated/0+4", "does not go with"),
            ("pcp/head_tail.p2.split/0+4", "does not go with"),
            ("pcp/zigzag.p2.replicated/0+3", "zigzag takes prompts"),
            ("pcp/zigzag.p2.replicated/0+4_3+1d", "zigzag takes prompts"),
            ("pcp/head_tail.p0.owned/0+4", "world is 0"),
            ("pcp/head_tail.p2.owned.overlap/0+4_0+5", "prompts in turn"),
            ("pcp/round_robin.p2.split.overlap/0+4_7+1d", "prompts in turn"),
            ("pcp/head_tail.owned/0+4", "STRATEGY.pRANKS.DECODES"),
            ("pcp/head_tail.p2.owned/4", "CONTEXT+ROWS"),
            ("pcp/head_tail.p2.owned/0+4x0", "1 to 4096"),
            ("pcp/head_tail.p2.owned/0+70000", "more than 65536 rows"),
            ("pcp/head_tail.p2.owned/0+4/7", "parts between slashes"),
        ] {
            let error = case(id).unwrap_err().to_string();
            assert!(error.contains(reason), "{id}: {error}");
        }
        let seeded = Case { seed: 3, ..case("pcp/head_tail.p2.owned/0+4").unwrap() };
        assert!(seeded.check().unwrap_err().to_string().contains("seed"));
    }

    #[test]
    fn inputs_are_the_starts_the_contexts_and_who_prefills() {
        let case = case("pcp/head_tail.p2.owned/0+3_7+1d_2+0").unwrap();
        let Body::Pcp(body) = &case.body else { panic!("a case of another family") };
        let inputs = body.tensors();
        assert_eq!(inputs.get("query_start_loc").unwrap().to_i64(), [0, 3, 4, 4]);
        assert_eq!(inputs.get("context_lens").unwrap().to_i64(), [0, 7, 2]);
        assert_eq!(inputs.get("is_prefilling").unwrap().to_i64(), [1, 0, 1]);
    }
}
