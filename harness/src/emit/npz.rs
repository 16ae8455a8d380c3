//! An `.npz` file: a ZIP archive of stored `.npy` files, as `numpy.load` reads it.

/// One array: its bytes as unsigned words of `width` bytes, in one axis. Types and shapes stand in the script.
pub(super) struct Member<'a> {
    /// Key in the archive.
    pub name: &'a str,
    /// Bytes of an element.
    pub width: usize,
    /// Little-endian elements.
    pub bytes: &'a [u8],
}

/// The archive (PKWARE APPNOTE 4.3: local headers with their data, then the central directory), nothing compressed.
///
/// # Panics
/// When it would be larger than 4 GiB, which a ZIP archive of this kind can't hold.
pub(super) fn archive(members: &[Member<'_>]) -> Vec<u8> {
    let mut file = Vec::new();
    let mut directory = Vec::new();
    for member in members {
        let content = npy(member);
        let name = format!("{}.npy", member.name);
        let (at, size) = (short(file.len()), short(content.len()));
        let mut shared = Vec::new();
        // version 2.0, no flags, stored, no time and the first day that the format knows
        for word in [20u16, 0, 0, 0, 0x21] {
            shared.extend_from_slice(&word.to_le_bytes());
        }
        for word in [crc32(&content), size, size] {
            shared.extend_from_slice(&word.to_le_bytes());
        }
        for word in [name.len() as u16, 0] {
            shared.extend_from_slice(&word.to_le_bytes());
        }
        file.extend_from_slice(b"PK\x03\x04");
        file.extend_from_slice(&shared);
        file.extend_from_slice(name.as_bytes());
        file.extend_from_slice(&content);
        directory.extend_from_slice(b"PK\x01\x02\x14\x00");
        directory.extend_from_slice(&shared);
        // comment, disk, internal and external attributes
        directory.extend_from_slice(&[0; 10]);
        directory.extend_from_slice(&at.to_le_bytes());
        directory.extend_from_slice(name.as_bytes());
    }
    let (start, size, count) = (short(file.len()), short(directory.len()), members.len() as u16);
    file.extend_from_slice(&directory);
    file.extend_from_slice(b"PK\x05\x06\x00\x00\x00\x00");
    for word in [count, count] {
        file.extend_from_slice(&word.to_le_bytes());
    }
    for word in [size, start] {
        file.extend_from_slice(&word.to_le_bytes());
    }
    file.extend_from_slice(&[0; 2]);
    file
}

fn short(length: usize) -> u32 {
    u32::try_from(length).expect("arrays of a case fit into 4 GiB")
}

/// The `.npy` file, version 1.0: magic, header padded to 64 bytes, elements.
fn npy(member: &Member<'_>) -> Vec<u8> {
    let kind = if member.width == 1 { "|u1".to_owned() } else { format!("<u{}", member.width) };
    let count = member.bytes.len() / member.width;
    let mut header = format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': ({count},), }}");
    let whole = (10 + header.len() + 1).next_multiple_of(64);
    header.extend(std::iter::repeat_n(' ', whole - 10 - header.len() - 1));
    header.push('\n');
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend_from_slice(&(header.len() as u16).to_le_bytes());
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(member.bytes);
    file
}

/// CRC-32 as ZIP has it: polynomial 0xEDB88320, bits inverted before and after.
fn crc32(bytes: &[u8]) -> u32 {
    let table: [u32; 256] = std::array::from_fn(|index| {
        (0..8).fold(index as u32, |word, _| if word & 1 == 1 { 0xEDB8_8320 ^ (word >> 1) } else { word >> 1 })
    });
    !bytes.iter().fold(!0u32, |word, byte| table[((word ^ u32::from(*byte)) & 0xFF) as usize] ^ (word >> 8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_zip() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
        assert_eq!(crc32(b""), 0);
    }

    #[test]
    fn an_array_starts_at_a_multiple_of_64_bytes() {
        let file = npy(&Member { name: "a", width: 2, bytes: &[1, 0, 2, 0] });
        assert!(file.starts_with(b"\x93NUMPY\x01\x00") && file.ends_with(b"\n\x01\x00\x02\x00"));
        assert_eq!((file.len() - 4) % 64, 0);
    }
}
