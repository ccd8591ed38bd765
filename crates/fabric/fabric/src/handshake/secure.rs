//! The handshake of a connection: both ends prove that they hold the cluster key, or the secret of
//! a ticket.

use std::io::{Read, Write};

use aquifer_secure_channel::{ClusterKey, Presented, SecureChannel, SecureError};

use super::ticket::{Admission, Credential, KIND_MEMBER, KIND_TICKET, TICKET_BYTES, Ticket};

/// Runs the initiator's part of the handshake as a member of the cluster.
///
/// # Errors
/// If the connection fails or the peer cannot prove that it holds the key.
pub fn initiate<S: Read + Write>(stream: S, key: &ClusterKey) -> Result<SecureChannel<S>, SecureError> {
    initiate_by(stream, &Credential::Member(key.clone()))
}

/// Runs the initiator's part of the handshake.
///
/// # Errors
/// If the connection fails, or the peer does not admit the credential or cannot derive its secret.
pub fn initiate_by<S: Read + Write>(
    stream: S,
    credential: &Credential,
) -> Result<SecureChannel<S>, SecureError> {
    aquifer_secure_channel::initiate(stream, &credential.presented(), credential.psk())
}

/// Runs the target's part of the handshake with a member of the cluster.
///
/// # Errors
/// If the connection fails or the peer cannot prove that it holds the key. A peer of another
/// version has then received this version's preamble, and a peer with a wrong key an empty answer.
pub fn respond<S: Read + Write>(stream: S, key: &ClusterKey) -> Result<SecureChannel<S>, SecureError> {
    respond_to(stream, key, Admission::Members).map(|(channel, _)| channel)
}

/// Runs the target's part of the handshake. Also returns the ticket of a peer that has one. Whether
/// the ticket has expired is not checked.
///
/// # Errors
/// The errors of [`respond`]. A peer that is not admitted receives the answer to a wrong key.
pub fn respond_to<S: Read + Write>(
    stream: S,
    key: &ClusterKey,
    admission: Admission,
) -> Result<(SecureChannel<S>, Option<Ticket>), SecureError> {
    aquifer_secure_channel::respond(stream, |stream| {
        let credential = read_credential(stream, key)?;
        Ok(credential.filter(|credential| admits(admission, credential)).map(|credential| Presented {
            bytes: credential.presented(),
            secret: *credential.psk(),
            meaning: credential.ticket(),
        }))
    })
}

fn admits(admission: Admission, credential: &Credential) -> bool {
    match credential {
        Credential::Member(_) => admission.has_members(),
        Credential::Ticket(ticket, _) => admission.has_service(ticket.service),
    }
}

/// Reads a peer's credential, and derives its secret; `None` if a ticket is invalid.
fn read_credential(stream: &mut impl Read, key: &ClusterKey) -> Result<Option<Credential>, SecureError> {
    let mut kind = [0];
    stream.read_exact(&mut kind)?;
    match kind[0] {
        KIND_MEMBER => Ok(Some(Credential::Member(key.clone()))),
        KIND_TICKET => {
            let mut bytes = [0; TICKET_BYTES];
            stream.read_exact(&mut bytes)?;
            Ok(Ticket::parse(&bytes).map(|ticket| Credential::Ticket(ticket, ticket.secret(key))))
        }
        kind => Err(SecureError::Credential(kind)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use aquifer_mutation::Mutations;

    use super::super::ticket::TicketSecret;
    use super::*;
    use crate::mutation::Mutation;
    use crate::target::{Host, Tenant};

    const TICKET: Ticket =
        Ticket { tenant: Tenant(70), host: Host(7), epoch: 5, expiry_s: 1_800_000_000, service: 3 };
    const TARGET_KEY: ClusterKey = ClusterKey([1; 32]);

    /// The ticket that a target with this admission finds.
    fn admitted(credential: &Credential, admission: Admission) -> Result<Option<Ticket>, SecureError> {
        let (left, right) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let initiator = scope.spawn(|| initiate_by(left, credential).map(|_| ()));
            let responded = respond_to(right, &TARGET_KEY, admission).map(|(_, ticket)| ticket);
            let initiated = initiator.join().unwrap();
            assert_eq!(initiated.is_ok(), responded.is_ok(), "both ends agree");
            responded
        })
    }

    #[test]
    fn a_ticket_is_admitted_for_its_service_only() {
        let ticket = Credential::Ticket(TICKET, TICKET.secret(&TARGET_KEY));
        let member = Credential::Member(TARGET_KEY.clone());
        for (admission, has_members, has_ticket) in [
            (Admission::Members, true, false),
            (Admission::Tickets(3), false, true),
            (Admission::MembersAndTickets(3), true, true),
            (Admission::Tickets(4), false, false),
            (Admission::MembersAndTickets(4), true, false),
        ] {
            assert_eq!(admitted(&member, admission).is_ok_and(|found| found.is_none()), has_members);
            assert_eq!(admitted(&ticket, admission).is_ok_and(|found| found == Some(TICKET)), has_ticket);
        }
        Mutation::AcceptAnyService.while_active(|| {
            assert!(admitted(&ticket, Admission::Tickets(4)).is_ok(), "the mutation is detected");
        });
    }

    #[test]
    fn altered_and_foreign_tickets_are_refused() {
        let secret = TICKET.secret(&TARGET_KEY);
        let both = Admission::MembersAndTickets(3);
        let altered = [
            Ticket { tenant: Tenant(0), ..TICKET },
            Ticket { host: Host(8), ..TICKET },
            Ticket { epoch: 6, ..TICKET },
            Ticket { expiry_s: u64::MAX, ..TICKET },
        ];
        for ticket in altered {
            let outcome = admitted(&Credential::Ticket(ticket, secret.clone()), both);
            assert!(matches!(outcome, Err(SecureError::WrongKey)), "{ticket:?}");
        }
        let other_service = Ticket { service: 4, ..TICKET };
        let replayed = admitted(&Credential::Ticket(other_service, secret.clone()), Admission::Tickets(4));
        assert!(matches!(replayed, Err(SecureError::WrongKey)), "the secret is that of another service");
        let foreign = TICKET.secret(&ClusterKey([2; 32]));
        assert!(admitted(&Credential::Ticket(TICKET, foreign), both).is_err());
        let own_key = admitted(&Credential::Ticket(TICKET, TicketSecret(TARGET_KEY.0)), both);
        assert!(matches!(own_key, Err(SecureError::WrongKey)), "the cluster's key proves no ticket");
        let as_member = admitted(&Credential::Member(ClusterKey(secret.0)), both);
        assert!(matches!(as_member, Err(SecureError::WrongKey)), "a ticket does not prove membership");
    }

    #[test]
    fn an_unknown_kind_of_credential_is_named() {
        let (mut left, right) = UnixStream::pair().unwrap();
        left.write_all(b"AQFTCP\x03\0\x02\x05\0abcde").unwrap();
        let refused = respond(right, &TARGET_KEY).unwrap_err();
        assert!(matches!(refused, SecureError::Credential(2)), "{refused}");
    }
}
