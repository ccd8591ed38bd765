//! The handshake of connections over a network: both ends prove that they hold the cluster key, or
//! the secret of a ticket, then exchange hello and welcome. `common` has the parts that these
//! messages and those of shared memory have in common.
//!
//! The format is in `docs/formats/fabric-tcp.md`.

pub(crate) mod common;
#[cfg(test)]
mod golden_tests;
pub mod hello;
pub mod refusal;
pub mod secure;
pub mod ticket;

pub use refusal::{Refusal, RefusalCode, RefusalReason};
pub use ticket::{Admission, Credential, Ticket, TicketSecret, UnixClock};

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::time::Duration;

pub use aquifer_secure_channel::ClusterKey;
use aquifer_secure_channel::{SecureChannel, SecureError};

use self::hello::{Hello, Reply, Welcome};
use self::secure::initiate_by;
use crate::work::EndpointError;

/// Longest time of a handshake. A connection whose handshake takes longer is closed.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Bound of the connections with an unfinished handshake. Over shared memory, more wait in the
/// socket's backlog; over TCP, the oldest one is ended.
pub const PENDING_LIMIT: usize = 64;
/// The time for which a target keeps the session of a broken connection.
pub const PARKED_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs the initiator's handshake over `stream`: proves the credential, sends the hello and
/// receives the welcome.
///
/// # Errors
/// If the target refuses, does not hold the key, or does not speak this protocol; or if the stream
/// fails.
pub fn initiate_session<S: Read + Write>(
    stream: S,
    address: SocketAddr,
    credential: &Credential,
    hello: &Hello,
) -> Result<(SecureChannel<S>, Welcome), EndpointError> {
    let address = address.to_string();
    let exchange = || {
        let mut secured = initiate_by(stream, credential)?;
        secured.send(&hello::encode_hello(hello))?;
        let received = secured.receive()?;
        Ok((secured, received))
    };
    let (secured, received) = match exchange() {
        Ok(received) => received,
        Err(SecureError::System(source)) => return Err(EndpointError::Unreachable { address, source }),
        Err(SecureError::WrongKey) => {
            let reason = match credential {
                Credential::Member(_) => "the cluster keys differ: give both ends the same --key file",
                Credential::Ticket(..) => "the ticket is not accepted: it is of another cluster or service",
            };
            let reason = reason.into();
            let refusal = Refusal { code: RefusalCode::WrongKey, reason };
            return Err(EndpointError::Refused { address, refusal });
        }
        Err(other) => return Err(EndpointError::Protocol { address, reason: other.to_string() }),
    };
    match hello::parse_reply(&received) {
        Ok(Reply::Welcome(welcome)) => Ok((secured, welcome)),
        Ok(Reply::Refusal(refusal)) => Err(EndpointError::Refused { address, refusal }),
        Err(error) => Err(EndpointError::Protocol { address, reason: error.to_string() }),
    }
}
