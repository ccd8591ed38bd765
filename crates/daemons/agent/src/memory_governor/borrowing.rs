//! How much idle memory each elastic run may have. Pure functions of what was observed.
//!
//! All runs together may have a quarter of the idle memory. So when a program takes memory, the
//! runs must return a quarter of that in the same time: 125 MB/s if it takes 500 MB/s. The rest is
//! covered by available memory, and by the page cache, which returns its memory at once.

use std::collections::{BTreeMap, VecDeque};

use super::mutation::Mutation;

/// Part of the idle memory that elastic runs may have: 1/`LENT_DIVISOR`.
const LENT_DIVISOR: u64 = 4;
/// Bytes that a run may get beyond half more than it has, so that it need not wait for the next
/// sample.
const HEADROOM_BYTES: u64 = 256 << 20;
/// Number of samples of which the least idle memory counts: runs return memory at once and get more
/// after a second.
const SAMPLES_MAX: usize = 10;
/// Bytes that a run which is returning memory may grow until the next sample, before its threads
/// wait for evictions.
const GROWTH_BYTES: u64 = 16 << 20;

/// The activity of a run. Idle runs return memory first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Activity {
    Idle,
    Low,
    High,
}

/// An elastic run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Borrower {
    /// The user id of the run's owner.
    pub owner: u32,
    /// Most bytes that the run may have beyond its limit.
    pub range: u64,
    /// Bytes that it has beyond its limit.
    pub borrowed: u64,
    /// Most bytes that it could have beyond its limit until now.
    pub max: u64,
    pub activity: Activity,
}

impl Borrower {
    /// Bytes that the run can use soon.
    fn wanted(&self) -> u64 {
        self.range.min((self.borrowed + self.borrowed / 2).saturating_add(HEADROOM_BYTES))
    }
}

/// The limits of what a run may have beyond its own limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BorrowLimits {
    /// Most bytes. Threads wait for evictions if the run grows beyond.
    pub max: u64,
    /// Bytes above which pages are evicted, at most `max`.
    pub target: u64,
}

/// Lends idle memory, by the last samples of it.
#[derive(Debug)]
pub(super) struct Lender {
    keep_free: u64,
    samples: VecDeque<u64>,
}

impl Lender {
    /// A lender that leaves `keep_free` bytes of the idle memory free.
    pub fn new(keep_free: u64) -> Self {
        Self { keep_free, samples: VecDeque::with_capacity(SAMPLES_MAX) }
    }

    /// Lends idle memory: returns the limits of each borrower from now on. `idle` bytes are idle,
    /// and no run has them.
    pub fn lend(&mut self, idle: u64, borrowers: &[Borrower]) -> Vec<BorrowLimits> {
        let borrowed = borrowers.iter().fold(0u64, |sum, run| sum.saturating_add(run.borrowed));
        let lendable = self.lendable(idle.saturating_add(borrowed));
        let allowed = allowances(borrowers, lendable);
        borrowers.iter().zip(allowed).map(|(run, allowed)| next_limits(run, allowed)).collect()
    }

    /// Records a sample: `idle` bytes are idle, or borrowed by runs. Returns the number of bytes
    /// that all runs may have.
    fn lendable(&mut self, idle: u64) -> u64 {
        if self.samples.len() == SAMPLES_MAX {
            self.samples.pop_front();
        }
        self.samples.push_back(idle);
        let least = self.samples.iter().min().copied().unwrap_or(0);
        let divisor = if Mutation::LendAll.is_active() { 1 } else { LENT_DIVISOR };
        least.saturating_sub(self.keep_free) / divisor
    }
}

/// The next limits of a run that is allowed `allowed` bytes.
fn next_limits(run: &Borrower, allowed: u64) -> BorrowLimits {
    // What a run has cannot be below its limit at once, and its threads should not wait for that.
    let until_evicted = run.max.min(run.borrowed.saturating_add(GROWTH_BYTES));
    let max = if Mutation::ShrinkAtOnce.is_active() { allowed } else { allowed.max(until_evicted) };
    BorrowLimits { max, target: allowed }
}

/// Divides `lendable` bytes among the borrowers: first what they can use soon, the most active
/// first, then the rest. Users share equally, and so do the runs of a user.
fn allowances(borrowers: &[Borrower], lendable: u64) -> Vec<u64> {
    let mut allowed = vec![0; borrowers.len()];
    let mut left = lendable;
    let passes: [fn(&Borrower) -> u64; 2] = [Borrower::wanted, |borrower| borrower.range];
    for wanted in passes {
        for activity in [Activity::High, Activity::Low, Activity::Idle] {
            let group: Vec<usize> =
                (0..borrowers.len()).filter(|at| borrowers[*at].activity == activity).collect();
            let wants: Vec<_> = group
                .iter()
                .map(|at| (borrowers[*at].owner, wanted(&borrowers[*at]).saturating_sub(allowed[*at])))
                .collect();
            for (at, given) in group.iter().zip(share_among_users(&wants, left)) {
                allowed[*at] += given;
                left -= given;
            }
        }
    }
    allowed
}

/// Divides `total` among wants of users: users share equally, and so do the wants of a user.
fn share_among_users(wants: &[(u32, u64)], total: u64) -> Vec<u64> {
    let mut users = BTreeMap::<u32, Vec<usize>>::new();
    for (at, (user, _)) in wants.iter().enumerate() {
        users.entry(*user).or_default().push(at);
    }
    let of_user = |list: &Vec<usize>| list.iter().fold(0u64, |sum, at| sum.saturating_add(wants[*at].1));
    let given = share(&users.values().map(of_user).collect::<Vec<_>>(), total);
    let mut shares = vec![0; wants.len()];
    for (list, given) in users.values().zip(given) {
        let of_list = list.iter().map(|at| wants[*at].1).collect::<Vec<_>>();
        for (at, part) in list.iter().zip(share(&of_list, given)) {
            shares[*at] = part;
        }
    }
    shares
}

/// Divides `total` among wants: equally, but none gets more than it wants.
fn share(wants: &[u64], total: u64) -> Vec<u64> {
    let mut order: Vec<usize> = (0..wants.len()).collect();
    order.sort_by_key(|at| wants[*at]);
    let mut left = total;
    let mut shares = vec![0; wants.len()];
    for (done, at) in order.iter().enumerate() {
        let equal = left / (wants.len() - done) as u64;
        shares[*at] = wants[*at].min(equal);
        left -= shares[*at];
    }
    shares
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn borrower(owner: u32, range: u64, borrowed: u64, activity: Activity) -> Borrower {
        Borrower { owner, range: range * MIB, borrowed: borrowed * MIB, max: range * MIB, activity }
    }

    #[test]
    fn runs_get_what_they_ask_for_while_there_is_enough() {
        let runs = [borrower(1, 500, 0, Activity::High), borrower(2, 3000, 2000, Activity::Idle)];
        assert_eq!(allowances(&runs, 4000 * MIB), [500 * MIB, 3000 * MIB]);
        assert_eq!(allowances(&runs, 3400 * MIB), [400 * MIB, 3000 * MIB], "what they can use soon is first");
    }

    #[test]
    fn the_least_active_return_memory_first() {
        let runs = [
            borrower(1, 1000, 1000, Activity::Low),
            borrower(1, 1000, 1000, Activity::Idle),
            borrower(1, 1000, 1000, Activity::High),
        ];
        assert_eq!(allowances(&runs, 2500 * MIB), [1000 * MIB, 500 * MIB, 1000 * MIB]);
        assert_eq!(allowances(&runs, 1200 * MIB), [200 * MIB, 0, 1000 * MIB]);
    }

    #[test]
    fn users_share_equally_however_many_runs_they_have() {
        let mut runs = vec![borrower(1, 1000, 1000, Activity::High)];
        runs.extend([borrower(2, 1000, 1000, Activity::High); 3]);
        assert_eq!(allowances(&runs, 1200 * MIB), [600 * MIB, 200 * MIB, 200 * MIB, 200 * MIB]);
    }

    #[test]
    fn memory_is_returned_at_once_and_lent_after_a_second() {
        let mut lender = Lender::new(100);
        assert_eq!(lender.lendable(1000), 225);
        assert_eq!(lender.lendable(500), 100);
        for _ in 1..SAMPLES_MAX {
            assert_eq!(lender.lendable(1000), 100);
        }
        assert_eq!(lender.lendable(1000), 225);
        assert_eq!(lender.lendable(50), 0);
    }

    #[test]
    fn a_run_returns_memory_without_a_wait() {
        let next = |max: u64, borrowed: u64, allowed: u64| {
            let run = Borrower { max: max * MIB, ..borrower(1, 1000, borrowed, Activity::High) };
            let BorrowLimits { max, target } = next_limits(&run, allowed * MIB);
            (max / MIB, target / MIB)
        };
        assert_eq!(next(0, 0, 20), (20, 20), "it gets more at once");
        assert_eq!(next(360, 320, 4), (320 + GROWTH_BYTES / MIB, 4));
        assert_eq!(next(320, 319, 4), (320, 4), "it does not grow");
        assert_eq!(next(320, 160, 4), (160 + GROWTH_BYTES / MIB, 4));
        assert_eq!(next(4, 2, 4), (4, 4));
    }

    proptest! {
        #[test]
        fn no_more_is_lent_than_there_is_and_no_run_gets_more_than_wanted(
            runs in prop::collection::vec((0u32..3, 0u64..5000, 0u64..5000, 0u8..3), 0..12),
            lendable in 0u64..20_000,
        ) {
            let activities = [Activity::Idle, Activity::Low, Activity::High];
            let runs: Vec<_> = runs
                .into_iter()
                .map(|(owner, range, had, activity)| {
                    borrower(owner, range, had, activities[usize::from(activity)])
                })
                .collect();
            let allowed = allowances(&runs, lendable * MIB);
            prop_assert!(allowed.iter().zip(&runs).all(|(allowed, run)| *allowed <= run.range));
            let (sum, all): (u64, u64) = (allowed.iter().sum(), runs.iter().map(|run| run.range).sum());
            prop_assert!(sum <= lendable * MIB, "{sum} bytes");
            prop_assert!(sum == all || lendable * MIB - sum < 12, "{sum} of {all} bytes");
        }
    }
}
