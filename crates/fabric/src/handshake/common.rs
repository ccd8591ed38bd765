//! What the messages of all handshakes have in common. A number that cannot be is an error that names it.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::target::{Host, Region};
use crate::work::Key;

/// Hosts are numbered 1..=HOST_MAX.
pub(crate) const HOST_MAX: u16 = 4095;
/// Bytes of a refusal's reason, at most.
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

/// The host of a hello.
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

/// The regions of a welcome. They are in the order of their addresses, and do not overlap.
pub(crate) fn parse_regions(entries: &[RegionBody]) -> Result<Vec<Region>, &'static str> {
    let mut regions = Vec::with_capacity(entries.len());
    let mut free_from = 1;
    for entry in entries {
        let (base, len) = (entry.base.get(), entry.len.get());
        let end = base.checked_add(len).filter(|_| base >= free_from && len > 0);
        free_from = end.ok_or("a region's address range")?;
        regions.push(Region { base, len, key: Key(entry.key.get()) });
    }
    Ok(regions)
}

/// The bytes of a refusal's reason. One that is too long is cut.
pub(crate) fn reason_bytes(reason: &str) -> &[u8] {
    &reason.as_bytes()[..reason.floor_char_boundary(REASON_BYTES_MAX)]
}

/// The reason of a refusal, fit to be printed.
pub(crate) fn parse_reason(bytes: &[u8]) -> String {
    let bytes = &bytes[..bytes.len().min(REASON_BYTES_MAX)];
    String::from_utf8_lossy(bytes).escape_debug().to_string()
}

/// Numbers that the options bound far below 2^32.
pub(crate) fn short(value: usize) -> U32 {
    u32::try_from(value).unwrap_or(u32::MAX).into()
}
