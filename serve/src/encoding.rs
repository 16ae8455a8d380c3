//! How a tensor's elements are stored, and the decoding of each way.
//!
//! Layouts are those of ggml's `ggml-common.h` (`block_q4_1`, `block_q8_0`); values are scale · code (+ minimum), each
//! operation rounded once in f32, in ggml's order.

/// The encodings that this crate decodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// Little-endian IEEE binary32.
    F32,
    /// 32 elements in 20 bytes: f16 scale, f16 minimum, 16 bytes of nibbles (low nibbles are elements 0–15).
    Q4_1,
    /// 32 elements in 34 bytes: f16 scale, 32 signed bytes.
    Q8_0,
}

impl Encoding {
    /// Every encoding.
    pub const ALL: [Self; 3] = [Self::F32, Self::Q4_1, Self::Q8_0];

    /// ggml's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::Q4_1 => "Q4_1",
            Self::Q8_0 => "Q8_0",
        }
    }

    /// ggml's number (`enum ggml_type`).
    pub fn type_id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::Q4_1 => 3,
            Self::Q8_0 => 8,
        }
    }

    /// The encoding of ggml's number, if this crate decodes it.
    pub fn from_type_id(type_id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|encoding| encoding.type_id() == type_id)
    }

    /// The names of all encodings, for messages.
    pub fn list() -> String {
        Self::ALL.map(Self::name).join(", ")
    }

    /// Elements that are stored together; a row is a whole number of blocks.
    pub fn block_elements(self) -> usize {
        match self {
            Self::F32 => 1,
            Self::Q4_1 | Self::Q8_0 => 32,
        }
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Q4_1 => 20,
            Self::Q8_0 => 34,
        }
    }

    /// Bytes of a row of `elements`, which must be a multiple of [`Self::block_elements`].
    pub fn row_bytes(self, elements: usize) -> usize {
        elements / self.block_elements() * self.block_bytes()
    }

    /// Whether every scale, minimum and value in `bytes` is finite. [`f16_to_f32`] relies on it.
    pub fn all_finite(self, bytes: &[u8]) -> bool {
        let finite_f16 = |pair: &[u8]| pair[1] & 0x7c != 0x7c;
        let mut blocks = bytes.chunks_exact(self.block_bytes());
        match self {
            Self::F32 => blocks.all(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]).is_finite()),
            Self::Q4_1 => blocks.all(|b| finite_f16(&b[0..2]) && finite_f16(&b[2..4])),
            Self::Q8_0 => blocks.all(|b| finite_f16(&b[0..2])),
        }
    }

    /// Decodes whole blocks of `bytes` into `out`, whose length says how many elements there are.
    ///
    /// # Panics
    /// If `bytes` has another length than `out` needs.
    #[inline(always)] // so that each caller compiles it for its own instruction set
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(bytes.len(), self.row_bytes(out.len()), "bytes do not match the elements asked for");
        match self {
            Self::F32 => {
                for (value, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *value = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
            }
            Self::Q4_1 => {
                for (values, block) in out.chunks_exact_mut(32).zip(bytes.chunks_exact(20)) {
                    let (scale, minimum) = q4_1_scales(block);
                    let (low, high) = values.split_at_mut(16);
                    for j in 0..16 {
                        let codes = block[4 + j];
                        low[j] = f32::from(codes & 15) * scale + minimum;
                        high[j] = f32::from(codes >> 4) * scale + minimum;
                    }
                }
            }
            Self::Q8_0 => {
                for (values, block) in out.chunks_exact_mut(32).zip(bytes.chunks_exact(34)) {
                    let scale = f16_to_f32(u16::from_le_bytes([block[0], block[1]]));
                    for j in 0..32 {
                        values[j] = f32::from(block[2 + j] as i8) * scale;
                    }
                }
            }
        }
    }
}

/// Scale and minimum of a Q4_1 block.
#[inline(always)]
pub fn q4_1_scales(block: &[u8]) -> (f32, f32) {
    let half = |at: usize| f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]));
    (half(0), half(2))
}

/// The name of a ggml type for messages, also of those that this crate can't decode.
pub fn type_name(type_id: u32) -> String {
    let name = match type_id {
        0 => "F32",
        1 => "F16",
        2 => "Q4_0",
        3 => "Q4_1",
        6 => "Q5_0",
        7 => "Q5_1",
        8 => "Q8_0",
        10 => "Q2_K",
        11 => "Q3_K",
        12 => "Q4_K",
        13 => "Q5_K",
        14 => "Q6_K",
        30 => "BF16",
        other => return format!("ggml type {other}"),
    };
    name.to_string()
}

/// The value of a finite IEEE binary16. The exponent field is moved into place and rebiased by one exact
/// multiplication, which normalises subnormals too; infinities and NaN would come out as ordinary numbers.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * REBIAS;
    f32::from_bits(magnitude.to_bits() | u32::from(bits & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finite_half_converts_to_the_value_its_fields_spell() {
        for bits in 0..=u16::MAX {
            let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 0x3ff));
            if exponent == 31 {
                continue;
            }
            let magnitude = match exponent {
                0 => fraction * 2f64.powi(-24),
                e => (1024.0 + fraction) * 2f64.powi(e - 25),
            };
            let expected = if bits & 0x8000 == 0 { magnitude } else { -magnitude };
            let got = f64::from(f16_to_f32(bits));
            assert_eq!(got.to_bits(), expected.to_bits(), "{bits:#06x}");
        }
    }

    #[test]
    fn a_q4_1_block_puts_low_nibbles_first() {
        let mut block = vec![0x00, 0x38, 0x00, 0xbc]; // scale 0.5, minimum -1
        block.extend((0..16).map(|j| j | (15 - j) << 4));
        let mut out = [0.0; 32];
        Encoding::Q4_1.decode(&block, &mut out);
        for j in 0..16 {
            assert_eq!(out[j], 0.5 * j as f32 - 1.0);
            assert_eq!(out[16 + j], 0.5 * (15 - j) as f32 - 1.0);
        }
    }

    #[test]
    fn a_q8_0_block_holds_signed_codes() {
        let mut block = vec![0x00, 0x34]; // scale 0.25
        block.extend((0..32).map(|j| ((j - 16) * 8) as i8 as u8));
        let mut out = [0.0; 32];
        Encoding::Q8_0.decode(&block, &mut out);
        assert_eq!((out[0], out[16], out[31]), (-32.0, 0.0, 30.0));
    }

    #[test]
    fn an_infinite_scale_is_seen() {
        let mut bytes = vec![0u8; 40];
        assert!(Encoding::Q4_1.all_finite(&bytes));
        bytes[23] = 0x7c; // minimum of the second block
        assert!(!Encoding::Q4_1.all_finite(&bytes));
        assert!(!Encoding::F32.all_finite(&f32::NAN.to_le_bytes()));
        assert!(!Encoding::Q8_0.all_finite(&[&[0, 0xfc][..], &[0; 32]].concat()));
    }

    #[test]
    fn the_numbers_of_encodings_lead_back_to_them() {
        for encoding in Encoding::ALL {
            assert_eq!(Encoding::from_type_id(encoding.type_id()), Some(encoding));
            assert_eq!(type_name(encoding.type_id()), encoding.name());
        }
        assert_eq!(Encoding::from_type_id(12), None);
    }
}
