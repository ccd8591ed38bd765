//! Which areas of a program are worth paging, read from `/proc/PID/maps`.

use std::ops::Range;

use aquifer_pager::PAGE_BYTES;

use crate::areas::{Area, Areas};

const PAGE: u64 = PAGE_BYTES as u64;
/// Smaller areas stay: there are many, and little to gain. The heap counts whatever its size.
const AREA_BYTES_MIN: u64 = 256 << 10;
/// A thread's stack has an inaccessible area of at most this size right below.
const GUARD_BYTES_MAX: u64 = 64 << 10;
/// No thread's stack is larger.
const STACK_BYTES_MAX: u64 = 64 << 20;

#[derive(Clone, Copy, Debug)]
struct MapsLine<'a> {
    start: u64,
    end: u64,
    rights: &'a [u8],
    inode: u64,
    name: &'a [u8],
}

/// What a program said of its memory. In bytes, of whole pages.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct PagingBounds {
    /// The shim's own.
    pub private: Range<u64>,
    /// The canary page.
    pub canary: u64,
    /// All that is to be paged, and is counted; empty: whatever can be.
    pub only: Range<u64>,
}

impl PagingBounds {
    /// Without what must not be paged.
    fn cut(&self, area: Range<u64>) -> Areas {
        let pages = |bytes: &Range<u64>| Area { start: bytes.start / PAGE, end: bytes.end / PAGE };
        let within = |area: Range<u64>| area.start.max(self.only.start)..area.end.min(self.only.end);
        let area = if self.only.is_empty() { area } else { within(area) };
        let mut parts = Areas::default();
        if !area.is_empty() {
            parts.insert(pages(&area));
            parts.remove(pages(&(self.canary..self.canary + PAGE)));
            if !self.private.is_empty() {
                parts.remove(pages(&self.private));
            }
        }
        parts
    }
}

/// The pageable areas in the text of `/proc/PID/maps`: private, writable, anonymous ones within the bounds that are no stacks. Lines that make
/// no sense are skipped.
#[must_use]
pub fn pageable(text: &[u8], bounds: &PagingBounds) -> Vec<Area> {
    let mut areas = Vec::new();
    let mut below: Option<MapsLine<'_>> = None;
    for line in text.split(|byte| *byte == b'\n').filter_map(parse) {
        if is_pageable(&line, below.as_ref()) {
            areas.extend(bounds.cut(line.start..line.end).iter());
        }
        below = Some(line);
    }
    areas
}

/// Resident pages of areas that begin within `only`, in the text of `/proc/PID/smaps`, those shared with relatives in part: so that the sum over
/// relatives is right.
#[must_use]
pub fn shared_pages(text: &[u8], only: &Range<u64>) -> u64 {
    let mut kilobytes = 0;
    let mut is_wanted = false;
    for line in text.split(|byte| *byte == b'\n') {
        if let Some(rest) = line.strip_prefix(b"Pss:") {
            let words = rest.split(|byte| *byte == b' ');
            let count = words.filter(|word| !word.is_empty()).find_map(|word| number(word, 10));
            kilobytes += count.filter(|_| is_wanted).unwrap_or(0);
        } else if let Some(line) = parse(line) {
            is_wanted = only.contains(&line.start);
        }
    }
    (kilobytes << 10) / PAGE
}

/// The areas whose missing pages a userfaultfd reports, in the text of `/proc/PID/smaps`.
#[must_use]
pub fn registered(text: &[u8]) -> Vec<Area> {
    let mut areas = Vec::new();
    let mut last = None;
    for line in text.split(|byte| *byte == b'\n') {
        if let Some(flags) = line.strip_prefix(b"VmFlags:") {
            let is_registered = flags.split(|byte| *byte == b' ').any(|flag| flag == b"um");
            areas.extend(last.take().filter(|_| is_registered));
        } else if let Some(line) = parse(line) {
            last = Some(Area { start: line.start / PAGE, end: line.end / PAGE });
        }
    }
    areas
}

fn is_pageable(line: &MapsLine<'_>, below: Option<&MapsLine<'_>>) -> bool {
    let bytes = line.end - line.start;
    let is_heap = line.name == b"[heap]";
    let is_anonymous =
        line.inode == 0 && (line.name.is_empty() || is_heap || line.name.starts_with(b"[anon:"));
    let has_guard = below.is_some_and(|below| {
        below.end == line.start
            && below.rights.starts_with(b"---")
            && below.end - below.start <= GUARD_BYTES_MAX
    });
    let is_stack = has_guard && bytes <= STACK_BYTES_MAX && !is_heap;
    is_anonymous && line.rights == b"rw-p" && (is_heap || bytes >= AREA_BYTES_MIN) && !is_stack
}

fn parse(text: &[u8]) -> Option<MapsLine<'_>> {
    let mut fields = text.split(|byte| *byte == b' ').filter(|field| !field.is_empty());
    let range = fields.next()?;
    let dash = range.iter().position(|byte| *byte == b'-')?;
    let (start, end) = (number(&range[..dash], 16)?, number(&range[dash + 1..], 16)?);
    let rights = fields.next()?;
    let inode = number(fields.nth(2)?, 10)?;
    let name = fields.next().unwrap_or_default();
    (start < end && start.is_multiple_of(4096) && end.is_multiple_of(4096)).then_some(MapsLine {
        start,
        end,
        rights,
        inode,
        name,
    })
}

fn number(text: &[u8], radix: u32) -> Option<u64> {
    u64::from_str_radix(std::str::from_utf8(text).ok()?, radix).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEXT: &[u8] = b"\
55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000100000 rw-p 00000000 00:00 0 
7f0000200000-7f0000201000 ---p 00000000 00:00 0 
7f0000201000-7f0000a01000 rw-p 00000000 00:00 0 
7f0001000000-7f0001010000 rw-p 00000000 00:00 0 
7f0002000000-7f0002100000 rw-p 00000000 fe:00 1234                       /usr/lib/x.so
7f0003000000-7f0003100000 r--p 00000000 00:00 0 
7f0004000000-7f0004100000 rw-s 00000000 00:05 99                         /memfd:x (deleted)
7f0005000000-7f0005100000 rw-p 00000000 00:00 0                          [anon:arena]
7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0                          [stack]
";

    fn starts(bounds: &PagingBounds) -> Vec<u64> {
        pageable(TEXT, bounds).iter().map(|area| area.start * 4096).collect()
    }

    #[test]
    fn only_private_anonymous_areas_that_are_no_stacks() {
        assert_eq!(starts(&PagingBounds::default()), [0x55d0_c000_0000, 0x7f00_0000_0000, 0x7f00_0500_0000]);
    }

    #[test]
    fn registered_areas_are_told_by_their_flags() {
        let text = b"7f0000000000-7f0000100000 rw-p 00000000 00:00 0 \nSize: 1024 kB\nVmFlags: rd wr mr mw me ac sd um \n\
                     7f0000200000-7f0000300000 rw-p 00000000 00:00 0 \nVmFlags: rd wr um2 sd\n\
                     VmFlags: um\n7f0000400000-7f0000401000 r--p 00000000 fe:00 9 /x-1 um\nVmFlags: rd um\n";
        let starts: Vec<u64> = registered(text).iter().map(|area| area.start * 4096).collect();
        assert_eq!(starts, [0x7f00_0000_0000, 0x7f00_0040_0000]);
    }

    #[test]
    fn the_shims_own_memory_is_left_out() {
        let private = 0x7f00_0008_0000..0x7f00_000a_0000;
        let areas = pageable(TEXT, &PagingBounds { private, canary: 0x7f00_000f_0000, only: 0..0 });
        let parts: Vec<_> = areas
            .iter()
            .filter(|area| area.end <= 0x7_f000_0100)
            .map(|area| (area.start, area.end))
            .collect();
        let base = 0x7_f000_0000;
        let expected = [(base, base + 0x80), (base + 0xa0, base + 0xf0), (base + 0xf1, base + 0x100)];
        assert_eq!(parts[1..], expected, "behind the heap: all but the shim's memory and the canary");
    }

    #[test]
    fn of_a_program_that_names_a_range_only_that_is_paged() {
        let only = 0x7f00_0008_0000..0x7f00_0508_0000;
        let areas = pageable(TEXT, &PagingBounds { only, ..PagingBounds::default() });
        let parts: Vec<_> = areas.iter().map(|area| (area.start, area.end)).collect();
        assert_eq!(parts, [(0x7_f000_0080, 0x7_f000_0100), (0x7_f000_5000, 0x7_f000_5080)]);
        assert_eq!(starts(&PagingBounds { only: 0x1000..0x2000, ..PagingBounds::default() }), [0_u64; 0]);
    }

    #[test]
    fn what_is_shared_is_counted_in_part_and_only_within_the_range() {
        let text = b"7f0000000000-7f0000100000 rw-p 00000000 00:00 0 \nSize: 1024 kB\nPss:                 400 kB\nPss_Dirty: 7 kB\n\
                     7f0000100000-7f0000200000 rw-p 00000000 00:00 0 \nPss:       44 kB\nPss:\n\
                     7f0000400000-7f0000500000 rw-p 00000000 00:00 0 \nPss:       4000 kB\n";
        assert_eq!(shared_pages(text, &(0x7f00_0000_0000..0x7f00_0040_0000)), 111);
        assert_eq!(shared_pages(text, &(0..0)), 0);
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in prop::collection::vec(any::<u8>(), 0..400), cut in 0usize..TEXT.len()) {
            for text in [&text, &TEXT[..cut]] {
                let _ = pageable(text, &PagingBounds { private: 0..4096, canary: 0, only: 0..0 });
                let _ = shared_pages(text, &(0..u64::MAX));
            }
        }
    }
}
