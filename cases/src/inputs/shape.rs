//! How each probe shapes queries, keys and values out of Gaussian draws.
//!
//! Most probes *steer*: one or more of the last elements of a key hold a multiple of a fixed step, and the query holds there
//! what turns a step into the wanted difference of scores; all other elements are noise of small effect. In MLA the last
//! elements are the rotary part, so that steering leaves the value (the latent part) alone. Steps are multiples of the cache
//! scale times a power of two, so that they survive the cast to an 8-bit format exactly.

use shardcheck_engine::{Attention, Configuration};
use shardcheck_formats::{Dtype, half_ulp};

use super::blocks::blocks_needed;
use super::code::TokenCode;
use super::draw::Draw;
use crate::stream::Stream;
use crate::{AttentionCase, Family, Probe};

/// Distances that one steering element tells apart; older keys lie at [`FLOOR`]. Integers up to 8 are exact in every 8-bit
/// format.
const DISTANCES: usize = 8;
/// Steps below the newest key at which all keys that are too old lie.
const FLOOR: f32 = -16.0;
/// Score between two neighbours of the newest-dominant probe: e^−3 is a twentieth.
const NEWEST_STEP: f32 = 3.0;
/// Score of a forbidden key for the row that must not see it; all it may see lie within a few units of zero.
const POISON_SCORE: f32 = 24.0;
/// Value that a forbidden key carries, where the cache format holds it.
const POISON_VALUE: f32 = 50.0;
/// Highest level of poison: 48 steps are the most that every 8-bit format holds.
const MAX_POISON_LEVEL: usize = 2;
/// Centre of the scores of the cold probe.
const COLD_SCORE: f32 = -32.0;
/// Centre of the scores of the hot probe; an unshifted 32-bit exponential overflows at 88.7.
const HOT_SCORE: f32 = 100.0;
/// Steps of a key that is steered as a whole.
const WHOLE_STEPS: f32 = 16.0;
/// Common part of the common-mode probe, in deviations of the noise.
const COMMON_PART: f32 = 4.0;
/// Sum of the magnitudes of the scores that cancel to zero, in the cancellation probe.
const CANCELLING_SCORE: f32 = 60.0;
/// Mean magnitude of a product of two standard normal values, 2/π.
const MEAN_PRODUCT: f32 = std::f32::consts::FRAC_2_PI;

/// The probe of one case, ready to be asked for rows.
pub(super) struct Shape<'a> {
    family: Family,
    case: &'a AttentionCase,
    draw: Draw,
    code: TokenCode,
    key_means: Vec<f32>,
    value_means: Vec<f32>,
}

impl<'a> Shape<'a> {
    pub fn new(family: Family, case: &'a AttentionCase, draw: Draw) -> Self {
        let mut shape = Self {
            family,
            case,
            code: TokenCode::for_case(case),
            key_means: Vec::new(),
            value_means: Vec::new(),
            draw,
        };
        if case.probe == Probe::CommonMode {
            shape.key_means = shape.means(Stream::KeyMean, shape.key_elements());
            shape.value_means = shape.means(Stream::ValueMean, shape.value_elements());
        }
        shape
    }

    /// Element type of activations.
    pub fn dtype(&self) -> Dtype {
        self.case.configuration.dtype
    }

    /// Elements of the keys of one token: K · Dk.
    pub fn key_elements(&self) -> usize {
        self.attention().kv_heads() * self.attention().qk_dim()
    }

    /// Elements of the values of one token: K · Dv, 0 for MLA.
    pub fn value_elements(&self) -> usize {
        if self.attention().is_mla() { 0 } else { self.attention().kv_heads() * self.attention().value_dim() }
    }

    /// Stale tokens behind the cached ones of a request: at most a run of S on every rank, and only in blocks that it has.
    pub fn stale_tokens(&self, request: usize) -> usize {
        if self.case.probe != Probe::ForbiddenPoison {
            return 0;
        }
        let configuration = self.configuration();
        let request = &self.case.workload.requests[request];
        let cached = if self.family.brings_new_keys() { request.context_tokens } else { request.seq_len() };
        let room =
            blocks_needed(configuration, request.seq_len()) * configuration.virtual_block_tokens() - cached;
        room.min(configuration.interleave * configuration.dcp)
    }

    /// The queries [Hall, Dk] of one row, not yet rounded.
    pub fn query_row(&self, request: usize, row: usize, out: &mut [f32]) {
        let dim = self.attention().qk_dim();
        self.draw.gaussian(Stream::Query, request, row * out.len(), out);
        let steering = self.query_steering(request, row);
        let noise = self.noise_score() / self.score_of_unit_query(dim - self.steered());
        for head in out.chunks_exact_mut(dim) {
            match self.case.probe {
                Probe::TokenCode => head.fill(0.0),
                Probe::Cancellation => self.cancel_query(head),
                _ => head.iter_mut().for_each(|value| *value *= noise),
            }
            for (index, score_per_step) in steering.iter().enumerate() {
                let scale = self.configuration().softmax_scale;
                head[self.element(index)] = score_per_step / (self.step() * scale);
            }
            if self.case.probe == Probe::ForbiddenPoison {
                // poison carries its value in the even latent elements, where no query looks
                self.even_latents(head).for_each(|value| *value = 0.0);
            }
        }
    }

    /// The keys [K, Dk] of one position, not yet rounded.
    pub fn key_row(&self, request: usize, position: usize, out: &mut [f32]) {
        if self.tries_the_range() {
            self.draw.gaussian(Stream::Key, request, position * out.len(), out);
            return self.spread_over_the_range(position, out);
        }
        let dim = self.attention().qk_dim();
        let token = if self.case.probe == Probe::Cancellation { position / 2 } else { position };
        self.draw.gaussian(Stream::Key, request, token * out.len(), out);
        let unit = self.unit();
        out.iter_mut().for_each(|value| *value *= unit);
        let poison = self.poisoned_row(request, position);
        for (index, head) in out.chunks_exact_mut(dim).enumerate() {
            match self.case.probe {
                Probe::TokenCode if self.attention().is_mla() => self.code_latent(position, head),
                Probe::Cancellation => self.cancel_key(position, head),
                Probe::CommonMode => add(head, &self.key_means[index * dim..(index + 1) * dim]),
                _ => {}
            }
            for index in 0..self.steered() {
                head[self.element(index)] = self.key_steps(request, position, index) * self.step();
            }
            if let Some(row) = poison {
                self.poison_latent(self.poison_level(row), head);
            }
        }
    }

    /// The values [K, Dv] of one position, not yet rounded; nothing for MLA.
    pub fn value_row(&self, request: usize, position: usize, out: &mut [f32]) {
        if self.tries_the_range() {
            self.draw.gaussian(Stream::Value, request, position * out.len(), out);
            return self.spread_over_the_range(position, out);
        }
        let token = if self.case.probe == Probe::Cancellation { position / 2 } else { position };
        self.draw.gaussian(Stream::Value, request, token * out.len(), out);
        let unit = self.unit();
        out.iter_mut().for_each(|value| *value *= unit);
        match self.case.probe {
            Probe::TokenCode => {
                let dim = self.attention().value_dim();
                out.iter_mut().enumerate().for_each(|(i, value)| *value = self.code.sign(i % dim, position));
            }
            Probe::Cancellation if position % 2 == 1 => out.iter_mut().for_each(|value| *value = -*value),
            Probe::CommonMode => add(out, &self.value_means),
            Probe::ForbiddenPoison => {
                if let Some(row) = self.poisoned_row(request, position) {
                    out.fill(self.poison_value(self.poison_level(row)));
                }
            }
            _ => {}
        }
    }

    /// Turns keys and values into stale ones: aligned with every row of the request, and carrying the poison value.
    pub fn as_stale(&self, mut keys: Vec<f32>, mut values: Vec<f32>) -> (Vec<f32>, Vec<f32>) {
        let level = self.poison_level(self.case.workload.max_query_tokens().saturating_sub(1));
        for head in keys.chunks_exact_mut(self.attention().qk_dim()) {
            for index in 0..self.steered() {
                head[self.element(index)] =
                    super::activation(self.dtype(), self.poison_steps(level) * self.step());
            }
            self.poison_latent(level, head);
        }
        values.fill(super::activation(self.dtype(), self.poison_value(level)));
        (keys, values)
    }

    /// The up-projection [Hall, Dv, V], not yet rounded, where the case has one: noise that keeps the size of a value, or for the
    /// token code the identity on the first V elements, so that it can still be read.
    pub fn up_projection(&self) -> Option<Vec<f32>> {
        let attention = self.attention();
        if !attention.is_mla() || self.case.latent_output {
            return None;
        }
        let (from, to) = (attention.value_dim(), attention.v_head_dim());
        let mut matrix = vec![0.0; self.configuration().total_heads() * from * to];
        if self.case.probe == Probe::TokenCode {
            for head in matrix.chunks_exact_mut(from * to) {
                (0..from.min(to)).for_each(|index| head[index * to + index] = 1.0);
            }
            return Some(matrix);
        }
        self.draw.uniform(Stream::UpProjection, &mut matrix);
        let size = (from as f32).sqrt().recip();
        matrix.iter_mut().for_each(|value| *value *= size);
        Some(matrix)
    }

    fn configuration(&self) -> &Configuration {
        &self.case.configuration
    }

    fn attention(&self) -> Attention {
        self.configuration().attention
    }

    /// Deviation of key and value noise: 1, or less where the cache format ends at 8 deviations (12 around a common part).
    fn unit(&self) -> f32 {
        let deviations = if self.case.probe == Probe::CommonMode { 12.0 } else { 8.0 };
        (self.largest() / deviations).min(1.0)
    }

    /// The largest value that the cache format holds under the cache scale.
    fn largest(&self) -> f32 {
        (self.configuration().kv_dtype.max_finite() * f64::from(self.configuration().kv_scale)).min(1e6)
            as f32
    }

    /// Rows beyond the steering elements share them on a higher level: they see the poison of the lower ones.
    fn poison_level(&self, row: usize) -> usize {
        (row / self.steered().max(1)).min(MAX_POISON_LEVEL)
    }

    fn poison_steps(&self, level: usize) -> f32 {
        WHOLE_STEPS * (level + 1) as f32
    }

    /// What a forbidden key carries; the sign tells it from the poison of the level below, which its row may see.
    fn poison_value(&self, level: usize) -> f32 {
        let value = POISON_VALUE.min(0.9 * self.largest());
        if level.is_multiple_of(2) { value } else { -value }
    }

    /// A write that nobody attends to may leave the range of the cache format: what the cast does there is declared.
    fn tries_the_range(&self) -> bool {
        self.family == Family::Write && self.case.probe == Probe::Hot
    }

    /// Turns standard normal values into ones of which a twentieth lie beyond the largest finite value, and puts one of the
    /// edges of the format first: the largest value, the ties above it and below the smallest one, both zeros.
    fn spread_over_the_range(&self, position: usize, out: &mut [f32]) {
        let dtype = self.configuration().kv_dtype;
        let largest = self.largest();
        out.iter_mut().for_each(|value| *value *= 0.5 * largest);
        let scale = self.configuration().kv_scale;
        let above = half_ulp(dtype, dtype.max_finite()) as f32 * scale;
        let below = half_ulp(dtype, f64::MIN_POSITIVE) as f32 * scale;
        let edges = [largest, largest + above, -largest - above, 1.5 * largest, below, -below, 0.0, -0.0];
        if let Some(first) = out.first_mut() {
            *first = edges[position % edges.len()];
        }
    }

    /// One step of a steering element.
    fn step(&self) -> f32 {
        if self.configuration().kv_dtype.is_fp8() { 4.0 * self.configuration().kv_scale } else { 0.25 }
    }

    /// Elements that can steer, counted from the end of a key.
    fn steerable(&self) -> usize {
        match self.attention() {
            Attention::Mla { qk_rope_head_dim, .. } => qk_rope_head_dim,
            Attention::Gqa { head_dim, .. } => (head_dim / 2).max(1),
        }
    }

    fn element(&self, index: usize) -> usize {
        self.attention().qk_dim() - 1 - index
    }

    /// Elements that steer in this case.
    fn steered(&self) -> usize {
        let rows = self.case.workload.max_query_tokens();
        let wanted = match self.case.probe {
            Probe::Gaussian | Probe::CommonMode | Probe::Cancellation | Probe::TokenCode => 0,
            Probe::NewestDominant if self.family == Family::Draft => 1,
            Probe::NewestDominant => rows.div_ceil(DISTANCES).max(1),
            Probe::ForbiddenPoison => rows.max(1),
            Probe::Cold | Probe::Hot | Probe::Sink => 1,
        };
        wanted.min(self.steerable())
    }

    /// Deviation of the scores that noise makes.
    fn noise_score(&self) -> f32 {
        match self.case.probe {
            Probe::NewestDominant => 0.25,
            Probe::ForbiddenPoison | Probe::Sink => 0.5,
            _ => 1.0,
        }
    }

    /// Deviation of the scores of a query of unit deviation over `elements` elements of noise.
    fn score_of_unit_query(&self, elements: usize) -> f32 {
        let elements = match (self.case.probe, self.attention()) {
            (Probe::ForbiddenPoison, Attention::Mla { kv_lora_rank, .. }) => {
                elements - kv_lora_rank.div_ceil(2)
            }
            _ => elements,
        };
        self.configuration().softmax_scale * self.unit() * (elements.max(1) as f32).sqrt()
    }

    /// Score per step that a row gives to each steering element.
    fn query_steering(&self, request: usize, row: usize) -> Vec<f32> {
        let mut steering = vec![0.0; self.steered()];
        let Some(last) = steering.len().checked_sub(1) else { return steering };
        let request = &self.case.workload.requests[request];
        let visible =
            if self.family == Family::Draft { request.seq_len() } else { request.context_tokens + row + 1 };
        match self.case.probe {
            Probe::NewestDominant => {
                let distance = request.seq_len() - visible;
                steering[(distance / DISTANCES).min(last)] = NEWEST_STEP;
            }
            Probe::ForbiddenPoison => steering[row % (last + 1)] = POISON_SCORE / WHOLE_STEPS,
            Probe::Cold => steering[0] = COLD_SCORE / WHOLE_STEPS,
            Probe::Hot => steering[0] = HOT_SCORE / WHOLE_STEPS,
            Probe::Sink => steering[0] = (4.0 + (visible as f32).ln()) / WHOLE_STEPS,
            Probe::Gaussian | Probe::CommonMode | Probe::Cancellation | Probe::TokenCode => {}
        }
        steering
    }

    /// Steps that a key holds in a steering element.
    fn key_steps(&self, request: usize, position: usize, index: usize) -> f32 {
        match self.case.probe {
            Probe::NewestDominant => {
                // distance from the end; a row that sees it looks at the element of its own distance
                let len = self.case.workload.requests[request].seq_len();
                let distance = (len - 1).saturating_sub(position);
                match (distance / DISTANCES).cmp(&index) {
                    std::cmp::Ordering::Less => 0.0,
                    std::cmp::Ordering::Equal => -((distance % DISTANCES) as f32),
                    std::cmp::Ordering::Greater => FLOOR,
                }
            }
            Probe::ForbiddenPoison => {
                let row = self.poisoned_row(request, position).filter(|row| row % self.steered() == index);
                row.map_or(0.0, |row| self.poison_steps(self.poison_level(row)))
            }
            Probe::Cold | Probe::Hot => WHOLE_STEPS,
            Probe::Sink if position == 0 => WHOLE_STEPS,
            _ => 0.0,
        }
    }

    /// The row of the step for which this position is the first forbidden one, in the forbidden-poison probe. A draft block
    /// forbids none of its own.
    fn poisoned_row(&self, request: usize, position: usize) -> Option<usize> {
        if self.case.probe != Probe::ForbiddenPoison || self.family == Family::Draft {
            return None;
        }
        let request = &self.case.workload.requests[request];
        let row = position.checked_sub(request.context_tokens + 1)?;
        (row < request.query_tokens).then_some(row)
    }

    /// The value of a forbidden key in the even elements of the latent part, and nothing in the odd ones, which queries read.
    fn poison_latent(&self, level: usize, head: &mut [f32]) {
        if let Attention::Mla { kv_lora_rank, .. } = self.attention() {
            let value = super::activation(self.dtype(), self.poison_value(level));
            head[..kv_lora_rank]
                .iter_mut()
                .enumerate()
                .for_each(|(i, x)| *x = if i % 2 == 0 { value } else { 0.0 });
        }
    }

    fn even_latents<'h>(&self, head: &'h mut [f32]) -> impl Iterator<Item = &'h mut f32> {
        let latent = match self.attention() {
            Attention::Mla { kv_lora_rank, .. } => kv_lora_rank,
            Attention::Gqa { .. } => 0,
        };
        head[..latent].iter_mut().step_by(2)
    }

    fn code_latent(&self, position: usize, head: &mut [f32]) {
        let latent = self.attention().value_dim();
        head[..latent].iter_mut().enumerate().for_each(|(dim, value)| *value = self.code.sign(dim, position));
    }

    /// Elements that cancel pairwise: the latent part of MLA, half the width of GQA.
    fn cancelling(&self) -> usize {
        let elements = match self.attention() {
            Attention::Mla { kv_lora_rank, .. } => kv_lora_rank,
            Attention::Gqa { head_dim, .. } => head_dim / 2,
        };
        elements - elements % 2
    }

    /// Pairs (x, −x) over keys whose pairs are equal: large products whose sum is exactly zero. The rest makes the scores.
    fn cancel_query(&self, head: &mut [f32]) {
        let (pairs, rest) = head.split_at_mut(self.cancelling());
        let one = CANCELLING_SCORE / (pairs.len().max(1) as f32 * MEAN_PRODUCT);
        let large = one / (self.configuration().softmax_scale * self.unit());
        for pair in pairs.chunks_exact_mut(2) {
            pair[0] *= large;
            pair[1] = -pair[0];
        }
        let noise = self.noise_score() / self.score_of_unit_query(rest.len());
        rest.iter_mut().for_each(|value| *value *= noise);
        if let Attention::Mla { kv_lora_rank, .. } = self.attention()
            && kv_lora_rank % 2 == 1
        {
            // an unpaired latent element would turn the sign of its score with the token
            rest[0] = 0.0;
        }
    }

    /// Two neighbours share their scores; in MLA the second one's latent part, which is its value, is turned round.
    fn cancel_key(&self, position: usize, head: &mut [f32]) {
        for pair in head[..self.cancelling()].chunks_exact_mut(2) {
            pair[1] = pair[0];
        }
        if self.attention().is_mla() && position % 2 == 1 {
            head[..self.attention().value_dim()].iter_mut().for_each(|value| *value = -*value);
        }
    }

    fn means(&self, stream: Stream, elements: usize) -> Vec<f32> {
        let mut means = vec![0.0; elements];
        self.draw.signs(stream, &mut means);
        means.iter_mut().for_each(|mean| *mean *= COMMON_PART * self.unit());
        means
    }
}

fn add(values: &mut [f32], offsets: &[f32]) {
    values.iter_mut().zip(offsets).for_each(|(value, offset)| *value += offset);
}
