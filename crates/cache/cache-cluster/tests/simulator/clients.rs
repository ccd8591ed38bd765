//! Clients that check replies against the versions that they have stored.

use std::collections::BTreeMap;

use aquifer_ownership::Life;

use crate::server::{Operation, Request};
use crate::world::{PARTITIONS, Random, World};

const CLIENTS: usize = 4;
const KEYS: usize = 8;

/// The versions of a key that a client may read.
#[derive(Clone, Debug, Default)]
struct Known {
    /// The last version that was certainly stored, and the losses of its partition when the request
    /// began.
    stored: Option<(u64, u64)>,
    /// Later versions that may have been stored.
    perhaps: Vec<u64>,
}

#[derive(Debug, Default)]
struct Client {
    /// The request in flight, and the server that it was sent to.
    asked: Option<(Request, Life)>,
    known: BTreeMap<usize, Known>,
}

#[derive(Debug)]
pub struct Clients {
    clients: Vec<Client>,
    last_version: u64,
    /// Whether no request begins any more.
    pub is_ending: bool,
}

impl Clients {
    pub fn new() -> Self {
        let clients = (0..CLIENTS).map(|_| Client::default()).collect();
        Self { clients, last_version: 0, is_ending: false }
    }

    pub fn are_idle(&self) -> bool {
        self.clients.iter().all(|client| client.asked.is_none())
    }

    /// Ends the requests of a server's clients: their outcome is unknown.
    pub fn disconnect(&mut self, life: Life) {
        for client in &mut self.clients {
            if let Some((request, _)) = client.asked.take_if(|(_, server)| *server == life) {
                client.note_unknown(request);
            }
        }
    }

    /// Ends a request without a reply, if the client of a random number has one.
    pub fn expire_one(&mut self, random: &mut Random) -> Option<Request> {
        let client = &mut self.clients[random.below(CLIENTS)];
        let (request, _) = client.asked.take()?;
        client.note_unknown(request);
        Some(request)
    }

    /// Ends a request whose outcome is unknown.
    pub fn unknown(&mut self, request: Request) {
        let client = &mut self.clients[request.client];
        if client.asked.take_if(|(asked, _)| asked.number == request.number).is_some() {
            client.note_unknown(request);
        }
    }
}

impl Client {
    fn note_unknown(&mut self, request: Request) {
        if let Operation::Set(version) = request.operation {
            self.known.entry(request.key).or_default().perhaps.push(version);
        }
    }
}

impl World {
    /// Sends a request of a random client to a server, unless the client waits for a reply.
    pub fn ask_something(&mut self, at: usize) {
        let client = self.random.below(CLIENTS);
        if self.clients.is_ending || self.clients.clients[client].asked.is_some() {
            return;
        }
        let key = client * KEYS + self.random.below(KEYS);
        self.clients.last_version += 1;
        let version = self.clients.last_version;
        let operation = if self.random.one_in(2) { Operation::Get } else { Operation::Set(version) };
        let partition = key % PARTITIONS;
        let request = Request {
            client,
            number: version,
            key,
            operation,
            forwards: 0,
            is_calm: self.is_calm,
            changes: self.changes[partition],
            losses: self.losses[partition],
        };
        self.clients.clients[client].asked = Some((request, self.servers[at].life));
        self.serve(at, request, None);
    }

    /// Delivers the reply to a client, and checks it.
    pub fn done(&mut self, request: Request, found: Option<u64>) {
        let client = &mut self.clients.clients[request.client];
        if client.asked.take_if(|(asked, _)| asked.number == request.number).is_none() {
            return;
        }
        let losses = self.losses[request.partition()];
        let known = client.known.entry(request.key).or_default();
        let before = known.clone();
        let is_right = match (request.operation, found) {
            (Operation::Set(version), _) => {
                *known = Known { stored: Some((version, request.losses)), perhaps: Vec::new() };
                true
            }
            (Operation::Get, Some(version)) => {
                let is_stored = known.stored.is_some_and(|(stored, _)| stored == version);
                let is_known = is_stored || known.perhaps.contains(&version);
                // Later versions were not stored.
                known.perhaps.clear();
                let since = known.stored.filter(|_| is_stored).map_or(request.losses, |(_, since)| since);
                known.stored = Some((version, since));
                self.totals.hits += 1;
                is_known
            }
            (Operation::Get, None) => {
                let is_lost = known.stored.is_none_or(|(_, since)| losses > since);
                *known = Known::default();
                is_lost
            }
        };
        if !is_right {
            self.fail(format!("{request:?} has found {found:?}, but {before:?}, losses {losses}"));
        }
    }
}
