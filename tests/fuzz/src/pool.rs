//! The header page of a node's region.

use aquifer_mutation::Mutations;
use aquifer_pool::layout::{HEADER_BYTES, Layout, SECTIONS_MAX};
use aquifer_pool::mutation::Mutation;

use crate::Target;

pub(crate) const HEADER: Target = Target {
    name: "pool-header",
    run: decode_header,
    seeds: headers,
    with_mutation: |work| Mutation::TrustOffsets.while_active(work),
};

/// Bytes of the header page before its checksum.
const BEFORE_CHECKSUM: usize = 80;

/// Decodes a header page.
///
/// The input is the page without its checksum; zeros follow the input. A fuzzer finds no checksum,
/// so the right one is added.
fn decode_header(bytes: &[u8]) -> bool {
    assert!(Layout::decode(bytes).is_err(), "no input has a checksum");
    if bytes.len() > HEADER_BYTES - 4 {
        return false;
    }
    let mut page = [0; HEADER_BYTES];
    let (first, rest) = bytes.split_at(bytes.len().min(BEFORE_CHECKSUM));
    page[..first.len()].copy_from_slice(first);
    page[BEFORE_CHECKSUM + 4..][..rest.len()].copy_from_slice(rest);
    let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &page);
    let sum = u32::try_from(sum).expect("a CRC of 32 bits");
    page[BEFORE_CHECKSUM..][..4].copy_from_slice(&sum.to_le_bytes());
    let Ok(layout) = Layout::decode(&page) else { return false };
    assert!(layout.encode() == page, "{layout:?}");
    assert!((1..=SECTIONS_MAX).contains(&layout.sections()));
    assert!(layout.data_at() + layout.data_bytes() == layout.region_bytes());
    true
}

fn headers() -> Vec<(&'static str, Vec<u8>)> {
    let header = |node, sections| {
        let layout = Layout::new(node, sections).expect("an allowed number of sections");
        layout.encode()[..BEFORE_CHECKSUM].to_vec()
    };
    vec![("one-section", header(1, 1)), ("many-sections", header(u16::MAX, SECTIONS_MAX))]
}
