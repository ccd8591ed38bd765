//! The load: one thread that keeps a batch of requests in flight on each of its connections.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::interrupt;
use hdrhistogram::Histogram;
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use super::connection::{Connection, Counts, Operation};
use super::items::Items;
use super::servers::Server;

/// Time within which a server must reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
const NO_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
/// Longest sleep of a load that sleeps.
const SLEEP_MAX: Duration = Duration::from_millis(100);
/// Upper bound of recorded latencies of batches; longer ones are recorded as this one.
const LATENCY_NS_MAX: u64 = 10_000_000_000;
const EVENTS_MAX: usize = 64;

/// Depth and rate of requests.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Requests of a batch. A connection sends the next batch when it has received all replies.
    pub depth: usize,
    /// Whether the next batch sets the keys that gets did not find.
    pub sets_missed: bool,
    /// Time of a simulated database: from the reply without an item to the batch that sets the key.
    pub database: Duration,
    /// Operations a second, without sets of missed keys; `None` for no limit.
    pub operations_per_s: Option<u32>,
    /// Whether the load sleeps while there are no replies. The server then spends time on waking
    /// the load; but a load that polls leaves no time of its processor to other threads.
    pub sleeps: bool,
}

impl Pace {
    /// Batches of `depth` requests, one after the other, by a load that polls.
    pub const fn of_depth(depth: usize) -> Self {
        Self { depth, sets_missed: false, database: Duration::ZERO, operations_per_s: None, sleeps: false }
    }
}

/// Results of a played load.
#[derive(Clone, Debug)]
pub struct Played {
    pub counts: Counts,
    /// Time from the first request of a batch to its last reply, in ns.
    pub latency_ns: Histogram<u64>,
    pub elapsed: Duration,
}

/// A batch that has all of its replies.
#[derive(Clone, Copy, Debug)]
pub struct Answered {
    /// Number of the connection.
    pub connection: usize,
    /// When the batch was sent.
    pub sent: Instant,
    /// When the last reply was received.
    pub ended: Instant,
    /// Counts of the replies.
    pub counts: Counts,
}

/// State of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// The connection has no batch.
    Idle,
    /// The batch was sent at this time.
    InFlight(Instant),
    /// The connection waits for the database until this time.
    Waiting(Instant),
    /// There are no more operations.
    Done,
}

/// Connections to one server, or to the servers of one cache, and the expected items.
#[derive(Debug)]
pub struct Load {
    server: &'static str,
    epoll: OwnedFd,
    connections: Vec<Connection>,
    items: Items,
    /// Start of the clock for the expiry of items.
    began: Instant,
}

/// One call of [`Load::play`].
struct Play<'a> {
    pace: Pace,
    operations: &'a mut dyn Iterator<Item = Operation>,
    /// Number of operations that were started.
    begun: u64,
    began: Instant,
    /// Time after which no operation starts.
    end: Option<Instant>,
    phases: Vec<Phase>,
    counts: Counts,
    on_answer: &'a mut dyn FnMut(Answered),
}

impl Load {
    /// Connects to a server without items.
    ///
    /// # Errors
    /// If the server accepts no connections.
    pub fn connect(server: &Server, connections: u32, items: Items) -> Result<Self, BenchError> {
        Self::connect_all(std::slice::from_ref(server), connections, items)
    }

    /// Connects to the servers of one cache, at least one: connection n to server n modulo their
    /// number.
    ///
    /// # Errors
    /// If a server accepts no connections.
    pub fn connect_all(servers: &[Server], connections: u32, items: Items) -> Result<Self, BenchError> {
        let name = servers[0].name;
        let failed = |error: std::io::Error| BenchError::Server {
            program: name.into(),
            reason: format!("cannot connect: {error}"),
        };
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| failed(error.into()))?;
        let connect = |(number, server): (u64, &Server)| {
            let stream = server.connect()?;
            stream.set_nonblocking(true)?;
            epoll::add(&epoll, &stream, epoll::EventData::new_u64(number), epoll::EventFlags::IN)?;
            Ok(Connection::over(stream))
        };
        let numbered = (0..u64::from(connections)).zip(servers.iter().cycle());
        let connections = numbered.map(connect).collect::<Result<_, _>>().map_err(failed)?;
        Ok(Self { server: name, epoll, connections, items, began: Instant::now() })
    }

    /// The number of keys.
    pub fn keys(&self) -> u32 {
        self.items.keys()
    }

    /// Closes the connections. Returns the items, for other connections to the same cache.
    pub fn into_items(self) -> Items {
        self.items
    }

    /// Sets keys by their numbers.
    ///
    /// # Errors
    /// Those of [`Self::play`], or if the server refuses a set.
    pub fn set_all(&mut self, keys: impl Iterator<Item = u32>) -> Result<(), BenchError> {
        match self.play(Pace::of_depth(32), None, &mut keys.map(Operation::Set))?.counts.refused {
            0 => Ok(()),
            refused => Err(self.failed(format!("{refused} sets were refused"))),
        }
    }

    /// Plays all operations, or as many as a time limit allows, and waits for all replies.
    ///
    /// # Errors
    /// If the server does not reply, a reply is wrong, or a signal asks to stop.
    pub fn play(
        &mut self,
        pace: Pace,
        time: Option<Duration>,
        operations: &mut dyn Iterator<Item = Operation>,
    ) -> Result<Played, BenchError> {
        let latency_ns = Histogram::<u64>::new_with_max(LATENCY_NS_MAX, 3);
        let mut latency_ns = latency_ns.map_err(|error| self.failed(error.to_string()))?;
        let mut record = |Answered { sent, ended, .. }: Answered| {
            let latency = ended.saturating_duration_since(sent);
            latency_ns.saturating_record(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX));
        };
        let (counts, elapsed) = self.play_observed(pace, time, operations, &mut record)?;
        Ok(Played { counts, latency_ns, elapsed })
    }

    /// Like [`Self::play`], but calls `on_answer` for each batch. Returns the replies by their
    /// kind, and the time.
    ///
    /// # Errors
    /// Those of [`Self::play`].
    pub fn play_observed(
        &mut self,
        pace: Pace,
        time: Option<Duration>,
        operations: &mut dyn Iterator<Item = Operation>,
        on_answer: &mut dyn FnMut(Answered),
    ) -> Result<(Counts, Duration), BenchError> {
        let began = Instant::now();
        let mut play = Play {
            pace,
            operations,
            begun: 0,
            began,
            end: time.map(|time| began + time),
            phases: vec![Phase::Idle; self.connections.len()],
            counts: Counts::default(),
            on_answer,
        };
        (0..self.connections.len()).try_for_each(|at| self.start(at, &mut play))?;
        let mut events = Vec::with_capacity(EVENTS_MAX);
        let mut last_reply = began;
        while play.phases.iter().any(|phase| *phase != Phase::Done) {
            events.clear();
            let timeout = play.timeout();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&timeout)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(self.failed(error.to_string())),
            }
            for event in &events {
                let at = usize::try_from(event.data.u64()).expect("the number of a connection");
                self.progress(at, event.flags, &mut play)?;
            }
            if events.is_empty() || !pace.database.is_zero() {
                (0..self.connections.len()).try_for_each(|at| self.start(at, &mut play))?;
            }
            if events.is_empty() {
                interrupt::check()?;
                if last_reply.elapsed() > REPLY_TIMEOUT {
                    return Err(self.failed(format!("no reply within {} s", REPLY_TIMEOUT.as_secs())));
                }
            } else {
                last_reply = Instant::now();
            }
        }
        Ok((play.counts, began.elapsed()))
    }

    /// Sends the next batch of an idle connection, if the batch is due.
    fn start(&mut self, at: usize, play: &mut Play<'_>) -> Result<(), BenchError> {
        let due = match play.phases[at] {
            Phase::Idle => play.due(),
            Phase::Waiting(until) => until,
            Phase::InFlight(_) | Phase::Done => return Ok(()),
        };
        let now = Instant::now();
        if now < due {
            return Ok(());
        }
        let depth = if play.end.is_some_and(|end| now >= end) { 0 } else { play.pace.depth };
        let now_ms = self.now_ms(now);
        let mut operations = (&mut *play.operations).inspect(|_| play.begun += 1).take(depth);
        let connection = &mut self.connections[at];
        if connection.fill(play.pace.depth, &mut self.items, &mut operations, now_ms) == 0 {
            play.phases[at] = Phase::Done;
            return Ok(());
        }
        play.phases[at] = Phase::InFlight(now);
        self.write(at, false)
    }

    /// Writes the batch of a connection. `is_blocked` is true if the socket was full before.
    fn write(&mut self, at: usize, is_blocked: bool) -> Result<(), BenchError> {
        let is_written = self.connections[at].write().map_err(|reason| self.failed(reason))?;
        if is_written == is_blocked {
            let room = if is_written { epoll::EventFlags::empty() } else { epoll::EventFlags::OUT };
            let data = epoll::EventData::new_u64(at as u64);
            let stream = self.connections[at].stream();
            epoll::modify(&self.epoll, stream, data, epoll::EventFlags::IN | room)
                .map_err(|error| self.failed(error.to_string()))?;
        }
        Ok(())
    }

    /// Serves an event of a connection.
    fn progress(
        &mut self,
        at: usize,
        events: epoll::EventFlags,
        play: &mut Play<'_>,
    ) -> Result<(), BenchError> {
        if events.contains(epoll::EventFlags::OUT) {
            self.write(at, true)?;
        }
        let now = Instant::now();
        let now_ms = self.now_ms(now);
        let connection = &mut self.connections[at];
        let sets_missed = play.pace.sets_missed;
        let is_complete =
            connection.read(&mut self.items, sets_missed, now_ms).map_err(|reason| self.failed(reason))?;
        if !is_complete {
            return Ok(());
        }
        let (counts, ended) = (self.connections[at].counts(), Instant::now());
        play.counts.add(counts);
        if let Phase::InFlight(sent) = play.phases[at] {
            (play.on_answer)(Answered { connection: at, sent, ended, counts });
        }
        let asks_database = counts.misses > 0 && !play.pace.database.is_zero();
        play.phases[at] =
            if asks_database { Phase::Waiting(ended + play.pace.database) } else { Phase::Idle };
        self.start(at, play)
    }

    fn now_ms(&self, now: Instant) -> u32 {
        u32::try_from(now.saturating_duration_since(self.began).as_millis()).unwrap_or(u32::MAX)
    }

    fn failed(&self, reason: String) -> BenchError {
        BenchError::Server { program: self.server.into(), reason }
    }
}

impl Play<'_> {
    /// Time to sleep if there is no reply.
    fn timeout(&self) -> Timespec {
        if !self.pace.sleeps {
            return NO_WAIT;
        }
        let due = self.phases.iter().filter_map(|phase| match phase {
            Phase::Waiting(until) => Some(until),
            _ => None,
        });
        let left = due.min().map_or(SLEEP_MAX, |due| due.saturating_duration_since(Instant::now()));
        Timespec::try_from(left.min(SLEEP_MAX)).expect("a part of a second")
    }

    /// When the next batch is due.
    fn due(&self) -> Instant {
        match self.pace.operations_per_s {
            Some(rate) => self.began + Duration::from_secs_f64(float(self.begun) / f64::from(rate)),
            None => self.began,
        }
    }
}
