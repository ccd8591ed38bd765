//! The sockets at which users connect. The gateway accepts the connections, because this process
//! must not: see [`aquifer_gateway`].

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_channel::descriptor_shares::{DescriptorCharge, DescriptorShares};
use aquifer_channel::socket::wait_readable;
use aquifer_faults::serve::{ConnectBackName, ConnectBackSocket};
use aquifer_gateway::{Gateway, ListenerKind, UserChannel};
use parking_lot::Mutex;

/// The command of this program that serves as the gateway of an agent, with its standard input.
pub const GATEWAY_COMMAND: &str = "gateway";

/// Time for which the socket of a connect-back request is open. A child connects at once.
const CONNECT_BACK_OPEN_TIME: Duration = Duration::from_secs(30);
/// Maximum number of connect-back requests of a user with open sockets. The next request replaces
/// the oldest.
const CONNECT_BACKS_PER_TENANT_MAX: usize = 128;
/// Descriptors of this process for the socket of a connect-back request. The gateway has its own.
const CONNECT_BACK_DESCRIPTORS: usize = 1;
/// Pause before another gateway is started after one has ended.
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
    /// The agent's own socket and the shared one, with their numbers.
    permanent: Vec<(u64, ListenerKind, OwnedFd)>,
    /// Sockets of connect-back requests, the oldest first.
    connect_backs: VecDeque<OpenConnectBackSocket>,
    last_number: u64,
}

/// An open socket of a connect-back request.
#[derive(Debug)]
struct OpenConnectBackSocket {
    number: u64,
    socket: ConnectBackSocket,
    until: Instant,
    _charge: DescriptorCharge,
}

impl OpenConnectBackSocket {
    fn kind(&self) -> ListenerKind {
        let ConnectBackSocket { tenant, user, connect_back, .. } = self.socket;
        ListenerKind::ConnectBack { secret: connect_back.secret, users: [tenant, user] }
    }
}

impl Listeners {
    /// Starts the gateway. It lives as long as the calling thread. Sockets of connect-back requests
    /// are charged to their users.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(descriptors: Arc<DescriptorShares>) -> io::Result<Self> {
        Ok(Self::with(start_gateway()?, descriptors))
    }

    fn with(gateway: Gateway, descriptors: Arc<DescriptorShares>) -> Self {
        let gateway = Arc::new(gateway);
        let state = State { gateway, permanent: Vec::new(), connect_backs: VecDeque::new(), last_number: 0 };
        Self { state: Mutex::new(state), descriptors }
    }

    /// Accepts connections at a socket as long as the agent runs.
    pub fn add(&self, kind: ListenerKind, socket: OwnedFd) {
        let mut state = self.state.lock();
        let number = state.next_number();
        // If the gateway has ended, the next gateway gets all listeners.
        let _ended = state.gateway.listen(number, kind, &socket);
        state.permanent.push((number, kind, socket));
    }

    /// Accepts connections at the socket of a connect-back request.
    pub fn add_connect_back(&self, socket: ConnectBackSocket) {
        let mut state = self.state.lock();
        let mut of_tenant: Vec<ConnectBackName> = Vec::new();
        for other in state.connect_backs.iter().filter(|other| other.socket.tenant == socket.tenant) {
            if !of_tenant.contains(&other.socket.connect_back) {
                of_tenant.push(other.socket.connect_back);
            }
        }
        if of_tenant.len() >= CONNECT_BACKS_PER_TENANT_MAX && !of_tenant.contains(&socket.connect_back) {
            state.close_connect_backs(|other| other.socket.connect_back == of_tenant[0]);
        }
        // Without a socket the child repeats the request until it has none left, and ends.
        let charge = match self.descriptors.charge_reserved(socket.tenant, CONNECT_BACK_DESCRIPTORS) {
            Ok(charge) => charge,
            Err(error) => return tracing::warn!(%error, "not listening for a forked child"),
        };
        let until = Instant::now() + CONNECT_BACK_OPEN_TIME;
        let open = OpenConnectBackSocket { number: state.next_number(), socket, until, _charge: charge };
        let _ended = state.gateway.listen(open.number, open.kind(), &open.socket.listener);
        state.connect_backs.push_back(open);
    }

    /// Closes the sockets of a connect-back request.
    pub fn end_connect_back(&self, name: &ConnectBackName) {
        self.state.lock().close_connect_backs(|open| open.socket.connect_back == *name);
    }

    /// Waits for another user for at most `timeout`. Replaces a gateway that has ended.
    ///
    /// # Errors
    /// If another gateway cannot be started.
    pub fn next_user(&self, timeout: Duration) -> io::Result<Option<UserChannel>> {
        let now = Instant::now();
        self.state.lock().close_connect_backs(|open| now >= open.until);
        let gateway = Arc::clone(&self.state.lock().gateway);
        if !wait_readable(&[gateway.poll_fd()], timeout).unwrap_or(false) {
            return Ok(None);
        }
        gateway.next_user().map(Some).or_else(|error| {
            tracing::error!(%error, "the gateway has ended; starting another one");
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
        for open in &state.connect_backs {
            gateway.listen(open.number, open.kind(), &open.socket.listener)?;
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

    fn close_connect_backs(&mut self, is_closed: impl Fn(&OpenConnectBackSocket) -> bool) {
        let Self { gateway, connect_backs, .. } = self;
        // The gateway empties the queue of the socket. If it has ended, the next one will.
        connect_backs.retain(|open| !is_closed(open) || gateway.close(open.number).is_err());
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
        // `cat` reads the orders, and accepts no connection.
        let mut command = Command::new("cat");
        let shares = DescriptorShares::new(10_000);
        let listeners = Listeners::with(Gateway::start(command.stdout(Stdio::null())).unwrap(), shares);
        let tenants =
            || listeners.state.lock().connect_backs.iter().map(|open| open.socket.tenant).collect::<Vec<_>>();
        let name =
            |number: usize| ConnectBackName { name: [u8::try_from(number).unwrap(); 16], secret: [0; 16] };
        let add = |tenant: u32, number| {
            let listener = File::open("/dev/null").unwrap().into();
            let socket = ConnectBackSocket { tenant, user: tenant, connect_back: name(number), listener };
            listeners.add_connect_back(socket);
        };
        add(1, 255);
        for number in 0..CONNECT_BACKS_PER_TENANT_MAX + 5 {
            // Two sockets of one request, in two namespaces.
            add(2, number);
            add(2, number);
        }
        assert_eq!(tenants()[..2], [1, 2]);
        assert_eq!(tenants().len(), 1 + 2 * CONNECT_BACKS_PER_TENANT_MAX);
        let second = listeners.state.lock().connect_backs[1].socket.connect_back;
        assert_eq!(second, name(5), "the oldest requests are replaced");
        listeners.state.lock().connect_backs[0].until = Instant::now();
        assert!(listeners.next_user(Duration::ZERO).unwrap().is_none());
        assert_eq!(tenants().len(), 2 * CONNECT_BACKS_PER_TENANT_MAX);
        assert!(tenants().iter().all(|tenant| *tenant == 2));
        listeners.end_connect_back(&name(5));
        assert_eq!(tenants().len(), 2 * (CONNECT_BACKS_PER_TENANT_MAX - 1));
    }
}
