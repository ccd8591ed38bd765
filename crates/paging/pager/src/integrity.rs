//! Checksums of pages, and detection of zero pages, which need none.

use crc_fast::{CrcAlgorithm, checksum};

/// CRC32C of a page's bytes.
#[must_use]
pub fn page_crc(bytes: &[u8]) -> u32 {
    u32::try_from(checksum(CrcAlgorithm::Crc32Iscsi, bytes)).expect("a 32-bit checksum")
}

/// Whether all bytes are zero. Examines a cache line at a time, because most nonzero pages have a
/// nonzero byte in the first line.
#[must_use]
pub fn is_zero(bytes: &[u8]) -> bool {
    let mut lines = bytes.chunks_exact(64);
    lines.by_ref().all(|line| line.iter().fold(0, |sum, byte| sum | byte) == 0)
        && lines.remainder().iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_crc32c() {
        // The check value of the Castagnoli polynomial.
        assert_eq!(page_crc(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn a_single_bit_makes_a_page_nonzero() {
        let mut page = vec![0u8; 4096];
        assert!(is_zero(&page));
        for position in [0, 63, 64, 2047, 4095] {
            page[position] = 0x80;
            assert!(!is_zero(&page));
            page[position] = 0;
        }
        assert!(is_zero(&[]));
        assert!(!is_zero(&[0, 0, 1]));
    }
}
