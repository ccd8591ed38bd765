//! How both ends of a connection over a network prove that they have the cluster's key, and what they tell each other first.
//! What the messages have in common with those of shared memory is in `common`.
//!
//! `docs/formats/fabric-tcp.md` has the bytes.

pub(crate) mod common;
#[cfg(test)]
mod golden_tests;
pub mod hello;
pub mod secure;

pub use secure::ClusterKey;

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::time::Duration;

use self::hello::{Hello, Reply, Welcome};
use self::secure::{SecureChannel, SecureError, initiate};
use crate::work::EndpointError;

/// A connection that has not said and proved who it is by then is closed.
pub const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// Connections that have not yet said and proved who they are, at most; more wait in the socket's backlog.
pub const PENDING_LIMIT: usize = 64;
/// A target keeps the session of a broken connection for so long.
pub const LINGER_TIME: Duration = Duration::from_secs(5);

/// What a target says that ends.
pub(crate) const GOING_AWAY: &str = "the target is going away";
/// What a target says whose end of the broken connection is still open.
pub(crate) const TRY_AGAIN: &str = "try again: the old connection is being closed";

/// Proves over `stream` to the target at `address` that this initiator has the cluster's key, says hello, and hears what is granted.
///
/// # Errors
/// If the target refuses, does not have the key, or does not speak this protocol; or what the stream says.
pub fn initiate_session<S: Read + Write>(
    stream: S,
    address: SocketAddr,
    key: &ClusterKey,
    hello: &Hello,
) -> Result<(SecureChannel<S>, Welcome), EndpointError> {
    let address = address.to_string();
    let exchange = || {
        let mut secured = initiate(stream, key)?;
        secured.send(&hello::encode_hello(hello))?;
        let heard = secured.receive()?;
        Ok((secured, heard))
    };
    let (secured, heard) = match exchange() {
        Ok(heard) => heard,
        Err(SecureError::System(source)) => return Err(EndpointError::Unreachable { address, source }),
        Err(SecureError::WrongKey) => {
            let reason = "the cluster keys differ: give both ends the same --key file".into();
            return Err(EndpointError::Refused { address, reason });
        }
        Err(other) => return Err(EndpointError::Protocol { address, reason: other.to_string() }),
    };
    match hello::parse_reply(&heard) {
        Ok(Reply::Welcome(welcome)) => Ok((secured, welcome)),
        Ok(Reply::Refusal(reason)) => Err(EndpointError::Refused { address, reason }),
        Err(error) => Err(EndpointError::Protocol { address, reason: error.to_string() }),
    }
}
