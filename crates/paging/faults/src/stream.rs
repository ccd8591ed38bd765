//! Detection of sequential access, which determines the number of pages to fill at a fault.
//!
//! Up to [`STREAMS`] sequential streams are tracked at once. A fault at a position that a stream
//! expects doubles the stream's window. Any other fault begins a new stream with a window of one
//! page, so that random access is never made slower.

use aquifer_pager::PageNumber;

const STREAMS: usize = 8;

#[derive(Clone, Copy, Debug, Default)]
/// A sequential access: the fault that is expected next, and the number of pages to fill at it.
struct SequentialStream {
    next: PageNumber,
    window: usize,
    used: u64,
}

/// The sequential streams of one program.
#[derive(Clone, Debug, Default)]
pub struct StreamDetector {
    streams: [SequentialStream; STREAMS],
    clock: u64,
}

impl StreamDetector {
    /// Returns the number of pages to fill at a fault, including the faulting page: 1 to `max`.
    pub fn window(&mut self, page: PageNumber, max: usize) -> usize {
        self.clock += 1;
        let known = self.streams.iter().position(|stream| {
            // The program skips a page that is still resident.
            stream.window > 0 && (stream.next..=stream.next + 2).contains(&page)
        });
        let at = known.unwrap_or_else(|| self.oldest());
        let stream = &mut self.streams[at];
        stream.window = if known.is_some() { (stream.window * 2).min(max).max(1) } else { 1 };
        stream.used = self.clock;
        stream.next = page + stream.window as u64;
        stream.window
    }

    /// Corrects a stream's expectation after fewer pages were filled than its window.
    pub fn filled(&mut self, page: PageNumber, wanted: usize, pages: usize) {
        let expected = page + wanted as u64;
        if let Some(stream) = self.streams.iter_mut().find(|stream| stream.next == expected) {
            stream.next = page + pages.max(1) as u64;
        }
    }

    fn oldest(&self) -> usize {
        (0..STREAMS).min_by_key(|at| self.streams[*at].used).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequential_access_doubles_the_window() {
        let mut streams = StreamDetector::default();
        let mut page = 1000;
        let mut windows = Vec::new();
        for _ in 0..7 {
            let window = streams.window(page, 32);
            windows.push(window);
            page += window as u64;
        }
        assert_eq!(windows, [1, 2, 4, 8, 16, 32, 32]);
    }

    #[test]
    fn random_access_gets_single_pages() {
        let mut streams = StreamDetector::default();
        for step in 0..1000u64 {
            assert_eq!(streams.window(step * 7919 % 100_003 * 5, 32), 1);
        }
    }

    #[test]
    fn interleaved_streams_are_all_tracked() {
        let mut streams = StreamDetector::default();
        let mut pages = [10_000u64, 20_000, 30_000];
        for _ in 0..6 {
            for page in &mut pages {
                *page += streams.window(*page, 32) as u64;
            }
        }
        assert!(pages.iter().zip([10_000u64, 20_000, 30_000]).all(|(page, start)| *page == start + 63));
    }

    #[test]
    fn a_short_fill_moves_the_expectation_back() {
        let mut streams = StreamDetector::default();
        streams.window(50, 32);
        assert_eq!(streams.window(51, 32), 2);
        streams.filled(51, 2, 1);
        assert_eq!(streams.window(52, 32), 4);
    }
}
