//! Layers that share a selection: one walk over the layers of a model, which keeps the plan of the last layer that computed one.
//!
//! ATOM `_should_skip_index_topk` and what it rebuilds behind full layers; vLLM `DeepseekV2MLAAttention`.

use shardcheck_engine::{
    EffectivePath, EngineError, IndexSharing, IndexerType, Reply, SharingRule, Tensor, Tensors,
};
use shardcheck_formats::Dtype;

/// Most layers of a model with its drafts.
const MAX_LAYERS: usize = 1 << 16;

/// How a model's configuration is read.
#[derive(Clone, Copy, PartialEq)]
pub struct SharingPolicies {
    /// Whether ATOM keeps selections: `(it is asked for, period)`.
    pub kept: fn(bool, usize) -> bool,
    /// Whether types are looked at, and whether they go before a pattern.
    pub types: fn(SharingRule) -> (bool, bool),
    /// Whether a layer shares by a list: `(layer, list)`.
    pub listed: fn(usize, &[bool]) -> bool,
    /// Layers before the period begins to count, given what is configured.
    pub before: fn(SharingRule, Option<usize>) -> i64,
    /// Whether a draft layer shares, given what the lists and the period say of its number.
    pub drafts: fn(bool) -> bool,
    /// Layer by whose selection a layer that shares attends: `(it, layers before it that compute)`.
    pub source: fn(usize, &[usize]) -> usize,
    /// Whether a layer makes its plan anew: `(it, whether it computes)`.
    pub rebuilds: fn(usize, bool) -> bool,
}

impl SharingPolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        kept: |asked, period| asked || period > 1,
        types: |rule| (rule == SharingRule::Atom, true),
        listed: |layer, list| list.get(layer).copied().unwrap_or(false),
        before,
        drafts: |_| false,
        source: |_, computing| computing[computing.len() - 1],
        rebuilds: |_, computes| computes,
    };
}

/// Under vLLM's rule the first layer of the period counts as one that is passed.
pub fn before(rule: SharingRule, offset: Option<usize>) -> i64 {
    match rule {
        SharingRule::Atom => offset.unwrap_or(1) as i64,
        SharingRule::Vllm => offset.unwrap_or(2) as i64 - 1,
    }
}

/// Answers for all layers of a model.
///
/// # Errors
/// A crash for a period of 0, for too many layers, and for a first layer that would share with nobody.
pub fn index_layers(sharing: &IndexSharing, policies: &SharingPolicies) -> Result<Reply, EngineError> {
    let crash = |text: String| EngineError::Crash { text };
    let layers = sharing.layers.saturating_add(sharing.draft_layers);
    if sharing.frequency == 0 || layers > MAX_LAYERS {
        return Err(crash(format!("a period of {} over {layers} layers", sharing.frequency)));
    }
    let list = list_of(sharing, policies);
    let kept = sharing.rule == SharingRule::Vllm || (policies.kept)(sharing.index_cache, sharing.frequency);
    let before = (policies.before)(sharing.rule, sharing.offset);
    let (mut computing, mut computes, mut sources, mut rebuilds) = (vec![], vec![], vec![], vec![]);
    for layer in 0..layers {
        let by_rule = kept
            && match &list {
                Some(list) => (policies.listed)(layer, list),
                None => (layer as i64 - before).max(0) % sharing.frequency as i64 != 0,
            };
        let shares = if layer < sharing.layers { by_rule } else { (policies.drafts)(by_rule) };
        if shares && computing.is_empty() {
            return Err(crash(format!("layer {layer} shares, and no layer before it has a selection")));
        }
        if !shares {
            computing.push(layer);
        }
        sources.push(if shares { (policies.source)(layer, &computing) } else { layer } as i32);
        computes.push(u64::from(!shares));
        rebuilds.push(u64::from((policies.rebuilds)(layer, !shares)));
    }
    let outputs = Tensors::new()
        .with("computes", Tensor::from_codes(Dtype::U8, &[1, layers], &computes))
        .with("source", Tensor::from_i32(&[1, layers], &sources))
        .with("rebuilds", Tensor::from_codes(Dtype::U8, &[1, layers], &rebuilds));
    let effective = EffectivePath::new().with("rule", sharing.rule.name());
    Ok(Reply { outputs, effective, collectives: vec![0] })
}

/// For each listed layer whether it shares; `None` where nothing is listed.
fn list_of(sharing: &IndexSharing, policies: &SharingPolicies) -> Option<Vec<bool>> {
    let (looked_at, first) = (policies.types)(sharing.rule);
    let types = sharing.types.as_ref().filter(|_| looked_at);
    let types = types.map(|types| types.iter().map(|kind| *kind == IndexerType::Shared).collect());
    let pattern = sharing.pattern.as_ref();
    let pattern = pattern.map(|pattern| pattern.chars().map(|letter| letter == 'S').collect());
    if first { types.or(pattern) } else { pattern.or(types) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sharing(rule: SharingRule, layers: usize, frequency: usize) -> IndexSharing {
        IndexSharing {
            rule,
            layers,
            draft_layers: 1,
            index_cache: false,
            frequency,
            offset: None,
            pattern: None,
            types: None,
        }
    }

    fn sources(sharing: &IndexSharing) -> Vec<i64> {
        let reply = index_layers(sharing, &SharingPolicies::HEALTHY).unwrap();
        reply.outputs.get("source").unwrap().to_i64()
    }

    #[test]
    fn layers_share_in_turns_and_a_draft_layer_never_does() {
        for rule in SharingRule::ALL {
            assert_eq!(sources(&sharing(rule, 7, 3)), [0, 1, 1, 1, 4, 4, 4, 7], "{rule}");
        }
    }

    #[test]
    fn a_model_whose_first_layer_shares_is_refused() {
        let early = IndexSharing { offset: Some(0), ..sharing(SharingRule::Vllm, 4, 2) };
        let pattern = IndexSharing { pattern: Some("SF".to_owned()), ..sharing(SharingRule::Vllm, 2, 1) };
        for headless in [early, pattern] {
            let error = index_layers(&headless, &SharingPolicies::HEALTHY).unwrap_err();
            assert!(error.to_string().contains("layer 0 shares"), "{error}");
        }
        let no_period = sharing(SharingRule::Atom, 4, 0);
        assert!(index_layers(&no_period, &SharingPolicies::HEALTHY).is_err());
    }
}
