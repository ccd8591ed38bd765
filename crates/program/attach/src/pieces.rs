//! Finds the mappings that lie in a range of this process's memory, in the text of
//! `/proc/self/maps`. Allocates nothing.

use core::ops::Range;

use crate::raw::{close, syscall};

/// Maximum number of mappings of one range.
const PIECES_MAX: usize = 256;
/// Bytes of a line that are kept, more than any line has before its path.
const LINE_BYTES_MAX: usize = 100;
const TEXT_BYTES: usize = 4096;

/// The mappings in a range, cut at its ends.
pub struct Pieces {
    places: [(usize, usize); PIECES_MAX],
    count: usize,
    /// Whether all mappings are anonymous, private, and have the same rights.
    are_alike: bool,
}

/// The fields of one mapping in `/proc/self/maps`.
struct Line {
    start: usize,
    end: usize,
    rights: [u8; 4],
    is_anonymous: bool,
}

impl Pieces {
    /// The mappings in a range; `None` if there are none, too many, or they cannot be read.
    pub fn find(range: &Range<usize>) -> Option<Self> {
        let path = c"/proc/self/maps";
        // SAFETY: only opens a file.
        let fd = unsafe {
            let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as usize;
            syscall(libc::SYS_openat, [libc::AT_FDCWD as usize, path.as_ptr() as usize, flags, 0, 0, 0])
        };
        if fd < 0 {
            return None;
        }
        let pieces = Self::read(range, |buffer| {
            // SAFETY: the kernel writes into the buffer only.
            let count = unsafe {
                let at = buffer.as_mut_ptr() as usize;
                syscall(libc::SYS_read, [fd as usize, at, buffer.len(), 0, 0, 0])
            };
            usize::try_from(count).ok()
        });
        close(fd as i32);
        pieces
    }

    /// `read` fills a buffer from the start and returns the number of bytes; 0 at the end of the
    /// text.
    fn read(range: &Range<usize>, mut read: impl FnMut(&mut [u8]) -> Option<usize>) -> Option<Self> {
        let mut pieces = Self { places: [(0, 0); PIECES_MAX], count: 0, are_alike: true };
        let mut rights = None;
        let mut text = [0; TEXT_BYTES];
        // The start of the current line, as far as it is needed.
        let mut line = [0; LINE_BYTES_MAX];
        let mut length = 0;
        loop {
            let count = read(&mut text)?;
            if count == 0 {
                return Some(pieces).filter(|pieces| pieces.count > 0);
            }
            for byte in text[..count].iter().copied() {
                if byte != b'\n' {
                    line.get_mut(length).into_iter().for_each(|place| *place = byte);
                    length += 1;
                    continue;
                }
                let found = Line::parse(&line[..length.min(LINE_BYTES_MAX)])?;
                length = 0;
                let (start, end) = (found.start.max(range.start), found.end.min(range.end));
                if start >= end {
                    continue;
                }
                *pieces.places.get_mut(pieces.count)? = (start, end);
                pieces.count += 1;
                pieces.are_alike &= found.is_anonymous && *rights.get_or_insert(found.rights) == found.rights;
            }
        }
    }

    /// Start and end of each mapping, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (usize, usize)> + '_ {
        self.places[..self.count].iter().copied()
    }

    /// Start and end of the last mapping.
    pub fn last(&self) -> (usize, usize) {
        self.places[self.count - 1]
    }

    /// Whether the kernel would have joined the mappings to one that covers the range, if they had
    /// been registered alike.
    pub fn are_one(&self, range: &Range<usize>) -> bool {
        let mut end = range.start;
        let is_covered = self.iter().all(|piece| piece.0 == core::mem::replace(&mut end, piece.1));
        self.are_alike && is_covered && end == range.end
    }
}

impl Line {
    /// Parses `START-END RIGHTS OFFSET DEVICE INODE NAME`.
    fn parse(text: &[u8]) -> Option<Self> {
        let mut fields = text.split(|byte| *byte == b' ').filter(|field| !field.is_empty());
        let range = fields.next()?;
        let dash = range.iter().position(|byte| *byte == b'-')?;
        let rights: [u8; 4] = fields.next()?.try_into().ok()?;
        let has_inode = fields.nth(2)? != b"0";
        let name = fields.next().unwrap_or_default();
        let is_anonymous =
            rights[3] == b'p' && !has_inode && (name.is_empty() || name.starts_with(b"[anon:"));
        Some(Self {
            start: hexadecimal(&range[..dash])?,
            end: hexadecimal(&range[dash + 1..])?,
            rights,
            is_anonymous,
        })
    }
}

fn hexadecimal(text: &[u8]) -> Option<usize> {
    usize::from_str_radix(core::str::from_utf8(text).ok()?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
10000-20000 rw-p 00000000 00:00 0 
20000-30000 rw-p 00000000 00:00 0                          [anon:arena]
30000-38000 r--p 00000000 00:00 0 
38000-40000 rw-p 00000000 00:00 0 
50000-60000 rw-p 00000000 fe:00 1234                       /usr/lib/\
a path with blanks that is longer than what is looked at.so
60000-70000 rw-s 00000000 00:00 0 
";

    fn find(range: &Range<usize>, step: usize) -> Option<Pieces> {
        let mut rest = TEXT.as_bytes();
        Pieces::read(range, |buffer| {
            let (now, later) = rest.split_at(step.min(rest.len()));
            buffer[..now.len()].copy_from_slice(now);
            rest = later;
            Some(now.len())
        })
    }

    #[test]
    fn pieces_are_the_parts_of_mappings_in_the_range_however_the_text_is_read() {
        for step in [1, 7, 100, TEXT_BYTES] {
            let range = 0x18000..0x58000;
            let pieces = find(&range, step).unwrap();
            let expected = [
                (0x18000, 0x20000),
                (0x20000, 0x30000),
                (0x30000, 0x38000),
                (0x38000, 0x40000),
                (0x50000, 0x58000),
            ];
            assert!(pieces.iter().eq(expected));
            assert_eq!(pieces.last(), (0x50000, 0x58000));
            assert!(find(&(0x40000..0x50000), step).is_none());
        }
    }

    #[test]
    fn pieces_are_one_if_they_are_private_memory_with_equal_rights_without_a_gap() {
        let are_one = |range: Range<usize>| find(&range, 64).unwrap().are_one(&range);
        assert!(are_one(0x18000..0x30000));
        assert!(are_one(0x38000..0x40000));
        for range in [0x8000..0x18000, 0x28000..0x38000, 0x38000..0x48000, 0x50000..0x58000, 0x60000..0x68000]
        {
            assert!(!are_one(range.clone()), "{range:x?}");
        }
    }

    #[test]
    fn unreadable_text_and_too_many_pieces_are_refused() {
        let find = |text: &str, count: usize| {
            let mut lines = core::iter::repeat_n(text, count);
            Pieces::read(&(0..0x10000), |buffer| {
                let line = lines.next().unwrap_or_default();
                buffer[..line.len()].copy_from_slice(line.as_bytes());
                Some(line.len())
            })
        };
        let line = "1000-2000 rw-p 0 0 0\n";
        assert_eq!(find(line, PIECES_MAX).map(|pieces| pieces.count), Some(PIECES_MAX));
        assert!(find(line, PIECES_MAX + 1).is_none());
        assert!(find("1000 rw-p 0 0 0\n", 1).is_none());
        assert!(find("zz-2000 rw-p 0 0 0\n", 1).is_none());
        assert!(Pieces::read(&(0..1), |_| None).is_none());
    }

    #[test]
    fn the_mappings_of_this_process_are_found() {
        let byte = 1_u8;
        let here = (&raw const byte) as usize;
        let pieces = Pieces::find(&(here..here + 1)).unwrap();
        assert!(pieces.iter().eq([(here, here + 1)]));
    }
}
