//! Sets of pages, kept as sorted, disjoint ranges.

use aquifer_pager::PageNumber;

/// A half-open range of pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord)]
pub struct Area {
    /// First page.
    pub start: PageNumber,
    /// Page after the last.
    pub end: PageNumber,
}

impl Area {
    /// Whether two ranges have a page in common.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.start < other.end && other.start < self.end
    }
}

/// A set of pages, kept as sorted, disjoint ranges with gaps between them.
#[derive(Clone, Debug, Default)]
pub struct Areas(Vec<Area>);

impl Areas {
    /// Adds a range and merges it with the ranges that it overlaps or touches.
    pub fn insert(&mut self, mut area: Area) {
        if area.start >= area.end {
            return;
        }
        let first = self.0.partition_point(|other| other.end < area.start);
        let last = self.0.partition_point(|other| other.start <= area.end);
        if first < last {
            area.start = area.start.min(self.0[first].start);
            area.end = area.end.max(self.0[last - 1].end);
        }
        self.0.splice(first..last, [area]);
    }

    /// Removes a range.
    pub fn remove(&mut self, area: Area) {
        let first = self.0.partition_point(|other| other.end <= area.start);
        let last = self.0.partition_point(|other| other.start < area.end);
        if first >= last || area.start >= area.end {
            return;
        }
        let left = Area { start: self.0[first].start, end: area.start };
        let right = Area { start: area.end, end: self.0[last - 1].end };
        self.0.splice(first..last, [left, right].into_iter().filter(|part| part.start < part.end));
    }

    /// The parts of a range that are not in the set.
    #[must_use]
    pub fn missing(&self, area: Area) -> Vec<Area> {
        let mut gaps = Vec::new();
        let mut start = area.start;
        let first = self.0.partition_point(|other| other.end <= area.start);
        for other in self.0[first..].iter().take_while(|other| other.start < area.end) {
            if start < other.start {
                gaps.push(Area { start, end: other.start });
            }
            start = other.end;
        }
        if start < area.end {
            gaps.push(Area { start, end: area.end });
        }
        gaps
    }

    /// Removes a range and returns the parts of it that were in the set.
    pub fn extract(&mut self, area: Area) -> Vec<Area> {
        let mut rest = Self::default();
        rest.insert(area);
        self.missing(area).into_iter().for_each(|gap| rest.remove(gap));
        self.remove(area);
        rest.0
    }

    /// The end of the range that contains a page; `None` if no range does.
    #[must_use]
    pub fn end_of(&self, page: PageNumber) -> Option<PageNumber> {
        let at = self.0.partition_point(|area| area.end <= page);
        self.0.get(at).filter(|area| area.start <= page).map(|area| area.end)
    }

    /// Whether a page is in the set.
    #[must_use]
    pub fn contains(&self, page: PageNumber) -> bool {
        self.end_of(page).is_some()
    }

    /// Whether the set has no page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The ranges in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = Area> + '_ {
        self.0.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn areas_are_a_set_of_pages(
            operations in prop::collection::vec((any::<bool>(), 0u64..60, 0u64..12), 0..40),
            probe in 0u64..60,
            length in 0u64..20,
        ) {
            let mut areas = Areas::default();
            let mut model = BTreeSet::new();
            for (add, start, length) in operations {
                let area = Area { start, end: start + length };
                if add {
                    areas.insert(area);
                    model.extend(start..start + length);
                } else {
                    areas.remove(area);
                    model.retain(|page| !(start..start + length).contains(page));
                }
            }
            let pages: BTreeSet<u64> = areas.iter().flat_map(|area| area.start..area.end).collect();
            prop_assert_eq!(&pages, &model);
            let is_merged = areas.iter().zip(areas.iter().skip(1)).all(|(one, next)| one.end < next.start);
            prop_assert!(is_merged, "merged and in order");
            let missing: BTreeSet<u64> = areas.missing(Area { start: probe, end: probe + length })
                .into_iter().flat_map(|area| area.start..area.end).collect();
            let range = probe..probe + length;
            let expected: BTreeSet<u64> = range.clone().filter(|page| !model.contains(page)).collect();
            prop_assert_eq!(missing, expected);
            prop_assert_eq!(areas.contains(probe), model.contains(&probe));
            let extracted: BTreeSet<u64> = areas.extract(Area { start: probe, end: probe + length })
                .into_iter().flat_map(|area| area.start..area.end).collect();
            let (inside, outside): (BTreeSet<u64>, BTreeSet<u64>) =
                model.iter().partition(|page| range.contains(page));
            prop_assert_eq!(extracted, inside);
            let left: BTreeSet<u64> = areas.iter().flat_map(|area| area.start..area.end).collect();
            prop_assert_eq!(left, outside);
        }
    }
}
