//! A relay that forwards TCP connections, and can delay, stop and cut them as a network does, all
//! or those of one process.
//!
//! The relay listens in the network namespace of the thread that starts it, and connects from
//! there.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::socket_owner::has_socket;

/// Most pieces that one direction of a connection queues; more wait in the socket of the sender.
const PIECES_MAX: usize = 64;
const PIECE_BYTES: usize = 64 << 10;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RelayMode {
    /// Bytes are forwarded.
    Open,
    /// Bytes are queued and not forwarded.
    Stopped,
    /// All connections are closed.
    Cut,
}

#[derive(Debug)]
struct RelayState {
    mode: RelayMode,
    /// The process whose bytes are not forwarded, as if it were cut off from the network.
    cut_off: Option<u32>,
    /// The relay was dropped.
    is_dropped: bool,
    next: u64,
    open: HashMap<u64, Connection>,
}

#[derive(Debug)]
struct Connection {
    pair: [TcpStream; 2],
    /// The address of the process that has opened it.
    from: SocketAddr,
    /// Whether the process that has opened the connection is cut off.
    is_cut_off: bool,
}

#[derive(Debug)]
struct RelayShared {
    delay: Duration,
    state: Mutex<RelayState>,
    changed: Condvar,
}

/// A running relay. Dropping it closes all its connections.
#[derive(Debug)]
pub struct TcpRelay {
    shared: Arc<RelayShared>,
    address: SocketAddr,
}

impl TcpRelay {
    /// Listens at `at` and forwards connections to `to`. Delays bytes by `delay` in each direction.
    ///
    /// With port 0 the system chooses a port.
    ///
    /// # Errors
    /// An error of the system.
    pub fn start(at: SocketAddr, to: SocketAddr, delay: Duration) -> io::Result<Self> {
        let listener = TcpListener::bind(at)?;
        let address = listener.local_addr()?;
        let state = RelayState {
            mode: RelayMode::Open,
            cut_off: None,
            is_dropped: false,
            next: 0,
            open: HashMap::new(),
        };
        let shared = Arc::new(RelayShared { delay, state: Mutex::new(state), changed: Condvar::new() });
        let for_thread = Arc::clone(&shared);
        let accept = move || {
            while let Ok((from, _)) = listener.accept() {
                if for_thread.lock().is_dropped {
                    return;
                }
                // If this fails, the client sees that its connection is closed.
                let _refused = for_thread.admit(from, to);
            }
        };
        std::thread::Builder::new().name("relay".to_owned()).spawn(accept)?;
        Ok(Self { shared, address })
    }

    /// The address of the relay.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops forwarding, without closing connections.
    pub fn stop(&self) {
        self.shared.set(RelayMode::Stopped);
    }

    /// Closes all connections, and new ones when they are accepted.
    pub fn cut(&self) {
        self.shared.set(RelayMode::Cut);
    }

    /// Resumes forwarding, first of the queued bytes.
    pub fn resume(&self) {
        self.shared.set(RelayMode::Open);
    }

    /// Stops forwarding for the connections of one process, those that it opens later too, or with
    /// `None` for no process. Connections are not closed.
    pub fn cut_off(&self, pid: Option<u32>) {
        let open: Vec<(u64, SocketAddr)> = {
            let mut state = self.shared.lock();
            state.cut_off = pid;
            state.open.iter().map(|(id, connection)| (*id, connection.from)).collect()
        };
        // Without the lock, which all connections need.
        for (id, from) in open {
            self.shared.apply_cut_off(id, from);
        }
        self.shared.changed.notify_all();
    }

    /// The number of forwarded connections.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared.lock().open.len()
    }
}

impl Drop for TcpRelay {
    fn drop(&mut self) {
        self.cut();
        self.shared.lock().is_dropped = true;
        // Wakes the thread that accepts, which then ends.
        let _gone = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
    }
}

impl RelayShared {
    fn lock(&self) -> MutexGuard<'_, RelayState> {
        self.state.lock().expect("no thread panics while it holds the lock")
    }

    fn set(&self, mode: RelayMode) {
        let mut state = self.lock();
        state.mode = mode;
        if mode == RelayMode::Cut {
            state.open.drain().for_each(|(_, connection)| shut(&connection.pair));
        }
        self.changed.notify_all();
    }

    fn admit(self: &Arc<Self>, from: TcpStream, to: SocketAddr) -> io::Result<()> {
        if self.lock().mode == RelayMode::Cut {
            return Ok(());
        }
        let onward = TcpStream::connect(to)?;
        from.set_nodelay(true)?;
        onward.set_nodelay(true)?;
        let pair = [from.try_clone()?, onward.try_clone()?];
        let mut state = self.lock();
        if state.mode == RelayMode::Cut {
            shut(&pair);
            return Ok(());
        }
        let id = state.next;
        state.next += 1;
        let address = from.peer_addr()?;
        state.open.insert(id, Connection { pair, from: address, is_cut_off: false });
        drop(state);
        self.apply_cut_off(id, address);
        self.forward(id, from.try_clone()?, onward.try_clone()?)?;
        self.forward(id, onward, from)
    }

    /// Finds out whether a connection is of the process that is cut off. The search takes time, and
    /// only a test that cuts a process off pays for it.
    fn apply_cut_off(&self, id: u64, from: SocketAddr) {
        let cut_off = self.lock().cut_off;
        let is_cut_off = cut_off.is_some_and(|pid| has_socket(pid, from));
        let mut state = self.lock();
        // Otherwise the thread that has changed it does this.
        if state.cut_off == cut_off
            && let Some(connection) = state.open.get_mut(&id)
        {
            connection.is_cut_off = is_cut_off;
        }
    }

    /// Forwards one direction by two threads: one receives, and one sends after the delay.
    fn forward(self: &Arc<Self>, id: u64, source: TcpStream, sink: TcpStream) -> io::Result<()> {
        let (sender, receiver) = sync_channel(PIECES_MAX);
        let (for_source, for_sink) = (Arc::clone(self), Arc::clone(self));
        let named = |name: &str| std::thread::Builder::new().name(name.to_owned());
        named("relay-receive").spawn(move || receive(&for_source, source, &sender))?;
        named("relay-send").spawn(move || for_sink.send(id, sink, &receiver)).map(drop)
    }

    fn send(&self, id: u64, mut sink: TcpStream, pieces: &Receiver<(Instant, Vec<u8>)>) {
        while let Ok((due, piece)) = pieces.recv() {
            if !self.wait(due, id) || sink.write_all(&piece).is_err() {
                break;
            }
        }
        // The end of a connection is delayed like its bytes.
        let ended = Instant::now() + self.delay;
        self.wait(ended, id);
        if let Some(connection) = self.lock().open.remove(&id) {
            shut(&connection.pair);
        }
    }

    /// Waits until `due` and until the relay forwards for a connection. Returns false if
    /// connections are cut.
    fn wait(&self, due: Instant, id: u64) -> bool {
        let mut state = self.lock();
        loop {
            let left = due.saturating_duration_since(Instant::now());
            let is_cut_off = state.open.get(&id).is_some_and(|connection| connection.is_cut_off);
            match state.mode {
                RelayMode::Cut => return false,
                RelayMode::Open if !is_cut_off && left.is_zero() => return true,
                RelayMode::Open if !is_cut_off => {
                    state = self
                        .changed
                        .wait_timeout(state, left)
                        .expect("no thread panics while it holds the lock")
                        .0
                }
                RelayMode::Open | RelayMode::Stopped => {
                    state = self.changed.wait(state).expect("no thread panics while it holds the lock")
                }
            }
        }
    }
}

fn receive(shared: &RelayShared, mut source: TcpStream, pieces: &SyncSender<(Instant, Vec<u8>)>) {
    let mut buffer = vec![0; PIECE_BYTES];
    while let Ok(count @ 1..) = source.read(&mut buffer) {
        if pieces.send((Instant::now() + shared.delay, buffer[..count].to_vec())).is_err() {
            return;
        }
    }
}

fn shut(pair: &[TcpStream; 2]) {
    for stream in pair {
        let _gone = stream.shutdown(Shutdown::Both);
    }
}
