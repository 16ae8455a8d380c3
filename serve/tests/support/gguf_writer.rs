//! A writer of GGUF files, for tests alone.

use shardcheck_serve::encoding::Encoding;

/// A file in the making.
#[derive(Default)]
pub struct GgufWriter {
    metadata: Vec<(String, Vec<u8>)>,
    tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

fn text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

impl GgufWriter {
    fn typed(&mut self, key: &str, type_id: u32, value: &[u8]) {
        let bytes = [&type_id.to_le_bytes()[..], value].concat();
        self.metadata.retain(|(other, _)| other != key);
        self.metadata.push((key.to_string(), bytes));
    }

    pub fn remove(&mut self, key: &str) {
        self.metadata.retain(|(other, _)| other != key);
    }

    pub fn u32(&mut self, key: &str, value: u32) {
        self.typed(key, 4, &value.to_le_bytes());
    }

    pub fn f32(&mut self, key: &str, value: f32) {
        self.typed(key, 6, &value.to_le_bytes());
    }

    pub fn bool(&mut self, key: &str, value: bool) {
        self.typed(key, 7, &[u8::from(value)]);
    }

    pub fn text(&mut self, key: &str, value: &str) {
        let mut bytes = Vec::new();
        text(&mut bytes, value);
        self.typed(key, 8, &bytes);
    }

    pub fn texts(&mut self, key: &str, values: &[String]) {
        let mut bytes = [&8u32.to_le_bytes()[..], &(values.len() as u64).to_le_bytes()].concat();
        values.iter().for_each(|value| text(&mut bytes, value));
        self.typed(key, 9, &bytes);
    }

    pub fn integers(&mut self, key: &str, values: &[i32]) {
        let mut bytes = [&5u32.to_le_bytes()[..], &(values.len() as u64).to_le_bytes()].concat();
        values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        self.typed(key, 9, &bytes);
    }

    pub fn tensor(&mut self, name: &str, shape: &[usize], encoding: Encoding, bytes: Vec<u8>) {
        self.raw_tensor(name, shape, encoding.type_id(), bytes);
    }

    pub fn raw_tensor(&mut self, name: &str, shape: &[usize], type_id: u32, bytes: Vec<u8>) {
        self.tensors.retain(|(other, ..)| other != name);
        self.tensors.push((name.to_string(), shape.iter().map(|n| *n as u64).collect(), type_id, bytes));
    }

    /// The file's bytes, tensors aligned to 32.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            text(&mut out, key);
            out.extend(value);
        }
        let mut data = Vec::new();
        for (name, shape, type_id, bytes) in &self.tensors {
            text(&mut out, name);
            out.extend((shape.len() as u32).to_le_bytes());
            shape.iter().for_each(|n| out.extend(n.to_le_bytes()));
            out.extend(type_id.to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            data.extend(bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(data);
        out
    }
}
