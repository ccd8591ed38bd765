//! Lent regions, and changing the pages at their addresses while devices use them (CoRM §3.5).

use std::io;
use std::sync::Arc;

use super::sys::device::{Device, DeviceCaps};
use super::sys::registration::{Registration, RegistrationUse};
use aquifer_fabric::memory::u64_from;
use aquifer_fabric::{AliasMapping, Memory};

/// The method by which a device gets the new pages of addresses. The cheapest method that works is
/// used and logged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RemapMethod {
    /// The kernel invalidates the device's translation (on-demand paging). The pages are prefetched
    /// at once, so that no access waits for them.
    Prefetch,
    /// The kernel invalidates the device's translation. Pages are fetched when they are touched.
    OnDemand,
    /// All windows are closed and the memory is registered again. Windows are bound again on
    /// request. Every device supports this.
    Reregistration,
}

impl RemapMethod {
    /// All methods, the cheapest first.
    pub const ALL: [Self; 3] = [Self::Prefetch, Self::OnDemand, Self::Reregistration];

    /// The cheapest method that a device claims to support.
    #[must_use]
    pub fn of(caps: &DeviceCaps) -> Self {
        if caps.has_odp { Self::Prefetch } else { Self::Reregistration }
    }

    /// Whether pages can change while windows are open.
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

/// A request to change the pages of a range.
#[derive(Clone, Copy, Debug)]
pub(super) struct RemapRequest {
    pub region: usize,
    /// Offset in the region.
    pub at: usize,
    /// Offset in the region's memory.
    pub from: usize,
    pub len: usize,
}

/// The registration of a region with the device.
#[derive(Debug)]
pub(super) enum LentRegion {
    Fixed(Registration),
    Remappable(Remappable),
    /// The device did not accept the memory.
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

/// A region whose pages can be changed.
#[derive(Debug)]
pub(super) struct Remappable {
    // Must be dropped before the mapping that it registers.
    registration: Option<Registration>,
    view: Arc<AliasMapping>,
    base: u64,
    device: &'static Device,
    how: RemapMethod,
}

impl Remappable {
    /// Lends a memory at addresses from `base`, at first in its own order.
    ///
    /// # Errors
    /// The error of the device.
    pub fn new(device: &'static Device, memory: Arc<Memory>, base: u64) -> io::Result<Self> {
        let wish = usize::try_from(base).unwrap_or(0);
        let view = Arc::new(AliasMapping::new(memory, wish)?);
        let mut how = RemapMethod::of(&device.caps);
        // Some devices support on-demand paging only if peers and this process use the same
        // addresses.
        let is_same = view.as_ptr().addr() == wish;
        let mut registration = None;
        if how.is_live() && is_same {
            let made =
                Registration::of_view(device, Arc::clone(&view), base, RegistrationUse::WindowsOnDemand);
            let refused = |error: &io::Error| {
                tracing::info!(%error, "the device refuses on-demand paging for this memory");
            };
            registration = made.inspect_err(refused).ok();
        }
        if registration.is_none() {
            how = RemapMethod::Reregistration;
            registration =
                Some(Registration::of_view(device, Arc::clone(&view), base, RegistrationUse::Windows)?);
        }
        let remappable = Self { registration, view, base, device, how };
        tracing::info!(device = device.caps.name, %how, "chose how to remap memory");
        Ok(remappable)
    }

    pub fn how(&self) -> RemapMethod {
        self.how
    }

    /// Checks a request, as far as possible before windows are closed for it.
    pub fn can_remap(&self, order: &RemapRequest) -> io::Result<()> {
        self.view.can_remap(order.at, order.from, order.len)
    }

    /// Changes pages while windows are open. Requires [`RemapMethod::is_live`].
    pub fn remap_live(&mut self, order: &RemapRequest) -> io::Result<()> {
        debug_assert!(self.how.is_live());
        self.view.remap(order.at, order.from, order.len)?;
        if self.how == RemapMethod::Prefetch
            && let Some(registration) = &self.registration
            && let Err(error) = registration.prefetch(self.base + u64_from(order.at), u64_from(order.len))
        {
            // Prefetching only saves time.
            tracing::info!(
                device = self.device.caps.name,
                %error,
                "the device cannot prefetch; pages are fetched when they are touched"
            );
            self.how = RemapMethod::OnDemand;
        }
        Ok(())
    }

    /// Changes pages while no window is open. If the device does not accept the new pages, the
    /// region stays closed.
    pub fn remap_closed(&mut self, order: &RemapRequest) -> io::Result<()> {
        self.view.remap(order.at, order.from, order.len)?;
        // The old registration is dropped first, because it pins its pages.
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
    fn on_demand_paging_is_used_where_the_device_has_it() {
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
