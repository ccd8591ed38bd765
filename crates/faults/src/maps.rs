//! Which areas of a program are worth paging, read from `/proc/PID/maps`.

use aquifer_pager::PAGE_BYTES;

use crate::areas::Area;

/// Smaller areas stay: there are many, and little to gain. The heap counts whatever its size.
const AREA_BYTES_MIN: u64 = 256 << 10;
/// A thread's stack has an inaccessible area of at most this size right below.
const GUARD_BYTES_MAX: u64 = 64 << 10;
/// No thread's stack is larger.
const STACK_BYTES_MAX: u64 = 64 << 20;

#[derive(Clone, Copy, Debug)]
struct Line<'a> {
    start: u64,
    end: u64,
    rights: &'a [u8],
    inode: u64,
    name: &'a [u8],
}

/// The pageable areas in the text of `/proc/PID/maps`: private, writable, anonymous ones that are neither stacks nor in `private`
/// (bytes; the shim's own). Lines that make no sense are skipped.
#[must_use]
pub fn pageable(text: &[u8], private: std::ops::Range<u64>, canary: u64) -> Vec<Area> {
    let mut areas = Vec::new();
    let mut below: Option<Line<'_>> = None;
    for line in text.split(|byte| *byte == b'\n').filter_map(parse) {
        if is_pageable(&line, below.as_ref()) {
            let own = line.start < private.end && private.start < line.end;
            let page = PAGE_BYTES as u64;
            let mut parts = crate::areas::Areas::default();
            parts.insert(Area { start: line.start / page, end: line.end / page });
            if own {
                parts.remove(Area { start: private.start / page, end: private.end / page });
            }
            parts.remove(Area { start: canary / page, end: canary / page + 1 });
            areas.extend(parts.iter());
        }
        below = Some(line);
    }
    areas
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
            let page = PAGE_BYTES as u64;
            last = Some(Area { start: line.start / page, end: line.end / page });
        }
    }
    areas
}

fn is_pageable(line: &Line<'_>, below: Option<&Line<'_>>) -> bool {
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

fn parse(text: &[u8]) -> Option<Line<'_>> {
    let mut fields = text.split(|byte| *byte == b' ').filter(|field| !field.is_empty());
    let range = fields.next()?;
    let dash = range.iter().position(|byte| *byte == b'-')?;
    let (start, end) = (number(&range[..dash], 16)?, number(&range[dash + 1..], 16)?);
    let rights = fields.next()?;
    let inode = number(fields.nth(2)?, 10)?;
    let name = fields.next().unwrap_or_default();
    (start < end && start.is_multiple_of(4096) && end.is_multiple_of(4096)).then_some(Line {
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

    fn starts(private: std::ops::Range<u64>) -> Vec<u64> {
        pageable(TEXT, private, 0).iter().map(|area| area.start * 4096).collect()
    }

    #[test]
    fn only_private_anonymous_areas_that_are_no_stacks() {
        assert_eq!(starts(0..0), [0x55d0_c000_0000, 0x7f00_0000_0000, 0x7f00_0500_0000]);
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
        let areas = pageable(TEXT, 0x7f00_0008_0000..0x7f00_000a_0000, 0x7f00_000f_0000);
        let parts: Vec<_> = areas
            .iter()
            .filter(|area| area.end <= 0x7_f000_0100)
            .map(|area| (area.start, area.end))
            .collect();
        let base = 0x7_f000_0000;
        let expected = [(base, base + 0x80), (base + 0xa0, base + 0xf0), (base + 0xf1, base + 0x100)];
        assert_eq!(parts[1..], expected, "behind the heap: all but the shim's memory and the canary");
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in prop::collection::vec(any::<u8>(), 0..400), cut in 0usize..TEXT.len()) {
            let _ = pageable(&text, 0..4096, 0);
            let _ = pageable(&TEXT[..cut], 0..4096, 0);
        }
    }
}
