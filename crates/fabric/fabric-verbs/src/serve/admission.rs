//! Authenticates initiators, and begins or resumes their sessions.

use std::sync::Arc;

use super::VerbsServer;
use crate::answered::{AnsweredMessages, VerbsPeer};
use crate::session::{SessionPhase, authenticate};
use crate::target::{VerbsShared, VerbsTargetState};
use aquifer_fabric::handshake::RefusalReason;
use aquifer_fabric::handshake::hello::{self, Hello, Reply, Welcome};
use aquifer_fabric::handshake::ticket::{Ticket, check_ticket};
use aquifer_fabric::target::Identity;

impl VerbsServer {
    /// Handles a received message.
    pub(super) fn handle_message(&mut self, shared: &VerbsShared, connection_id: usize, message: &[u8]) {
        let Some(session) = self.sessions.get_mut(&connection_id) else { return };
        match &mut session.phase {
            SessionPhase::Authenticating(deadline) => {
                let deadline = *deadline;
                let (outcome, answer) = authenticate(message, &shared.key, shared.options.admission);
                session.phase = match outcome {
                    Ok((cipher, ticket)) => SessionPhase::AwaitingHello(cipher, ticket, deadline),
                    Err(error) => {
                        tracing::info!(%error, "an endpoint was refused");
                        SessionPhase::Refused(deadline)
                    }
                };
                self.send_message(shared, connection_id, answer);
            }
            SessionPhase::AwaitingHello(cipher, ticket, _) => {
                let ticket = *ticket;
                let mut plain = Vec::new();
                let opened = cipher.decrypt(message, &mut plain).map_err(|error| error.to_string());
                match opened.and_then(|_| hello::parse_hello(&plain).map_err(|error| error.to_string())) {
                    Ok(hello) => self.handle_hello(shared, connection_id, &hello, ticket),
                    Err(error) => {
                        tracing::info!(error, "an endpoint was refused");
                        self.close(connection_id);
                    }
                }
            }
            SessionPhase::Open(peer) => {
                let peer = Arc::clone(peer);
                self.handle_request(shared, connection_id, &peer, message);
            }
            SessionPhase::Refused(_) => {}
        }
    }

    fn handle_hello(
        &mut self,
        shared: &VerbsShared,
        connection_id: usize,
        hello: &Hello,
        ticket: Option<Ticket>,
    ) {
        let clock = &shared.options.clock;
        let checked = ticket.map_or(Ok(()), |ticket| check_ticket(&ticket, hello.who, clock));
        let admitted = checked.and_then(|()| self.admit(shared, hello));
        let reply = match &admitted {
            Ok(peer) => Reply::Welcome(Welcome {
                session: peer.id,
                done: 0,
                encrypt: false,
                limits: shared.options.limits,
                regions: shared.lock().tables.visible_regions(hello.who),
            }),
            Err(reason) => Reply::Refusal(reason.to_refusal()),
        };
        let Some(session) = self.sessions.get_mut(&connection_id) else { return };
        let SessionPhase::AwaitingHello(cipher, _, deadline) = &mut session.phase else { return };
        let mut sealed = Vec::new();
        cipher.encrypt(&hello::encode_reply(&reply), &mut sealed);
        session.phase = match admitted {
            Ok(peer) => SessionPhase::Open(peer),
            Err(reason) => {
                tracing::info!(%reason, "an endpoint was refused");
                SessionPhase::Refused(*deadline)
            }
        };
        self.send_message(shared, connection_id, sealed);
    }

    /// Begins or resumes a session.
    fn admit(&mut self, shared: &VerbsShared, hello: &Hello) -> Result<Arc<VerbsPeer>, RefusalReason> {
        let who = hello.who;
        if let Some(epoch) = who.epoch.checked_sub(1)
            && shared.lock().tables.refusal(who).is_none()
        {
            // Operations in flight of an earlier epoch of this host must not take effect later.
            shared.lock().tables.fence(who.host, epoch);
            self.fence(shared, who.host, epoch);
        }
        if let Some(reason) = shared.lock().tables.refusal(who) {
            return Err(reason);
        }
        let Some(resume) = hello.resume else { return self.begin(&mut shared.lock(), who) };
        let matches = |peer: &VerbsPeer| peer.id == resume.session && peer.who == who;
        let open = self.sessions.iter().find(|(_, session)| session.peer().is_some_and(|peer| matches(peer)));
        if let Some(connection_id) = open.map(|(connection_id, _)| *connection_id) {
            // The target has not yet detected that the old connection is broken.
            self.close(connection_id);
        }
        let at = self.parked.iter().position(|(peer, _)| matches(peer));
        let at = at.ok_or(RefusalReason::UnknownSession)?;
        let (peer, _) = self.parked.remove(at);
        if peer.mailbox.resume(resume.received, resume.taken) {
            Ok(peer)
        } else {
            shared.lock().release(&peer);
            Err(RefusalReason::ResumePosition)
        }
    }

    fn begin(
        &mut self,
        state: &mut VerbsTargetState,
        who: Identity,
    ) -> Result<Arc<VerbsPeer>, RefusalReason> {
        if !state.peers.has_room() && !self.parked.is_empty() {
            // Replaces the session that was parked first: it may never be resumed.
            let (oldest, _) = self.parked.remove(0);
            state.release(&oldest);
        }
        state.peers.begin(who, |_| AnsweredMessages::default())
    }
}
