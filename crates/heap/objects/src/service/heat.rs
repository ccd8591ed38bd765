//! Detection of hot size classes, which are compacted late: their objects come and go so fast that
//! gaps are soon filled, and each object that is moved costs its readers a search (§3.1.4).

/// A class is hot if more than 1/`CHANGES_DIVISOR` of its objects were allocated or freed in the
/// last second.
const CHANGES_DIVISOR: u64 = 4;
/// A class with at most this number of changes in the last second is not hot.
const CHANGES_MIN: u64 = 64;

/// The heat of the classes of a heap.
#[derive(Debug)]
pub struct Heat {
    /// Allocations and frees of each class at the last update.
    seen: Vec<u64>,
    is_hot: Vec<bool>,
}

impl Heat {
    /// Creates the state of `classes` classes, all cold.
    #[must_use]
    pub fn new(classes: usize) -> Self {
        Self { seen: vec![0; classes], is_hot: vec![false; classes] }
    }

    /// Updates the heat of all classes. To be called once a second, with the number of allocations
    /// and frees of each class since its beginning, and the number of its objects.
    pub fn update(&mut self, classes: impl Iterator<Item = (u64, u64)>) {
        for ((seen, is_hot), (changes, objects)) in self.seen.iter_mut().zip(&mut self.is_hot).zip(classes) {
            let recent = changes - std::mem::replace(seen, changes);
            *is_hot = recent > (objects / CHANGES_DIVISOR).max(CHANGES_MIN);
        }
    }

    /// Whether a class was hot at the last update.
    #[must_use]
    pub fn is_hot(&self, class: usize) -> bool {
        self.is_hot[class]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_hot_while_its_objects_come_and_go() {
        let mut heat = Heat::new(2);
        heat.update([(1000, 1000), (10, 10)].into_iter());
        assert!(heat.is_hot(0) && !heat.is_hot(1), "few changes do not make a class hot");
        heat.update([(1200, 1000), (80, 20)].into_iter());
        assert!(!heat.is_hot(0) && heat.is_hot(1), "a fifth, and more than there are");
        heat.update([(1500, 1000), (80, 20)].into_iter());
        assert!(heat.is_hot(0) && !heat.is_hot(1));
    }
}
