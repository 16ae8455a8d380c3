//! Cases of compressing tokens over the ranks of prefill context parallelism: a shared batch whose blocks of tokens become entries.

use serde::{Deserialize, Serialize};
use shardcheck_engine::{CompressPlan, Operation, Tensor, Tensors, vocabulary};
use shardcheck_formats::Dtype;

use super::PcpCase;
use crate::check::elements;
use crate::stream::Stream;
use crate::tokens::Tokens;
use crate::{Body, Case, CaseError, Family};

/// Most tokens of a block, and most columns of an entry.
const MAX_RATIO: usize = 1024;
const MAX_DIM: usize = 4096;
/// Most elements of what all ranks gather.
const MAX_GATHERED: usize = 1 << 26;

vocabulary! {
    /// How gates and their biases are drawn.
    GatePattern ("pattern of gates") {
        /// Independent, of unit deviation.
        Random = "random",
        /// All alike: an entry is the mean of what it pools.
        Equal = "equal",
        /// The last token of a block has nearly all the weight, and what is behind the block would have more.
        Newest = "newest",
        /// So far apart that most weights underflow.
        Spread = "spread",
    }
}

/// How much more the gate of a token has than that of the token before it, where the newest one wins.
const STEP: f32 = 3.0;
/// Deviation of gates that are far apart.
const SPREAD: f32 = 60.0;

/// Compression of the tokens of one batch over P ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompressPcpCase {
    /// The batch, and how it is shared out.
    pub batch: PcpCase,
    /// Tokens m of a block.
    pub ratio: usize,
    /// Whether an entry pools the block before its own as well.
    pub overlap: bool,
    /// Columns d of an entry.
    pub dim: usize,
    /// How gates are drawn.
    pub pattern: GatePattern,
}

/// Tokens of a request of `len` tokens that are needed for entries that are still to come: those of the block that is not full, and those
/// of the block before it where blocks overlap.
pub fn held_tokens(len: usize, ratio: usize, overlap: bool) -> usize {
    len - (len / ratio).saturating_sub(usize::from(overlap)) * ratio
}

impl CompressPcpCase {
    /// Columns C of a token: two halves where blocks overlap.
    pub fn columns(&self) -> usize {
        self.dim * (1 + usize::from(self.overlap))
    }

    /// Tokens of a request that are needed behind `len` tokens.
    pub fn held(&self, len: usize) -> usize {
        held_tokens(len, self.ratio, self.overlap)
    }

    /// The step, for `padded_rows` rows of a rank at least.
    pub fn operation(&self, padded_rows: usize) -> Operation {
        let PcpCase { world, strategy, decodes, .. } = self.batch;
        let (ratio, overlap) = (self.ratio, self.overlap);
        Operation::CompressPcp {
            plan: CompressPlan { world, strategy, decodes, padded_rows, ratio, overlap },
        }
    }

    /// Inputs of the step.
    pub fn tensors(&self, seed: u64) -> Tensors {
        let columns = self.columns();
        let stream = |stream: Stream| stream.counter(seed);
        let (mut of_value, mut of_gate, mut of_bias) =
            (stream(Stream::CompressValue), stream(Stream::CompressGate), stream(Stream::CompressBias));
        let (mut new, mut held) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        for request in &self.batch.requests {
            let context = request.context_tokens;
            for position in context - self.held(context)..context + request.query_tokens {
                let [values, gates] = if position < context { &mut held } else { &mut new };
                for _ in 0..columns {
                    values.push(of_value.gaussian() as f32);
                    gates.push(self.gate(position, of_gate.gaussian() as f32));
                }
            }
        }
        let bias: Vec<f32> = (0..self.ratio * columns)
            .map(|_| of_bias.gaussian() as f32)
            .map(|bias| if self.pattern == GatePattern::Equal { 0.0 } else { bias })
            .collect();
        let tensor =
            |values: &[f32]| Tensor::from_f32(Dtype::F32, &[values.len() / columns, columns], values);
        self.batch
            .tensors()
            .with("kv", tensor(&new[0]))
            .with("gate", tensor(&new[1]))
            .with("gate_bias", tensor(&bias))
            .with("state_kv", tensor(&held[0]))
            .with("state_gate", tensor(&held[1]))
    }

    fn gate(&self, position: usize, gaussian: f32) -> f32 {
        match self.pattern {
            GatePattern::Random => gaussian,
            GatePattern::Equal => 0.0,
            GatePattern::Newest => gaussian + STEP * (position % (4 * self.ratio)) as f32,
            GatePattern::Spread => SPREAD * gaussian,
        }
    }

    pub(crate) fn check(&self) -> Result<(), CaseError> {
        let fail = |reason: String| Err(CaseError::OutOfRange(reason));
        self.batch.check()?;
        if self.batch.overlap {
            return fail("groups that overlap are asked of pcp alone".to_owned());
        }
        if self.batch.rows() == 0 {
            return fail("there are no query rows".to_owned());
        }
        for (name, value, most) in [("m", self.ratio, MAX_RATIO), ("d", self.dim, MAX_DIM)] {
            if value == 0 || value > most {
                return fail(format!("{name} is {value}; it must be between 1 and {most}"));
            }
        }
        let held: usize = self.batch.requests.iter().map(|r| self.held(r.context_tokens)).sum();
        let extents =
            [self.batch.world, self.batch.rows() + self.batch.extra_rows + held, 2 * self.columns()];
        if elements(&extents) > MAX_GATHERED {
            return fail(format!("gathered rows of shape {extents:?} have more than 2^26 elements"));
        }
        Ok(())
    }

    /// Four parts of an id, such as `zigzag.p2.replicated/0+11_3+5/m4.overlap.d8/random`.
    pub(crate) fn spell(&self) -> String {
        let overlap = if self.overlap { ".overlap" } else { "" };
        format!("{}/m{}{overlap}.d{}/{}", self.batch.spell(), self.ratio, self.dim, self.pattern)
    }

    /// Reads what [`Self::spell`] wrote.
    pub(crate) fn read((split, batch): (&str, &str), blocks: &str, pattern: &str) -> Result<Self, String> {
        let mut tokens = Tokens::split(blocks);
        let overlap = tokens.take(|token| (token == "overlap").then_some(())).is_some();
        let (ratio, dim) = (tokens.need_number("m")?, tokens.need_number("d")?);
        tokens.finish()?;
        let (batch, pattern) = (PcpCase::read(split, batch)?, pattern.parse()?);
        Ok(Self { batch, ratio, overlap, dim, pattern })
    }
}

impl Case {
    /// A case of compressing the tokens of a shared batch of the current schema version.
    pub fn compress_pcp(body: CompressPcpCase, seed: u64) -> Self {
        Self::of(Family::CompressPcp, Body::CompressPcp(body), seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_and_the_json_read_back() {
        for id in [
            "compress_pcp/head_tail.p4.owned/0+11_3+5x2_7+1d/m4.overlap.d8/random/7",
            "compress_pcp/round_robin.p3.split.pad2/5+1/m128.d2/newest/0",
        ] {
            Case::read_back(id).configuration().unwrap().check().unwrap();
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused_with_the_reason() {
        let first = "compress_pcp/head_tail.p4.owned/0+11_7+1d/m4.overlap.d8/random/7";
        for (part, other, reason) in [
            ("p4", "p0", "world is 0"),
            ("head_tail.p4.owned/0+11_7+1d", "round_robin.p4.split.overlap/0+11", "of pcp alone"),
            ("0+11_7+1d", "5+0", "query rows"),
            ("m4", "m0", "m is 0"),
            ("d8", "d0", "d is 0"),
            ("d8", "d4096", "2^26"),
            ("random", "gaussian", "pattern of gates"),
            ("overlap", "twice", "twice"),
            ("/random", "", "parts between slashes"),
        ] {
            let id = first.replacen(part, other, 1);
            let id = if reason == "2^26" { id.replace("0+11", "0+60000") } else { id };
            let error = id.parse::<Case>().unwrap_err().to_string();
            assert!(error.contains(reason), "{id}: {error}");
        }
    }

    #[test]
    fn what_is_held_is_the_block_that_is_not_full_and_the_one_before_it_where_blocks_overlap() {
        let held = |overlap: bool| (0..10).map(|len| held_tokens(len, 3, overlap)).collect::<Vec<_>>();
        assert_eq!(held(false), [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]);
        assert_eq!(held(true), [0, 1, 2, 3, 4, 5, 3, 4, 5, 3]);
        let case: Case =
            "compress_pcp/head_tail.p2.owned/5+4_0+1_3+1d/m3.overlap.d2/random/7".parse().unwrap();
        let Body::CompressPcp(body) = &case.body else { panic!("a case of another family") };
        let inputs = body.tensors(7);
        assert_eq!(inputs.get("state_kv").unwrap().shape(), [8, 4]);
        assert_eq!(inputs.get("kv").unwrap().shape(), [6, 4]);
        assert_eq!(inputs.get("gate_bias").unwrap().shape(), [3, 4]);
    }
}
