//! Serves other servers and operators, and connects workers with other servers.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use aquifer_cache::server::WorkerHandle;
use aquifer_cache::server::peers::{Connector, PeerSocket};
use parking_lot::Mutex;

use crate::channel::{Accepted, Channel, IDLE_TIME, accept, connect_for_requests};
use crate::lease::ServingDeadline;
use crate::member::Member;
use crate::wire::{Answer, Ask};

/// Connections that may be in their handshake or ask questions at a time.
const CONNECTIONS_MAX: usize = 256;
/// Pause before a worker is told that a server cannot be reached, so that it does not try at once.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// Pause after a failure to accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// Connects workers with other servers, for the server that [`Self::set_member`] says.
#[derive(Debug)]
pub struct PeerConnector {
    member: OnceLock<Weak<Member>>,
    serving_deadline: Arc<ServingDeadline>,
    /// Names of threads have the number of the connection.
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
            tracing::warn!(%error, "no thread connects with another server");
            worker.deal_link(server, None);
        }
    }

    fn may_serve(&self) -> bool {
        self.serving_deadline.is_ahead()
    }
}

fn connect_to(member: &Member, server: u16) -> Option<PeerSocket> {
    // Others may say that this server has a partition that it has claimed without knowing it.
    let record = member.server_record(server).filter(|record| record.life() != member.life())?;
    connect_for_requests(record.address, member.channels.access())
        .inspect_err(|error| tracing::debug!(%error, server, "a server cannot be reached"))
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
                tracing::debug!(%error, "a connection of another server has ended");
            }
            counted.fetch_sub(1, Ordering::AcqRel);
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, "no thread serves another server");
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
    channel.set_patience(IDLE_TIME)?;
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
            && (handover.partition >= self.seats.len() || here != own)
        {
            return Answer::Declined("it is for another server, or for an earlier one".to_owned());
        }
        match ask {
            Ask::Prepare { handover, offer } => self.begin_receiving(handover, offer),
            Ask::Extent(handover) => self.extent(handover),
            Ask::Rest(handover) => self.rest(handover),
            Ask::Give(handover) => self.give_now(handover),
            Ask::Received(handover) => self.note_received(handover),
            Ask::GiveUp(handover, why) => self.note_given_up(handover, why),
            Ask::Query(handover) => self.query(handover),
            Ask::Status => Answer::Status(Box::new(self.status())),
            Ask::Move { partition, .. } if partition >= self.seats.len() => {
                Answer::Declined(format!("there is no partition {partition}"))
            }
            Ask::Move { partition, to } => match self.give(partition, to) {
                Ok(()) => Answer::Done,
                Err(why) => Answer::Declined(why),
            },
            Ask::Drain { drains } => match self.set_drains(drains) {
                Ok(()) => Answer::Done,
                Err(error) => Answer::Declined(error.to_string()),
            },
            Ask::Balance => Answer::Moves(self.balance_now()),
        }
    }
}
