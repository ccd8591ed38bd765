//! What a target lends, and memory that is put under other addresses while devices know it (CoRM §3.5).

use std::io;
use std::sync::Arc;

use super::sys::device::{Device, DeviceCaps};
use super::sys::registration::{Registration, RegistrationUse};
use aquifer_fabric::memory::u64_from;
use aquifer_fabric::{AliasMapping, Memory};

/// How a device learns that addresses have other pages; the cheapest that it can is taken, and logged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RemapMethod {
    /// It notices (on-demand paging), and is told to fetch them at once, so that nobody waits for that later.
    Prefetch,
    /// It notices, and fetches them when they are touched.
    OnDemand,
    /// All windows are closed, the memory is registered anew, and windows are bound again when they are asked for. Every device can do that.
    Reregistration,
}

impl RemapMethod {
    /// All ways, the best first.
    pub const ALL: [Self; 3] = [Self::Prefetch, Self::OnDemand, Self::Reregistration];

    /// The best that a device claims to be able to.
    #[must_use]
    pub fn of(caps: &DeviceCaps) -> Self {
        if caps.has_odp { Self::Prefetch } else { Self::Reregistration }
    }

    /// Whether the device keeps up by itself, while windows are open.
    #[must_use]
    pub fn is_live(self) -> bool {
        matches!(self, Self::Prefetch | Self::OnDemand)
    }
}

impl std::fmt::Display for RemapMethod {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Prefetch => "on-demand paging with prefetch",
            Self::OnDemand => "on-demand paging",
            Self::Reregistration => "re-registration, with windows closed meanwhile",
        })
    }
}

/// From where to where pages are to go.
#[derive(Clone, Copy, Debug)]
pub(super) struct RemapRequest {
    pub region: usize,
    /// In the region.
    pub at: usize,
    /// In its memory.
    pub from: usize,
    pub len: usize,
}

/// A region as the device knows it.
#[derive(Debug)]
pub(super) enum LentRegion {
    Fixed(Registration),
    Remappable(Remappable),
    /// The device did not take it.
    Nothing,
}

impl LentRegion {
    pub fn registration(&self) -> Option<&Registration> {
        match self {
            Self::Fixed(registration) => Some(registration),
            Self::Remappable(remappable) => remappable.registration.as_ref(),
            Self::Nothing => None,
        }
    }
}

/// A region whose addresses may get other pages.
#[derive(Debug)]
pub(super) struct Remappable {
    // Before the view that it is of.
    registration: Option<Registration>,
    view: Arc<AliasMapping>,
    base: u64,
    device: &'static Device,
    how: RemapMethod,
}

impl Remappable {
    /// Lend a memory under addresses from `base` on, in its own order at first.
    ///
    /// # Errors
    /// What the device says.
    pub fn new(device: &'static Device, memory: Arc<Memory>, base: u64) -> io::Result<Self> {
        let wish = usize::try_from(base).unwrap_or(0);
        let view = Arc::new(AliasMapping::new(memory, wish)?);
        let mut how = RemapMethod::of(&device.caps);
        // Some devices page only where peers and this process use the same addresses.
        let is_same = view.as_ptr().addr() == wish;
        let mut registration = None;
        if how.is_live() && is_same {
            let made =
                Registration::of_view(device, Arc::clone(&view), base, RegistrationUse::WindowsOnDemand);
            let refused = |error: &io::Error| tracing::info!(%error, "the device does not page this memory");
            registration = made.inspect_err(refused).ok();
        }
        if registration.is_none() {
            how = RemapMethod::Reregistration;
            registration =
                Some(Registration::of_view(device, Arc::clone(&view), base, RegistrationUse::Windows)?);
        }
        let remappable = Self { registration, view, base, device, how };
        tracing::info!(device = device.caps.name, %how, "memory may be remapped");
        Ok(remappable)
    }

    pub fn how(&self) -> RemapMethod {
        self.how
    }

    /// Whether the order can be carried out, as far as that is known before windows are closed for it.
    pub fn can_remap(&self, order: &RemapRequest) -> io::Result<()> {
        self.view.can_remap(order.at, order.from, order.len)
    }

    /// RemapRequest pages while windows are open. Only if [`RemapMethod::is_live`].
    pub fn remap_live(&mut self, order: &RemapRequest) -> io::Result<()> {
        debug_assert!(self.how.is_live());
        self.view.remap(order.at, order.from, order.len)?;
        if self.how == RemapMethod::Prefetch
            && let Some(registration) = &self.registration
            && let Err(error) = registration.prefetch(self.base + u64_from(order.at), u64_from(order.len))
        {
            // The pages are right without it.
            tracing::info!(device = self.device.caps.name, %error, "the device does not prefetch");
            self.how = RemapMethod::OnDemand;
        }
        Ok(())
    }

    /// RemapRequest pages while no window is open. If the device does not take them all are closed from now on.
    pub fn remap_closed(&mut self, order: &RemapRequest) -> io::Result<()> {
        self.view.remap(order.at, order.from, order.len)?;
        // The old one first: its pages are pinned.
        self.registration = None;
        let made =
            Registration::of_view(self.device, Arc::clone(&self.view), self.base, RegistrationUse::Windows)?;
        self.registration = Some(made);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_pages_on_demand_is_left_to_do_so() {
        let plain = DeviceCaps::default();
        assert_eq!(RemapMethod::of(&plain), RemapMethod::Reregistration);
        assert!(!RemapMethod::of(&plain).is_live());
        let paging = DeviceCaps { has_odp: true, ..plain };
        assert_eq!(RemapMethod::of(&paging), RemapMethod::Prefetch);
        assert!(
            RemapMethod::Prefetch.is_live()
                && RemapMethod::OnDemand.is_live()
                && !RemapMethod::Reregistration.is_live()
        );
    }
}
