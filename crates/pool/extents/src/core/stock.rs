//! Extents that a session keeps ready, by size class: extents that its program freed, and extents
//! that it is likely to allocate.

use std::collections::VecDeque;

use aquifer_pool::SizeClass;

/// Maximum bytes that are kept ready of one size class, unless [`CLASS_STOCK_MIN`] needs more.
const CLASS_STOCK_BYTES_MAX: u64 = 4 << 20;
/// Extents that may be kept ready of any size class.
const CLASS_STOCK_MIN: usize = 2;
/// Maximum number of extents that are kept ready of one size class.
const CLASS_STOCK_MAX: usize = 256;

/// The extents of one size class that are kept ready.
#[derive(Debug, Default)]
struct ClassStock {
    /// Numbers in the book, oldest first. The newest is allocated first.
    numbers: VecDeque<u32>,
    /// Allocations since the stock last met the demand: the number of extents to keep ready.
    demand: usize,
}

/// The extents that a session keeps ready.
#[derive(Debug, Default)]
pub(crate) struct Stock([ClassStock; SizeClass::COUNT as usize]);

impl Stock {
    /// Removes the newest extent of this size class, and counts the demand.
    pub fn pop(&mut self, class: SizeClass) -> Option<u32> {
        let stock = self.class(class);
        stock.demand = capacity(class).min(stock.demand + 1);
        stock.numbers.pop_back()
    }

    /// Adds an extent.
    pub fn push(&mut self, class: SizeClass, number: u32) {
        self.class(class).numbers.push_back(number);
    }

    /// Removes up to `count` extents, oldest first.
    pub fn remove_oldest(&mut self, class: SizeClass, count: usize) -> Vec<u32> {
        let numbers = &mut self.class(class).numbers;
        let count = count.min(numbers.len());
        numbers.drain(..count).collect()
    }

    /// Removes all extents for which the predicate is true.
    pub fn remove_where(&mut self, class: SizeClass, is_removed: impl Fn(u32) -> bool) -> Vec<u32> {
        let all = std::mem::take(&mut self.class(class).numbers);
        let (removed, kept): (Vec<u32>, Vec<u32>) = all.into_iter().partition(|number| is_removed(*number));
        self.class(class).numbers = kept.into();
        removed
    }

    /// A size class above its capacity, and the number of extents above it.
    pub fn surplus(&self) -> Option<(SizeClass, usize)> {
        let class = self.find(|class, stock| stock.numbers.len() > capacity(class))?;
        Some((class, self.0[usize::from(class.k())].numbers.len() - capacity(class)))
    }

    /// A size class below its demand, and the number of missing extents.
    pub fn shortage(&mut self) -> Option<(SizeClass, usize)> {
        for stock in &mut self.0 {
            if stock.numbers.len() >= stock.demand {
                stock.demand = 0;
            }
        }
        let class = self.find(|_, stock| stock.demand > 0)?;
        let stock = self.class(class);
        Some((class, stock.demand - stock.numbers.len()))
    }

    /// Clears the demand for a size class, because the pool has no more extents.
    pub fn clear_demand(&mut self, class: SizeClass) {
        self.class(class).demand = 0;
    }

    fn find(&self, is_wanted: impl Fn(SizeClass, &ClassStock) -> bool) -> Option<SizeClass> {
        let classes = (0..SizeClass::COUNT).filter_map(SizeClass::new);
        classes.zip(&self.0).find(|(class, stock)| is_wanted(*class, stock)).map(|(class, _)| class)
    }

    fn class(&mut self, class: SizeClass) -> &mut ClassStock {
        &mut self.0[usize::from(class.k())]
    }
}

/// Maximum number of extents of a size class that may be kept ready.
fn capacity(class: SizeClass) -> usize {
    usize::try_from(CLASS_STOCK_BYTES_MAX / class.bytes())
        .map_or(CLASS_STOCK_MAX, |count| count.clamp(CLASS_STOCK_MIN, CLASS_STOCK_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demand_follows_allocations_within_bounds() {
        let mut stock = Stock::default();
        let class = SizeClass::CHUNK;
        assert_eq!(stock.shortage(), None);
        for _ in 0..3 {
            assert_eq!(stock.pop(class), None);
        }
        for number in 0..3 {
            assert_eq!(stock.shortage(), Some((class, 3 - number as usize)));
            stock.push(class, number);
        }
        assert_eq!(stock.shortage(), None);
        assert_eq!(stock.pop(class), Some(2), "the newest");
        assert_eq!(stock.remove_oldest(class, 1), [0], "the oldest");
        assert_eq!(stock.shortage(), None, "one is ready, and one was allocated");
        for number in 10..10 + 300 {
            stock.push(class, number);
            stock.pop(SizeClass::SECTION);
        }
        let (_, count) = stock.surplus().expect("the stock is above its capacity");
        assert_eq!(stock.remove_oldest(class, count).len(), count);
        assert_eq!(stock.surplus(), None);
        assert_eq!(stock.0[0].numbers.len(), CLASS_STOCK_MAX);
        stock.push(SizeClass::SECTION, 1);
        assert_eq!(stock.shortage(), Some((SizeClass::SECTION, 1)));
        stock.push(SizeClass::SECTION, 2);
        assert_eq!(stock.shortage(), None, "two of the largest size class");
        stock.pop(class);
        stock.clear_demand(class);
        assert_eq!(stock.shortage(), None);
    }
}
