//! Connections between servers: accepts those of servers and operators, and connects workers to
//! other servers.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use aquifer_cache::server::WorkerHandle;
use aquifer_cache::server::peers::{Connector, PeerSocket};
use parking_lot::Mutex;

use crate::channel::{Accepted, Channel, IDLE_TIMEOUT, accept, connect_for_requests};
use crate::lease::ServingDeadline;
use crate::member::Member;
use crate::wire::{Answer, Ask};

/// Largest number of connections that are in their handshake, or whose requests a thread answers.
/// Further ones are closed.
const CONNECTIONS_MAX: usize = 256;
/// Time by which a failed connection is reported to its worker later, so that the worker does not
/// retry at once.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// Pause after a failure to accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// Connects workers to other servers, on behalf of the member of [`Self::set_member`].
#[derive(Debug)]
pub struct PeerConnector {
    member: OnceLock<Weak<Member>>,
    serving_deadline: Arc<ServingDeadline>,
    /// Connections so far, for the names of threads.
    count: Mutex<u64>,
}

impl PeerConnector {
    pub(crate) fn new(serving_deadline: Arc<ServingDeadline>) -> Self {
        Self { member: OnceLock::new(), serving_deadline, count: Mutex::new(0) }
    }

    pub(crate) fn set_member(&self, member: &Arc<Member>) {
        let _first = self.member.set(Arc::downgrade(member));
    }
}

impl Connector for PeerConnector {
    fn connect(&self, server: u16, worker: Arc<WorkerHandle>) {
        let member = self.member.get().and_then(Weak::upgrade);
        let count = {
            let mut count = self.count.lock();
            *count += 1;
            *count
        };
        let for_thread = Arc::clone(&worker);
        let spawned = std::thread::Builder::new().name(format!("cache-link-{count}")).spawn(move || {
            let socket = member.and_then(|member| connect_to(&member, server));
            if socket.is_none() {
                std::thread::sleep(RETRY_PAUSE);
            }
            for_thread.deal_link(server, socket);
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, server, "cannot start a thread that connects to a server");
            worker.deal_link(server, None);
        }
    }

    fn may_serve(&self) -> bool {
        self.serving_deadline.is_ahead()
    }
}

fn connect_to(member: &Member, server: u16) -> Option<PeerSocket> {
    // No connection to itself: a peer may name this server as the owner of a partition that it has
    // claimed in a transaction whose answer is not here yet.
    let record = member.server_record(server).filter(|record| record.life() != member.life())?;
    connect_for_requests(record.address, member.channels.access())
        .inspect_err(|error| tracing::debug!(%error, server, "cannot connect to a server"))
        .ok()
}

/// Accepts connections of other servers and of operators, until the server stops.
pub(crate) fn serve(member: &Arc<Member>, listener: &TcpListener) {
    let open = Arc::new(AtomicUsize::new(0));
    let mut next_worker = 0;
    for stream in listener.incoming() {
        if member.stops.load(Ordering::Acquire) {
            return;
        }
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection of another server");
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            }
        };
        if open.fetch_add(1, Ordering::AcqRel) >= CONNECTIONS_MAX {
            open.fetch_sub(1, Ordering::AcqRel);
            continue;
        }
        next_worker += 1;
        let (for_thread, counted) = (Arc::clone(member), Arc::clone(&open));
        let spawned = std::thread::Builder::new().name("cache-peer".into()).spawn(move || {
            if let Err(error) = serve_one(&for_thread, stream, next_worker) {
                tracing::debug!(%error, "a connection of a server or operator has ended");
            }
            counted.fetch_sub(1, Ordering::AcqRel);
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, "cannot start a thread that serves a connection of a server");
            open.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn serve_one(member: &Arc<Member>, stream: TcpStream, number: usize) -> io::Result<()> {
    match accept(stream, member.channels.access())? {
        Accepted::Requests(socket) => {
            let workers = member.server().workers();
            workers[number % workers.len()].deal_peer(socket);
            Ok(())
        }
        Accepted::Questions(channel) => answer_questions(member, channel),
    }
}

fn answer_questions(member: &Arc<Member>, mut channel: Channel) -> io::Result<()> {
    channel.set_timeout(IDLE_TIMEOUT)?;
    while !member.stops.load(Ordering::Acquire) {
        let ask = channel.receive()?;
        let answer = member.answer(ask);
        channel.send(&answer)?;
    }
    Ok(())
}

impl Member {
    fn answer(self: &Arc<Self>, ask: Ask) -> Answer {
        let own = self.life();
        let handover = match &ask {
            Ask::Prepare { handover, .. } | Ask::Query(handover) => Some((handover, handover.to)),
            Ask::Extent(handover)
            | Ask::Rest(handover)
            | Ask::Give(handover)
            | Ask::Received(handover)
            | Ask::GiveUp(handover, _) => Some((handover, handover.from)),
            Ask::Move { .. } | Ask::Status | Ask::Drain { .. } | Ask::Balance => None,
        };
        if let Some((handover, here)) = handover
            && (handover.partition >= self.slots.len() || here != own)
        {
            return Answer::Declined("the request is for another server or for an ended lease".to_owned());
        }
        match ask {
            Ask::Prepare { handover, offer } => self.accept_handover(handover, offer),
            Ask::Extent(handover) => self.extent(handover),
            Ask::Rest(handover) => self.pause(handover),
            Ask::Give(handover) => self.transfer(handover),
            Ask::Received(handover) => self.note_received(handover),
            Ask::GiveUp(handover, reason) => self.note_abort(handover, reason),
            Ask::Query(handover) => self.query(handover),
            Ask::Status => Answer::Status(Box::new(self.status())),
            Ask::Move { partition, .. } if partition >= self.slots.len() => {
                Answer::Declined(format!("the cache has no partition {partition}"))
            }
            Ask::Move { partition, to } => match self.run_handover(partition, to) {
                Ok(()) => Answer::Done,
                Err(reason) => Answer::Declined(reason),
            },
            Ask::Drain { drains } => match self.set_drains(drains) {
                Ok(()) => Answer::Done,
                Err(error) => Answer::Declined(error.to_string()),
            },
            Ask::Balance => Answer::Moves(self.balance_now()),
        }
    }
}
