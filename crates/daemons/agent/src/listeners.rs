//! The sockets at which users connect. The gateway accepts connections there: this process must
//! not, see [`aquifer_gateway`].

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_channel::descriptor_shares::{DescriptorCharge, DescriptorShares};
use aquifer_channel::socket::wait_readable;
use aquifer_faults::serve::{KnockName, KnockSocket};
use aquifer_gateway::{Gateway, ListenerKind, UserChannel};
use parking_lot::Mutex;

/// The command of this program that serves as the gateway of an agent, with its standard input.
pub const GATEWAY_COMMAND: &str = "gateway";

/// Time for which a socket of a knock is open. A child connects at once.
const KNOCK_OPEN_TIME: Duration = Duration::from_secs(30);
/// Most knocks of a user whose sockets are open at once. The next one replaces the oldest.
const KNOCKS_PER_TENANT_MAX: usize = 128;
/// Descriptors of such a socket. The gateway has one of its own.
const KNOCK_DESCRIPTORS: usize = 1;
/// Pause before a gateway that has ended is replaced.
const RESTART_PAUSE: Duration = Duration::from_millis(100);

/// The sockets, and the gateway that serves them.
#[derive(Debug)]
pub(crate) struct Listeners {
    state: Mutex<State>,
    descriptors: Arc<DescriptorShares>,
}

#[derive(Debug)]
struct State {
    gateway: Arc<Gateway>,
    /// The agent's own and the shared one, with their numbers.
    permanent: Vec<(u64, ListenerKind, OwnedFd)>,
    /// The oldest is the first.
    knocks: VecDeque<OpenKnock>,
    last_number: u64,
}

/// A socket of a knock.
#[derive(Debug)]
struct OpenKnock {
    number: u64,
    socket: KnockSocket,
    until: Instant,
    _charge: DescriptorCharge,
}

impl OpenKnock {
    fn kind(&self) -> ListenerKind {
        let KnockSocket { tenant, user, knock, .. } = self.socket;
        ListenerKind::Knock { secret: knock.secret, users: [tenant, user] }
    }
}

impl Listeners {
    /// Starts the gateway. It lives as long as the calling thread. Sockets of knocks are charged to
    /// their users.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(descriptors: Arc<DescriptorShares>) -> io::Result<Self> {
        Ok(Self::with(start_gateway()?, descriptors))
    }

    fn with(gateway: Gateway, descriptors: Arc<DescriptorShares>) -> Self {
        let gateway = Arc::new(gateway);
        let state = State { gateway, permanent: Vec::new(), knocks: VecDeque::new(), last_number: 0 };
        Self { state: Mutex::new(state), descriptors }
    }

    /// Accepts connections at a socket as long as the agent runs.
    pub fn add(&self, kind: ListenerKind, socket: OwnedFd) {
        let mut state = self.state.lock();
        let number = state.next_number();
        // If the gateway has ended, the next one gets all of them.
        let _ended = state.gateway.listen(number, kind, &socket);
        state.permanent.push((number, kind, socket));
    }

    /// Accepts connections at a socket of a knock.
    pub fn add_knock(&self, socket: KnockSocket) {
        let mut state = self.state.lock();
        let mut of_tenant: Vec<KnockName> = Vec::new();
        for other in state.knocks.iter().filter(|other| other.socket.tenant == socket.tenant) {
            if !of_tenant.contains(&other.socket.knock) {
                of_tenant.push(other.socket.knock);
            }
        }
        if of_tenant.len() >= KNOCKS_PER_TENANT_MAX && !of_tenant.contains(&socket.knock) {
            state.close_knocks(|other| other.socket.knock == of_tenant[0]);
        }
        // Without the socket the child knocks once more, and ends.
        let charge = match self.descriptors.charge_reserved(socket.tenant, KNOCK_DESCRIPTORS) {
            Ok(charge) => charge,
            Err(error) => return tracing::warn!(%error, "not listening for a forked child"),
        };
        let until = Instant::now() + KNOCK_OPEN_TIME;
        let knock = OpenKnock { number: state.next_number(), socket, until, _charge: charge };
        let _ended = state.gateway.listen(knock.number, knock.kind(), &knock.socket.listener);
        state.knocks.push_back(knock);
    }

    /// Closes the sockets of a knock.
    pub fn end_knock(&self, knock: &KnockName) {
        self.state.lock().close_knocks(|open| open.socket.knock == *knock);
    }

    /// Waits for another user for at most `timeout`. Replaces a gateway that has ended.
    ///
    /// # Errors
    /// If another gateway cannot be started.
    pub fn next_user(&self, timeout: Duration) -> io::Result<Option<UserChannel>> {
        let now = Instant::now();
        self.state.lock().close_knocks(|open| now >= open.until);
        let gateway = Arc::clone(&self.state.lock().gateway);
        if !wait_readable(&[gateway.news()], timeout).unwrap_or(false) {
            return Ok(None);
        }
        gateway.next_user().map(Some).or_else(|error| {
            tracing::error!(%error, "the gateway has ended; starting another");
            std::thread::sleep(RESTART_PAUSE);
            self.restart_gateway().map(|()| None)
        })
    }

    fn restart_gateway(&self) -> io::Result<()> {
        let gateway = start_gateway()?;
        let mut state = self.state.lock();
        for (number, kind, socket) in &state.permanent {
            gateway.listen(*number, *kind, socket)?;
        }
        for knock in &state.knocks {
            gateway.listen(knock.number, knock.kind(), &knock.socket.listener)?;
        }
        state.gateway = Arc::new(gateway);
        Ok(())
    }
}

impl State {
    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    fn close_knocks(&mut self, is_closed: impl Fn(&OpenKnock) -> bool) {
        let Self { gateway, knocks, .. } = self;
        // The gateway empties the queue of the socket. If it has ended, the next one will.
        knocks.retain(|open| !is_closed(open) || gateway.close(open.number).is_err());
    }
}

/// Starts this program as the gateway of this process.
fn start_gateway() -> io::Result<Gateway> {
    // The file may have been replaced or removed after this process had started.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("aquifer").arg(GATEWAY_COMMAND).stdout(Stdio::null());
    Gateway::start(&mut command)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_user_replaces_only_its_own_sockets() {
        // It takes the orders, and accepts nothing.
        let mut command = Command::new("cat");
        let shares = DescriptorShares::new(10_000);
        let listeners = Listeners::with(Gateway::start(command.stdout(Stdio::null())).unwrap(), shares);
        let tenants =
            || listeners.state.lock().knocks.iter().map(|open| open.socket.tenant).collect::<Vec<_>>();
        let knock = |number: usize| KnockName { name: [u8::try_from(number).unwrap(); 16], secret: [0; 16] };
        let add = |tenant: u32, number| {
            let listener = File::open("/dev/null").unwrap().into();
            listeners.add_knock(KnockSocket { tenant, user: tenant, knock: knock(number), listener });
        };
        add(1, 255);
        for number in 0..KNOCKS_PER_TENANT_MAX + 5 {
            // In two namespaces.
            add(2, number);
            add(2, number);
        }
        assert_eq!(tenants()[..2], [1, 2]);
        assert_eq!(tenants().len(), 1 + 2 * KNOCKS_PER_TENANT_MAX);
        assert_eq!(listeners.state.lock().knocks[1].socket.knock, knock(5), "the oldest knocks are replaced");
        listeners.state.lock().knocks[0].until = Instant::now();
        assert!(listeners.next_user(Duration::ZERO).unwrap().is_none());
        assert_eq!(tenants().len(), 2 * KNOCKS_PER_TENANT_MAX);
        assert!(tenants().iter().all(|tenant| *tenant == 2));
        listeners.end_knock(&knock(5));
        assert_eq!(tenants().len(), 2 * (KNOCKS_PER_TENANT_MAX - 1));
    }
}
