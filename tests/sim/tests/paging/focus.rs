//! The bias of a schedule towards events that rarely coincide, so that each mutation is noticed
//! within few schedules.

/// The bias of half of the schedules. The other half has none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Focus {
    None,
    /// Nodes die and return, or are partitioned, while replicas are written and made.
    Replicas,
    /// Nodes are away and return with their memory.
    Absences,
    /// Agents die while events are late.
    Restarts,
    /// Events are late while pages are evicted and filled all the time.
    Events,
    /// WRITEs to replicas and late READs stay in flight while pages are evicted and fetched all the
    /// time.
    Writes,
    /// Ranges that were unmapped or moved away are mapped anew and used at once, while pages are
    /// evicted or agents die.
    ///
    /// There are no forks: if a shared page is being evicted and the program moves a
    /// write-protected page onto it, the worker and the agent wait for each other.
    Reuse,
}

impl Focus {
    pub fn of(seed: u64) -> Self {
        match seed % 16 {
            1 | 9 => Self::Replicas,
            3 => Self::Absences,
            5 | 13 => Self::Restarts,
            7 => Self::Events,
            11 => Self::Writes,
            15 => Self::Reuse,
            _ => Self::None,
        }
    }
}
