//! Parsing of `/proc/PID/maps` and `smaps`: areas that can be paged, and areas that are registered.

use std::ops::Range;

use aquifer_ipc::CANARY_BYTES;
use aquifer_pager::{PAGE_BYTES, PAGES_MAX, PageNumber};

use crate::areas::{Area, Areas};
use crate::mutation::Mutation;

const PAGE: u64 = PAGE_BYTES as u64;
/// Minimum size in bytes of a paged area, except the heap. Smaller areas are numerous and are not
/// paged.
const AREA_BYTES_MIN: u64 = 256 << 10;
/// Maximum growth of an area, in pages, that is expected while it is registered.
const ROOM_PAGES_MAX: u64 = (1 << 30) / PAGE;
/// Maximum size in bytes of the inaccessible area below a thread's stack.
const GUARD_BYTES_MAX: u64 = 64 << 10;
/// Maximum size in bytes of a thread's stack.
const STACK_BYTES_MAX: u64 = 64 << 20;

/// One line of `/proc/PID/maps`.
#[derive(Clone, Copy, Debug)]
struct MapsLine<'a> {
    start: u64,
    end: u64,
    rights: &'a [u8],
    inode: u64,
    name: &'a [u8],
}

/// Ranges of a program's memory from its hello, in bytes, of whole pages.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct PagingBounds {
    /// Memory of the shim itself, which is not paged.
    pub shim_range: Range<u64>,
    /// Address of the canary, which the pages for connect-back requests follow.
    pub canary: u64,
    /// The only range that is paged and counted; empty if all areas can be paged.
    pub paged_range: Range<u64>,
}

impl PagingBounds {
    /// The parts of an area that may be paged.
    fn pageable_parts(&self, area: Range<u64>) -> Areas {
        let pages = |bytes: &Range<u64>| Area { start: bytes.start / PAGE, end: bytes.end / PAGE };
        let within =
            |area: Range<u64>| area.start.max(self.paged_range.start)..area.end.min(self.paged_range.end);
        let area = if self.paged_range.is_empty() { area } else { within(area) };
        let mut parts = Areas::default();
        if !area.is_empty() {
            parts.insert(pages(&area));
            parts.remove(pages(&(self.canary..self.canary + CANARY_BYTES as u64)));
            if !self.shim_range.is_empty() {
                parts.remove(pages(&self.shim_range));
            }
        }
        parts
    }
}

/// Returns the pageable areas in the text of `/proc/PID/maps`.
///
/// Pageable areas are private, writable, anonymous areas within the bounds that are not stacks of
/// threads. Lines that cannot be parsed are skipped.
///
/// `pins`: the pages that the program has pinned, sorted. A stack has one, with the control block
/// of its thread.
#[must_use]
pub fn pageable_areas(text: &[u8], bounds: &PagingBounds, pins: &[PageNumber]) -> Vec<Area> {
    let mut areas = Vec::new();
    let mut below: Option<MapsLine<'_>> = None;
    let mut is_below_pageable = false;
    for line in text.split(|byte| *byte == b'\n').filter_map(parse) {
        let is_inside = line.end / PAGE <= PAGES_MAX || Mutation::IgnoreAddressEnd.is_active();
        is_below_pageable = is_pageable(&line, below.as_ref(), is_below_pageable, pins) && is_inside;
        if is_below_pageable {
            areas.extend(bounds.pageable_parts(line.start..line.end).iter());
        }
        below = Some(line);
    }
    areas
}

/// Numbers of resident pages of a program that cannot be evicted now, by reason.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct KeptPages {
    /// In locked areas.
    pub locked: u64,
    /// In anonymous areas that may be executed.
    pub executable: u64,
    /// In anonymous areas that may not be written at the moment.
    pub protected: u64,
    /// In stacks, areas that are too small, and private pages of files.
    pub other: u64,
}

impl KeptPages {
    /// The pages that a permission to write does not make evictable. Programs change the protection
    /// of the others often.
    #[must_use]
    pub fn lasting(&self) -> u64 {
        self.locked + self.executable + self.other
    }

    /// Adds the pages of another program.
    pub fn add(&mut self, other: Self) {
        self.locked += other.locked;
        self.executable += other.executable;
        self.protected += other.protected;
        self.other += other.other;
    }
}

/// Counts the resident pages that cannot be evicted, in the text of `/proc/PID/smaps`.
///
/// Pages of the shim do not count. Pages that are shared since a fork count for each process.
#[must_use]
pub fn kept_pages(text: &[u8], bounds: &PagingBounds, pins: &[PageNumber]) -> KeptPages {
    let mut kept = KeptPages::default();
    let mut below: Option<MapsLine<'_>> = None;
    let mut is_below_pageable = false;
    let mut resident = 0;
    for line in text.split(|byte| *byte == b'\n') {
        if let Some(rest) = line.strip_prefix(b"Anonymous:") {
            let words = rest.split(|byte| *byte == b' ');
            let kilobytes = words.filter(|word| !word.is_empty()).find_map(|word| number(word, 10));
            resident = kilobytes.unwrap_or(0) / (PAGE >> 10);
        } else if let Some(flags) = line.strip_prefix(b"VmFlags:") {
            let Some(area) = below.as_ref() else { continue };
            let pages = std::mem::take(&mut resident);
            if bounds.pageable_parts(area.start..area.end).iter().next().is_none() {
                continue;
            }
            if flags.split(|byte| *byte == b' ').any(|flag| flag == b"lo") {
                kept.locked += pages;
            } else if area.inode != 0 {
                kept.other += pages;
            } else if area.rights.get(2) == Some(&b'x') {
                kept.executable += pages;
            } else if area.rights.get(1) != Some(&b'w') {
                kept.protected += pages;
            } else if !is_below_pageable {
                kept.other += pages;
            }
        } else if let Some(line) = parse(line) {
            is_below_pageable = is_pageable(&line, below.as_ref(), is_below_pageable, pins);
            below = Some(line);
        }
    }
    kept
}

/// Returns, for each pageable area in the text, the page up to which it can grow in place: to the
/// next mapping or the end of the pageable range, and by at most [`ROOM_PAGES_MAX`].
#[must_use]
pub fn room_to_grow(text: &[u8], areas: &[Area], bounds: &PagingBounds) -> Vec<PageNumber> {
    let mut lines = text.split(|byte| *byte == b'\n').filter_map(parse).peekable();
    let mut room_of = |area: &Area| {
        while lines.next_if(|line| line.end / PAGE < area.end).is_some() {}
        // A mapping that extends beyond the area continues with memory that is not paged.
        lines.next_if(|line| line.end / PAGE == area.end)?;
        let next = lines.peek().map_or(PAGES_MAX, |line| line.start / PAGE);
        let range = area.start * PAGE..next.min(area.end + ROOM_PAGES_MAX) * PAGE;
        bounds.pageable_parts(range).iter().next().map(|part| part.end)
    };
    areas.iter().map(|area| room_of(area).unwrap_or(area.end)).collect()
}

/// Returns the shared mappings that overlap a range of pages, in the text of `/proc/PID/maps`.
#[must_use]
pub fn shared_within(text: &[u8], range: Area) -> Vec<Area> {
    let lines = text.split(|byte| *byte == b'\n').filter_map(parse);
    let shared = lines.filter(|line| line.rights.ends_with(b"s"));
    let parts = shared.map(|line| Area {
        start: (line.start / PAGE).max(range.start),
        end: (line.end / PAGE).min(range.end),
    });
    parts.filter(|area| area.start < area.end).collect()
}

/// Returns the proportional set size (PSS), in pages, of the areas that begin within a range, in
/// the text of `/proc/PID/smaps`.
///
/// The sum of the PSS over forked processes counts each shared page once.
#[must_use]
pub fn pss_pages(text: &[u8], range: &Range<u64>) -> u64 {
    let mut kilobytes = 0_u64;
    let mut is_wanted = false;
    for line in text.split(|byte| *byte == b'\n') {
        if let Some(rest) = line.strip_prefix(b"Pss:") {
            let words = rest.split(|byte| *byte == b' ');
            let count = words.filter(|word| !word.is_empty()).find_map(|word| number(word, 10));
            kilobytes = count.filter(|_| is_wanted).unwrap_or(0).saturating_add(kilobytes);
        } else if let Some(line) = parse(line) {
            is_wanted = range.contains(&line.start);
        }
    }
    kilobytes / (PAGE >> 10)
}

/// Returns the areas that are registered with a userfaultfd, in the text of `/proc/PID/smaps`.
#[must_use]
pub fn registered_areas(text: &[u8]) -> Areas {
    areas_with(text, |flags| flags.contains(&&b"um"[..]))
}

/// Returns the areas that a forked child has inherited from its parent, in the text of the child's
/// `/proc/PID/smaps`.
///
/// Areas with `MADV_DONTFORK` do not exist in the child, and those with `MADV_WIPEONFORK` are
/// empty. An area that is not registered was mapped after an unmap that the agent had not read
/// before the fork.
#[must_use]
pub fn inherited_areas(text: &[u8]) -> Areas {
    areas_with(text, |flags| flags.contains(&&b"um"[..]) && !flags.contains(&&b"wf"[..]))
}

/// Returns the areas in the text of `/proc/PID/maps` for which `is_registered` returns true; `None`
/// if it returns `None` for one of them.
pub fn registered_lines(text: &[u8], is_registered: impl Fn(Area) -> Option<bool>) -> Option<Areas> {
    let mut areas = Areas::default();
    for line in text.split(|byte| *byte == b'\n').filter_map(parse) {
        let area = Area { start: line.start / PAGE, end: line.end / PAGE };
        if line.rights.ends_with(b"p") && area.end <= PAGES_MAX && is_registered(area)? {
            areas.insert(area);
        }
    }
    Some(areas)
}

/// Returns the areas whose flags satisfy a condition, in the text of `/proc/PID/smaps`.
fn areas_with(text: &[u8], is_wanted: impl Fn(&[&[u8]]) -> bool) -> Areas {
    let mut areas = Areas::default();
    let mut last = None;
    for line in text.split(|byte| *byte == b'\n') {
        if let Some(flags) = line.strip_prefix(b"VmFlags:") {
            let flags: Vec<&[u8]> = flags.split(|byte| *byte == b' ').collect();
            last.take().filter(|_| is_wanted(&flags)).into_iter().for_each(|area| areas.insert(area));
        } else if let Some(line) = parse(line) {
            let area = Area { start: line.start / PAGE, end: line.end / PAGE };
            last = Some(area).filter(|area| area.end <= PAGES_MAX);
        }
    }
    areas
}

/// Whether a mapping is pageable, given the mapping below it.
///
/// A mapping that continues a pageable area is pageable, however small: the area has grown while it
/// was registered, and cannot be moved while it is in two parts.
///
/// Stacks of threads are not paged: whenever a thread ends, the kernel drops the pages of its
/// stack, which would have to wait for the agent. A stack has an inaccessible area below it and a
/// pin. A large block of an allocator may also have an inaccessible page below it, but no pin.
fn is_pageable(
    line: &MapsLine<'_>,
    below: Option<&MapsLine<'_>>,
    is_below_pageable: bool,
    pins: &[PageNumber],
) -> bool {
    let bytes = line.end - line.start;
    let is_heap = line.name == b"[heap]";
    let is_anonymous =
        line.inode == 0 && (line.name.is_empty() || is_heap || line.name.starts_with(b"[anon:"));
    let has_guard = below.is_some_and(|below| {
        below.end == line.start
            && below.rights.starts_with(b"---")
            && below.end - below.start <= GUARD_BYTES_MAX
    });
    let has_pin = || {
        let next = pins.partition_point(|page| *page < line.start / PAGE);
        pins.get(next).is_some_and(|page| *page < line.end / PAGE)
    };
    let is_stack = has_guard && bytes <= STACK_BYTES_MAX && !is_heap && has_pin();
    let is_continued = is_below_pageable && below.is_some_and(|below| below.end == line.start);
    let is_large = is_heap || is_continued || bytes >= AREA_BYTES_MIN;
    is_anonymous && line.rights == b"rw-p" && is_large && !is_stack
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

    /// The page of a thread's control block.
    const PINS: [PageNumber; 2] = [0x55d0_c0000, 0x7_f000_0a00];

    fn starts(bounds: &PagingBounds) -> Vec<u64> {
        pageable_areas(TEXT, bounds, &PINS).iter().map(|area| area.start * 4096).collect()
    }

    #[test]
    fn private_anonymous_areas_except_stacks_are_pageable() {
        assert_eq!(starts(&PagingBounds::default()), [0x55d0_c000_0000, 0x7f00_0000_0000, 0x7f00_0500_0000]);
    }

    #[test]
    fn shared_mappings_in_a_range_are_found() {
        let range = Area { start: 0x7_f000_3000, end: 0x7_f000_4080 };
        assert_eq!(shared_within(TEXT, range), [Area { start: 0x7_f000_4000, end: 0x7_f000_4080 }]);
        assert_eq!(shared_within(TEXT, Area { start: 0, end: 0x7_f000_4000 }), []);
    }

    #[test]
    fn a_block_with_a_guard_is_pageable_if_nothing_in_it_is_pinned() {
        let with = |pins: &[PageNumber]| pageable_areas(TEXT, &PagingBounds::default(), pins);
        let block = Area { start: 0x7_f000_0201, end: 0x7_f000_0a01 };
        assert!(!with(&PINS).contains(&block) && !with(&[block.start]).contains(&block));
        for pins in [&[][..], &[0, block.start - 1, block.end]] {
            assert!(with(pins).contains(&block), "{pins:x?}");
        }
    }

    #[test]
    fn registered_areas_are_recognised_by_their_flags() {
        let text = b"7f0000000000-7f0000100000 rw-p 00000000 00:00 0 \nSize: 1024 kB\n\
                     VmFlags: rd wr mr mw me ac sd um \n\
                     7f0000200000-7f0000300000 rw-p 00000000 00:00 0 \nVmFlags: rd wr um2 sd\n\
                     VmFlags: um\n7f0000400000-7f0000401000 r--p 00000000 fe:00 9 /x-1 um\nVmFlags: rd um\n";
        let starts: Vec<u64> = registered_areas(text).iter().map(|area| area.start * 4096).collect();
        assert_eq!(starts, [0x7f00_0000_0000, 0x7f00_0040_0000]);
    }

    #[test]
    fn a_forked_child_inherits_what_is_mapped_and_not_wiped() {
        let text = b"7f0000000000-7f0000100000 rw-p 00000000 00:00 0 \nVmFlags: rd wr um \n\
                     7f0000200000-7f0000300000 rw-p 00000000 00:00 0 \nVmFlags: rd wr wf um\n";
        let inherited: Vec<_> = inherited_areas(text).iter().collect();
        assert_eq!(inherited, [Area { start: 0x7_f000_0000, end: 0x7_f000_0100 }]);
    }

    #[test]
    fn memory_of_the_shim_is_not_pageable() {
        let shim_range = 0x7f00_0008_0000..0x7f00_000a_0000;
        let areas = pageable_areas(
            TEXT,
            &PagingBounds { shim_range, canary: 0x7f00_000b_0000, paged_range: 0..0 },
            &PINS,
        );
        let parts: Vec<_> = areas
            .iter()
            .filter(|area| area.end <= 0x7_f000_0100)
            .map(|area| (area.start, area.end))
            .collect();
        let base = 0x7_f000_0000;
        let behind = base + 0xb0 + aquifer_ipc::CANARY_BYTES as u64 / PAGE;
        let expected = [(base, base + 0x80), (base + 0xa0, base + 0xb0), (behind, base + 0x100)];
        assert_eq!(parts[1..], expected, "behind the heap: all but the memory of the shim and the canary");
    }

    #[test]
    fn only_the_named_range_is_pageable() {
        let paged_range = 0x7f00_0008_0000..0x7f00_0508_0000;
        let areas = pageable_areas(TEXT, &PagingBounds { paged_range, ..PagingBounds::default() }, &PINS);
        let parts: Vec<_> = areas.iter().map(|area| (area.start, area.end)).collect();
        assert_eq!(parts, [(0x7_f000_0080, 0x7_f000_0100), (0x7_f000_5000, 0x7_f000_5080)]);
        assert_eq!(
            starts(&PagingBounds { paged_range: 0x1000..0x2000, ..PagingBounds::default() }),
            [0_u64; 0]
        );
    }

    #[test]
    fn an_area_can_grow_up_to_the_next_mapping_and_not_into_memory_of_the_shim() {
        let text = b"7f0000000000-7f0000100000 rw-p 00000000 00:00 0\n\
            7f0000180000-7f0000200000 rw-s 00000000 00:01 5\n\
            7f0000200000-7f0000280000 rw-p 00000000 00:00 0\n\
            7f0000280000-7f0000290000 rw-p 00000000 00:00 0\n";
        let page = |address: u64| address / PAGE;
        let bounds = |start, end| PagingBounds { shim_range: start..end, ..PagingBounds::default() };
        let room = |bounds: &PagingBounds| {
            let areas = pageable_areas(text, bounds, &[]);
            (areas.len(), room_to_grow(text, &areas, bounds))
        };
        let far = page(0x7f00_0029_0000) + ROOM_PAGES_MAX;
        let ends = vec![page(0x7f00_0018_0000), page(0x7f00_0028_0000), far];
        assert_eq!(room(&bounds(0, 0)), (3, ends.clone()), "the small one continues a pageable area");
        let shim = bounds(0x7f00_0016_0000, 0x7f00_0018_0000);
        assert_eq!(room(&shim), (3, vec![page(0x7f00_0016_0000), ends[1], ends[2]]));
        let shim = bounds(0x7f00_0024_0000, 0x7f00_0028_0000);
        assert_eq!(room(&shim), (3, vec![ends[0], page(0x7f00_0024_0000), ends[2]]));
    }

    #[test]
    fn resident_pages_that_cannot_be_evicted_are_counted_by_their_reason() {
        let area = |start: u64, rights: &str, inode: u32, anonymous: u32, flags: &str| {
            let start = 0x7f00_0000_0000 + start;
            format!(
                "{start:x}-{:x} {rights} 00000000 00:00 {inode}\nRss: 9999 kB\nAnonymous: {anonymous:>8} \
                 kB\nVmFlags: rd wr {flags}\n",
                start + 0x10_0000
            )
        };
        let text = [
            area(0, "rw-p", 0, 4, ""),
            area(0x1000_0000, "rw-p", 0, 40, "lo ac"),
            area(0x2000_0000, "rwxp", 0, 400, "ac"),
            area(0x3000_0000, "r--p", 0, 80, "ac"),
            area(0x4000_0000, "---p", 0, 8, "ac"),
            area(0x5000_0000, "rw-p", 77, 16, "ac"),
            area(0x6000_0000, "rw-p", 0, 800, "ac"),
        ];
        let bounds = PagingBounds { shim_range: 0x7f00_6000_0000..0x7f00_6010_0000, ..Default::default() };
        let kept = kept_pages(text.concat().as_bytes(), &bounds, &[]);
        assert_eq!(kept, KeptPages { locked: 10, executable: 100, protected: 22, other: 4 });
        let small = b"7f0000000000-7f0000004000 rw-p 0 00:00 0\nAnonymous: 8 kB\nVmFlags: rd\n";
        assert_eq!(kept_pages(small, &bounds, &[]).other, 2);
    }

    #[test]
    fn pss_counts_shared_pages_in_proportion_and_only_within_the_range() {
        let text = b"7f0000000000-7f0000100000 rw-p 00000000 00:00 0 \nSize: 1024 kB\n\
                     Pss:                 400 kB\nPss_Dirty: 7 kB\n\
                     7f0000100000-7f0000200000 rw-p 00000000 00:00 0 \nPss:       44 kB\nPss:\n\
                     7f0000400000-7f0000500000 rw-p 00000000 00:00 0 \nPss:       4000 kB\n";
        assert_eq!(pss_pages(text, &(0x7f00_0000_0000..0x7f00_0040_0000)), 111);
        assert_eq!(pss_pages(text, &(0..0)), 0);
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_without_a_panic(
            text in prop::collection::vec(any::<u8>(), 0..400),
            cut in 0usize..TEXT.len(),
        ) {
            for text in [&text, &TEXT[..cut]] {
                let bounds = PagingBounds { shim_range: 0..4096, canary: 0, paged_range: 0..0 };
                let _ = pageable_areas(text, &bounds, &[7]);
                let _ = pss_pages(text, &(0..u64::MAX));
                let _ = kept_pages(text, &bounds, &[7]);
            }
        }
    }
}
