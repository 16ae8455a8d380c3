//! Arrays of a script: in its text as base64, or in a file beside it.

use serde_json::{Value, json};
use shardcheck_engine::{Tensor, Tensors};
use shardcheck_formats::Dtype;

use super::npz::{Member, archive};

/// Bytes of arrays that a script holds itself.
const MOST_EMBEDDED_BYTES: usize = 1 << 20;

/// Arrays as they are collected: each stands in the data by its key until all are known.
#[derive(Default)]
pub(super) struct Arrays(Vec<Entry>);

struct Entry {
    key: String,
    dtype: Dtype,
    bytes: Vec<u8>,
}

impl Arrays {
    /// Adds a tensor. numpy has no fp8: such a tensor goes as the float32 of its values.
    pub fn tensor(&mut self, key: &str, tensor: &Tensor) -> Value {
        let tensor = match tensor.dtype() {
            Dtype::E4m3fn | Dtype::E4m3fnuz | Dtype::E5m2 => {
                Tensor::from_f32(Dtype::F32, tensor.shape(), &tensor.to_f32())
            }
            _ => tensor.to_contiguous(),
        };
        let value = json!({"dtype": tensor.dtype(), "shape": tensor.shape(), "key": key});
        self.0.push(Entry { key: key.to_owned(), dtype: tensor.dtype(), bytes: tensor.bytes().to_vec() });
        value
    }

    /// Adds f64 numbers.
    pub fn numbers(&mut self, key: &str, shape: &[usize], values: &[f64]) -> Value {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.0.push(Entry { key: key.to_owned(), dtype: Dtype::F64, bytes });
        json!({"dtype": Dtype::F64, "shape": shape, "key": key})
    }

    /// Adds tensors by name.
    pub fn tensors(&mut self, prefix: &str, tensors: &Tensors) -> Value {
        let entries = tensors
            .iter()
            .map(|(name, tensor)| (name.to_owned(), self.tensor(&format!("{prefix}.{name}"), tensor)));
        Value::Object(entries.collect())
    }

    /// Puts the arrays into the data, or into the archive that is returned.
    pub fn finish(self, data: &mut Value) -> Option<Vec<u8>> {
        let bytes: usize = self.0.iter().map(|entry| entry.bytes.len()).sum();
        if bytes > MOST_EMBEDDED_BYTES {
            let members: Vec<Member<'_>> = self
                .0
                .iter()
                .map(|entry| Member {
                    name: &entry.key,
                    width: entry.dtype.size_bytes(),
                    bytes: &entry.bytes,
                })
                .collect();
            return Some(archive(&members));
        }
        embed(data, &self.0);
        None
    }
}

/// Replaces keys by what they stand for.
fn embed(value: &mut Value, entries: &[Entry]) {
    match value {
        Value::Object(map) if map.contains_key("key") && map.contains_key("dtype") => {
            let key = map.remove("key");
            let entry =
                entries.iter().find(|entry| Some(entry.key.as_str()) == key.as_ref().and_then(Value::as_str));
            map.insert("base64".to_owned(), base64(entry.map_or(&[], |entry| &entry.bytes)).into());
        }
        Value::Object(map) => map.values_mut().for_each(|value| embed(value, entries)),
        Value::Array(list) => list.iter_mut().for_each(|value| embed(value, entries)),
        _ => {}
    }
}

/// Base64 with padding (RFC 4648, section 4).
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word =
            chunk.iter().fold(0u32, |word, byte| word << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for place in 0..4 {
            if place <= chunk.len() {
                text.push(char::from(ALPHABET[(word >> (18 - 6 * place)) as usize & 63]));
            } else {
                text.push('=');
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_standard() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[0xff, 0xfe, 0xfb]), "//77");
    }

    #[test]
    fn few_bytes_lie_in_the_data_and_many_beside_it() {
        for (count, beside) in [(16, false), (1 << 18, true)] {
            let mut arrays = Arrays::default();
            let mut data = json!({"a": [arrays.numbers("x", &[count], &vec![0.5; count])]});
            assert_eq!(arrays.finish(&mut data).is_some(), beside);
            assert_eq!(data["a"][0].get("key").is_some(), beside);
            assert_eq!(data["a"][0].get("base64").is_some(), !beside);
        }
    }
}
