//! A request's bytes, page by page.

use aquifer_pager::{PAGE_BYTES, PageNumber};

/// The part of one page that a request is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub page: PageNumber,
    /// Where it begins within the page,
    pub within: usize,
    /// and within the request.
    pub at: usize,
    pub len: usize,
}

/// The pieces of a request, in their order.
pub(crate) fn pieces(offset: u64, len: usize) -> impl Iterator<Item = Piece> {
    let page_bytes = PAGE_BYTES as u64;
    let mut at = 0;
    std::iter::from_fn(move || {
        let here = offset + at as u64;
        let within = usize::try_from(here % page_bytes).expect("below a page");
        let part = (PAGE_BYTES - within).min(len - at);
        let piece = Piece { page: here / page_bytes, within, at, len: part };
        at += part;
        (part > 0).then_some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_cut_at_pages() {
        let cut = |offset, len| {
            pieces(offset, len)
                .map(|piece| (piece.page, piece.within, piece.at, piece.len))
                .collect::<Vec<_>>()
        };
        assert_eq!(cut(0, 4096), [(0, 0, 0, 4096)]);
        assert_eq!(cut(4000, 200), [(0, 4000, 0, 96), (1, 0, 96, 104)]);
        assert_eq!(cut(8192, 9000), [(2, 0, 0, 4096), (3, 0, 4096, 4096), (4, 0, 8192, 808)]);
        assert_eq!(cut(77, 0), []);
    }
}
