//! What a session is opened with: attention shape, parallel sizes, layout, formats, exchange.

use serde::{Deserialize, Serialize};
use shardcheck_formats::Dtype;

/// Attention shape of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind", deny_unknown_fields)]
pub enum Attention {
    /// Multi-head latent attention in absorbed form: one latent KV head of `kv_lora_rank + qk_rope_head_dim`
    /// elements a token, whose first `kv_lora_rank` elements are the value as well.
    Mla {
        /// Latent width R.
        kv_lora_rank: usize,
        /// Rotary width P.
        qk_rope_head_dim: usize,
        /// Width V of a head after the up-projection `W_UV`.
        v_head_dim: usize,
    },
    /// Grouped-query attention; `kv_heads` equal to the number of query heads is multi-head attention.
    Gqa {
        /// KV heads held by each rank of a decode-context-parallel group.
        kv_heads: usize,
        /// Query and key width.
        head_dim: usize,
        /// Value width.
        v_head_dim: usize,
    },
}

impl Attention {
    /// Width of a query and of a key.
    pub fn qk_dim(&self) -> usize {
        match *self {
            // numbers of a case that is still to be checked may be anything
            Self::Mla { kv_lora_rank, qk_rope_head_dim, .. } => kv_lora_rank.saturating_add(qk_rope_head_dim),
            Self::Gqa { head_dim, .. } => head_dim,
        }
    }

    /// Width of a value as it lies in the cache, which is the width of a partial output before any projection.
    pub fn value_dim(&self) -> usize {
        match *self {
            Self::Mla { kv_lora_rank, .. } => kv_lora_rank,
            Self::Gqa { v_head_dim, .. } => v_head_dim,
        }
    }

    /// Width of a head after the up-projection (the value width itself for GQA).
    pub fn v_head_dim(&self) -> usize {
        match *self {
            Self::Mla { v_head_dim, .. } | Self::Gqa { v_head_dim, .. } => v_head_dim,
        }
    }

    /// KV heads in a rank's cache: 1 for MLA.
    pub fn kv_heads(&self) -> usize {
        match *self {
            Self::Mla { .. } => 1,
            Self::Gqa { kv_heads, .. } => kv_heads,
        }
    }

    /// Whether the value is a prefix of the key (MLA), so that there is no second cache.
    pub fn is_mla(&self) -> bool {
        matches!(self, Self::Mla { .. })
    }
}

/// Which collectives merge the partial outputs of a decode-context-parallel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CommBackend {
    /// All-gather of the LSE, correction of the partial in place, reduce-scatter of the output.
    AgRs,
    /// One all-to-all that carries the partial output and its LSE, merged in 32-bit by the receiver.
    A2a,
}

impl CommBackend {
    /// Both, in a stable order.
    pub const ALL: [Self; 2] = [Self::AgRs, Self::A2a];

    /// Name as the engines' configuration spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::AgRs => "ag_rs",
            Self::A2a => "a2a",
        }
    }
}

/// Where the two 16-bit halves of a 32-bit LSE lie behind a packed 16-bit partial output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaneOrder {
    /// Lane D holds the high half (ATOM `cp_lse_a2a`).
    HiLo,
    /// Lane D holds the low half (vLLM `dcp_a2a_lse_reduce`).
    LoHi,
}

impl LaneOrder {
    /// Both, in a stable order.
    pub const ALL: [Self; 2] = [Self::HiLo, Self::LoHi];

    /// Short name.
    pub fn name(self) -> &'static str {
        match self {
            Self::HiLo => "hi_lo",
            Self::LoHi => "lo_hi",
        }
    }
}

/// Everything that is fixed while a session lives.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Configuration {
    /// Attention shape.
    pub attention: Attention,
    /// Tensor-parallel size: the number of ranks of the session. Rank `r` belongs to decode-context-parallel group `r / dcp`.
    pub tp: usize,
    /// Decode-context-parallel size W; divides `tp`.
    pub dcp: usize,
    /// Query heads H of one rank. A group gathers `H·dcp` heads; the session holds `H·tp`.
    pub heads_per_rank: usize,
    /// KV interleave size S in tokens.
    pub interleave: usize,
    /// Physical block size B in tokens.
    pub block_size: usize,
    /// Physical blocks in each rank's cache.
    pub blocks: usize,
    /// Element type of activations, bf16 or f16: queries, keys and values of new tokens, up-projections and, where the contract
    /// does not say otherwise, what is computed of them. Left out of the text where it is bf16.
    #[serde(default = "bf16", skip_serializing_if = "is_bf16")]
    pub dtype: Dtype,
    /// Element type of the cache: that of activations, f32, or one of 8 bits.
    pub kv_dtype: Dtype,
    /// Per-tensor scale: stored = cast(x / kv_scale), value = stored · kv_scale. 1 for 16-bit caches.
    pub kv_scale: f32,
    /// Factor of the scores before the softmax.
    pub softmax_scale: f32,
    /// Collectives of the merge.
    pub comm_backend: CommBackend,
    /// Lane order of the packed LSE (A2A only).
    pub lane_order: LaneOrder,
    /// Query replication (QREP): every rank projects the whole group's heads, so that no query is gathered.
    pub query_replication: bool,
    /// Project before merge (PBM): the up-projection is applied to each partial, so that the merge carries `v_head_dim`.
    pub project_before_merge: bool,
    /// Head widths that the decode kernel dispatches on; the gathered heads are padded to the next of them. Empty: any width.
    pub kernel_head_widths: Vec<usize>,
    /// A second KV group beside this one, such as that of a draft model: caches, block table, slots and lengths of its own, on the
    /// same ranks and of the same batches. Steps for it are [`crate::Operation::InGroup`]. It has no group beside it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second_group: Option<Box<Configuration>>,
}

fn bf16() -> Dtype {
    Dtype::Bf16
}

fn is_bf16(dtype: &Dtype) -> bool {
    *dtype == Dtype::Bf16
}

/// A configuration that contradicts itself.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("configuration is out of range: {reason}")]
pub struct ConfigurationError {
    /// What is wrong and what would be right.
    pub reason: String,
}

impl Configuration {
    /// Largest of the numbers of a configuration.
    pub const MOST: usize = 1 << 24;

    /// Query heads that one decode-context-parallel group gathers.
    pub fn gathered_heads(&self) -> usize {
        self.heads_per_rank * self.dcp
    }

    /// Query heads of all ranks.
    pub fn total_heads(&self) -> usize {
        self.heads_per_rank * self.tp
    }

    /// Tokens of one virtual block: one entry of a block table.
    pub fn virtual_block_tokens(&self) -> usize {
        self.block_size * self.dcp
    }

    /// Checks what no engine can run, whatever its rules: sizes of zero, sizes that do not divide, formats that hold no KV.
    ///
    /// # Errors
    /// [`ConfigurationError`] with the first contradiction and the way out of it.
    pub fn check(&self) -> Result<(), ConfigurationError> {
        let fail = |reason: String| Err(ConfigurationError { reason });
        for (name, value) in [
            ("tp", self.tp),
            ("dcp", self.dcp),
            ("heads_per_rank", self.heads_per_rank),
            ("interleave", self.interleave),
            ("block_size", self.block_size),
            ("blocks", self.blocks),
            ("qk_dim", self.attention.qk_dim()),
            ("value_dim", self.attention.value_dim()),
            ("kv_heads", self.attention.kv_heads()),
        ] {
            if value == 0 || value > Self::MOST {
                return fail(format!("{name} is {value}; it must be between 1 and {}", Self::MOST));
            }
        }
        if !self.tp.is_multiple_of(self.dcp) {
            return fail(format!("dcp {} does not divide tp {}: choose a divisor of tp", self.dcp, self.tp));
        }
        if self.interleave > self.block_size {
            let (s, b) = (self.interleave, self.block_size);
            return fail(format!("interleave S = {s} is larger than the block size B = {b}: choose S ≤ B"));
        }
        if !self.block_size.is_multiple_of(self.interleave) {
            let (s, b) = (self.interleave, self.block_size);
            return fail(format!(
                "block size B = {b} is not a multiple of interleave S = {s}: a virtual block would not start on rank 0"
            ));
        }
        if !self.gathered_heads().is_multiple_of(self.attention.kv_heads()) {
            let (heads, kv) = (self.gathered_heads(), self.attention.kv_heads());
            return fail(format!("{heads} gathered query heads do not divide over {kv} KV heads"));
        }
        self.check_dtypes()?;
        for (name, value) in [("kv_scale", self.kv_scale), ("softmax_scale", self.softmax_scale)] {
            if !(value.is_finite() && value > 0.0) {
                return fail(format!("{name} is {value}; it must be finite and above zero"));
            }
        }
        let Some(second) = &self.second_group else { return Ok(()) };
        if second.tp != self.tp {
            return fail(format!(
                "the second KV group has tp {}; it is on the same {} ranks",
                second.tp, self.tp
            ));
        }
        if second.dtype != self.dtype {
            return fail(format!(
                "the second KV group has activations of {}; the model's are {}",
                second.dtype, self.dtype
            ));
        }
        if second.second_group.is_some() {
            return fail("the second KV group has a group beside it: there may be two".to_owned());
        }
        second
            .check()
            .map_err(|error| ConfigurationError { reason: format!("second KV group: {}", error.reason) })
    }

    /// Formats of activations and of the cache.
    fn check_dtypes(&self) -> Result<(), ConfigurationError> {
        let (dtype, kv_dtype) = (self.dtype, self.kv_dtype);
        let reason = match (dtype, kv_dtype) {
            (Dtype::Bf16 | Dtype::F16, Dtype::F32 | Dtype::E4m3fn | Dtype::E4m3fnuz | Dtype::E5m2) => {
                return Ok(());
            }
            (Dtype::Bf16, Dtype::Bf16) | (Dtype::F16, Dtype::F16) => return Ok(()),
            (Dtype::Bf16 | Dtype::F16, Dtype::Bf16 | Dtype::F16) => {
                format!("a {kv_dtype} cache under activations of {dtype}: a cache of 16 bits has their type")
            }
            (Dtype::Bf16 | Dtype::F16, _) => format!("a KV cache of {kv_dtype} is not a float format"),
            _ => format!("activations of {dtype}: they are bf16 or f16"),
        };
        Err(ConfigurationError { reason })
    }

    /// The configuration of a KV group by its number, without the group beside it; `None` where there is none.
    pub fn group(&self, group: usize) -> Option<Self> {
        match group {
            0 => Some(Self { second_group: None, ..self.clone() }),
            1 => self.second_group.as_deref().cloned(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configuration() -> Configuration {
        Configuration {
            attention: Attention::Mla { kv_lora_rank: 16, qk_rope_head_dim: 8, v_head_dim: 8 },
            tp: 4,
            dcp: 2,
            heads_per_rank: 2,
            interleave: 4,
            block_size: 8,
            blocks: 4,
            dtype: Dtype::Bf16,
            kv_dtype: Dtype::Bf16,
            kv_scale: 1.0,
            softmax_scale: 0.25,
            comm_backend: CommBackend::A2a,
            lane_order: LaneOrder::HiLo,
            query_replication: true,
            project_before_merge: false,
            kernel_head_widths: vec![],
            second_group: None,
        }
    }

    #[test]
    fn a_sound_configuration_passes_and_survives_a_round_trip() {
        let configuration = configuration();
        configuration.check().unwrap();
        let text = serde_json::to_string(&configuration).unwrap();
        assert_eq!(serde_json::from_str::<Configuration>(&text).unwrap(), configuration);
    }

    #[test]
    fn a_second_group_is_left_out_of_the_text_where_there_is_none() {
        let alone = configuration();
        assert!(!serde_json::to_string(&alone).unwrap().contains("second_group"));
        let replicated = Configuration { dcp: 1, block_size: 16, ..alone.clone() };
        let both = Configuration { second_group: Some(Box::new(replicated.clone())), ..alone.clone() };
        both.check().unwrap();
        let text = serde_json::to_string(&both).unwrap();
        assert_eq!(serde_json::from_str::<Configuration>(&text).unwrap(), both);
        assert_eq!(
            [both.group(0), both.group(1), both.group(2)],
            [Some(alone.clone()), Some(replicated), None]
        );
        assert_eq!(alone.group(1), None);
    }

    #[test]
    fn activations_are_bf16_where_the_text_does_not_say_f16() {
        let usual = configuration();
        assert!(!serde_json::to_string(&usual).unwrap().contains("\"dtype\""));
        for kv_dtype in [Dtype::F16, Dtype::F32, Dtype::E4m3fn, Dtype::E4m3fnuz, Dtype::E5m2] {
            let half = Configuration { dtype: Dtype::F16, kv_dtype, ..usual.clone() };
            half.check().unwrap();
            let text = serde_json::to_string(&half).unwrap();
            assert!(text.contains("\"dtype\":\"f16\""), "{text}");
            assert_eq!(serde_json::from_str::<Configuration>(&text).unwrap(), half);
        }
    }

    #[test]
    fn each_contradiction_is_named() {
        type Break = fn(&mut Configuration);
        let cases: [(Break, &str); 12] = [
            (|c| c.dcp = 3, "does not divide tp"),
            (|c| c.interleave = 16, "larger than the block size"),
            (|c| c.interleave = 3, "not a multiple of interleave"),
            (|c| c.kv_scale = f32::NAN, "kv_scale"),
            (|c| c.blocks = 0, "blocks is 0"),
            (|c| c.kv_dtype = Dtype::I32, "not a float format"),
            (|c| c.dtype = Dtype::F32, "they are bf16 or f16"),
            (|c| c.kv_dtype = Dtype::F16, "has their type"),
            (|c| c.dtype = Dtype::F16, "has their type"),
            (|c| c.second_group = Some(Box::new(Configuration { tp: 2, ..c.clone() })), "the same 4 ranks"),
            (
                |c| c.second_group = Some(Box::new(Configuration { dcp: 3, ..c.clone() })),
                "second KV group: dcp 3",
            ),
            (
                |c| {
                    let inner = Some(Box::new(c.clone()));
                    c.second_group = Some(Box::new(Configuration { second_group: inner, ..c.clone() }));
                },
                "there may be two",
            ),
        ];
        for (break_it, expected) in cases {
            let mut broken = configuration();
            break_it(&mut broken);
            let message = broken.check().unwrap_err().to_string();
            assert!(message.contains(expected), "{message} should contain {expected}");
        }
    }

    #[test]
    fn unknown_fields_are_refused_so_that_a_typo_cannot_turn_a_test_into_a_no_op() {
        let mut value = serde_json::to_value(configuration()).unwrap();
        value["interleaved"] = 1.into();
        assert!(serde_json::from_value::<Configuration>(value).is_err());
    }
}
