//! A stranger that waits where an agent is expected.

use std::path::Path;

use aquifer_channel::receive_frame;
use aquifer_channel::socket::{accept, listen_at};

/// Listens at the path in the second argument for all users, reports it on standard output, and
/// returns whether the first client sends nothing.
pub fn listen() -> bool {
    let path = std::env::args().nth(2).expect("a path");
    let listener = listen_at(Path::new(&path), 0o666).expect("the folder is the attacker's");
    println!("listening");
    let (socket, _) = accept(&listener).expect("a connection");
    receive_frame(&socket).is_err()
}
