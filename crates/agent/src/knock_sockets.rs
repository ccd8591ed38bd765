//! Sockets at which forked children connect that cannot reach the agent's own: each for some time.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

/// Time for which a socket is open. A child connects at once.
const OPEN_TIME: Duration = Duration::from_secs(30);
/// Most sockets of a user that are open at once. The next one replaces the oldest.
const PER_TENANT_MAX: usize = 64;

/// The sockets that are open.
#[derive(Debug)]
pub(crate) struct KnockSockets {
    /// The oldest is the first.
    open: Mutex<VecDeque<KnockSocket>>,
    /// Readable when a socket was opened.
    news: OwnedFd,
}

#[derive(Debug)]
struct KnockSocket {
    tenant: u32,
    listener: Arc<OwnedFd>,
    until: Instant,
}

impl KnockSockets {
    /// No sockets.
    pub fn new() -> std::io::Result<Self> {
        let news = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { open: Mutex::default(), news })
    }

    /// Adds a socket for the programs of a user.
    pub fn add(&self, tenant: u32, listener: OwnedFd) {
        let mut open = self.lock();
        if open.iter().filter(|socket| socket.tenant == tenant).count() == PER_TENANT_MAX
            && let Some(oldest) = open.iter().position(|socket| socket.tenant == tenant)
        {
            open.remove(oldest);
        }
        let until = Instant::now() + OPEN_TIME;
        open.push_back(KnockSocket { tenant, listener: Arc::new(listener), until });
        drop(open);
        // It is readable already if this fails.
        let _ = rustix::io::write(&self.news, &1u64.to_ne_bytes());
    }

    /// The sockets that are open.
    pub fn list(&self) -> Vec<Arc<OwnedFd>> {
        let _none = rustix::io::read(&self.news, &mut [0; 8]);
        let now = Instant::now();
        let mut open = self.lock();
        open.retain(|socket| now < socket.until);
        open.iter().map(|socket| Arc::clone(&socket.listener)).collect()
    }

    /// Readable when a socket was added since [`Self::list`].
    pub fn news(&self) -> &OwnedFd {
        &self.news
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<KnockSocket>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_user_replaces_only_its_own_sockets() {
        let sockets = KnockSockets::new().unwrap();
        let tenants = || sockets.lock().iter().map(|socket| socket.tenant).collect::<Vec<_>>();
        let add = |tenant| sockets.add(tenant, File::open("/dev/null").unwrap().into());
        add(1);
        (0..PER_TENANT_MAX + 5).for_each(|_| add(2));
        assert_eq!(tenants()[..2], [1, 2]);
        assert_eq!(sockets.list().len(), 1 + PER_TENANT_MAX);
        sockets.lock()[0].until = Instant::now();
        assert_eq!(sockets.list().len(), PER_TENANT_MAX);
        assert!(tenants().iter().all(|tenant| *tenant == 2));
    }
}
