//! Splits the byte range of a request at page boundaries.

use aquifer_pager::{PAGE_BYTES, PageNumber};

/// The part of a request that lies in one page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PagePart {
    pub page: PageNumber,
    /// Offset of the part in the page.
    pub within: usize,
    /// Offset of the part in the request.
    pub at: usize,
    pub len: usize,
}

/// The parts of a request of `len` bytes at `offset`, in ascending order.
pub(crate) fn split_at_pages(offset: u64, len: usize) -> impl Iterator<Item = PagePart> {
    let page_bytes = PAGE_BYTES as u64;
    let mut at = 0;
    std::iter::from_fn(move || {
        let position = offset + at as u64;
        let within = usize::try_from(position % page_bytes).expect("below a page");
        let part_len = (PAGE_BYTES - within).min(len - at);
        let part = PagePart { page: position / page_bytes, within, at, len: part_len };
        at += part_len;
        (part_len > 0).then_some(part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_split_at_page_boundaries() {
        let split = |offset, len| {
            split_at_pages(offset, len)
                .map(|part| (part.page, part.within, part.at, part.len))
                .collect::<Vec<_>>()
        };
        assert_eq!(split(0, 4096), [(0, 0, 0, 4096)]);
        assert_eq!(split(4000, 200), [(0, 4000, 0, 96), (1, 0, 96, 104)]);
        assert_eq!(split(8192, 9000), [(2, 0, 0, 4096), (3, 0, 4096, 4096), (4, 0, 8192, 808)]);
        assert_eq!(split(77, 0), []);
    }
}
