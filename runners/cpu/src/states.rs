//! Merges of given states: partials of ranks, two states, segments of a split kernel; and the packing of an LSE.

use shardcheck_engine::{Configuration, EngineError, Reply, Tensor, TensorError, Tensors};
use shardcheck_formats::Dtype;

use crate::batch::wrong_shape;
use crate::communicator::{Ranks, run_ranks};
use crate::context::merge_states;
use crate::merge::{MergePolicies, Partial, Wire, merge};
use crate::policies::Policies;

/// How the segments of a split kernel are merged.
#[derive(Clone, Copy, PartialEq)]
pub struct SegmentPolicies {
    /// Segments that hold something: `(tokens of the row, segments, tokens of a tile)`.
    pub active: fn(usize, usize, usize) -> usize,
    /// Weights of unnormalised accumulators, and the natural LSE: `(base-2 maxima, sums, weights to fill)`.
    pub combine: fn(&[f32], &[f32], &mut [f32]) -> f32,
}

impl SegmentPolicies {
    /// As published (vLLM `_merge_mla_segments_kernel`).
    pub const HEALTHY: Self = Self { active, combine };
}

/// Each segment takes a whole number of tiles, as few as cover the row.
fn active(tokens: usize, segments: usize, tile_tokens: usize) -> usize {
    let tile_tokens = tile_tokens.max(1);
    let tiles = tokens.div_ceil((segments * tile_tokens).max(1)).max(1);
    tokens.div_ceil(tiles * tile_tokens)
}

/// `w = 2^(m − M) / Σ e·2^(m − M)`, `lse = (M + log2 Σ e·2^(m − M))·ln 2`.
fn combine(maxima: &[f32], sums: &[f32], weights: &mut [f32]) -> f32 {
    let max = maxima.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        weights.fill(0.0);
        return max;
    }
    weights.iter_mut().zip(maxima).for_each(|(weight, m)| *weight = (m - max).exp2());
    let sum: f32 = weights.iter().zip(sums).map(|(weight, e)| weight * e).sum();
    if sum == 0.0 {
        weights.fill(0.0);
        return f32::NEG_INFINITY;
    }
    weights.iter_mut().for_each(|weight| *weight /= sum);
    (max + sum.log2()) * std::f32::consts::LN_2
}

/// Merges the given partials over the ranks of one group, weighed by `policy`. Outputs have the element type of the partials.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit; what the exchange says.
pub fn merge_partials(
    configuration: &Configuration,
    inputs: &Tensors,
    ranks: Ranks,
    policy: &MergePolicies,
    policies: &Policies,
) -> Result<Reply, EngineError> {
    let tensor = inputs.get("partial_out")?;
    let world = configuration.dcp;
    let &[first, rows, heads, dim] = tensor.shape() else {
        return Err(wrong_shape("partial_out", tensor, vec![world, 0, configuration.gathered_heads(), 0]));
    };
    if first != world || !heads.is_multiple_of(world) {
        return Err(wrong_shape(
            "partial_out",
            tensor,
            vec![world, rows, configuration.gathered_heads(), dim],
        ));
    }
    let wire = wire("partial_out", tensor)?;
    let out = (policy.read)(tensor);
    let lse = inputs.get("partial_lse")?.expect("partial_lse", Dtype::F32, &[world, rows, heads])?;
    let lse = (policy.read)(lse);
    let dispatch = (policies.session.dispatch)(configuration, false);
    let order = configuration.lane_order;
    let run = run_ranks(ranks, |link| {
        let (size, count) = (rows * heads * dim, rows * heads);
        let partial = Partial {
            out: out[link.member * size..(link.member + 1) * size].to_vec(),
            lse: lse[link.member * count..(link.member + 1) * count].to_vec(),
            rows,
            heads,
            dim,
        };
        merge(link, &partial, dispatch.run.backend, wire, order, policy)
    })?;
    let merged =
        |part: fn(&Partial) -> &[f32]| run.results.iter().flat_map(|p| part(p).to_vec()).collect::<Vec<_>>();
    let own = heads / world;
    let outputs = Tensors::new()
        .with("out", Tensor::from_f32(tensor.dtype(), &[world, rows, own, dim], &merged(|p| &p.out)))
        .with("lse", Tensor::from_f32(Dtype::F32, &[world, rows, own], &merged(|p| &p.lse)));
    Ok(Reply { outputs, effective: dispatch.reported.report(order), collectives: run.collectives })
}

/// Merges two given states. The output has the element type of the first.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit.
pub fn merge_two_states(inputs: &Tensors, policies: &Policies) -> Result<Reply, EngineError> {
    let prefix_tensor = inputs.get("prefix_out")?;
    let &[rows, heads, dim] = prefix_tensor.shape() else {
        return Err(wrong_shape("prefix_out", prefix_tensor, vec![0, 0, 0]));
    };
    let wire = wire("prefix_out", prefix_tensor)?;
    let state = |out_name: &str, lse_name: &str| -> Result<Partial, EngineError> {
        let tensor = inputs.get(out_name)?;
        self::wire(out_name, tensor)?;
        tensor.expect(out_name, tensor.dtype(), &[rows, heads, dim])?;
        let lse =
            (policies.merge.read)(inputs.get(lse_name)?.expect(lse_name, Dtype::F32, &[rows, heads])?);
        Ok(Partial { out: (policies.merge.read)(tensor), lse, rows, heads, dim })
    };
    let (prefix, suffix) = (state("prefix_out", "prefix_lse")?, state("suffix_out", "suffix_lse")?);
    let mut merged = merge_states(&prefix, &suffix, policies.context.merge_suffix, policies.merge.weigh);
    merged.out.iter_mut().for_each(|value| *value = (policies.merge.stored)(wire, *value));
    let outputs = Tensors::new()
        .with("out", Tensor::from_f32(prefix_tensor.dtype(), &[1, rows, heads, dim], &merged.out))
        .with("lse", Tensor::from_f32(Dtype::F32, &[1, rows, heads], &merged.lse));
    Ok(Reply { outputs, collectives: vec![0], ..Reply::default() })
}

/// Merges the given segments of a split kernel, in f32.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit.
pub fn merge_segments(
    inputs: &Tensors,
    tile_tokens: usize,
    policies: &Policies,
) -> Result<Reply, EngineError> {
    let tensor = inputs.get("segment_acc")?;
    let &[segments, rows, heads, dim] = tensor.shape() else {
        return Err(wrong_shape("segment_acc", tensor, vec![0, 0, 0, 0]));
    };
    let acc = tensor.expect("segment_acc", Dtype::F32, tensor.shape())?.to_f32();
    let read = |name: &str| -> Result<Vec<f32>, EngineError> {
        Ok(inputs.get(name)?.expect(name, Dtype::F32, &[segments, rows, heads])?.to_f32())
    };
    let (maxima, sums) = (read("segment_max")?, read("segment_sum")?);
    let row_lens = inputs.get("row_lens")?.expect("row_lens", Dtype::I32, &[rows])?.to_i64();
    let count = rows * heads;
    let (mut out, mut lse) = (vec![0.0; count * dim], vec![f32::NAN; count]);
    for index in 0..count {
        let tokens = usize::try_from(row_lens[index / heads]).unwrap_or(0);
        let active = (policies.segments.active)(tokens, segments, tile_tokens).min(segments);
        let of = |values: &[f32]| (0..active).map(|s| values[s * count + index]).collect::<Vec<_>>();
        let mut weights = vec![0.0; active];
        lse[index] = (policies.segments.combine)(&of(&maxima), &of(&sums), &mut weights);
        let target = &mut out[index * dim..(index + 1) * dim];
        for (segment, weight) in weights.iter().enumerate() {
            let mut row = acc[(segment * count + index) * dim..][..dim].to_vec();
            (policies.merge.weigh)(*weight, &mut row);
            target.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
        }
    }
    let outputs = Tensors::new()
        .with("out", Tensor::from_f32(Dtype::F32, &[1, rows, heads, dim], &out))
        .with("lse", Tensor::from_f32(Dtype::F32, &[1, rows, heads], &lse));
    Ok(Reply { outputs, collectives: vec![0], ..Reply::default() })
}

/// Splits LSEs into lanes and joins them again.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit.
pub fn pack_lse(
    configuration: &Configuration,
    inputs: &Tensors,
    policies: &Policies,
) -> Result<Reply, EngineError> {
    let tensor = inputs.get("lse")?;
    let &[count] = tensor.shape() else { return Err(wrong_shape("lse", tensor, vec![0])) };
    let bits = tensor.expect("lse", Dtype::F32, &[count])?.to_codes();
    let (lanes, order) = (&policies.merge.lanes, configuration.lane_order);
    let packed: Vec<[u16; 2]> = bits.iter().map(|bits| (lanes.pack)(*bits as u32, order)).collect();
    let unpacked: Vec<u64> = packed.iter().map(|lane| u64::from((lanes.unpack)(*lane, order))).collect();
    let codes: Vec<u64> = packed.iter().flatten().map(|lane| u64::from(*lane)).collect();
    let outputs = Tensors::new()
        .with("lanes", Tensor::from_codes(Dtype::U16, &[1, count, 2], &codes))
        .with("unpacked", Tensor::from_codes(Dtype::F32, &[1, count], &unpacked));
    let effective = shardcheck_engine::EffectivePath::new().with("lane_order", order.name());
    Ok(Reply { outputs, effective, collectives: vec![0] })
}

fn wire(name: &str, tensor: &Tensor) -> Result<Wire, EngineError> {
    match tensor.dtype() {
        Dtype::Bf16 | Dtype::F16 | Dtype::F32 => Ok(Wire::of(tensor.dtype())),
        found => Err(TensorError::WrongDtype { name: name.to_owned(), expected: Dtype::Bf16, found }.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_active_as_published() {
        assert_eq!(active(130, 16, 64), 3);
        assert_eq!(active(5000, 16, 64), 16);
        assert_eq!(active(0, 16, 64), 0);
    }

    #[test]
    fn the_worked_example_of_two_segments_comes_out() {
        let mut weights = [0.0; 2];
        let lse = combine(&[0.0, 1.0], &[1.0, 1.0], &mut weights);
        assert!((lse - 3f32.ln()).abs() < 1e-6);
        assert!((weights[0] * 1.0 + weights[1] * 3.0 - 7.0 / 3.0).abs() < 1e-6);
    }

    #[test]
    fn segments_that_hold_nothing_give_zeros_and_minus_infinity() {
        for (maxima, sums) in
            [(vec![], vec![]), (vec![f32::NEG_INFINITY; 2], vec![0.0; 2]), (vec![0.0], vec![0.0])]
        {
            let mut weights = vec![f32::NAN; maxima.len()];
            assert_eq!(combine(&maxima, &sums, &mut weights), f32::NEG_INFINITY);
            assert!(weights.iter().all(|weight| *weight == 0.0));
        }
    }
}
