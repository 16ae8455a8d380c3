//! Limits of a case: what contradicts itself, and what is too large to try.

use shardcheck_engine::{Attention, Configuration};
use shardcheck_formats::Dtype;

use crate::{
    AttentionCase, Body, CASE_SCHEMA_VERSION, CUSTOM_MODEL, Case, CaseError, Family, MergeCase, MergePattern,
    Model, StateView, Workload,
};

/// Most requests in a batch.
pub const MAX_REQUESTS: usize = 4096;
/// Most tokens of all requests together: 2^21.
pub const MAX_TOKENS: usize = 1 << 21;
/// Most query rows, padding included.
pub const MAX_ROWS: usize = 1 << 16;
/// Most elements of any one tensor of a case: 2^31.
pub const MAX_ELEMENTS: usize = 1 << 31;
/// Widest head, latent or up-projection, and most KV heads of a rank.
pub const MAX_WIDTH: usize = 1 << 16;
/// Most ranks of a session.
pub const MAX_RANKS: usize = 256;

impl Case {
    /// Checks that the parts of a case fit together and within the limits of this module.
    ///
    /// # Errors
    /// [`CaseError::Version`], or [`CaseError::OutOfRange`] with the first contradiction and the way out of it.
    pub fn check(&self) -> Result<(), CaseError> {
        if self.schema_version != CASE_SCHEMA_VERSION {
            return Err(CaseError::Version { found: u64::from(self.schema_version) });
        }
        match &self.body {
            Body::Attention(case) if self.family.is_attention() => check_attention(self.family, case),
            Body::Merge(case) if self.family.is_merge() => check_merge(self.family, case),
            Body::Pcp(_) | Body::IndexLayers(_)
                if self.seed != 0 && matches!(self.family, Family::Pcp | Family::IndexLayers) =>
            {
                out_of_range(format!("seed is {}; nothing is drawn for this family, so it is 0", self.seed))
            }
            Body::Pcp(case) if self.family == Family::Pcp => case.check(),
            Body::AttendPcp(case) if self.family == Family::AttendPcp => case.check(),
            Body::SelectPcp(case) if self.family == Family::SelectPcp => case.check(),
            Body::CompressPcp(case) if self.family == Family::CompressPcp => case.check(),
            Body::Route(case) if self.family == Family::Route => case.check(),
            Body::Moe(case) if self.family == Family::Moe => case.check(),
            Body::Acceptance(case) if self.family == Family::Acceptance => case.check(),
            Body::SelectSparse(case) if self.family == Family::SelectSparse => case.check(),
            Body::IndexLayers(case) if self.family == Family::IndexLayers => case.check(),
            Body::Kda(case) if self.family == Family::Kda => case.check(),
            Body::Sequence(case) if self.family == Family::Sequence => case.check(),
            Body::Stack(case) if self.family == Family::Stack => case.check(),
            Body::Rules(case) if self.family == Family::Rules => {
                if case.rule.is_empty() || case.rule.contains('/') {
                    return out_of_range(format!("rule name {:?} is empty or holds a slash", case.rule));
                }
                Ok(())
            }
            Body::Attention(_) => {
                out_of_range(format!("family {} does not go with an attention body", self.family))
            }
            Body::Merge(_) => out_of_range(format!("family {} does not go with a merge body", self.family)),
            Body::Route(_) => out_of_range(format!("family {} does not go with a route body", self.family)),
            Body::Moe(_) => out_of_range(format!("family {} does not go with a moe body", self.family)),
            Body::Pcp(_) => out_of_range(format!("family {} does not go with a pcp body", self.family)),
            Body::AttendPcp(_) => {
                out_of_range(format!("family {} does not go with an attend_pcp body", self.family))
            }
            Body::Acceptance(_) => {
                out_of_range(format!("family {} does not go with an acceptance body", self.family))
            }
            Body::SelectSparse(_) => {
                out_of_range(format!("family {} does not go with a select_sparse body", self.family))
            }
            Body::SelectPcp(_) | Body::CompressPcp(_) => {
                out_of_range(format!("family {} does not go with a body of shared rows", self.family))
            }
            Body::IndexLayers(_) => {
                out_of_range(format!("family {} does not go with an index_layers body", self.family))
            }
            Body::Stack(_) => out_of_range(format!("family {} does not go with a stack body", self.family)),
            Body::Kda(_) => out_of_range(format!("family {} does not go with a kda body", self.family)),
            Body::Sequence(_) => {
                out_of_range(format!("family {} does not go with a sequence body", self.family))
            }
            Body::Rules(_) => out_of_range(format!("family {} does not go with a rules body", self.family)),
        }
    }
}

fn out_of_range<T>(reason: String) -> Result<T, CaseError> {
    Err(CaseError::OutOfRange(reason))
}

pub(crate) fn check_attention(family: Family, case: &AttentionCase) -> Result<(), CaseError> {
    let configuration = &case.configuration;
    check_widths(configuration.attention)?;
    configuration.check().map_err(|error| CaseError::OutOfRange(error.reason))?;
    if case.model != CUSTOM_MODEL && Model::find(&case.model).is_none() {
        return Err(CaseError::UnknownValue(format!(
            "unknown model {:?}, expected one of {}, {CUSTOM_MODEL}",
            case.model,
            Model::names()
        )));
    }
    check_workload(family, &case.workload)?;
    check_selected(family, case)?;
    check_options(family, case)?;
    check_size(configuration, &case.workload)
}

fn check_selected(family: Family, case: &AttentionCase) -> Result<(), CaseError> {
    match &case.selected {
        Some(tokens) if family == Family::AttendSelected => tokens.check(&case.configuration, &case.workload),
        None if family != Family::AttendSelected => Ok(()),
        None => out_of_range("attend_selected needs selected tokens".to_owned()),
        Some(_) => out_of_range(format!("only attend_selected has selected tokens, not {family}")),
    }
}

/// First of all, because sums of widths are formed everywhere.
fn check_widths(attention: Attention) -> Result<(), CaseError> {
    let widths = match attention {
        Attention::Mla { kv_lora_rank, qk_rope_head_dim, v_head_dim } => [
            ("kv_lora_rank", kv_lora_rank),
            ("qk_rope_head_dim", qk_rope_head_dim),
            ("v_head_dim", v_head_dim),
        ],
        Attention::Gqa { kv_heads, head_dim, v_head_dim } => {
            [("kv_heads", kv_heads), ("head_dim", head_dim), ("v_head_dim", v_head_dim)]
        }
    };
    match widths.into_iter().find(|(_, width)| !(1..=MAX_WIDTH).contains(width)) {
        Some((name, width)) => {
            out_of_range(format!("{name} is {width}; it must be between 1 and {MAX_WIDTH}"))
        }
        None => Ok(()),
    }
}

pub(crate) fn check_workload(family: Family, workload: &Workload) -> Result<(), CaseError> {
    let requests = workload.requests.len();
    if requests == 0 || requests > MAX_REQUESTS {
        return out_of_range(format!("{requests} requests; there must be 1 to {MAX_REQUESTS}"));
    }
    let mut tokens = 0usize;
    let mut rows = workload.padded_rows;
    for request in &workload.requests {
        tokens = tokens.saturating_add(request.context_tokens).saturating_add(request.query_tokens);
        rows = rows.saturating_add(request.query_tokens);
    }
    if tokens > MAX_TOKENS {
        return out_of_range(format!("{tokens} tokens in all requests; there may be {MAX_TOKENS}"));
    }
    if rows == 0 || rows > MAX_ROWS {
        return out_of_range(format!("{rows} query rows; there must be 1 to {MAX_ROWS}"));
    }
    if family == Family::Decode && workload.max_query_tokens() > 1 {
        let rows = workload.max_query_tokens();
        return out_of_range(format!(
            "decode has one row a request, not {rows}: several are the family verify"
        ));
    }
    if family == Family::Context && workload.chunk_budget_tokens == 0 {
        return out_of_range("a context case needs a chunk budget of at least one token".to_owned());
    }
    Ok(())
}

fn check_options(family: Family, case: &AttentionCase) -> Result<(), CaseError> {
    let configuration = &case.configuration;
    let mla = configuration.attention.is_mla();
    if !configuration.kv_dtype.is_fp8() && configuration.kv_scale != 1.0 {
        let (dtype, scale) = (configuration.kv_dtype, configuration.kv_scale);
        return out_of_range(format!("a {dtype} cache has kv_scale 1, not {scale}"));
    }
    if configuration.project_before_merge && (!mla || case.latent_output) {
        return out_of_range("project-before-merge needs MLA and an up-projection".to_owned());
    }
    if case.latent_output && !mla {
        return out_of_range("only MLA has a latent output".to_owned());
    }
    if family == Family::Context && mla && !case.latent_output {
        return out_of_range("a context case of MLA has a latent output".to_owned());
    }
    if !configuration.kernel_head_widths.iter().all(|width| (1..=4096).contains(width)) {
        return out_of_range("kernel head widths must be between 1 and 4096".to_owned());
    }
    if let Attention::Mla { v_head_dim: 0, .. } | Attention::Gqa { v_head_dim: 0, .. } =
        configuration.attention
    {
        return out_of_range("v_head_dim is 0; it must be at least 1".to_owned());
    }
    Ok(())
}

fn check_size(configuration: &Configuration, workload: &Workload) -> Result<(), CaseError> {
    if configuration.tp > MAX_RANKS {
        return out_of_range(format!("{} ranks; there may be {MAX_RANKS}", configuration.tp));
    }
    let block = configuration.virtual_block_tokens();
    let needed: usize = workload.requests.iter().map(|request| request.seq_len().div_ceil(block)).sum();
    if configuration.blocks <= needed {
        let blocks = configuration.blocks;
        return out_of_range(format!(
            "{blocks} blocks for {needed} needed ones and the null block 0: give at least {}",
            needed + 1
        ));
    }
    let attention = configuration.attention;
    let width = attention.qk_dim().max(attention.v_head_dim());
    for (name, extents) in [
        (
            "cache",
            [configuration.tp, configuration.blocks, configuration.block_size, attention.kv_heads() * width],
        ),
        ("query", [workload.total_rows(), configuration.heads_per_rank, configuration.tp, width]),
        ("partial output", [workload.total_rows(), configuration.gathered_heads(), configuration.tp, width]),
        ("up-projection", [configuration.tp, configuration.heads_per_rank, width, attention.v_head_dim()]),
    ] {
        if elements(&extents) > MAX_ELEMENTS {
            return out_of_range(format!("the {name} of shape {extents:?} has more than 2^31 elements"));
        }
    }
    Ok(())
}

/// Elements of a shape, or the largest number where there are more.
pub(crate) fn elements(shape: &[usize]) -> usize {
    shape.iter().fold(1, |product: usize, extent| product.saturating_mul(*extent))
}

fn check_merge(family: Family, case: &MergeCase) -> Result<(), CaseError> {
    for (name, value, most) in [
        ("world", case.world, MAX_RANKS),
        ("rows", case.rows, MAX_ROWS),
        ("heads_per_rank", case.heads_per_rank, 4096),
        ("dim", case.dim, 4096),
    ] {
        if value == 0 || value > most {
            return out_of_range(format!("{name} is {value}; it must be between 1 and {most}"));
        }
    }
    if elements(&[case.rows, case.world, case.world, case.heads_per_rank, case.dim]) > MAX_ELEMENTS {
        return out_of_range("the states have more than 2^31 elements".to_owned());
    }
    if !matches!(case.dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16) {
        return out_of_range(format!("states of {}; they are f32, bf16 or f16", case.dtype));
    }
    if !patterns(family).contains(&case.pattern) {
        return out_of_range(format!("pattern {} does not go with {family}", case.pattern.name()));
    }
    if case.pattern == MergePattern::Extremes && case.dtype != Dtype::F16 {
        return out_of_range(format!("extremes are those of f16, not of {}", case.dtype));
    }
    match family {
        Family::MergeStates if case.world != 2 => {
            out_of_range(format!("merge_states merges 2 states, not {}", case.world))
        }
        Family::MergeSegments if case.dtype != Dtype::F32 => out_of_range("segments are f32".to_owned()),
        Family::MergeSegments | Family::PackLse if case.view != StateView::Contiguous => {
            out_of_range(format!("{family} takes contiguous tensors"))
        }
        _ => Ok(()),
    }
}

/// Patterns that a merge family knows whatever the type of its states.
pub fn usual_patterns(family: Family) -> Vec<MergePattern> {
    patterns(family).iter().copied().filter(|pattern| *pattern != MergePattern::Extremes).collect()
}

/// Patterns that a merge family knows.
///
/// Two states travel on no wire, so that the halves of their LSE meet nobody. A segment's statistics are finite where its row
/// has a token at all. A packed LSE may be anything.
pub fn patterns(family: Family) -> &'static [MergePattern] {
    use MergePattern::{AllEmpty, BrokenLse, Extremes, LargeGaps, NanHalves, Random, SomeEmpty, Tagged};
    match family {
        Family::MergePartials => &MergePattern::ALL,
        Family::MergeStates => &[Random, LargeGaps, SomeEmpty, AllEmpty, BrokenLse, Tagged, Extremes],
        Family::MergeSegments => &[Random, LargeGaps, AllEmpty, Tagged],
        Family::PackLse => &[Random, LargeGaps, SomeEmpty, BrokenLse, NanHalves],
        _ => &[],
    }
}
