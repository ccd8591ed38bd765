//! Which size classes are hot: their objects come and go so fast that gaps are soon filled, and
//! each object that is moved costs its readers a search (§3.1.4).

/// A class is hot if more than this part of its objects, as a divisor, were allocated or freed
/// since the last look,
const CHANGES_DIVISOR: u64 = 4;
/// and at least this many.
const CHANGES_MIN: u64 = 64;

/// The heat of the classes of a heap.
#[derive(Debug)]
pub struct Heat {
    /// Allocations and frees at the last look.
    seen: Vec<u64>,
    is_hot: Vec<bool>,
}

impl Heat {
    /// All classes are cold.
    #[must_use]
    pub fn new(classes: usize) -> Self {
        Self { seen: vec![0; classes], is_hot: vec![false; classes] }
    }

    /// Looks at all classes, which is due once a second: for each, how many objects were ever
    /// allocated and freed, and how many there are.
    pub fn look(&mut self, classes: impl Iterator<Item = (u64, u64)>) {
        for ((seen, is_hot), (changes, objects)) in self.seen.iter_mut().zip(&mut self.is_hot).zip(classes) {
            let recent = changes - std::mem::replace(seen, changes);
            *is_hot = recent > (objects / CHANGES_DIVISOR).max(CHANGES_MIN);
        }
    }

    /// Whether a class was hot at the last look.
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
        heat.look([(1000, 1000), (10, 10)].into_iter());
        assert!(heat.is_hot(0) && !heat.is_hot(1), "few changes do not make a class hot");
        heat.look([(1200, 1000), (80, 20)].into_iter());
        assert!(!heat.is_hot(0) && heat.is_hot(1), "a fifth, and more than there are");
        heat.look([(1500, 1000), (80, 20)].into_iter());
        assert!(heat.is_hot(0) && !heat.is_hot(1));
    }
}
