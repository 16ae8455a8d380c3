//! A random Llama of two layers that uses every encoding, and the weights it really has.

use std::collections::HashMap;
use std::io::Write;

use shardcheck_serve::encoding::Encoding;
use tempfile::NamedTempFile;

use super::gguf_writer::GgufWriter;

pub const LAYERS: usize = 2;
pub const WIDTH: usize = 64;
pub const HEADS: usize = 4;
pub const KV_HEADS: usize = 2;
pub const HEAD_DIM: usize = WIDTH / HEADS;
pub const FEED_FORWARD: usize = 96;
pub const CONTEXT: usize = 30_000;
pub const ROPE_BASE: f64 = 10_000.0;
pub const NORM_EPSILON: f64 = 1e-5;

/// Control tokens 0 and 1; 1 ends a generation.
pub const SPECIALS: [&str; 2] = ["<|endoftext|>", "<|im_end|>"];
pub const END: u32 = 1;

/// Merges in rank order, in the byte-level alphabet.
const MERGES: [&str; 6] = ["Ġ t", "h e", "Ġt he", "i n", "o n", "Ġ Ġ"];

/// The writer of the model's file, and its weights by tensor name, `[outputs][inputs]`, as the file's codes spell them.
pub struct Tiny {
    pub writer: GgufWriter,
    pub weights: HashMap<String, Vec<Vec<f64>>>,
    pub vocabulary: usize,
    state: u64,
}

impl Tiny {
    /// With an output matrix of its own, without which a random model repeats its last token.
    pub fn new(seed: u64) -> Self {
        let mut tiny = Self::tied(seed);
        tiny.matrix("output", WIDTH, tiny.vocabulary, Encoding::Q8_0);
        tiny
    }

    /// With the embedding as output matrix.
    pub fn tied(seed: u64) -> Self {
        let mut tiny =
            Self { writer: GgufWriter::default(), weights: HashMap::new(), vocabulary: 0, state: seed };
        tiny.metadata();
        tiny.matrix("token_embd", WIDTH, tiny.vocabulary, Encoding::Q8_0);
        let kv = KV_HEADS * HEAD_DIM;
        for layer in 0..LAYERS {
            let name = |part: &str| format!("blk.{layer}.{part}");
            tiny.matrix(&name("attn_q"), WIDTH, WIDTH, Encoding::Q4_1);
            tiny.matrix(&name("attn_k"), WIDTH, kv, Encoding::Q8_0);
            tiny.matrix(&name("attn_v"), WIDTH, kv, Encoding::Q4_1);
            tiny.matrix(&name("attn_output"), WIDTH, WIDTH, Encoding::F32);
            tiny.matrix(&name("ffn_gate"), WIDTH, FEED_FORWARD, Encoding::Q4_1);
            tiny.matrix(&name("ffn_up"), WIDTH, FEED_FORWARD, Encoding::Q8_0);
            tiny.matrix(&name("ffn_down"), FEED_FORWARD, WIDTH, Encoding::Q4_1);
            tiny.norm(&name("attn_norm"));
            tiny.norm(&name("ffn_norm"));
        }
        tiny.norm("output_norm");
        tiny
    }

    /// The model in a temporary file, which is deleted when the value goes.
    pub fn file(&self) -> NamedTempFile {
        let mut file = NamedTempFile::with_suffix(".gguf").expect("a temporary file");
        file.write_all(&self.writer.bytes()).expect("room for a small file");
        file
    }

    fn metadata(&mut self) {
        let writer = &mut self.writer;
        writer.text("general.architecture", "llama");
        writer.u32("llama.block_count", LAYERS as u32);
        writer.u32("llama.context_length", CONTEXT as u32);
        writer.u32("llama.embedding_length", WIDTH as u32);
        writer.u32("llama.feed_forward_length", FEED_FORWARD as u32);
        writer.u32("llama.attention.head_count", HEADS as u32);
        writer.u32("llama.attention.head_count_kv", KV_HEADS as u32);
        writer.f32("llama.rope.freq_base", ROPE_BASE as f32);
        writer.f32("llama.attention.layer_norm_rms_epsilon", NORM_EPSILON as f32);
        let mut tokens: Vec<String> = SPECIALS.map(String::from).to_vec();
        tokens.extend(byte_characters().map(String::from));
        tokens.extend(MERGES.map(|merge| merge.replace(' ', "")));
        let types: Vec<i32> = (0..tokens.len()).map(|id| if id < SPECIALS.len() { 3 } else { 1 }).collect();
        self.vocabulary = tokens.len();
        writer.text("tokenizer.ggml.model", "gpt2");
        writer.text("tokenizer.ggml.pre", "smollm");
        writer.texts("tokenizer.ggml.tokens", &tokens);
        writer.integers("tokenizer.ggml.token_type", &types);
        writer.texts("tokenizer.ggml.merges", &MERGES.map(String::from));
        writer.u32("tokenizer.ggml.eos_token_id", END);
    }

    fn random(&mut self, bound: u64) -> u64 {
        self.state =
            self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) % bound
    }

    fn norm(&mut self, name: &str) {
        let values: Vec<f32> = (0..WIDTH).map(|_| 0.75 + self.random(65) as f32 / 128.0).collect();
        let name = format!("{name}.weight");
        self.weights.insert(name.clone(), vec![values.iter().map(|x| f64::from(*x)).collect()]);
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.writer.tensor(&name, &[WIDTH], Encoding::F32, bytes);
    }

    /// A matrix of elements of about 0.14 (output: about 0.3; embedding: about 1).
    fn matrix(&mut self, name: &str, inputs: usize, outputs: usize, encoding: Encoding) {
        let (mut bytes, mut rows) = (Vec::new(), Vec::new());
        let scale = match name {
            "token_embd" => Some(1.0 / 64.0),
            "output" => Some(1.0 / 256.0),
            _ => None,
        };
        for _ in 0..outputs {
            let mut row = Vec::new();
            while row.len() < inputs {
                self.block(encoding, scale, &mut row, &mut bytes);
            }
            rows.push(row);
        }
        let name = format!("{name}.weight");
        self.weights.insert(name.clone(), rows);
        self.writer.tensor(&name, &[inputs, outputs], encoding, bytes);
    }

    fn block(&mut self, encoding: Encoding, scale: Option<f64>, row: &mut Vec<f64>, bytes: &mut Vec<u8>) {
        match encoding {
            Encoding::F32 => {
                let value = self.random(1001) as f32 / 2000.0 - 0.25;
                bytes.extend(value.to_le_bytes());
                row.push(f64::from(value));
            }
            Encoding::Q8_0 => {
                let scale = scale.unwrap_or_else(|| (1 + self.random(3)) as f64 / 1024.0);
                bytes.extend(half(scale).to_le_bytes());
                for _ in 0..32 {
                    let code = self.random(256) as u8 as i8;
                    bytes.push(code as u8);
                    row.push(scale * f64::from(code));
                }
            }
            Encoding::Q4_1 => {
                let scale = (2 + self.random(4)) as f64 / 128.0;
                let minimum = -7.5 * scale;
                bytes.extend(half(scale).to_le_bytes());
                bytes.extend(half(minimum).to_le_bytes());
                let codes: Vec<u8> = (0..32).map(|_| self.random(16) as u8).collect();
                bytes.extend((0..16).map(|j| codes[j] | codes[16 + j] << 4));
                row.extend(codes.iter().map(|code| scale * f64::from(*code) + minimum));
            }
        }
    }
}

/// The characters of the byte-level alphabet, bytes ascending.
fn byte_characters() -> impl Iterator<Item = char> {
    let mut shifted = 0x100u32..;
    (0..=255u32).map(move |byte| {
        let itself = (33..=126).contains(&byte) || (161..=172).contains(&byte) || byte >= 174;
        char::from_u32(if itself { byte } else { shifted.next().expect("endless") }).expect("a character")
    })
}

/// IEEE binary16 of a value that it represents exactly as a normal number.
fn half(value: f64) -> u16 {
    let bits = (value as f32).to_bits();
    let exponent = (bits >> 23 & 255) as i32 - 127 + 15;
    assert!((1..31).contains(&exponent) && bits & 0x1fff == 0, "{value} is no normal half");
    (bits >> 16 & 0x8000) as u16 | (exponent as u16) << 10 | (bits >> 13 & 0x3ff) as u16
}
