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
}

impl Focus {
    pub fn of(seed: u64) -> Self {
        match seed % 8 {
            1 => Self::Replicas,
            3 => Self::Absences,
            5 => Self::Restarts,
            7 => Self::Events,
            _ => Self::None,
        }
    }
}
