//! Extents that a session keeps ready, by size: those that its program gave back, and some that it is likely to want.

use std::collections::VecDeque;

use aquifer_pool::SizeClass;

/// Of each size no more is kept ready than this many bytes, but two extents in any case.
const KEPT_BYTES_MAX: u64 = 4 << 20;
const KEPT_MIN: usize = 2;
/// And no more than so many.
const KEPT_MAX: usize = 256;

#[derive(Debug, Default)]
struct Shelf {
    /// Numbers in the book. The last to come is the first to be taken.
    numbers: VecDeque<u32>,
    /// How many were taken since it was filled last: so many are likely to be.
    wanted: usize,
}

/// See above.
#[derive(Debug, Default)]
pub(crate) struct Stock([Shelf; SizeClass::COUNT as usize]);

impl Stock {
    /// One of this size for the program; `None` if there is none.
    pub fn take(&mut self, class: SizeClass) -> Option<u32> {
        let shelf = self.shelf(class);
        shelf.wanted = most(class).min(shelf.wanted + 1);
        shelf.numbers.pop_back()
    }

    /// One more.
    pub fn put(&mut self, class: SizeClass, number: u32) {
        self.shelf(class).numbers.push_back(number);
    }

    /// Up to so many to be given back.
    pub fn drop_some(&mut self, class: SizeClass, count: usize) -> Vec<u32> {
        let numbers = &mut self.shelf(class).numbers;
        let count = count.min(numbers.len());
        numbers.drain(..count).collect()
    }

    /// All of which that is so.
    pub fn drop_all(&mut self, class: SizeClass, is_so: impl Fn(u32) -> bool) -> Vec<u32> {
        let all = std::mem::take(&mut self.shelf(class).numbers);
        let (dropped, kept): (Vec<u32>, Vec<u32>) = all.into_iter().partition(|number| is_so(*number));
        self.shelf(class).numbers = kept.into();
        dropped
    }

    /// A size of which there is more than may be, and by how many.
    pub fn surplus(&self) -> Option<(SizeClass, usize)> {
        let class = self.find(|class, shelf| shelf.numbers.len() > most(class))?;
        Some((class, self.0[usize::from(class.k())].numbers.len() - most(class)))
    }

    /// A size of which there is less than is likely to be wanted, and how many are missing.
    pub fn shortage(&mut self) -> Option<(SizeClass, usize)> {
        for shelf in &mut self.0 {
            if shelf.numbers.len() >= shelf.wanted {
                shelf.wanted = 0;
            }
        }
        let class = self.find(|_, shelf| shelf.wanted > 0)?;
        let shelf = self.shelf(class);
        Some((class, shelf.wanted - shelf.numbers.len()))
    }

    /// There are no more to be had for now.
    pub fn give_up(&mut self, class: SizeClass) {
        self.shelf(class).wanted = 0;
    }

    fn find(&self, is_so: impl Fn(SizeClass, &Shelf) -> bool) -> Option<SizeClass> {
        let classes = (0..SizeClass::COUNT).filter_map(SizeClass::new);
        classes.zip(&self.0).find(|(class, shelf)| is_so(*class, shelf)).map(|(class, _)| class)
    }

    fn shelf(&mut self, class: SizeClass) -> &mut Shelf {
        &mut self.0[usize::from(class.k())]
    }
}

/// How many of a size may be kept ready.
fn most(class: SizeClass) -> usize {
    usize::try_from(KEPT_BYTES_MAX / class.bytes()).map_or(KEPT_MAX, |many| many.clamp(KEPT_MIN, KEPT_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_taken_is_wanted_again_within_bounds() {
        let mut stock = Stock::default();
        let class = SizeClass::CHUNK;
        assert_eq!(stock.shortage(), None);
        for _ in 0..3 {
            assert_eq!(stock.take(class), None);
        }
        for number in 0..3 {
            assert_eq!(stock.shortage(), Some((class, 3 - number as usize)));
            stock.put(class, number);
        }
        assert_eq!(stock.shortage(), None);
        assert_eq!(stock.take(class), Some(2), "the last to come");
        assert_eq!(stock.drop_some(class, 1), [0], "the first to come");
        assert_eq!(stock.shortage(), None, "one is there, as one was taken");
        for number in 10..10 + 300 {
            stock.put(class, number);
            stock.take(SizeClass::SECTION);
        }
        let (_, count) = stock.surplus().expect("there are too many");
        assert_eq!(stock.drop_some(class, count).len(), count);
        assert_eq!(stock.surplus(), None);
        assert_eq!(stock.0[0].numbers.len(), KEPT_MAX);
        stock.put(SizeClass::SECTION, 1);
        assert_eq!(stock.shortage(), Some((SizeClass::SECTION, 1)));
        stock.put(SizeClass::SECTION, 2);
        assert_eq!(stock.shortage(), None, "no more than two of the largest");
        stock.take(class);
        stock.give_up(class);
        assert_eq!(stock.shortage(), None);
    }
}
