//! The memory that this machine can lend.

/// Memory that can be lent in all. `available` does not include the pages that the lent memory has
/// already allocated. `keep_free` stays with the machine.
pub(crate) const fn affordable_bytes(allocated: u64, available: u64, keep_free: u64) -> u64 {
    allocated.saturating_add(available).saturating_sub(keep_free)
}

/// Memory to lend next, if `requested` is requested and `lent` is lent.
///
/// `affordable` changes all the time, so a change because of it is made only if it is at least
/// `step`.
pub(crate) fn next_lent_bytes(requested: u64, lent: u64, affordable: u64, step: u64) -> u64 {
    let next = requested.min(affordable);
    let fulfils_request = requested < lent || next == requested && lent < requested;
    if fulfils_request || next.abs_diff(lent) >= step { next } else { lent }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocated_pages_of_the_lent_memory_count_as_available() {
        assert_eq!(affordable_bytes(1, 6, 2), 5);
        assert_eq!(affordable_bytes(1, 2, 9), 0);
        assert_eq!(affordable_bytes(u64::MAX, 2, 0), u64::MAX);
    }

    #[test]
    fn lending_follows_the_available_memory_in_steps() {
        assert_eq!(next_lent_bytes(8, 8, 20, 4), 8, "the request is fulfilled");
        assert_eq!(next_lent_bytes(8, 0, 8, 4), 8);
        for (affordable, next) in [(46, 46), (47, 50), (50, 50), (53, 50), (54, 54)] {
            assert_eq!(
                next_lent_bytes(100, 50, affordable, 4),
                next,
                "a change smaller than a step is not made: {affordable}"
            );
        }
        assert_eq!(
            next_lent_bytes(50, 50, 47, 4),
            50,
            "the request is fulfilled, and the change is smaller than a step"
        );
        assert_eq!(next_lent_bytes(50, 50, 46, 4), 46);
        assert_eq!(next_lent_bytes(51, 50, 51, 4), 51, "a change that fulfils the request may be small");
        assert_eq!(next_lent_bytes(30, 50, 40, 4), 30, "a request for less is fulfilled");
        assert_eq!(next_lent_bytes(49, 50, 48, 4), 48);
    }
}
