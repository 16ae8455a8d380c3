//! The 256 characters that stand for the 256 bytes in a byte-level vocabulary (GPT-2's `bytes_to_unicode`).

use std::sync::OnceLock;

/// Characters below U+0144 that may stand for bytes.
const CHARACTERS: usize = 0x144;

/// The bytes that a written token stands for; `None` if a character is outside the alphabet.
pub fn bytes_of(written: &str) -> Option<Vec<u8>> {
    let table = table();
    written.chars().map(|c| table.get(c as usize).copied().flatten()).collect()
}

/// Printable Latin-1 stands for itself; the other bytes, in ascending order, for U+0100, U+0101, and so on.
fn table() -> &'static [Option<u8>; CHARACTERS] {
    static TABLE: OnceLock<[Option<u8>; CHARACTERS]> = OnceLock::new();
    TABLE.get_or_init(|| {
        let mut table = [None; CHARACTERS];
        let mut next = 0x100;
        for byte in 0..=u8::MAX {
            let itself = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            let character = if itself { usize::from(byte) } else { next };
            next += usize::from(!itself);
            table[character] = Some(byte);
        }
        table
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_has_one_character_per_byte() {
        let mut bytes: Vec<u8> = table().iter().flatten().copied().collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=u8::MAX).collect::<Vec<_>>());
    }

    #[test]
    fn known_characters_stand_for_known_bytes() {
        assert_eq!(bytes_of("ĠtheĊĉé"), Some(vec![b' ', b't', b'h', b'e', b'\n', b'\t', 0xe9]));
        assert_eq!(bytes_of("ŃĀ"), Some(vec![0xad, 0x00]));
        assert_eq!(bytes_of("a b"), None, "a plain space is not in the alphabet");
        assert_eq!(bytes_of("漢"), None);
    }
}
