//! The gateway: processes between a daemon and the users of its machine.
//!
//! A packet at a Unix socket can carry descriptors, and the last close of a descriptor can wait for
//! as long as the sender wants: of a TCP socket with `SO_LINGER`, for example, or of a file in
//! FUSE. Packets that were not received are closed with their socket. So a process that others need
//! must have no socket that a user can send descriptors to, and no listener either.
//!
//! - [`serve`]: the gateway process. It accepts connections, and passes each to the relay of its
//!   user.
//! - `relay`: the process of one user. It receives the first packet of each connection, checks the
//!   descriptors in it, and introduces the connection to the daemon.
//! - [`Gateway`]: the daemon's end. It starts the gateway process, and receives the introductions.
//! - `pair`: a connection whose packets a relay copies.
//! - [`start_child`]: starts relays, and processes that close refused connections.
//! - [`RefusedConnections`]: connections that wait for such a process.
//! - `user_socket`: receives from a user's socket and closes it.
//! - `messages`: the messages between these processes.
//!
//! Where the kernel has `SO_PASSRIGHTS`, a relay switches it off after the first packet, and the
//! daemon gets the socket itself. Elsewhere the daemon gets one end of a pair of sockets, and the
//! relay copies packets between that and the user's socket as long as the connection lasts.

mod child;
mod closers;
mod daemon;
mod messages;
mod pair;
mod relay;
mod server;
mod user_socket;

pub use child::start as start_child;
pub use closers::RefusedConnections;
pub use daemon::{Gateway, Introduction, UserChannel};
pub use messages::ListenerKind;
pub use server::serve;
