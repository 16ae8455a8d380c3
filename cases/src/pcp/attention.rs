//! Cases of attention over the ranks of prefill context parallelism: a shared batch, and what attends over what.

use serde::{Deserialize, Serialize};
use shardcheck_engine::{Configuration, Operation, PcpPlan, Tensors};
use shardcheck_formats::Dtype;

use super::PcpCase;
use crate::check::{check_attention, elements};
use crate::id::{read_cache_format, read_configuration, spell_configuration};
use crate::tokens::Tokens;
use crate::{
    AttentionCase, Body, Case, CaseError, Family, Inputs, Placement, Probe, Request, Workload,
    default_blocks, generate,
};

/// Most elements of the keys that all ranks have gathered, and of what they attend to: each is judged on every rank, and 2^26 of them
/// take some gigabytes.
const MAX_SHARED_ELEMENTS: usize = 1 << 26;

/// Workspace of a context gather, which the operation does not have: the context is one part.
const ONE_CHUNK: usize = 1 << 40;
/// Powers of two that a query's scale may be.
const SCALES: std::ops::RangeInclusive<i32> = -20..=20;

/// Attention of one batch over P ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttendPcpCase {
    /// The batch, and how it is shared out.
    pub batch: PcpCase,
    /// Name of the model whose shape this is, or `custom`. MLA attends in the latent space.
    pub model: String,
    /// What the session is opened with: its ranks hold the cached context. Each of the P ranks has the heads of all of them.
    pub configuration: Configuration,
    /// Where the blocks of the cached context lie.
    pub placement: Placement,
    /// What queries are cast to: bf16 or e4m3fn.
    pub query_dtype: Dtype,
    /// The scale of that cast.
    pub query_scale: f32,
    /// How the inputs are drawn.
    pub probe: Probe,
}

impl AttendPcpCase {
    /// The same batch without ranks to share it out over.
    pub fn attention(&self) -> AttentionCase {
        AttentionCase {
            model: self.model.clone(),
            configuration: self.configuration.clone(),
            workload: workload(&self.batch, self.placement),
            probe: self.probe,
            latent_output: self.configuration.attention.is_mla(),
            selected: None,
        }
    }

    /// The step, for `padded_rows` rows of a rank at least.
    pub fn operation(&self, padded_rows: usize) -> Operation {
        let PcpCase { world, strategy, decodes, .. } = self.batch;
        let (query_dtype, query_scale) = (self.query_dtype, self.query_scale);
        let plan = PcpPlan { world, strategy, decodes, padded_rows, query_dtype, query_scale };
        Operation::AttendPcp { plan }
    }

    /// What is drawn for the case.
    pub fn inputs(&self, seed: u64) -> Inputs {
        generate(Family::AttendPcp, &self.attention(), seed)
    }

    /// Inputs of the step, made of what was drawn.
    pub fn tensors(&self, drawn: &Inputs) -> Tensors {
        let mut tensors = drawn.attend_context();
        let batch = self.batch.tensors();
        for name in ["query_start_loc", "context_lens", "is_prefilling"] {
            if let Some(tensor) = batch.find(name) {
                tensors.insert(name, tensor.clone());
            }
        }
        tensors
    }

    pub(crate) fn check(&self) -> Result<(), CaseError> {
        let fail = |reason: String| Err(CaseError::OutOfRange(reason));
        self.batch.check()?;
        if self.batch.overlap {
            return fail("groups that overlap are asked of pcp alone".to_owned());
        }
        check_attention(Family::AttendPcp, &self.attention())?;
        let c = &self.configuration;
        if c.query_replication
            || c.project_before_merge
            || !c.kernel_head_widths.is_empty()
            || c.second_group.is_some()
        {
            return fail(
                "shared rows know no switches of decode: no qrep, pbm, k or second group".to_owned(),
            );
        }
        match (self.query_dtype, self.query_scale) {
            (dtype, 1.0) if dtype == c.dtype => {}
            (Dtype::E4m3fn, scale) if SCALES.map(|power| 2f32.powi(power)).any(|power| power == scale) => {}
            (dtype, scale) => {
                return fail(format!(
                    "queries of {dtype}@{scale}; they are {} as activations are, or e4m3fn with a power of two",
                    c.dtype
                ));
            }
        }
        let tokens = self.batch.requests.iter().map(|r| r.context_tokens + r.query_tokens).sum::<usize>();
        let rows = self.batch.rows() + self.batch.extra_rows;
        let (width, ranks) = (c.attention.qk_dim().max(c.attention.value_dim()), self.batch.world);
        for (what, extents) in [
            ("gathered keys", [ranks, tokens, c.attention.kv_heads(), width]),
            ("local outputs", [ranks, rows, c.total_heads(), width]),
        ] {
            if elements(&extents) > MAX_SHARED_ELEMENTS {
                return fail(format!("the {what} of shape {extents:?} have more than 2^26 elements"));
            }
        }
        Ok(())
    }

    /// Six parts of an id, such as `zigzag.p2.replicated/0+11_3+5/tiny-mla/tp1.dcp1.h2.s1.b8.n9.bf16.ag_rs/shuf.e4m3fn@0.5/gaussian`.
    pub(crate) fn spell(&self) -> String {
        let configuration = spell_configuration(&self.model, &self.configuration, false);
        let query = match self.query_dtype {
            dtype if dtype.is_fp8() => format!("{dtype}@{}", self.query_scale),
            dtype => dtype.name().to_owned(),
        };
        let (batch, model, placement) = (self.batch.spell(), &self.model, self.placement.name());
        format!("{batch}/{model}/{configuration}/{placement}.{query}/{}", self.probe)
    }

    /// Reads what [`Self::spell`] wrote; without `n`, there are [`default_blocks`].
    pub(crate) fn read(
        (split, batch): (&str, &str),
        (model, configuration): (&str, &str),
        rest: &str,
        probe: &str,
    ) -> Result<Self, String> {
        let batch = PcpCase::read(split, batch)?;
        let mut tokens = Tokens::split(rest);
        let placement = tokens.need("placement", &Placement::ALL, Placement::name)?;
        let (query_dtype, query_scale) =
            tokens.take(read_cache_format).ok_or("the format of queries is missing: bf16 or e4m3fn@SCALE")?;
        tokens.finish()?;
        let needed = workload(&batch, placement);
        let (configuration, latent) =
            read_configuration(model, configuration, |block| Ok(default_blocks(&needed, block)))?;
        if latent {
            return Err("lat is not spelt here: shared rows of MLA are always latent".to_owned());
        }
        let (model, probe) = (model.to_owned(), probe.parse()?);
        Ok(Self { batch, model, configuration, placement, query_dtype, query_scale, probe })
    }
}

fn workload(batch: &PcpCase, placement: Placement) -> Workload {
    let request =
        |r: &super::PcpRequest| Request { context_tokens: r.context_tokens, query_tokens: r.query_tokens };
    Workload {
        requests: batch.requests.iter().map(request).collect(),
        padded_rows: 0,
        placement,
        chunk_budget_tokens: ONE_CHUNK,
    }
}

impl Case {
    /// A case of attention over the ranks of prefill context parallelism of the current schema version.
    pub fn attend_pcp(body: AttendPcpCase, seed: u64) -> Self {
        Self::of(Family::AttendPcp, Body::AttendPcp(body), seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_and_the_json_read_back() {
        for id in [
            "attend_pcp/head_tail.p4.owned/0+11_3+5x2_7+1d/tiny-mla/tp1.dcp1.h2.s1.b8.n12.bf16.ag_rs/shuf.bf16/gaussian/7",
            "attend_pcp/zigzag.p2.replicated/0+11_3+5/tiny-gqa/tp2.dcp2.h2.s4.b8.n9.e4m3fn@0.5.ag_rs/seq.e4m3fn@0.25/sink/0",
            "attend_pcp/round_robin.p3.split.pad2/5+1/custom/mla16+8v12.sm0.25.tp1.dcp1.h1.s1.b4.n5.bf16.ag_rs/desc.bf16/cold/1",
        ] {
            Case::read_back(id).configuration().unwrap().check().unwrap();
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused_with_the_reason() {
        let first = "attend_pcp/head_tail.p4.owned/0+11_7+1d/tiny-mla/tp1.dcp1.h2.s1.b8.n12.bf16.ag_rs/shuf.bf16/gaussian/7";
        for (part, other, reason) in [
            ("p4", "p0", "world is 0"),
            ("head_tail.p4.owned/0+11_7+1d", "round_robin.p4.split.overlap/0+11", "of pcp alone"),
            ("head_tail", "zigzag", "does not go with"),
            ("0+11_7+1d", "5+0", "query rows"),
            ("n12", "n2", "needed ones"),
            ("ag_rs", "ag_rs.lat", "always latent"),
            ("ag_rs", "ag_rs.qrep", "no switches"),
            ("ag_rs", "ag_rs.k32", "no switches"),
            ("shuf.bf16", "shuf.bf16@2", "power of two"),
            ("shuf.bf16", "shuf.e4m3fn@0.3", "power of two"),
            ("shuf.bf16", "shuf.e4m3fnuz@0.5", "power of two"),
            ("shuf.bf16", "shuf", "format of queries"),
            ("shuf.bf16", "bf16", "placement"),
            ("gaussian", "uniform", "uniform"),
            ("/gaussian", "", "parts between slashes"),
        ] {
            let id = first.replacen(part, other, 1);
            let error = id.parse::<Case>().unwrap_err().to_string();
            assert!(error.contains(reason), "{id}: {error}");
        }
    }

    #[test]
    fn a_case_without_blocks_gets_what_its_requests_need_and_its_inputs_are_those_of_a_context_and_who_prefills()
     {
        let id = "attend_pcp/head_tail.p2.replicated/9+11_7+1d/tiny-gqa/tp1.dcp1.h2.s1.b8.bf16.ag_rs/seq.bf16/gaussian/7";
        let case: Case = id.parse().unwrap();
        let Body::AttendPcp(body) = &case.body else { panic!("a case of another family") };
        assert_eq!(body.configuration.blocks, 1 + 4 + 2);
        let drawn = body.inputs(7);
        let inputs = body.tensors(&drawn);
        assert_eq!(inputs.get("is_prefilling").unwrap().to_i64(), [1, 0]);
        assert_eq!(inputs.get("context_lens").unwrap().to_i64(), [9, 7]);
        let key = inputs.get("key").unwrap();
        assert_eq!(key.shape()[0], 12, "only the new rows come with the step");
        assert_eq!(drawn.cached_tokens(0), 9);
    }
}
