//! What half of the schedules are biased towards: things that seldom meet by chance. Each mutation must show within few schedules.

/// A bias. The other half of the schedules has none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Focus {
    None,
    /// SimNodes die and come back, or are cut off, while copies are written and made.
    Replicas,
    /// SimNodes are away and come back with their memory.
    Absences,
    /// Agents die while events are late.
    Restarts,
    /// Events are late while pages come and go all the time.
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
