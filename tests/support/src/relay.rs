//! A relay in user space, for what a network does: it forwards TCP connections, and can delay, stop and cut them.
//!
//! It listens in the network namespace of the thread that starts it, and connects from there.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Pieces that one direction of a connection holds back at a time; more wait in the sender's socket.
const PIECES_MAX: usize = 64;
const PIECE_BYTES: usize = 64 << 10;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mode {
    /// Everything passes.
    Open,
    /// Nothing passes, and nobody is told: what came is held back.
    Stopped,
    /// No connection lives.
    Cut,
}

#[derive(Debug)]
struct State {
    mode: Mode,
    /// The relay was dropped.
    is_over: bool,
    next: u64,
    open: HashMap<u64, [TcpStream; 2]>,
}

#[derive(Debug)]
struct Shared {
    delay: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

/// A running relay. Dropping it cuts all that goes through it, for good.
#[derive(Debug)]
pub struct Relay {
    shared: Arc<Shared>,
    address: SocketAddr,
}

impl Relay {
    /// Listen at `at` (port 0: any) and forward to `to`, everything `delay` later, each way.
    ///
    /// # Errors
    /// The system's.
    pub fn start(at: SocketAddr, to: SocketAddr, delay: Duration) -> io::Result<Self> {
        let listener = TcpListener::bind(at)?;
        let address = listener.local_addr()?;
        let state = State { mode: Mode::Open, is_over: false, next: 0, open: HashMap::new() };
        let shared = Arc::new(Shared { delay, state: Mutex::new(state), changed: Condvar::new() });
        let for_thread = Arc::clone(&shared);
        let accept = move || {
            while let Ok((from, _)) = listener.accept() {
                if for_thread.lock().is_over {
                    return;
                }
                // Whom it cannot connect it lets go: they see a connection that closes.
                let _refused = for_thread.admit(from, to);
            }
        };
        std::thread::Builder::new().name("relay".to_owned()).spawn(accept)?;
        Ok(Self { shared, address })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Nothing passes from now on, and nobody is told.
    pub fn stop(&self) {
        self.shared.set(Mode::Stopped);
    }

    /// All connections are closed, and new ones too, as soon as they come.
    pub fn cut(&self) {
        self.shared.set(Mode::Cut);
    }

    /// Everything passes again, and what was held back comes first.
    pub fn resume(&self) {
        self.shared.set(Mode::Open);
    }

    /// Connections that go through it.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared.lock().open.len()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.cut();
        self.shared.lock().is_over = true;
        // Whoever accepts looks up, and ends.
        let _gone = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    fn set(&self, mode: Mode) {
        let mut state = self.lock();
        state.mode = mode;
        if mode == Mode::Cut {
            state.open.drain().for_each(|(_, pair)| shut(&pair));
        }
        self.changed.notify_all();
    }

    fn admit(self: &Arc<Self>, from: TcpStream, to: SocketAddr) -> io::Result<()> {
        if self.lock().mode == Mode::Cut {
            return Ok(());
        }
        let onward = TcpStream::connect(to)?;
        from.set_nodelay(true)?;
        onward.set_nodelay(true)?;
        let pair = [from.try_clone()?, onward.try_clone()?];
        let mut state = self.lock();
        if state.mode == Mode::Cut {
            shut(&pair);
            return Ok(());
        }
        let id = state.next;
        state.next += 1;
        state.open.insert(id, pair);
        drop(state);
        self.forward(id, from.try_clone()?, onward.try_clone()?)?;
        self.forward(id, onward, from)
    }

    /// One direction, by two threads: one takes in, one gives out when it is time.
    fn forward(self: &Arc<Self>, id: u64, source: TcpStream, sink: TcpStream) -> io::Result<()> {
        let (sender, receiver) = sync_channel(PIECES_MAX);
        let (for_source, for_sink) = (Arc::clone(self), Arc::clone(self));
        let named = |name: &str| std::thread::Builder::new().name(name.to_owned());
        named("relay-in").spawn(move || take_in(&for_source, source, &sender))?;
        named("relay-out").spawn(move || for_sink.give_out(id, sink, &receiver)).map(drop)
    }

    fn give_out(&self, id: u64, mut sink: TcpStream, pieces: &Receiver<(Instant, Vec<u8>)>) {
        while let Ok((due, piece)) = pieces.recv() {
            if !self.wait(due) || sink.write_all(&piece).is_err() {
                break;
            }
        }
        // An end is as late as all else.
        let ended = Instant::now() + self.delay;
        self.wait(ended);
        if let Some(pair) = self.lock().open.remove(&id) {
            shut(&pair);
        }
    }

    /// Wait until it is time, and the way is open; `false` if it is cut.
    fn wait(&self, due: Instant) -> bool {
        let mut state = self.lock();
        loop {
            let left = due.saturating_duration_since(Instant::now());
            match state.mode {
                Mode::Cut => return false,
                Mode::Open if left.is_zero() => return true,
                Mode::Open => state = self.changed.wait_timeout(state, left).expect("no holder panics").0,
                Mode::Stopped => state = self.changed.wait(state).expect("no holder panics"),
            }
        }
    }
}

fn take_in(shared: &Shared, mut source: TcpStream, pieces: &SyncSender<(Instant, Vec<u8>)>) {
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
