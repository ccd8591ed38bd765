//! Sockets at which forked children connect that cannot reach the agent's own: each for some time.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aquifer_faults::serve::{KnockName, KnockSocket};
use rustix::event::{EventfdFlags, eventfd};

/// Time for which a socket is open. A child connects at once.
const OPEN_TIME: Duration = Duration::from_secs(30);
/// Most knocks of a user whose sockets are open at once. The next one replaces the oldest.
const PER_TENANT_MAX: usize = 128;

/// The sockets that are open.
#[derive(Debug)]
pub(crate) struct KnockSockets {
    /// The oldest is the first.
    open: Mutex<VecDeque<OpenSocket>>,
    /// Readable when a socket was opened.
    news: OwnedFd,
}

#[derive(Debug)]
struct OpenSocket {
    socket: Arc<KnockSocket>,
    until: Instant,
}

impl KnockSockets {
    /// No sockets.
    pub fn new() -> std::io::Result<Self> {
        let news = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { open: Mutex::default(), news })
    }

    /// Adds a socket.
    pub fn add(&self, socket: KnockSocket) {
        let mut open = self.lock();
        let is_of_tenant = |other: &OpenSocket| other.socket.tenant == socket.tenant;
        let mut knocks: Vec<KnockName> = Vec::new();
        for other in open.iter().filter(|other| is_of_tenant(other)).map(|other| other.socket.knock) {
            if !knocks.contains(&other) {
                knocks.push(other);
            }
        }
        if knocks.len() >= PER_TENANT_MAX && !knocks.contains(&socket.knock) {
            open.retain(|other| other.socket.knock != knocks[0]);
        }
        let until = Instant::now() + OPEN_TIME;
        open.push_back(OpenSocket { socket: Arc::new(socket), until });
        drop(open);
        // It is readable already if this fails.
        let _ = rustix::io::write(&self.news, &1u64.to_ne_bytes());
    }

    /// Closes the sockets of a knock.
    pub fn end(&self, knock: &KnockName) {
        self.lock().retain(|open| open.socket.knock != *knock);
    }

    /// The sockets that are open.
    pub fn list(&self) -> Vec<Arc<KnockSocket>> {
        let _none = rustix::io::read(&self.news, &mut [0; 8]);
        let now = Instant::now();
        let mut open = self.lock();
        open.retain(|socket| now < socket.until);
        open.iter().map(|open| Arc::clone(&open.socket)).collect()
    }

    /// Readable when a socket was added since [`Self::list`].
    pub fn news(&self) -> &OwnedFd {
        &self.news
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<OpenSocket>> {
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
        let tenants = || sockets.lock().iter().map(|open| open.socket.tenant).collect::<Vec<_>>();
        let knock = |number: usize| KnockName { name: [u8::try_from(number).unwrap(); 16], secret: [0; 16] };
        let add = |tenant: u32, number| {
            let listener = File::open("/dev/null").unwrap().into();
            sockets.add(KnockSocket { tenant, user: tenant, knock: knock(number), listener });
        };
        add(1, 255);
        for number in 0..PER_TENANT_MAX + 5 {
            // In two namespaces.
            add(2, number);
            add(2, number);
        }
        assert_eq!(tenants()[..2], [1, 2]);
        assert_eq!(sockets.list().len(), 1 + 2 * PER_TENANT_MAX);
        assert_eq!(sockets.list()[1].knock, knock(5), "the oldest knocks are replaced");
        sockets.lock()[0].until = Instant::now();
        assert_eq!(sockets.list().len(), 2 * PER_TENANT_MAX);
        assert!(tenants().iter().all(|tenant| *tenant == 2));
        sockets.end(&knock(5));
        assert_eq!(sockets.list().len(), 2 * (PER_TENANT_MAX - 1));
    }
}
