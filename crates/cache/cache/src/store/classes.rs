//! Expiry classes: items that expire at about the same time share runs, so that whole runs expire
//! (TTL buckets of Segcache, NSDI 2021, §4.1).

/// Number of classes. Class 0 has the items that do not expire, and class n those that expire
/// within 2ⁿ⁻¹ to 2ⁿ − 1 seconds.
pub const CLASSES: usize = 34;

/// The class of an item that expires in this second, or never if it is 0.
#[must_use]
pub fn class_of(expires_s: u32, now_s: u32) -> usize {
    if expires_s == 0 {
        return 0;
    }
    let left = expires_s.saturating_sub(now_s).max(1);
    left.ilog2() as usize + 1
}

/// Longest time in seconds for which a run of a class is open: a quarter of the time in which its
/// items expire, so that they do not stay long after their expiry. `None` if there is no limit.
#[must_use]
pub fn open_max_s(class: usize) -> Option<u32> {
    if class == 0 { None } else { Some((1 << (class - 1) >> 2).max(1)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_double() {
        let classes = [1, 2, 3, 4, 7, 8, u32::MAX].map(|left| class_of(left, 0));
        assert_eq!(classes, [1, 2, 2, 3, 3, 4, 32]);
        assert_eq!((class_of(0, 5), class_of(5, 5), class_of(4, 5)), (0, 1, 1));
        assert!(class_of(u32::MAX, 0) < CLASSES);
        assert_eq!((open_max_s(0), open_max_s(1), open_max_s(10)), (None, Some(1), Some(128)));
    }
}
