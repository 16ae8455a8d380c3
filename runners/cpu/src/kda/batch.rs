//! A step of Kimi delta attention as it is given, checked.

use std::collections::BTreeSet;

use shardcheck_engine::{EngineError, KdaPlan, Tensors};
use shardcheck_formats::Dtype;

use super::crash;

/// What a request reads, keeps and writes.
pub(super) struct Request {
    pub read: Option<usize>,
    pub write: usize,
    pub accepted: usize,
}

/// The inputs of a step.
pub(super) struct Batch {
    pub tp: usize,
    pub heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    pub taps: usize,
    pub starts: Vec<usize>,
    pub requests: Vec<Request>,
    pub gate: Vec<f32>,
    pub beta: Vec<f32>,
    pub output_gate: Vec<f32>,
    pub a_log: Vec<f32>,
    pub dt_bias: Vec<f32>,
    pub norm_weight: Vec<f32>,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    conv_query: Vec<f32>,
    conv_key: Vec<f32>,
    conv_value: Vec<f32>,
}

impl Batch {
    /// Reads a step.
    pub fn read(inputs: &Tensors, plan: KdaPlan, tp: usize) -> Result<Self, EngineError> {
        let shapes =
            [inputs.get("query")?.shape(), inputs.get("value")?.shape(), inputs.get("conv_query")?.shape()];
        let (&[rows, heads, key_dim], &[_, value_heads, value_dim], &[_, _, taps]) =
            (shapes[0], shapes[1], shapes[2])
        else {
            return Err(crash("query, value and conv_query have three axes".to_owned()));
        };
        if heads == 0 || !heads.is_multiple_of(tp) || !value_heads.is_multiple_of(heads) || taps == 0 {
            return Err(crash(format!("{tp} ranks do not share {heads} heads or {value_heads} value heads")));
        }
        let floats = |name: &str, dtype: Dtype, shape: &[usize]| -> Result<Vec<f32>, EngineError> {
            Ok(inputs.get(name)?.expect(name, dtype, shape)?.to_f32())
        };
        let count = inputs.get("write_slots")?.len();
        let integers = |name: &str, count: usize| -> Result<Vec<i64>, EngineError> {
            Ok(inputs.get(name)?.expect(name, Dtype::I32, &[count])?.to_i64())
        };
        let (read, write) = (integers("read_slots", count)?, integers("write_slots", count)?);
        let accepted = integers("accepted", count)?;
        let (single, coded) = (Dtype::F32, Dtype::Bf16);
        Ok(Self {
            tp,
            heads,
            value_heads,
            key_dim,
            value_dim,
            taps,
            starts: starts(&integers("query_start_loc", count + 1)?, rows)?,
            requests: requests(&read, &write, &accepted, plan)?,
            gate: floats("gate", single, &[rows, value_heads, key_dim])?,
            beta: floats("beta", single, &[rows, value_heads])?,
            output_gate: floats("output_gate", single, &[rows, value_heads, value_dim])?,
            a_log: floats("a_log", single, &[value_heads])?,
            dt_bias: floats("dt_bias", single, &[value_heads, key_dim])?,
            norm_weight: floats("norm_weight", single, &[value_dim])?,
            query: floats("query", coded, &[rows, heads, key_dim])?,
            key: floats("key", coded, &[rows, heads, key_dim])?,
            value: floats("value", coded, &[rows, value_heads, value_dim])?,
            conv_query: floats("conv_query", single, &[heads, key_dim, taps])?,
            conv_key: floats("conv_key", single, &[heads, key_dim, taps])?,
            conv_value: floats("conv_value", single, &[value_heads, value_dim, taps])?,
        })
    }

    pub fn rows(&self) -> usize {
        self.starts[self.requests.len()]
    }

    /// Channels of all ranks.
    pub fn channels(&self) -> usize {
        2 * self.heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// A rank's part of three tensors with heads, one entry of `width` for each channel, from the rank's first heads on.
    fn own(&self, parts: [&[f32]; 3], first: [usize; 2], width: usize) -> Vec<f32> {
        let (keys, values) = (self.heads / self.tp, self.value_heads / self.tp);
        let of = |part: &[f32], first: usize, count: usize, dim: usize| {
            part[first * dim * width..(first + count) * dim * width].to_vec()
        };
        let mut own = of(parts[0], first[0], keys, self.key_dim);
        own.extend(of(parts[1], first[0], keys, self.key_dim));
        own.extend(of(parts[2], first[1], values, self.value_dim));
        own
    }

    /// Weights of a rank's channels, `[channels, taps]`.
    pub fn channel_weights(&self, first_key: usize, first_value: usize) -> Vec<f32> {
        self.own([&self.conv_query, &self.conv_key, &self.conv_value], [first_key, first_value], self.taps)
    }

    /// Inputs of a rank's channels at a row.
    pub fn channel_inputs(&self, row: usize, first_key: usize, first_value: usize) -> Vec<f32> {
        let (keys, values) = (self.heads * self.key_dim, self.value_heads * self.value_dim);
        let parts = [
            &self.query[row * keys..(row + 1) * keys],
            &self.key[row * keys..(row + 1) * keys],
            &self.value[row * values..(row + 1) * values],
        ];
        self.own(parts, [first_key, first_value], 1)
    }
}

fn starts(given: &[i64], rows: usize) -> Result<Vec<usize>, EngineError> {
    let starts: Vec<usize> = given.iter().filter_map(|start| usize::try_from(*start).ok()).collect();
    let grows = starts.windows(2).all(|pair| pair[0] <= pair[1]);
    if starts.len() != given.len() || starts[0] != 0 || starts[starts.len() - 1] != rows || !grows {
        return Err(crash(format!("query_start_loc does not share {rows} rows out")));
    }
    Ok(starts)
}

fn requests(
    read: &[i64],
    write: &[i64],
    accepted: &[i64],
    plan: KdaPlan,
) -> Result<Vec<Request>, EngineError> {
    let slot = |slot: i64| usize::try_from(slot).ok().filter(|slot| *slot < plan.slots);
    let mut written = BTreeSet::new();
    let one = |((read, write), accepted): ((&i64, &i64), &i64)| {
        let (from, to) = (slot(*read), slot(*write));
        let fits = (*read == -1 || from.is_some()) && to.is_some_and(|to| written.insert(to));
        match (to.filter(|_| fits), usize::try_from(*accepted)) {
            (Some(to), Ok(accepted)) => Ok(Request { read: from, write: to, accepted }),
            _ => Err(crash(format!(
                "a request reads slot {read}, writes slot {write} and counts {accepted} rows; slots are 0 to {}, each written once",
                plan.slots as i64 - 1
            ))),
        }
    };
    read.iter().zip(write).zip(accepted).map(one).collect()
}
