//! The merge of partial attention outputs by their LSEs, over both published exchanges.
//!
//! All-to-all (ATOM `cp_lse_a2a`, vLLM `dcp_a2a_lse_reduce`): one collective carries each partial with its LSE in two
//! 16-bit lanes; the receiver sums in f32 in rank order and rounds once. All-gather + reduce-scatter (ATOM and vLLM
//! `cp_lse_ag_out_rs`): the LSEs are gathered, each partial is scaled and rounded in place, and the sum is rounded
//! after every addition.

use shardcheck_engine::{LaneOrder, LseBase, Tensor};
use shardcheck_formats::{Dtype, Overflow, decode_f32, encode_f32, round_f32};

use crate::communicator::{Link, Stop};
use crate::lanes::LanePolicies;
use crate::route::Backend;
use crate::sinks::Sinks;

/// Element type of partials on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wire {
    /// bf16, the LSE in two lanes.
    Bf16,
    /// f16, likewise.
    F16,
    /// f32, the LSE in one.
    F32,
}

impl Wire {
    /// The wire of partials of a type; anything but the two of 16 bits travels in 32.
    pub fn of(dtype: Dtype) -> Self {
        match dtype {
            Dtype::Bf16 => Self::Bf16,
            Dtype::F16 => Self::F16,
            _ => Self::F32,
        }
    }

    /// Element type.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::Bf16 => Dtype::Bf16,
            Self::F16 => Dtype::F16,
            Self::F32 => Dtype::F32,
        }
    }

    /// A value as the wire holds it.
    pub fn round(self, value: f32) -> f32 {
        round_f32(self.dtype(), value)
    }
}

/// Outputs and LSEs of some heads: `out [rows, heads, dim]`, `lse [rows, heads]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Partial {
    /// Outputs, already values of the wire's type.
    pub out: Vec<f32>,
    /// Natural LSEs.
    pub lse: Vec<f32>,
    /// Rows T.
    pub rows: usize,
    /// Heads.
    pub heads: usize,
    /// Width of an output.
    pub dim: usize,
}

impl Partial {
    /// One output row.
    pub fn row(&self, row: usize, head: usize) -> &[f32] {
        let at = (row * self.heads + head) * self.dim;
        &self.out[at..at + self.dim]
    }
}

/// How partials are weighed, carried and summed.
#[derive(Clone, Copy, PartialEq)]
pub struct MergePolicies {
    /// Reads a given state, row-major, whatever its strides.
    pub read: fn(&Tensor) -> Vec<f32>,
    /// An LSE as the merge takes it.
    pub sanitise: fn(f32) -> f32,
    /// Weights of partials and the merged LSE, from their LSEs: `(LSEs, weights to fill)`.
    pub combine: fn(&[f32], &mut [f32]) -> f32,
    /// The same where LSEs are given in base 2.
    pub combine_base_2: fn(&[f32], &mut [f32]) -> f32,
    /// Multiplies a partial by its weight.
    pub weigh: fn(f32, &mut [f32]),
    /// A value as it travels: of a partial, or of a partial times its weight where sums are reduced on the way.
    pub carried: fn(Wire, f32) -> f32,
    /// A receiver's sum with one more weighed value: `(wire, sum, value)`.
    pub added: fn(Wire, f32, f32) -> f32,
    /// A merged value as it is stored.
    pub stored: fn(Wire, f32) -> f32,
    /// Members in the order in which a gather lays them out, for a world size.
    pub lse_order: fn(usize) -> Vec<usize>,
    /// Block of heads that is sent to a member: `(member, world)`.
    pub sent_block: fn(usize, usize) -> usize,
    /// Block of heads that the reduce-scatter gives to a member: `(member, world)`.
    pub scattered_block: fn(usize, usize) -> usize,
    /// Members in the order in which a reduce-scatter adds them: `(member, world)`.
    pub reduce_order: fn(usize, usize) -> Vec<usize>,
    /// Factor of the sum of a reduce-scatter over a world.
    pub reduced: fn(usize) -> f32,
    /// Whether a member of a world enters the gather of LSEs: `(member, world)`.
    pub enters_lse_gather: fn(usize, usize) -> bool,
    /// Which LSE of `[rows, heads]` goes with an output: `(index of the output, rows, heads)`.
    pub lse_of: fn(usize, usize, usize) -> usize,
    /// Where a merged head goes among the heads of its rank: `(head, heads)`.
    pub head_place: fn(usize, usize) -> usize,
    /// Packing of the LSE.
    pub lanes: LanePolicies,
}

impl MergePolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        read: Tensor::to_f32,
        sanitise,
        combine,
        combine_base_2,
        weigh,
        carried: Wire::round,
        added: |_, sum, value| sum + value,
        stored: Wire::round,
        lse_order: |world| (0..world).collect(),
        sent_block: |member, _| member,
        scattered_block: |member, _| member,
        reduce_order: |_, world| (0..world).collect(),
        reduced: |_| 1.0,
        enters_lse_gather: |_, _| true,
        lse_of: |index, _, _| index,
        head_place: |head, _| head,
        lanes: LanePolicies::HEALTHY,
    };
}

impl MergePolicies {
    /// As these, for LSEs in `base`.
    pub fn in_base(&self, base: LseBase) -> Self {
        match base {
            LseBase::E => *self,
            LseBase::Two => Self { combine: self.combine_base_2, ..*self },
        }
    }
}

/// NaN and +∞ mean "nothing there", as −∞ does.
pub fn sanitise(lse: f32) -> f32 {
    if lse.is_nan() || lse == f32::INFINITY { f32::NEG_INFINITY } else { lse }
}

/// `g = log Σ exp lse_r`, weights `exp(lse_r − g)`; all zero and −∞ where every partial is empty.
pub fn combine(lses: &[f32], weights: &mut [f32]) -> f32 {
    let max = lses.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        weights.fill(0.0);
        return max;
    }
    let sum: f32 = lses.iter().map(|lse| (lse - max).exp()).sum();
    let merged = max + sum.ln();
    weights.iter_mut().zip(lses).for_each(|(weight, lse)| *weight = (lse - merged).exp());
    merged
}

/// As [`combine`] with powers and logarithm of 2, for LSEs in that base (FlashInfer `merge_state`, vLLM `is_lse_base_on_e=False`).
pub fn combine_base_2(lses: &[f32], weights: &mut [f32]) -> f32 {
    let max = lses.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        weights.fill(0.0);
        return max;
    }
    let sum: f32 = lses.iter().map(|lse| (lse - max).exp2()).sum();
    let merged = max + sum.log2();
    weights.iter_mut().zip(lses).for_each(|(weight, lse)| *weight = (lse - merged).exp2());
    merged
}

/// A weight of zero gives zeros, whatever the partial holds: NaN · 0 would be NaN.
pub fn weigh(weight: f32, row: &mut [f32]) {
    if weight == 0.0 {
        row.fill(0.0);
    } else {
        row.iter_mut().for_each(|value| *value *= weight);
    }
}

/// Merges the partials of all heads of a group into this rank's own heads `[rows, heads / world, dim]`, values of
/// the wire's type.
///
/// # Errors
/// [`Stop`] from the exchange.
pub fn merge(
    link: &Link<'_>,
    partial: &Partial,
    backend: Backend,
    wire: Wire,
    order: LaneOrder,
    policies: &MergePolicies,
) -> Result<Partial, Stop> {
    merge_with(link, partial, (backend, wire, order), policies, None)
}

/// [`merge`] where heads may have sinks.
///
/// # Errors
/// [`Stop`] from the exchange.
pub fn merge_with(
    link: &Link<'_>,
    partial: &Partial,
    (backend, wire, order): (Backend, Wire, LaneOrder),
    policies: &MergePolicies,
    sinks: Option<&Sinks>,
) -> Result<Partial, Stop> {
    let partial = &paired(partial, policies);
    let policies = &Weighing { merge: policies, sinks };
    let merged = match (backend, wire) {
        (Backend::None, _) => scrub_empty(partial, policies.merge),
        (Backend::A2a, Wire::F32) => merge_a2a_single(link, partial, policies)?,
        (Backend::A2a, half) => merge_a2a_half(link, partial, half, order, policies)?,
        (Backend::AgRs, _) => merge_ag_rs(link, partial, wire, policies)?,
    };
    Ok(place_heads(merged, policies.merge))
}

/// Policies of a merge, and the sinks of its heads.
struct Weighing<'a> {
    merge: &'a MergePolicies,
    sinks: Option<&'a Sinks>,
}

impl std::ops::Deref for Weighing<'_> {
    type Target = MergePolicies;

    fn deref(&self) -> &MergePolicies {
        self.merge
    }
}

impl Weighing<'_> {
    /// Weights of a gathered head's partials, and their merged LSE.
    fn combined(&self, lses: &[f32], head: usize, weights: &mut [f32]) -> f32 {
        match self.sinks {
            Some(sinks) => sinks.combined(self.merge.combine, lses, head, weights),
            None => (self.merge.combine)(lses, weights),
        }
    }
}

/// Each output with the LSE that travels with it.
fn paired(partial: &Partial, policies: &MergePolicies) -> Partial {
    let lse_of = |index: usize| partial.lse[(policies.lse_of)(index, partial.rows, partial.heads)];
    Partial { lse: (0..partial.lse.len()).map(lse_of).collect(), ..partial.clone() }
}

/// A world of one: nothing to merge, but an empty row still reads as zeros.
fn scrub_empty(partial: &Partial, policies: &MergePolicies) -> Partial {
    let mut scrubbed = partial.clone();
    for (row, lse) in scrubbed.out.chunks_exact_mut(partial.dim).zip(&partial.lse) {
        if *lse == f32::NEG_INFINITY {
            (policies.weigh)(0.0, row);
        }
    }
    scrubbed
}

fn place_heads(merged: Partial, policies: &MergePolicies) -> Partial {
    let mut placed = merged.clone();
    for row in 0..merged.rows {
        for head in 0..merged.heads {
            let at = (row * merged.heads + (policies.head_place)(head, merged.heads)) * merged.dim;
            placed.out[at..at + merged.dim].copy_from_slice(merged.row(row, head));
        }
    }
    placed
}

fn merge_a2a_half(
    link: &Link<'_>,
    partial: &Partial,
    wire: Wire,
    order: LaneOrder,
    policies: &Weighing,
) -> Result<Partial, Stop> {
    let code =
        |value: &f32| encode_f32(wire.dtype(), (policies.carried)(wire, *value), Overflow::NonFinite) as u16;
    let pieces = pieces_of(link, partial, policies, |row, head, piece: &mut Vec<u16>| {
        piece.extend(partial.row(row, head).iter().map(code));
        piece.extend((policies.lanes.pack)(partial.lse[row * partial.heads + head].to_bits(), order));
    });
    let received = link.all_to_all("all_to_all_partials", pieces)?;
    let dim = partial.dim;
    Ok(sum_received(link, partial, policies, wire, |member, index, row| {
        let packed = &received[member][index * (dim + 2)..(index + 1) * (dim + 2)];
        let value_of = |code: &u16| decode_f32(wire.dtype(), u64::from(*code));
        row.iter_mut().zip(packed).for_each(|(value, code)| *value = value_of(code));
        f32::from_bits((policies.lanes.unpack)([packed[dim], packed[dim + 1]], order))
    }))
}

fn merge_a2a_single(link: &Link<'_>, partial: &Partial, policies: &Weighing) -> Result<Partial, Stop> {
    let pieces = pieces_of(link, partial, policies, |row, head, piece: &mut Vec<u32>| {
        piece.extend(partial.row(row, head).iter().map(|value| value.to_bits()));
        piece.push(partial.lse[row * partial.heads + head].to_bits());
    });
    let received = link.all_to_all("all_to_all_partials", pieces)?;
    let dim = partial.dim;
    Ok(sum_received(link, partial, policies, Wire::F32, |member, index, row| {
        let packed = &received[member][index * (dim + 1)..(index + 1) * (dim + 1)];
        row.iter_mut().zip(packed).for_each(|(value, bits)| *value = f32::from_bits(*bits));
        f32::from_bits(packed[dim])
    }))
}

/// One piece per member: its block of heads, every row.
fn pieces_of<T>(
    link: &Link<'_>,
    partial: &Partial,
    policies: &Weighing,
    mut put: impl FnMut(usize, usize, &mut Vec<T>),
) -> Vec<Vec<T>> {
    let own = partial.heads / link.world;
    (0..link.world)
        .map(|member| {
            let mut piece = Vec::with_capacity(partial.rows * own * (partial.dim + 2));
            let first = (policies.sent_block)(member, link.world) * own;
            for row in 0..partial.rows {
                (first..first + own).for_each(|head| put(row, head, &mut piece));
            }
            piece
        })
        .collect()
}

/// Weighs what every member sent for this rank's heads and adds it in member order, in f32, rounding once.
fn sum_received(
    link: &Link<'_>,
    partial: &Partial,
    policies: &Weighing,
    wire: Wire,
    unpack: impl Fn(usize, usize, &mut [f32]) -> f32,
) -> Partial {
    let (own, dim, world) = (partial.heads / link.world, partial.dim, link.world);
    let mut merged = Partial {
        out: vec![f32::NAN; partial.rows * own * dim],
        lse: vec![f32::NAN; partial.rows * own],
        rows: partial.rows,
        heads: own,
        dim,
    };
    let mut received = vec![0.0; world * dim];
    let (mut lses, mut weights) = (vec![0.0; world], vec![0.0; world]);
    for index in 0..partial.rows * own {
        for (member, row) in received.chunks_exact_mut(dim).enumerate() {
            lses[member] = (policies.sanitise)(unpack(member, index, row));
        }
        let head = link.member * own + index % own;
        merged.lse[index] = policies.combined(&lses, head, &mut weights);
        let out = &mut merged.out[index * dim..(index + 1) * dim];
        out.fill(0.0);
        for (row, weight) in received.chunks_exact_mut(dim).zip(&weights) {
            (policies.weigh)(*weight, row);
            out.iter_mut().zip(row).for_each(|(sum, value)| *sum = (policies.added)(wire, *sum, *value));
        }
        out.iter_mut().for_each(|value| *value = (policies.stored)(wire, *value));
    }
    merged
}

fn merge_ag_rs(link: &Link<'_>, partial: &Partial, wire: Wire, policies: &Weighing) -> Result<Partial, Stop> {
    let (own, dim, world) = (partial.heads / link.world, partial.dim, link.world);
    let count = partial.lse.len();
    let gathered = if (policies.enters_lse_gather)(link.member, world) {
        let bits: Vec<u32> = partial.lse.iter().map(|lse| lse.to_bits()).collect();
        link.all_gather("all_gather_lse", bits, &(policies.lse_order)(world))?
    } else {
        partial.lse.iter().map(|lse| lse.to_bits()).cycle().take(world * count).collect()
    };
    let mut corrected = partial.clone();
    let (mut lses, mut weights) = (vec![0.0; world], vec![0.0; world]);
    for (index, row) in corrected.out.chunks_exact_mut(dim).enumerate() {
        for (member, lse) in lses.iter_mut().enumerate() {
            *lse = (policies.sanitise)(f32::from_bits(gathered[member * count + index]));
        }
        corrected.lse[index] = policies.combined(&lses, index % partial.heads, &mut weights);
        (policies.weigh)(weights[link.member], row);
        row.iter_mut().for_each(|value| *value = (policies.carried)(wire, *value));
    }
    let pieces = (0..world)
        .map(|member| {
            let first = (policies.scattered_block)(member, world) * own;
            let rows = (0..partial.rows).flat_map(|row| (first..first + own).map(move |head| (row, head)));
            rows.flat_map(|(row, head)| corrected.row(row, head).iter().copied()).collect()
        })
        .collect();
    let received = link.all_to_all("reduce_scatter_output", pieces)?;
    let reduced: Vec<&Vec<f32>> =
        (policies.reduce_order)(link.member, world).into_iter().map(|member| &received[member]).collect();
    let mut out: Vec<f32> = reduced[0].clone();
    for part in &reduced[1..] {
        out.iter_mut().zip(*part).for_each(|(sum, value)| *sum = wire.round(*sum + value));
    }
    let factor = (policies.reduced)(world);
    out.iter_mut().for_each(|value| *value = (policies.stored)(wire, *value * factor));
    let first = link.member * own;
    let lse = (0..partial.rows)
        .flat_map(|row| corrected.lse[row * partial.heads + first..][..own].iter().copied())
        .collect();
    Ok(Partial { out, lse, rows: partial.rows, heads: own, dim })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_output_travels_with_the_lse_that_the_policy_names() {
        let partial = Partial {
            out: (0..12u8).map(f32::from).collect(),
            lse: vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
            rows: 2,
            heads: 3,
            dim: 2,
        };
        assert_eq!(paired(&partial, &MergePolicies::HEALTHY), partial);
        let transposed = |index: usize, rows: usize, heads: usize| index % rows * heads + index / rows;
        let other = paired(&partial, &MergePolicies { lse_of: transposed, ..MergePolicies::HEALTHY });
        assert_eq!(other, Partial { lse: vec![0.0, 3.0, 1.0, 4.0, 2.0, 5.0], ..partial });
    }
}
