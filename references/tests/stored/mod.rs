//! Reader of vectors that lie beside the repository: one `.safetensors` and one `.json` per area.
#![allow(dead_code, reason = "each test binary uses its own part")]

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;

/// The vectors of one area.
pub struct Stored {
    bytes: Vec<u8>,
    tensors: HashMap<String, (Dtype, Range<usize>)>,
    /// The parsed JSON file.
    pub json: Value,
}

impl Stored {
    /// Reads `shared/data/<area>.{safetensors,json}` beside the repository; where it is absent, says so on
    /// standard error and returns `None`.
    pub fn open(area: &str) -> Option<Self> {
        let base = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared/data").join(area);
        let tensors = base.with_extension("safetensors");
        if !tensors.exists() {
            eprintln!("SKIPPED: stored vectors {area} are not beside the repository");
            return None;
        }
        let bytes = std::fs::read(tensors).expect("the tensors can be read");
        let text = std::fs::read_to_string(base.with_extension("json")).expect("the description can be read");
        let (header_len, metadata) = SafeTensors::read_metadata(&bytes).expect("a safetensors header");
        let tensors = metadata
            .tensors()
            .into_iter()
            .map(|(name, info)| {
                let (start, end) = info.data_offsets;
                (name, (info.dtype, header_len + 8 + start..header_len + 8 + end))
            })
            .collect();
        Some(Self { bytes, tensors, json: serde_json::from_str(&text).expect("the description is JSON") })
    }

    /// The cases, in the order of the file.
    pub fn cases(&self) -> &[Value] {
        self.json["cases"].as_array().expect("a list of cases")
    }

    /// Every number of a tensor, widened exactly.
    pub fn f64(&self, name: &str) -> Vec<f64> {
        let (dtype, range) = self.tensors.get(name).unwrap_or_else(|| panic!("no tensor {name}"));
        let data = &self.bytes[range.clone()];
        match dtype {
            Dtype::F64 => data.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect(),
            Dtype::F32 => {
                data.as_chunks().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect()
            }
            Dtype::BF16 => data
                .as_chunks()
                .0
                .iter()
                .map(|bytes| f64::from(f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16)))
                .collect(),
            Dtype::I32 => {
                data.as_chunks().0.iter().map(|bytes| f64::from(i32::from_le_bytes(*bytes))).collect()
            }
            Dtype::I64 => data.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes) as f64).collect(),
            other => panic!("{name} is {other:?}"),
        }
    }

    /// The bytes of a tensor.
    pub fn bytes(&self, name: &str) -> &[u8] {
        &self.bytes[self.tensors.get(name).unwrap_or_else(|| panic!("no tensor {name}")).1.clone()]
    }

    /// Every number of a tensor that holds values of f32 or a narrower type.
    pub fn f32(&self, name: &str) -> Vec<f32> {
        self.f64(name).into_iter().map(|value| value as f32).collect()
    }
}

/// An unsigned field of a JSON object.
pub fn count(case: &Value, field: &str) -> usize {
    case[field].as_u64().unwrap_or_else(|| panic!("{field} in {case}")) as usize
}
