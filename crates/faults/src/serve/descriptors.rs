//! The descriptors of the agent, shared out to users.
//!
//! A user may have at most as many as it leaves free, so that there are some for the next user
//! whatever a user does. Threads are counted with the descriptors of what they serve.

use std::collections::BTreeMap;

use rustix::process::{Resource, getrlimit};

use super::PagingService;

/// Descriptors of a connection without a run or a session: its socket, and the process at the
/// other end.
pub const CONNECTION_DESCRIPTORS: usize = 4;
/// Descriptors of a run without programs: slabs, wake-ups, and connections to nodes.
pub const RUN_DESCRIPTORS: usize = 12;
/// Descriptors of a program.
pub const PROGRAM_DESCRIPTORS: usize = 16;
/// Descriptors of a session for extents.
pub const SESSION_DESCRIPTORS: usize = 16;
/// Descriptors of the agent itself.
const OWN_DESCRIPTORS: usize = 256;
/// The limit if the system has none.
const UNLIMITED: usize = 1 << 20;

/// The descriptors that each user has, as far as they are counted.
#[derive(Clone, Debug, Default)]
pub struct DescriptorCount {
    users: BTreeMap<u32, usize>,
}

impl DescriptorCount {
    /// Adds descriptors of a user.
    pub fn add(&mut self, uid: u32, count: usize) {
        *self.users.entry(uid).or_default() += count;
    }

    /// Whether a user may have `more` descriptors of an agent that may have `max`.
    #[must_use]
    pub fn may_have(&self, uid: u32, more: usize, max: usize) -> bool {
        let of_all: usize = self.users.values().sum::<usize>() + more;
        let of_user = self.users.get(&uid).copied().unwrap_or_default() + more;
        of_user <= max.saturating_sub(of_all)
    }
}

/// The descriptors that users may have in this process.
#[must_use]
pub fn descriptors_max() -> usize {
    let limit = getrlimit(Resource::Nofile).current.and_then(|limit| usize::try_from(limit).ok());
    limit.unwrap_or(UNLIMITED).saturating_sub(OWN_DESCRIPTORS)
}

impl PagingService {
    /// The descriptors of runs and programs.
    #[must_use]
    pub fn descriptors(&self) -> DescriptorCount {
        let mut count = DescriptorCount::default();
        for run in self.runs() {
            count.add(run.tenant(), RUN_DESCRIPTORS + run.program_count() * PROGRAM_DESCRIPTORS);
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_user_leaves_some_for_the_next() {
        let mut count = DescriptorCount::default();
        let fill = |count: &mut DescriptorCount, uid| {
            let mut added = 0;
            while count.may_have(uid, 1, 1000) {
                count.add(uid, 1);
                added += 1;
            }
            added
        };
        let shares: Vec<_> = (0..4).map(|uid| fill(&mut count, uid)).collect();
        assert_eq!(shares, [500, 250, 125, 62]);
        assert_eq!(fill(&mut count, 0), 0, "the first has its share");
        assert!(!count.may_have(5, 40, 1000) && count.may_have(5, 30, 1000));
    }
}
