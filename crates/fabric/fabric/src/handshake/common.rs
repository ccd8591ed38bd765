//! Parts of messages that all handshakes share. An error names the number that is out of bounds.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::mutation::Mutation;
use crate::target::{Host, Region};
use crate::work::Key;

/// The greatest host number. Hosts are numbered from 1.
pub(crate) const HOST_MAX: u16 = 4095;
/// Bound of the bytes of a refusal's reason.
pub(crate) const REASON_BYTES_MAX: usize = 256;

/// A region in a welcome.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RegionBody {
    base: U64,
    len: U64,
    key: U32,
    reserved: U32,
}

/// Parses the host number of a hello.
pub(crate) fn parse_host(number: u16) -> Result<Host, &'static str> {
    if (1..=HOST_MAX).contains(&number) { Ok(Host(number)) } else { Err("the host number") }
}

/// Appends the regions of a welcome.
pub(crate) fn put_regions(bytes: &mut Vec<u8>, regions: &[Region]) {
    for region in regions {
        let entry = RegionBody {
            base: region.base.into(),
            len: region.len.into(),
            key: region.key.0.into(),
            reserved: 0.into(),
        };
        bytes.extend_from_slice(entry.as_bytes());
    }
}

/// Parses the regions of a welcome. They must be in the order of their addresses and must not
/// overlap.
pub(crate) fn parse_regions(entries: &[RegionBody]) -> Result<Vec<Region>, &'static str> {
    let mut regions = Vec::with_capacity(entries.len());
    let mut free_from = 1;
    for entry in entries {
        let (base, len) = (entry.base.get(), entry.len.get());
        let is_free = base >= free_from || Mutation::AcceptOverlap.is_active();
        let end = base.checked_add(len).filter(|_| is_free && len > 0);
        free_from = end.ok_or("a region's address range")?;
        regions.push(Region { base, len, key: Key(entry.key.get()) });
    }
    Ok(regions)
}

/// The bytes of a refusal's reason, truncated to [`REASON_BYTES_MAX`].
pub(crate) fn reason_bytes(reason: &str) -> &[u8] {
    &reason.as_bytes()[..reason.floor_char_boundary(REASON_BYTES_MAX)]
}

/// Parses the reason of a refusal, and escapes bytes that cannot be printed.
pub(crate) fn parse_reason(bytes: &[u8]) -> String {
    let bytes = &bytes[..bytes.len().min(REASON_BYTES_MAX)];
    String::from_utf8_lossy(bytes).escape_debug().to_string()
}

/// Converts a number that is bounded far below 2^32.
pub(crate) fn short(value: usize) -> U32 {
    u32::try_from(value).unwrap_or(u32::MAX).into()
}
