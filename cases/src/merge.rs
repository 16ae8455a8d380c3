//! Inputs of a merge case: given states, how they lie in memory, and their exact values.

use shardcheck_engine::{Tensor, Tensors};
use shardcheck_formats::{Counter, Dtype, Overflow, encode, round};

use crate::stream::Stream;
use crate::{Body, Case, Family, MergeCase, MergePattern, StateView};

/// Everything that is drawn for one merge case.
///
/// `states` is W for merge_partials (whose heads are the gathered ones, `heads_per_rank · W`), 2 for merge_states, the number of
/// segments for merge_segments. For pack_lse there are only the LSEs, `states · rows · heads` of them in one row.
#[derive(Debug, Clone, PartialEq)]
pub struct MergeInputs {
    /// What is asked.
    pub family: Family,
    /// The case that the inputs were drawn for.
    pub case: MergeCase,
    /// Inputs of the operation, in the memory layout that the case asks for.
    pub tensors: Tensors,
    /// Heads of one state.
    pub heads: usize,
    /// Exact outputs [states, rows, heads, dim]; for segments the unnormalised accumulators. NaN where nothing may be read.
    pub outs: Vec<f64>,
    /// Exact natural LSEs [states, rows, heads]; for segments the base-2 maxima.
    pub lses: Vec<f64>,
    /// Sums of 2^(s − max) of each segment [segments, rows, heads]; empty in the other families.
    pub sums: Vec<f64>,
    /// Tokens of each row (merge_segments), which decide how many segments are active; empty in the other families.
    pub row_lens: Vec<i32>,
}

impl MergeInputs {
    /// The same states with zeros where nothing may be read, for an engine whose merge relies on them. Segments stay as they are.
    pub fn with_zeros_for_nothing(mut self) -> Self {
        if !matches!(self.family, Family::MergePartials | Family::MergeStates) {
            return self;
        }
        self.outs.iter_mut().filter(|value| value.is_nan()).for_each(|value| *value = 0.0);
        let lses: Vec<f32> = self.lses.iter().map(|lse| *lse as f32).collect();
        self.tensors = state_tensors(self.family, &self.case, self.heads, &self.outs, &lses);
        self
    }
}

/// Draws the states of a merge case. Equal arguments give equal bits, on any machine.
///
/// # Panics
/// For a case that [`Case::check`] refuses.
pub fn generate_merge(family: Family, case: &MergeCase, seed: u64) -> MergeInputs {
    match family {
        Family::MergePartials | Family::MergeStates => merge_states(family, case, seed),
        Family::MergeSegments => merge_segments(case, seed),
        Family::PackLse => pack_lse(case, seed),
        _ => panic!("{family} is no merge family"),
    }
}

/// Segments that hold something: a kernel that splits `row_len` tokens over `segments` segments of whole tiles leaves the last
/// ones untouched (vLLM `_merge_mla_segments_kernel`).
pub fn active_segments(row_len: usize, segments: usize, tile_tokens: usize) -> usize {
    let tiles_per_segment = row_len.div_ceil(segments * tile_tokens).max(1);
    row_len.div_ceil(tiles_per_segment * tile_tokens)
}

impl Case {
    /// The inputs of a merge case; `None` for other bodies.
    pub fn merge_inputs(&self) -> Option<MergeInputs> {
        match &self.body {
            Body::Merge(case) => Some(generate_merge(self.family, case, self.seed)),
            _ => None,
        }
    }
}

/// One given state's head: its LSE and whether its output may be read.
#[derive(Clone, Copy)]
struct Head {
    lse: f32,
    readable: bool,
}

fn merge_states(family: Family, case: &MergeCase, seed: u64) -> MergeInputs {
    let heads =
        if family == Family::MergePartials { case.heads_per_rank * case.world } else { case.heads_per_rank };
    let (states, rows, dim) = (case.world, case.rows, case.dim);
    let mut values = Stream::MergeOut.counter(seed);
    let table = head_table(family, case, heads, seed);
    let mut outs = Vec::with_capacity(states * rows * heads * dim);
    for (index, head) in table.iter().enumerate() {
        let (state, row, column) = (index / (rows * heads), index / heads % rows, index % heads);
        for d in 0..dim {
            let drawn = values.gaussian();
            outs.push(match case.pattern {
                MergePattern::Tagged => tag(states, rows, [state, row, column], d),
                MergePattern::Extremes => extreme(row, column, drawn),
                _ if head.readable => round(case.dtype, drawn),
                _ => f64::NAN,
            });
        }
    }
    let lses: Vec<f32> = table.iter().map(|head| head.lse).collect();
    let tensors = state_tensors(family, case, heads, &outs, &lses);
    let lses = lses.into_iter().map(f64::from).collect();
    MergeInputs {
        family,
        case: case.clone(),
        tensors,
        heads,
        outs,
        lses,
        sums: Vec::new(),
        row_lens: Vec::new(),
    }
}

/// States as the operation takes them, in the memory layout that the case asks for.
fn state_tensors(family: Family, case: &MergeCase, heads: usize, outs: &[f64], lses: &[f32]) -> Tensors {
    let (states, rows, dim) = (case.world, case.rows, case.dim);
    let mut tensors = Tensors::new();
    if family == Family::MergePartials {
        tensors.insert("partial_out", viewed(case.dtype, &[states, rows, heads, dim], outs, 2, case.view));
        tensors.insert("partial_lse", viewed_bits(&[states, rows, heads], lses, 2, case.view));
    } else {
        let (out, lse) = (outs.len() / 2, lses.len() / 2);
        // the suffix comes fresh from a kernel; the prefix may be a slice of a workspace
        for (name, part, view) in [("prefix", 0, case.view), ("suffix", 1, StateView::Contiguous)] {
            let out = viewed(case.dtype, &[rows, heads, dim], &outs[part * out..][..out], 1, view);
            let lse = viewed_bits(&[rows, heads], &lses[part * lse..][..lse], 1, view);
            tensors.insert(&format!("{name}_out"), out);
            tensors.insert(&format!("{name}_lse"), lse);
        }
    }
    tensors
}

/// LSE and readability of every head of every state, by pattern.
fn head_table(family: Family, case: &MergeCase, heads: usize, seed: u64) -> Vec<Head> {
    let (states, rows) = (case.world, case.rows);
    let two = family == Family::MergeStates;
    let mut lse = Stream::MergeLse.counter(seed);
    let mut empty = Stream::MergeEmpty.counter(seed);
    let mut table = Vec::with_capacity(states * rows * heads);
    for state in 0..states {
        for row in 0..rows {
            let empty = is_empty(case, state, row, &mut empty);
            for head in 0..heads {
                let mut value = drawn_lse(case, row + head, &mut lse);
                let mut readable = true;
                if empty {
                    (value, readable) = (f32::NEG_INFINITY, false);
                } else if case.pattern == MergePattern::BrokenLse && state == row % states {
                    // of two states either one has either value; over ranks rows take turns
                    let nan = if two { (row / 2 + head) % 2 == 1 } else { row % 2 == 0 };
                    value = if nan { f32::NAN } else { f32::INFINITY };
                    // two states that stay apart are merged without a mask in front of the product
                    readable = two || head % 2 == 0;
                }
                table.push(Head { lse: value, readable });
            }
        }
    }
    table
}

/// Whether a state holds nothing for a row.
fn is_empty(case: &MergeCase, state: usize, row: usize, counter: &mut Counter) -> bool {
    let drawn = counter.below(2) == 1;
    match case.pattern {
        MergePattern::AllEmpty => row.is_multiple_of(2),
        // each row has a state that holds something, and every other row one that does not
        MergePattern::SomeEmpty if state == row % case.world => false,
        MergePattern::SomeEmpty if row.is_multiple_of(2) && state == (row + 1) % case.world => true,
        MergePattern::SomeEmpty => drawn,
        _ => false,
    }
}

/// An LSE; `turn` counts rows and heads.
fn drawn_lse(case: &MergeCase, turn: usize, counter: &mut Counter) -> f32 {
    match case.pattern {
        MergePattern::LargeGaps => (gap_factor(turn) * (80.0 * counter.unit_f64() - 40.0)) as f32,
        MergePattern::Tagged => 2.5,
        MergePattern::NanHalves => f32::from_bits(finite_bits_with_odd_halves(case.dtype, counter)),
        _ => (3.0 + counter.gaussian()) as f32,
    }
}

/// What the usual range of large gaps, in which every weight is still a number of 32 bits, is multiplied by: in turns by
/// 5, so that exponentials overflow without a maximum in front of them and weights vanish with one.
fn gap_factor(turn: usize) -> f64 {
    if turn.is_multiple_of(2) { 1.0 } else { 5.0 }
}

/// 16-bit halves that are no numbers in bf16, and a few that are zero or nearly so.
const ODD_HALVES: [u32; 10] =
    [0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFC1, 0xFFFF, 0x7F81, 0x8000, 0x0001, 0x0000];

/// The same of f16, which has five bits of exponent: signalling and quiet NaNs, infinities, subnormal numbers.
const ODD_HALVES_OF_F16: [u32; 10] =
    [0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFE01, 0xFFFF, 0x7DFF, 0x8001, 0x0001, 0x03FF];

/// 16-bit halves that are odd in a type of states.
fn odd_halves(dtype: Dtype) -> [u32; 10] {
    if dtype == Dtype::F16 { ODD_HALVES_OF_F16 } else { ODD_HALVES }
}

/// A number of moderate size whose low half alone would be a NaN or an infinity.
fn finite_bits_with_odd_halves(dtype: Dtype, counter: &mut Counter) -> u32 {
    const HIGH: [u32; 4] = [0xC049, 0x3F80, 0x4120, 0xBF00];
    HIGH[counter.below(4) as usize] << 16 | odd_halves(dtype)[counter.below(10) as usize]
}

/// A value that spells state, row and head. All LSEs are equal, so the merge is the mean over states and would hide a swap of
/// two states: each state speaks in elements of its own.
fn tag(states: usize, rows: usize, [state, row, head]: [usize; 3], d: usize) -> f64 {
    if d % states == state { 1.0 + ((head * rows + row) % 251) as f64 } else { 0.0 }
}

/// A value at one end of f16, by row: nearly the largest one, so that a sum of two leaves the range unless it is weighed first; or a
/// few steps of 2^−24, so that a format without subnormals has nothing. Signs are those of the draws, but for every other head, whose
/// large values are all of one sign and add up.
fn extreme(row: usize, head: usize, drawn: f64) -> f64 {
    let step = 2f64.powi(-24);
    let part = (drawn.abs() * 16.0).fract();
    let size = match row % 3 {
        // 60000 to 64992, which steps of 32 spell
        0 => 60_000.0 + (part * 156.0).round() * 32.0,
        1 => (part * 40.0).round() * step,
        // the last normal numbers and the first subnormal ones
        _ => (1000.0 + (part * 60.0).round()) * step,
    };
    if head.is_multiple_of(2) { size } else { size.copysign(drawn) }
}

fn merge_segments(case: &MergeCase, seed: u64) -> MergeInputs {
    let (segments, rows, heads, dim) = (case.world, case.rows, case.heads_per_rank, case.dim);
    let tile = MergeCase::TILE_TOKENS;
    let mut lengths = Stream::MergeRowLen.counter(seed);
    let edges = [1, tile - 1, tile, tile + 1, segments * tile, segments * tile + 1, 130, 5000];
    let row_lens: Vec<i32> = (0..rows)
        .map(|row| match case.pattern {
            MergePattern::AllEmpty if row % 2 == 0 => 0,
            _ => edges[lengths.below(edges.len() as u64) as usize] as i32,
        })
        .collect();
    let mut draws = [Stream::MergeLse, Stream::MergeSum, Stream::MergeOut].map(|stream| stream.counter(seed));
    let (mut maxima, mut sums, mut accs) = (Vec::new(), Vec::new(), Vec::new());
    for segment in 0..segments {
        for (row, row_len) in row_lens.iter().enumerate() {
            let active = segment < active_segments(*row_len as usize, segments, tile);
            for head in 0..heads {
                let state = [segment, row, head];
                let (max, sum) = segment_statistics(case.pattern, row + head, &mut draws);
                let acc = (0..dim).map(|d| match case.pattern {
                    MergePattern::Tagged => tag(segments, rows, state, d),
                    _ => round(Dtype::F32, sum * draws[2].gaussian()),
                });
                accs.extend(acc.map(|value| if active { value } else { f64::NAN }));
                maxima.push(if active { max } else { f64::NAN });
                sums.push(if active { sum } else { f64::NAN });
            }
        }
    }
    let flat = |values: &[f64], shape: &[usize]| viewed(Dtype::F32, shape, values, 2, StateView::Contiguous);
    let tensors = Tensors::new()
        .with("segment_max", flat(&maxima, &[segments, rows, heads]))
        .with("segment_sum", flat(&sums, &[segments, rows, heads]))
        .with("segment_acc", flat(&accs, &[segments, rows, heads, dim]))
        .with("row_lens", Tensor::from_i32(&[rows], &row_lens));
    let family = Family::MergeSegments;
    MergeInputs { family, case: case.clone(), tensors, heads, outs: accs, lses: maxima, sums, row_lens }
}

/// Base-2 maximum, and a sum of 2^(s − max), which its largest term keeps at 1 or more.
fn segment_statistics(pattern: MergePattern, turn: usize, draws: &mut [Counter; 3]) -> (f64, f64) {
    let (max, sum) = match pattern {
        MergePattern::Tagged => (2.0, 1.0),
        MergePattern::LargeGaps => {
            (gap_factor(turn) * (120.0 * draws[0].unit_f64() - 60.0), 1.0 + 9.0 * draws[1].unit_f64())
        }
        _ => (3.0 + draws[0].gaussian(), 1.0 + 9.0 * draws[1].unit_f64()),
    };
    (round(Dtype::F32, max), round(Dtype::F32, sum))
}

fn pack_lse(case: &MergeCase, seed: u64) -> MergeInputs {
    let count = case.world * case.rows * case.heads_per_rank;
    let mut counter = Stream::MergeLse.counter(seed);
    let lses: Vec<f32> = (0..count).map(|index| packed_lse(case, index, &mut counter)).collect();
    let tensors = Tensors::new().with("lse", viewed_bits(&[count], &lses, 0, StateView::Contiguous));
    MergeInputs {
        family: Family::PackLse,
        case: case.clone(),
        tensors,
        heads: case.heads_per_rank,
        outs: Vec::new(),
        lses: lses.into_iter().map(f64::from).collect(),
        sums: Vec::new(),
        row_lens: Vec::new(),
    }
}

fn packed_lse(case: &MergeCase, index: usize, counter: &mut Counter) -> f32 {
    let bits = counter.next_u64() as u32;
    match case.pattern {
        MergePattern::SomeEmpty if index.is_multiple_of(2) => f32::NEG_INFINITY,
        MergePattern::BrokenLse => {
            [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, f32::MIN_POSITIVE / 4.0][index % 5]
        }
        MergePattern::NanHalves => {
            let halves = odd_halves(case.dtype);
            let (high, low) = (halves[index % 10], halves[index / 10 % 10]);
            // every pair of odd halves first, then any bits at all
            f32::from_bits(if index < 100 { high << 16 | low } else { bits })
        }
        MergePattern::LargeGaps => (80.0 * counter.unit_f64() - 40.0) as f32,
        _ => (3.0 + counter.gaussian()) as f32,
    }
}

fn viewed(dtype: Dtype, shape: &[usize], values: &[f64], head_axis: usize, view: StateView) -> Tensor {
    let codes: Vec<u64> = values.iter().map(|value| encode(dtype, *value, Overflow::NonFinite)).collect();
    laid_out(dtype, shape, &codes, head_axis, view)
}

/// As [`viewed`], keeping every bit of a NaN.
fn viewed_bits(shape: &[usize], values: &[f32], head_axis: usize, view: StateView) -> Tensor {
    let codes: Vec<u64> = values.iter().map(|value| u64::from(value.to_bits())).collect();
    laid_out(Dtype::F32, shape, &codes, head_axis, view)
}

/// Puts row-major codes where the view wants them; the gaps hold NaN.
fn laid_out(dtype: Dtype, shape: &[usize], codes: &[u64], head_axis: usize, view: StateView) -> Tensor {
    let mut extents = shape.to_vec();
    let mut order: Vec<usize> = (0..shape.len()).collect();
    match view {
        StateView::Contiguous => return Tensor::from_codes(dtype, shape, codes),
        StateView::HeadMajor => {
            order.remove(head_axis);
            order.insert(0, head_axis);
        }
        StateView::Sliced => {
            extents[head_axis] += 1;
            *extents.last_mut().expect("a state has axes") += 3;
        }
    }
    let mut strides = vec![1; shape.len()];
    for pair in order.windows(2).rev() {
        strides[pair[0]] = strides[pair[1]] * extents[pair[1]];
    }
    let size = dtype.size_bytes();
    let nan = encode(dtype, f64::NAN, Overflow::NonFinite).to_le_bytes();
    let mut bytes = nan[..size].repeat(extents.iter().product());
    for (index, code) in codes.iter().enumerate() {
        let (mut rest, mut offset) = (index, 0);
        for axis in (0..shape.len()).rev() {
            offset += rest % shape[axis] * strides[axis];
            rest /= shape[axis];
        }
        bytes[offset * size..(offset + 1) * size].copy_from_slice(&code.to_le_bytes()[..size]);
    }
    Tensor::view(dtype, shape.to_vec(), strides, bytes).expect("the buffer was made for these strides")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(id: &str) -> MergeInputs {
        id.parse::<Case>().unwrap().merge_inputs().unwrap()
    }

    #[test]
    fn every_view_reads_the_same_states_and_gaps_hold_nan() {
        let id = |view: &str| format!("merge_partials/w3.t4.h2.d5.bf16.a2a.hi_lo/some_empty/{view}/7");
        let contiguous = inputs(&id("contiguous"));
        for view in ["head_major", "sliced"] {
            let other = inputs(&id(view));
            for name in ["partial_out", "partial_lse"] {
                let (a, b) = (contiguous.tensors.get(name).unwrap(), other.tensors.get(name).unwrap());
                assert_eq!(a.to_codes(), b.to_codes(), "{view} {name}");
                assert!(!b.is_contiguous());
            }
        }
        let sliced = inputs(&id("sliced"));
        let out = sliced.tensors.get("partial_out").unwrap();
        let all =
            Tensor::new(Dtype::Bf16, vec![out.bytes().len() / 2], out.bytes().to_vec()).unwrap().to_f32();
        let in_gaps = all.iter().filter(|value| value.is_nan()).count();
        let inside = out.to_f32().iter().filter(|value| value.is_nan()).count();
        assert_eq!(in_gaps - inside, all.len() - out.len(), "every gap is NaN");
    }

    #[test]
    fn exact_values_are_what_the_tensors_hold() {
        for id in [
            "merge_partials/w3.t4.h2.d5.bf16.a2a.hi_lo/large_gaps/head_major/7",
            "merge_partials/w5.t2.h1.d8.f32.ag_rs/random/sliced/8",
            "merge_partials/w2.t3.h2.d6.bf16.a2a.lo_hi/nan_halves/contiguous/9",
        ] {
            let inputs = inputs(id);
            assert_eq!(inputs.tensors.get("partial_out").unwrap().to_f64(), inputs.outs, "{id}");
            assert_eq!(inputs.tensors.get("partial_lse").unwrap().to_f64(), inputs.lses, "{id}");
        }
    }

    #[test]
    fn an_empty_state_has_an_lse_of_minus_infinity_and_an_output_of_nan_and_each_row_keeps_one_that_is_not() {
        let inputs = inputs("merge_partials/w4.t6.h1.d3.bf16.a2a.hi_lo/some_empty/contiguous/3");
        let mut empty = 0;
        for row in 0..6 {
            let mut full = 0;
            for state in 0..4 {
                let index = (state * 6 + row) * inputs.heads;
                let is_empty = inputs.lses[index] == f64::NEG_INFINITY;
                assert_eq!(inputs.outs[index * 3].is_nan(), is_empty);
                empty += usize::from(is_empty);
                full += usize::from(!is_empty);
            }
            assert!(full > 0, "row {row} is empty everywhere");
        }
        assert!(empty >= 3);
    }

    #[test]
    fn all_empty_rows_alternate_with_full_ones() {
        let inputs = inputs("merge_partials/w2.t4.h1.d3.bf16.a2a.hi_lo/all_empty/contiguous/3");
        for state in 0..2 {
            for row in 0..4 {
                let lse = inputs.lses[(state * 4 + row) * inputs.heads];
                assert_eq!(lse == f64::NEG_INFINITY, row % 2 == 0);
            }
        }
    }

    #[test]
    fn broken_lses_stand_on_one_state_of_each_row_and_are_infinite_or_nan() {
        let broken = inputs("merge_partials/w3.t4.h1.d3.bf16.a2a.hi_lo/broken_lse/contiguous/3");
        for row in 0..4 {
            let lses: Vec<f64> = (0..3).map(|state| broken.lses[(state * 4 + row) * broken.heads]).collect();
            assert_eq!(lses.iter().filter(|lse| !lse.is_finite()).count(), 1);
            assert!(!lses[row % 3].is_finite());
        }
        assert!(broken.lses.iter().any(|lse| lse.is_nan()) && broken.lses.contains(&f64::INFINITY));
        let two = inputs("merge_states/w2.t4.h1.d3.bf16.a2a.hi_lo/broken_lse/contiguous/3");
        let of = |row: usize| [two.lses[row], two.lses[4 + row]];
        assert!(of(0)[0] == f64::INFINITY && of(1)[1] == f64::INFINITY, "{:?}", two.lses);
        assert!(of(2)[0].is_nan() && of(3)[1].is_nan(), "{:?}", two.lses);
        assert_eq!(two.lses.iter().filter(|lse| lse.is_finite()).count(), 4);
        let heads = inputs("merge_states/w2.t1.h2.d3.bf16.a2a.hi_lo/broken_lse/contiguous/3");
        assert!(heads.lses[0] == f64::INFINITY && heads.lses[1].is_nan(), "{:?}", heads.lses);
        assert!(two.outs.iter().chain(&heads.outs).all(|out| out.is_finite()));
    }

    #[test]
    fn large_gaps_leave_a_weight_in_one_head_and_none_in_the_next() {
        let inputs = inputs("merge_partials/w4.t8.h1.d3.f32.a2a.hi_lo/large_gaps/contiguous/3");
        let of = |turn: usize| {
            let lses = inputs.lses.iter().enumerate();
            let lses = lses.filter(|(at, _)| (at % inputs.heads + at / inputs.heads % 8) % 2 == turn);
            lses.fold((f64::MAX, f64::MIN), |(a, b), (_, lse)| (a.min(*lse), b.max(*lse)))
        };
        let ((low, high), (least, most)) = (of(0), of(1));
        assert!(high - low > 60.0 && high - low <= 80.0, "{low} … {high}");
        assert!(most - least > 300.0 && most - least <= 400.0 && most > 88.8, "{least} … {most}");
    }

    #[test]
    fn tags_tell_every_state_row_and_head_apart() {
        let inputs = inputs("merge_partials/w3.t4.h2.d6.bf16.a2a.hi_lo/tagged/contiguous/3");
        let states: Vec<&[f64]> = inputs.outs.chunks_exact(6).collect();
        for (a, left) in states.iter().enumerate() {
            for right in &states[a + 1..] {
                assert_ne!(left, right);
            }
        }
        assert!(inputs.lses.iter().all(|lse| *lse == 2.5));
    }

    #[test]
    fn nan_halves_are_numbers_whose_low_half_is_none() {
        let inputs = inputs("merge_partials/w4.t8.h2.d3.bf16.a2a.hi_lo/nan_halves/contiguous/3");
        let codes = inputs.tensors.get("partial_lse").unwrap().to_codes();
        let odd = codes.iter().filter(|code| **code & 0x7F80 == 0x7F80).count();
        assert!(inputs.lses.iter().all(|lse| lse.is_finite()));
        assert!(odd * 2 > codes.len(), "{odd} of {}", codes.len());
    }

    #[test]
    fn extremes_lie_at_both_ends_of_f16_and_a_sum_of_two_leaves_it() {
        let inputs = inputs("merge_partials/w4.t6.h2.d64.f16.a2a.hi_lo/extremes/contiguous/3");
        let (largest, least) = (Dtype::F16.max_finite(), 2f64.powi(-14));
        assert!(inputs.outs.iter().all(|out| round(Dtype::F16, *out) == *out && out.abs() <= largest));
        assert_eq!(inputs.tensors.get("partial_out").unwrap().to_f64(), inputs.outs);
        let count = |holds: &dyn Fn(f64) -> bool| inputs.outs.iter().filter(|out| holds(**out)).count();
        let third = inputs.outs.len() / 3;
        assert_eq!(count(&|out| 2.0 * out.abs() > largest), third);
        assert!(count(&|out| out.abs() < least) > third && count(&|out| out.abs() == least) > 0);
        assert!(count(&|out| out < 0.0) > third / 2);
    }

    #[test]
    fn halves_are_odd_in_the_type_of_the_states() {
        for (dtype, exponent) in [(Dtype::Bf16, 0x7F80), (Dtype::F16, 0x7C00)] {
            let odd = odd_halves(dtype).into_iter().filter(|half| half & exponent == exponent).count();
            assert_eq!(odd, 7, "{dtype}");
            for half in odd_halves(dtype) {
                let value = shardcheck_formats::decode(dtype, u64::from(half));
                assert!(
                    !value.is_finite() || value.abs() < 2f64.powi(dtype.min_exponent()),
                    "{dtype} {half:04x}"
                );
            }
        }
    }

    #[test]
    fn packed_lses_include_every_pair_of_odd_halves_bit_for_bit() {
        let inputs = inputs("pack_lse/w4.t8.h8.d1.f32.a2a.lo_hi/nan_halves/contiguous/3");
        let codes = inputs.tensors.get("lse").unwrap().to_codes();
        for high in ODD_HALVES {
            for low in ODD_HALVES {
                assert!(codes.contains(&u64::from(high << 16 | low)), "{high:04x}{low:04x}");
            }
        }
    }

    #[test]
    fn segments_beyond_the_active_ones_are_nan() {
        // values of vLLM's segment arithmetic: 16 segments, tile 64
        assert_eq!([0, 130, 5000].map(|len| active_segments(len, 16, 64)), [0, 3, 16]);
        let inputs = inputs("merge_segments/w4.t6.h2.d3.f32.a2a.hi_lo/all_empty/contiguous/3");
        for (row, len) in inputs.row_lens.iter().enumerate() {
            let active = active_segments(*len as usize, 4, MergeCase::TILE_TOKENS);
            assert_eq!(active == 0, row % 2 == 0);
            for segment in 0..4 {
                let index = (segment * 6 + row) * 2;
                assert_eq!(inputs.sums[index].is_nan(), segment >= active);
                assert_eq!(inputs.outs[index * 3].is_nan(), segment >= active);
                assert!(inputs.sums[index].is_nan() || inputs.sums[index] >= 1.0);
            }
        }
    }
}
